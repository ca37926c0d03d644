"""A dataset in the formats that trainers read. One module a consumer; `EXPORTERS` names them.

Each has ``ABOUT``, ``Options``, and ``export(dataset, target, options)``, which writes all files but the manifest and
returns what to note in it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from rayhs.config import StorageConfig
from rayhs.dataset import Dataset
from rayhs.errors import ConfigError
from rayhs.export.options import About, parse_options
from rayhs.export.target import OnProgress, open_target
from rayhs.store import is_inside
from rayhs.versions import installed_versions

EXPORTERS = (
    "automodel",
    "deepspec",
    "huggingface",
    "model-optimizer",
    "sae-lens",
    "specforge",
    "speculators",
    "vllm",
    "webdataset",
)


@dataclass(frozen=True)
class ExportReport:
    """An export that is complete.

    ``samples`` are exported, ``skipped`` had no states; ``files`` and ``nbytes`` are all there is, ``written`` the
    files of this call. ``notes`` are what the exporter wrote into the manifest beside.
    """

    format: str
    uri: str
    samples: int
    skipped: int
    files: int
    nbytes: int
    written: int
    notes: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def about(name: str) -> About:
    """What the exporter needs, writes and converts; raises ConfigError for an unknown name."""
    described: About = _module(name).ABOUT
    return described


def option_defaults(name: str) -> dict[str, Any]:
    """The options of an exporter with their defaults; ``...`` where one must be given."""
    fields = _module(name).Options.model_fields
    return {key: "..." if field.is_required() else field.default for key, field in fields.items()}


def export_dataset(
    dataset: Dataset,
    to: str,
    uri: str,
    *,
    options: Mapping[str, Any] | None = None,
    storage: StorageConfig | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> ExportReport:
    """Write the good samples of a complete dataset at ``uri`` as the consumer ``to`` reads them.

    Every file is whole or not there, and ``rayhs-export.json``, written last, says that all are. An export that was
    interrupted goes on where it stopped; another one into the same place is refused. Memory is that of a few samples.

    Args:
        dataset: as `rayhs.open` gives it; only its layers are exported.
        to: one of `EXPORTERS`.
        uri: a local folder, or ``s3://`` where the consumer can read from there.
        options: those of the exporter (``Options`` of its module).
        storage: endpoint, region and profile of the target.

    Raises:
        ConfigError: unknown exporter or option, a layer that is needed and not stored, or a place with other files.
        IdentityMismatch: the place holds another export.
        RayhsError: the dataset can't be read, or the target not be written.

    Example:
        >>> report = export_dataset(ds, "webdataset", "exported", options={"shard_bytes": "64KiB"})
        >>> report.samples, report.skipped, report.files
        (22, 2, 11)
    """
    module = _module(to)
    chosen = parse_options(module.Options, options or {}, to)
    if not dataset.complete:
        raise ConfigError(f"{dataset.uri}: not finished; run rayhs extract (or import) again, then export")
    if not dataset.layers:
        raise ConfigError(f"{dataset.uri}: opened without states (tokens_only); export the dataset itself")
    samples = int(dataset.good.sum())
    if not samples:
        raise ConfigError(f"{dataset.uri}: no sample has states; nothing to export")
    if is_inside(uri, dataset.uri):
        raise ConfigError(f"{uri}: lies in {dataset.uri}, which is exported; give a place outside of it")
    # Where the model is now makes no other export: that it is the same model is checked.
    identity = _identity(dataset, to, chosen.model_dump(mode="json", exclude={"model"}), samples)
    target = open_target(uri, identity, on_progress, storage)
    notes = module.export(dataset, target, chosen)
    made = {
        "source_uri": dataset.uri,
        "versions": installed_versions(),
        "exported": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    manifest = target.finish({**notes, **made})
    skipped = len(dataset) - samples
    return ExportReport(to, target.uri, samples, skipped, manifest["files"], manifest["bytes"], target.written, notes)


def _module(name: str) -> Any:
    if name not in EXPORTERS:
        raise ConfigError(f"no exporter {name!r}; there are {', '.join(EXPORTERS)} (rayhs export --list)")
    return import_module(f"rayhs.export.{name.replace('-', '_')}")


def _identity(dataset: Dataset, to: str, options: Mapping[str, Any], samples: int) -> dict[str, Any]:
    info = dataset.info
    return {
        "format": to,
        "options": dict(options),
        "model": info.model,
        "revision": info.revision,
        "model_hash": info.model_hash,
        "plan": info.plan.fingerprint,
        "layers": list(dataset.layers),
        "dtype": info.dtype,
        "engine_dtype": info.engine_dtype,
        "include_generated": info.include_generated,
        "samples": samples,
        "rows_fingerprint": dataset.outline.fingerprint,
        "dataset_created": info.created,
    }
