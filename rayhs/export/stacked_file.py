"""A safetensors file of stacked rows that is written a piece of a row at a time, so that no row is whole in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import IO

from rayhs.codec import Array, TensorSpec, build_header


class StackedFile:
    """Tensors `[rows, tokens, ...]`; what is never written is zero."""

    def __init__(self, file: IO[bytes], specs: Sequence[TensorSpec]) -> None:
        """``file``: empty, and one that can seek."""
        self._file = file
        self._places: dict[str, tuple[int, TensorSpec]] = {}
        end = file.write(build_header(specs, {}))
        for spec in specs:
            self._places[spec.name] = (end, spec)
            end += spec.nbytes
        file.truncate(end)
        file.seek(0, os.SEEK_END)

    def put(self, name: str, row: int, values: Array, first: int = 0) -> None:
        """Write ``values`` `[tokens, ...]`, in the tensor's dtype, from token ``first`` of a row on."""
        start, spec = self._places[name]
        row_bytes = spec.nbytes // spec.shape[0]
        self._file.seek(start + row * row_bytes + first * (row_bytes // spec.shape[1]))
        self._file.write(values.astype(spec.dtype).tobytes())
        self._file.seek(0, os.SEEK_END)
