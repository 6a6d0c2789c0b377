"""The table of operator facts: what it holds, how an operator is found in it, and that each fact is asked for."""

from __future__ import annotations

import ast
import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trueup
from trueup.foundation.facts import operators
from trueup.foundation.facts.operators import has, named, normalised, says, table

SOURCE = Path(trueup.__file__).parent

NORMALISED = {
    "aten::add": "add",
    "aten::add_": "add",
    "torch.Tensor.__iadd__": "add",
    "torch.Tensor.__isub__": "sub",
    "torch.Tensor.__imul__": "mul",
    "torch.Tensor.__radd__": "radd",
    "torch.Tensor.__getitem__": "getitem",
    "torch.nn.functional.layer_norm": "layer_norm",
    "aten::_softmax": "_softmax",
    "torch._foreach_add_": "_foreach_add",
    "aten::native_layer_norm_backward": "native_layer_norm_backward",
    "_": "_",
    "tf.raw_ops.AddV2": "add",
    "tf.raw_ops.LogSoftmax": "log_softmax",
    "tf.raw_ops.Conv2DBackpropFilter": "conv2d",
}

KNOWN = {
    "attention": "aten::_scaled_dot_product_flash_attention_for_cpu torch.nn.functional.multi_head_attention_forward",
    "backward": "aten::threshold_backward aten::_log_softmax_backward_data aten::_thnn_fused_lstm_cell_backward_impl",
    "convolution": "aten::convolution torch.conv2d torch.nn.functional.conv_transpose2d aten::convolution_backward "
    "paddle._C_ops.conv2d tf.raw_ops.Conv2D Conv2d Conv2D",
    "in-place": "aten::add_ torch.Tensor.__iadd__ aten::_foreach_add_ paddle._C_ops.relu_ torch.Tensor.__setitem__",
    "listed": "aten::_foreach_add_ torch._foreach_add_ torch._fused_adamw_",
    "loss": "torch.Tensor.backward tf.Session.run",
    "overwrites": "aten::copy_ torch.Tensor.zero_ torch.nn.init.kaiming_uniform_ aten::_foreach_zero_",
    "read-out": "torch.Tensor.item aten::_local_scalar_dense torch.Tensor.__float__ torch.Tensor.__bool__",
    "sized": "aten::index torch.nonzero",
    "root": "aten::rsqrt aten::_foreach_sqrt_ tf.raw_ops.Rsqrt",
    "shape": "aten::zeros_like tf.raw_ops.OnesLike torch.Tensor.new_zeros",
    "view": "aten::_unsafe_view torch.Tensor.view torch.Tensor.T",
}
UNKNOWN = {
    "backward": "aten::mm torch.Tensor.backward",
    "convolution": "aten::mm Linear",
    "in-place": "aten::add torch.Tensor.__add__ torch.Tensor.__index__ torch.Tensor.__int__",
    "loss": "aten::mm torch.Tensor.detach",
    "overwrites": "aten::copy torch.Tensor.add_ aten::zeros torch.nn.init.calculate_gain",
    "read-out": "torch.Tensor.float torch.Tensor.bool torch.Tensor.int",
    "root": "aten::reciprocal",
    "view": "aten::add torch.Tensor.clone",
}


@pytest.mark.parametrize(("op", "name"), NORMALISED.items())
def test_normalised(op: str, name: str) -> None:
    assert normalised(op) == name


@pytest.mark.parametrize(("fact", "op"), [(fact, op) for fact, ops in KNOWN.items() for op in ops.split()])
def test_a_fact_is_known(fact: str, op: str) -> None:
    assert has(op, fact)


@pytest.mark.parametrize(("fact", "op"), [(fact, op) for fact, ops in UNKNOWN.items() for op in ops.split()])
def test_a_fact_is_not_known(fact: str, op: str) -> None:
    assert not has(op, fact)


def test_what_a_fact_says() -> None:
    assert says("aten::addmm", "factors") == {"output.0": ["input.1", "input.2"]}
    assert says("aten::mm", "factors") is None
    assert [says(op, "adds") for op in ("aten::add_", "torch.Tensor.__rsub__")] == [[1.0, 1.0], [-1.0, 1.0]]
    assert [says(op, "convolution")["filters"] for op in ("torch.conv2d", "tf.raw_ops.Conv2D")] == [0, -1]


def test_the_examples_of_the_module() -> None:
    found = doctest.testmod(operators)
    assert (found.attempted, found.failed) == (3, 0)


def test_the_rows_of_a_fact_are_those_of_the_whole_table() -> None:
    for fact in {row["name"] for row in table()["fact"]}:
        assert operators._facts(fact) == [row for row in table()["fact"] if row["name"] == fact]


def test_an_unknown_fact_is_refused() -> None:
    with pytest.raises(KeyError, match=r"operators\.toml has no fact 'magic'"):
        has("aten::add", "magic")


@pytest.mark.parametrize("row", table()["fact"], ids=lambda row: f"{row['name']}-{row['ops'][0]}")
def test_each_row_says_what_it_knows_and_why(row: dict[str, object]) -> None:
    assert {"name", "ops", "origin"} <= row.keys() <= {"name", "ops", "is", "origin"}
    assert all(isinstance(op, str) for op in row["ops"])
    assert row["origin"]


ASKING = {"has", "says", "having", "named", "_is_known", "_said"}


def facts_asked(path: Path) -> set[str]:
    calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call) and node.args]
    named = [call for call in calls if getattr(call.func, "attr", getattr(call.func, "id", "")) in ASKING]
    return {call.args[-1].value for call in named if isinstance(call.args[-1], ast.Constant)}


def test_each_fact_is_asked_for_by_somebody() -> None:
    asked = set().union(*map(facts_asked, SOURCE.rglob("*.py")))
    assert {row["name"] for row in table()["fact"]} <= asked


OPERATOR = re.compile(r"(?:aten|c10d)::\w+|(?:torch|paddle)(?:\.\w+){2,}|tf\.raw_ops\.\w+")
ROOMS = "comparison recording/recorder recording/engine recording/execution analysis doors foundation/words".split()


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_but_the_adapters_names_an_operator(room: str) -> None:
    found, source = [], sorted((SOURCE / room).rglob("*.py"))
    assert source
    for path in source:
        constants = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Constant)]
        found += [f"{path.name}:{one.lineno}: {one.value}" for one in constants if OPERATOR.fullmatch(str(one.value))]
    assert found == []


def test_an_operation_of_tensorflow_has_one_name() -> None:
    listed = [own for names in table()["tensorflow"].values() for own in names.split()]
    assert len(listed) == len(set(listed))


def test_the_room_imports_no_other_and_is_read_when_first_asked() -> None:
    for path in (SOURCE / "foundation/facts").glob("*.py"):
        imports = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom | ast.Import)]
        ours = [text for text in map(ast.unparse, imports) if "trueup" in text]
        below = ("from trueup.foundation import toml", "from trueup.foundation.model import", "from trueup.foundation.facts")
        assert all(text.startswith(below) for text in ours)
    code = "import sys, trueup; from trueup.foundation.facts import operators; print(operators.table.cache_info().misses)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "0\n"


def test_names_of_a_fact_are_those_of_the_table() -> None:
    assert named("loss")[0] == "torch.Tensor.backward"
