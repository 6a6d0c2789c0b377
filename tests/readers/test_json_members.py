from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trueup.exchange.readers import contents
from trueup.exchange.readers.contents import Members, whole

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def read(raw: bytes, enter: str | None = None) -> tuple[list[tuple[str | None, str, Any]], str | None]:
    members = Members(io.BytesIO(raw), enter)
    return list(members), members.problem


@given(st.dictionaries(st.text(), VALUES, max_size=6), st.integers(1, 40), st.sampled_from([None, 1]))
@example({"a": -0.0, "b": 1e300, "c": 12, "d": True, "e": None}, 1, None)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_members_are_those_of_the_whole(content: dict[str, Any], chunk: int, indent: int | None) -> None:
    before, contents.CHUNK = contents.CHUNK, chunk
    try:
        found, problem = read(json.dumps(content, indent=indent).encode())
    finally:
        contents.CHUNK = before
    assert ({key: value for _, key, value in found}, problem) == (content, None)


@given(st.dictionaries(st.text(), VALUES, min_size=1, max_size=6), st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_all_whole_members_of_what_was_cut_are_had(content: dict[str, Any], data: st.DataObject) -> None:
    raw = json.dumps({"data": content}).encode()
    cut = data.draw(st.integers(0, len(raw) - 1))
    found, problem = read(raw[:cut], "data")
    names = [key for group, key, value in found if group == "data"][1:]
    assert problem is not None
    assert names == list(content)[: len(names)]
    assert all(value == content[key] for group, key, value in found[1:] if group == "data")


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_any_bytes_end(raw: bytes) -> None:
    read(raw, "data")
    read(b'{"data": {' + raw, "data")


def test_a_group_is_entered_and_told_though_it_be_empty() -> None:
    assert read(b'{"a": 1, "data": {}, "b": [2]}', "data") == ([(None, "a", 1), ("data", "", None), (None, "b", [2])], None)


def test_bare_nan_and_infinity() -> None:
    found, problem = read(b'{"a": NaN, "b": -Infinity}')
    assert problem is None
    assert math.isnan(found[0][2])
    assert found[1][2] == -math.inf


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "it does not begin with an object"),
        (b"[1]", "it does not begin with an object"),
        (b'{"a": 1', "it ends too early"),
        (b'{"a": 12', "it ends too early"),
        (b'{"a": {"b": 1}', "it ends too early"),
        (b'{"a" 1}', "it is no JSON"),
        (b'{"a": 1x' + b" " * 10_000, "it is no JSON"),
        (b'{"a": 1x}', "it is no JSON"),
        (b"{1: 1}", "it is no JSON"),
        (b'{"a": ' + b"[" * 200_000, "it is nested too deeply"),
    ],
)  # fmt: skip
def test_problems_are_told(raw: bytes, problem: str) -> None:
    assert read(raw)[1] == problem


def test_one_member_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "MEMBER_LIMIT", 1000)
    monkeypatch.setattr(contents, "CHUNK", 100)
    found, problem = read(b'{"a": 1, "b": "' + b"x" * 100_000)
    assert [key for _, key, _ in found] == ["a"]
    assert problem == "it holds a member of more than 1,000 characters, or is no JSON"


def test_a_file_that_is_too_large_is_not_read() -> None:
    with pytest.raises(ValueError, match="it has 11 bytes, and at most 10 are read"):
        whole(io.BytesIO(b"x" * 11), 11, 10)
