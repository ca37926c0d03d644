"""States in float8_e4m3fn with a float32 scale a token and layer.

A token's state ``x`` `[hidden]` is stored as ``q = x / s`` with ``s = max|x| / 448`` (at least the least
normal float32), and read as ``q * s``; 448 is the largest number of float8_e4m3fn
(https://arxiv.org/abs/2209.05433). Rounding is to the nearest, so each value is off by at most 1/16 of
itself, or by ``s / 1024`` where it is tiny beside the largest one.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from rayhs.codec import FP8, STATE_DTYPES, Array

LARGEST = 448.0
LEAST_SCALE = np.finfo(np.float32).tiny


def quantize(states: Array) -> tuple[Array, Array, Array]:
    """``states`` `[tokens, hidden]` as float8_e4m3fn, scales float32 `[tokens]`, errors float32 `[tokens]`.

    An error is that of a token's whole state: ``||x - q s|| / ||x||``. A state that is not finite
    gives a scale that is not.
    """
    x = states.astype(np.float32)
    with np.errstate(invalid="ignore"):
        scales = np.maximum(np.abs(x).max(axis=1) / np.float32(LARGEST), LEAST_SCALE)
        scaled = x / scales[:, None]
        q = scaled.astype(STATE_DTYPES[FP8])
        off = np.linalg.norm(scaled - q.astype(np.float32), axis=1)
        return q, scales, off / np.maximum(np.linalg.norm(scaled, axis=1), LEAST_SCALE)


def dequantize(states: Array, scales: Array, dtype: str) -> Array:
    """``states`` float8_e4m3fn `[tokens, hidden]` times ``scales`` float32 `[tokens]`, rounded to ``dtype``."""
    with np.errstate(over="ignore", invalid="ignore"):  # of damaged scales
        result: Array = (states.astype(np.float32) * scales[:, None]).astype(STATE_DTYPES[dtype])
    return result


def largest_scale(dtype: str) -> float:
    """No state of ``dtype`` has a larger scale."""
    finfo: Any = ml_dtypes.finfo
    return float(finfo(STATE_DTYPES[dtype]).max) / LARGEST * (1 + 1e-6)
