"""Unfinished multipart uploads of a bucket: what killed writers leave, which no listing of objects shows.

By botocore, as obstore can't list them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rayhs.config import StorageConfig
from rayhs.errors import StoreUnavailable
from rayhs.store.base import Unfinished
from rayhs.store.explain import explain_answer
from rayhs.store.settings import S3Settings, control_client, resolve_s3

# Servers without multipart listings say so in one of these ways.
_NONE = {"NoSuchUpload", "NotImplemented", "MethodNotAllowed"}


def unfinished_uploads(bucket: str, prefix: str, storage: StorageConfig) -> Iterator[Unfinished]:
    """Stream the unfinished uploads below ``prefix`` (names relative to it); raises StoreError."""
    folder = f"{prefix}/" if prefix else ""
    settings, client = resolve_s3(storage), control_client(storage)
    with _answers(f"s3://{bucket}/{prefix}", settings):
        for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=folder):
            for upload in page.get("Uploads", ()):
                name = upload["Key"].removeprefix(folder)
                yield Unfinished(name, 0, upload["Initiated"].timestamp(), upload["UploadId"])


def abort_uploads(bucket: str, prefix: str, storage: StorageConfig, uploads: Iterable[Unfinished]) -> None:
    """End them; gone already is fine. Raises StoreError."""
    settings, client = resolve_s3(storage), control_client(storage)
    for upload in uploads:
        key = f"{prefix}/{upload.name}" if prefix else upload.name
        with _answers(f"s3://{bucket}/{key}", settings):
            client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload.handle)


@contextmanager
def _answers(where: str, settings: S3Settings) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        answer: dict[str, Any] = error.response.get("Error", {})
        if answer.get("Code") in _NONE:
            return
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        raise explain_answer(where, settings, status, answer.get("Code"), answer.get("Message")) from None
    except BotoCoreError as error:
        raise StoreUnavailable(f"{where}: {type(error).__name__}; check the endpoint and the network") from None
