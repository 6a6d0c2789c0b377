"""A recorded call as a test: fails on the fault, passes without, is made of data safely, and shrinks."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trueup
from trueup import simdev
from trueup.analysis.rerun import reproduce as reproducing
from trueup.analysis.rerun.chain_process import Trying
from trueup.analysis.rerun.minimise import Signature, minimise
from trueup.analysis.rerun.reproduce import write_files
from trueup.doors.cli import main
from trueup.foundation.model import TrueupError
from trueup.recording.adapters.torch import executing
from trueup.recording.adapters.torch.recorded_call import Place, to_numpy
from trueup.recording.adapters.torch.source import function_name, paths_of, source_of
from trueup.recording.execution.case_errors import Source
from trueup.recording.execution.cases import Case, Chain, relaid
from trueup.recording.execution.recorded import NotReplayable, RecordedCall, RecordedCalls

from .programs import all_calls, record


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> RecordedCalls:
    torch.set_num_threads(1)
    return record(tmp_path_factory.mktemp("reproduce") / "cpu")


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> RecordedCalls:
    """A bidirectional LSTM, forward and backward."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("reproduce") / "lstm"
    lstm = torch.nn.LSTM(6, 8, bidirectional=True)
    x = torch.randn(5, 3, 6, requires_grad=True)
    with trueup.capture(path, model=lstm, detail="tensor", level=["api", "aten"], on_error="stop"):
        lstm(x)[0].square().mean().backward()
    return RecordedCalls(trueup.open_capture(path))


@pytest.fixture(autouse=True)
def healthy(warm: str) -> Any:
    simdev.install()
    simdev.heal()
    yield
    simdev.heal()


def find(calls: RecordedCalls, op: str, phase: str = "forward") -> RecordedCall:
    return next(c for c in all_calls(calls) if c.key.op == op and c.key.phase == phase)


def written(case: Case, folder: Path) -> tuple[Any, Path]:
    """Write a reproducer in this process and load its test."""
    chain = executing.settled(Chain.alone(case), "cpu")
    case = chain.target
    folder.mkdir(exist_ok=True)
    told = executing.CASES.saved(executing.written(chain, "npu", "cpu", {}), folder)
    path = write_files(folder, case, told, device="npu", against="cpu", notes=["so"], origin=[("scope", "a")], simulated=True)
    spec = importlib.util.spec_from_file_location(f"reproducer_{folder.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, path


def imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    return {name.partition(".")[0] for name in found | {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}}


@pytest.mark.parametrize(
    ("fault", "op", "phase"),
    [
        ("layer-norm-epsilon", "aten::native_layer_norm", "forward"),
        ("layer-norm-epsilon", "torch.nn.functional.layer_norm", "forward"),
        ("layer-norm-backward", "torch.nn.functional.layer_norm", "backward"),
        ("batch-norm-running-variance-biased", "torch.nn.functional.batch_norm", "forward"),
        ("relu-backward-at-zero", "torch.nn.functional.relu", "backward"),
        ("relu-backward-at-zero", "aten::threshold_backward", "backward"),
        ("dropout-no-rescale", "torch.nn.functional.dropout", "forward"),
        ("adam-second-moment-value", "aten::_foreach_addcmul_", "optimizer"),
    ],
)
def test_it_fails_on_the_fault_and_passes_without(
    calls: RecordedCalls, tmp_path: Path, fault: str, op: str, phase: str
) -> None:  # fmt: skip
    case = Case.of(calls, find(calls, op, phase))
    if fault == "layer-norm-backward":  # the fault is in the gradient of the input
        made = json.loads(json.dumps(case.made.invocation))
        made["args"][0]["grad"] = True
        case = case.with_invocation(made)
        outputs = dict(case.call.tensors) | {"grad_input.0": replace(case.made.tensors["input.0"], slot="grad_input.0")}
        case = replace(case, call=replace(case.call, tensors=outputs))
    with simdev.inject(fault):
        module, path = written(case, tmp_path / "r")
        assert module.verdicts(module.run("npu"), module.run("cpu")) != []
    assert module.verdicts(module.run("npu"), module.run("cpu")) == []
    assert module.verdicts(module.run("cpu"), module.run("cpu")) == []
    assert imports(path) == {"pathlib", "pytest", "torch", "safetensors"}
    if op == "torch.nn.functional.dropout":
        assert module.same_draw(module.run("npu"), module.run("cpu"))


def test_every_call_gives_its_recorded_bits(calls: RecordedCalls, more: RecordedCalls, tmp_path: Path) -> None:
    """The source does what the replay does: strides, shared memory, in-place, autocast, random state, gradients."""
    seen: set[Any] = set()
    for which in (calls, more):
        for call in all_calls(which):
            if call.signature() in seen or "mkldnn" in call.key.op:
                continue
            seen.add(call.signature())
            case = Case.of(which, call)
            drawing = frozenset({0} if case.made.random else ())
            source = source_of(Chain.alone(case), [paths_of(case, Place("cpu", "cpu"))], random=drawing)
            got = executed(source, tmp_path)
            for slot, tensor in call.outputs.items():
                if tensor.kept:
                    np.testing.assert_array_equal(to_numpy(got[slot]), tensor.array(), f"{call.key} {slot}")
    assert len(seen) > 100


def executed(source: Source, folder: Path) -> dict[str, torch.Tensor]:
    """Execute the statements of a source as its test does, with the helpers of the template."""
    template = (Path(reproducing.__file__).parent / "reproducer" / "test_torch.py.j2").read_text()
    helpers = re.sub(r"{%.*?%}", "", template[template.index("def restore_random") : template.index("def generator")])
    scope: dict[str, Any] = {"torch": torch, "tensors": source.tensors}
    body = source.body.replace("\t", "    ")
    text = f"{helpers}\ndef run(device):\n    given = {{k: v.clone() for k, v in tensors.items()}}\n{body}\n"
    exec(compile(text, "source", "exec"), scope)
    state = torch.get_rng_state()
    try:
        return scope["run"]("cpu")  # type: ignore[no-any-return]
    finally:
        torch.set_rng_state(state)


def test_pytest_runs_it_on_any_two_devices(calls: RecordedCalls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEUP_SIMDEV_FAULT", "layer-norm-epsilon")
    seq = find(calls, "aten::native_layer_norm").seq
    found = trueup.reproduce(calls.capture.path, seq, tmp_path / "r", device="npu", simulated=True)
    assert found.fails
    assert found.checked, found.notes
    assert found.exit_code == 0
    assert found.sentence.startswith("torch.ops.aten.native_layer_norm.default, forward, gives a wrong output.2 on npu: relative")
    page = (tmp_path / "r" / "README.md").read_text()
    assert "with `--device npu` it fails" in page
    assert "checked: the test fails with --device npu and passes with --device cpu" in page
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(found.test)]
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    without = subprocess.run([*command, "--device", "xyz"], capture_output=True, text=True, check=False)
    assert without.returncode == 1


def test_a_call_that_is_right_by_itself_is_said_to_be(calls: RecordedCalls, tmp_path: Path) -> None:
    seq = find(calls, "aten::native_layer_norm").seq
    found = trueup.reproduce(calls.capture.path, seq, tmp_path / "r", device="npu", simulated=True, check=False, minimise=True)
    assert found.fails is False
    assert found.exit_code == 2
    assert any(note.startswith("it was not shrunk, for by itself it does not fail") for note in found.notes)


def test_the_recorded_results_of_a_broken_device_tell_without_it(tmp_path: Path) -> None:
    with simdev.inject("layer-norm-epsilon"):
        npu = record(tmp_path / "npu", steps=1, device="npu")
    code = main(["reproduce", str(tmp_path / "npu"), str(find(npu, "aten::native_layer_norm").seq), "-o", str(tmp_path / "r")])
    assert code == 0
    page = (tmp_path / "r" / "README.md").read_text()
    assert "gives a wrong output.2 on the recorded device" in page
    assert "the recorded results are beyond the limits" in page


def test_statistics_alone_are_drawn_and_said_to_be(tmp_path: Path) -> None:
    stats = record(tmp_path / "stats", detail="stats", steps=1)
    found = trueup.reproduce(tmp_path / "stats", find(stats, "aten::native_layer_norm").seq, tmp_path / "r")
    assert found.fails is None
    assert "the capture kept numbers only: input.0, input.2, input.3 were drawn to match them" in found.notes


# -------------------------------------------------------------------- hostile captures
HOSTILE = "'''\"\"\"\n__import__('os').system('touch /tmp/owned')#{{7*7}}{% raw %}"


def written_with(case: Case, paths: dict[str, Any]) -> Source:
    return source_of(Chain.alone(case), [(paths, frozenset())])


def hostile(case: Case, made: dict[str, Any]) -> Case:
    return case.with_invocation({"args": [{"tensor": "input.0"}], "kwargs": {}, "grad": False, "overload": ""} | made)


def test_text_of_a_capture_does_not_become_code(calls: RecordedCalls, tmp_path: Path) -> None:
    gelu = Case.of(calls, find(calls, "aten::add", "forward"))
    key = replace(gelu.call.key, op="aten::gelu", scope=HOSTILE)
    tensors = {s: t for s, t in gelu.call.tensors.items() if s == "input.0"} | {"output.0": gelu.call.tensors["output.0"]}
    case = replace(gelu, call=replace(gelu.call, key=key, tensors=tensors))
    source = written_with(hostile(case, {"kwargs": {"approximate": HOSTILE}}), {HOSTILE: ()})
    tree = ast.parse(f"def run(device):\n{source.body}")
    called = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    assert called == {"torch.ops.aten.gelu.default", "given['input_0'].to", "torch.no_grad"}
    assert HOSTILE in {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    _, path = written(hostile(case, {"kwargs": {"approximate": "none"}}), tmp_path / "r")
    assert HOSTILE not in path.read_text()
    assert "49" not in (tmp_path / "r" / "README.md").read_text().split("## Environment")[0]
    assert not Path("/tmp/owned").exists()


@pytest.mark.parametrize(
    "made",
    [
        {"kwargs": {HOSTILE: 1}}, {"kwargs": {"a)(": 1}}, {"kwargs": {"lambda": 1}}, {"overload": HOSTILE},
        {"args": [{"dtype": HOSTILE}]}, {"args": [{"dtype": "load"}]},
        {"autocast": {"cpu": HOSTILE}}, {"args": [{"slice": [HOSTILE, 1]}]},
        {"args": [{"other": HOSTILE}]}, {"out": {"empty": ["float32", [HOSTILE], [1], "cpu"]}}, {"args": [{"tensor": HOSTILE}]},
        {"out": {"empty": ["float32); x(", [1], [1], "cpu"]}},
    ],
)  # fmt: skip
def test_what_is_no_plain_value_is_refused(calls: RecordedCalls, made: dict[str, Any]) -> None:
    case = Case.of(calls, find(calls, "aten::add"))
    with pytest.raises(NotReplayable):
        written_with(hostile(case, made), {"output.0": ()})


@pytest.mark.parametrize("op", ["os.system", "torch.load", "torch.linear(", "aten::add;x", "aten::from_file", HOSTILE])
def test_functions_outside_the_table_are_refused(calls: RecordedCalls, op: str) -> None:
    call = find(calls, "torch.nn.functional.linear" if "::" not in op else "aten::add")
    with pytest.raises(NotReplayable, match="not among the functions"):
        function_name(replace(call, key=replace(call.key, op=op)))


def test_slots_of_any_name_get_variables_of_our_own(calls: RecordedCalls) -> None:
    case = Case.of(calls, find(calls, "aten::add"))
    tensor = case.call.tensors["input.0"]
    for slot in (HOSTILE, "torch", "device", "__builtins__", "import"):
        renamed = replace(case, call=replace(case.call, tensors={slot: tensor}))
        made = {"args": [{"tensor": slot}, 1], "overload": "Scalar", "grad": False}
        source = written_with(renamed.with_invocation(made), {"output.0": ()})
        assert list(source.tensors) == ["tensor"]
        assert source.expressions == ["torch.ops.aten.add.Scalar(tensor, 1)"]


# -------------------------------------------------------------------- shrinking
def test_an_lstm_backward_shrinks_below_4_kb(more: RecordedCalls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: PyTorch's LSTM trusts its shapes, and crashes on some that are tried."""
    case = Case.of(more, find(more, "torch.lstm", "backward"))
    monkeypatch.setenv("TRUEUP_SIMDEV_FAULT", "lstm-backward-cell-gate")
    with Trying("npu", "cpu", simulated=True) as trying:
        before = Signature.of(trying.judge(Chain.alone(case)))
        small = minimise(Chain.alone(case), trying, 600.0, executions=300)
        assert before is not None
        assert before.same(Signature.of(trying.judge(small.chain)))
    with simdev.inject("lstm-backward-cell-gate"):
        module, _ = written(small.chain.target, tmp_path / "r")
        assert module.verdicts(module.run("npu"), module.run("cpu")) != []
    assert module.verdicts(module.run("npu"), module.run("cpu")) == []
    assert case.size > 4096 > (tmp_path / "r" / "inputs.safetensors").stat().st_size
    weights = [t.shape for s, t in small.chain.target.inputs.items() if s.startswith("input.2.") and len(t.shape) == 2]
    assert all(shape[0] == 4 * weights[1][1] for shape in weights)


def test_a_case_that_ends_its_process_is_told_and_the_next_is_tried(calls: RecordedCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.of(calls, find(calls, "aten::native_layer_norm"))
    with Trying("npu", "cpu", simulated=True) as trying:
        os.kill(trying._process.pid, signal.SIGSEGV)
        os.waitid(os.P_PID, trying._process.pid, os.WEXITED | os.WNOWAIT)  # its threads may answer first
        assert trying.judge(Chain.alone(case)) == {"crashed": "ended the process by SIGSEGV"}
        assert trying.judge(Chain.alone(case))["outcome"].verdict == "accurate"


def test_another_failure_is_not_the_same() -> None:
    one = Signature("wrong", "output.0", "numbers", 1e-2)
    assert one.same(Signature("wrong", "output.0", "numbers", 5e-2))
    assert not one.same(Signature("wrong", "output.0", "numbers", 5e-1))
    assert not one.same(Signature("wrong", "output.1", "numbers", 1e-2))
    assert not one.same(Signature("wrong", "output.0", "not finite", 1e-2))
    assert not one.same(None)


def test_the_order_of_strides_stays() -> None:
    assert relaid((2, 3), (4, 6), (1, 4)) == (1, 2)
    assert relaid((2, 3), (4, 6), (6, 1)) == (3, 1)
    assert relaid((2, 3), (4, 6), (0, 1)) == (0, 1)


# -------------------------------------------------------------------- messages
def test_messages(calls: RecordedCalls, tmp_path: Path) -> None:
    path = calls.capture.path
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(TrueupError, match=r"full is not empty\n  next:     name another directory"):
        trueup.reproduce(path, find(calls, "aten::add").seq, tmp_path / "full")
    with pytest.raises(TrueupError, match=r"does not mean one call\.\n  expected: a seq number"):
        trueup.reproduce(path, "aten::add", tmp_path / "r")
    with pytest.raises(TrueupError, match="shrunk on the device that fails"):
        trueup.reproduce(path, find(calls, "aten::add").seq, tmp_path / "r", minimise=True)
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "verdict.json").write_text('{"culprits": []}')
    with pytest.raises(TrueupError, match="culprit names no culprit"):
        trueup.reproduce(tmp_path / "report", "culprit", tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_the_culprit_of_a_report(calls: RecordedCalls, tmp_path: Path) -> None:
    seq = find(calls, "aten::native_layer_norm").seq
    culprit = {"seq_baseline": seq, "seq_candidate": 5, "rank": 0}
    content = {"culprits": [culprit], "baseline": {"path": str(calls.capture.path)}, "candidate": {"path": "x"}}
    (tmp_path / "verdict.json").write_text(json.dumps(content))
    found = trueup.reproduce(tmp_path, "culprit", tmp_path / "r")
    assert found.test.name == "test_native_layer_norm.py"
