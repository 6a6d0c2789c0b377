"""What the checks of TOML tables refuse, and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec import field

from trueup.foundation import toml
from trueup.foundation.model import TrueupError


class Row(toml.Table):
    kind: Literal["a", "b"]
    size: toml.Positive = 1.0
    name: str | None = None
    sides: dict[Literal["above", "below"], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name == "":
            raise ValueError("it has no name")


class File(toml.Table):
    row: tuple[Row, ...]
    words: tuple[str, ...] = ()
    by_name: dict[str, Row] = field(default_factory=dict)


GOOD = {"kind": "a"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "row is missing"),
        ({"row": [], "title": 1}, "'title' is unknown: expected row, words, by_name"),
        ({"row": GOOD}, "row: expected tables, each headed [[row]]"),
        ({"row": [GOOD, {}]}, "row 2: kind is missing"),
        ({"row": [GOOD | {"color": 1}]}, "row 1: 'color' is unknown: expected kind, size, name, sides"),
        ({"row": [{"kind": "c"}]}, "row 1: kind 'c' is unknown: expected a, b"),
        ({"row": [GOOD | {"size": True}]}, "row 1: size: expected a number, got true or false"),
        ({"row": [GOOD | {"size": float("nan")}]}, "row 1: size: expected a number > 0.0"),
        ({"row": [GOOD | {"name": 3}]}, "row 1: name: expected a text, got a whole number"),
        ({"row": [GOOD | {"name": ""}]}, "row 1: it has no name"),
        ({"row": [GOOD | {"sides": {"beside": 1}}]}, "row 1: sides 'beside' is unknown: expected above, below"),
        ({"row": [], "words": ["x", 1]}, "words 2: expected a text, got a whole number"),
        ({"row": [], "by_name": {"x": {"kind": "c"}}}, "by_name.kind 'c' is unknown: expected a, b"),
    ],
)
def test_what_is_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        toml.checked(content, File)
    assert str(refused.value) == message
    with pytest.raises(ValueError) as refused:
        toml.checked(content, File, "step 3: ")
    assert str(refused.value) == f"step 3: {message}"


def test_what_is_right_is_returned() -> None:
    read = toml.checked({"row": [GOOD | {"size": 2}], "words": ["x"]}, File)
    assert (read.row[0].kind, read.row[0].size, read.words) == ("a", 2.0, ("x",))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a = \xff", "'utf-8' codec"), (b"a = [", "Invalid value"), (b" " * (toml.LARGEST + 1), "is it the right file")],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(content)
    with pytest.raises(TrueupError, match=f"^map file {file} cannot be read: .*{message}.*; see docs$"):
        toml.read(file, "map file", "see docs")
