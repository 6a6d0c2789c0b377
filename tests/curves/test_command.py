"""`trueup curves`: what it prints, exit codes, curves.json, the page, bad usage, and the page of the documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import trueup
from curves.made import losses
from report import browser
from trueup.doors.cli import main

Said = pytest.CaptureFixture[str]
PAGE = (Path(__file__).parents[2] / "docs/curves.md").read_text("utf-8")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "132")
    monkeypatch.chdir(tmp_path)


def write(name: str, values: np.ndarray) -> str:
    rows = [f"{step},{value:.6f}" for step, value in enumerate(values.tolist(), 1)]
    Path(name).write_text("\n".join(["step,loss", *rows, ""]), encoding="utf-8")
    return name


def sides(off: float = 0.0, count: int = 5) -> tuple[list[str], list[str]]:
    base = [write(f"base-seed{seed}.csv", losses(seed)) for seed in range(count)]
    return base, [write(f"cand-seed{seed}.csv", losses(seed, own=9, off=off)) for seed in range(count)]


def test_healthy_and_different(capsys: Said) -> None:
    base, cand = sides()
    assert main(["curves", *base, "--", *cand]) == 0
    said = capsys.readouterr().out
    assert said.startswith("EQUIVALENT  loss of steps 361 to 400: ")
    assert re.search(r"^361–400 .* equivalent", said, re.MULTILINE)
    assert "runs    5 and 5, paired by seed, 400 steps" in said
    _, worse = sides(0.02)
    assert main(["curves", *base, "--", *worse, "-o", "out", "--json", "curves.json"]) == 1
    assert capsys.readouterr().out.startswith("DIFFERENT  loss of steps 361 to 400: 2.2 % higher (")
    told = json.loads(Path("curves.json").read_text())
    assert told == json.loads(Path("out/curves.json").read_text())
    assert (told["schema"], told["verdict"], told["word"]) == ("trueup-curves", "deviates", "different")
    assert [one["tested"]["word"] for one in told["windows"]] == ["different"] * 3
    page = Path("out/index.html").read_text()
    assert "DIFFERENT" in page
    assert page.count('type="application/json"') == 3  # two charts, and what draws them


def test_from_python() -> None:
    base, cand = sides(0.02)
    assert trueup.curves(base, cand, "loss", margin=0.05).word == "different inside the margin"


def test_one_run_cannot_tell_but_with_a_known_spread(capsys: Said) -> None:
    (base,), (cand,) = sides(count=1)
    assert main(["curves", base, "--", cand]) == 2
    assert "COULD NOT TELL" in capsys.readouterr().out
    assert main(["curves", base, "--", cand, "--spread", "0.1%"]) == 0


@pytest.mark.parametrize(("words", "expected"), [
    ([], "Two sides are needed"), (["a.csv"], "Two sides are needed"), (["a.csv", "--"], "Two sides are needed"),
    (["a.csv", "--", "b.csv", "--", "c.csv"], "got:      a.csv -- b.csv -- c.csv"),
    (["a.csv", "--", "b.csv", "--margin", "5"], "--margin cannot be read"), (["a", "--", "b", "--window", "9"], "FIRST:LAST"),
    (["a", "--", "b", "--better", "more"], "one of lower, higher"), (["a", "--", "b", "--spread", "x"], "--spread cannot be read"),
])  # fmt: skip
def test_bad_usage(words: list[str], expected: str, capsys: Said) -> None:
    assert main(["curves", *words]) == 64
    assert expected in capsys.readouterr().err


def test_a_missing_run_is_said(capsys: Said) -> None:
    assert main(["curves", "absent.csv", "--", "b.csv"]) == 2
    assert "nothing by this name" in capsys.readouterr().err


def test_the_documented_example(capsys: Said) -> None:
    log, command, printed = example()
    Path("base.log").write_text(log)
    Path("cand.log").write_text(log.replace("7.81234", "7.81302").replace("7.71234", "7.71411"))
    assert main(command.split()[1:]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()] == printed.strip().splitlines()


def example() -> tuple[str, str, str]:
    """Return the log, the command and what it prints, of the first example of the page."""
    log = re.search(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    said = re.search(r"^```console\n\$ (trueup .*?)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert log is not None
    assert said is not None
    return log[1], said[1], said[2]


@pytest.mark.skipif(browser.CHROMIUM is None or browser.DRIVER is None, reason=browser.ABSENT)
def test_the_page_draws_both_charts_and_fits_a_phone() -> None:
    base, cand = sides(0.02)
    assert main(["curves", *base, "--", *cand, "-o", "out"]) == 1
    with browser.browser() as window:
        window.resize(390)
        window.open(Path("out/index.html"))
        window.wait("Bokeh.documents.length === 2")
        assert window.run("return [...document.querySelectorAll('.chart')].every((one) => one.childElementCount > 0)")
        assert window.run("return document.documentElement.scrollWidth") <= 390
        assert window.errors() == []

