"""A recorded call as a test: plain Paddle, which gives the recorded bits; nothing of a capture becomes code."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import faulty
import pytest
import replaying_models

import trueup
from trueup.analysis.rerun.reproduce import reproduce, write_files
from trueup.foundation.model import TrueupError
from trueup.recording.adapters.paddle.executing import CASES
from trueup.recording.adapters.paddle.recorded_call import to_numpy
from trueup.recording.execution.cases import Case, Chain
from trueup.recording.execution.judging import same_bytes
from trueup.recording.execution.recorded import NotReplayable, RecordedCall, RecordedCalls


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    replaying_models.capture("ctc", folder / "ctc")
    replaying_models.capture_many(folder / "many")
    return folder


def written(calls: RecordedCalls, call: RecordedCall, folder: Path) -> Path:
    chain = CASES.settled(Chain.alone(Case.of(calls, call)), "cpu")
    folder.mkdir()
    told = json.loads(json.dumps(CASES.saved(CASES.written(chain, None, "cpu", {}), folder)))
    return write_files(folder, chain.target, told, device=None, against="cpu", notes=[], origin=[], simulated=False)


def test_the_test_of_every_kind_of_call_gives_the_recorded_bits(tmp_path: Path, recorded: Path) -> None:
    seen: set[Any] = set()
    for path in sorted(recorded.iterdir()):
        calls = RecordedCalls(trueup.open_capture(path))
        for call in calls.of_step(0, 0, ("api",)):
            mark = call.key.op, call.key.phase, tuple(t.strides for t in call.inputs.values())
            if not call.computed or mark in seen or call.key.op.endswith(".apply"):
                continue
            seen.add(mark)
            found = runpy.run_path(str(written(calls, call, tmp_path / str(len(seen)))))["run"]("cpu")
            for slot, tensor in call.outputs.items():
                assert not tensor.kept or same_bytes(tensor.array(), to_numpy(found[slot])), (call.kind, call.key.phase, slot)
    assert len(seen) > 100


def test_what_a_broken_run_recorded_is_held_against_the_limits(tmp_path: Path) -> None:
    with faulty.inject("hardswish-backward-slope"):
        replaying_models.capture("ctc", tmp_path / "broken")
    made = reproduce(tmp_path / "broken", "backbone.6/paddle._C_ops.hardswish#0", tmp_path / "test", phase="backward")
    assert made.sentence.startswith(
        "paddle._C_ops.hardswish, backward, gives a wrong grad_input.0 on the recorded device: relative error "
    )
    assert sorted(p.name for p in made.folder.iterdir()) == [
        "README.md", "conftest.py", "inputs.safetensors", "test_hardswish_backward.py",
    ]  # fmt: skip
    text = (made.folder / "conftest.py").read_text() + made.test.read_text() + (made.folder / "README.md").read_text()
    assert not {word for word in ("import trueup", "torch") if word in text}


def test_calls_before_it_cannot_be_had(tmp_path: Path, recorded: Path) -> None:
    with pytest.raises(TrueupError, match="Calls of PaddlePaddle are executed one by one"):
        reproduce(recorded / "ctc", "backbone.0/paddle._C_ops.conv2d#0", tmp_path, phase="forward", device="cpu", context=True)


@pytest.mark.parametrize(
    "argument",
    [
        {"dtype": "float32); import os #"}, {"other": "function"}, {"float": "__import__('os')"}, {"slice": ["1", None, None]},
        {"complex": ["1", "x"]}, {"tensor": "input.0); import os; ("},
    ],
    ids=str,
)  # fmt: skip
def test_no_text_of_a_capture_becomes_code(recorded: Path, argument: Any) -> None:
    calls = RecordedCalls(trueup.open_capture(recorded / "ctc"))
    call = next(c for c in calls.of_step(0, 0, ("api",)) if c.key.op.endswith("relu"))
    case = Case.of(calls, call)
    for changed in ({"args": [argument]}, {"args": [], "kwargs": {"x=os.system('x'), y": argument}}):
        with pytest.raises((NotReplayable, ValueError)):
            CASES.source(Chain.alone(case.with_invocation({**(call.invocation or {}), **changed})), "cpu", frozenset())
    with pytest.raises(NotReplayable, match="not among the functions"):
        CASES.source(Chain.alone(replace(case, call=replace(case.call, key=replace(call.key, op="os.system")))), "cpu", frozenset())
