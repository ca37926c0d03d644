"""The input side: prompts by any fsspec URL, S3 with the same settings as the output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rayhs.config import StorageConfig
from rayhs.errors import InputError, one_line
from rayhs.store.settings import resolve_s3

if TYPE_CHECKING:
    import fsspec


def input_filesystem(url: str, storage: StorageConfig) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of ``url`` (a local path or any fsspec URL) and the path in it.

    Globs stay in the path. S3 anywhere in a chained URL takes endpoint, region, addressing and
    profile from ``storage`` and the AWS variables and files.

    Raises:
        InputError: an unknown protocol, or one whose package is not installed.
        ConfigError, StoreError: the S3 settings, as for ``open_store``.
    """
    from fsspec.core import url_to_fs

    protocols = {part.partition("://")[0] for part in url.split("::") if "://" in part}
    spoken = protocols & {"s3", "s3a"}
    # By protocol, so that each link of a chained URL (zip://a.jsonl::s3://...) gets its own.
    options = dict.fromkeys(spoken, _s3_options(storage)) if spoken else {}
    try:
        filesystem, path = url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise InputError(f"{url}: {one_line(error)}; give a local path or an fsspec URL") from None
    return filesystem, path


def _s3_options(storage: StorageConfig) -> dict[str, Any]:
    settings = resolve_s3(storage)
    options: dict[str, Any] = {
        "client_kwargs": {"region_name": settings.region},
        "config_kwargs": {"s3": {"addressing_style": "path" if settings.path_style else "virtual"}},
        # A cached listing would hide files that arrived since an earlier run in this process.
        "use_listings_cache": False,
    }
    if settings.endpoint is not None:
        options["client_kwargs"]["endpoint_url"] = settings.endpoint
    if storage.profile is not None:
        options["profile"] = storage.profile
    return options
