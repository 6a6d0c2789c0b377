# ruff: noqa: E501, PT018 - rows of traces, and what two words say
"""`trueup profile`: classes of a step's time, from traces, tables and a training."""

from __future__ import annotations

import gzip
import html
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trueup.doors.cli import main
from trueup.doors.report.migration import profile_page, render_profile
from trueup.doors.report.terminal import Terminal
from trueup.foundation.model import TrueupError
from trueup.migration.profile import compare, profile
from trueup.migration.profile.judging import Part, Profile, both, total, union, without
from trueup.migration.profile.reading import is_sync, is_wrapper, named_class, remedy, sign
from trueup.recording.adapters.torch.profiling import Profiling, compiled_again

PAGE = (Path(__file__).parents[2] / "docs/profile.md").read_text("utf-8")
STEP = ("user_annotation", "ProfilerStep#1", 0, 10_000)
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def trace(file: Path, *events: tuple[Any, ...], step: bool = True) -> Path:
    """Write events: category, name, start, length, thread (of a kernel: stream)."""
    rows = [
        {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length, "pid": 1, "tid": (*rest, 1)[0]}
        for kind, name, start, length, *rest in ([STEP] if step else []) + list(events)
    ]
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": rows}), "utf-8")
    return file


SETS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)).map(lambda one: (one[0], one[0] + one[1])), max_size=8)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SETS, SETS)
def test_sets_of_intervals_are_those_of_their_moments(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    def moments(some: list[tuple[int, int]]) -> set[int]:
        return {moment for start, end in some for moment in range(start, end)}

    one, two = (union(np.array(some, float).reshape(-1, 2)) for some in (first, second))
    a, b = moments(first), moments(second)
    assert (total(one), total(both(one, two)), total(without(one, two))) == (len(a), len(a & b), len(a - b))


@pytest.mark.parametrize(
    ("events", "kind", "said"),
    [
        ([("user_annotation", LOADER, 100, 6000), ("kernel", "gemm", 7000, 2000, 7)], "host", "waits for its data"),
        ([("kernel", "gemm", 0, 2000), ("cpu_op", "aten::item", 1000, 1100), ("cpu_op", "aten::add", 2150, 5000), ("kernel", "gemm", 8000, 2000, 7)],
         "copy and format", "a number is read back"),
        ([("cpu_op", "aten::mul", at, 80) for at in range(0, 9900, 100)] + [("kernel", "mul", at + 90, 5, 7) for at in range(0, 9900, 100)],
         "framework", "many small operators"),
        ([("cpu_op", "dynamo", 0, 6000), ("cpu_op", "aten::mm", 100, 20), ("kernel", "gemm", 7000, 500, 7)], "compile", "compiled after the first step"),
        ([("kernel", "gemm", 0, 4000, 7), ("kernel", "ncclDevKernel_AllReduce", 3000, 6000, 8)], "communication", "nothing else overlaps"),
        ([("kernel", "svd_kernel", 0, 9000, 7)], "operator", "One operator takes 90 % of a step: svd_kernel."),
        ([("kernel", "Memcpy HtoD (Pageable -> Device)", 0, 7000, 7), ("kernel", "gemm", 7000, 3000, 7)], "copy and format", "Memcpy HtoD"),
        ([("cpu_op", "aten::linalg_svd", 0, 9000)], "operator", "aten::linalg_svd"),
        ([("cpu_op", "aten::reshape", 0, 9000), ("cpu_op", "aten::clone", 10, 8900)], "copy and format", "aten::clone"),
        ([("cpu_op", "aten::mm", 0, 100), ("cpu_op", "aten::mm", 9000, 100)], "host", "Python works"),
    ],
)  # fmt: skip
def test_a_class_is_found_by_what_the_host_does_while_the_device_is_idle(tmp_path: Path, events: list[Any], kind: str, said: str) -> None:
    found = profile(trace(tmp_path / "trace.json", *events))
    assert (found.kind, found.exit_code) == (kind, 1)
    assert said in found.sentence
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert sign(found.kind, found.variant(kind)) and remedy(found.kind, found.variant(kind)).endswith(".")


def test_what_computes_is_no_fault_and_an_interruption_is_none(tmp_path: Path) -> None:
    assert profile(trace(tmp_path / "a.json", ("kernel", "sm80_xmma_gemm", 0, 9900, 7))).exit_code == 0
    small = [("cpu_op", "aten::mul", at, 5) for at in range(0, 4000, 20)]
    found = profile(trace(tmp_path / "b.json", *small, ("cpu_op", "aten::mul", 4000, 4000), *[("cpu_op", "aten::mul", at, 5) for at in range(8000, 9990, 20)]))
    assert found.shares["framework"] == pytest.approx(1.0)


def test_graphs_hide_launches(tmp_path: Path) -> None:
    found = profile(trace(tmp_path / "g.json", ("cuda_runtime", "cudaGraphLaunch", 0, 10), ("kernel", "gemm", 9000, 500, 7)))
    assert (found.exit_code, found.sentence[:15]) == (2, "Could not tell:")
    computing = profile(trace(tmp_path / "h.json", ("cuda_runtime", "cudaGraphLaunch", 0, 10), ("kernel", "gemm", 0, 9900, 7)))
    assert computing.exit_code == 0 and computing.unreliable


def test_device_times_are_those_of_holistic_trace_analysis(tmp_path: Path) -> None:
    """Busy, idle, computing, communication and the share of it that computing overlaps, over the kernels' own window."""
    found = profile(trace(
        tmp_path / "d.json", ("kernel", "gemm", 1000, 400, 7), ("kernel", "ncclKernel_AllReduce", 1200, 400, 8), ("gpu_memcpy", "Memcpy DtoH", 2000, 100, 7),
    ))  # fmt: skip
    assert found.device == {
        "us": 1100.0, "busy": 700.0, "idle": 400.0, "computing": 400.0, "not computing": 300.0, "communication": 400.0, "communication overlapped": 0.5,
    }  # fmt: skip


def test_two_traces_say_what_became_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast = trace(tmp_path / "a.json", ("kernel", "gemm", 0, 3000, 7), step=False)
    slow = trace(tmp_path / "b.json", ("kernel", "gemm", 0, 3000, 7), ("kernel", "TransData", 3000, 3000, 7), step=False)
    found = compare(profile(fast), profile(slow))
    assert found.sentence == "A trace takes 2.00 times as long; slower is copy and format, most TransData, 0.00 ms before and 3.00 ms now."
    assert main(["profile", str(slow), "--baseline", str(fast), "--json", str(tmp_path / "c.json")]) == 1
    assert json.loads((tmp_path / "c.json").read_text())["changes"][0]["name"] == "TransData"
    assert main(["profile", str(slow), "--baseline", str(fast), "--html", str(tmp_path / "c.html")]) == 1
    page = (tmp_path / "c.html").read_text("utf-8")
    assert f"<h1>{found.sentence}</h1>" in page
    assert '<td class="text">TransData</td><td data-label="before">0.000</td><td data-label="now">3.000</td><td data-label="change">+3.000</td>' in page
    assert [name for name in ("before, ", "now, ") if f"<h3>{name}" in page] == ["before, ", "now, "]
    assert main(["profile", str(fast), "--baseline", str(slow)]) == 0
    assert compare(profile(fast), profile(trace(tmp_path / "s.json", ("kernel", "gemm", 0, 3000, 7)))).exit_code == 2


@pytest.mark.parametrize(
    ("body", "got"),
    [
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 2}, {"ph"', "cut off"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": 1, "dur": 2}', "cut off"),
        (b'{"traceEvents": []}', "no event that has a time"),
        (b"[1, 2]", "no object"),
        (b"hello", "no list of events"),
        (b"", "no list of events"),
        (b'{"other": ' + b"[" * 100_000, "recursion"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": 1e400, "dur": NaN}]}', "no event that has a time"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "end-of-stream"),
        (b"\x1f\x8b\x00", "compression method|end-of-stream"),
    ],
)  # fmt: skip
def test_a_broken_trace_gets_one_message(tmp_path: Path, body: bytes, got: str) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(body)
    with pytest.raises(TrueupError, match=rf"A trace cannot be read(?s:.)*got: .*(?:{got})"):
        profile(file)


KERNELS = """Device_id,Name,Type,Accelerator Core,Start Time(us),Duration(us),Wait Time(us),Block Dim
0,TransData_1,TransData,AI_VECTOR_CORE,"1750000000000000.027",600.0,1,1
0,MatMulV2_3,MatMulV2,AI_CORE,"1750000000000600.5",400.0,1,1
"""
STEPS = "Device_id,Step,Computing,Communication(Not Overlapped),Overlapped,Communication,Free\n0,1,200,700,50,750,100\n0,2,200,700,50,750,100\n"
SUMS = "Device_id,OP Type,Core Type,Count,Total Time(us),Ratio(%)\n0,MatMulV2,AI_CORE,10,300,30\n0,Cast,AI_VECTOR_CORE,20,700,70\n"


@pytest.mark.parametrize(
    ("body", "kind", "share"), [(KERNELS, "copy and format", 0.6), (STEPS, "communication", 0.7), (SUMS, "copy and format", 0.7)]
)
def test_tables_of_torch_npu(tmp_path: Path, body: str, kind: str, share: float) -> None:
    file = tmp_path / "table.csv"
    file.write_text(body, "utf-8")
    found = profile(file)
    assert (found.kind, found.exit_code) == (kind, 1)
    assert found.shares[kind] == pytest.approx(share, abs=1e-3)
    file.write_text(body[: body.rindex(",")].rsplit(",", 4)[0] + ",x,x", "utf-8")
    with pytest.raises(TrueupError, match="A table cannot be read"):
        profile(file)


def test_a_printed_table_with_columns_of_an_npu(tmp_path: Path) -> None:
    rows = [("Name", "Self CPU %", "Self CPU", "Self NPU %", "Self NPU", "# of Calls"), ("aten::matmul", "50%", "2.000ms", "20%", "1.000ms", "4"),
            ("D2DCopywithStreamSynchronize", "50%", "2.000ms", "80%", "4.000ms", "8")]  # fmt: skip
    widths = [30, 12, 12, 12, 12, 12]
    dashes = "  ".join("-" * width for width in widths)
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    file = tmp_path / "train.log"
    file.write_text("\n".join(["step 1", dashes, lines[0], dashes, *lines[1:], dashes, "Self CPU time total: 4ms"]), "utf-8")
    found = profile(file)
    assert (found.kind, found.shares["copy and format"], found.exit_code) == ("copy and format", 0.8, 1)
    assert "knows no gaps" in found.remarks[0]
    file.write_text("nothing here", "utf-8")
    with pytest.raises(TrueupError, match="no table"):
        profile(file)


def test_a_trace_of_torch_npu_has_no_categories(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in ((1, "Python"), (2, "Ascend Hardware"), (3, "Overlap Analysis"))
    ]
    for pid, name, start, length in ((1, "aten::add", "010.5", 100), (2, "aclnnMm_TransData_TransData", "100.25", 800), (3, "Computing", "100.25", 800), (2, "MatMul", "900.25", 200)):
        rows.append({"ph": "X", "name": name, "pid": pid, "tid": 1, "ts": f"17500000000{start}", "dur": length})
    (tmp_path / "ASCEND_PROFILER_OUTPUT").mkdir()
    (tmp_path / "ASCEND_PROFILER_OUTPUT/trace_view.json").write_text(json.dumps(rows), "utf-8")
    found = profile(tmp_path)
    assert found.shares["copy and format"] == pytest.approx(0.8)
    assert found.device["busy"] == pytest.approx(1000.0)
    assert found.of("copy and format")[0].name == "TransData"


def test_quirks_of_real_tables(tmp_path: Path) -> None:
    """A tab behind a time, kernels without a type, a step without a number, calls of PyTorch's in rows of their own."""
    file = tmp_path / "kernel_details.csv"
    file.write_text(
        "Device_id,Name,Type,Accelerator Core,Start Time(us),Duration(us),Wait Time(us)\n0,aclnnMul_TransposeAiCore_Transpose,N/A,N/A,100.0\t,30.0,0\n"
        "0,aclnnMatmul_MatMulCommon_MatMulV2,N/A,N/A,130.5\t,20.0,0\n", "utf-8")  # fmt: skip
    found = profile(file)
    assert found.remarks and "Nothing of the host is in this file" in found.remarks[0]
    assert {(part.kind, part.name, part.time) for part in found.parts if part.time > 1} == {("copy and format", "Transpose", 30.0), ("operator", "MatMulV2", 20.0)}
    file.write_text("Device_id,Step,Computing,Communication(Not Overlapped),Overlapped,Communication,Free\n0,,900.5,20,0,20,79.5\n", "utf-8")
    assert profile(file).finding is None  # (computing) stands for all operators
    file.write_text("Device_id,Step,Computing,Communication(Not Overlapped),Overlapped,Communication,Free\n0,,90.5,20,0,20,790.5\n", "utf-8")
    assert "the device is free, and nothing in this file says what it waits for" in profile(file).sentence
    head = "Step,Type,Index,Computing,Communication(Not Overlapped),Overlapped,Communication,Free"
    file.write_text(f"{head}\n,rank,0,90.0,20,0,20,890\n,rank,1,80.0,40,0,40,880\n,stage,\"(0, 1)\",90.0,40,0,40,890\n", "utf-8")
    assert profile(file).window == 2000.0  # a stage is the longest of its ranks
    head = "Name,Input Shapes,Call Stack,Host Self Duration(us),Host Total Duration(us),Device Self Duration(us),Device Total Duration(us)"
    file.write_text(f"{head}\naten::mm,,,100.0,120.0,80.0,50.0\naten::mm,,,10.0,15.0,8.0,5.0\naten::relu,,,2.0,2.0,0,0\n", "utf-8")
    assert [(part.name, part.time, part.calls) for part in profile(file).parts] == [("aten::mm", 88.0, 2)]


def test_one_step_as_lanes(tmp_path: Path) -> None:
    events = [("cpu_op", "aten::mm", 100, 40), ("kernel", "gemm", 200, 5000, 7), ("kernel", "gemm", 5203, 797, 7), ("kernel", "ncclDevKernel_AllReduce", 6000, 2000, 9)]
    device, host = profile(trace(tmp_path / "a.json", *events)).lanes
    assert [(bar.kind, bar.start, round(bar.length, 3), bar.calls) for bar in device.bars] == [("operator", 0.02, 0.58, 2), ("communication", 0.6, 0.2, 1)]
    assert [(bar.name, bar.start) for bar in host.bars] == [("aten::mm", 0.01)]
    (alone,) = profile(trace(tmp_path / "b.json", ("cpu_op", "aten::mm", 100, 4000))).lanes
    assert [(bar.kind, bar.name) for bar in alone.bars] == [("framework", "(Python between operators)"), ("operator", "aten::mm"), ("host", "(Python alone)")]


def test_names_have_their_classes() -> None:
    assert [named_class(name) for name in ("aten::alltoall", "ncclDevKernel_ReduceScatter", "hcom_allReduce__123", "Cast_12", "MatMulV2", "aten::all")] == [
        "communication", "communication", "communication", "copy and format", "operator", "operator",
    ]  # fmt: skip
    assert is_wrapper("autograd::engine::evaluate_function: MmBackward0") and not is_wrapper("aten::mm")
    assert is_sync("cudaStreamSynchronize") and not is_sync("aten::add")


@pytest.mark.usefixtures("autoloaded", "warm")
def test_a_training_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A process of its own: the variable is read where PyTorch is imported."""
    (tmp_path / "train.py").write_text(
        "import time, torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "def load(_):\n"
        "    time.sleep(0.05)\n"
        "    return torch.ones(4)\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    __len__ = lambda self: 100\n"
        "    __getitem__ = lambda self, at: load(at)\n"
        "for x in torch.utils.data.DataLoader(Data()):\n"
        "    model(x).sum().backward()\n"
        "    optimizer.step()\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "--steps", "2", "--json", "found.json", "--", sys.executable, "train.py"]) == 1
    found = json.loads((tmp_path / "found.json").read_text())
    first = found["classes"][0]
    assert (first["class"], first["sign"], found["steps"]) == ("host", "the step waits for its data", 2)
    assert first["parts"][0]["lines"][0] == "train.py:10"
    assert found["compiled"] == []


@pytest.mark.parametrize(("steps", "said"), [(1, []), (2, ["start", "stop"]), (3, ["start", "step", "stop"])])
def test_a_training_of_too_few_steps_leaves_no_profile_running(tmp_path: Path, steps: int, said: list[str]) -> None:
    """PyTorch would end it in a segmentation fault; what it saved would be other steps than those that were asked for."""
    begun, optimizer, heard = Profiling(tmp_path, 5, 1), object(), []
    begun._profile = type("Heard", (), {"__getattr__": lambda _, name: lambda: heard.append(name)})()
    for _ in range(steps):
        begun._stepped(optimizer)
    begun._give_up()
    begun._save(begun._profile)
    assert (heard, list(tmp_path.iterdir())) == (said, [])


def test_what_is_compiled_again_says_which_guard_failed(capsys: pytest.CaptureFixture[str]) -> None:
    @torch.compile(backend="eager", dynamic=False)
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice(torch.ones(2))
    since = time.time()
    for size in (3, 4):
        twice(torch.ones(size))
    (again,) = compiled_again(since)
    said = "was compiled again 2 times: tensor 'x' size mismatch at index 0. expected 2, actual 3"
    assert again == f"twice ({os.path.relpath(__file__)}:{twice.__wrapped__.__code__.co_firstlineno}) {said}"
    assert compiled_again(time.time()) == []
    found = Profile("process 1", 1000.0, 1, (Part("compile", "dynamo", 900.0, 2),), compiled=(again,))
    render_profile(found, 10, Terminal())
    assert "".join(f"why{again}".split()) in "".join(capsys.readouterr().out.split())
    assert found.document()["compiled"] == [again]
    assert html.escape(again).replace("&#x27;", "&#39;") in profile_page(found)


def test_what_is_no_trace_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile"]) == 64
    assert main(["profile", str(tmp_path / "none.json")]) == 2
    assert main(["profile", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("next:") == 3


def test_the_page_s_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "trace.json").write_text(blocks[0][1], "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["profile", "trace.json"]) == 1
    out = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert blocks[1][1].partition("\n")[2].strip() == out.strip()
    assert main(["profile", "trace.json", "--html", "page.html"]) == 1
    page = Path("page.html").read_text("utf-8")
    assert page.count("<title>") == 4  # of the page, of a kernel, of the loader and of an operator
    assert "60.0 %" in page
