"""The one door to storage: a local folder or an S3 bucket, behind the same few operations.

Nothing beyond an atomic PUT is assumed of a store: an object is there whole or not at all, and the
last writer of a name wins.
"""

from __future__ import annotations

from pathlib import Path

from rayhs.config import StorageConfig
from rayhs.errors import ConfigError
from rayhs.store.base import Chunk, Entry, Ranges, Store, Unfinished
from rayhs.store.inputs import input_filesystem

__all__ = ["Chunk", "Entry", "Ranges", "Store", "Unfinished", "input_filesystem", "open_store"]


_DEFAULTS = StorageConfig()


def open_store(uri: str, storage: StorageConfig = _DEFAULTS) -> Store:
    """Open the folder or bucket prefix at ``uri``; nothing is read, written or created yet.

    Args:
        uri: a local path, ``file:///absolute/path``, or ``s3://bucket/prefix``.
        storage: S3 settings that override the AWS variables and files; unused for local paths.

    Raises:
        ConfigError: another scheme, a URI without a path or bucket, or one that holds credentials.
    """
    scheme, separator, _ = uri.partition("://")
    if separator and scheme.lower() == "s3":
        from rayhs.store.s3 import S3ObjectStore

        return S3ObjectStore(uri, storage)
    if not separator or scheme.lower() == "file":
        from rayhs.store.local import LocalFolderStore

        return LocalFolderStore(uri)
    raise ConfigError(f"{scheme}://: no such kind of store; give a local path, file:///path or s3://bucket/prefix")


def is_inside(uri: str, folder: str) -> bool:
    """Whether ``uri`` is a place in a local ``folder``, or the folder itself; links are followed."""
    if any(place.lower().startswith("s3://") for place in (uri, folder)):
        return False
    inner, outer = (Path(open_store(place).uri).resolve() for place in (uri, folder))
    return inner.is_relative_to(outer)
