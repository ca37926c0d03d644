"""Where an S3 bucket is and how to sign for it, from the run file and the usual AWS places.

botocore does the looking up, so that variables, profiles, ``endpoint_url`` of a profile, web
identities and instance roles mean here what they mean to the AWS command line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rayhs.config import StorageConfig
from rayhs.errors import ConfigError, StoreError, one_line

if TYPE_CHECKING:
    from obstore.store import S3Credential

# Temporary credentials are fetched again this often; botocore renews them when they near their end.
CREDENTIAL_LIFE = timedelta(minutes=5)
_DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True)
class S3Settings:
    """Resolved settings of one S3 service; ``endpoint`` is None for AWS itself."""

    endpoint: str | None
    region: str
    path_style: bool
    ca_bundle: bytes | None = field(repr=False)
    credentials: Callable[[], S3Credential] = field(repr=False)


def resolve_s3(storage: StorageConfig) -> S3Settings:
    """Look up endpoint, region, addressing and credentials; no S3 request is made.

    Raises:
        ConfigError: an unknown profile, a malformed AWS file, endpoint or CA bundle.
        StoreError: no credentials anywhere, or they could not be fetched from where they should be.
    """
    with _botocore_errors():
        session = _session(storage)
        region = storage.region or os.environ.get("AWS_REGION") or session.get_config_variable("region")
        region = region or _DEFAULT_REGION
        client = session.create_client("s3", region_name=region, endpoint_url=storage.endpoint)
        credentials = session.get_credentials()
    if credentials is None:
        raise StoreError("S3: no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile")
    endpoint = _custom_endpoint(client.meta.endpoint_url)
    style = (client.meta.config.s3 or {}).get("addressing_style")
    return S3Settings(
        endpoint=endpoint,
        region=region,
        path_style=_path_style(storage, endpoint, style),
        ca_bundle=_ca_bundle(session),
        credentials=_Provider(credentials),
    )


def control_client(storage: StorageConfig) -> Any:
    """botocore's own client with the same settings, for the few requests that obstore can't make."""
    from botocore.config import Config

    settings = resolve_s3(storage)
    style = "path" if settings.path_style else "virtual"
    with _botocore_errors():
        config = Config(s3={"addressing_style": style}, retries={"mode": "standard", "max_attempts": 6})
        return _session(storage).create_client(
            "s3", region_name=settings.region, endpoint_url=storage.endpoint, config=config
        )


@contextmanager
def _botocore_errors() -> Iterator[None]:
    from botocore import exceptions

    wrong = (
        exceptions.ProfileNotFound,
        exceptions.ConfigNotFound,
        exceptions.ConfigParseError,
        exceptions.InvalidConfigError,
        exceptions.PartialCredentialsError,
        ValueError,  # "Invalid endpoint: <url>"
    )
    try:
        yield
    except wrong as error:
        text = re.sub(r"//[^/@\s]*@", "//", one_line(error))
        raise ConfigError(f"S3 settings: {text}; check the AWS_* variables, ~/.aws and storage") from None
    except exceptions.BotoCoreError as error:
        # Only its kind: the text can repeat what a credential process printed.
        raise StoreError(
            f"S3: the credentials could not be fetched ({type(error).__name__}); log in again or check the profile"
        ) from None


def _session(storage: StorageConfig) -> Any:
    import botocore.session

    return botocore.session.Session(profile=storage.profile)


def _custom_endpoint(url: str) -> str | None:
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query:
        raise ConfigError("S3 endpoint: it holds credentials or a query; give only scheme, host and port")
    host = parts.hostname or ""
    if host.endswith((".amazonaws.com", ".amazonaws.com.cn")) and host.startswith("s3"):
        return None
    return url.rstrip("/")


def _path_style(storage: StorageConfig, endpoint: str | None, style: str | None) -> bool:
    if storage.path_style is not None:
        return storage.path_style
    if style in ("path", "virtual"):
        return style == "path"
    # Few servers other than AWS have a host name for each bucket.
    return endpoint is not None


def _ca_bundle(session: Any) -> bytes | None:
    path = session.get_config_variable("ca_bundle")
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; AWS_CA_BUNDLE must name a readable PEM file") from None


class _Provider:
    """obstore's credential callback over a botocore credentials object, which renews itself."""

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    def __call__(self) -> S3Credential:
        frozen = self._credentials.get_frozen_credentials()
        renewable = hasattr(self._credentials, "refresh_needed")
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + CREDENTIAL_LIFE if renewable else None,
        }
