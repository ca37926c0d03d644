"""Dumps of hidden states, a file a sample, packed into a dataset: what `rayhs import` runs. No Ray, no GPU."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from rayhs.codec import token_bytes
from rayhs.config import RunConfig, parse_config
from rayhs.dataset_run import DatasetRun, OnProgress, RunResult, ignore_progress
from rayhs.errors import ConfigError
from rayhs.identity import dataset_record, identity_of, refuse_other
from rayhs.importing.dump import Dump
from rayhs.importing.manifest import Manifest, read_manifest
from rayhs.importing.packing import Packer
from rayhs.importing.planning import write_plan
from rayhs.importing.speculators import SpeculatorsDump
from rayhs.importing.state_file import StateFile
from rayhs.importing.vllm import VllmDump
from rayhs.job import Job
from rayhs.layers import layers_as_named, refuse_disorder
from rayhs.layout import DatasetRecord, Plan
from rayhs.model import ModelInfo, describe_model
from rayhs.plan import CutRule
from rayhs.reading.plan_reader import PlanReader
from rayhs.store import Store, is_inside, open_store
from rayhs.tally import Progress, Tally
from rayhs.versions import installed_versions

DUMPS: Mapping[str, type[Dump]] = {dump.kind: dump for dump in (SpeculatorsDump, VllmDump)}

_FINGERPRINT_VERSION = 1
_KNOWN_HERE = ("rayhs", "python", "transformers")
_MAKER = "vllm", "torch"
_ANY_CONTEXT = 2**31 - 1  # nothing is computed, so the model's context is no limit
_SETTABLE = ("shards", "storage", "revision", "engine")
_DIFFERS = "the files (names, sizes, times), or how they are cut, are not those it was planned from"
_ADVICE = "Give another place, or go on with the files and settings of the one there"


class ImportRun(DatasetRun):
    """One import. All that can be refused is refused when it is made, before a state is read.

    ``notes`` say what the dump lacks and the dataset therefore takes for granted.
    """

    def __init__(
        self, dump: Dump, config: RunConfig, known: Manifest, on_progress: OnProgress, repairing: bool
    ) -> None:
        """``known`` is what the dump itself tells of its layers."""
        store = open_store(config.output, config.storage)
        self._dump, self._config, self.notes = dump, config, dump.notes
        path, header = dump.first_header()
        # The files say in what dtype the engine computed; a checkpoint may be of another.
        engine = config.engine.model_copy(update={"dtype": header.dtype, "max_model_len": _ANY_CONTEXT})
        self._config = config.model_copy(update={"engine": engine})
        self._model: ModelInfo = describe_model(self._config)
        self._layers = layers_as_named(config.layers, self._model.num_layers)
        refuse_disorder(self._layers, "files")
        _refuse_unlike(path, header, self._layers, self._model, known)
        dump.refuse_layers(self._layers, self._model.num_layers)
        identity = identity_of(self._config, self._model, self._layers)
        store.prepare()
        on_progress(Progress("preparing", 0, None, message=f"names and times of the files in {dump.folder}"))
        super().__init__(store, identity, _source(dump, config), on_progress, repairing)

    def make_plan(self, store: Store | None) -> tuple[Plan, Counter[str]]:
        shards, identity = self._config.shards, self.identity
        rule = CutRule(int(shards.target_bytes), token_bytes(self._layers, identity["hidden_size"], identity["dtype"]))
        return write_plan(
            self._dump.samples(self._model.vocab_size),
            rule,
            shards.rows_per_file,
            self.source,
            store,
            lambda rows: self.on_progress(Progress("planning", rows, None)),
        )

    def refuse_other(self, existing: DatasetRecord) -> None:
        refuse_other(existing, self.identity, self.source, self.store.uri, _DIFFERS, _ADVICE)

    def new_record(self, plan: Plan) -> DatasetRecord:
        here = installed_versions()
        versions = {name: here[name] for name in _KNOWN_HERE if name in here}
        versions |= dict.fromkeys(_MAKER, "unknown") | {"imported_from": self._dump.kind}
        return dataset_record(self.identity, plan, versions)

    def pack_missing(self, dataset: DatasetRecord) -> Tally:
        missing, done = self.begin(dataset)
        if missing:
            spec = Job(self._config, self._model, dataset).shard_spec
            packer = Packer(
                self._dump, self.store, PlanReader(self.store, dataset.plan), spec, self._config.shards.attempts
            )
            packer.run(missing, done, lambda: self.on_progress(done.progress("importing")))
        return done


def import_files(
    folder: str | os.PathLike[str],
    output: str,
    kind: str,
    *,
    model: str | None = None,
    layers: Sequence[str | int] | None = None,
    settings: Mapping[str, Any] | None = None,
    on_progress: OnProgress = ignore_progress,
    repair_first: bool = False,
) -> tuple[RunResult, Sequence[str]]:
    """Pack the files of hidden states in ``folder`` into a dataset at ``output``, or go on with it.

    Every row ends in the index once: with its states, checked as those of a run, or ``failed`` or ``rejected`` with a
    reason. Killed at any moment, the same call does the rest. Memory is that of two shards and the files' names.

    Args:
        folder: a local folder.
        kind: one of `DUMPS`.
        model: the model that the states are of; needed where no ``rayhs-export.json`` names it.
        layers: ids or presets of the layers in the files, as `rayhs.layers`; likewise. The last state of id n must be
            the one before the final norm, as vLLM's and speculators' is.
        settings: ``shards``, ``storage``, ``revision`` and ``engine.trust_remote_code`` as in a run file;
            ``shards.dtype`` "model" is that of the files.
        repair_first: read and check every object that is there, and make what is damaged anew.

    Returns:
        The finished dataset, and notes on what the files lack.

    Raises:
        ConfigError: an unknown kind, model or setting; layers or hidden size that the files don't have.
        InputError: no dump of that kind in ``folder``.
        IdentityMismatch: ``output`` holds another dataset; names what differs.
        StoreError: the store refuses for good.

    Example:
        >>> run, notes = import_files("dump", "imported", "vllm", model="fake/4x8", layers=[1, 3, 4])
        >>> run.exit_code, run.summary.ok
        (0, 3)
    """
    if kind not in DUMPS:
        raise ConfigError(f"--from {kind}: no such kind of dump; there are {', '.join(DUMPS)}")
    path = _local(os.fspath(folder))
    known = read_manifest(path, kind)
    config = _config(path, output, model, layers, settings or {}, known)
    run = ImportRun(DUMPS[kind](path), config, known, on_progress, repair_first)
    if repair_first:
        run.repair()
    dataset, _ = run.ensure_plan()
    done = run.pack_missing(dataset)
    return RunResult.of(run.store.uri, run.finish(dataset, done)), run.notes


def _local(folder: str) -> Path:
    path = Path(folder.removeprefix("file://")).expanduser().absolute()
    if "://" in folder.removeprefix("file://"):
        raise ConfigError(f"{folder}: only a local folder is read; mount it or copy it here")
    return path


def _config(
    folder: Path,
    output: str,
    model: str | None,
    layers: Sequence[str | int] | None,
    settings: Mapping[str, Any],
    known: Manifest,
) -> RunConfig:
    for key, value in settings.items():
        of_engine = isinstance(value, Mapping) and set(value) == {"trust_remote_code"}
        if key not in _SETTABLE or (key == "engine" and not of_engine):
            raise ConfigError(
                f"--set {key}: an import takes shards.*, storage.*, revision and engine.trust_remote_code; "
                "all else the files say"
            )
    model, layers = model or known.model, layers or known.layers
    if model is None:
        raise ConfigError(f"{folder}: the files don't say what model their states are of; name it with --model")
    if layers is None:
        raise ConfigError(
            f"{folder}: the files don't say which layers they hold; name all, ascending (--layers 2,15,27,30)"
        )
    revision = {"revision": known.revision} if model == known.model and known.revision else {}
    document = {"model": model, "layers": list(layers), "output": output, **revision, **settings}
    config = parse_config({**document, "prompts": {"path": str(folder), "token_ids": "input_ids"}}, "import")
    if is_inside(output, str(folder)):
        raise ConfigError(f"{output}: lies in {folder}, which is read; give a place outside of it")
    return config


def _refuse_unlike(path: str, header: StateFile, layers: Sequence[int], model: ModelInfo, known: Manifest) -> None:
    _, count, hidden = header.states.shape
    if hidden != model.hidden_size:
        raise ConfigError(
            f"{path}: states of hidden size {hidden}, {model.name} has {model.hidden_size}; "
            "name the model they are of with --model"
        )
    named = ",".join(map(str, layers))
    if known.layers is not None and tuple(layers) != known.layers:
        raise ConfigError(
            f"--layers {named}: rayhs-export.json beside the files says {','.join(map(str, known.layers))}; "
            "leave it out"
        )
    if count != len(layers):
        raise ConfigError(
            f"{path}: states of {count} layers, --layers names {len(layers)} ({named}); "
            "name those in the files, ascending"
        )


def _source(dump: Dump, config: RunConfig) -> str:
    settings = [_FINGERPRINT_VERSION, dump.fingerprint(), int(config.shards.target_bytes), config.shards.rows_per_file]
    return xxhash.xxh3_128_hexdigest(repr(settings).encode())
