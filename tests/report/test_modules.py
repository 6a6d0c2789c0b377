from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest

from trueup.doors.report import html
from trueup.doors.report.html import Module, module_tree

from .results import calls


def table(*rows: tuple[str, str, str, str, float]) -> pa.Table:
    names = ("scope", "phase", "state", "role", "error_out")
    return pa.table(dict(zip(names, zip(*rows, strict=True), strict=True)))


def find(root: Module, path: str) -> Module:
    node = root
    for part in path.split("."):
        node = node.children[part]
    return node


def test_calls_add_up_from_the_leaves() -> None:
    tree = module_tree(
        table(
            ("a.b", "forward", "equal", "", 0.0),
            ("a.b", "forward", "agrees", "", 1e-7),
            ("a.c", "backward", "deviates", "culprit", 0.3),
            ("a.c", "backward", "agrees", "", 5.0),
            ("a", "backward", "deviates", "victim", 1e-5),
            ("", "optimizer", "incomparable", "", math.nan),
        )
    )
    assert tree.phases == ("forward", "backward", "optimizer")
    a, b, c = (find(tree.root, path) for path in ("a", "a.b", "a.c"))
    assert (tree.root.calls, a.calls, b.calls, c.calls) == (6, 5, 2, 2)
    assert (tree.root.deviates, a.deviates, b.deviates, c.deviates) == (2, 2, 0, 1)
    assert (b.cells["forward"].text, b.cells["forward"].tone) == ("1e-7", "calm")
    assert (c.cells["backward"].text, c.cells["backward"].tone) == ("3e-1", "bad-3")  # of what deviates, not 5
    assert a.cells["backward"].text == "3e-1"
    outside = tree.root.children[""]
    assert outside.name == "outside any module"
    assert (outside.cells["optimizer"].text, outside.cells["optimizer"].tone) == ("not comparable", "unsure")
    assert (a.is_open, c.is_open, b.is_open, a.culprits, b.culprits) == (True, True, False, 1, 0)


@pytest.mark.parametrize(("error", "tone"), [(1e-6, "bad-1"), (1e-3, "bad-2"), (0.5, "bad-3"), (math.inf, "bad-3")])
def test_tones(error: float, tone: str) -> None:
    tree = module_tree(table(("a", "forward", "deviates", "", error)))
    assert tree.root.cells["forward"].tone == tone


def test_totals_are_those_of_the_table() -> None:
    rows = calls(5000, 300)
    tree = module_tree(rows)
    assert tree.root.calls == 5000
    assert tree.root.deviates == 300

    def walk(node: Module) -> None:
        if node.children:
            own = node.calls - sum(child.calls for child in node.children.values())
            assert own >= 0
        for child in node.children.values():
            walk(child)

    walk(tree.root)
    assert module_tree(rows.slice(0, 0)).root.calls == 0


def test_of_a_large_tree_the_upper_levels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "NODES", 30)
    rows: list[Any] = [(f"m.{i}.{j}", "forward", "equal", "", 0.0) for i in range(20) for j in range(9)]
    tree = module_tree(table(*rows))
    assert tree.omitted == 180
    assert len(tree.root.children["m"].children) == 20
    assert not tree.root.children["m"].children["0"].children
    assert tree.root.calls == 180
