"""What another tool's checksums and statistics say of two tensors, and what they must not be taken to say."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.comparison.graph.streams import Stream
from trueup.comparison.measures import measure
from trueup.foundation.facts import arguments
from trueup.foundation.facts.why import Why
from trueup.foundation.store.columns import Vocabulary
from trueup.foundation.store.schema import table

from .captures import load, normal

Array = np.ndarray[Any, Any]
NAMES = Vocabulary()


def told(array: Array, dtype: str = "float32") -> dict[str, Any]:
    """Return what a tool keeps of a tensor: sums in float32."""
    a = array.astype(np.float32)
    return {
        "dtype": dtype, "shape": list(array.shape), "numel": array.size, "min": float(a.min()), "max": float(a.max()),
        "mean": float(a.mean(dtype=np.float32)), "l2": float(np.sqrt(np.sum(a * a, dtype=np.float32))),
        "n_nan": 0, "n_posinf": 0, "n_neginf": 0,
    }  # fmt: skip


def stream(*rows: dict[str, Any], imported: bool = True) -> Stream:
    names = {name for row in rows for name in row} | {"foreign_checksum", "foreign_statistics"}
    columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
    fixed = {"seq": range(len(rows)), "slot": ["output.0"] * len(rows), "step": [0] * len(rows), "rank": [0] * len(rows)}
    return load(table({**{k: list(v) for k, v in fixed.items()}, **columns}), NAMES, Vocabulary(), imported=imported)


def distances(first: dict[str, Any], second: dict[str, Any], *, spread: bool = False) -> tuple[float, Why | None]:
    at = np.zeros(1, np.int64)
    found = measure.compare_statistics((stream(first), stream(second)), (at, at), np.array([spread]))
    return float(found.absolute[0]), found.whys[0]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 400), st.floats(1e-7, 10), st.floats(1e-6, 1e6), st.integers(0, 2**32), st.booleans())
def test_the_bound_is_never_above_the_distance(size: int, error: float, scale: float, seed: int, sparse: bool) -> None:
    chance = np.random.default_rng(seed)
    a = (chance.standard_normal(size) * scale).astype(np.float32)
    moved = chance.standard_normal(size) * error * scale * ((chance.random(size) < 0.02) if sparse else 1)
    b = (a + moved).astype(np.float32)
    bound, why = distances(told(a), told(b))
    assert 0 <= bound <= np.linalg.norm(b.astype(np.float64) - a)
    assert why is (Why.BOUND if bound else None)


def test_each_statistic_bounds() -> None:
    a = normal(1000)
    norm = float(np.linalg.norm(a))
    assert distances(told(a), told(a)) == (0.0, None)
    assert distances(told(a), told(a * np.float32(1.01)))[0] == pytest.approx(0.01 * norm, rel=1e-2)  # the norm is that far
    assert distances(told(a), told(a + np.float32(0.1)))[0] == pytest.approx(0.1 * math.sqrt(1000), rel=1e-2)  # the mean
    b = a.copy()
    b[a.argmax()] += 3
    assert distances(told(a), told(b))[0] == pytest.approx(3, rel=1e-4)  # the largest element


def test_what_statistics_do_not_see_is_left_at_zero() -> None:
    a = normal(1000)
    assert distances(told(a), told(a[::-1])) == (0.0, None)


def test_what_is_read_is_taken_for_a_difference_of_all_elements() -> None:
    a = normal(10_000)
    b = (a + 1e-3 * normal(10_000, seed=1)).astype(np.float32)
    bound, estimate = distances(told(a), told(b))[0], distances(told(a), told(b), spread=True)
    distance = float(np.linalg.norm(b - a))
    assert bound < 0.2 * distance
    assert 0.2 * distance < estimate[0] < 4 * distance
    assert estimate[1] is Why.SPREAD


def test_half_precision_may_be_off_by_more() -> None:
    a = told(normal(1000))
    b = a | {"l2": a["l2"] * 1.003}
    assert distances(a, b)[0] > 0
    assert distances(a | {"dtype": "bfloat16"}, b | {"dtype": "bfloat16"}) == (0.0, None)


def test_counts_that_differ_and_numbers_that_are_lacking() -> None:
    a = told(normal(10))
    assert distances(a, a | {"n_nan": 1}) == (math.inf, Why.NOT_FINITE)
    assert math.isnan(distances(a, a | {"max": None})[0])
    assert distances(a | {"mean": None, "l2": None}, a) == (0.0, None)  # integers have neither, and max and min agree
    overflown = a | {"l2": None, "foreign_statistics": '{"norm": "inf"}'}
    assert distances(overflown, overflown) == (0.0, None)
    assert math.isnan(distances(overflown, a)[0])


TEXT = {"max": 1.0, "min": "-inf", "mean": "-inf", "norm": "inf"}


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ({"foreign_statistics": json.dumps(TEXT)}, 0.0),
        ({"foreign_statistics": json.dumps(TEXT | {"max": 1.5})}, 0.5),
        ({"foreign_statistics": json.dumps(TEXT | {"max": "nan", "min": "nan"})}, math.inf),
        (told(np.array([1.0, 0.5])) | {"n_neginf": 2}, 0.0),
        (told(np.array([1.0, 0.5])), math.inf),
        (told(np.array([1.0, 0.5])) | {"n_nan": 1}, math.inf),
        ({}, math.nan),
        ({"foreign_statistics": "[" * 100_000}, math.nan),
        ({"foreign_statistics": json.dumps({"max": 1.0, "min": 0.0})}, math.inf),
    ],
)
def test_of_tensors_with_nan_or_inf_the_extremes_speak(second: dict[str, Any], expected: float) -> None:
    streams = stream({"foreign_statistics": json.dumps(TEXT)}), stream(second)
    assert measure.compare_texts(streams, (0, 0))[0] == pytest.approx(expected, rel=1e-5, nan_ok=True)


LOWEST = -3.4028234663852886e38
MASKED = {"max": 0.0, "min": LOWEST, "mean": LOWEST / 2, "norm": "inf"}
OURS = told(np.zeros(4)) | {"n_saturated": 2}


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (OURS, 0.0),
        (OURS | {"max": 0.5}, 0.5),
        (OURS | {"n_saturated": 0}, math.inf),
        ({"foreign_statistics": json.dumps(MASKED | {"mean": LOWEST / 2 * 1.0001})}, 0.0),
        ({"foreign_statistics": json.dumps(MASKED | {"mean": LOWEST / 4})}, math.inf),
        ({"foreign_statistics": json.dumps(MASKED | {"mean": [], "norm": None})}, 0.0),
    ],
)
def test_masks_are_none_of_our_extremes(second: dict[str, Any], expected: float) -> None:
    first = {"dtype": "float32", "foreign_statistics": json.dumps(MASKED)}
    streams = stream(first), stream({"dtype": "float32"} | second)
    assert measure.compare_texts(streams, (0, 0))[0] == pytest.approx(expected, rel=1e-5)


def test_a_tensor_with_masks_is_none_without() -> None:
    assert distances(OURS, told(np.zeros(4))) == (math.inf, Why.NOT_FINITE)
    assert distances(told(np.zeros(4)), told(np.zeros(4)) | {"n_saturated": 0}) == (0.0, None)


def test_numbers_of_another_meaning_are_equal_or_say_nothing() -> None:
    texts = [json.dumps({"max": 2.0, "min": 1.0, "mean": mean}) for mean in (1, 2)]
    magnitudes = [{"dtype": "complex64", "foreign_statistics": text} for text in texts]
    assert measure.compare_texts((stream(magnitudes[0]), stream(magnitudes[0])), (0, 0)) == measure.OfText(0.0)
    distance, why, _ = measure.compare_texts((stream(magnitudes[0]), stream(magnitudes[1])), (0, 0))
    assert math.isnan(distance)
    assert why is Why.MEANING


def test_checksums() -> None:
    texts = ["crc32:1", "crc32:1", "crc32:1", "crc32:1", "xor64:1", "xor64:1", "unknown9:1"]
    others = ["crc32:1", "crc32:2", "md5:1", None, "xor64:1", "xor64:2", "unknown9:1"]
    streams = tuple(stream(*({"foreign_checksum": text} for text in side)) for side in (texts, others))
    at = np.arange(len(texts))
    found = measure.compare_checksums((streams[0], streams[1]), (at, at))
    assert np.flatnonzero(found.equal).tolist() == [0]
    assert np.flatnonzero(found.weakly).tolist() == [4, 6]
    assert np.flatnonzero(found.unequal).tolist() == [1, 5]


def test_arguments_that_both_sides_have() -> None:
    assert arguments.shared('{"a": 1, "b": 2}', '{"b": 3, "c": 4}') == ('{"b": 2}', '{"b": 3}')
    assert arguments.shared(None, '{"c": 4}') == ("{}", "{}")
    assert arguments.shared("no", "{}") == ("no", "{}")
