"""msprobe's class over a capture: what config.json asks for, the files, and that readers and the real msprobe take them."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compat import small
from readers import record_msprobe
from readers.captures import imported
from trueup import TrueupError, compare, open_capture
from trueup_compat import msprobe
from trueup_compat.msprobe.config import read

REAL = Path(__file__).parents[2] / ".venv-msprobe" / "bin" / "python"
MAIN = "import sys; from msprobe.msprobe import main; sys.exit(main())"


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    msprobe.PrecisionDebugger.end()


def configured(**told: Any) -> Path:
    path = Path("config.json")
    path.write_text(json.dumps({"dump_path": "out", **told}))
    return path


def dump(steps: int = 1, scale: float = 1.0, **told: Any) -> Path:
    """Dump a training, as a script does; return the folder of step 0."""
    net = small.model()
    debugger = msprobe.PrecisionDebugger(config_path=str(configured(**told)))
    for _ in range(steps):
        debugger.start(net)
        small.step(net, scale=scale)
        debugger.stop()
        debugger.step()
    msprobe.PrecisionDebugger.end()
    (found,) = Path(told.get("dump_path", "out")).glob("step0/*")
    return found


def data(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "dump.json").read_text())["data"])


def test_statistics_of_level_l1() -> None:
    folder = dump(steps=2, task="statistics", level="L1")
    assert folder.name == f"proc{os.getpid()}"
    assert sorted(path.name for path in Path("out").iterdir()) == ["step0", "step1", "trueup"]
    found = data(folder)
    assert [name for name in found if "linear" in name] == [
        f"Functional.linear.{k}.{way}" for k, way in ((0, "forward"), (1, "forward"), (1, "backward"), (0, "backward"))
    ]
    assert data(Path("out/step1") / folder.name).keys() == found.keys()  # numbers begin anew
    entry = found["Functional.layer_norm.0.forward"]
    kinds = [one["type"] if isinstance(one, dict) else [inner["value"] for inner in one] for one in entry["input_args"]]
    assert kinds == ["torch.Tensor", [8], "torch.Tensor", "torch.Tensor", "float"]
    tensor = entry["output"][0]
    assert set(tensor) == {"type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad"}
    assert (tensor["dtype"], tensor["shape"]) == ("torch.float32", [5, 8])
    assert found["Functional.linear.1.backward"]["output"][1]["shape"] == [3, 8]  # the weight's, in the weight's place
    stacks = json.loads((folder / "stack.json").read_text())
    (frames,) = [lines for names, lines in stacks.values() if "Functional.softmax.0.forward" in names]
    assert re.match(r"File .*compat/small\.py, line \d+, in forward, \n return F\.softmax", frames[0])
    assert not (folder / "dump_tensor_data").exists() or not list((folder / "dump_tensor_data").iterdir())


def test_modules_and_tensors_of_level_mix(tmp_path: Path) -> None:
    folder = dump(task="tensor", level="mix")
    found = data(folder)
    module = found["Module.first.Linear.forward.0"]
    assert set(module["parameters"]) == {"weight", "bias"}
    assert not any(name.startswith("Module.Small") for name in found)  # the model itself has no entry
    parents = json.loads((folder / "construct.json").read_text())
    assert parents["Functional.linear.0.forward"] == "Module.first.Linear.forward.0"
    kept = torch.load(folder / "dump_tensor_data" / "Functional.linear.0.forward.input.1.pt")
    assert torch.equal(kept, small.model().first.weight)
    assert found["Functional.linear.0.forward"]["input_args"][1]["requires_grad"] is True
    assert found["Functional.linear.0.forward"]["input_args"][0]["requires_grad"] is False
    gradient, part = "Module.first.Linear.parameters_grad.0.weight.pt", "Functional.linear.0.backward.output.1.pt"
    assert torch.equal(*(torch.load(folder / "dump_tensor_data" / file) for file in (gradient, part)))
    assert found["Module.first.Linear.parameters_grad.0"]["weight"][0]["data_name"] == gradient
    result, rows, _ = imported(Path("out/step0"), tmp_path)
    assert result.lost == []
    assert not any("left out" in note for note in result.notes)
    native = open_capture("out/trueup").records().to_pylist()
    digests = {(r["level"], r["phase"], r["scope"], r["op"], r["slot"]): r["digest"] for r in native if r["dtype"]}
    compared = [row for row in rows if row["dtype"] and row["scope"] and row["level"] == "api"]
    assert {row["slot"] for row in compared} > {"grad_input.1", "grad_input.weight", "input.weight"}
    for row in compared:
        assert row["digest"] == digests[row["level"], row["phase"], row["scope"], row["op"], row["slot"]]


@pytest.mark.parametrize("level", ["mix", "L0", "L1"])
def test_what_requires_gradients_is_what_the_real_tool_says(level: str) -> None:
    with tarfile.open(Path(record_msprobe.__file__).with_name("dumps.tar.xz")) as archive:
        (place,) = [m for m in archive.getmembers() if re.match(rf"\./statistics-{level}/step0/\w+/dump.json", m.name)]
        file = archive.extractfile(place)
        assert file is not None
        theirs = json.load(file)["data"]
    torch.manual_seed(1234)
    model, ids = record_msprobe.build()
    debugger = msprobe.PrecisionDebugger(config_path=str(configured(level=level)))
    debugger.start(model)
    record_msprobe.loss_of(model, ids).backward()
    debugger.stop()
    debugger.step()
    (folder,) = Path("out/step0").iterdir()
    ours = data(folder)

    def required(entries: dict[str, Any], name: str) -> list[bool]:
        groups = [entries[name].get(group, {}) for group in ("input_args", "output", "parameters")]
        leaves = [leaf for group in groups for leaf in (group.values() if isinstance(group, dict) else group)]
        return [leaf["requires_grad"] for leaf in leaves if isinstance(leaf, dict) and "requires_grad" in leaf]

    shared = [name for name in theirs if name in ours and ".forward" in name]
    assert len(shared) >= 15
    assert {name: required(ours, name) for name in shared} == {name: required(theirs, name) for name in shared}
    gradients = {name: entry for name, entry in theirs.items() if ".parameters_grad." in name}
    assert {name for name in ours if ".parameters_grad." in name} == gradients.keys()
    for name, entry in gradients.items():
        assert ours[name].keys() == entry.keys()
        for (their_leaf,), (leaf,) in ((entry[parameter], ours[name][parameter]) for parameter in entry):
            numbers = {number: leaf.pop(number) for number in ("Max", "Min", "Mean", "Norm")}
            assert numbers == pytest.approx({number: their_leaf.pop(number) for number in numbers}, rel=1e-4, abs=1e-7)
            assert leaf == their_leaf


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"list": ["relu"]}, ["Functional.relu.0.forward", "Functional.relu.0.backward"]),
        ({"list": ["Functional.linear.1.forward"]}, ["Functional.linear.1.forward"]),
        ({"list": ["name-regex(softmax.*backward$)"]}, ["Functional.softmax.0.backward"]),
        ({"scope": ["Functional.relu.0.forward", "Tensor.add.0.forward"]},
         ["Functional.relu.0.forward", "Functional.layer_norm.0.forward", "Tensor.add.0.forward"]),
        ({"list": ["pow"], "data_mode": ["backward"]}, ["Tensor.pow.0.backward"]),
    ],
)  # fmt: skip
def test_lists_scopes_and_sides(section: dict[str, Any], expected: list[str]) -> None:
    assert list(data(dump(statistics=section))) == expected


def test_only_the_steps_that_are_wanted_and_no_more_files_than_asked_for() -> None:
    net = small.model()
    debugger = msprobe.PrecisionDebugger(configured(step=["1-2"], statistics={"summary_mode": "md5"}, extra_info=False))
    for _ in range(4):
        debugger.start()
        small.step(net)
        debugger.stop()
        debugger.step()
    assert sorted(path.name for path in Path("out").glob("step*")) == ["step1", "step2"]
    (folder,) = Path("out/step1").iterdir()
    assert {path.name for path in folder.iterdir()} == {"dump.json", "dump_tensor_data", "trueup.json", "trueup-names.jsonl"}
    assert re.fullmatch(r"[0-9a-f]{16}", data(folder)["Functional.relu.0.forward"]["output"][0]["md5"])


def test_structure_alone() -> None:
    folder = dump(task="structure", level="mix")
    assert data(folder) == {}
    assert "Module.second.Linear.forward.0" in json.loads((folder / "construct.json").read_text())


def test_training_is_bitwise_the_same() -> None:
    net = small.model()
    plain, grads = small.step(net), [p.grad.clone() for p in net.parameters()]
    state = torch.get_rng_state()
    net = small.model()
    debugger = msprobe.PrecisionDebugger(configured(task="tensor", level="mix"))
    debugger.start(net)
    dumped = small.step(net)
    debugger.stop()
    assert torch.equal(plain, dumped)
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, net.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


# ---------------------------------------------------------------- config.json
@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"tasks": "tensor"}, "unknown key 'tasks'\n  expected: task, dump_path, rank, step, level, extra_info"),
        ({"statistics": {"scopes": []}}, "statistics: unknown key 'scopes'\n  expected: scope, list, data_mode, summary_mode"),
        ({"level": "L2"}, "trueup capture --level aten --detail tensor records the operators"),
        ({"level": "L7"}, "level 'L7': expected L0, L1, mix, debug"),
        ({"task": "free_benchmark"}, "trueup capture --shadow cpu:float64"),
        ({"task": "overflow_check"}, "trueup watch -- COMMAND"),
        ({"load": {"path": ".", "modules": ["Module.x.Linear.backward.0"]}}, "load: modules: expected a list of names such as"),
        ({"load": {"path": "x", "modules": ["Module.x.Linear.forward.0"]}}, "load: path 'x': expected the folder of an earlier"),
        ({"load": {"path": ".", "module": []}}, "load: unknown keys module: expected path, modules, step, rank, dump_after_load"),
        ({"load": []}, "load is no object"),
        ({"dump_path": ""}, "has no dump_path"),
        ({"statistics": {"scope": ["a"]}}, "scope takes the first and the last name"),
        ({"statistics": {"list": "name-regex(()"}}, "is no regular expression"),
        ({"statistics": {"tensor_list": [3]}}, "tensor_list \\[3\\]: expected a list of names"),
        ({"dump_enable": "yes"}, "dump_enable 'yes': expected true or false"),
        ({"statistics": {"data_mode": ["up"]}}, "data_mode \\['up'\\]: expected of all, forward"),
        ({"statistics": {"summary_mode": "sha"}}, "summary_mode 'sha': expected statistics, md5, xor"),
        ({"statistics": []}, None),
        ({"statistics": "x"}, "statistics is no object"),
        ({"step": ["1-"]}, "step '1-': expected numbers from 0 on"),
        ({"rank": [True]}, "rank True: expected numbers"),
        ({"extra_info": 1}, "extra_info 1: expected true or false"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_said_with_what_there_is(told: dict[str, Any], message: str | None) -> None:
    path = configured(**told)
    if message is None:
        assert read(path, {}).names == ()
        return
    with pytest.raises(msprobe.ConfigError, match=message) as raised:
        msprobe.PrecisionDebugger(config_path=path)
    assert isinstance(raised.value, TrueupError)
    assert str(raised.value).startswith("config.json")


def test_the_tool_s_own_file_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    told = {
        "task": "statistics", "dump_path": "./dump_path", "rank": [], "step": [], "level": "L1",
        "extra_info": True, "async_dump": False,
        "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
        "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
        "acc_check": {"white_list": [], "black_list": [], "error_data_path": "./"},
    }  # fmt: skip
    Path("config.json").write_text(json.dumps(told))
    config = read("config.json", {})
    assert (config.task, config.level, config.sides, config.said) == ("statistics", "L1", ("all",), ())
    told |= {"async_dump": True, "risk_level": "CORE", "precision": "high", "dump_enable": False}
    Path("config.json").write_text(json.dumps(told))
    said = [one.partition(":")[0] for one in read("config.json", {}).said]
    assert said == ["async_dump", "precision", "risk_level"]


@pytest.mark.parametrize(("content", "message"), [(None, "cannot be read"), ("{", "is no JSON"), ("[]", "holds no object")])
def test_a_file_that_is_none(content: str | None, message: str) -> None:
    if content is not None:
        Path("config.json").write_text(content)
    with pytest.raises(msprobe.ConfigError, match=message):
        read("config.json", {})


def test_calls_out_of_order_are_refused() -> None:
    with pytest.raises(msprobe.ConfigError, match="make one first"):
        msprobe.PrecisionDebugger.start()
    debugger = msprobe.PrecisionDebugger(configured(level="L0"))
    with pytest.raises(msprobe.ConfigError, match=r"level L0 dumps modules: give start\(model\) the model"):
        debugger.start()
    with pytest.raises(msprobe.ConfigError, match="are for inference services"):
        debugger.start(token_range=[0, 1])
    debugger.set_init_step(7)
    debugger.start(small.model())
    with pytest.raises(msprobe.ConfigError, match="before the first start"):
        debugger.set_init_step(8)
    with pytest.raises(msprobe.ConfigError, match="rank_id -1: expected a number"):
        debugger.start(rank_id=-1)


# ---------------------------------------------------------------- the real one
real = pytest.mark.skipif(not REAL.exists(), reason="make .venv-msprobe/.tried installs the real msprobe, which is not there")


def compared_by_the_real_one(npu: Path, bench: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Return the rows of each table that it wrote: of one pair of dumps, or of each rank."""
    command = [str(REAL), "-c", MAIN, "compare", "-tp", str(npu), "-gp", str(bench), "-o", "result"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found = {}
    for path in Path("result").glob("compare_result*.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            found[path.name.split("_")[2]] = {row["NPU Name"]: row for row in csv.DictReader(file)}
    assert found, run.stdout + run.stderr
    return found


@real
def test_the_real_msprobe_compares_what_we_write() -> None:
    bench, npu = (dump(task="tensor", level="mix", dump_path=path, scale=scale) for path, scale in (("bench", 1.0), ("npu", 1.5)))
    (rows,) = compared_by_the_real_one(npu / "dump.json", bench / "dump.json").values()
    assert len(rows) > 40
    names = set(rows)
    assert {"Functional.linear.0.forward.input.0", "Module.first.Linear.forward.0.output.0"} <= names
    weight, given = (float(rows[f"Functional.linear.0.forward.input.{k}"]["MaxAbsErr"]) for k in (1, 0))
    torch.manual_seed(4)
    x = torch.randn(5, 6)
    assert weight == 0
    assert given == pytest.approx(float(x.abs().max()) / 2, rel=1e-5)
    assert compare("bench/trueup", "npu/trueup").verdict == "deviates"


@real
def test_the_real_msprobe_compares_ranks_by_statistics_and_by_checksums() -> None:
    for path, scale in (("bench", 1.0), ("npu", 1.5)):
        for rank, (level, mode) in enumerate((("mix", "statistics"), ("L1", "md5"))):
            told = {"level": level, "statistics": {"summary_mode": mode}, "dump_path": f"{path}-{rank}", "scale": scale}
            folder = dump(task="statistics", **told)
            Path(path, "step0").mkdir(parents=True, exist_ok=True)
            folder.rename(Path(path, "step0", f"rank{rank}"))
    found = compared_by_the_real_one(Path("npu/step0"), Path("bench/step0"))
    assert sorted(found) == ["rank0", "rank1"]
    statistics, checksums = found["rank0"], found["rank1"]
    given, weight = "Functional.linear.0.forward.input.0", "Functional.linear.0.forward.input.1"
    torch.manual_seed(4)
    x = torch.randn(5, 6)
    for name in (given, "Module.first.Linear.forward.0.input.0"):
        assert float(statistics[name]["L2norm diff"]) == pytest.approx(float(x.norm()) / 2, rel=1e-6)
        assert float(statistics[name]["NormRelativeErr"].rstrip("%")) == pytest.approx(50, rel=1e-5)
    assert (statistics[weight]["Max diff"], statistics["Module.first.Linear.forward.0.parameters.weight"]["Max diff"]) == ("0", "0")
    assert "in forward" in statistics["Module.first.Linear.forward.0.input.0"]["NPU_Stack_Info"]
    assert [checksums[name]["Result"] for name in (given, weight)] == ["error", "pass"]
    assert re.fullmatch("[0-9a-f]{16}", checksums[given]["NPU MD5"])
