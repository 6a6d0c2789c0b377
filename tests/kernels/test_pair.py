"""``pair``, compiled and in NumPy, against the oracle: all pairs of dtypes, shapes, strides and special values."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.foundation.kernels import Pair, _pair, pair

from . import oracle, pair_oracle
from .conftest import SETS, compiled_for
from .test_summarize import values_of

BF16 = np.dtype(ml_dtypes.bfloat16)
NAMES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "uint64", "int32", "uint8", "bool")
DTYPES = [next(d for d in oracle.DTYPES if d.name == name) for name in NAMES]
ROUNDED = ("l2_difference", "l2_baseline", "l2_candidate", "sum_absolute", "sum_relative")

Compare = Callable[..., Pair]


@pytest.fixture(params=["twin", *SETS])
def compare(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compare]:
    if request.param == "twin":
        monkeypatch.setattr(_pair, "native", lambda: None)
        yield pair
        return
    with compiled_for(request.param):
        yield pair


def all_close(a: np.ndarray, b: np.ndarray) -> None:
    """Check the twin and every instruction set: what the oracle says, and hypothesis draws, is costlier than they are."""
    want = pair_oracle.compare(a, b)
    close(twin(a, b), want, a, b, "twin")
    for instructions in SETS:
        with compiled_for(instructions):
            close(pair(a, b), want, a, b, instructions)


def close(got: Pair, want: dict[str, Any], a: np.ndarray, b: np.ndarray, where: str) -> None:
    for name, value in want.items():
        found = getattr(got, name)
        if name in ROUNDED:
            assert found == pytest.approx(value, rel=2e-13, abs=5e-324), (where, name)
        elif name == "dot":
            scale = got.l2_baseline * got.l2_candidate
            assert found == pytest.approx(value, rel=1e-13, abs=1e-13 * scale) or scale > 1e300, (where, name)
        elif name == "ulp" and not exact_units(a, b):
            assert sum(found) == sum(value), (where, name)
        elif want["max_absolute"] > 2**53 and name in ("max_absolute", "max_relative", "max_index", "ulp"):
            # float64 has no room for more
            assert name in ("max_index", "ulp") or found == pytest.approx(value, rel=1e-15), (where, name)
        else:
            assert found == value or (found != found and value != value), (where, name, found, value)


def exact_units(a: np.ndarray, b: np.ndarray) -> bool:
    """Tell whether units are told to the last: no side is rounded twice on its way to the coarser dtype."""
    return a.dtype == b.dtype or all(d.name in ("float32", "bfloat16", "float64") for d in (a.dtype, b.dtype))


@pytest.mark.parametrize("first", DTYPES, ids=str)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), second=st.sampled_from(DTYPES))
def test_every_pair_of_dtypes(first: np.dtype, second: np.dtype, data: st.DataObject) -> None:
    a, b = data.draw(values_of(first)), data.draw(values_of(second))
    size = min(a.size, b.size)
    with np.errstate(all="ignore"):
        all_close(a[:size], b[:size])


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_noise(dtype: np.dtype, data: st.DataObject) -> None:
    """Bit patterns of one side, some of them a few numbers further on the other."""
    a = data.draw(values_of(dtype))
    b = a.copy()
    seed = data.draw(st.integers(0, 1000))
    with np.errstate(all="ignore"):
        raw = b.view(np.uint8)
        if dtype.kind != "b" and "int4" not in dtype.name and raw.size:
            raw[:: 1 + seed % 7] ^= 1 + seed % 2
        all_close(a, b)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 2047, 2048, 2049, 40_000, 300_001])
@pytest.mark.parametrize("names", [("float32", "float32"), ("float32", "bfloat16"), ("float64", "float16"), ("int64", "int64")])
def test_pieces_and_chunks(compare: Compare, names: tuple[str, str], size: int) -> None:
    """Every level gives the twin's numbers where pieces, chunks and vectors end."""
    first, second = (np.dtype(getattr(ml_dtypes, name, name)) for name in names)
    generator = np.random.default_rng(size)
    values = generator.standard_normal(size) * 1000
    a, b = values.astype(first), (values + generator.standard_normal(size)).astype(second)
    if a.dtype.kind == "f":
        a[:: 1 + size // 3] = np.nan
        b[-1] = -np.inf
    alike(compare(a, b), twin(a, b))
    alike(compare(a, b, threads=2), twin(a, b))


def twin(a: np.ndarray, b: np.ndarray, **more: Any) -> Pair:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pair, "native", lambda: None)
        return pair(a, b, **more)


def alike(got: Pair, want: Pair) -> None:
    for field in dataclasses.fields(Pair):
        x, y = getattr(got, field.name), getattr(want, field.name)
        if field.name in (*ROUNDED, "cosine"):
            assert x == pytest.approx(y, rel=1e-12, nan_ok=True), field.name
        elif field.name == "dot":
            assert x == pytest.approx(y, rel=1e-12, abs=1e-12 * want.l2_baseline * want.l2_candidate, nan_ok=True)
        else:
            assert x == y, field.name


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "bfloat16", "int8"])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T, lambda x: x[::-1, ::3], lambda x: x[:, None].repeat(2, 1)[..., ::2], lambda x: x[3:4].repeat(40, 0),
        lambda x: np.broadcast_to(x[:, :1], x.shape), lambda x: x[:, 5], lambda x: x[:0],
    ],
)  # fmt: skip
def test_strides(compare: Compare, dtype: str, view: Callable[[np.ndarray], np.ndarray]) -> None:
    generator = np.random.default_rng(1)
    a, b = (
        view((generator.standard_normal((90, 70)) * 9).astype(getattr(ml_dtypes, dtype, dtype))) for _ in range(2)
    )
    other = np.ascontiguousarray(b) if a.size % 2 else b
    alike(compare(a, other), twin(a.copy(order="C"), b.copy(order="C")))


def test_nothing_is_copied_as_a_whole(compare: Compare) -> None:
    import tracemalloc

    a = np.random.default_rng(0).standard_normal((3000, 1000)).astype(np.float32).T
    b = a[:, ::-1]
    tracemalloc.start()
    compare(a, b)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 5e6  # a transposed side alone is 12e6


def test_memory_mapped_and_misaligned(compare: Compare, tmp_path: Path) -> None:
    a, b = np.arange(5000, dtype=np.float32), np.arange(5000, dtype=np.float64) * 1.0001
    file = tmp_path / "two.bin"
    file.write_bytes(b"?" + a.tobytes() + b.tobytes())
    raw = np.memmap(file, np.uint8, "r")
    x, y = raw[1 : 1 + a.nbytes].view(np.float32), raw[1 + a.nbytes :].view(np.float64)
    assert not x.flags.writeable
    assert not x.flags.aligned
    alike(compare(x, y), twin(a, b))


def test_fields_of_records_and_swapped_bytes(compare: Compare) -> None:
    records = np.zeros(70, [("a", "f4"), ("c", "u1"), ("b", "f8")])
    records["a"], records["b"] = np.arange(70), np.arange(70)[::-1]
    alike(compare(records["a"], records["b"]), twin(records["a"].copy(), records["b"].copy()))
    alike(compare(records["a"].astype(">f4"), records["b"]), twin(records["a"].copy(), records["b"].copy()))


def test_zero_dimensions_and_no_elements(compare: Compare) -> None:
    one = compare(np.array(2.0), np.array(2.5, np.float32))
    assert (one.counted, one.max_absolute, one.max_index, one.cosine, one.rmse) == (1, 0.5, 0, 1.0, 0.5)
    none = compare(np.empty((0, 3)), np.empty((0, 3), np.int8))
    assert (none.counted, none.l2_difference, none.max_index, sum(none.ulp)) == (0, 0.0, None, 0)
    assert all(math.isnan(x) for x in (none.rmse, none.mean_absolute, none.mean_relative, none.cosine))


def test_a_norm_of_zero(compare: Compare) -> None:
    p = compare(np.zeros(5, np.float32), np.ones(5, np.float32))
    assert math.isnan(p.cosine)
    assert (p.l2_baseline, p.l2_difference, p.n_floored) == (0.0, pytest.approx(math.sqrt(5)), 5)
    assert p.max_relative == 1 / 2.0**-23


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_one_sided_specials(compare: Compare, dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    a = np.array([1, np.nan, np.inf, -np.inf, np.nan, np.inf, np.inf, 1], kind)
    b = np.array([1, np.nan, np.inf, -np.inf, 1.0, -np.inf, np.nan, np.inf], kind)
    p = compare(a, b)
    assert (p.counted, p.n_disagree, p.first_disagreement) == (1, 4, 4)
    assert (p.nan, p.posinf, p.neginf) == ((1, 1, 1), (1, 2, 1), (1, 0, 1))
    assert p.l2_difference == 0.0


def test_masks(compare: Compare) -> None:
    """What attention masks are made of is compared as a set, and drowns nothing."""
    top, brain = np.finfo(np.float32).max, ml_dtypes.finfo(BF16).max
    p = compare(np.array([-top, top, -top, 1.0], np.float32), np.array([-brain, -brain, 5.0, 2.0], BF16))
    assert (p.mask, p.n_disagree, p.first_disagreement) == ((1, 2, 1), 2, 1)
    assert (p.counted, p.l2_baseline, p.l2_difference) == (1, 1.0, 1.0)
    p = compare(np.array([-top, brain, 2.0], np.float32), np.array([-brain, top, 1.0], np.float32))
    assert (p.mask, p.n_disagree, p.counted) == ((2, 0, 0), 0, 1)


@pytest.mark.parametrize("value", [2**53, 2**62 - 3, 2**63 - 40, -(2**63) + 3, -(2**53) - 1])
def test_integers_beyond_float64_are_subtracted_exactly(compare: Compare, value: int) -> None:
    a = np.full(100, value, np.int64)
    b = a.copy()
    b[70] += 1
    p = compare(a, b)
    assert (p.equal, p.max_absolute, p.max_index, p.l2_difference, p.ulp[:3]) == (99, 1.0, 70, 1.0, (99, 1, 0))
    assert compare(a, b.astype(np.float64)).equal == int(float(value) == value) * (99 + (float(value + 1) == value))


def test_the_ends_of_64_bits(compare: Compare) -> None:
    a, b = np.array([-(2**63), 0, 2**63 - 1], np.int64), np.array([2**64 - 1, 2**64 - 1, 2**63 - 1], np.uint64)
    p = compare(a, b)
    assert (p.max_absolute, p.max_index, p.equal) == (float(2**64 - 1 + 2**63), 0, 1)
    assert compare(b, np.array([2**64 - 2] * 3, np.uint64)).ulp[1] == 2


def test_bool_is_exact(compare: Compare) -> None:
    a, b = np.array([True, False, True, True]), np.array([True, True, False, True])
    p = compare(a, b)
    assert (p.equal, p.max_index, p.sum_absolute, p.ulp[:2]) == (2, 1, 2.0, (2, 2))
    assert compare(a, np.array([1, 0, 1, 2], np.uint8)).equal == 3


@pytest.mark.parametrize("scale", [1e-310, 1e-200, 1e200, 1e300])
def test_norms_neither_overflow_nor_vanish(compare: Compare, scale: float) -> None:
    a = np.array([3.0, 4.0] * 40) * scale
    p = compare(a, a * 2)
    norm = np.sqrt(40) * 5 * scale
    for got, want in ((p.l2_baseline, norm), (p.l2_candidate, 2 * norm), (p.l2_difference, norm)):
        assert got == pytest.approx(want, rel=1e-12)
    assert p.cosine == pytest.approx(1.0)


def test_a_small_difference_of_large_numbers_keeps_its_norm(compare: Compare) -> None:
    a = np.zeros(4)
    a[0], b = 1e200, np.array([1e200, 3e-200, 4e-200, 0])
    assert compare(a, b).l2_difference == pytest.approx(5e-200, rel=1e-12)


def test_complex_against_real(compare: Compare) -> None:
    p = compare(np.array([1 + 0j, 2 + 2j], np.complex64), np.array([1.0, 2.0]))
    assert (p.numel, p.parts, p.equal, p.max_absolute, p.max_index) == (4, 2, 3, 2.0, 1)


def test_floor_and_instead(compare: Compare) -> None:
    """Elements up to the floor: against the epsilon (ptdbg), or left out (msaccucmp)."""
    a, b = np.array([0.0, 1e-8, 2.0], np.float32), np.array([1e-9, 1e-8, 2.001], np.float32)
    p = compare(a, b)
    assert p.max_relative == np.float64(b[0]) / 2.0**-23
    assert (p.n_floored, p.n_thousandth, p.n_five_thousandths) == (1, 2, 2)
    q = compare(a, b, floor=2.0**-23, instead=math.inf)
    assert (q.n_floored, q.n_thousandth, q.n_five_thousandths) == (2, 1, 1)
    assert q.mean_relative == q.max_relative == pytest.approx(0.0005, rel=1e-3)


def test_threads_change_nothing(compare: Compare) -> None:
    import torch

    generator = np.random.default_rng(3)
    a = generator.standard_normal((1500, 1100)).astype(np.float32)
    b = np.where(generator.random(a.shape) < 0.001, np.nan, a + generator.standard_normal(a.shape) * 1e-3).astype(np.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert compare(a, b, threads=2) == compare(a, b)
    assert compare(a.T, b.T, threads=2) == compare(a.T, b.T)
    flat = np.zeros(300_000, np.float32)
    assert {compare(flat, flat + 1, threads=2).max_index for _ in range(20)} == {0}  # ties, whoever finds his first
    torch.set_num_threads(before)


def test_other_threads_run_meanwhile(compare: Compare) -> None:
    a = np.ones(20_000_000, np.int8)
    ticks, stop = [], threading.Event()
    ticker = threading.Thread(target=lambda: [ticks.append(0) or stop.wait(0.0005) for _ in iter(stop.is_set, True)])
    ticker.start()
    before = len(ticks)
    compare(a, a)
    stop.set()
    ticker.join()
    assert len(ticks) > before + 3


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"expected two equal shapes, got \(2,\) and \(1, 2\)"):
        pair(np.ones(2), np.ones((1, 2)))
    with pytest.raises(TypeError, match="no statistics for dtype"):
        pair(np.ones(2), np.array(["a", "b"]))
    kernel = pytest.importorskip("trueup.foundation.kernels._native", reason="the compiled kernel was not built")
    with pytest.raises(TypeError, match=r"pair\(pointer, kind, strides"):
        kernel.pair(0)
    with pytest.raises(ValueError, match="no such kind: 77"):
        kernel.pair(0, 0, (4,), 0, 77, (4,), (1,), 0.0, 1.0, 0, 1)
    with pytest.raises(ValueError, match="both sides complex or both real"):
        kernel.pair(0, 0, (4,), 0, 17, (8,), (1,), 0.0, 1.0, 0, 1)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.int64])
def test_the_edges_of_the_shares(compare: Compare, dtype: type) -> None:
    """A relative error of just 1/1000 or 5/1000 is not below it."""
    a = np.full(6, 10_000, dtype)
    b = a + np.array([0, 9, 10, 49, 50, 51], dtype)
    p = compare(a, b)
    assert (p.n_thousandth, p.n_five_thousandths) == (2, 4)
    c = compare(a, -b)
    assert (c.n_thousandth, c.n_sign_flips) == (0, 6)
