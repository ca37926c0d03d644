"""Files as vLLM's own `ExampleHiddenStatesConnector` leaves them, for tools made for those.

Source: vLLM 0.33, `example_hidden_states_connector.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rayhs.export.convert import safetensors_bytes, stacked
from rayhs.export.options import About, ExportOptions
from rayhs.export.rows import SAMPLE_IDS, put_sample_ids
from rayhs.export.target import Target
from rayhs.reading.sample import Sample

if TYPE_CHECKING:
    from rayhs.dataset import Dataset

ABOUT = About(
    consumer="what reads the files of vLLM's ExampleHiddenStatesConnector (0.33)",
    needs="nothing",
    writes="<row>.safetensors with hidden_states [tokens, layers, hidden] and token_ids int64; sample_ids.jsonl",
    converts="nothing; float8_e4m3fn dequantised. The files have no loss mask",
)


class Options(ExportOptions):
    """None: the layers are those of the dataset."""


def export(dataset: Dataset, target: Target, options: Options) -> dict[str, Any]:
    def encode(sample: Sample) -> bytes:
        tensors = {"hidden_states": stacked(sample, dataset.layers), "token_ids": sample.token_ids.astype(np.int64)}
        return safetensors_bytes(tensors)

    target.put_samples(dataset, "{}.safetensors".format, encode)
    put_sample_ids(dataset, target)
    return {"layer_ids": list(dataset.layers), "sample_ids": f"line i of {SAMPLE_IDS} is i.safetensors"}
