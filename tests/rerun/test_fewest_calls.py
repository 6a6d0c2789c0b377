"""Calls with the fewest others before them: chains give the recorded bits, and what a call by itself does not show is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trueup
from trueup import simdev
from trueup.analysis.rerun.chain_process import Recorded
from trueup.analysis.rerun.minimise import _Narrowing, earlier, made_inputs, widened
from trueup.foundation.model import TrueupError
from trueup.recording.adapters.torch import executing
from trueup.recording.adapters.torch.executing import ChainReplayer
from trueup.recording.adapters.torch.recorded_call import to_numpy
from trueup.recording.adapters.torch.source import paths_of, source_of
from trueup.recording.execution.cases import Chain
from trueup.recording.execution.judging import Outcome
from trueup.recording.execution.recorded import RecordedCall, RecordedCalls

from .programs import record
from .test_reproduce import executed

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> RecordedCalls:
    torch.set_num_threads(1)
    return record(tmp_path_factory.mktemp("context") / "cpu", steps=1)


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> RecordedCalls:
    """Three sums of one shape among other calls, of which the last reads a view of a product."""
    torch.set_num_threads(1)
    simdev.install()
    simdev.heal()
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("context") / "sums"
    x, w = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    with trueup.capture(path, model=torch.nn.Identity(), detail="tensor", level=["api", "aten"], on_error="stop"):
        a = x + 1
        b = (torch.nn.functional.gelu(a) @ w).sigmoid()
        c = b * 2 + x
        (c.exp().t() + b).sum()
    return RecordedCalls(trueup.open_capture(path))


def of_level(calls: RecordedCalls, level: str) -> list[RecordedCall]:
    return [c for c in calls.of_step(0, 0, (level,)) if c.outputs]


def find(calls: RecordedCalls, op: str, n: int = 0) -> RecordedCall:
    return [c for level in ("aten", "api") for c in of_level(calls, level) if c.key.op == op][n]


# -------------------------------------------------------------------- chains
@pytest.mark.parametrize("level", ["aten", "api"])
def test_a_whole_step_in_one_chain_gives_the_recorded_bits(calls: RecordedCalls, level: str, tmp_path: Path) -> None:
    """Replayed and as source, with results handed on: views, in-place writes, lists, autocast, dropout, optimizer."""
    ours = of_level(calls, level)
    ends = [ours[-1], *[c for c in ours if c.key.phase in ("forward", "backward")][::-1][:30:10]]
    handed = 0
    for target in ends:
        before = [c for c in earlier(calls, target) if "mkldnn" not in c.key.op]
        chain = Chain.of(calls, [*before, target])
        replayer = ChainReplayer(chain, "cpu")
        with replayer.undisturbed():
            result = replayer.execute(target, replayer.target)
        handed += sum(map(len, chain.links))
        chain = chain.held()
        found_at = [paths_of(case, replayer.target, results=executing._read_of(chain, k)) for k, case in enumerate(chain.cases)]
        drawing = {k for k, case in enumerate(chain.cases) if case.made.random}
        got = executed(source_of(chain, found_at, random=frozenset(drawing)), tmp_path)
        for slot, tensor in target.outputs.items():
            np.testing.assert_array_equal(result.arrays[slot], tensor.array(), f"{target.key} {slot}")
            np.testing.assert_array_equal(to_numpy(got[slot]), tensor.array(), f"source of {target.key} {slot}")
    assert handed > 40


def test_what_is_read_of_another_call_is_the_very_memory(sums: RecordedCalls) -> None:
    exp, add = find(sums, "aten::exp"), find(sums, "aten::add", 2)
    chain = Chain.of(sums, [exp, add])
    links = {(slot, link.slot, link.whole, link.laid) for slot, link in chain.links[1].items()}
    assert links == {("input.0", "output.0", False, (8, 1))}
    assert chain.rigid
    assert chain.size == Chain.of(sums, [exp, add], linked=False).size - 8 * 8 * 4


def test_a_link_that_the_elements_contradict_is_not_made(sums: RecordedCalls) -> None:
    """A capture is untrusted, and memory may be overwritten unseen."""
    relu, mm = find(sums, "aten::gelu"), find(sums, "aten::mm")
    assert Chain.of(sums, [relu, mm]).links[1]
    read = mm.tensors["input.0"]
    for changed in (replace(read, digest="0" * 32), replace(read, producer=(relu.seq, "output.9")), replace(read, dtype="int32"),
                    replace(read, strides=(1, 1 << 40)), replace(read, producer=(mm.seq, "output.0"))):  # fmt: skip
        other = replace(mm, tensors=dict(mm.tensors) | {"input.0": changed})
        assert not Chain.of(sums, [relu, other]).links[1]


def test_the_rounding_of_the_calls_before_is_no_error(sums: RecordedCalls) -> None:
    """A device that rounds products to ten bits is right after them, too, for it declares that."""
    target = find(sums, "aten::add", 2)
    chain = Chain.of(sums, [*earlier(sums, target), target])
    for noise in ("hf32-matmul", "reordered-reductions", "fused-multiply-add"):
        with simdev.noise(noise):
            _, outcome = executing.judged(chain, "npu", "cpu")
        assert outcome.verdict in ("accurate", "ill-conditioned"), (noise, outcome.sentence)


# -------------------------------------------------------------------- which calls
def test_earlier_calls_are_not_nested_and_not_around(calls: RecordedCalls) -> None:
    target = of_level(calls, "api")[-1]
    before = earlier(calls, target)
    seqs = {c.seq for c in before}
    assert before
    assert all(c.seq < target.seq and c.parent not in seqs for c in before)
    inner = next(c for c in of_level(calls, "aten") if c.parent is not None and c.key.phase == "forward")
    assert all(c.key.level == "aten" for c in earlier(calls, inner))


def test_sets_of_calls_widen(sums: RecordedCalls) -> None:
    target = find(sums, "aten::add", 2)
    before = earlier(sums, target)
    sizes = [len(chosen) for chosen in widened(before, target)]
    assert sizes[0] == len(made_inputs({c.seq: c for c in before}, target, 1)) == 2
    assert sizes[-1] == len(before)
    assert next(s for s in widened(before, target) if s[-1].key.op == "aten::add" and len(s) == 1)


class Pretending:
    """Fails where all of some calls come before the target."""

    def __init__(self, needed: set[int], broken: int = -1) -> None:
        self.needed, self.broken, self.tried = needed, broken, 0

    def judge(self, chosen: Recorded) -> dict[str, Any]:
        self.tried += 1
        if self.broken in chosen.seqs:
            return {"error": "not executed", "broken": self.broken}
        fails = self.needed <= set(chosen.seqs)
        return {"outcome": Outcome(0, 0, 9, "aten", "forward", "", "aten::add", "", 0, "", verdict="wrong" if fails else "accurate",
                                   sentence="", slot="output.0", error=0.1, rule="rounding")}  # fmt: skip


@pytest.mark.parametrize("needed", [{3}, {0, 199}, {7, 8, 9}, {1, 50, 100, 150}, set(range(0, 200, 40))])
def test_the_fewest_calls_are_found(needed: set[int], sums: RecordedCalls) -> None:
    pretending = Pretending(needed, broken=23)
    search = _Narrowing(Path("x"), find(sums, "aten::add", 2), pretending, float("inf"))  # type: ignore[arg-type]
    assert search.fails(list(range(200)))
    assert set(search.reduced()) == needed
    assert search.broken == {23}
    assert pretending.tried < 150


# -------------------------------------------------------------------- from the capture to the folder
def test_a_stale_buffer_is_shown_by_two_calls(sums: RecordedCalls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEUP_SIMDEV_FAULT", "stale-buffer-reuse")
    target = find(sums, "aten::add", 2)
    found = trueup.reproduce(
        sums.capture.path, target.seq, tmp_path / "r", device="npu", simulated=True, context=True, seconds=600.0
    )  # fmt: skip
    assert found.fails
    assert found.checked, found.notes
    assert found.exit_code == 0
    assert found.sentence.startswith("torch.ops.aten.add.Tensor, forward, after another call, gives a wrong output.0 on npu")
    assert found.notes[0].startswith("by itself it is right; it fails after one other call")
    text = found.test.read_text()
    assert text.count("torch.ops.aten.add.Tensor(") == 2
    page = (tmp_path / "r" / "README.md").read_text()
    assert "- before it: `aten::add#" in page


def test_a_victim_is_said_to_be_one(sums: RecordedCalls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product is right, and is given what a wrong activation made: its culprit is named."""
    monkeypatch.setenv("TRUEUP_SIMDEV_FAULT", "gelu-tanh-for-erf")
    target = find(sums, "aten::mm")
    found = trueup.reproduce(
        sums.capture.path, target.seq, tmp_path / "r", device="npu", simulated=True, context=True, check=False, seconds=600.0
    )  # fmt: skip
    gelu = find(sums, "aten::gelu")
    assert f"call {gelu.seq} before it (aten::gelu) is wrong by itself and hands that on: name that one" in found.notes
    assert found.fails is False
    assert found.exit_code == 2


def test_a_call_that_is_right_after_all_others_is_said_to_be(sums: RecordedCalls, tmp_path: Path) -> None:
    target = find(sums, "aten::add", 2)
    before = len(earlier(sums, target))
    found = trueup.reproduce(
        sums.capture.path, target.seq, tmp_path / "r", device="npu", simulated=True, context=True, check=False, seconds=600.0
    )  # fmt: skip
    assert found.exit_code == 2
    assert f"it is right by itself, and right after the {before} calls of its level before it, too" in found.notes


def test_messages(sums: RecordedCalls, tmp_path: Path) -> None:
    seq = find(sums, "aten::mm").seq
    with pytest.raises(TrueupError, match=r"given its context on the device that fails\.\n  expected: --device"):
        trueup.reproduce(sums.capture.path, seq, tmp_path / "r", context=True)
    record(tmp_path / "stats", detail="stats", steps=1)
    stats = RecordedCalls(trueup.open_capture(tmp_path / "stats"))
    with pytest.raises(TrueupError, match="expected: a capture of detail tensor"):
        trueup.reproduce(tmp_path / "stats", find(stats, "aten::native_layer_norm").seq, tmp_path / "r", device="cpu", context=True)
