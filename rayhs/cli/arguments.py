"""Arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rayhs.config import StorageConfig

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.", show_default=False)]
Override = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key: --set engine.dtype=float32.")
]
Uri = Annotated[str, typer.Argument(metavar="URI", help="A folder or s3://bucket/prefix.", show_default=False)]
Into = Annotated[str | None, typer.Option(metavar="URI", help="Another place than the run file's output.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
Endpoint = Annotated[str | None, typer.Option(help="S3 endpoint URL, for servers other than AWS.")]
Region = Annotated[str | None, typer.Option(help="S3 region.")]
Profile = Annotated[str | None, typer.Option(help="Profile in the AWS configuration files.")]


def open_uri(uri: str, endpoint: str | None, region: str | None, profile: str | None) -> Any:
    """The store at ``uri``."""
    from rayhs.store import open_store

    return open_store(uri, StorageConfig(endpoint=endpoint, region=region, profile=profile))
