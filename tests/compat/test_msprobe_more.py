"""What else msprobe's class does: level debug, loaded inputs, single modules, a file that changes while the run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from compat import small
from trueup_compat import msprobe
from trueup_compat.msprobe.seeding import restore_dropout


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    msprobe.PrecisionDebugger.end()
    restore_dropout()


def debugger(**told: Any) -> Any:
    msprobe.PrecisionDebugger.end()
    Path("config.json").write_text(json.dumps({"dump_path": "out", **told}))
    return msprobe.PrecisionDebugger("config.json")


def read(folder: Path, file: str = "dump.json") -> dict[str, Any]:
    return dict(json.loads((folder / file).read_text())["data"])


# ---------------------------------------------------------------- level debug
def test_variables_and_their_gradients_are_saved() -> None:
    probe = debugger(task="tensor", level="debug")
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    for step in range(2):
        x.grad = None
        hidden = x * 3
        probe.save(hidden, "hidden")
        probe.save({"mask": torch.tensor([True]), "scale": [0.5, x.detach().half()]}, "more", False)
        probe.save(hidden * 2, "hidden")
        hidden.sum().backward()
        probe.step()
        folder = Path(f"out/step{step}/proc{os.getpid()}")
        found = read(folder, "debug.json")
        assert list(found) == ["hidden.0.debug", "hidden_grad.0.debug", "more.0.debug", "hidden.1.debug", "hidden_grad.1.debug"]
        described = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": 6.0, "Min": 3.0, "Mean": 4.5}
        kept = {"Norm": pytest.approx(45**0.5), "requires_grad": True, "data_name": "hidden.0.debug.pt"}
        assert found["hidden.0.debug"] == described | kept
        assert found["hidden_grad.0.debug"]["Max"] == 1.0
        assert found["hidden_grad.1.debug"] is None  # no gradient came
        assert found["more.0.debug"]["scale"][0] == {"type": "float", "value": 0.5}
        assert found["more.0.debug"]["scale"][1]["data_name"] == "more.0.debug.scale.1.pt"
        assert (found["more.0.debug"]["mask"]["Max"], found["more.0.debug"]["mask"]["dtype"]) == (None, "torch.bool")
        assert torch.load(folder / "dump_tensor_data/hidden_grad.0.debug.pt").tolist() == [1.0, 1.0]
        assert x.grad is not None
        assert x.grad.tolist() == [3.0, 3.0]


def test_what_cannot_be_saved_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    probe = debugger(level="debug", step=[1])
    probe.save(torch.ones(1), "too_early")
    probe.step()
    for variable, name in ((object(), "x"), (torch.ones(1), "../x"), (torch.ones(1), 3)):
        probe.save(variable, name)
    probe.save(1.5, "kept")
    msprobe.PrecisionDebugger.end()
    assert capsys.readouterr().err.count("is left out: expected tensors, numbers or text") == 3
    (folder,) = Path("out").glob("*/*")
    assert folder.parent.name == "step1"
    assert list(read(folder, "debug.json")) == ["kept.0.debug", "kept_grad.0.debug"]
    assert debugger(level="L1").save(1, "x") is None  # at other levels it does nothing, as in the tool


# ---------------------------------------------------------------- load
def modules_dumped(scale: float, path: str, **told: Any) -> tuple[torch.Tensor, dict[str, Any], Path]:
    net = small.model()
    probe = debugger(task="tensor", level="L0", dump_path=path, **told)
    probe.start(net)
    small.step(net, scale=scale)
    probe.stop()
    (folder,) = Path(path).glob("step0/*")
    return net.first.weight.grad, read(folder), folder


def test_a_module_gets_the_inputs_of_an_earlier_dump(capsys: pytest.CaptureFixture[str]) -> None:
    _, base, _ = modules_dumped(1.0, "base")
    entry = "Module.second.Linear.forward.0"
    load = {"path": "base", "modules": [entry, "Module.gone.Linear.forward.0"], "dump_after_load": True}
    gradient, found, _ = modules_dumped(3.0, "loaded", load=load)
    for slot in ("input_args", "output"):
        assert {k: v for k, v in found[entry][slot][0].items() if k != "data_name"} == {
            k: v for k, v in base[entry][slot][0].items() if k != "data_name"
        }  # fmt: skip
    norm = "Module.norm.LayerNorm.forward.0"
    assert found[norm]["input_args"][0]["Norm"] != base[norm]["input_args"][0]["Norm"]
    assert gradient is not None  # the module stays where it was in the graph
    assert gradient.abs().sum() > 0
    said = capsys.readouterr().err
    assert "load: no call Module.gone.Linear.forward.0 in this step, so nothing was loaded for it; the model has e.g. " in said


def test_what_cannot_be_loaded_is_said_and_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, folder = modules_dumped(1.0, "base")
    entry = "Module.second.Linear.forward.0"
    file = folder / "dump_tensor_data" / f"{entry}.input.0.pt"
    contents = (b"no tensor", None)
    told = {"load": {"path": "base", "modules": [entry]}, "level": "L1"}
    net = small.model()
    plain = small.step(net, scale=3.0)
    for content, message in zip(contents, ("cannot be read (", "there is no "), strict=True):
        file.unlink()
        _ = content is None or file.write_bytes(content)
        probe = debugger(**told)
        probe.start(net)
        assert torch.equal(small.step(net, scale=3.0), plain)
        probe.stop()
        assert f"{entry} keeps its own input 0" in (said := capsys.readouterr().err)
        assert message in said
        file.touch()
    torch.save(torch.ones(2), file)
    probe = debugger(**told)
    probe.start(net)
    small.step(net)
    probe.step()
    assert "holds torch.float32 [2], expected torch.float32 [5, 8]" in capsys.readouterr().err
    probe.start(net)
    assert "base/step1 has no folder of this process: nothing is loaded in this step" in capsys.readouterr().err
    assert not Path("out").exists()  # nothing is dumped without dump_after_load


# ---------------------------------------------------------------- the rest
def test_tensors_of_some_calls_among_statistics(capsys: pytest.CaptureFixture[str]) -> None:
    net = small.model()
    probe = debugger(statistics={"tensor_list": ["softmax", "Functional.linear.1.forward"]})
    assert "tensor_list: the files hold the tensors of these calls" in capsys.readouterr().err
    probe.start(rank_id=3)
    small.step(net)
    probe.stop()
    folder = Path("out/step0/rank3")
    kept = {path.name.rsplit(".", 3)[0] for path in (folder / "dump_tensor_data").iterdir()}
    assert kept == {"Functional.linear.1.forward", "Functional.softmax.0.forward", "Functional.softmax.0.backward"}
    assert "Functional.relu.0.forward" in read(folder)


def test_one_module_and_no_function_meanwhile(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(msprobe.ConfigError, match="make one first"):
        msprobe.module_dump_end()
    net = small.model()
    probe = debugger(task="tensor")
    probe.start()
    msprobe.module_dump(net.second, "head")
    small.step(net)
    msprobe.module_dump_end()
    torch.tanh(torch.zeros(1))
    probe.stop()
    (folder,) = Path("out/step0").iterdir()
    assert list(read(folder)) == [
        "Module.head.Linear.forward.0", "Module.head.Linear.backward.0", "Torch.zeros.0.forward", "Torch.tanh.0.forward"
    ]  # fmt: skip
    with pytest.raises(msprobe.ConfigError, match=r"expected a torch\.nn\.Module and a name, got int and 'x'"):
        msprobe.module_dump(3, "x")
    debugger(level="L0")
    msprobe.module_dump(net.second, "head")
    assert "module_dump has no effect: level L0 dumps each module" in capsys.readouterr().err


def test_dump_enable_is_followed_while_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    probe, net = debugger(dump_enable=False), small.model()
    for step in range(4):
        probe.start()
        small.step(net)
        probe.stop()
        if step in (0, 2):
            Path("config.json").write_text(json.dumps({"dump_path": "elsewhere", "dump_enable": step == 0, "x": "y" * (step + 1)}))
        probe.step()
    assert sorted(path.name for path in Path("out").glob("step*")) == ["step1", "step2"]
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" says ")[2].partition(";")[0] for line in said] == ["dump_enable true now", "dump_enable false now"]


def test_dropout_goes_where_it_is_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(1000)
    msprobe.seed_all(7)
    assert (torch.nn.Dropout(0.5)(x) == 0).any()
    msprobe.seed_all(7, rm_dropout=True)
    assert torch.equal(torch.nn.Dropout(0.5)(x), x)
    assert torch.equal(F.dropout(x, p=0.9), x)
    with pytest.raises(ValueError, match="between 0 and 1, but got 2"):
        F.dropout(x, 2.0)
    assert "dropout keeps every element from now on" in capsys.readouterr().out


def test_a_debugger_without_a_file_and_names_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert msprobe.PrecisionDebugger().config.path == Path("dump_path")
    assert debugger(task="structure").config.level == "mix"
    assert "level L1 is taken as mix" in capsys.readouterr().err
    with pytest.raises(msprobe.ConfigError, match="has no TrainerMon: trueup watch -- COMMAND"):
        from trueup_compat.msprobe import TrainerMon  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from trueup_compat.msprobe import nothing  # noqa: F401
    msprobe.PrecisionDebugger.register_custom_api(F, "relu")
    assert "relu needs no registration" in capsys.readouterr().err
    with pytest.raises(msprobe.ConfigError, match="has no nothing"):
        msprobe.PrecisionDebugger.register_custom_api(F, "nothing")
