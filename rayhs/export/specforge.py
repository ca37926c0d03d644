"""For SpecForge's offline training of EAGLE-3, DFlash (Domino, too) and DSpark drafts.

Source: sgl-project/SpecForge, `specforge/runtime/data_plane/offline_reader.py` (1d62d191), `scripts/
prepare_hidden_states.py` (f1424fb6: file names), `specforge/algorithms/eagle3/data.py` (869a1e01), `specforge/
algorithms/common/hidden_states_data.py` (1f8936dd), `specforge/data/preprocessing.py` (vocabulary maps).
It names files by row without leading zeros and reads them in the order of their paths, as text: row 10 before row 2.
It shifts states against tokens itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import PositiveInt

from rayhs.codec import Array
from rayhs.export.convert import (
    as_torch,
    auxiliary_layers,
    concatenated,
    eagle3_layers,
    last_layer,
    post_norm,
    torch_bytes,
    zero_based,
)
from rayhs.export.options import About, ExportOptions
from rayhs.export.rows import SAMPLE_IDS, put_sample_ids
from rayhs.export.target import Target
from rayhs.export.target_model import TargetModel
from rayhs.export.vocabulary import count_tokens, draft_maps
from rayhs.reading.sample import Sample

if TYPE_CHECKING:
    from rayhs.dataset import Dataset

ABOUT = About(
    consumer="SpecForge (Aug 2026), offline: data.hidden_states_path: OUT",
    needs="torch; for eagle3 and dspark layer n (layers: [eagle3, last]) and the model's weights, of which the final "
    "norm is read; for draft_vocab_size the model's config",
    writes="rows_<g>-<g+2000>/data_<row>.ckpt, sample_ids.jsonl (line i: row i); with draft_vocab_size "
    "vocab_mapping/vocab_mapping.pt",
    converts="the last state gets the final norm, computed in float32; layers side by side, ascending; "
    "float8_e4m3fn dequantised; ids and masks int64. Nothing is shifted, padded or cut",
)
_GROUP = 2000
_MAPS = "vocab_mapping/vocab_mapping.pt"


class Options(ExportOptions):
    """``layers``: default all below the last; ``draft_vocab_size``: also write vocabulary maps."""

    method: Literal["eagle3", "dflash", "dspark"] = "eagle3"
    layers: tuple[int, ...] | None = None
    draft_vocab_size: PositiveInt | None = None
    model: str | None = None


def file_name(row: int) -> str:
    group = row // _GROUP * _GROUP
    return f"rows_{group}-{group + _GROUP}/data_{row}.ckpt"


def export(dataset: Dataset, target: Target, options: Options) -> dict[str, Any]:
    eagle3, with_last = options.method == "eagle3", options.method != "dflash"
    last = (last_layer(dataset, "SpecForge"),) if with_last else ()
    layers = (
        eagle3_layers(dataset, options.layers, "SpecForge") if eagle3 else auxiliary_layers(dataset, options.layers)
    )
    model = TargetModel(dataset.info, options.model) if with_last or options.draft_vocab_size else None

    def encode(sample: Sample) -> bytes:
        tensors = {"input_ids": as_torch(sample.token_ids).long(), "loss_mask": as_torch(sample.loss_mask).long()}
        tensors["aux_hidden_state" if eagle3 else "hidden_states"] = as_torch(concatenated(sample, layers))[None]
        if model is not None and last:
            state = as_torch(post_norm(model, sample.hidden_states[last[0]]))[None]
            tensors["hidden_state" if eagle3 else "target_last_hidden_states"] = state
        return torch_bytes(tensors)

    if model is not None and options.draft_vocab_size:
        _put_maps(dataset, target, model, options.draft_vocab_size)
    target.put_samples(dataset.with_layers((*layers, *last)), file_name, encode)
    put_sample_ids(dataset, target)
    return {
        "layer_ids": list(layers),
        "target_layer_ids": zero_based(layers),
        "rows": f"line i of {SAMPLE_IDS} is data_i.ckpt",
        **({} if eagle3 else {"without_two_loss_tokens_in_a_row": _refused(dataset)}),
        **({"vocab_mapping": _MAPS} if options.draft_vocab_size else {}),
    }


def _put_maps(dataset: Dataset, target: Target, model: TargetModel, size: int) -> None:
    target_size = model.vocab_size_over(size)
    if not target.has(_MAPS):
        draft, targets = draft_maps(count_tokens(dataset), size, target_size)
        target.put(_MAPS, torch_bytes({"d2t": as_torch(draft), "t2d": as_torch(targets)}))


def _refused(dataset: Dataset) -> int:
    """Samples that SpecForge refuses for a DFlash draft, ending the training."""
    return sum(not _two_in_a_row(sample.loss_mask) for sample in dataset.tokens_only().stream())


def _two_in_a_row(loss_mask: Array) -> bool:
    on = loss_mask.astype(bool)
    return bool(np.any(on[1:] & on[:-1]))
