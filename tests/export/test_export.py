"""`trueup export`: a model as ONNX, proved; a node that was exported wrong is found first; models of transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trueup.doors.cli import main
from trueup.foundation.model import TrueupError
from trueup.migration.export import export, exporting
from trueup.migration.export.exporting import _other_operators, error

onnx = pytest.importorskip("onnx")

PAGE = (Path(__file__).parents[2] / "docs/export.md").read_text("utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_s_example_and_a_node_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(BLOCKS[0][1], "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["export", "net.py:make", "-o", "net.onnx", "--json", "said.json"]) == 0
    out = capsys.readouterr().out
    expected = [re.sub(r"error [\d.e-]+", "error", line).rstrip() for line in BLOCKS[1][1].splitlines()[1:]]
    assert all(line in re.sub(r"error [\d.e-]+", "error", out) for line in expected)
    said = json.loads((tmp_path / "said.json").read_text("utf-8"))
    assert [run["batch"] for run in said["runs"]] == [2, 1, 3]
    assert said["dynamic"]

    from trueup.recording.adapters.torch.exporting import Model

    programs: dict[bool, object] = {}
    exported = Model._exported

    def once(self: Model, *, dynamic: bool) -> object:  # the net is the same each time
        return programs.get(dynamic) or programs.setdefault(dynamic, exported(self, dynamic=dynamic))

    monkeypatch.setattr(Model, "_exported", once)
    model = onnx.load("net.onnx")
    norm = next(node for node in model.graph.node if node.op_type == "LayerNormalization")
    next(one for one in norm.attribute if one.name == "epsilon").f = 0.5
    onnx.save(model, "bad.onnx")
    found = export("net.py:make", Path("bad.onnx"), check=True, capture=Path("nodes"))
    assert found.exit_code == 1
    assert found.first is not None
    assert (found.first.op, found.first.source.endswith("net.py:10")) == ("LayerNormalization", True)
    assert found.sentence.startswith(BLOCKS[2][1].partition(" (error")[0])
    assert "where epsilon is 0.5, a fresh export has 1e-05" in found.sentence
    capsys.readouterr()
    assert main(["compare", "nodes/framework", "nodes/onnxruntime"]) == 1
    assert BLOCKS[3][1].splitlines()[2] in capsys.readouterr().out
    assert main(["show", "nodes/onnxruntime", "--op", "onnx::LayerNormalization"]) == 0
    assert "node_layer_norm  onnx::LayerNormalization#0" in capsys.readouterr().out
    for epsilon, code, words in ((1.1e-5, 1, "differs is node_layer_norm"), (1e-5 * (1 + 2e-6), 2, "these inputs do not show it")):
        next(one for one in norm.attribute if one.name == "epsilon").f = epsilon  # outputs within 1e-5, and the same
        onnx.save(model, "near.onnx")
        found = export("net.py:make", Path("near.onnx"), check=True)
        assert (found.exit_code, words in found.sentence) == (code, True), found.sentence
    next(one for one in norm.attribute if one.name == "epsilon").f = 1e-5
    for node in model.graph.node:
        del node.metadata_props[:]
    onnx.save(model, "unnamed.onnx")
    assert "output by output" in export("net.py:make", Path("unnamed.onnx"), check=True).sentence
    with pytest.raises(TrueupError, match="A capture is there already"):
        export("net.py:make", Path("net.onnx"), check=True, capture=Path("nodes"))
    assert export("net.py:make", Path("net.onnx"), check=True, capture=Path("good")).exit_code == 0
    assert main(["compare", "good/framework", "good/onnxruntime"]) == 0
    with pytest.raises(TrueupError, match=r"expected: opset 11\n  got:      opset 20, from which"):
        export("net.py:make", Path("bad.onnx"), opset=11, check=True)
    (tmp_path / "none.onnx").write_bytes(b"no model")
    for words in (["net.py:make", "--check", "none.onnx"], ["net.py:none", "-o", "a.onnx"], ["gone.py:make", "-o", "a.onnx"]):
        assert main(["export", *words]) == 2
    assert capsys.readouterr().err.count("next:") == 3


def test_a_model_in_bfloat16_is_judged_as_it_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime has few kernels of it, and said so with exit code 2."""
    made = BLOCKS[0][1].replace("return Net(), (torch.randn(2, 8),)", "return Net().bfloat16(), (torch.randn(2, 8).bfloat16(),)")
    (tmp_path / "net.py").write_text(made, "utf-8")
    monkeypatch.chdir(tmp_path)
    found = export("net.py:make", Path("net.onnx"), capture=Path("nodes"))
    assert (found.exit_code, found.judged, len(found.runs)) == (0, 5, 3), found.sentence
    assert "computes each node in float32 and rounds what it makes" in found.chosen
    assert max(run.error for run in found.runs) < 1e-2
    assert main(["compare", "nodes/framework", "nodes/onnxruntime"]) == 0
    model = onnx.load("net.onnx")
    assert {one.data_type for one in model.graph.initializer} >= {onnx.TensorProto.BFLOAT16}  # the file stays what it is
    norm = next(node for node in model.graph.node if node.op_type == "LayerNormalization")
    next(one for one in norm.attribute if one.name == "epsilon").f = 0.5
    onnx.save(model, "bad.onnx")
    found = export("net.py:make", Path("bad.onnx"), check=True)
    assert (found.exit_code, found.first and found.first.op) == (1, "LayerNormalization")


def test_the_error_of_an_output() -> None:
    one = np.array([3.0, 4.0], np.float32)
    assert error(one, one) == 0
    assert error(one, one * np.float32(1.1)) == pytest.approx(0.1, rel=1e-5)
    assert error(one, one[:1]) == error(one, np.array([np.nan, 4.0])) == error(np.array([1, 2]), np.array([1, 3])) == np.inf
    assert error(np.array([np.inf, 1.0]), np.array([np.inf, 1.0])) == 0


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(TrueupError, match=r"pip install 'trueup\[onnx\]'"):
        export("net.py:make", tmp_path / "a.onnx")


def test_a_graph_judges_what_another_made_of_its_values(tmp_path: Path) -> None:
    import torch

    from trueup.recording.adapters.torch.exporting import Graph

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = torch.nn.Conv1d(3, 8, 3), torch.nn.BatchNorm1d(8)
            self.lstm = torch.nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.norm(self.conv(x))
            top, at = self.lstm(y.transpose(1, 2))[0].topk(2, -1)
            return torch.nn.functional.scaled_dot_product_attention(top, top, top), at

    torch.manual_seed(0)
    inputs = (torch.randn(2, 3, 9),)
    exported = torch.export.export(Net().eval(), inputs)
    graph = Graph(type("Program", (), {"exported_program": exported}))
    names = graph.named({}, ["y", "at"])
    run = graph.run(inputs, names)
    for name, value in run.values.items():  # the whole network is one run of nodes
        found = run.judge(name, value)
        assert found is not None
        assert found.verdict == "accurate", found
    value = run.values["y"]
    assert run.judge("y", value[:1]) is None
    assert [run.judge("y", value * np.float32(1 + e)).verdict for e in (1e-7, 1e-3)] == ["accurate", "wrong"]  # type: ignore[union-attr]
    off = run.judge("y", value * np.float32(1.001))
    assert off is not None
    assert off.baseline < 1e-6, "attention without dropout draws nothing, so float64 has a truth for it"
    assert run.judge("at", 1 - run.values["at"]).verdict == "wrong"  # type: ignore[union-attr]
    assert "test_export.py" in run.line("y")


def test_a_node_within_a_wrong_value_that_is_another_operator_is_named() -> None:
    def model(inner: str) -> Any:
        nodes = [
            onnx.helper.make_node("Relu", ["x"], ["a"]), onnx.helper.make_node(inner, ["a", "x"], ["b"]),
            onnx.helper.make_node("Neg", ["b"], ["y"]),
        ]  # fmt: skip
        x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy")
        return onnx.helper.make_model(onnx.helper.make_graph(nodes, "net", [x], [y]))

    proto, fresh = model("Add"), model("Mul")
    makers = {name: node for node in proto.graph.node for name in node.output}
    told = "it is Add, a fresh export has Mul"
    assert _other_operators(fresh, makers, {"a", "y"}, {"y": None}) == {"b": ("y", told)}
    assert _other_operators(fresh, makers, {"a", "y"}, {"a": None}) == {}, "what changes no number is another form"
    assert _other_operators(proto, makers, {"a", "y"}, {"y": None}) == {}


def test_a_half_model_may_be_as_far_as_its_own_rounding() -> None:
    exact = np.linspace(1, 2, 64)
    here = exact * (1 + 4e-4)

    def in_float64(inputs: Any) -> list[Any]:
        if inputs[0].ndim == 1:
            raise TypeError("a dtype is written down")
        return [exact]

    model = SimpleNamespace(outputs=lambda inputs: [here], exact=in_float64, arrays=lambda inputs: [one.numpy() for one in inputs])
    session: Any = SimpleNamespace(run=lambda feeds: [exact * (1 - 4e-4)], inputs=["x"])
    run = exporting._compared(model, session, [torch.ones(2, 4)])
    assert exporting.OUTPUT < run.error < run.limit == pytest.approx(1.2e-3, rel=0.01)
    assert exporting._compared(model, session, [torch.ones(2)]).limit == exporting.OUTPUT
