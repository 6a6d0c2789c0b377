"""Files of tfdbg_ascend, precision_tool and msaccucmp."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import trueup
from readers import writers
from readers.captures import find, imported
from trueup.exchange.readers.array_folder import _parse


@pytest.mark.parametrize("kernels", [False, True])
def test_nodes_and_hashed_names(tmp_path: Path, kernels: bool) -> None:
    result, rows, _ = imported(writers.tensorflow(tmp_path / "dump", kernels), tmp_path)
    assert (result.framework, result.lost, result.tensors) == ("tensorflow", [], 4)
    assert [(r["phase"], r["scope"], r["op"], r["slot"]) for r in rows] == [
        ("forward", "fc_MatMul", "MatMul", "output.0"), ("forward", "act_Relu", "Relu", "output.0"),
        ("backward", "gradients_act_Relu_grad_ReluGrad", "ReluGrad", "output.0"),
        ("forward", "a_very_long_name_BiasAdd", "BiasAdd", "output.0"),
    ]  # fmt: skip


def test_graph_nodes_and_kernels_of_the_same_run_compare(tmp_path: Path) -> None:
    imported(writers.tensorflow(tmp_path / "cpu"), tmp_path / "a")
    imported(writers.tensorflow(tmp_path / "npu", kernels=True), tmp_path / "b")
    result = trueup.compare(tmp_path / "a" / "capture", tmp_path / "b" / "capture")
    assert (result.counts["compared"], result.counts["equal"], result.counts["unmatched"]) == (4, 4, 0)


def test_the_same_node_twice_has_ordinals_by_time(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    for k in (2, 0, 1):
        np.save(folder / f"while_Add.0.158919508158801{k}.npy", np.full(2, k, np.float32))
        np.save(folder / f"while_Add.1.158919508158801{k}.npy", np.full(2, k + 10, np.float32))
    _, rows, _ = imported(folder, tmp_path)
    assert [(r["ordinal"], r["slot"], r["max"]) for r in rows] == [
        (k, f"output.{slot}", k + 10.0 * slot) for k in range(3) for slot in range(2)
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Pooling.pool1.1147.1589195081588018.output.0", ("pool1", "output", 0)),
        ("Conv2D.a.b_Conv2D.12.3.1589195081588018.input.11", ("a.b_Conv2D", "input", 11)),
        ("resnet_bn_FusedBatchNormV3.2.1589195081588018", ("resnet_bn_FusedBatchNormV3", "output", 2)),
        ("weights", None),
        ("a.0.17", None),
    ],
)
def test_names_are_taken_apart(name: str, expected: tuple[str, str, int] | None) -> None:
    parsed = _parse(f"dump/{name}.npy", {})
    assert (None if parsed is None else (parsed.node, parsed.side, parsed.slot)) == expected


def test_other_files_are_named(tmp_path: Path) -> None:
    folder = writers.tensorflow(tmp_path / "dump")
    np.save(folder / "weights.npy", np.ones(2))
    result, rows, _ = imported(folder, tmp_path)
    assert len(rows) == 4
    assert result.notes == ["files were left out, for they are no part of such a dump or no call names them: weights.npy"]
    assert find(rows, scope="fc_MatMul")["foreign_name"] == "fc_MatMul.0.1589195081588018"
