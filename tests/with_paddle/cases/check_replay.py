"""Recorded calls are executed again: bit by bit where they were recorded, and a broken kernel is blamed and nothing else.

`benchmarks/replay_paddle.py` prints the whole table; here are one fault or two for each kind of operator.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import faulty
import numpy as np
import paddle
import pytest
import replaying_models

import trueup
from trueup.analysis.rerun.replay import Settings, run, verify
from trueup.foundation.model import TrueupError
from trueup.recording.adapters.paddle import invocations
from trueup.recording.adapters.paddle.executing import Replayer
from trueup.recording.adapters.paddle.recorded_call import Place, allowed, rebuild
from trueup.recording.execution.recorded import NotReplayable, RecordedCall, RecordedCalls

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import replay_paddle

FAULTS = {
    "lstm": ("tanh-table-lookup", "log-softmax-backward", "embedding-backward-duplicates", "adam-epsilon-inside-root"),
    "ctc": ("conv-weight-grad-last-tile", "batch-norm-running-variance-biased", "max-pool-ties"),
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    for model in FAULTS:
        replay_paddle.capture(model, folder / model, steps=1)
    return folder


def test_every_call_gives_the_recorded_bits(tmp_path: Path) -> None:
    replaying_models.capture_many(tmp_path / "many")
    found = verify(tmp_path / "many", processes=0)
    assert found.reasons == []
    assert found.by_parts == 1
    assert found.reproduced > 100


def test_results_go_on_where_a_replay_was_killed(tmp_path: Path, healthy: Path) -> None:
    settings = Settings(str(healthy / "ctc"), "cpu", recorded=True, patterns=("*conv2d", "*batch_norm"))
    first = run(settings, tmp_path, processes=0)
    assert first.counts == {"accurate": 8}
    lines = (tmp_path / "outcomes.jsonl").read_text().splitlines()
    (tmp_path / "outcomes.jsonl").write_text("\n".join(lines[:5]) + "\n" + lines[5][:20])
    again = run(settings, tmp_path, processes=1)
    assert [o.place for o in again.outcomes] == [o.place for o in first.outcomes]
    assert again.counts == first.counts


@pytest.mark.parametrize(("model", "fault"), [(model, fault) for model in FAULTS for fault in FAULTS[model]])
def test_what_a_broken_run_recorded_is_blamed(tmp_path: Path, model: str, fault: str) -> None:
    with faulty.inject(fault) as injection:
        replay_paddle.capture(model, tmp_path / "broken", steps=1)
    outcomes, _ = replay_paddle.replayed(tmp_path / "broken", None, recorded=True)
    cell = replay_paddle.cell(model, fault, "recorded", outcomes, replay_paddle.changed_in(tmp_path / "broken", injection.fired))
    assert cell.word == "ok", cell


@pytest.mark.parametrize(("model", "fault"), [("lstm", "tanh-table-lookup"), ("ctc", "hardswish-backward-slope")])
def test_a_broken_device_is_blamed_for_what_it_computes_of_healthy_inputs(healthy: Path, model: str, fault: str) -> None:
    outcomes, changed = replay_paddle.replayed(healthy / model, fault, recorded=False, phases=("forward", "backward"))
    assert replay_paddle.cell(model, fault, "device", outcomes, changed).word == "ok"
    assert {o.verdict for o in outcomes if o.seq not in changed} == {"accurate"}


def test_a_truth_is_there_for_every_call_of_the_models(healthy: Path) -> None:
    for model in FAULTS:
        calls = RecordedCalls(trueup.open_capture(healthy / model))
        replayer = Replayer(calls, "cpu")
        with replayer.undisturbed():
            for call in calls.of_step(0, 0, ("api",)):
                if call.computed:
                    truth = replayer.execute(call, replayer.truth).arrays
                    assert {a.dtype.name for a in truth.values()} <= {"float64", "int64", "int32", "bool", "uint8"}, call.kind


def test_inputs_are_drawn_where_numbers_were_kept(tmp_path: Path) -> None:
    replay_paddle.capture("ctc", tmp_path / "stats", detail="stats", steps=1)
    outcomes, changed = replay_paddle.replayed(tmp_path / "stats", "hardswish-backward-slope", recorded=False, phases=("backward",))
    assert replay_paddle.cell("ctc", "hardswish-backward-slope", "device", outcomes, changed).word == "ok"
    assert any(o.drawn for o in outcomes)
    assert [o.sentence for o in outcomes if o.verdict == "not replayed"] == []


def test_generators_are_set_to_what_they_were() -> None:
    generator = invocations.generator_of("cpu")
    paddle.seed(11)
    paddle.rand([5])
    state = invocations.state_of(generator)
    assert state is not None
    drawn = paddle.rand([5]).numpy()
    after = invocations.described(generator)
    assert invocations.described(generator) == after
    assert invocations.set_state(generator, state)
    assert invocations.described(generator) != after
    assert invocations.state_of(generator) == state
    assert (paddle.rand([5]).numpy() == drawn).all()
    for damaged in (b"", b"1 2 3", state[:-9], state.replace(b" ", b"  ", 1), b"x" + state):
        assert not invocations.set_state(generator, damaged)


@pytest.mark.parametrize(
    "name",
    [
        "os.system", "paddle.load", "paddle._legacy_C_ops.load", "paddle._C_ops.read_file", "paddle._legacy_C_ops.save_combine",
        "paddle._C_ops.run_program", "paddle._C_ops.all_reduce", "paddle._C_ops.__class__", "paddle.Tensor.register_hook",
        "paddle._C_ops.share_data_", "paddle.Tensor.__reduce__", "paddle._C_ops.print",
    ],
)  # fmt: skip
def test_a_capture_cannot_have_anything_else_executed(healthy: Path, name: str) -> None:
    assert allowed(name) is None
    call = _first(healthy / "ctc", "conv2d")
    with pytest.raises(NotReplayable, match="not among the functions that a capture may have executed"):
        rebuild(replace(call, key=replace(call.key, op=name)), Place("cpu"))


@pytest.mark.parametrize(
    "argument",
    [
        {"tensor": "input.7"}, {"dtype": "Tensor"}, {"dtype": "__class__"}, {"slice": [0, "x", 1]}, {"tuple": 3}, {"float": "1e5"},
        {}, {"tensor": "input.0", "offset": -4}, {"tensor": "input.0", "offset": 2**63}, {"other": "function"},
    ],
    ids=str,
)  # fmt: skip
def test_damaged_arguments_are_refused(healthy: Path, argument: Any) -> None:
    call = _first(healthy / "ctc", "conv2d")
    made = {**(call.invocation or {}), "args": [argument, *(call.invocation or {})["args"][1:]]}
    with pytest.raises(NotReplayable):
        rebuild(replace(call, invocation=made), Place("cpu")).execute()


def test_what_is_said_where_it_cannot_be() -> None:
    from trueup.recording.adapters.paddle.executing import provide

    with pytest.raises(TrueupError, match="Nothing can be computed on npu"):
        provide("npu", simulated=False)
    with pytest.raises(TrueupError, match="no simulated device for PaddlePaddle"):
        provide("npu", simulated=True)


def test_a_call_is_described_exactly(record: Any) -> None:
    def function() -> None:
        x = paddle.to_tensor(np.arange(12, dtype="float32").reshape(3, 4), stop_gradient=False)
        paddle.transpose(x, [1, 0])[1:3].add(paddle.full([2, 3], float("inf")))

    rows = record(function, detail="tensor", level="api")
    made = {row["op"].rpartition(".")[2]: json.loads(row["invocation"]) for row in rows if row["slot"] == "arguments"}
    assert {k: v for k, v in made["transpose"].items() if k != "random"} == {
        "args": [{"tensor": "input.0", "grad": True}, [1, 0]], "grad": True,
    }  # fmt: skip
    assert made["__getitem__"]["args"][1] == {"slice": [1, 3, None]}
    assert made["full"]["args"] == [[2, 3], {"float": "inf"}, {"dtype": "float32"}, {"device": "cpu"}]
    assert made["add"]["args"][0] == {"tensor": "input.0", "grad": True, "offset": 1}
    assert sum("random" in one for one in made.values()) == 1  # nothing was drawn: the state is told once


def _first(path: Path, operator: str) -> RecordedCall:
    calls = RecordedCalls(trueup.open_capture(path))
    return next(call for call in calls.of_step(0, 0, ("api",)) if call.key.op.endswith(operator))
