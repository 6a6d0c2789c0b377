from __future__ import annotations

import io

import pytest
from rich.console import Console

from trueup.doors.report.terminal import render
from trueup.foundation.model import Result

from . import golden
from .results import HOSTILE, crowded, culprit, missing, ranks, result

RESULTS = {
    "deviates": result(),
    "crowded": crowded(),
    "ranks": ranks(),
    "aligned": result("aligned"),
    "inconclusive": result("inconclusive", unmatched=(missing(),), counts={"compared": 0, "unmatched": 1}),
}


def rendered(shown: Result, width: int, *, colour: bool = False) -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        highlight=False,
    )
    render(shown, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("name", RESULTS)
def test_golden(name: str, width: int) -> None:
    text = rendered(RESULTS[name], width)
    golden.check(f"{name}-{width}.txt", text)
    command = "      trueup show"  # must stay on one line to be copied
    assert all(len(line.rstrip()) <= width or line.startswith(command) for line in text.splitlines())


def test_colour_adds_nothing_but_colour() -> None:
    import re

    plain, coloured = (rendered(result(), 100, colour=colour) for colour in (False, True))
    assert "\x1b[" not in plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_hostile_text_neither_styles_nor_steers() -> None:
    hostile = HOSTILE + "[red]x[/]\n"
    text = rendered(result(culprits=(culprit(scope=hostile, op=hostile, source=hostile, source_line=hostile),)), 100)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[red]x[/]" in text.replace("\n", "")


def test_an_empty_result_renders() -> None:
    import dataclasses

    shown = result("inconclusive", counts={}, culprits=(), victims=())
    empty = dataclasses.replace(shown.baseline, losses=(), environment={}, notes=())
    shown = dataclasses.replace(shown, baseline=empty, candidate=empty, calls=shown.calls.slice(0, 0))
    assert "COULD NOT TELL  because nothing was captured" in rendered(shown, 80)


def test_a_note_that_the_sentence_says_is_not_printed_again() -> None:
    shown = result("aligned", notes=["both runs made NaN first in aten::log", "another note"])
    assert "note: both runs" in shown.sentence
    text = " ".join(rendered(shown, 200).split())
    assert text.count("both runs made NaN") == text.count("another note") == 1
    assert rendered(result("deviates", notes=["a note"]), 200).count("a note") == 1
