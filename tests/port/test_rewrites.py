"""Every row of the catalogue: executed, found in a script that has its form, and not found in what only looks like it."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import torch

import trueup
from trueup.doors.cli import main
from trueup.migration.rewrites import Rewrite, catalogue, find, patch
from trueup.simdev.equivalence import judged

ROWS = {row.id: row for row in catalogue()}
CAPITALS = re.compile(r"\b[A-Z]\b")


def script(line: str, *, head: str = "import torch\nimport apex\nimport math\nimport numpy\n") -> str:
    return f"{head}def f(x, y, z, b, g, c, h, w, e, l, a, p, q, index, i):\n    {line}\n    return y\n"


def held(row: Rewrite) -> str:
    """Return a line of a script that has the form of a row."""
    values = {"V": "1.5", "M": "x > y", "S": "16", "N": "x.device"}
    before = row.before.replace("**K", "dtype=torch.long").replace("*S", "3, 4")
    line = CAPITALS.sub(lambda found: values.get(found.group(), found.group().lower()), before)
    return line if "] = " in row.before else f"y = {line}"


def names(text: str, ran: range = range(1, 99)) -> list[str]:
    return [one.row.id for one in find(Path("train.py"), text, ran)]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_means_the_same(name: str) -> None:
    import msgspec

    proof = judged(msgspec.to_builtins(ROWS[name]))
    assert proof["differs"] is None
    assert proof["gain"] > 0
    assert proof["bitwise"] == proof["cases"] or not ROWS[name].exact


def test_a_row_that_means_something_else_is_caught() -> None:
    row = {"before": "X.sum(1)", "after": "X.sum(1) * 1.001", "inputs": [{"X": [3, 4]}], "exact": False, "reference": None}
    assert "float32" in judged(row)["differs"]
    detached = {**row, "after": "X.sum(1) + (X - X.detach()).sum(1)"}
    assert judged(detached)["differs"] is not None, "the gradient is another"


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_found_where_it_is(name: str) -> None:
    text = script(held(ROWS[name]))
    found = find(Path("train.py"), text, range(1, 99))
    assert [one.row.id for one in found] == [name]
    made = patch(found, {"train.py": text})
    assert len(re.findall(r"^\+[^+]", made, re.MULTILINE)) == len(re.findall("^-[^-]", made, re.MULTILINE)) == 1
    assert not re.search(CAPITALS, found[0].after.replace("X.", ""))


@pytest.mark.parametrize(("name", "line"), [(row.id, line) for row in catalogue() for line in row.unlike])
def test_a_row_is_not_found_in_what_looks_like_it(name: str, line: str) -> None:
    ast.parse(line)
    assert name not in names(script(line))


@pytest.mark.parametrize("swap", ["transpose(2, 1)", "swapaxes(1, 2)", "permute(0, 2, 1, 3, 4)", "transpose(1, 2).contiguous()"])
def test_a_shuffle_is_found_however_it_swaps(swap: str) -> None:
    assert names(script(f"y = x.view(b, g, c // g, h, w).{swap}.reshape(b, c, h, w)")) == ["channel-shuffle"]


def test_a_chain_of_assignments_is_one_expression() -> None:
    steps = ["x = x.view(b, g, c, h, w)", "# a remark", "x = torch.transpose(x, 1, 2).contiguous()", "y = x.reshape(b, -1, h, w)"]
    chain = "\n    ".join(steps)
    found = find(Path("train.py"), script(chain).replace("return y", "return y, 1"), range(1, 99))
    assert [(one.row.id, one.first, one.last) for one in found] == [("channel-shuffle", 6, 9)]
    read_between = script(chain.replace("# a remark", "print(x)"))
    assert names(read_between) == []
    renamed = script(chain.replace("x = x.view", "v = x.view").replace("transpose(x,", "transpose(v,"))
    assert names(renamed) == ["channel-shuffle"]
    assert names(renamed.replace("return y", "return v")) == []


F = "import math\nimport torch\nimport torch.nn.functional as F\n"


@pytest.mark.parametrize(
    ("name", "line", "after"),
    [
        ("silu", "y = x.mul(x.sigmoid())", "y = torch.nn.functional.silu(x)"),
        ("silu", "y = b + F.sigmoid(x) * x / 3", "y = b + torch.nn.functional.silu(x) / 3"),
        ("mish", "y = x * F.softplus(x).tanh()", "y = torch.nn.functional.mish(x)"),
        ("gelu", "y = x * 0.5 * (1.0 + torch.erf(x / 1.4142135623730951))", "y = torch.nn.functional.gelu(x)"),
        (
            "gelu-tanh", "y = 0.5 * x * (torch.tanh((x + 0.044715 * x ** 3) * math.sqrt(2 / math.pi)) + 1)",
            "y = torch.nn.functional.gelu(x, approximate='tanh')",
        ),
        (
            "attention-by-hand",
            "z = torch.matmul(q, p.transpose(-2, -1)) / math.sqrt(h)\n    w = F.softmax(z, dim=-1)\n    y = w @ x",
            "y = torch.nn.functional.scaled_dot_product_attention(q, p, x, scale=1 / math.sqrt(h))",
        ),
        (
            "shuffle-and-halve", "y, z = x.view(b, g, c // g, h, w).transpose(1, 2).reshape(b, -1, h, w).chunk(2, dim=1)",
            "y, z = tuple(",
        ),
        (
            "made-on-the-host-arange", "y = F.one_hot(torch.arange(h).to(x.device), c)",
            "y = F.one_hot(torch.arange(h, device=x.device), c)",
        ),
        (
            "made-on-the-host-zeros", "y = torch.zeros(b, *h, dtype=x.dtype).to(e.device)",
            "y = torch.zeros(b, *h, dtype=x.dtype, device=e.device)",
        ),
    ],
)  # fmt: skip
def test_a_row_is_found_as_it_is_written(name: str, line: str, after: str) -> None:
    (found,) = find(Path("train.py"), script(line, head=F), range(1, 99))
    assert found.row.id == name
    assert found.after.strip().startswith(after)


@pytest.mark.parametrize(
    ("lines", "after"),
    [
        ("m = x > 0\nx[m] = 1.5", "x.masked_fill_(m, 1.5)"),
        ("m = ~torch.isnan(x) & (x < 0)\nx[m] = float('-inf')", "x.masked_fill_(m, float('-inf'))"),
        ("m = x > 0\nif y:\n    x += 1\n    x[m] = 0", "x.masked_fill_(m, 0)"),
        ("for i in y:\n    x = f(i)\n    m = x > 0\n    x[m] = 0", "x.masked_fill_(m, 0)"),
        ("m = x > 0\nx[m] = 0\nx = x.sum()", "x.masked_fill_(m, 0)"),
        ("z = torch.zeros_like(x)\nm = x > y\nz[m] = x[m]", "z.copy_(torch.where(m, x, z))"),
        ("m = x > 0\nz = x.clone()\nz[m] = 0", "z.masked_fill_(m, 0)"),
        ("m = x > 0\ny = x[m].sum()", "y = torch.where(m, x, 0).sum()"),
        ("m = y\nx[m] = 0", None),  # nobody knows what it is
        ("m = x[:, 0] > 0\nx[m] = 0", None),
        ("m = x > 0\nm = y\nx[m] = 0", None),
        ("if y:\n    m = x > 0\nx[m] = 0", None),
        ("x[m] = 0\nm = x > 0", None),
        ("m = x > 0\nx = x.repeat(2, 1)\nx[m] = 0", None),  # it has another shape
        ("m = x > 0\nx.unsqueeze_(-1)\nx[m] = 0", None),
        ("m = x > 0\nfor i in y:\n    x[m] = 0\n    x = f(x)", None),
        ("m = x > 0\nz = x.sum(0)\nz[m] = 0", None),
        ("m = x > 0\nm.t_()\nx[m] = 0", None),
        ("m = (x > 0).nonzero()\nx[m] = 0", None),
        ("z = torch.zeros_like(x)\nx = f(x)\nm = x > 0\nz[m] = 0", None),
    ],
)
def test_a_mask_in_a_variable(lines: str, after: str | None) -> None:
    found = find(Path("train.py"), script(lines.replace("\n", "\n    ")), range(1, 99))
    assert [one.after.strip() for one in found] == ([] if after is None else [after])


def test_lines_that_did_not_run_or_are_shared_are_left() -> None:
    line = held(ROWS["masked-write"])
    assert names(script(line), range(0)) == []
    assert names(script(f"y = 1; {line}")) == []
    assert names(script(line, head="import numpy\n")) == []
    assert names("def f(:\n") == []


def test_another_name_for_torch() -> None:
    text = script("x = th.transpose(x.view(b, g, c, h, w), 1, 2).contiguous().view(b, -1, h, w)", head="import torch as th\n")
    (found,) = find(Path("train.py"), text, range(1, 99))
    chosen = "index_select(1, th.arange(g * c, device=x.device).view(g, -1).t().flatten())"
    assert found.after.strip() == f"x = x.view(b, -1, h, w).{chosen}"


@pytest.mark.usefixtures("autoloaded", "warm")
def test_a_capture_is_assessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its operators are graded, with its lines; rewrites are of lines that ran, and not of a script that was edited since."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\n\n\ndef shuffle(x):\n    b, n, h, w = x.shape\n    x = x.view(b, 2, n // 2, h, w)\n"
        "    x = torch.transpose(x, 1, 2).contiguous()\n    return x.view(b, -1, h, w)\n\n\n"
        "def loss(x):\n    return torch.nn.functional.huber_loss(x, torch.zeros_like(x))\n"
    )
    scope: dict = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    with trueup.capture(tmp_path / "run", level="api"):
        scope["loss"](scope["shuffle"](torch.ones(1, 4, 2, 2, requires_grad=True))).backward()
    assert main(["assess", "--patch", "made.patch", "--json", "made.json", "run"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "on Ascend A2" in said
    assert "CPU fallback: aten::huber_loss where model.py:12, 1 call" in said
    assert "channel shuffle by index_select" in said
    rows = {one["name"]: one for one in json.loads((tmp_path / "made.json").read_text())["operators"]}
    assert rows["aten::huber_loss_backward"]["grade"] == "composite"
    assert "model.py:7" in rows["aten::clone"]["places"]
    assert "+    return x.view(b, -1, h, w).index_select(1," in (tmp_path / "made.patch").read_text()
    file.write_text(file.read_text().replace("x.view(b, 2,", "x.reshape(b, 2,"))
    assert main(["assess", "run"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "Changed since, and not read: model.py." in said
    assert "channel shuffle" not in said
    (tmp_path / "empty").mkdir()
    assert main(["assess", "empty"]) == 2
    assert "is not a capture" in capsys.readouterr().err
