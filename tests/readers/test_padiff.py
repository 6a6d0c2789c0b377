"""PaDiff's reports, written by the rules of its source."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import trueup
from readers import writers
from readers.captures import imported, tensor
from trueup import TrueupError


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_layers_gradients_and_parameters(tmp_path: Path, framework: str) -> None:
    result, rows, capture = imported(writers.padiff(tmp_path / "dump", framework), tmp_path)
    assert (result.tool, result.framework, result.lost, result.tensors) == ("PaDiff", framework, [], 8)
    linear, _, _, _, back = writers.run()
    assert [(r["phase"], r["scope"], r["op"], r["slot"]) for r in rows] == [
        ("forward", "", "Model", "output.0"), ("forward", "fc", "Linear", "output.0"), ("forward", "act", "ReLU", "output.0"),
        ("forward", "act", f"{framework}.nn.functional.relu", "output.0"),
        ("backward", "act", "ReLU", "grad_input.0"), ("backward", "fc", "Linear", "grad_input.0"),
        ("forward", "fc", "Linear.parameters", "param.weight"), ("backward", "fc", "Linear.parameters", "grad_param.weight"),
    ]  # fmt: skip
    assert np.array_equal(tensor(capture, rows[1]), linear.outputs[0])
    assert np.array_equal(tensor(capture, rows[5]), back.outputs[1])
    assert (rows[1]["parent"], rows[5]["forward_seq"], rows[1]["device"]) == (rows[0]["seq"], rows[1]["seq"], "cpu")
    assert (rows[3]["level"], rows[3]["parent"]) == ("api", rows[2]["seq"])
    assert capture.sites(0)[rows[1]["site"]] == (("/home/user/model.py:12 in forward",), "return self.fc(x)")


def test_a_fault_in_one_of_two_dumps_is_told(tmp_path: Path) -> None:
    for name, fault in (("base", 0.0), ("cand", 0.25)):
        imported(writers.padiff(tmp_path / name / "dump", fault=fault), tmp_path / name)
    result = trueup.compare(tmp_path / "base" / "capture", tmp_path / "cand" / "capture")
    assert result.verdict != "aligned"
    assert result.counts["equal"] == 5
    assert result.counts["compared"] == 8


def test_missing_files_are_lost(tmp_path: Path) -> None:
    root = writers.padiff(tmp_path / "dump")
    next(root.rglob("tensor_1.npy")).unlink()
    result, rows, _ = imported(root, tmp_path)
    assert result.lost == ["tensors could not be read: its file is missing: fc.grad_input.0"]
    assert (rows[5]["shape"], rows[5]["digest"]) == ([4, 3], None)


def test_a_cut_report_leaves_the_parameters(tmp_path: Path) -> None:
    root = writers.padiff(tmp_path / "dump")
    report = next(root.rglob("report.json"))
    report.write_text(report.read_text()[:-200])
    result, rows, _ = imported(root, tmp_path)
    assert {row["op"] for row in rows} == {"Linear.parameters"}
    assert result.lost[0].startswith("report.json cannot be read: JSONDecodeError: ")


def test_a_report_of_any_depth_ends(tmp_path: Path) -> None:
    root = writers.padiff(tmp_path / "dump")
    report = next(root.rglob("report.json"))
    report.write_text('{"model_name": "a", "framework": "torch", "tree": ' + '[{"children": ' * 60_000)
    result, _, _ = imported(root, tmp_path)
    assert "nested too deeply" in result.lost[0] or "JSONDecodeError" in result.lost[0]


def test_what_is_no_tree_is_told(tmp_path: Path) -> None:
    root = tmp_path / "dump"
    root.mkdir()
    (root / "report.json").write_text(json.dumps({"model_name": 1, "framework": "torch", "tree": {"a": [None]}}))
    with pytest.raises(TrueupError, match="holds nothing that can be read, though it is of PaDiff"):
        trueup.import_dump(root, tmp_path / "capture")
