"""float8_e4m3fn with a scale a token: numpy's and torch's way are one, and the error is what is stated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hn

from rayhs import layout
from rayhs.codec import FP8, STATE_DTYPES
from rayhs.fp8 import LARGEST, dequantize, quantize
from tests.builders import Builder
from tests.test_verify import FIRST, check, problems

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
STATES = hn.arrays(np.float32, hn.array_shapes(min_dims=2, max_dims=2, max_side=9), elements=FLOATS)


@settings(max_examples=200)
@given(STATES)
@example(np.array([[0.0, 0.0], [1e-45, 0.0], [3e38, -3e38], [1e-38, 1e-40]], np.float32))
def test_every_value_is_as_near_as_stated(states: np.ndarray) -> None:
    q, scales, errors = quantize(states)
    assert q.dtype == STATE_DTYPES[FP8] and scales.dtype == errors.dtype == np.float32
    assert q.shape == states.shape and scales.shape == errors.shape == states.shape[:1]
    assert np.isfinite(scales).all() and (scales > 0).all() and np.abs(q.astype(np.float32)).max() <= LARGEST
    x, s = states.astype(np.float64), scales.astype(np.float64)[:, None]
    back = q.astype(np.float64) * s
    assert (np.abs(back - x) <= np.maximum(np.abs(x) / 16, s / 1024) * 1.001).all()
    norms = np.linalg.norm(x, axis=1)
    whole = norms > 1e-30
    measured = np.linalg.norm(back - x, axis=1)[whole] / norms[whole]
    assert np.allclose(errors[whole], measured, rtol=1e-3, atol=1e-6)


@settings(max_examples=100)
@given(STATES, st.sampled_from(["float32", "float16", "bfloat16"]))
def test_torch_gives_the_bits_of_numpy(states: np.ndarray, dtype: str) -> None:
    import torch

    from rayhs.copying import quantize as torch_quantize

    with np.errstate(over="ignore"):
        states = states.astype(STATE_DTYPES[dtype])
    states = np.where(np.isfinite(states.astype(np.float32)), states, states.dtype.type(0))
    tensor = torch.from_numpy(states.astype(np.float32)).to(getattr(torch, dtype))
    q, scales, errors = torch_quantize(tensor.unsqueeze(0))
    want_q, want_scales, want_errors = quantize(states)
    assert q[0].view(torch.uint8).numpy().tobytes() == want_q.tobytes()
    assert scales[0].numpy().tobytes() == want_scales.tobytes()
    assert np.allclose(errors[0].numpy(), want_errors, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_has_a_scale_that_is_not(bad: float) -> None:
    import torch

    from rayhs.copying import quantize as torch_quantize

    states = np.ones((3, 4), np.float32)
    states[1, 2] = bad
    assert np.isfinite(quantize(states)[1]).tolist() == [True, False, True]
    assert torch.isfinite(torch_quantize(torch.from_numpy(states).unsqueeze(0))[1][0]).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_come_back_in_the_engine_s_dtype(dtype: str) -> None:
    states = np.random.default_rng(0).standard_normal((50, 256)).astype(STATE_DTYPES[dtype])
    states[:, 7] *= 60  # as the largest dimensions of real models stand out
    q, scales, errors = quantize(states)
    back = dequantize(q, scales, dtype)
    assert back.dtype == STATE_DTYPES[dtype]
    got, want = back.astype(np.float32), states.astype(np.float32)
    off = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert off.max() < 0.05 and np.allclose(off, errors, atol=5e-3)
    # The largest value of a token is the one that is kept as it is.
    assert np.allclose(np.abs(got).max(axis=1), np.abs(want).max(axis=1), rtol=1e-6)


def test_the_largest_number_is_that_of_the_dtype() -> None:
    limits: Any = ml_dtypes.finfo(ml_dtypes.float8_e4m3fn)
    assert float(limits.max) == LARGEST


def test_the_errors_of_float8_are_those_of_every_layer(tmp_path: Path) -> None:
    built = Builder(tmp_path, dtype="float8_e4m3fn").write()
    assert check(built).ok
    commit = layout.commit_name(FIRST)
    for errors in ({}, {"2": {"mean": 0.1, "max": 0.2}}):
        built.edit_record(commit, lambda c, errors=errors: c.update(errors=errors))  # type: ignore[misc]
        assert ["it has the errors of layers" in problem for problem in problems(check(built), commit)] == [True]
    built.write_shard(FIRST)
    built.edit_record(layout.SUMMARY, lambda s: s["errors"]["2"].update(max=0.5))
    assert problems(check(built), "summary.json") == {"errors are not those of the commit records": ()}
    plain = Builder(tmp_path / "plain", dtype="float32").write()
    plain.edit_record(commit, lambda c: c.update(errors={"2": {"mean": 0.1, "max": 0.2}}))
    assert not check(plain).ok
