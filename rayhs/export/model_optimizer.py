"""For NVIDIA Model-Optimizer's offline training of EAGLE-3 and DFlash drafts.

Source: NVIDIA/Model-Optimizer, `modelopt/torch/speculative/eagle/utils.py` (0bce265d: `OfflineSupervisedDataset`),
`modelopt/torch/speculative/plugins/modeling_final_norm.py` (006937fb), `examples/speculative_decoding/
collect_hidden_states/compute_hidden_states_vllm.py` (a8c67e87).
``hidden_states_prenorm`` in a file is a flag, not a tensor: ``hidden_states`` are before the final norm. It shifts
tokens itself, and takes all ``*.pt`` below the folder in no particular order.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from rayhs.export.convert import (
    as_torch,
    auxiliary_layers,
    concatenated,
    last_layer,
    post_norm,
    torch_bytes,
    zero_based,
)
from rayhs.export.options import About, ExportOptions
from rayhs.export.rows import ids_of
from rayhs.export.target import Target
from rayhs.export.target_model import TargetModel
from rayhs.reading.sample import Sample

if TYPE_CHECKING:
    from rayhs.dataset import Dataset

ABOUT = About(
    consumer="Model-Optimizer (Aug 2026), offline: --offline-data-path OUT",
    needs="layer n (layers: [eagle3, last]); torch; with norm=apply the model's weights, to read the final norm",
    writes="<sample id>.pt for torch.load(weights_only=True); other characters than A-Z a-z 0-9 . _ - as =XX",
    converts="norm=apply: the last state gets the final norm, computed in float32; layers side by side, ascending; "
    "float8_e4m3fn dequantised; ids and masks int64. Nothing is shifted, padded or cut",
)
_LONGEST = 200
_OTHER = re.compile(rb"^\.|[^A-Za-z0-9._-]")


class Options(ExportOptions):
    """``layers``: auxiliary ones, default all below the last.

    ``norm``: prenorm leaves the last state as it is and says so in each file; only what honours that trains on it,
    DFlash of llama, mistral, qwen and deepseek targets, say.
    """

    layers: tuple[int, ...] | None = None
    norm: Literal["apply", "prenorm"] = "apply"
    model: str | None = None


def file_name(sample_id: str) -> str:
    """Another one for each id, of 200 characters at most."""
    escaped = _OTHER.sub(lambda found: b"=%02X" % found[0][0], sample_id.encode()).decode() or "="
    if len(escaped) > _LONGEST - 3:
        # No escape is =x, so that no other id has this name.
        escaped = f"{escaped[:160]}=x{xxhash.xxh3_128_hexdigest(sample_id.encode())}"
    return f"{escaped}.pt"


def export(dataset: Dataset, target: Target, options: Options) -> dict[str, Any]:
    last = last_layer(dataset, "Model-Optimizer")
    layers = auxiliary_layers(dataset, options.layers)
    model = TargetModel(dataset.info, options.model) if options.norm == "apply" else None
    ids = ids_of(dataset)

    def encode(sample: Sample) -> bytes:
        state = sample.hidden_states[last]
        return torch_bytes(
            {
                "input_ids": as_torch(sample.token_ids).long(),
                "hidden_states": as_torch(state if model is None else post_norm(model, state)),
                "aux_hidden_states": as_torch(concatenated(sample, layers)),
                "loss_mask": as_torch(sample.loss_mask).long(),
                "conversation_id": sample.sample_id,
                "hidden_states_prenorm": model is None,
            }
        )

    target.put_samples(dataset.with_layers((*layers, last)), lambda row: file_name(ids[row].as_py()), encode)
    return {
        "layer_ids": list(layers),
        "aux_layers": zero_based(layers),
        "last_state": "before the final norm" if model is None else "after the final norm",
    }
