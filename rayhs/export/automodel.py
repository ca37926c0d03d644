"""For NeMo Automodel's EAGLE-3 training from a cache of the target's outputs.

Source: NVIDIA-NeMo/Automodel, `nemo_automodel/components/speculative/precompute_eagle3.py` (0ffbfc23), `nemo_automodel/
components/datasets/llm/eagle3_cache.py` (format version 2, in trungvd-zenai/Automodel 7fe0d2bc), `nemo_automodel/
components/speculative/eagle/target.py` (3d9d3668) and `core.py` (04cc1f84).
Other than most trainers it finds ids, masks and probabilities in the cache already shifted, by its target wrapper.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from rayhs.codec import Array, TensorSpec, build_header
from rayhs.errors import ConfigError
from rayhs.export.convert import concatenated, eagle3_layers, last_layer, next_tokens, state_dtype, zero_based
from rayhs.export.options import About, ExportOptions
from rayhs.export.probabilities import Supervision
from rayhs.export.rows import SAMPLE_IDS, lengths_of, positions_of, put_sample_ids, put_shards
from rayhs.export.stacked_file import StackedFile
from rayhs.export.target import Target
from rayhs.export.target_model import TargetModel
from rayhs.export.vocabulary import count_tokens, draft_maps
from rayhs.reading.sample import Sample

if TYPE_CHECKING:
    from rayhs.dataset import Dataset

ABOUT = About(
    consumer="NeMo Automodel (Aug 2026), EAGLE-3: recipe_args.cached_target_path: OUT",
    needs="layer n and three below it (layers: [eagle3, last]); torch and the model's weights, of which the final "
    "norm, the output projection and the embeddings are read",
    writes="manifest.json, shard-<number>.safetensors, target_embeddings.safetensors; sample_ids.jsonl (line i: row i)",
    converts="rows cut or padded behind with zeros to seq_length; ids, loss mask and probabilities moved one to the "
    "left, as its own cache has them, states and attention mask not; probabilities are the softmax over the draft "
    "vocabulary of the logits, computed in float32 from the last state after the final norm, of top_k renormalised; "
    "float8_e4m3fn dequantised. A probability a token of the vocabulary takes far more room than the states: 2 GiB for "
    "a row of 8192 tokens and 128k tokens of vocabulary, unless top_k or draft_vocab_size make it smaller",
)
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_EMBEDDINGS, _MANIFEST = "target_embeddings.safetensors", "manifest.json"
_ROWS_AT_ONCE = 4096


class Options(ExportOptions):
    """``layers``: the three auxiliary ones, default all below the last; ``draft_vocab_size``: default all tokens.

    ``top_k``: keep so many probabilities a token; 0, as in its own precompute script, keeps all.
    """

    layers: tuple[int, ...] | None = None
    seq_length: Annotated[int, Field(ge=2)] = 2048
    draft_vocab_size: PositiveInt | None = None
    top_k: NonNegativeInt = 0
    rows_per_shard: PositiveInt = 256
    model: str | None = None


def export(dataset: Dataset, target: Target, options: Options) -> dict[str, Any]:
    last = last_layer(dataset, "Automodel")
    layers = eagle3_layers(dataset, options.layers, "Automodel")
    if 0 in layers:
        raise ConfigError("layers: 0, the embeddings, is no layer to Automodel; choose others (--set layers=[2,15,27])")
    model = TargetModel(dataset.info, options.model)
    selected = _draft_vocabulary(dataset, model, options)
    if options.top_k >= len(selected):
        raise ConfigError(f"top_k: {options.top_k} is not below the draft vocabulary's {len(selected)}; 0 keeps all")
    rows = Rows(model, selected, layers, last, options)
    dtype = state_dtype(dataset)
    positions = positions_of(dataset)
    row_bytes = sum(spec.nbytes for spec in rows.specs(1, dataset.hidden_size, dtype))
    target.check_room(len(positions) * row_bytes, "--set top_k=64 or draft_vocab_size=32000, say, make it smaller")
    shards = [positions[i : i + options.rows_per_shard] for i in range(0, len(positions), options.rows_per_shard)]
    if not target.has(_EMBEDDINGS):
        _put_embeddings(target, model)

    def write(file: IO[bytes], count: int, samples: Iterator[Sample]) -> None:
        stacked = StackedFile(file, rows.specs(count, dataset.hidden_size, dtype))
        for row, sample in enumerate(samples):
            rows.put(stacked, row, sample)

    put_shards(dataset.with_layers((*layers, last)), target, shards, shard_name, write)
    put_sample_ids(dataset, target)
    if not target.has(_MANIFEST):
        target.put(_MANIFEST, _manifest(dataset, model, selected, layers, options))
    cut = lengths_of(dataset) - options.seq_length
    return {
        "layer_ids": list(layers),
        "aux_layer_ids": zero_based(layers),
        "tokens_cut": int(cut[cut > 0].sum()),
        "samples_cut": int((cut > 0).sum()),
        "rows": f"line i of {SAMPLE_IDS} is row i",
    }


def shard_name(number: int) -> str:
    return f"shard-{number:06d}.safetensors"


class Rows:
    """Samples as rows of a shard."""

    def __init__(self, model: TargetModel, selected: Array, layers: Sequence[int], last: int, options: Options) -> None:
        self._layers, self._last, self._length = layers, last, options.seq_length
        self._supervision = Supervision(model, selected, options.top_k)

    def specs(self, rows: int, hidden: int, dtype: np.dtype[Any]) -> list[TensorSpec]:
        """The tensors of a shard."""
        shape = (rows, self._length)
        return [
            *(TensorSpec(name, np.dtype(np.int64), shape) for name in ("input_ids", "attention_mask", "loss_mask")),
            *self._supervision.specs(*shape, dtype),
            TensorSpec("aux_hidden_states", dtype, (*shape, len(self._layers) * hidden)),
            TensorSpec("position_mask", np.dtype(np.bool_), (*shape, 1)),
        ]

    def put(self, file: StackedFile, row: int, sample: Sample) -> None:
        """Its first tokens, as many as fit; what is behind them stays zero."""
        some = slice(self._length)
        loss_mask = next_tokens(sample.loss_mask[some])
        file.put("input_ids", row, next_tokens(sample.token_ids[some]))
        file.put("attention_mask", row, np.ones(len(loss_mask)))
        file.put("loss_mask", row, loss_mask)
        file.put("aux_hidden_states", row, concatenated(sample, self._layers)[some])
        # Without the first: at each token there is what the model says at the next one.
        for first, tensors, in_draft in self._supervision.pieces(sample.hidden_states[self._last][some][1:]):
            for name, values in tensors.items():
                file.put(name, row, values, first)
            counts = in_draft & loss_mask[first : first + len(in_draft)].astype(bool)
            file.put("position_mask", row, counts[:, None], first)


def _draft_vocabulary(dataset: Dataset, model: TargetModel, options: Options) -> Array:
    """Ids of the target's vocabulary, ascending; special tokens are always among them."""
    size = options.draft_vocab_size
    if size is None:
        return np.arange(model.vocab_size)
    counts, vocabulary = count_tokens(dataset, options.seq_length), model.vocab_size_over(size)
    offsets, _ = draft_maps(counts, size, vocabulary, model.special_tokens)
    ids: Array = offsets + np.arange(size)
    return ids


def _put_embeddings(target: Target, model: TargetModel) -> None:
    weight = model.embeddings
    with target.file(_EMBEDDINGS) as file:
        file.write(build_header([TensorSpec("weight", np.dtype(np.float32), tuple(weight.shape))], {}))
        for some in weight.split(_ROWS_AT_ONCE):
            file.write(some.float().numpy().tobytes())


def _manifest(dataset: Dataset, model: TargetModel, selected: Array, layers: Sequence[int], options: Options) -> bytes:
    manifest = {
        "format_version": 2,
        "target_model": model.name,
        "target_vocab_size": model.vocab_size,
        "draft_vocab_size": len(selected),
        "seq_length": options.seq_length,
        "dtype": _DTYPES[state_dtype(dataset).name],
        "num_samples": len(positions_of(dataset)),
        "shard_size": options.rows_per_shard,
        "target_probs_topk": options.top_k,
        "aux_hidden_dim": len(layers) * dataset.hidden_size,
        "aux_layer_ids": zero_based(layers),
        "selected_token_ids": selected.tolist(),
        "input_data": dataset.uri,
        "split": None,
        "shuffle_seed": 0,
        # What its recipe compares with its own options; here the mask is the dataset's.
        "mask_reasoning_content": False,
        "mask_generation_prompt": False,
    }
    return json.dumps(manifest, indent=2, sort_keys=True).encode()
