"""Every option says what it means when it is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from trueup.foundation.model import LEVELS, PHASES, TrueupError
from trueup.recording.recorder import CaptureOptions
from trueup.recording.recorder.options import Patterns, in_ranges, parse_numbers


@pytest.mark.parametrize(
    ("given", "selected"),
    [
        (range(3), [0, 1, 2]), (range(0, 6, 2), [0, 2, 4]), ([0, 7], [0, 7]), (5, [5]), ("0:3", [0, 1, 2]), ("0,2,5", [0, 2, 5]),
        (":2", [0, 1]), ("6:", [6, 7, 8]), (" 1 , 3:5 ", [1, 3, 4]), ({4}, [4]),
    ],
)  # fmt: skip
def test_numbers(given: Any, selected: list[int]) -> None:
    ranges = parse_numbers(given, "steps")
    assert [n for n in range(9) if in_ranges(n, ranges)] == selected


def test_none_selects_all() -> None:
    assert parse_numbers(None, "steps") is None
    assert in_ranges(10**9, None)


MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"level": "layer"}, "level 'layer' is unknown: expected module, api, aten"),
    ({"level": None}, "level is None: expected one or more of module, api, aten"),
    ({"detail": None}, "detail is None: expected one of digest, stats, tensor"),
    ({"steps": 1.5}, "steps 1.5 are no whole numbers: give e.g. 0:3 (0, 1 and 2), 0,2,5 or 10: (from 10 on)"),
    ({"level": ()}, "no level selected: expected one or more of module, api, aten"),
    ({"detail": "sum"}, "detail 'sum' is unknown: expected digest, stats, tensor"),
    ({"phase": "loss"}, "phase 'loss' is unknown: expected forward, recompute, backward, optimizer, collective, data"),
    ({"on_error": "panic"}, "on_error 'panic' is unknown: expected continue or stop"),
    ({"steps": []}, "steps [] selects nothing: give e.g. 0:3 (0, 1 and 2), 0,2,5 or 10: (from 10 on)"),
    ({"steps": "3:1"}, "steps '3:1' selects nothing: give e.g. 0:3 (0, 1 and 2), 0,2,5 or 10: (from 10 on)"),
    ({"steps": "one"}, "steps 'one' is not a set of numbers: expected e.g. 0:3, 0,2,5 or 10:, got 'one'"),
    ({"ranks": range(0)}, "ranks range(0, 0) selects nothing: give e.g. 0:3 (0, 1 and 2), 0,2,5 or 10: (from 10 on)"),
    ({"ranks": "0:x"}, "ranks '0:x' is not a set of numbers: expected e.g. 0:3, 0,2,5 or 10:, got '0:x'"),
    ({"include": "/(/"}, "pattern /(/ is not a regular expression: missing ), unterminated subpattern at position 0"),
    ({"exclude": ["ok", "/[/"]}, "pattern /[/ is not a regular expression: unterminated character set at position 0"),
]


@pytest.mark.parametrize(("options", "message"), MESSAGES)
def test_messages(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TrueupError) as caught:
        CaptureOptions.of(**options)
    assert str(caught.value) == message


def test_words_keep_the_order_of_the_design() -> None:
    options = CaptureOptions.of(level=["aten", "module"], phase=["backward", "forward"])
    assert (options.levels, options.phases) == (("module", "aten"), ("forward", "backward"))
    assert CaptureOptions.of(level="all").levels == LEVELS
    assert CaptureOptions.of().phases == PHASES


def test_json_round_trip() -> None:
    options = CaptureOptions.of(steps="0:3,7:", ranks=[1], include="a.*", exclude=["b", "/c/"], level="aten", on_error="stop")
    assert CaptureOptions.from_json(options.to_json()) == options


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("neck.*", [("neck.lstm", "torch.lstm")]), ("*softmax*", [("head", "aten::_softmax")]),
        ("neck.lstm/torch.*", [("neck.lstm", "torch.lstm")]), (r"/^aten::_soft/", [("head", "aten::_softmax")]),
        ("neck", []), ("/neck/", [("neck.lstm", "torch.lstm")]), ("/", []), ("[hn]ead", [("head", "aten::_softmax")]),
    ],
)  # fmt: skip
def test_patterns(pattern: str, matches: list[tuple[str, str]]) -> None:
    calls = [("neck.lstm", "torch.lstm"), ("head", "aten::_softmax")]
    patterns = Patterns([pattern])
    assert bool(patterns)
    assert [call for call in calls if patterns.match(*call)] == matches


def test_no_pattern_is_false() -> None:
    assert not Patterns([])
