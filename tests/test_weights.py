"""Models whose weights differ in one tensor are told apart."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from rayhs.weights import weights_digest

SHAPES = [(4096, 100), (3,), (700, 300), (1, 1), (100_000,), (2048,)] * 3


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {f"layer.{i}.weight": rng.standard_normal(shape, np.float32) for i, shape in enumerate(SHAPES)}


def digest(folder: Path, weights: dict[str, np.ndarray], name: str = "model.safetensors") -> bytes:
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(weights, folder / name)
    return weights_digest(folder)


@pytest.mark.parametrize("changed", range(len(SHAPES)))
def test_any_single_tensor_in_safetensors(tmp_path: Path, changed: int) -> None:
    before = digest(tmp_path / "a", tensors())
    assert digest(tmp_path / "copy", tensors()) == before
    tuned = tensors()
    tuned[f"layer.{changed}.weight"] *= 1.001
    assert digest(tmp_path / "b", tuned) != before


def test_any_single_tensor_in_files_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def saved(folder: Path, changed: int | None) -> bytes:
        folder.mkdir()
        weights = {name: torch.from_numpy(values) for name, values in tensors().items()}
        if changed is not None:
            weights[f"layer.{changed}.weight"] *= 1.001
        torch.save(weights, folder / "pytorch_model.bin")
        return weights_digest(folder)

    before = saved(tmp_path / "a", None)
    assert saved(tmp_path / "copy", None) == before
    assert all(saved(tmp_path / f"b{i}", i) != before for i in range(6))


def test_names_sizes_and_other_files_count_and_nothing_else_does(tmp_path: Path) -> None:
    before = digest(tmp_path / "a", tensors())
    (tmp_path / "a" / "README.md").write_text("x")
    assert weights_digest(tmp_path / "a") == before
    assert digest(tmp_path / "b", tensors(), "other.safetensors") != before
    (tmp_path / "a" / "more.gguf").write_bytes(b"\1" * 100_000)
    with_more = weights_digest(tmp_path / "a")
    (tmp_path / "a" / "more.gguf").write_bytes(b"\2" * 100_000)
    assert before != with_more != weights_digest(tmp_path / "a") != before


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 5, struct.pack("<Q", 2**60), struct.pack("<Q", 9) + b"not JSON.", struct.pack("<Q", 2) + b"[]"]
    + [struct.pack("<Q", len(text)) + text for text in (b'{"a":1}', b'{"a":{"data_offsets":[1]}}', b'{"a":{}}')],
)
def test_what_is_no_safetensors_is_left_to_who_loads_it(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    assert weights_digest(tmp_path) == weights_digest(tmp_path)
    for name in ("a.bin", "b.pt"):
        (tmp_path / name).write_bytes(b"PK\3\4" + data + b"PK\5\6" + b"\0" * 18)
    assert weights_digest(tmp_path) == weights_digest(tmp_path)
