"""`rayhs inspect`: figures equal numpy's over states made by hand; the page is whole, escaped and loads nothing."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from typer.testing import CliRunner

import rayhs
from rayhs.cli import app
from rayhs.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, ConfigError, FormatError
from rayhs.fp8 import dequantize
from rayhs.inspect import figures, inspect_dataset
from rayhs.inspect.massive import median_magnitude, position_bins
from rayhs.inspect.page import render
from rayhs.inspect.prompts import distribution
from rayhs.inspect.sketch import Moments, QuantileSketch, half_octaves
from rayhs.inspect.states import StateTotals
from rayhs.layout import ShardId
from rayhs.reading.sample import Sample
from tests.builders import Builder, Row

EVIL = "</script><img src=x onerror='alert(1)'>&\x1b[2J"


def all_states(rows: list[Row], layer: int) -> np.ndarray:
    states = [dequantize(r.states[layer], r.scales[layer], "bfloat16") if r.scales else r.states[layer] for r in rows]
    return np.concatenate(states).astype(np.float64)


@pytest.mark.parametrize("shard_format", ["safetensors", "parquet"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_figures_of_layers_are_those_of_numpy(tmp_path: Path, shard_format: str, dtype: str) -> None:
    built = Builder(tmp_path, shard_format=shard_format, dtype=dtype).write()
    found = inspect_dataset(rayhs.open(str(tmp_path))).states
    assert found.all_samples and found.samples == 11 and list(found.layers) == ["0", "2", "4"]
    before = None
    for layer in built.layers:
        own, x = found.layers[str(layer)], all_states(built.good(), layer)
        norms = np.linalg.norm(x, axis=1)
        wanted = (norms.mean(), norms.std(), norms.min(), norms.max(), np.abs(x).mean(), np.abs(x).max())
        have = (own.norm_mean, own.norm_std, own.norm_min, own.norm_max, own.abs_mean, own.abs_max)
        assert have == pytest.approx(wanted, rel=1e-5) and own.tokens == found.tokens == len(x)
        for value, q in ((own.norm_p1, 0.01), (own.norm_median, 0.5), (own.norm_p99, 0.99)):
            assert value == pytest.approx(np.quantile(norms, q, method="lower"), rel=0.00501)
        assert own.zero_share == (x == 0).mean() and own.non_finite == 0
        if before is None:
            assert own.cosine_before is None
        else:
            cosines = (x * before).sum(axis=1) / norms / np.linalg.norm(before, axis=1)
            assert own.cosine_before == pytest.approx(cosines.mean(), abs=1e-5)
        float8 = (own.float8_error_mean, own.float8_error_max)
        assert float8 == ((0.02, 0.03) if dtype == "float8_e4m3fn" else (None, None))
        before = x


def sample_of(states: dict[int, np.ndarray]) -> Sample:
    tokens = len(next(iter(states.values())))
    ids = np.arange(tokens, dtype=np.int32)
    return Sample("s", 0, ids, np.ones(tokens, np.uint8), states, "ok", None, {})  # type: ignore[arg-type]


def test_extreme_states_neither_overflow_nor_vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayhs.inspect.states._VALUES", 8)  # two tokens at once
    x = np.full((6, 4), 1e30, np.float32)
    x[2:4], x[4], x[5] = 1e-30, np.nan, 0
    x[4, 1] = np.inf
    y = np.ones((6, 4), np.float32)
    totals = StateTotals([1, 2])
    totals.add(sample_of({1: x, 2: y}))
    found = totals.figures(True, {})
    own, other = found.layers["1"], found.layers["2"]
    assert (own.norm_max, own.norm_min, own.tokens, own.non_finite) == (pytest.approx(2e30), 0, 5, 1)
    assert own.zero_share == pytest.approx(0.2) and own.abs_max == np.float32(1e30)
    assert other.cosine_before == pytest.approx(1) and other.tokens == 6
    # Half of the magnitudes are large: none is a thousand times their median.
    assert found.massive.layers["1"].tokens == found.massive.layers["2"].tokens == 0
    totals = StateTotals([1])
    totals.add(sample_of({1: np.full((2, 4), np.nan, np.float32)}))
    assert math.isnan(totals.figures(True, {}).layers["1"].norm_median)


def massive_dataset(folder: Path, dtype: str = "float32") -> Builder:
    """Values of 1 or 2 and, in layer 2: one of 3000 in dimension 5 of the first token of each sample, one of -5000 in
    dimension 3 of position 2 of sample 5, one of 90 and one of 1500 with a median of 2 where there must be none."""
    built = Builder(folder, dtype=dtype, lengths=(5, 9))
    for row in built.good():
        states = {k: np.where(np.arange(8) % 2, 1.0, -1.0) * np.ones((len(row.token_ids), 1)) for k in built.layers}
        states[2][0, 5] = 3000
        states[4] *= 2
        states[4][1, 1], states[4][2, 2] = 90, 1500
        row.states = {k: s.astype(row.states[k].dtype) for k, s in states.items()}
        row.token_ids[0] = 77
    built.rows[0][1][2].states[2][2, 3] = -5000
    return built.write()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_massive_activations_are_found_where_they_are(tmp_path: Path, dtype: str) -> None:
    built = massive_dataset(tmp_path, dtype)
    found = inspect_dataset(rayhs.open(str(tmp_path))).states.massive
    rows, odd = built.good(), built.rows[0][1][2]
    tokens = sum(len(row.token_ids) for row in rows)
    assert {layer: own.tokens for layer, own in found.layers.items()} == {"0": 0, "2": 12, "4": 0}
    own = found.layers["2"]
    assert own.samples == 11 and own.token_share == 12 / tokens and own.first_token_share == 11 / 12
    assert found.position_bins[:4] == [(0, 0), (1, 1), (2, 3), (4, max(len(r.token_ids) for r in rows) - 1)]
    assert own.positions == [11, 0, 1, 0]
    assert [(c.number, c.tokens) for c in own.token_ids] == [(77, 11), (int(odd.token_ids[2]), 1)]
    assert [(c.number, c.tokens) for c in own.dimensions] == [(5, 11), (3, 1)]
    first, second = found.top
    scale = float(np.float32(-5000).astype(odd.states[2].dtype))
    assert (first.layer, first.dimension, first.value, first.median) == (2, 3, scale, 1.0)
    assert (first.sample_id, first.position, first.token_id) == ("row-5", 2, int(odd.token_ids[2]))
    assert (second.dimension, second.position, second.token_id, second.sample_id) == (5, 0, 77, "row-0")
    assert found.layers["0"].first_token_share is None and found.layers["0"].positions == [0] * 4


FLOATS = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


@given(st.sampled_from(FLOATS), arrays(np.float32, array_shapes(max_dims=2), elements=st.floats(-6e4, 6e4, width=16)))
def test_the_median_magnitude_is_that_of_numpy(dtype: np.dtype[Any], values: np.ndarray) -> None:
    states = values.astype(dtype)
    assert median_magnitude(states) == np.median(np.abs(states.astype(np.float64)))


@given(arrays(np.float32, st.integers(1, 50), elements=st.floats(0, width=32, allow_infinity=False)))
def test_a_median_of_float32_is_exact(values: np.ndarray) -> None:
    assert median_magnitude(values) == np.median(values.astype(np.float64))


POSITIVE = st.one_of(st.just(0.0), st.floats(1e-40, 1e40), st.floats(0.9, 1.1))


@given(st.lists(st.lists(POSITIVE, max_size=20), max_size=5), st.floats(0, 1))
def test_quantiles_are_within_their_bounds(parts: list[list[float]], q: float) -> None:
    sketch, moments = QuantileSketch(), Moments()
    for part in parts:
        sketch.add(np.array(part, np.float64))
        moments.add(np.array(part, np.float64))
    values = sorted(value for part in parts for value in part)
    if not values:
        assert math.isnan(sketch.quantile(q)) and math.isnan(moments.std)
        return
    assert sketch.quantile(q) == pytest.approx(values[math.floor(q * (len(values) - 1))], rel=0.005 + 1e-9, abs=0)
    assert (moments.count, moments.min, moments.max) == (len(values), values[0], values[-1])
    assert moments.mean == pytest.approx(np.mean(values), rel=1e-9)
    assert moments.std == pytest.approx(np.std(values), rel=1e-6, abs=1e-9 * values[-1])


@given(st.integers(1, 10**7))
def test_bins_have_no_gap_and_no_overlap(largest: int) -> None:
    for bins, first, last in ((half_octaves(largest), 1, largest), (position_bins(largest), 0, largest - 1)):
        assert bins[0][0] == first and bins[-1][1] == last and all(a <= b for a, b in bins)
        assert all(left[1] + 1 == right[0] for left, right in pairwise(bins))


@given(arrays(np.int64, st.integers(1, 60), elements=st.integers(1, 1000)))
def test_exact_quantiles(values: np.ndarray) -> None:
    found = distribution(values)
    assert found is not None
    assert (found.count, found.total, found.mean) == (len(values), values.sum(), pytest.approx(values.mean()))
    wanted = [np.quantile(values, q, method="lower") for q in (0, 0.5, 0.99, 1)]
    assert [found.min, found.median, found.p99, found.max] == wanted


def test_lengths_loss_duplicates_and_reasons_of_all_samples(tmp_path: Path) -> None:
    built = Builder(tmp_path, groups=((3, 4), (3, 4, 1)))
    rows = built.all_rows()
    rows[7].reason, rows[8].status, rows[8].reason = "oom: 12 of 512 pages", "failed", "oom: 7 of 512 pages"
    for twin, of in ((rows[3], rows[1]), (rows[10], rows[1]), (rows[12], rows[2]), (rows[8], rows[0])):
        twin.token_ids, twin.loss_mask, twin.states = of.token_ids, of.loss_mask, of.states
    rows[5].loss_mask[:] = 0
    built.write()
    found = inspect_dataset(rayhs.open(str(tmp_path)), samples=2)
    good, failed = built.good(), [rows[7], rows[8]]
    assert (found.samples, found.ok, found.failed, found.rejected) == (15, 12, 2, 1)
    assert found.reasons == {"failed": {"oom: N of N pages": 2}, "rejected": {"the prompt is empty": 1}}
    lengths = [len(row.token_ids) for row in good]
    assert found.lengths.ok == distribution(np.array(lengths)) and found.lengths.ok is not None
    assert found.lengths.failed == distribution(np.array([len(row.token_ids) for row in failed]))
    for one in found.lengths.histogram:
        assert one.ok == sum(one.first <= n <= one.last for n in lengths)
        assert one.failed == sum(one.first <= len(r.token_ids) <= one.last for r in failed)
    assert sum(one.ok + one.failed for one in found.lengths.histogram) == 14
    counted = sum(int(row.loss_mask.sum()) for row in good)
    assert (found.loss.tokens, found.loss.counted) == (sum(lengths), counted)
    assert found.loss.share == pytest.approx(counted / sum(lengths))
    assert found.loss.samples_without == sum(not row.loss_mask.any() for row in good) >= 1
    # Sample 8 failed: it is no duplicate of sample 0.
    assert (found.duplicates.groups, found.duplicates.extra) == (2, 3)
    largest = [(g.samples, g.first_id, g.tokens) for g in found.duplicates.largest]
    assert largest == [(3, "row-1", len(rows[1].token_ids)), (2, "row-2", len(rows[2].token_ids))]
    assert found.states.samples == 2 and not found.states.all_samples


def test_without_a_mask_the_loss_counts_every_token_and_the_generated_ones(tmp_path: Path) -> None:
    built = Builder(tmp_path, groups=((2,),), include_generated=3)
    first, second = built.rows[0][0]
    built.write()
    stored = {row.index: (row.token_ids, row.loss_mask, row.states) for row in (first, second)}
    # As a run with generated tokens: three more are stored than planned.
    for row in (first, second):
        ids, mask, states = stored[row.index]
        row.token_ids, row.loss_mask = (
            np.append(ids, [1, 2, 3]).astype(np.int32),
            np.append(mask, [1, 1, 1]).astype(np.uint8),
        )
        row.states = {k: np.concatenate([s, np.ones((3, s.shape[1]), s.dtype)]) for k, s in states.items()}
    built.write_shard(ShardId(0, 0))
    built.write_index(0, built.index_rows(0))
    built.write_summary()
    found = inspect_dataset(rayhs.open(str(tmp_path)))
    wanted = [int(row.loss_mask.sum()) for row in (first, second)]
    assert found.loss.counted == sum(wanted) and found.loss.tokens == len(first.token_ids) + len(second.token_ids)
    assert found.duplicates.groups == 0


def test_samples_are_chosen_evenly_over_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = Builder(tmp_path, groups=((10, 10), (10, 10))).write()
    ds = rayhs.open(str(tmp_path))
    asked: list[list[int]] = []
    read = ds.samples
    monkeypatch.setattr(ds, "samples", lambda at, prefetch: asked.append(at.tolist()) or read(at, prefetch=prefetch))
    good = [row.index for row in built.good()]
    steps: list[tuple[str, int, int]] = []
    found = inspect_dataset(ds, samples=4, on_progress=lambda *step: steps.append(step)).states
    assert asked == [[good[4], good[14], good[23], good[33]]] and found.samples == 4 and not found.all_samples
    assert steps[-1] == ("states", 4, 4) and ("tokens", 40, 40) in steps
    assert inspect_dataset(ds, samples=0).states.all_samples and inspect_dataset(ds, samples=99).states.samples == 38
    monkeypatch.setattr("rayhs.inspect.DEFAULT_SAMPLES", 9)
    assert inspect_dataset(ds).states.samples == 9
    monkeypatch.setattr("rayhs.inspect._DEFAULT_BYTES", 40 * ds.token_bytes)
    monkeypatch.setattr("rayhs.inspect._LEAST_SAMPLES", 3)
    tokens = sum(len(row.token_ids) for row in built.good())
    assert 3 < inspect_dataset(ds).states.samples == 38 * 40 // tokens < 9


def test_only_the_layers_of_the_dataset_are_looked_at(tmp_path: Path) -> None:
    Builder(tmp_path).write()
    assert list(inspect_dataset(rayhs.open(str(tmp_path), layers=[4])).states.layers) == ["4"]


def test_what_is_refused(tmp_path: Path) -> None:
    Builder(tmp_path / "part", finished=False).write()
    with pytest.raises(ConfigError, match="not finished; run rayhs extract .or import. again, then inspect"):
        inspect_dataset(rayhs.open(str(tmp_path / "part"), partial=True))
    built = Builder(tmp_path / "data").write()
    with pytest.raises(ConfigError, match="samples=-1: give a number of samples, or 0"):
        inspect_dataset(rayhs.open(str(built.folder)), samples=-1)
    next((built.folder / "shards").iterdir()).write_bytes(b"short")
    with pytest.raises(FormatError):
        inspect_dataset(rayhs.open(str(built.folder)))


class Page(HTMLParser):
    """Tags in order, each closed; their attributes; the text."""

    VOID = ("meta",)

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check_page(html: str) -> Page:
    page = Page(html)
    drawn = {"svg", "rect", "line", "polyline", "polygon", "circle", "text", "figure", "figcaption"}
    words = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "table", "tr", "th", "td"}
    assert page.tags <= drawn | words
    names = {name for name, _ in page.attributes}
    assert not names & {"src", "href", "xlink:href", "style", "srcset"} and not any(n.startswith("on") for n in names)
    assert not any(part in html for part in ("://", "url(", "@import", "<script"))
    return page


def test_the_page_is_whole_escaped_and_loads_nothing(tmp_path: Path) -> None:
    built = massive_dataset(tmp_path)
    for row in built.good():
        row.token_ids[:] = row.token_ids[0]  # duplicates name a first sample
    built.model = EVIL
    built.write()
    rows = [built.index_rows(file) for file in range(2)]
    for row in [*rows[0], *rows[1]]:
        row["sample_id"] = f"{row['index']} {EVIL}"
        row["reason"] = None if row["status"] == "ok" else EVIL
    for file, own in enumerate(rows):
        built.write_index(file, own)
    html = render(inspect_dataset(rayhs.open(str(tmp_path))))
    page = check_page(html)
    assert page.text.count("onerror='alert(1)'") >= 4 and "\x1b" not in html and EVIL[:20] not in html
    for words in ("Lengths", "Massive activations", "Duplicates", "Samples without states", "-5,000", "layer id"):
        assert words in page.text
    assert html.count("<svg") == 4 and "prefers-color-scheme: dark" in html and "width=device-width" in html


def test_a_page_of_a_dataset_without_a_good_sample(tmp_path: Path) -> None:
    built = Builder(tmp_path, groups=((2,),))
    for row in built.rows[0][0]:
        row.status, row.reason = "failed", "broken"
    (tmp_path / "shards").mkdir()
    built.write()
    found = inspect_dataset(rayhs.open(str(tmp_path)))
    assert (found.ok, found.failed, found.states.layers, found.loss.share) == (0, 2, {}, None)
    assert found.lengths.ok is None and found.duplicates.groups == 0 and found.states.massive.top == []
    check_page(render(found))
    assert "0 of 2; 2 failed" in run("inspect", str(tmp_path))


def test_a_page_of_one_layer_and_one_token(tmp_path: Path) -> None:
    built = Builder(tmp_path, groups=((1,),), layers=(2,), lengths=(1, 2)).write()
    built.rows[0][0][0].states[2][:] = 0
    built.write()
    check_page(render(inspect_dataset(rayhs.open(str(tmp_path)))))


def run(*arguments: str, code: int = EXIT_OK) -> str:
    result = CliRunner().invoke(app, list(arguments), prog_name="rayhs")
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.stdout if code == EXIT_OK else result.stderr


def test_the_verb(tmp_path: Path) -> None:
    massive_dataset(tmp_path / "data")
    page = tmp_path / "new folder" / "page.html"
    text = run("inspect", str(tmp_path / "data"), "--html", str(page))
    for words in (
        "11 of 13; 1 failed",
        "the prompt is empty",
        "all 11 samples",
        "-5,000",
        "cosine to layer",
        str(page),
    ):
        assert words in text
    check_page(page.read_text(encoding="utf-8"))
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]
    assert "4 of 11 samples, evenly over the index" in run("inspect", str(tmp_path / "data"), "--samples", "4")


def test_json_has_the_fields_that_are_documented(tmp_path: Path) -> None:
    Builder(tmp_path / "data").write()
    found = json.loads(run("inspect", str(tmp_path / "data"), "--json"))
    assert set(found) == {field.name for field in fields(figures.Inspection)}
    assert set(found["states"]["layers"]["2"]) == {field.name for field in fields(figures.LayerFigures)}
    assert set(found["states"]["massive"]["layers"]["2"]) == {field.name for field in fields(figures.LayerMassive)}
    assert found["lengths"]["ok"]["count"] == 11 and found["states"]["layers"]["0"]["cosine_before"] is None


def test_what_the_verb_refuses(tmp_path: Path) -> None:
    Builder(tmp_path / "part", finished=False).write()
    assert "not finished, 5 of 5 shards" in run("inspect", str(tmp_path / "part"), code=EXIT_FAILED)
    Builder(tmp_path / "data").write()
    for name in ("page", "folder/", ".html"):
        message = run("inspect", str(tmp_path / "data"), "--html", str(tmp_path / name), code=EXIT_USAGE)
        assert "give the name of a file that ends in .html" in message
    run("inspect", str(tmp_path / "data"), "--samples", "-1", code=EXIT_USAGE)
    (tmp_path / "file").write_text("")
    assert run("inspect", str(tmp_path / "data"), "--html", str(tmp_path / "file" / "page.html"), code=EXIT_FAILED)
