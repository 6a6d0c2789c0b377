"""Verdicts of whole runs, line by line as they were recorded: who changes one records it anew and says why.

`make goldens` checks all groups; here are those that take ten seconds together.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import goldens
from trueup import simdev


@pytest.mark.parametrize("group", goldens.QUICK)
def test_nothing_is_said_otherwise(group: str) -> None:
    simdev.heal()
    assert goldens.differences(goldens.kept(group), goldens.said(group)) == []


def test_every_group_was_recorded() -> None:
    assert sorted(path.stem for path in goldens.FOLDER.glob("*.json")) == sorted(goldens.GROUPS)


def test_differences_are_printed_line_by_line() -> None:
    assert goldens.differences(["a: aligned", "b: aligned"], ["a: aligned", "b: deviates"]) == ["- b: aligned", "+ b: deviates"]


def test_a_note_is_kept_without_numbers_and_paths(tmp_path: Path) -> None:
    assert goldens.kind_of(f"{tmp_path}/x holds 1,234 calls of 5 steps, of which") == "PATH holds N calls of N"


def test_write_records_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goldens, "FOLDER", tmp_path / "goldens")
    goldens.write("recipe", ["healthy: aligned"])
    assert goldens.kept("recipe") == ["healthy: aligned"]
    assert json.loads((tmp_path / "goldens" / "recipe.json").read_text()) == ["healthy: aligned"]
