"""The functions of ptdbg_ascend: what each mode dumps, in which files, and that readers and `compare` take them up."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trueup
from compat import SOURCES, small
from distributed.running import joined
from nursery import Nursery
from readers.captures import imported, tensor
from trueup import TrueupError, open_capture
from trueup.exchange.readers.ascend import marker_beside, names_beside
from trueup_compat import ptdbg_ascend as ptdbg
from trueup_compat.names import tool_slot
from trueup_compat.ptdbg_ascend import table as ptdbg_table
from trueup_compat.ptdbg_ascend.layout import VERSION
from trueup_compat.ptdbg_ascend.switches import SCRIPT

NAMES = [
    "Functional_linear_0_forward", "Functional_relu_0_forward", "Functional_layer_norm_0_forward", "Tensor_add_0_forward",
    "Functional_linear_1_forward", "Functional_softmax_0_forward", "Tensor_pow_0_forward", "Tensor_sum_0_forward",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    ptdbg.PrecisionDebugger.end()
    SCRIPT.end()
    SCRIPT.path = None


def dump(folder: str, steps: int = 1, device: str = "cpu", scale: float = 1.0, tag: str = "ptdbg_dump", **switch: Any) -> Path:
    """Dump a training, as a script does; return the folder of the rank."""
    net = small.model(device)
    ptdbg.set_dump_path(folder, tag)
    ptdbg.register_hook(net, ptdbg.acc_cmp_dump)
    ptdbg.set_dump_switch("ON", **switch)
    for _ in range(steps):
        small.step(net, device, scale)
    ptdbg.set_dump_switch("OFF")
    SCRIPT.end()
    (found,) = Path(folder).glob(f"{tag}_v[0-9].[0-9]/**/rank0")
    return found


def rows(folder: Path, file: str = "dump.pkl") -> list[list[Any]]:
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def calls(found: list[list[Any]]) -> list[str]:
    return list(dict.fromkeys(re.sub(r"[_.](input|output|stack_info).*", "", row[0]) for row in found))


def test_all_dumps_every_call_in_the_order_of_execution() -> None:
    folder = dump("out")
    assert folder == Path("out/ptdbg_dump_v2.0/rank0")
    found = rows(folder)
    forward = [name for name in calls(found) if name.endswith("forward")]
    assert [name for name in forward if name in NAMES] == NAMES
    backward = [name for name in calls(found) if name.endswith("backward")]
    assert [name.replace("forward", "backward") for name in reversed(NAMES)] == backward
    assert {row[0] for row in found if row[0].startswith("Functional_linear_0_backward")} == {
        f"Functional_linear_0_backward_{slot}" for slot in ("input.0", "output.1", "output.2")
    }  # its input needs no gradient
    for name, flag, checksum, dtype, shape, numbers in found:
        array = np.load(folder / "dump" / f"{name}.npy")
        assert (flag, checksum, dtype, shape) == (1, [], "torch.float32", list(array.shape))
        assert np.allclose(numbers, [array.max(), array.min(), array.mean(dtype=np.float64)], rtol=1e-6, atol=1e-12)
    assert len(list((folder / "dump").iterdir())) == len(found)


def test_numbers_run_on_from_step_to_step_and_while_the_switch_is_off() -> None:
    net = small.model()
    ptdbg.set_dump_path("out")
    ptdbg.register_hook(net, ptdbg.acc_cmp_dump)
    small.step(net)
    for _ in range(2):
        ptdbg.set_dump_switch("ON")
        small.step(net)
        ptdbg.set_dump_switch("OFF")
        assert (Path("out/ptdbg_dump_v2.0/rank0") / "dump.pkl").exists()
        small.step(net)
    linear = [name for name in calls(rows(Path("out/ptdbg_dump_v2.0/rank0"))) if "linear" in name and "forward" in name]
    assert linear == [f"Functional_linear_{k}_forward" for k in (2, 3, 6, 7)]


@pytest.mark.parametrize(
    ("switch", "expected"),
    [
        ({"mode": "list", "scope": ["Functional_linear_1"]}, ["Functional_linear_1_forward", "Functional_linear_1_backward"]),
        ({"mode": "list", "scope": ["Functional.linear.1.forward"]}, ["Functional_linear_1_forward"]),
        ({"mode": "list", "scope": ["Functional_linear_1_backward_output.0"]}, ["Functional_linear_1_backward"]),
        ({"mode": "range", "scope": [NAMES[1], NAMES[4]]}, NAMES[1:5]),
        ({"mode": "range", "scope": ["Tensor_sum_0_backward", "Functional_softmax_0_backward"]},
         ["Tensor_sum_0_backward", "Tensor_pow_0_backward", "Functional_softmax_0_backward"]),
        ({"mode": "api_list", "api_list": ["ReLU"]}, ["Functional_relu_0_forward", "Functional_relu_0_backward"]),
        ({"mode": "stack", "scope": ["Functional_linear_0_forward"]}, ["Functional_linear_0_forward"]),
        ({"dump_mode": "forward", "mode": "api_list", "api_list": ["pow"]}, ["Tensor_pow_0_forward"]),
    ],
)  # fmt: skip
def test_a_mode_dumps_what_it_names(switch: dict[str, Any], expected: list[str]) -> None:
    folder = dump("out", **switch)
    assert calls(rows(folder)) == expected
    capture = open_capture("out/ptdbg_dump_v2.0_trueup")  # which holds no more than that, but for what was not asked of a call
    assert len({row["seq"] for row in capture.records(["seq"]).to_pylist()}) <= len(expected) + 1


def test_ten_is_not_one() -> None:
    folder = dump("out", steps=6, mode="list", scope=["Functional_linear_1"])
    assert calls(rows(folder)) == ["Functional_linear_1_forward", "Functional_linear_1_backward"]


def test_a_range_is_met_again_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    debugger = ptdbg.PrecisionDebugger("out", "dump")
    debugger.configure_hook(mode="range", scope=["Functional.relu.0.forward", "Functional.layer_norm.0.forward"])
    net = small.model()
    for _ in range(2):
        debugger.start()
        small.step(net)
        debugger.stop()
        debugger.step()
    for step in range(2):
        found = rows(Path(f"out/ptdbg_dump_v6.0/step{step}/rank0"), "range_dump.pkl")
        assert calls(found) == ["Functional.relu.0.forward", "Functional.layer_norm.0.forward"]


def test_stacks_name_the_script_s_line() -> None:
    folder = dump("out", mode="api_stack", scope=[])
    found = {row[0]: row for row in rows(folder, "api_stack_dump.pkl")}
    frames = found["Functional_softmax_0_forward_stack_info"][1]
    assert frames[0][0].endswith("compat/small.py")
    assert frames[0][2:] == ["forward", "return F.softmax(self.second(hidden + 1.0), dim=-1)"]
    alone = rows(dump("out", tag="alone", mode="stack"))
    assert all(row[0].endswith("stack_info") for row in alone)
    assert not list(Path("out/alone_v2.0/rank0/dump").iterdir())


def test_filter_and_sides() -> None:
    names = {row[0] for row in rows(dump("out", filter_switch="OFF", dump_mode=["forward", "output"]))}
    assert "Tensor_sum_0_forward_output.0" in names  # a scalar tensor
    assert not any("input" in name or "backward" in name for name in names)
    scalars = {row[0]: row for row in rows(dump("out", filter_switch="OFF", tag="off"))}
    assert scalars["Tensor_add_0_forward_input.1"] == ["Tensor_add_0_forward_input.1", 1, [], "<class 'float'>", "[]", [1.0] * 3]
    assert "Tensor_sum_0_forward_output.0" not in {row[0] for row in rows(dump("out", tag="on"))}


def test_summaries_keep_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VERSION, "5.0")
    statistics = rows(dump("out", summary_only=True))
    assert {len(row[5]) for row in statistics} == {4}
    assert not list(Path("out").rglob("*.npy"))
    md5 = rows(dump("out", tag="md5", summary_mode="md5", filter_switch="ON"))
    assert all(re.fullmatch(r"[0-9a-f]{16}", row[2]) and row[5] == [] for row in md5)
    assert not list(Path("out").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("version", "folder", "name"),
    [
        ("2.3", "ptdbg_dump_v2.3/rank0", "Functional_linear_0_forward_input.0"),
        ("4.0", "ptdbg_dump_v4.0/step0/rank0", "Functional_linear_0_forward_input.0"),
        ("6.0", "ptdbg_dump_v6.0/step0/rank0", "Functional.linear.0.forward.input.0"),
    ],
)
def test_a_version_is_chosen_and_the_reader_takes_it(
    version: str, folder: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VERSION, version)
    found = dump("out", filter_switch="ON")
    assert found == Path("out") / folder
    assert name in {row[0] for row in rows(found)}
    native = open_capture(f"out/ptdbg_dump_v{version}_trueup").records(level="api").to_pylist()
    names = names_beside(found / "dump.pkl")
    separator = name[len("Functional")]
    kept = {f"{names[r['seq']]}{separator}{tool_slot(r['op'], r['slot'])}": r for r in native if r["seq"] in names and r["dtype"]}
    result, read, capture = imported(found, tmp_path)
    assert (result.lost, result.tool) == ([], f"ptdbg {version}")
    assert not any("left out" in note for note in result.notes)
    slots = [row for row in read if row["dtype"]]
    assert len(slots) == len(rows(found))
    for row in slots:  # gradients of weights among them, each in the place of its argument
        there = kept[row["foreign_name"]]
        assert [row[c] for c in ("digest", "phase", "op", "slot")] == [there[c] for c in ("digest", "phase", "op", "slot")]
        assert tensor(capture, row).size == row["numel"]
    assert {row["slot"] for row in slots if row["op"].endswith("layer_norm")} == {
        "input.0", "input.weight", "input.bias", "output.0",
        "grad_output.0", "grad_input.0", "grad_input.weight", "grad_input.bias",
    }  # fmt: skip


def test_the_same_tag_is_written_over_and_another_run_is_not_mixed_in() -> None:
    dump("out")
    (Path("out/ptdbg_dump_v2.0/rank0/dump") / "Tensor_old_0_forward_input.0.npy").write_bytes(b"")
    folder = dump("out", mode="api_list", api_list=["relu"])
    assert calls(rows(folder)) == ["Functional_relu_0_forward", "Functional_relu_0_backward"]
    assert not (folder / "dump" / "Tensor_old_0_forward_input.0.npy").exists()


def test_training_is_bitwise_the_same() -> None:
    net = small.model()
    plain = [small.step(net) for _ in range(2)]
    grads = [p.grad.clone() for p in net.parameters()]
    state = torch.get_rng_state()
    net = small.model()
    ptdbg.set_dump_path("out")
    ptdbg.register_hook(net, ptdbg.acc_cmp_dump)
    ptdbg.set_dump_switch("ON", mode="api_stack")
    dumped = [small.step(net) for _ in range(2)]
    ptdbg.set_dump_switch("OFF")
    assert torch.equal(torch.stack(plain), torch.stack(dumped))
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, net.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


# ---------------------------------------------------------------- compare
def table(folder: str = "result") -> list[dict[str, str]]:
    (found,) = Path(folder).glob("compare_result_*.csv")
    with found.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def compared(npu: Path, bench: Path, **options: Any) -> Any:
    (first,), (second,) = npu.glob("*dump.pkl"), bench.glob("*dump.pkl")
    return ptdbg.compare({"npu_pkl_path": str(first), "bench_pkl_path": str(second)}, "result", **options)


def test_columns_of_version_6_and_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VERSION, "6.0")
    options: dict[str, Any] = {"mode": "api_stack"}
    bench, npu = dump("out", tag="bench", **options), dump("out", tag="npu", scale=1.5, **options)
    result = compared(npu, bench, stack_mode=True)
    assert result.verdict == "deviates"
    found = table()
    assert list(found[0])[6:9] == ["Cosine", "MaxAbsErr", "MaxRelativeErr"]
    assert list(found[0])[9:11] == ["One Thousandth Err Ratio", "Five Thousandths Err Ratio"]
    assert list(found[0])[-1] == "NPU_Stack_Info"
    by_name = {row["NPU Name"]: row for row in found}
    assert by_name["Functional.linear.0.forward.input.1"]["Accuracy Reached or Not"] == "Yes"  # the weight is the same
    assert by_name["Functional.linear.0.forward.input.0"]["Accuracy Reached or Not"] == "No"
    assert "small.py" in by_name["Functional.linear.0.forward.input.0"]["NPU_Stack_Info"]
    assert found[0]["NPU Tensor Dtype"].startswith("torch.")


def test_nobody_is_suspected_where_rows_alone_do_not_pass(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, npu = dump("out", tag="bench"), dump("out", tag="npu")
    monkeypatch.setattr(ptdbg_table, "FAILED", ptdbg_table.pa.array(["Yes"]))
    assert compared(npu, bench).verdict == "aligned"
    (file,) = Path("result").glob("advisor_*.txt")
    advice = file.read_text("utf-8").splitlines()
    assert (advice[0], " rows did not pass, the first " in advice[-1]) == ("Suspect Nodes: NA", True)
    assert "their rule looks at one row alone" in capsys.readouterr().out


def test_statistics_alone_and_columns_of_2_3() -> None:
    bench, npu = (dump("out", tag=tag, scale=scale, summary_only=True) for tag, scale in (("bench", 1.0), ("npu", 3.0)))
    compared(npu, bench, columns="2.3")
    found = {row["NPU Name"]: row for row in table()}
    assert found["Functional_linear_0_forward_input.0"]["Result"] == "Warning"
    assert found["Functional_linear_0_forward_input.1"]["Result"] == ""


def test_a_dump_without_its_capture_is_imported(tmp_path: Path) -> None:
    bench, npu = dump("out", tag="bench"), dump("out", tag="npu", scale=2.0)
    Path("out/npu_v2.0_trueup").rename(tmp_path / "elsewhere")
    result = compared(npu, bench)
    assert result.verdict == "deviates"
    assert {row["NPU Name"] for row in table()} >= {"Functional_linear_0_forward_input.0", "Functional_linear_1_backward_output.1"}


def test_a_file_that_two_kinds_of_dump_wrote_is_read_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for tag, scale in (("bench", 1.0), ("npu", 2.0)):
        net = small.model()
        ptdbg.set_dump_path("out", tag)
        ptdbg.register_hook(net, ptdbg.acc_cmp_dump)
        for summary_only in (False, True):
            ptdbg.set_dump_switch("ON", summary_only=summary_only)
            small.step(net, scale=scale)
            ptdbg.set_dump_switch("OFF")
        SCRIPT.end()
    assert compared(Path("out/npu_v2.0/rank0"), Path("out/bench_v2.0/rank0")).verdict == "deviates"
    assert "so the files are imported: " in capsys.readouterr().out
    found = {row["NPU Name"]: row for row in table()}
    reached = [found[f"Functional_linear_{k}_forward_input.{place}"]["Accuracy Reached or Not"] for k in (0, 2) for place in (0, 1)]
    assert reached == ["No", "Yes", "N/A", "N/A"]  # of the second there are statistics alone


def test_ranks_are_compared_by_number(capsys: pytest.CaptureFixture[str]) -> None:
    for tag, scale in (("bench", 1.0), ("npu", 1.0)):
        root = dump("out", tag=tag, scale=scale).parent
        for rank in (2, 10):
            (root / "rank0").rename(root / "rank10") if rank == 10 else None
    with pytest.raises(ptdbg.CompareException, match=r"has no folders rank0, rank1"):
        ptdbg.compare_distributed("out", "out/bench_v2.0", "result")
    results = ptdbg.compare_distributed("out/npu_v2.0", "out/bench_v2.0", "result")
    assert {rank: result.verdict for rank, result in results.items()} == {10: "aligned"}
    assert list(Path("result").glob("compare_result_*_rank10-rank10.csv"))


def test_folders_of_different_ranks_are_compared_by_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    bench = dump("out", tag="bench")
    npu = dump("out", tag="npu", scale=2.0)
    marker = json.loads((npu / "trueup.json").read_text())
    (npu / "trueup.json").write_text(json.dumps(marker | {"rank": 5}))
    assert compared(npu, bench).verdict == "deviates"
    assert "Functional_softmax_0_forward_output.0" in {row["NPU Name"] for row in table()}


def test_a_marker_that_leads_elsewhere_is_none(tmp_path: Path) -> None:
    folder = dump("out", summary_mode="md5")
    marker = json.loads((folder / "trueup.json").read_text())
    for path in ("/etc", "../../../../etc", "../../x/../../etc", "..", "../../a\\b", 7):
        (folder / "trueup.json").write_text(json.dumps(marker | {"capture": path}))
        assert marker_beside(folder / "dump.pkl") is None
    (folder / "trueup.json").write_text("[" * 100_000)
    assert marker_beside(folder / "dump.pkl") is None
    (folder / "trueup.json").write_text(json.dumps(marker))
    _, read, _ = imported(folder, tmp_path)
    assert {row["foreign_checksum"][:5] for row in read if row["dtype"]} == {"xxh3:"}


def test_ranks_share_a_capture_and_write_over_an_earlier_run_s(
    nursery: Nursery, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        for code, said in joined(nursery, tmp_path / "logs", "compat.small.work", {}, folder=str(tmp_path / "dump")):
            assert code == 0, said
    root = tmp_path / "dump" / "ptdbg_dump_v2.0"
    assert sorted(path.name for path in root.iterdir()) == ["rank0", "rank1"]
    assert {name for rank in (0, 1) for name in calls(rows(root / f"rank{rank}")) if "softmax" in name} == {
        "Functional_softmax_0_forward", "Functional_softmax_0_backward",
    }  # fmt: skip
    native = open_capture(tmp_path / "dump" / "ptdbg_dump_v2.0_trueup")
    assert (sorted(native.ranks), native.lost) == ([0, 1], [])
    root.rename(tmp_path / "dump" / "bench_v2.0")
    (tmp_path / "dump" / "ptdbg_dump_v2.0_trueup").rename(tmp_path / "dump" / "bench_v2.0_trueup")
    for rank in (0, 1):
        file = tmp_path / "dump" / "bench_v2.0" / f"rank{rank}" / "trueup.json"
        file.write_text(file.read_text().replace("ptdbg_dump_v2.0_trueup", "bench_v2.0_trueup"))
    environment = {"DUMP_SCALE": "2.0"}  # of rank 1 alone
    for code, said in joined(nursery, tmp_path / "logs", "compat.small.work", environment, folder=str(tmp_path / "dump")):
        assert code == 0, said
    results = ptdbg.compare_distributed(root, tmp_path / "dump" / "bench_v2.0", "result")
    assert list(results) == [0, 1]
    said = capsys.readouterr().out
    assert re.match(r"DEVIATES  torch\.Tensor\.mul at compat/small\.py:\d+: 1\.0 in the baseline, 2\.0 in the candidate\n", said)
    assert "first seen in: torch.Tensor.mul, forward, step 0, rank 1  (torch.Tensor.mul)" in said
    assert said.count("table: result/compare_result_") == 2
    for rank in (0, 1):
        (file,) = Path("result").glob(f"compare_result_*_rank{rank}-rank{rank}.csv")
        with file.open(newline="", encoding="utf-8") as opened:
            names = [row["NPU Name"] for row in csv.DictReader(opened)]
        assert sorted(names) == sorted(row[0] for row in rows(root / f"rank{rank}"))  # of this rank, and of no other
    (report,) = Path("result").glob("trueup_report_*")
    assert json.loads((report / "verdict.json").read_text())["culprits"][0]["rank"] == 1


@pytest.mark.usefixtures("warm")
def test_the_end_of_the_process_writes_what_is_left(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom trueup_compat.ptdbg_ascend import *\nset_dump_path('out')\nregister_hook(None, acc_cmp_dump)\n"
        "set_dump_switch('ON')\ntorch.tanh(torch.ones(3))\n"
    )
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, env=environment)
    assert (run.returncode, run.stderr) == (0, "")
    assert "Torch_tanh_0_forward_output.0" in {row[0] for row in rows(Path("out/ptdbg_dump_v2.0/rank0"))}


@pytest.mark.usefixtures("warm")
def test_a_killed_process_leaves_the_steps_before(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time, torch\n"
        f"sys.path.insert(0, {str(Path(small.__file__).parents[1])!r})\n"
        "from compat import small\nfrom trueup_compat import recording\nfrom trueup_compat.ptdbg_ascend import *\n"
        "recording.HANDED_ON = 8\nnet = small.model()\noptimizer = torch.optim.SGD(net.parameters(), 1e-3)\n"
        "set_dump_path('out')\nregister_hook(net, acc_cmp_dump)\n"
        "set_dump_switch('ON', mode='list', scope=['Functional_linear'])\n"
        "for _ in range(12):\n    small.step(net)\n    optimizer.step()\n"
        "    time.sleep(0.3)  # the writer's second passes\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, env=environment)
    assert (run.returncode, run.stdout) == (-9, "")
    names = calls(rows(Path("out/ptdbg_dump_v2.0/rank0")))
    assert len(names) == len(set(names)) >= 8
    assert names[:4] == [f"Functional_linear_{call}" for call in ("0_forward", "1_forward", "1_backward", "0_backward")]
    assert len(names) % 4 == 0  # whole steps


def test_a_folder_that_cannot_be_written_is_one_message() -> None:
    Path("file").write_text("in the way")
    ptdbg.set_dump_path("file/out")
    ptdbg.register_hook(small.model(), ptdbg.acc_cmp_dump)
    with pytest.raises(TrueupError, match=r"^the dump cannot be written to file/out/\S+: Not a directory\n  next:     give"):
        ptdbg.set_dump_switch("ON")
    SCRIPT.end()
    with pytest.raises(ptdbg.CompareException, match=r"^overflows cannot be saved in file/out/\S+: Not a directory"):
        ptdbg.register_hook(small.model(), ptdbg.overflow_check)


def test_parse_prints_rows_and_their_stack(capsys: pytest.CaptureFixture[str]) -> None:
    folder = dump("out", mode="api_stack")
    capsys.readouterr()
    ptdbg.parse(str(folder / "api_stack_dump.pkl"), "Functional_linear_0_forward")
    said = capsys.readouterr().out
    assert re.search(r"^\[Functional_linear_0_forward_input\.0\]\[dtype: torch\.float32\]\[shape: \[5, 6\]\]\[max: [\d.]+\]", said)
    assert "Trace back (Functional_linear_0_forward_stack_info):" in said
    assert "Functional_linear_1" not in said


# ---------------------------------------------------------------- the class
def test_the_debugger_dumps_the_steps_it_is_asked_for_and_ends_the_run() -> None:
    debugger = ptdbg.PrecisionDebugger("out", "dump", step=[1])
    assert ptdbg.PrecisionDebugger() is debugger
    debugger.configure_hook(mode="all", summary_mode="summary")
    net = small.model()
    with pytest.raises(Exception, match=r"^ptdbg: exit after iteration 1$"):
        for _ in range(9):
            debugger.start()
            small.step(net)
            debugger.stop()
            debugger.step()
    assert [path.name for path in Path("out/ptdbg_dump_v6.0").iterdir()] == ["step1"]
    found = rows(Path("out/ptdbg_dump_v6.0/step1/rank0"))
    assert "Functional.linear.0.forward.input.0" in {row[0] for row in found}  # numbers begin anew with each step
    assert "Functional.linear.2.forward.input.0" not in {row[0] for row in found}


def test_modules_are_dumped_where_the_debugger_has_the_model() -> None:
    net = small.model()
    debugger = ptdbg.PrecisionDebugger("out", "dump", model=net)
    debugger.configure_hook(mode="all")
    debugger.start()
    small.step(net)
    debugger.stop()
    names = {row[0] for row in rows(Path("out/ptdbg_dump_v6.0/step0/rank0"))}
    assert {"first.Linear.0.forward.input.0", "first.Linear.0.forward.output.0", "second.Linear.0.backward.output.0"} <= names


def test_a_dataloader_starts_and_stops_it() -> None:
    debugger = ptdbg.PrecisionDebugger("out", "dump", step=[0, 2], enable_dataloader=True)
    debugger.configure_hook(mode="api_list", api_list=["relu"])
    net, loader = small.model(), torch.utils.data.DataLoader(torch.arange(9))
    seen = 0
    with pytest.raises(Exception, match="ptdbg: exit after iteration 2"):
        for _ in loader:
            small.step(net)
            seen += 1
    assert seen == 3
    assert sorted(path.name for path in Path("out/ptdbg_dump_v6.0").iterdir()) == ["step0", "step2"]


class Overflowing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), 300.0, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mul(x * self.weight, self.weight).float().sum()


def overflowing_steps(count: int) -> int:
    net = Overflowing()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    done = 0
    while done < count:
        optimizer.zero_grad()
        net(torch.ones(4, dtype=torch.float16)).backward()
        optimizer.step()
        done += 1
    return done


@pytest.mark.parametrize(("most", "steps"), [(1, 0), (3, 2), (-1, 4)])
def test_overflows_are_counted_up_to_the_number_allowed(most: int, steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    debugger = ptdbg.PrecisionDebugger("out", "overflow_check")
    debugger.configure_hook(overflow_nums=most)
    debugger.start()
    if most > 0:
        with pytest.raises(ValueError, match=rf"^\[overflow {most} times\]: dump file is saved in '\S+_{most}\.pkl'\.$"):
            overflowing_steps(9)
    else:
        assert overflowing_steps(4) == 4
    said = re.findall(r"\[overflow (\d) times\]: module name :'(Torch\.mul\.\d)\.forward'", capsys.readouterr().out)
    assert [int(k) for k, _ in said] == list(range(1, (most if most > 0 else 4) + 1))
    files = sorted(Path("out/ptdbg_dump_v6.0/step0/rank0").glob("*.pkl"))
    assert files[0].name == "Torch.mul.0.forward_1.pkl"
    assert [row[0] for row in rows(files[0].parent, files[0].name)][:3] == [
        "Torch.mul.0.forward.input.0", "Torch.mul.0.forward.input.1", "Torch.mul.0.forward.output.0",
    ]  # fmt: skip


def test_the_check_can_be_switched_off_for_a_while() -> None:
    ptdbg.set_dump_path("out", dump_tag="check")
    ptdbg.register_hook(Overflowing(), ptdbg.overflow_check, overflow_nums=1)
    ptdbg.set_overflow_check_switch("OFF")
    assert overflowing_steps(2) == 2
    ptdbg.set_overflow_check_switch("ON", filter_switch="OFF")
    with pytest.raises(ValueError, match=r"\[overflow 1 times\]"):
        overflowing_steps(1)
    (file,) = Path("out/check_v2.0/rank0").glob("Overflow_info_*_1.pkl")
    assert rows(file.parent, file.name)[0][0] == "Torch_mul_2_forward_input.0"


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("action", "code", "message"),
    [
        (lambda: ptdbg.set_dump_path("a b"), 1, "dump path 'a b': expected letters, digits, and _ . / -"),
        (lambda: ptdbg.set_dump_path("out", dump_tag="../x"), 1, "dump_tag '../x': expected letters"),
        (lambda: ptdbg.register_hook(None, print), 11, "expected acc_cmp_dump or overflow_check"),
        (lambda: ptdbg.register_hook(None, ptdbg.acc_cmp_dump, dump_mode="acl"), 15, "It would need an Ascend device, CANN"),
        (lambda: ptdbg.set_dump_switch("on"), 11, "switch 'on': expected ON or OFF"),
        (lambda: ptdbg.set_dump_switch("ON"), 11, r"set_dump_switch comes after register_hook\(model, acc_cmp_dump\)"),
        (lambda: ptdbg.set_overflow_check_switch("ON"), 11, "comes after register_hook"),
        (lambda: ptdbg.set_backward_input(["nothing.npy"]), 1, "expected an existing .npy file"),
        (lambda: ptdbg.compare({}, "out"), 11, "input_param lacks npu_pkl_path, bench_pkl_path: expected npu_pkl_path"),
        (lambda: ptdbg.compare(dict.fromkeys(("npu_pkl_path", "bench_pkl_path"), "none.pkl"), "out"), 2, "none.pkl cannot be read"),
        (lambda: ptdbg.compare_distributed("a", "b", "out", mode=1), 11, "compare_distributed knows no mode"),
        (lambda: ptdbg.parse("none.pkl", "x"), 2, "none.pkl cannot be read"),
        (lambda: ptdbg.PrecisionDebugger("out", "free"), 11, "hook_name 'free': expected dump or overflow_check"),
        (lambda: ptdbg.PrecisionDebugger("out", "dump").configure_hook(mode="acl"), 15, "It would need an Ascend device"),
        (lambda: ptdbg.PrecisionDebugger.start(), 11, "make one first"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_tool_s_number(action: Any, code: int, message: str) -> None:
    with pytest.raises(ptdbg.CompareException, match=message) as raised:
        action()
    assert raised.value.code == code
    assert isinstance(raised.value, TrueupError)


@pytest.mark.parametrize(
    ("switch", "message"),
    [
        ({"mode": "most"}, "mode 'most': expected one of all, list"),
        ({"mode": "list"}, "at least one name in scope"),
        ({"mode": "range", "scope": ["a"]}, "exactly two names in scope: the first and the last API, got 1"),
        ({"mode": "stack", "scope": ["a", "b", "c"]}, "at most two names"),
        ({"mode": "api_list"}, r"names in api_list, such as \['relu'\]"),
        ({"mode": "acl", "scope": ["a"]}, "mode='list' with the same scope records the API's tensors on any device"),
        ({"dump_mode": "up"}, "dump_mode 'up': expected of all, forward"),
        ({"summary_mode": "sha"}, "summary_mode 'sha': expected all, summary, md5"),
    ],
)
def test_what_a_mode_lacks_is_said(switch: dict[str, Any], message: str) -> None:
    ptdbg.set_dump_path("out")
    ptdbg.register_hook(small.model(), ptdbg.acc_cmp_dump)
    with pytest.raises(ptdbg.CompareException, match=message):
        ptdbg.set_dump_switch("ON", **switch)


def test_a_capture_that_runs_already_is_not_disturbed(tmp_path: Path) -> None:
    ptdbg.set_dump_path("out")
    with trueup.capture(tmp_path / "own"), pytest.raises(TrueupError, match="run the script without `trueup capture`"):
        ptdbg.register_hook(small.model(), ptdbg.acc_cmp_dump)


# ---------------------------------------------------------------- module_dump
def test_one_module_is_dumped_under_a_name_of_the_script_s_and_no_function_meanwhile() -> None:
    debugger = ptdbg.PrecisionDebugger("out", "dump")
    debugger.configure_hook(mode="all")
    net = small.model()
    debugger.start()
    torch.relu(torch.ones(2))
    ptdbg.module_dump(net.second, "head")
    small.step(net)  # forward and backward: of no function that runs here is there a row
    shown = net(torch.ones(5, 6)).sum()
    ptdbg.module_dump_end()
    torch.tanh(torch.ones(2))
    shown.backward()
    net.second(torch.ones(5, 8))
    debugger.stop()
    found = rows(Path("out/ptdbg_dump_v6.0/step0/rank0"))
    slots = ["forward.input.0", "forward.output.0", "backward.input.0", "backward.output.0"]
    assert [row[0] for row in found if row[0].startswith("head")] == [
        *(f"head.0.{slot}" for slot in slots), *(f"head.1.{slot}" for slot in slots)
    ]  # fmt: skip
    assert [name for name in calls(found) if not name.startswith(("head", "Torch.ones"))] == [
        "Torch.relu.0.forward", "Torch.tanh.0.forward", "Functional.linear.0.forward",
    ]  # fmt: skip
    assert np.load("out/ptdbg_dump_v6.0/step0/rank0/dump/head.0.forward.output.0.npy").shape == (5, 3)


def test_module_dump_where_it_does_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    net = small.model()
    for module, name, message in ((net, "x", "module_dump comes after PrecisionDebugger"), (3, "x", "got int"), (net, 3, "got 3")):
        with pytest.raises(ptdbg.CompareException, match=message):
            ptdbg.module_dump(module, name)
    ptdbg.set_dump_path("out")
    ptdbg.register_hook(net, ptdbg.acc_cmp_dump)
    with pytest.raises(ptdbg.CompareException, match=r"of versions 5 and 6, and this dump is of version 2.0: set TRUEUP_PTDBG"):
        ptdbg.module_dump(net, "x")
    SCRIPT.end()
    debugger = ptdbg.PrecisionDebugger("out", "dump", model=net)
    debugger.configure_hook(mode="all")
    debugger.start()
    ptdbg.module_dump(net.second, "head")
    assert "each module is dumped" in capsys.readouterr().out
