"""The table of criteria: which row an operator finds, and what a bad file is told."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import ml_dtypes
import pytest

from trueup import comparison
from trueup.foundation.facts.criteria import CARRY, OWN, load
from trueup.foundation.facts.operators import has, named, table
from trueup.foundation.facts.slots import UNIT_ROUNDOFF
from trueup.foundation.model import TrueupError
from verdict.captures import CRITERION

ROWS = {
    "move": "aten::view aten::t aten::transpose aten::cat aten::copy_ aten::relu aten::relu_ aten::slice torch.Tensor.T "
    "torch.Tensor.__getitem__ torch.nn.functional.pad aten::max_pool2d_with_indices torch.Tensor.masked_fill",
    "cast": "aten::_to_copy torch.Tensor.to torch.Tensor.float torch.Tensor.npu",
    "gather": "aten::embedding torch.nn.functional.embedding aten::index aten::index_put_ aten::scatter_add_ "
    "aten::embedding_dense_backward",
    "compare": "aten::eq aten::argmax torch.topk aten::isnan aten::logical_and torch.Tensor.max aten::floor_divide",
    "random": "aten::native_dropout torch.nn.functional.dropout aten::bernoulli_ aten::normal_ aten::uniform_ torch.rand",
    "matmul": "aten::mm aten::addmm aten::bmm torch.nn.functional.linear torch.Tensor.__matmul__ aten::convolution "
    "aten::convolution_backward torch.conv2d torch.einsum torch.nn.functional.conv_transpose2d",
    "mean": "aten::mean aten::avg_pool2d aten::_adaptive_avg_pool2d aten::nll_loss_forward aten::nll_loss_backward "
    "torch.nn.functional.l1_loss",
    "cross-entropy": "torch.nn.functional.cross_entropy",
    "reduction": "aten::sum aten::cumsum aten::upsample_nearest2d torch.nn.functional.interpolate aten::linalg_vector_norm",
    "add": "aten::add_ aten::sub torch.Tensor.__add__ torch.Tensor.__rsub__ aten::_foreach_add_",
    "multiply-add": "aten::addcmul_ aten::lerp_ aten::_foreach_addcmul_",
    "update": "aten::addcdiv_ aten::_foreach_addcdiv_",
    "scale": "aten::mul torch.Tensor.__rmul__ aten::_foreach_mul_",
    "inverse": "aten::rsqrt torch.Tensor.reciprocal aten::_foreach_reciprocal_",
    "gate": "aten::glu torch.nn.functional.prelu",
    "quotient": "aten::div aten::sqrt aten::pow torch.Tensor.__truediv__ aten::log aten::_foreach_sqrt",
    "activation": "aten::gelu torch.nn.functional.gelu aten::silu aten::sigmoid aten::tanh",
    "softmax": "aten::_softmax aten::_log_softmax torch.nn.functional.softmax torch.Tensor.softmax aten::exp",
    "activation-backward": "aten::gelu_backward aten::tanh_backward aten::sigmoid_backward",
    "branch-backward": "aten::threshold_backward",
    "softmax-backward": "aten::_softmax_backward_data aten::_log_softmax_backward_data",
    "normalise": "aten::native_layer_norm torch.nn.functional.layer_norm aten::native_batch_norm "
    "torch.nn.functional.group_norm",
    "normalise-backward": "aten::native_layer_norm_backward aten::native_batch_norm_backward aten::native_group_norm_backward",
    "fused": "aten::_scaled_dot_product_flash_attention_for_cpu torch.nn.functional.scaled_dot_product_attention torch.lstm "
    "aten::_thnn_fused_lstm_cell aten::mkldnn_rnn_layer torch.gru aten::_scaled_dot_product_flash_attention_for_cpu_backward "
    "aten::_thnn_fused_lstm_cell_backward_impl",
    "optimizer": "aten::_fused_adamw_ torch._fused_sgd_",
    "anything": "aten::never_heard_of torch.special.entr",
}


@pytest.mark.parametrize(("name", "op"), [(name, op) for name, ops in ROWS.items() for op in ops.split()])
def test_operators_find_their_row(name: str, op: str) -> None:
    phase = "backward" if "backward" in op else "forward"
    assert CRITERION.row(op, "aten" if op.startswith("aten") else "api", phase).name == name


@pytest.mark.parametrize("op", [*named("view"), *named("cast")])
def test_what_is_a_view_or_a_cast_rounds_nothing(op: str) -> None:
    assert CRITERION.row(op, "api", "forward").own == "exact"


@pytest.mark.parametrize("op", [op.replace("*", "") for row in CRITERION.rows if row.random for op in row.ops])
def test_what_draws_may_draw(op: str) -> None:
    assert has(op, "may-draw")


@pytest.mark.parametrize("op", table()["tensorflow"])
def test_what_tensorflow_has_a_name_for_finds_a_row(op: str) -> None:
    phase = "optimizer" if op in ("sgd", "momentum", "adam", "rmsprop", "adagrad") else "forward"
    assert CRITERION.row(op, "api", phase).name != "anything"


@pytest.mark.parametrize("op", [op for ops in ROWS.values() for op in ops.split() if not op.startswith("aten")])
def test_the_backward_of_a_function_is_another_operator(op: str) -> None:
    forward = CRITERION.row(op, "api", "forward")
    assert CRITERION.row(op, "api", "backward") != forward or not forward.phases


def test_aten_operators_are_the_same_in_each_phase() -> None:
    for phase in ("forward", "recompute", "backward", "optimizer", "data"):
        assert CRITERION.row("aten::mm", "aten", phase).name == "matmul"
        assert CRITERION.row("aten::add", "aten", phase).name == "add"


@pytest.mark.parametrize(("level", "op"), [
    ("aten", "c10d::broadcast_"), ("aten", "c10d::gather_"), ("api", "torch.distributed.reduce"),
    ("module", "torch.distributed.scatter"),
])  # fmt: skip
def test_collectives_are_not_the_operators_of_their_name(level: str, op: str) -> None:
    assert CRITERION.row(op, level, "collective").name == "collective"


def test_modules_are_not_their_namesakes() -> None:
    assert CRITERION.row("Linear", "module", "forward").name == "layer of one product"
    assert CRITERION.row("linear", "module", "forward").name == "anything"
    assert CRITERION.row("relu", "module", "forward").name == "anything"
    assert CRITERION.row("relu", "api", "forward").name == "move"


def test_every_row_has_an_origin_and_finite_room() -> None:
    for row in CRITERION.rows:
        assert row.origin
        assert row.ulps > 0
        assert row.factor > 0
    assert CRITERION.suspect < CRITERION.certain


def test_every_row_of_this_table_exists() -> None:
    assert {row.name for row in CRITERION.rows} >= set(ROWS)


def test_unit_roundoffs() -> None:
    assert UNIT_ROUNDOFF["float32"] == 2.0**-24
    for name, unit in UNIT_ROUNDOFF.items():
        if not name.startswith("complex"):
            assert unit == float(ml_dtypes.finfo(name).eps) / 2
    assert UNIT_ROUNDOFF["float16"] == 2.0**-11
    assert "int64" not in UNIT_ROUNDOFF


GOOD = """
name = "mine"
suspect = 1
certain = 10
input_units = 16
loss = 0.05
[[row]]
name = "all"
ops = ["*"]
own = { kind = "composite", ulps = 512 }
carry = { kind = "branch", factor = 32 }
origin = "measured"
"""


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    criterion = load(path)
    assert (criterion.name, criterion.row("aten::mm", "aten", "forward").name) == ("mine", "all")


def test_the_file_in_the_documentation(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "criteria.md").read_text()
    path = tmp_path / "strict.toml"
    path.write_text(page.split("```toml\n")[1].split("```")[0])
    criterion = load(path)
    assert (criterion.name, criterion.row("aten::sum", "aten", "forward").name) == ("strict", "sums")
    documented = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")}
    assert {*OWN, *CARRY} <= documented


BAD = {
    "{path}: row 1: own.kind 'magic' is unknown: expected accumulate, additive, average, bilinear, "
    "composite, elementwise, exact, reduction; see docs/criteria.md": ("composite", "magic"),
    "{path}: row 1: carry.kind 'magic' is unknown: expected accumulate, attention, bilinear, branch, "
    "exponential, inverse, linear, pole, product, sign, smooth, sum; see docs/criteria.md": ("branch", "magic"),
    '{path}: the last row must match every call (ops = ["*"], no phases); see docs/criteria.md': ('["*"]', '["mm"]'),
    "{path}: loss is missing; see docs/criteria.md": ("loss = 0.05", ""),
    "{path}: row 1: origin is missing; see docs/criteria.md": ('origin = "measured"', ""),
    "{path}: row 1: own.ulps: expected a number, got a text; see docs/criteria.md": ("ulps = 512", "ulps = 'many'"),
    "{path}: row 1: carry.factor: expected a number > 0.0; see docs/criteria.md": ("factor = 32", "factor = -1"),
    "{path}: certain: expected a number > 0.0; see docs/criteria.md": ("certain = 10", "certain = nan"),
    "{path}: row 1: ops: expected a list, got a text; see docs/criteria.md": ('["*"]', '"*"'),
    "{path}: row 1: phases 1 'sideways' is unknown: expected aten-backward, backward, collective, "
    "data, forward, optimizer, recompute; see docs/criteria.md": ('ops = ["*"]', 'ops = ["*"]\nphases = ["sideways"]'),
    "{path}: row 1: own: 'ulp' is unknown: expected kind, ulps, products, roundings, stored_sums; see docs/criteria.md": (
        "ulps = 512", "ulps = 512, ulp = 1",
    ),
    "{path}: it holds no rows; see docs/criteria.md": (GOOD[GOOD.index("[[row]]") :], ""),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_a_bad_file_is_told_what_is_wrong(tmp_path: Path, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(*BAD[message]))
    with pytest.raises(TrueupError) as raised:
        load(path)
    assert str(raised.value) == "criterion file " + message.format(path=path)


def test_no_such_criterion(tmp_path: Path) -> None:
    with pytest.raises(TrueupError) as raised:
        load("strict")
    assert str(raised.value) == (
        "criterion 'strict' is unknown: expected default, bitwise, ptdbg, ptdbg-summary, precision-tool, paddle, msprobe, "
        "or the path of a criterion file"
    )
    path = tmp_path / "mine.toml"
    path.write_bytes(b"name = \xff")
    with pytest.raises(TrueupError, match=r"^criterion file .*mine.toml cannot be read: 'utf-8' codec"):
        load(path)
    path.write_text("name = ")
    with pytest.raises(TrueupError, match=r"^criterion file .*mine.toml cannot be read: Invalid value"):
        load(path)


def _is_number(value: ast.expr | None) -> bool:
    if isinstance(value, ast.BinOp):
        return _is_number(value.left) and (_is_number(value.right) or isinstance(value.right, ast.Name))
    if isinstance(value, ast.Tuple):
        return bool(value.elts) and all(map(_is_number, value.elts))
    if isinstance(value, ast.UnaryOp):
        return _is_number(value.operand)
    return isinstance(value, ast.Constant) and isinstance(value.value, int | float) and not isinstance(value.value, bool)


def _unexplained(body: list[ast.stmt]) -> list[str]:
    """Return the constants of a module that are numbers and that no docstring follows; those of one block share theirs."""
    found, block = [], []
    for statement in body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and _is_number(statement.value):
            block.append(ast.unparse(statement))
            continue
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            found += block
        block = []
    return found + block


@pytest.mark.parametrize("module", sorted(Path(comparison.__file__).parent.rglob("*.py")), ids=lambda path: path.stem)
def test_every_number_beside_the_table_says_where_it_comes_from(module: Path) -> None:
    assert _unexplained(ast.parse(module.read_text(encoding="utf-8")).body) == []


def test_a_number_without_a_word_is_found() -> None:
    code = 'A = 2.0\n"""Why."""\nB, C = 1, 2\nD = 4 * A\nE = "text"\n'
    assert _unexplained(ast.parse(code).body) == ["B, C = (1, 2)", "D = 4 * A"]


NUMBER = re.compile(r"^[A-Z_]+ = [-0-9.e]+$", re.MULTILINE)


def test_the_numbers_that_decide_stand_in_one_file() -> None:
    rooms, one = Path(comparison.__file__).parent, Path("measures/thresholds.py")
    files = [path for room in ("graph", "normalise", "measures", "verdict") for path in (rooms / room).rglob("*.py")]
    numbers = {path.relative_to(rooms): NUMBER.findall(path.read_text(encoding="utf-8")) for path in files}
    assert 0 < len(numbers.pop(one)) <= 20
    fractions = [line for lines in numbers.values() for line in lines if "." in line or "e-" in line]
    assert fractions == []
