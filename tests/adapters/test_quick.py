"""The compiled short ways give what the Python code that they stand in for gives."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trueup
from adapters.computations import COMPUTATIONS, ON_THE_CPU_ONLY
from adapters.computations import build as computation
from adapters.subjects import SUBJECTS, build
from trueup.foundation.store import open_capture
from trueup.recording.adapters.torch import functions, gradients, session, tensors
from trueup.recording.adapters.torch.tensors import quick_module
from trueup.recording.recorder import flusher

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(quick_module() is None, reason="the compiled parts were not built"),
]

LEVELS = [("api", "stats"), ("aten", "stats"), ("module", "digest"), ("module,api,aten", "tensor")]


def record(step: Any, path: Path, level: str, detail: str) -> pa.Table:
    step()  # the first step of a process executes a call more
    trueup.seed_all(1)
    with trueup.capture(path, level=level.split(","), detail=detail, on_error="stop"):
        for _ in range(2):
            step()
    return open_capture(path).records()


def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "quick", lambda *_: None)
    monkeypatch.setattr(functions, "named_tensors", tensors._named_tensors)
    monkeypatch.setattr(gradients, "_note_edges", gradients._note_edges_plainly)
    monkeypatch.setattr(gradients, "_boundary", gradients._boundary_plainly)


def same(short: pa.Table, long: pa.Table) -> None:
    # Numbers of call stacks come in the order in which these were met, segments as portions are handed over.
    left_out = ["site", "payload_segment", "payload_key", "payload_view"]
    assert short.num_rows > 0
    assert short["payload_segment"].is_null().equals(long["payload_segment"].is_null())
    for name in short.drop_columns(left_out).column_names:
        assert repr(short[name].to_pylist()) == repr(long[name].to_pylist()), name  # NaN is like NaN


def test_the_garbage_collector_sees_no_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step leaves one call and one buffer or two for every function until they are written."""
    monkeypatch.setattr(flusher, "FLUSH_SECONDS", 60.0)
    x = torch.ones(8, requires_grad=True)
    with trueup.capture(path, level="api", on_error="stop") as capture:
        torch.exp(x).sum().backward()
        torch.exp(x).sum().backward()  # by now the layouts are known
        last = capture._session.recorder._rows[-6:]
    call, statistics = last[1], last[5]
    assert call.phase == "backward"
    assert statistics.digest is not None
    assert not gc.is_tracked(call)
    assert not gc.is_tracked(statistics)


TRAININGS = [(name, *LEVELS[3]) for name in SUBJECTS]
TRAININGS += [(name, *LEVELS[k]) for k in (0, 1, 2) for name in ("in-place", "checkpoint", "keywords", "custom")]


@pytest.mark.parametrize(("name", "level", "detail"), TRAININGS)
def test_the_rows_of_a_training(name: str, level: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = record(build(name, "cpu").step, tmp_path / "short", level, detail)
    in_python(monkeypatch)
    same(short, record(build(name, "cpu").step, tmp_path / "long", level, detail))


@pytest.mark.parametrize("name", [name for name in COMPUTATIONS if name not in ON_THE_CPU_ONLY])
def test_the_rows_of_a_computation(name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = record(computation(name, device).iterate, tmp_path / "short", "api", "stats")
    in_python(monkeypatch)
    same(short, record(computation(name, device).iterate, tmp_path / "long", "api", "stats"))


def arguments() -> torch.Tensor:
    """Call functions with arguments that are alike, and are not to be taken for one another."""
    x = torch.ones(4, 4)
    for value in (1, True, 1.0, 0, False, 0.0, -0.0, float("nan"), float("inf"), 2**40):
        x = x.clamp(max=value) if isinstance(value, float) else x
        torch.full((2,), value, dtype=torch.float64)
    for shape in ((2, 2), [2, 2], torch.Size([2, 2])):
        torch.zeros(shape)
    for index in (slice(1), slice(None, 1), slice(0, 1), slice(0, 1, 1), slice(0, None), 0, (0, slice(2)), ..., None, [0, 1]):
        x[index]
    for kwargs in ({"dim": 0}, {"dim": -1}, {"dim": (0,)}, {"dim": [0, 1]}, {"dim": 0, "keepdim": True}, {"dtype": torch.float64}):
        x.sum(**kwargs)
    return x.to("cpu").to(torch.device("cpu")).to(torch.float64, copy=True).reshape(-1, 2).permute(1, 0)


@pytest.mark.parametrize("level", ["api", "aten"])
def test_arguments_that_are_no_tensors(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = record(arguments, tmp_path / "short", level, "stats")
    in_python(monkeypatch)
    same(short, record(arguments, tmp_path / "long", level, "stats"))
    assert len(set(short["value"].to_pylist())) > 25


def made() -> None:
    """Calls that differ in one respect each: what finds a description again must tell them apart."""
    x = torch.arange(24.0).reshape(4, 6)
    w = torch.ones(4, 6, requires_grad=True)
    base = torch.zeros(2, 24)
    for _ in range(2):  # the second time all are known
        for a, b in ((x, x), (x, x.clone()), (x, w), (w, x), (w, w), (x[:2].repeat(2, 1), x), (x, x.double())):
            torch.add(a, b)
            torch.cat([a, b])
            torch.cat((a, b))
        for view in (base[0], base[1]):  # one layout, another offset
            view.sum()
        base[0].add(base[1]), base[1].add(base[0])
        for index in (..., False, 0, True, (0,), [0], (..., 0), (False, 0), slice(0, 1), (slice(0, 1),), None, (None, ...)):
            x[index]
        for value in (1, 1.0, True, -0.0, 0.0, 0, float("nan"), float("inf")):
            torch.add(x, value)
        x.sum(0, True), x.sum(dim=0, keepdim=True), x.sum(keepdim=True, dim=0), x.sum([0]), x.sum((0,)), x.sum()
        x.view(torch.Size((24,))), x.view((24,)), x.view([24]), x.view(24)
        x.clone(memory_format=torch.contiguous_format), x.clone(memory_format=torch.preserve_format), x.to(torch.float64)
        torch.add(x, x, out=torch.empty(4, 6))
        with torch.no_grad():
            torch.add(x, w)
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                torch.add(x, w)
        torch.nn.functional.dropout(x, 0.5)
        torch.rand(3), torch.zeros(3), torch.randn(2, generator=torch.Generator().manual_seed(3))
        torch.func.vmap(lambda v: torch.add(v, w[0]))(x)


@pytest.mark.parametrize("level", ["api", "aten", "api,aten"])
def test_how_calls_were_made(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = record(made, tmp_path / "short", level, "tensor")
    in_python(monkeypatch)
    long = record(made, tmp_path / "long", level, "tensor")
    same(short, long)
    assert long["invocation"].equals(short["invocation"])
    states = [text for text in short["invocation"].to_pylist() if text is not None and '"random"' in text]
    assert 8 <= len(states) <= 12, len(states)  # each step: at the first call, and after each of those that draw


@dataclasses.dataclass
class Output:
    last: Any
    rest: Any = None


X = torch.ones(2)
LEAVES = st.sampled_from([None, 1, 2.5, True, "text", slice(1), X, torch.nn.Parameter(X), torch.float32, object()])
KEYS = st.one_of(st.text(max_size=3), st.integers(), st.floats(), st.booleans(), st.just((1, 2)))
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(KEYS, inner, max_size=3),
        st.builds(Output, inner, inner),
    ),
    max_leaves=12,
)  # fmt: skip


@given(NESTED, st.one_of(st.none(), st.dictionaries(st.text(max_size=3), NESTED, max_size=3)))
def test_names_of_tensors(args: Any, kwargs: dict[str, Any] | None) -> None:
    short, long = (walk("input", args, kwargs) for walk in (tensors.named_tensors, tensors._named_tensors))
    assert [name for name, _ in short] == [name for name, _ in long]
    assert all(a is b for (_, a), (_, b) in zip(short, long, strict=True))


def test_names_where_a_structure_contains_itself_or_is_long() -> None:
    inside: list[Any] = [X]
    inside.append(inside)
    many = [X] * 100
    for value in (inside, many, {"a": inside}, (many, many)):
        assert [n for n, _ in tensors.named_tensors("output", value)] == [n for n, _ in tensors._named_tensors("output", value)]


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("named_tensors", ()), ("named_tensors", (1, X)), ("note_edges", ((), {}, {})), ("note_edges", ([1], {}, {})),
        ("boundary", (None, 0, [], {}, [], True, 5)), ("boundary", (None, 0, {}, {}, [1], True, 5)), ("set_types", (1, 2, 3)),
    ],
)  # fmt: skip
def test_bad_arguments_are_errors(function: str, args: Any) -> None:
    with pytest.raises((TypeError, AttributeError)):
        getattr(quick_module(), function)(*args)


def test_bad_arguments_of_a_short_way(path: Path) -> None:
    compiled = quick_module()
    assert compiled is not None
    with pytest.raises(TypeError, match="keyword"):
        compiled.Quick(1)
    with pytest.raises(TypeError, match="session"):
        compiled.Quick(recorder=1)
    with trueup.capture(path, level="api") as capture:
        short = capture._session.slots.short
        for method, args in (
            ("slot", (1, 2)), ("inputs", (None, (), "api")), ("inputs", (None, [1], "api")), ("outputs", (None, [1], (), None)),
            ("produced", (None, [X], "api")), ("hook", (None, [1], True)), ("observing", (1,)), ("function", (1,)),
            ("function", (1, [], {})), ("operator", (1, (), None)), ("module", (1, 2, 3, (), None)), ("teach", (1,)),
        ):  # fmt: skip
            with pytest.raises(TypeError):
                getattr(short, method)(*args)
        with pytest.raises(TypeError, match="unknown"):
            short.teach(nothing=1)
        with pytest.raises((TypeError, AttributeError)):
            short.hook(None, [(0, "grad_output.0")], True)((X,))


def test_a_result_that_was_never_filled() -> None:
    from trueup.foundation import kernels

    result, _ = kernels.native().measured(X.data_ptr(), kernels.KINDS["float32"], (2,), (1,), 1)
    assert len(bytes(result)) == 74 * 8
    assert bytes(type(result)()) == b""
