"""The page in headless Chromium: it opens, filters, sorts, answers to keys, and runs no foreign script."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trueup.model import Result
from trueup.report.html import render_page

from .browser import ABSENT, CHROMIUM, DRIVER, Browser, browser
from .results import calls, crowded, result
from .test_html import hostile

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=ABSENT)

READY = "document.documentElement.dataset.ready"
SHOWN = "return document.getElementById('shown').textContent"
TABLE = "Bokeh.documents.map((d) => d.get_model_by_name('calls')).find(Boolean)"
# Bokeh draws inside shadow roots: walk them all.
DEEP = """
const all = (root, css) => [...root.querySelectorAll(css),
    ...[...root.querySelectorAll('*')].filter((e) => e.shadowRoot).flatMap((e) => all(e.shadowRoot, css))];
"""
ARROW_DOWN = "\ue015"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def show(window: Browser, shown: Result, folder: Path) -> None:
    page = folder / "index.html"
    page.write_text(render_page(shown), encoding="utf-8")
    window.open(page)
    window.wait(READY)


def choose(window: Browser, **values: str) -> str:
    """Set filters by their visible text and return the line that counts the calls."""
    script = """
        for (const [name, text] of Object.entries(arguments[0])) {
            const field = document.getElementById('filters').elements[name];
            field.value = field.options ? [...field.options].find((o) => o.text === text).value : text;
            field.dispatchEvent(new Event('input', { bubbles: true }));
        }"""
    window.run(script, values)
    time.sleep(0.15)
    return str(window.run(SHOWN))


def column(window: Browser, name: str) -> list[Any]:
    return list(window.run(f"return Array.from({TABLE}.source.data[arguments[0]])", name))


def cells(window: Browser) -> list[str]:
    """Text of the cells that are really drawn."""
    return list(window.run(DEEP + "return all(document, '.slick-cell').map((cell) => cell.textContent)"))


def test_it_opens_on_the_verdict_with_the_deviating_calls(window: Browser, tmp_path: Path) -> None:
    show(window, result(), tmp_path)
    assert window.errors() == []
    assert window.run("return document.querySelector('h1').textContent").startswith("DEVIATES first culprit: neck.lstm")
    assert window.run(SHOWN) == "38 of 1,240"
    assert set(column(window, "state")) == {"deviates"}
    assert column(window, "role")[0] == "culprit"
    assert "culprit" in cells(window)
    assert window.run(DEEP + "return all(document, 'canvas').length") > 0
    assert not window.run("return getComputedStyle(document.querySelector('.static')).display !== 'none'")


def test_filters(window: Browser, tmp_path: Path) -> None:
    show(window, result(), tmp_path)
    assert choose(window, state="all") == "1,240 of 1,240"
    assert (
        choose(window, text="NECK lstm")
        == f"{sum(s == 'neck.lstm' for s in result().calls['scope'].to_pylist())} of 1,240"
    )
    assert set(column(window, "scope")) == {"neck.lstm"}
    choose(window, phase="backward", step="1")
    assert set(column(window, "phase")) == {"backward"}
    assert set(column(window, "step")) == {1}
    assert choose(window, text="no such call") == "0 of 1,240"
    window.run("document.getElementById('filters').reset()")
    time.sleep(0.1)
    assert window.run(SHOWN) == "1,240 of 1,240"
    assert choose(window, role="culprit") == "1 of 1,240"
    assert window.errors() == []


def test_sorting_by_a_click_on_a_heading(window: Browser, tmp_path: Path) -> None:
    show(window, result(), tmp_path)
    click = DEEP + "all(document, '.slick-header-column').find((h) => h.textContent.includes('error out')).click()"
    drawn = (
        DEEP + "return all(document, '.slick-row').map((r) => Number(r.querySelectorAll('.slick-cell')[7].textContent))"
    )
    window.run(click)
    rising = window.run(drawn)
    assert rising == sorted(rising)
    window.run(click)
    falling = window.run(drawn)
    assert falling == sorted(falling, reverse=True)
    assert falling[0] > rising[0]


def test_a_row_chosen_by_mouse_or_key_is_shown_in_full(window: Browser, tmp_path: Path) -> None:
    show(window, result(), tmp_path)
    window.run("document.getElementById('calls').scrollIntoView()")
    box = "const { x, y } = all(document, '.slick-cell')[0].getBoundingClientRect();"
    window.click(*window.run(DEEP + box + "return [Math.round(x) + 5, Math.round(y) + 5]"))
    detail = "document.getElementById('detail').textContent"
    first = str(window.wait(f"{detail}.includes('in the baseline') && {detail}"))
    window.press(ARROW_DOWN)
    second = str(window.wait(f"{detail} !== {first!r} && {detail}"))
    assert "centernet.py:57 in forward" in first
    assert "rounding.float32" in second


def test_light_and_dark(window: Browser, tmp_path: Path) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    axis = "return Bokeh.documents.map((d) => d.get_model_by_name('loss')).find(Boolean).left[0].major_label_text_color"
    cell = DEEP + "return getComputedStyle(all(document, '.slick-row')[0]).backgroundColor"
    looks = {}
    for look in ("light", "dark"):
        window.look(look)
        show(window, result(), tmp_path)
        looks[look] = [window.run(script) for script in (background, axis, cell)]
    assert all(a != b for a, b in zip(looks["light"], looks["dark"], strict=True))
    window.run("document.getElementById('theme').click()")
    assert [window.run(script) for script in (background, axis, cell)] == looks["light"]
    window.look("light")


@pytest.mark.parametrize("look", ["light", "dark"])
def test_contrast(window: Browser, tmp_path: Path, look: str) -> None:
    """WCAG 2.1 AA: 4.5 to 1 for text, 3 to 1 for lines that mean something."""
    window.look(look)
    show(window, result(), tmp_path)
    script = """
        const probe = document.body.appendChild(document.createElement('i'));
        return Object.fromEntries(arguments[0].map((name) => {
            probe.style.color = `var(${name})`;
            return [name, getComputedStyle(probe).color.match(/[0-9]+/g).slice(0, 3).map(Number)];
        }));"""
    names = [
        "page",
        "sheet",
        "ink",
        "quiet",
        "bad",
        "good",
        "unsure",
        "unsure-wash",
        "chosen",
        "baseline",
        "candidate",
        "focus",
    ]
    colours = {
        name.removeprefix("--"): rgb for name, rgb in window.run(script, [f"--{name}" for name in names]).items()
    }
    for text in ("ink", "quiet", "bad", "good", "unsure"):
        assert min(contrast(colours[text], colours[ground]) for ground in ("page", "sheet")) >= 4.5, text
    assert contrast(colours["unsure"], colours["unsure-wash"]) >= 4.5
    assert contrast(colours["ink"], colours["chosen"]) >= 4.5
    assert min(contrast(colours[line], colours["page"]) for line in ("baseline", "candidate", "focus")) >= 3
    window.look("light")


def contrast(one: list[int], other: list[int]) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(rgb: list[int]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_hostile_captures_run_nothing(window: Browser, tmp_path: Path) -> None:
    show(window, hostile(), tmp_path)
    choose(window, state="all")
    window.run(DEEP + "all(document, '.slick-cell')[0].click()")
    window.run("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    time.sleep(0.2)
    assert window.run("return window.hacked === undefined")
    assert window.run(DEEP + "return all(document, 'img').length") == 0
    assert any("onerror" in cell for cell in cells(window))
    assert window.errors() == []


def test_a_hundred_thousand_calls_open_and_filter_fast(window: Browser, tmp_path: Path) -> None:
    page = tmp_path / "index.html"
    page.write_text(render_page(result(calls=calls(100_000, 4000))), encoding="utf-8")
    started = time.perf_counter()
    window.open(page)
    window.wait(READY)
    assert time.perf_counter() - started < 3
    assert window.run(SHOWN) == "4,000 of 100,000"
    choose(window, state="all")
    timed = """
        const start = performance.now(), form = document.getElementById('filters');
        form.elements.text.value = 'lstm';
        form.dispatchEvent(new Event('input', { bubbles: true }));
        return new Promise((done) => {
            const before = document.getElementById('shown').textContent;
            const changed = () => document.getElementById('shown').textContent !== before;
            const look = () => (changed() ? done(performance.now() - start) : setTimeout(look, 5));
            look();
        });"""
    assert window.run(timed) < 1000
    assert len(cells(window)) < 1000  # only what is in sight is drawn


def test_everything_at_once(window: Browser, tmp_path: Path) -> None:
    show(window, crowded(), tmp_path)
    assert window.errors() == []
    assert window.run("return document.querySelectorAll('.further').length") == 5
    assert window.run("return document.documentElement.scrollWidth <= window.innerWidth")


def test_an_aligned_result_shows_all_calls(window: Browser, tmp_path: Path) -> None:
    show(window, result("aligned"), tmp_path)
    assert window.run(SHOWN) == "1,234 of 1,234"
    assert window.errors() == []


def test_it_prints_the_plain_table(window: Browser, tmp_path: Path) -> None:
    show(window, result(), tmp_path)
    window.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").stat().st_size > 20_000
    assert window.errors() == []
