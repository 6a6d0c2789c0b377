"""Recorded calls, executed again: verification, verdicts, crashes, resumption, both directions."""

from __future__ import annotations

import gc
import json
import os
import signal
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import trueup
from trueup import simdev
from trueup.analysis.rerun import processes
from trueup.analysis.rerun.processes import OUTCOMES, SUMMARY
from trueup.analysis.rerun.replay import Settings
from trueup.analysis.rerun.replay import run as replay
from trueup.foundation.model import TrueupError
from trueup.recording.adapters.torch import recorded_call
from trueup.recording.adapters.torch.executing import Replayer
from trueup.recording.adapters.torch.recorded_call import Place, rebuild, to_numpy
from trueup.recording.execution.recorded import NotReplayable, RecordedCall, RecordedCalls, read_invocation

from .programs import all_calls, record


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> RecordedCalls:
    torch.set_num_threads(1)
    return record(tmp_path_factory.mktemp("replay") / "cpu")


@pytest.fixture(autouse=True)
def healthy() -> None:
    simdev.install()
    simdev.heal()


def base(calls: RecordedCalls) -> str:
    return str(calls.capture.path)


def test_a_capture_changes_no_random_state(tmp_path: Path, calls: RecordedCalls) -> None:
    """The state of the generators is read, not moved: detail tensor sees the numbers of detail stats."""
    other = record(tmp_path / "stats", detail="stats")
    digests = [[(c.key.op, s, t.digest) for c in all_calls(which) for s, t in c.outputs.items()] for which in (calls, other)]
    assert digests[0] == digests[1]
    assert "invocation" not in other.capture.names


def test_the_healthy_device_is_accurate(calls: RecordedCalls) -> None:
    found = replay(Settings(base(calls), "npu", dedup=True, simulated=True), processes=0)
    assert found.exit_code == 0, found.sentence
    assert set(found.counts) == {"accurate"}
    assert "npu is Trueup's simulated device: no accelerator was used" in found.notes


@pytest.mark.parametrize("name", ["hf32-matmul", "reordered-reductions", "fused-multiply-add"])
def test_legitimate_differences_are_not_blamed(calls: RecordedCalls, name: str) -> None:
    with simdev.noise(name):
        found = replay(Settings(base(calls), "npu", dedup=True, simulated=True), processes=0)
    assert found.culprits == []


@pytest.mark.parametrize(
    ("fault", "culprit"),
    [
        ("layer-norm-epsilon", "aten::native_layer_norm"),
        ("batch-norm-running-variance-biased", "aten::native_batch_norm"),
        ("relu-backward-at-zero", "aten::threshold_backward"),
        ("dropout-no-rescale", "torch.nn.functional.dropout"),
        ("adam-second-moment-value", "aten::_foreach_addcmul_"),
    ],
)
def test_a_fault_is_found_where_it_is(calls: RecordedCalls, fault: str, culprit: str) -> None:
    with simdev.inject(fault):
        found = replay(Settings(base(calls), "npu", dedup=True, simulated=True), processes=0)
    assert found.exit_code == 1
    assert culprit in {o.op for o in found.culprits}
    aten = {o.op for o in found.culprits if o.level == "aten"}
    assert aten <= {culprit}, found.sentence


def devices_differ() -> None:
    """What devices do otherwise and none does wrong, and what a replay must put on the right one."""
    gates = torch.randn(4, 6)
    first, second = gates.chunk(2, 1)
    first.mul_(second)  # both in one storage, the written one at its beginning
    with torch.autocast("cpu", torch.bfloat16):
        narrow = torch.randn(4, 4, requires_grad=True).bfloat16()
        narrow.square().sum().backward()  # an accelerator's autocast widens both
        torch.nn.GRU(4, 3)(torch.randn(6, 2, 4))[0].float().square().sum().backward()
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.randn(3, 4, 2), torch.tensor([4, 2, 1]), batch_first=True)
    torch.nn.utils.rnn.pad_packed_sequence(packed)  # lengths on the CPU
    cell = torch.nn.LSTMCell(4, 3)
    cell(torch.randn(2, 4))[0].sum().backward()  # the CPU computes the cell state on the way to the result, the device both at once


def test_what_devices_do_otherwise_is_not_blamed(tmp_path: Path) -> None:
    import trueup

    with trueup.capture(tmp_path / "c", detail="tensor", level=["api", "aten"], on_error="stop"):
        devices_differ()
    found = replay(Settings(str(tmp_path / "c"), "npu", simulated=True), processes=0)
    assert [f"{o.kind}: {o.sentence}" for o in found.outcomes if o.verdict in ("wrong", "suspicious", "crashed")] == []
    left = {o.kind: o.sentence for o in found.outcomes if o.verdict != "accurate"}
    assert list(left) == ["torch.lstm_cell backward"], left


def test_a_capture_of_the_device_is_judged_on_the_cpu(tmp_path: Path) -> None:
    with simdev.inject("layer-norm-epsilon"):
        calls = record(tmp_path / "npu", steps=1, device="npu")
    found = replay(Settings(base(calls), "cpu", dedup=True, recorded=True), processes=0)
    assert {o.op for o in found.culprits if o.level == "aten"} == {"aten::native_layer_norm"}
    assert found.sentence.startswith("npu:0, as recorded, computes aten::native_layer_norm forward wrong")


def test_statistics_alone_are_replayed_with_drawn_inputs(tmp_path: Path) -> None:
    calls = record(tmp_path / "stats", detail="stats", steps=1)
    with simdev.inject("layer-norm-epsilon"):
        found = replay(Settings(base(calls), "npu", patterns=("*layer_norm*",), simulated=True), processes=0)
    wrong = next(o for o in found.culprits if o.op == "aten::native_layer_norm")
    assert wrong.drawn
    assert any("drawn to match recorded numbers" in note for note in found.notes)


def test_in_python_the_random_state_of_the_process_stays(calls: RecordedCalls) -> None:
    import trueup

    before = torch.get_rng_state()
    found = trueup.replay(base(calls), "cpu", patterns=("*dropout*", "*rand*"))
    assert found.exit_code == 0, found.sentence
    assert found.device == "cpu, as recorded,"
    assert torch.equal(before, torch.get_rng_state())


def test_a_backward_that_was_executed_is_let_go(tmp_path: Path) -> None:
    """A hook on its graph held it, with the capture that it is of: a comparison of many runs kept the tensors of all."""
    call = next(c for c in all_calls(record(tmp_path / "cpu", steps=1)) if c.delivers)
    calls = RecordedCalls(trueup.open_capture(tmp_path / "cpu"))
    replayer = Replayer(calls, "cpu")
    assert replayer.replay(calls.at(0, call.seq)).verdict == "accurate"
    held = weakref.ref(calls.capture)
    del replayer, calls
    gc.collect()
    assert held() is None


def test_what_a_killed_replay_left_is_gone_on_with(calls: RecordedCalls, tmp_path: Path) -> None:
    """It may have been killed at any byte."""
    settings, out = Settings(base(calls), "cpu", phases=("forward",), dedup=True), tmp_path / "out"
    whole = [replace(o, seconds=0) for o in replay(settings, out, processes=0).outcomes]
    held = (out / OUTCOMES).read_bytes()
    for cut in (0, 1, 700, len(held) // 2, len(held) - 1, len(held)):
        (out / OUTCOMES).write_bytes(held[:cut])
        again = [replace(o, seconds=0) for o in replay(settings, out, processes=0).outcomes]
        assert repr(again) == repr(whole)  # NaN is like NaN
        lines = held[:cut].splitlines(keepends=True)
        kept = b"".join(line for line in lines if line.endswith(b"\n"))
        assert (out / OUTCOMES).read_bytes().startswith(kept)  # not executed again
    (out / SUMMARY).unlink()
    (out / OUTCOMES).unlink()
    (out / "outcomes.parquet").unlink()
    (out / f"{SUMMARY}.tmp").write_text('{"sett')  # killed before it had begun
    assert len(replay(settings, out, processes=0).outcomes) == len(whole)
    with pytest.raises(TrueupError, match="holds another replay"):
        replay(Settings(base(calls), "cpu"), out, processes=0)


def test_a_worker_that_dies_is_a_finding_and_the_next_goes_on(calls: RecordedCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed at one of the calls that it was given together; those after it are executed by the next."""
    send, sent, ahead = processes.Worker.send, [], 8

    def kill(self: processes.Worker, call: RecordedCall) -> None:
        sent.append(call)
        if len(sent) == ahead + 1:
            os.kill(self._process.pid, signal.SIGSEGV)
            self._process.wait()
        send(self, call)

    monkeypatch.setattr(processes, "AHEAD", ahead)
    monkeypatch.setattr(processes.Worker, "send", kill)
    wanted = Settings(base(calls), "cpu", levels=("aten",), patterns=("aten::add*", "aten::mul*"), threads=1)
    found = replay(wanted, processes=1)
    words = [o.verdict for o in found.outcomes]
    crashed = words.index("crashed")
    assert 1 <= crashed <= ahead
    assert words.count("accurate") == len(words) - 1 > ahead
    assert "SIGSEGV" in found.outcomes[crashed].sentence
    assert found.exit_code == 1


def test_functions_that_load_save_or_take_code_are_never_found() -> None:
    for name in """
        torch.load torch.save torch.hub.load torch.from_file torch.Tensor.apply_ torch.Tensor.map_ torch.Tensor.numpy
        torch.serialization.load os.system torch.utils.data.DataLoader builtins.eval torch.Tensor.share_memory_ torch.jit.load
        torch.Tensor.backward torch.Tensor.module_load torch.Tensor.data_ptr torch.Tensor.__reduce_ex__ torch.Tensor.set_
        torch.Tensor.__class__ torch.compile
    """.split():
        assert recorded_call.allowed_function(name) is None, name
    for name in ("aten::save", "aten::from_file", "prim::Print", "aten::__init__", "torch::load", "aten::add.Tensor.x"):
        assert recorded_call.allowed_operator(name, None) is None, name
    assert recorded_call.allowed_operator("aten::add", "Tensor") is torch.ops.aten.add.Tensor
    assert recorded_call.allowed_operator("aten::add", "__class__") is None


@pytest.mark.parametrize(
    "made",
    [
        '{"args": [{"tensor": "input.0", "offset": -5}]}',
        '{"args": [{"slice": [1, 2]}]}',
        '{"args": [{"dtype": "load"}]}',
        '{"args": [{"complex": [1]}]}',
        '{"args": [{"complex": 5}]}',
        '{"args": [{"complex": ["text", "1"]}]}',
        '{"args": [{"size": [1e99]}]}',
        '{"args": [], "kwargs": [1, 2]}',
        '{"args": [], "autocast": [1]}',
        '{"args": [{"other": "function"}]}',
        '{"args": [{"generator": {"device": "cpu", "state": "AAAA"}}]}',
        '{"args": [{"out": 1}], "out": {"empty": ["float32", [1000000000000], [1], "cpu"]}}',
        '{"args": [' + "[" * 60 + "]" * 60 + "]}",
    ],
)
def test_damaged_descriptions_are_refused(calls: RecordedCalls, made: str) -> None:
    call = replace(next(c for c in all_calls(calls) if c.kind == "aten::mul.Tensor"), invocation=read_invocation(made))
    with pytest.raises(NotReplayable):
        rebuild(call, Place("cpu"))


def test_strides_alignment_and_shared_memory_are_as_they_were(tmp_path: Path) -> None:
    import trueup

    with trueup.capture(tmp_path / "c", detail="tensor", level=["aten"], on_error="stop"):
        whole = torch.arange(24.0)
        part = whole[3:19:2].view(4, 2).t()
        part.add_(whole[4:20:2].view(2, 4))
        torch.ones(1, 3).expand(4, 3) * 2
    calls = RecordedCalls(trueup.open_capture(tmp_path / "c"))
    added = next(c for c in all_calls(calls) if c.key.op == "aten::add_")
    made = rebuild(added, Place("cpu"))
    first, second = made.inputs["input.0"], made.inputs["input.1"]
    assert first.stride() == (2, 4)
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
    assert second.storage_offset() - first.storage_offset() == 1
    np.testing.assert_array_equal(to_numpy(made.execute()["output.0"]), added.outputs["output.0"].array())
    times = next(c for c in all_calls(calls) if c.key.op == "aten::mul")
    assert rebuild(times, Place("cpu")).inputs["input.0"].stride() == (0, 1)


def test_saved_results_are_json_and_parquet(calls: RecordedCalls, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    found = replay(Settings(base(calls), "cpu", levels=("aten",), dedup=True), tmp_path / "out", processes=0)
    saved = json.loads((tmp_path / "out" / "replay.json").read_text())
    assert saved["verdict"] == "accurate"
    assert saved["counts"] == found.counts
    assert pq.read_table(tmp_path / "out" / "outcomes.parquet").num_rows == len(found.outcomes)
