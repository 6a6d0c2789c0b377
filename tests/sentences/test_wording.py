from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueup.foundation.words.wording import clean, counted, number, one_line, say, sci, shorten, times


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (3e-8, "3e-8"), (0.21, "2.1e-1"), (1.0, "1e0"), (3.5e6, "3.5e6"), (9.96e-3, "1e-2"),
        (-0.031, "-3.1e-2"), (math.nan, "NaN"), (math.inf, "inf"), (-math.inf, "-inf"),
    ],
)  # fmt: skip
def test_an_error_has_two_digits(value: float, text: str) -> None:
    assert sci(value) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(1.0, "1.0 x"), (9.94, "9.9 x"), (41.2, "41 x"), (1234.4, "1,234 x"), (3.5e6, "3.5e6 x"), (math.inf, "inf x")],
)
def test_a_ratio_is_as_long_as_it_needs(ratio: float, text: str) -> None:
    assert times(ratio) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.99999, "-1.000"),
        (1.3571, "1.357"),
        (45.2548, "45.25"),
        (12345.6, "12346"),
        (123456, "1.23e5"),
        (0.00102, "0.001020"),
        (1.9e-4, "1.90e-4"),
        (1.5e5, "1.50e5"),
        (math.nan, "NaN"),
    ],
)
def test_a_value_has_four_digits(value: float, text: str) -> None:
    assert number(value) == text


@given(st.floats(min_value=-1e308, max_value=1e308))
def test_a_written_value_is_the_value_to_three_digits(value: float) -> None:
    assert float(number(value)) == pytest.approx(value, rel=5e-3, abs=5e-324)
    assert float(sci(value)) == pytest.approx(value, rel=0.06, abs=5e-324)


@given(st.text())
def test_clean_text_is_printable_and_printable_text_untouched(text: str) -> None:
    assert one_line(text).replace("\xa0", " ").isprintable() or any(c.isspace() for c in one_line(text))
    if text.isprintable():
        assert clean(text) == text


def test_escapes_and_direction_marks_are_spelled_out() -> None:
    assert clean("a\x1b[2J\u202eb\nc") == "a\\x1b[2J\\u202eb\nc"
    assert one_line("a\nb\r") == "a\\nb\\r"


def test_counting_and_shortening() -> None:
    assert counted(1, "call") == "1 call"
    assert counted(1234, "call") == "1,234 calls"
    assert shorten("abcdefghij", 7) == "abc…hij"
    assert shorten("abc", 7) == "abc"


def test_a_message_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else another thread's line, or the training's, comes between its text and its end."""
    written: list[str] = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=written.append, flush=lambda: None))
    say("it stopped")
    assert written == ["trueup: it stopped\n"]
