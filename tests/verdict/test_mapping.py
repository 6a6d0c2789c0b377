"""What the user says about which call is which, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from trueup.comparison.graph.streams import WAYS
from trueup.comparison.verdict.align import align
from trueup.foundation.frameworks.mapping import load
from trueup.foundation.model import TrueupError
from verdict.captures import Recording, compared, normal


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "map.toml"
    file.write_text(text)
    return file


def run(scope: str, op: str, *, debris: bool = False, factor: float = 1.0) -> Recording:
    found = Recording()
    for layer in range(3):
        found.call(op, [], [normal(5, seed=layer) * factor], scope=f"{scope}.{layer}")
        if debris:
            found.call("aten::debug", [], [normal(2, seed=layer)], scope=f"{scope}.{layer}")
    return found


def test_scopes_and_operators_are_renamed(tmp_path: Path) -> None:
    file = written(tmp_path, """
        [[scope]]
        candidate = 'blocks\\.(\\d)'
        baseline = 'layers.\\1'
        [[op]]
        candidate = 'npu::fused_(.*)'
        baseline = 'aten::\\1'
    """)  # fmt: skip
    streams = run("layers", "aten::gelu").stream(), run("blocks", "npu::fused_gelu").stream()
    assert not len(align(*streams).baseline)
    found = align(*streams, load(file))
    assert found.baseline.tolist() == [0, 1, 2]
    assert {WAYS[way] for way in found.paired} == {"map"}


def test_a_scope_is_renamed_with_all_inside_it_and_not_what_only_begins_alike(tmp_path: Path) -> None:
    mapping = load(written(tmp_path, '[[scope]]\ncandidate = "model"\nbaseline = "net"'))
    names = {"model": "net", "model.fc": "net.fc", "models.fc": "models.fc", "a.model": "a.model"}
    assert {name: mapping.scope(name) for name in names} == names


def test_ignored_calls_are_not_compared_and_counted(tmp_path: Path) -> None:
    runs = run("layers", "aten::gelu"), run("layers", "aten::gelu", debris=True)
    assert "3 calls exist in only one run" in compared(tmp_path, *runs).sentence
    result = compared(tmp_path, *runs, mapping=written(tmp_path, '[[ignore]]\nop = "aten::debug"\nphase = "forward"'))
    assert (result.verdict, result.counts["compared"]) == ("aligned", 3)
    assert "3 calls were not compared, as the map file says" in result.sentence
    assert "exist in only one run" not in result.sentence


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[scope]]\ncandidate = 'a'", "scope 1: baseline is missing"),
        ("[[scope]]\ncandidate = '('\nbaseline = 'b'", "scope 1: candidate: '(' is no regular expression"),
        ("[[op]]\ncandidate = 'a'\nbaseline = '\\1'", "op 1: baseline '\\\\1' is no replacement for 'a'"),
        ("[[op]]\ncandidate = 1\nbaseline = 'b'", "op 1: candidate: 1 is no regular expression"),
        ("[[ignore]]", "ignore 1: it ignores every call"),
        ("[[ignore]]\nphase = 'fwd'", "ignore 1: phase 'fwd' is unknown: expected backward, collective, data, forward"),
        ("[[rename]]\na = 1", "'rename' is unknown: expected scope, op, ignore"),
        ("scope = 3", "scope: expected tables, each headed [[scope]]"),
        ("a = [", "cannot be read"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TrueupError) as refused:
        load(written(tmp_path, text))
    assert message in str(refused.value)
    assert "docs/alignment.md" in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TrueupError, match="cannot be read"):
        load(tmp_path / "nothing.toml")
