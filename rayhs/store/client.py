"""obstore's S3 client: built once a process, refused after a fork, with a bounded retry budget."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from rayhs.config import StorageConfig
from rayhs.errors import ConfigError, StoreError, one_line
from rayhs.store.settings import S3Settings, resolve_s3

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Store

_CONNECT_TIMEOUT = timedelta(seconds=4)
# Time for retries, and for one request (one part or one range). A server that never answered is more
# likely a wrong address than a passing fault, so the first contact gets little of both.
_FIRST_RETRIES, _FIRST_REQUEST = timedelta(seconds=12), timedelta(seconds=18)
_LATER_RETRIES, _LATER_REQUEST = timedelta(minutes=2), timedelta(minutes=2)

_used_by: int | None = None  # the process whose threads run obstore's requests


class ClientCache:
    """The clients of one store: a hasty one until the server has answered, then a patient one."""

    def __init__(self, bucket: str, prefix: str, storage: StorageConfig) -> None:
        self._bucket, self._prefix, self._storage = bucket, prefix, storage
        self.settings: S3Settings | None = None
        self.answered = False
        self._clients: dict[bool, S3Store] = {}
        self._lock = threading.Lock()

    @property
    def retry_seconds(self) -> float:
        """How long obstore tries a request again."""
        return (_LATER_RETRIES if self.answered else _FIRST_RETRIES).total_seconds()

    def get(self) -> S3Store:
        """Raises StoreError in a forked child of a process that used S3; ConfigError for bad settings."""
        _refuse_fork()
        patient = self.answered
        with self._lock:
            if patient not in self._clients:
                self.settings = self.settings or resolve_s3(self._storage)
                self._clients[patient] = _build(self._bucket, self._prefix, self.settings, patient)
            return self._clients[patient]


def _refuse_fork() -> None:
    global _used_by
    if _used_by is None:
        _used_by = os.getpid()
    elif _used_by != os.getpid():
        # The child has the client's state but none of its threads: a request would wait for ever.
        raise StoreError(
            "S3 was used before this process was forked and would hang here; start worker processes with the "
            "'spawn' or 'forkserver' method (for torch: DataLoader(multiprocessing_context='spawn'))"
        )


def _build(bucket: str, prefix: str, settings: S3Settings, patient: bool) -> S3Store:
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    retry: RetryConfig = {
        "max_retries": 30,
        "retry_timeout": _LATER_RETRIES if patient else _FIRST_RETRIES,
        "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=4), "base": 2},
    }
    try:
        return S3Store(
            bucket,
            prefix=prefix or None,
            config=client_config(bucket, settings),
            client_options=_client_options(settings, patient),
            retry_config=retry,
            credential_provider=settings.credentials,
        )
    except (BaseError, ValueError) as error:
        raise ConfigError(f"s3://{bucket}: {one_line(error)}; check endpoint, region and the AWS_* variables") from None


def client_config(bucket: str, settings: S3Settings) -> S3Config:
    """Region, endpoint and addressing for obstore; no keys."""
    config: S3Config = {"region": settings.region, "virtual_hosted_style_request": not settings.path_style}
    if settings.endpoint is None:
        # A dot in the bucket's name does not fit the certificate of its host name.
        config["virtual_hosted_style_request"] = not settings.path_style and "." not in bucket
        return config
    endpoint = settings.endpoint
    if not settings.path_style:
        parts = urlsplit(endpoint)
        endpoint = urlunsplit(parts._replace(netloc=f"{bucket}.{parts.netloc}"))
    # Both, as obstore reads the variables too and would prefer the service's own.
    config["endpoint"] = config["aws_endpoint_url_s3"] = endpoint
    return config


def _client_options(settings: S3Settings, patient: bool) -> ClientConfig:
    options: ClientConfig = {
        "allow_http": (settings.endpoint or "").startswith("http://"),
        "connect_timeout": _CONNECT_TIMEOUT,
        "timeout": _LATER_REQUEST if patient else _FIRST_REQUEST,
    }
    if settings.ca_bundle is not None:
        options["root_certificate"] = settings.ca_bundle
    return options
