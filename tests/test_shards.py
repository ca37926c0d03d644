from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhs.codec import FP8, STATE_DTYPES, StagedHeader, build_header, staged_bytes_at_most, staged_specs
from rayhs.errors import SampleError, StoreError
from rayhs.fake import fake_states
from rayhs.fp8 import quantize
from rayhs.layout import CommitRecord, ShardId, commit_name
from rayhs.shards import (
    FailedSample,
    GoodSample,
    PlannedSample,
    ShardSpec,
    _gathered,
    check_states,
    read_staged,
    write_shard,
)
from rayhs.store import Store, open_store

LAYERS = (1, 3)
HIDDEN = 16


def spec(**changes: Any) -> ShardSpec:
    values: dict[str, Any] = {
        "layers": LAYERS,
        "hidden": HIDDEN,
        "engine_dtype": "float32",
        "dtype": "float32",
        "format": "safetensors",
        "metadata": {"model": "m"},
    }
    return ShardSpec(**{**values, **changes})


def staged(tokens: list[int], dtype: str = "float32", layers: tuple[int, ...] = LAYERS) -> memoryview:
    specs = staged_specs(layers, HIDDEN, dtype, len(tokens))
    arrays = [fake_states(tokens, k, HIDDEN, "float32" if dtype == FP8 else dtype) for k in layers]
    if dtype == FP8:
        arrays = [part for parts in zip(*map(quantize, arrays), strict=True) for part in parts]
    parts = [array.tobytes() for array in arrays]
    return memoryview(b"".join([build_header(specs, {}), *parts, np.asarray(tokens, np.int32).tobytes()]))


def planned(index: int, tokens: list[int]) -> PlannedSample:
    return PlannedSample(index, f"row-{index}", np.asarray(tokens, np.int32), None)


def good(index: int, tokens: list[int], shard_spec: ShardSpec) -> GoodSample:
    dtype = FP8 if shard_spec.dtype == FP8 else shard_spec.engine_dtype
    return read_staged([staged(tokens, dtype)], planned(index, tokens), shard_spec)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_shard_is_readable_by_the_safetensors_package(tmp_path: Path, dtype: str) -> None:
    store = open_store(str(tmp_path))
    shard_spec = spec(dtype=dtype)
    prompts = [[1, 2, 3], [9], [4, 4, 5, 6]]
    results = [good(i, p, shard_spec) for i, p in enumerate(prompts)]
    record = write_shard(store, ShardId(0, 2), results, shard_spec)

    with safetensors.safe_open(tmp_path / str(record.object), "pt") as file:
        assert file.metadata()["shard"] == "00000-0002"
        assert file.get_tensor("offsets").tolist() == [0, 3, 4, 8]
        assert file.get_tensor("sample_index").tolist() == [0, 1, 2]
        assert file.get_tensor("token_ids").tolist() == [1, 2, 3, 9, 4, 4, 5, 6]
        assert file.get_tensor("loss_mask").tolist() == [1] * 8
        for layer in LAYERS:
            want = np.concatenate([fake_states(p, layer, HIDDEN) for p in prompts]).astype(STATE_DTYPES[dtype])
            got = file.get_tensor(f"hidden_states.{layer}").float().numpy()
            assert np.array_equal(got, want.astype(np.float32))


def test_a_shard_of_float8_is_readable_by_the_safetensors_package(tmp_path: Path) -> None:
    store, shard_spec, prompts = open_store(str(tmp_path)), spec(dtype=FP8), [[1, 2, 3], [9], [4, 4, 5, 6]]
    results = [good(i, p, shard_spec) for i, p in enumerate(prompts)]
    record = write_shard(store, ShardId(0, 2), results, shard_spec)
    with safetensors.safe_open(tmp_path / str(record.object), "pt") as file:
        for layer in LAYERS:
            states = np.concatenate([fake_states(p, layer, HIDDEN) for p in prompts])
            q, scales, errors = quantize(states)
            assert str(file.get_tensor(f"hidden_states.{layer}").dtype) == "torch.float8_e4m3fn"
            assert np.array_equal(file.get_tensor(f"hidden_states.{layer}").float().numpy(), q.astype(np.float32))
            assert np.array_equal(file.get_tensor(f"hidden_scales.{layer}").numpy(), scales)
            stated = record.errors[str(layer)]
            assert (stated.mean, stated.max) == (pytest.approx(errors.mean()), pytest.approx(errors.max()))
        assert file.get_tensor("token_ids").tolist() == [1, 2, 3, 9, 4, 4, 5, 6]


@pytest.mark.parametrize("name", ["hidden_scales.3", "hidden_errors.1"])
def test_float8_states_without_their_scales_or_errors_are_refused(name: str) -> None:
    memory = bytes(staged([1, 2, 3], FP8)).replace(name.encode(), b"x" * len(name), 1)
    with pytest.raises(SampleError, match="wrong states"):
        read_staged([memoryview(memory)], planned(0, [1, 2, 3]), spec(dtype=FP8))


def test_parts_of_several_ranks_are_one_sample() -> None:
    parts = [staged([1, 2, 3], layers=(3,)), staged([1, 2, 3], layers=(1,))]
    sample = read_staged(parts, planned(0, [1, 2, 3]), spec())
    assert sample.checksum == good(0, [1, 2, 3], spec()).checksum and list(sample.states) == [1, 3]
    with pytest.raises(SampleError, match="other tokens than each other"):
        read_staged([parts[0], staged([1, 2, 4], layers=(1,))], planned(0, [1, 2, 3]), spec())
    with pytest.raises(SampleError, match="layers"):
        read_staged(parts[:1], planned(0, [1, 2, 3]), spec())


def test_the_commit_record_tells_sizes_checksums_and_failures(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    results = [good(5, [1, 2], spec()), FailedSample(planned(6, [3]), "refused"), good(7, [4, 5, 6], spec())]
    write_shard(store, ShardId(1, 0), results, spec())
    record = CommitRecord.from_bytes(store.get("commits/00001-0000.json"), "commit")

    data = store.get(record.object)
    assert record.object_bytes == len(data)
    assert record.object_checksum == xxhash.xxh3_128(data).hexdigest()
    assert record.index == [5, 6, 7]
    assert record.status == ["ok", "failed", "ok"]
    assert record.reason == [None, "refused", None]
    assert record.token_start == [0, 0, 2] and record.num_tokens == [2, 0, 3]
    states = b"".join(fake_states([4, 5, 6], k, HIDDEN).tobytes() for k in LAYERS)
    assert record.checksum[2] == xxhash.xxh3_64(states).hexdigest()


def test_a_shard_without_any_good_sample_has_no_object(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    record = write_shard(store, ShardId(0, 0), [FailedSample(planned(0, [1]), "refused")], spec())
    assert record.object is None
    assert [name for name, _ in store.list("")] == [commit_name(ShardId(0, 0))]


def test_no_commit_record_without_an_acknowledged_object(tmp_path: Path) -> None:
    class Refusing:
        def __init__(self, store: Store) -> None:
            self._store = store

        def put_stream(self, name: str, chunks: Any, size: int) -> None:
            for _ in chunks:
                pass
            raise StoreError("refused")

        def put(self, name: str, data: bytes) -> None:
            self._store.put(name, data)

    store = open_store(str(tmp_path))
    with pytest.raises(StoreError):
        write_shard(Refusing(store), ShardId(0, 0), [good(0, [1, 2], spec())], spec())  # type: ignore[arg-type]
    assert list(store.list("")) == []


@pytest.mark.parametrize(
    ("memory", "sample", "message"),
    [
        (staged([1, 2]), planned(0, [1, 2, 3]), "2 tokens came back for a prompt of 3"),
        (staged([1, 2, 4]), planned(0, [1, 2, 3]), "of other tokens"),
        (staged([1, 2, 3, 4]), planned(0, [1, 2, 3]), "4 tokens came back for a prompt of 3"),
        (staged([1, 2], layers=(1, 2)), planned(0, [1, 2]), "layers"),
        (staged([1, 2])[:-8], planned(0, [1, 2]), "wrong states"),
    ],
)
def test_states_of_something_else_are_refused(memory: memoryview, sample: PlannedSample, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        read_staged([memory], sample, spec())


def test_generated_tokens_are_kept_and_masked_in() -> None:
    sample = PlannedSample(0, "a", np.asarray([1, 2, 3], np.int32), np.asarray([0, 1, 0], np.uint8))
    result = read_staged([staged([1, 2, 3, 8, 9])], sample, spec(include_generated=2))
    assert result.token_ids.tolist() == [1, 2, 3, 8, 9]
    assert result.loss_mask.tolist() == [0, 1, 0, 1, 1]


def damage(kind: str, states: np.ndarray) -> np.ndarray:
    states = states.copy()
    if kind == "nan":
        states[3, 5] = np.nan
    elif kind == "infinite":
        states[-1, -1] = -np.inf
    elif kind == "zero":
        states[:] = 0
        states[0, 0] = -0.0
    elif kind == "constant":
        states[:] = states[0]
    return states


@pytest.mark.parametrize("dtype", list(STATE_DTYPES))
@pytest.mark.parametrize(
    ("kind", "message"), [("nan", "finite"), ("infinite", "not finite"), ("zero", "zero"), ("constant", "constant")]
)
def test_bad_states_are_refused(kind: str, message: str, dtype: str) -> None:
    tokens = np.arange(9)
    states = fake_states(tokens.tolist(), 1, HIDDEN).astype(STATE_DTYPES[dtype])
    check_states(states, tokens, 1)
    with pytest.raises(SampleError, match=f"{message}.*layer 1"):
        check_states(damage(kind, states), tokens, 1)


def test_constant_states_are_right_where_all_tokens_are_the_same() -> None:
    states = damage("constant", fake_states([7] * 9, 1, HIDDEN))
    check_states(states, np.full(9, 7), 1)


def test_states_that_overflow_the_stored_dtype_fail_the_sample() -> None:
    tokens = [1, 2, 3]
    specs = staged_specs(LAYERS, HIDDEN, "float32", 3)
    states = [(fake_states(tokens, k, HIDDEN) * 1e6).tobytes() for k in LAYERS]
    memory = memoryview(b"".join([build_header(specs, {}), *states, np.asarray(tokens, np.int32).tobytes()]))
    with pytest.raises(SampleError, match="not finite"):
        read_staged([memory], planned(0, tokens), spec(dtype="float16"))


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=40), min_size=1, max_size=8))
def test_every_sample_is_where_the_record_says(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]
) -> None:
    store = open_store(str(tmp_path_factory.mktemp("store")))
    record = write_shard(store, ShardId(0, 0), [good(i, p, spec()) for i, p in enumerate(prompts)], spec())
    path = Path(store.uri) / str(record.object)
    with safetensors.safe_open(path, "np") as file:
        for layer in LAYERS:
            states = file.get_slice(f"hidden_states.{layer}")
            for prompt, start, count in zip(prompts, record.token_start, record.num_tokens, strict=True):
                assert np.array_equal(states[start : start + count], fake_states(prompt, layer, HIDDEN))


@given(
    st.sets(st.integers(0, 200), min_size=1, max_size=40),
    st.integers(1, 20_000),
    st.sampled_from([*STATE_DTYPES]),
    st.integers(0, 2**22),
    st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=2),
)
def test_a_staged_header_is_filled_in_as_it_would_be_built(
    layers: set[int], hidden: int, dtype: str, tokens: int, metadata: dict[str, str]
) -> None:
    header = StagedHeader(sorted(layers), hidden, dtype, metadata)
    specs = staged_specs(sorted(layers), hidden, dtype, tokens)
    assert header.build(tokens) == build_header(specs, metadata)
    assert tokens * header.token_bytes == sum(one.nbytes for one in specs)
    assert header.at_most(tokens) == staged_bytes_at_most(sorted(layers), hidden, dtype, tokens)


@given(st.lists(st.binary(max_size=12), max_size=40))
def test_small_pieces_of_an_upload_travel_together(pieces: list[bytes]) -> None:
    with mock.patch("rayhs.shards._SMALL_PIECE", 8):
        got = list(_gathered(iter(map(memoryview, pieces))))
    assert b"".join(got) == b"".join(pieces)
    assert all(len(one) + len(next_one) >= 8 for one, next_one in itertools.pairwise(got))
