"""What the checks of TOML tables refuse, and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trueup.foundation import toml
from trueup.foundation.model import TrueupError


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: toml.known({"a": 1, "b": 2}, ("a",), "row 3: "), "row 3: 'b' is unknown: expected a"),
        (lambda: toml.given({}, "a", "row 3: "), "row 3: a is missing"),
        (lambda: toml.text({}, "a"), "a is missing"),
        (lambda: toml.text({"a": 1}, "a", default=""), "a must be a text, not 1"),
        (lambda: toml.chosen("c", ("a", "b"), "row 3: kind"), "row 3: kind 'c' is unknown: expected a, b"),
        (lambda: toml.number(True, "a"), "a must be a number above 0, not True"),
        (lambda: toml.number(float("nan"), "a"), "a must be a number above 0, not nan"),
        (lambda: toml.texts(["a", 1], "a"), "a must be a list of texts, not ['a', 1]"),
        (lambda: toml.tables({"a": [1]}, "a"), "a must be tables, each headed [[a]]"),
        (lambda: toml.tables({"a": {}}, "a", "row 3: ", "row.a"), "row 3: a must be tables, each headed [[row.a]]"),
    ],
)
def test_what_is_refused(check: Any, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        check()
    assert str(refused.value) == message


def test_what_is_right_is_returned() -> None:
    table = {"name": "a", "size": 2, "words": ["x"], "row": [{"b": 1}, {}]}
    assert (toml.text(table, "name"), toml.text(table, "title", default="none")) == ("a", "none")
    assert (toml.number(table["size"], "size"), toml.texts(table["words"], "words")) == (2.0, ("x",))
    assert toml.tables(table, "row", "file, ") == [({"b": 1}, "file, row 1: "), ({}, "file, row 2: ")]
    assert toml.tables(table, "none") == []


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a = \xff", "'utf-8' codec"), (b"a = [", "Invalid value"), (b" " * (toml.LARGEST + 1), "is it the right file")],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(content)
    with pytest.raises(TrueupError, match=f"^map file {file} cannot be read: .*{message}.*; see docs$"):
        toml.read(file, "map file", "see docs")
