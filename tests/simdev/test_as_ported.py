"""What ported scripts use of the device: streams, events, memory figures, mixed precision, typed tensors, process groups."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from launch.running import environment
from trueup.doors.cli import main


def test_streams_and_events_are_there_and_take_time() -> None:
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
        start.record()
        x = torch.ones(64, 64, device="npu") @ torch.ones(64, 64, device="npu")
        end.record(stream)
    torch.npu.current_stream().wait_stream(stream)
    assert stream != torch.npu.default_stream() == torch.npu.current_stream()
    x.record_stream(stream)
    assert end.query()
    assert start.elapsed_time(end) > 0
    assert x.sum().item() == 64**3
    with pytest.raises(RuntimeError, match="enable_timing"):
        torch.npu.Event().elapsed_time(end)


def test_memory_figures() -> None:
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    held = torch.zeros(1000, 250, device="npu")
    view = held[3:]
    del held
    assert torch.npu.memory_allocated() - before == 1_000_000
    del view
    assert torch.npu.memory_allocated() == before
    assert torch.npu.max_memory_allocated() - before == torch.npu.memory_stats()["allocated_bytes.all.peak"] - before == 1_000_000
    with pytest.raises(NotImplementedError, match="has no such figure"):
        torch.npu.utilization()
    free, total = torch.npu.mem_get_info()
    assert 0 < free < total == torch.npu.get_device_properties().total_memory
    assert "allocated_bytes.all.peak" in torch.npu.memory_summary()


def test_a_graph_runs_again_what_it_kept() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 4).npu(), torch.ones(2, 4, device="npu")
    optimizer, graph = torch.optim.SGD(model.parameters(), lr=0.01), torch.npu.NPUGraph()
    before, random = model.weight.tolist(), torch.npu.get_rng_state()
    with torch.npu.graph(graph):
        loss = torch.nn.functional.dropout(model(x), 0.5).square().sum()
        loss.backward()
        optimizer.step()
    assert (model.weight.tolist(), torch.npu.get_rng_state().tolist()) == (before, random.tolist())
    replayed = []
    for _ in range(3):
        graph.replay()
        replayed.append(loss.item())
    torch.manual_seed(0)
    plain = torch.nn.Linear(4, 4)
    torch.set_rng_state(random)
    again, optimizer = [], torch.optim.SGD(plain.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.nn.functional.dropout(plain(torch.ones(2, 4)), 0.5).square().sum()
        loss.backward()
        optimizer.step()
        again.append(loss.item())
    assert replayed == again
    with pytest.raises(RuntimeError, match="reads a number back"), torch.npu.graph(torch.npu.NPUGraph()):
        x.sum().item()
    assert not torch.npu.is_current_stream_capturing()


def test_labels_of_int32() -> None:
    x, labels = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
    wanted = torch.nn.functional.cross_entropy(x, labels)
    (gradient,) = torch.autograd.grad(wanted, x)
    found = torch.nn.CrossEntropyLoss().npu()(x.npu(), labels.npu().to(torch.int32))
    assert found.item() == wanted.item()
    assert torch.equal(torch.autograd.grad(found, x)[0], gradient)


def test_ctc_takes_lengths_of_the_host() -> None:
    probs, labels = torch.randn(6, 2, 5).log_softmax(-1), torch.tensor([[1, 2], [3, 4]])
    lengths = torch.tensor([6, 5]), torch.tensor([2, 1])
    found = torch.nn.CTCLoss()(probs.npu(), labels.npu(), *lengths)
    assert found.item() == torch.nn.CTCLoss()(probs, labels, *lengths).item()


def test_options_are_checked() -> None:
    torch.npu.set_option({"ACL_OP_SELECT_IMPL_MODE": "high_performance"})
    with pytest.raises(ValueError, match="may be high_precision, high_performance"):
        torch.npu.set_option({"ACL_OP_SELECT_IMPL_MODE": "fast"})
    with pytest.raises(ValueError, match="knows no ACL_SPEED"):
        torch.npu.set_option({"ACL_SPEED": "1"})
    with pytest.raises(ValueError, match="no directory"):
        torch.npu.set_option({"ACL_DEBUG_DIR": "/no/such"})


def test_operators_are_dumped(tmp_path: Path) -> None:
    config = tmp_path / "dump.json"
    config.write_text('{"dump": {"dump_list": [], "dump_path": "output", "dump_mode": "all", "dump_op_switch": "on"}}')
    torch.npu.init_dump()
    torch.npu.set_dump(str(config))
    a = torch.tensor([2, 2]).to("npu:0")
    a.add_(1)
    torch.npu.finalize_dump()
    names = sorted(path.name for path in (tmp_path / "output").glob("add_*"))
    assert [name.split(".")[5:] for name in names] == [["input", "0", "npy"], ["output", "0", "npy"]]
    assert np.load(tmp_path / "output" / names[1]).tolist() == [3, 3]
    config.write_text("{}")
    with pytest.raises(ValueError, match="is no file like"):
        torch.npu.set_dump(str(config))


def test_the_profiler_has_columns_of_the_device(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3).npu()
    with torch.autograd.profiler.profile(use_npu=True, record_shapes=True) as prof:
        model(torch.ones(1, 3).npu()).sum().backward()
    table = str(prof.key_averages().table())
    assert "Self NPU %" in table
    assert "Self NPU time total" in table
    rows = {one.key: one for one in prof.key_averages() if one.device_type.name == "CPU"}
    assert 0 < rows["aten::addmm"].device_time_total <= rows["aten::addmm"].cpu_time_total
    with torch.autograd.profiler.profile(use_npu=True, profile_memory=True) as prof:
        made = model(torch.ones(5, 3, device="npu"))
    assert "Self NPU Mem" in str(prof.key_averages().table())
    sizes = {one.key: one.self_device_memory_usage for one in prof.key_averages() if one.device_type.name == "CPU"}
    assert (sizes["aten::addmm"], sizes["aten::t"]) == (made.nbytes, 0)
    with torch.npu.profile(str(tmp_path / "made")):
        model(torch.ones(1, 3).npu())
    assert "addmm" in (tmp_path / "made" / "trace.json").read_text()


def test_the_accelerator_answers() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    held = torch.ones(2, device="npu")
    assert torch.accelerator.memory_allocated() >= held.nbytes
    assert torch.accelerator.max_memory_allocated() >= torch.accelerator.memory_allocated()


TYPED = [("FloatTensor", torch.float32), ("LongTensor", torch.int64), ("BoolTensor", torch.bool)]


@pytest.mark.parametrize(("name", "dtype"), TYPED)
def test_typed_tensors(name: str, dtype: torch.dtype) -> None:
    made = getattr(torch.npu, name)([1, 0])
    assert made.dtype is dtype
    assert made.device.type == "npu"
    assert getattr(torch.npu, name)(2, 3).shape == (2, 3)


def test_mixed_precision_of_the_module() -> None:
    x = torch.ones(2, 2, device="npu")
    with torch.npu.amp.autocast():
        assert (x @ x).dtype is torch.float16
    with torch.npu.amp.autocast(False):
        assert (x @ x).dtype is torch.float32
    assert torch.npu.amp.GradScaler(init_scale=8.0).get_scale() == 8.0


def test_hccl_is_a_backend() -> None:
    assert torch.distributed.get_default_backend_for_device("npu") == "hccl"


@pytest.mark.usefixtures("warm")
def test_without_a_line_in_the_script() -> None:
    """What scripts of the porting guide and of apex import, in a process of its own with three devices."""
    asked = {**environment(), "TRUEUP_SIMULATED": "1", "TRUEUP_SIMULATED_DEVICES": "3", "PYTHONWARNINGS": "ignore"}
    start = "import torch; from trueup.autoload import autoload; autoload()\n"  # the entry point, where this tree is not installed
    script = start + Path(__file__).with_name("as_ported.txt").read_text()
    ran = subprocess.run([sys.executable, "-c", script], env=asked, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("reached the end\n")


def test_a_command_with_the_device(capfd: pytest.CaptureFixture[str]) -> None:
    words = "import os; print(*(os.environ[one] for one in ('TRUEUP_SIMULATED', 'TRUEUP_SIMULATED_DEVICES'))); raise SystemExit(5)"
    assert main(["simdev", "run", "--devices", "2", "--", sys.executable, "-c", words]) == 5
    assert capfd.readouterr().out == "1 2\n"


def test_a_number_of_devices_that_is_none() -> None:
    asked = {**environment(), "TRUEUP_SIMULATED_DEVICES": "none"}
    command = [sys.executable, "-c", "from trueup import simdev; simdev.install()"]
    ran = subprocess.run(command, env=asked, capture_output=True, text=True, check=False)
    assert "expected: 1 or more" in ran.stderr


class _Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)))


@pytest.mark.parametrize("profiled", [False, True])
def test_a_module_moves_while_shapes_are_profiled(profiled: bool) -> None:
    torch.manual_seed(0)
    with torch.profiler.profile(record_shapes=True) if profiled else torch.enable_grad():
        model = _Tied()
        model.a.weight.note = "kept"  # type: ignore[assignment]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model.to("npu")
        for place in ("npu", "cpu"):
            model.to(place)
            assert model.a.weight is model.b.weight
            assert model.norm.running_mean.device.type == place  # type: ignore[union-attr]
            loss = model(torch.eye(4)[:2].to(place)).square().sum()
            loss.backward()
            model.to("npu")
            optimizer.step()
    assert model.a.weight.note == "kept"  # type: ignore[comparison-overlap]
    assert model.a.weight.sum().item() == MOVED.setdefault("sum", model.a.weight.sum().item())


MOVED: dict[str, float] = {}
"""The weights that the test found without a profiler."""
