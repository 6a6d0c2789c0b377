"""The page in headless Chromium: it opens, filters, sorts, answers to keys, and runs no foreign script."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trueup.foundation.model import Result

from .browser import ABSENT, CHROMIUM, DRIVER, Browser, browser
from .results import crowded, large, missing, rendered, result
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
ENTER, TAB, ARROW_LEFT, ARROW_RIGHT, ARROW_DOWN = "\ue007", "\ue004", "\ue012", "\ue014", "\ue015"
MODEL = "Bokeh.documents.flatMap((d) => d.roots()).find((m) => m.name === arguments[0])"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def show(window: Browser, folder: Path, make: Callable[..., Result], *arguments: str) -> None:
    """Open the page of a result."""
    page = folder / "index.html"
    page.write_text(rendered(make, *arguments), encoding="utf-8")
    window.open(page)
    window.wait(READY)
    window.untouched = ""


def see(window: Browser, folder: Path, make: Callable[..., Result]) -> None:
    """Open the page of a result, if it is not open as it was, for a test that leaves it so."""
    if window.untouched != make.__name__:
        show(window, folder, make)
        window.untouched = make.__name__


def choose(window: Browser, **values: str) -> str:
    """Set filters by their visible text and return the line that counts the calls."""
    script = """
        for (const [name, text] of Object.entries(arguments[0])) {
            const field = document.getElementById('filters').elements[name];
            field.value = field.options ? [...field.options].find((o) => o.text === text).value : text;
            field.dispatchEvent(new Event('input', { bubbles: true }));
        }"""
    window.run(script, values)
    window.rest(0.15)
    return str(window.run(SHOWN))


def column(window: Browser, name: str) -> list[Any]:
    return list(window.run(f"return Array.from({TABLE}.source.data[arguments[0]])", name))


def cells(window: Browser) -> list[str]:
    """Text of the cells that are really drawn."""
    return list(window.run(DEEP + "return all(document, '.slick-cell').map((cell) => cell.textContent)"))


def test_it_opens_on_the_verdict_with_the_deviating_calls(window: Browser, tmp_path: Path) -> None:
    see(window, tmp_path, result)
    assert window.errors() == []
    head = window.run("return document.querySelector('h1').textContent")
    assert head == "DEVIATES torch.lstm, backward: inputs agree, outputs do not"
    assert window.run(SHOWN) == "38 of 1,240"
    assert set(column(window, "state")) == {"deviates"}
    assert column(window, "role")[0] == "culprit"
    assert "culprit" in cells(window)
    assert window.run(DEEP + "return all(document, 'canvas').length") > 0
    assert not window.run("return getComputedStyle(document.querySelector('.static')).display !== 'none'")


def test_filters(window: Browser, tmp_path: Path) -> None:
    show(window, tmp_path, result)
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
    window.rest(0.1)
    assert window.run(SHOWN) == "1,240 of 1,240"
    assert choose(window, role="culprit") == "1 of 1,240"
    assert window.errors() == []


def test_sorting_by_a_click_on_a_heading(window: Browser, tmp_path: Path) -> None:
    show(window, tmp_path, result)
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


def test_sorting_texts_keeps_the_order_of_equal_ones(window: Browser, tmp_path: Path) -> None:
    show(window, tmp_path, result)
    choose(window, state="all")
    cells_of = "[4, 5].map((k) => r.querySelectorAll('.slick-cell')[k].textContent)"
    drawn = DEEP + f"return all(document, '.slick-row').map((r) => {cells_of})"
    before = list(zip(column(window, "scope"), column(window, "call"), strict=True))
    window.run(DEEP + "all(document, '.slick-header-column').find((h) => h.textContent.includes('scope')).click()")
    window.rest(0.2)
    shown = window.run(drawn)
    assert [tuple(row) for row in shown] == sorted(before, key=lambda row: row[0])[: len(shown)]


def test_sorting_by_a_key_on_a_heading(window: Browser, tmp_path: Path) -> None:
    show(window, tmp_path, crowded)
    focused = "let at = document.activeElement; while (at?.shadowRoot?.activeElement) at = at.shadowRoot.activeElement;"
    window.run(DEEP + "all(document, '.slick-header-column').find((h) => h.textContent.includes('error out')).focus()")
    shown = DEEP + "return all(document, '.slick-row').map((r) => Number(r.querySelectorAll('.slick-cell')[7].textContent))"
    for key, rising in ((ENTER, True), (ENTER, False), (" ", True), (" ", False)):
        window.press(key)
        window.rest(0.3)
        errors = window.run(shown)
        assert errors == sorted(errors, reverse=not rising)
        assert "error out" in window.run(focused + "return at.textContent")


def test_a_row_chosen_by_mouse_or_key_is_shown_in_full(window: Browser, tmp_path: Path) -> None:
    show(window, tmp_path, result)
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
        show(window, tmp_path, result)
        looks[look] = [window.run(script) for script in (background, axis, cell)]
    assert all(a != b for a, b in zip(looks["light"], looks["dark"], strict=True))
    window.run("document.getElementById('theme').click()")
    assert [window.run(script) for script in (background, axis, cell)] == looks["light"]
    window.look("light")


@pytest.mark.parametrize("look", ["light", "dark"])
def test_contrast(window: Browser, tmp_path: Path, look: str) -> None:
    """WCAG 2.1 AA: 4.5 to 1 for text, 3 to 1 for lines that mean something."""
    window.look(look)
    see(window, tmp_path, result)
    script = """
        const probe = document.body.appendChild(document.createElement('i'));
        const found = Object.fromEntries(arguments[0].map((name) => {
            probe.style.color = `var(${name})`;
            return [name, getComputedStyle(probe).color.match(/[0-9]+/g).slice(0, 3).map(Number)];
        }));
        probe.remove();
        return found;"""
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
    show(window, tmp_path, hostile)
    choose(window, state="all")
    window.run(DEEP + "all(document, '.slick-cell')[0].click()")
    window.run("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    window.rest(0.2)
    assert window.run("return window.hacked === undefined")
    assert window.run(DEEP + "return all(document, 'img').length") == 0
    assert any("onerror" in cell for cell in cells(window))
    assert window.errors() == []


def test_a_hundred_thousand_calls_open_and_filter(window: Browser, tmp_path: Path) -> None:
    show(window, tmp_path, large)
    assert window.run(SHOWN) == "4,000 of 100,000"
    choose(window, state="all")
    filtered = """
        const form = document.getElementById('filters');
        form.elements.text.value = 'lstm';
        form.dispatchEvent(new Event('input', { bubbles: true }));
        return new Promise((done) => {
            const before = document.getElementById('shown').textContent;
            const changed = () => document.getElementById('shown').textContent !== before;
            const look = () => (changed() ? done(true) : setTimeout(look, 5));
            look();
        });"""
    assert window.run(filtered)
    assert len(cells(window)) < 1000  # only what is in sight is drawn


def test_everything_at_once(window: Browser, tmp_path: Path) -> None:
    see(window, tmp_path, crowded)
    assert window.errors() == []
    assert window.run("return document.querySelectorAll('.further').length") == 5
    assert window.run("return document.documentElement.scrollWidth <= window.innerWidth")


def test_an_aligned_result_shows_all_calls(window: Browser, tmp_path: Path) -> None:
    show(window, tmp_path, result, "aligned")
    assert window.run("return document.documentElement.scrollHeight") < 1600  # short, until somebody asks for more
    window.run("document.querySelector('nav a[href=\"#calls\"]').click()")
    window.wait("document.getElementById('more').dataset.ready !== undefined")
    assert window.run(SHOWN) == "1,234 of 1,234"
    assert window.errors() == []


def test_it_prints_the_plain_table(window: Browser, tmp_path: Path) -> None:
    see(window, tmp_path, result)
    window.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").stat().st_size > 20_000
    assert window.errors() == []


def test_on_paper_a_chart_is_as_wide_as_the_paper(window: Browser, tmp_path: Path) -> None:
    """It is drawn as wide as the window, and was cut off there: a picture of it stands there, and the chart again afterwards."""
    see(window, tmp_path, result)
    chart = "const chart = document.getElementById('loss-chart'); "
    window.run("window.dispatchEvent(new Event('beforeprint'))")
    picture = "const { tagName, style } = chart.nextElementSibling; return [chart.style.display, tagName, style.width]"
    found = window.run(chart + picture)
    assert found == ["none", "CANVAS", "100%"]
    window.run("window.dispatchEvent(new Event('afterprint'))")
    assert window.run(chart + "return [chart.style.display, chart.parentElement.querySelectorAll('canvas').length]") == ["", 0]
    assert window.errors() == []


def test_print_shows_plain_tables_and_no_controls(window: Browser, tmp_path: Path) -> None:
    show(window, tmp_path, lambda: result(unmatched=(missing(),)))
    window.medium("print")
    shown = "return [...document.querySelectorAll(arguments[0])].some((e) => e.getClientRects().length)"
    try:
        for there in (".static", "#culprit", ".around svg", ".worst", "#loss-chart", "#tree", "#unmatched table", ".rules"):
            assert window.run(shown, there), there
        for gone in ("#filters", "#calls-table", "#theme", "#copy", "nav"):
            assert not window.run(shown, gone), gone
        assert window.run("return document.documentElement.scrollWidth <= window.innerWidth")
    finally:
        window.medium("")


def tapped(window: Browser, plot: str, nth: int, series: int = 0) -> str:
    """Choose a point of a chart, as a click on it does, and return the line that counts the calls."""
    script = f"const source = {MODEL}.renderers[arguments[2]].data_source; source.selected.indices = [arguments[1]];"
    window.run(script, plot, nth, series)
    window.rest(0.1)
    return str(window.run(SHOWN))


def test_a_point_of_a_curve_shows_the_calls_of_its_step(window: Browser, tmp_path: Path) -> None:
    show(window, tmp_path, result)
    there = sum(step == 2 for step in result().calls["step"].to_pylist())
    for plot in ("loss", "gradient norm"):
        assert window.run(f"return {MODEL}.renderers[0].data_source.data.step.length", plot) == 3
        assert tapped(window, plot, 2) == f"{there:,} of 1,240"
        assert set(column(window, "step")) == {2}
        tapped(window, plot, 1)  # and again, after the first was forgotten
        assert set(column(window, "step")) == {1}


def test_the_overview_has_every_culprit_and_leads_to_its_row(window: Browser, tmp_path: Path) -> None:
    show(window, tmp_path, result)
    names = window.run(f"return {MODEL}.renderers.map((r) => r.name)", "overview")
    assert names == ["agrees", "passes on", "incomparable", "deviates", "culprit"]
    points = window.run(f"return {MODEL}.renderers.map((r) => r.data_source.data.seq.length)", "overview")
    assert points[4] == 1
    assert points[3] == 37
    tapped(window, "overview", 0, 4)
    detail = "document.getElementById('detail').textContent"
    assert "in the baseline" in str(window.wait(f"{detail}.includes('in the baseline') && {detail}"))
    nth = window.run(f"return {TABLE}.source.selected.indices[0]")
    assert column(window, "role")[nth] == "culprit"


def test_the_tree_by_mouse_and_by_keys(window: Browser, tmp_path: Path) -> None:
    show(window, tmp_path, result)
    seen = "[...document.querySelectorAll('#tree li > .row .name')].filter((e) => e.offsetParent)"
    names = f"return {seen}.map((e) => e.textContent.trim())"
    assert "backbone" in window.run(names)
    assert "layer1" not in window.run(names)
    window.run("document.querySelector('#tree .fold[aria-label^=backbone]').focus()")
    window.press(ARROW_RIGHT)
    window.press(ARROW_RIGHT)
    assert "layer1" in window.run(names)
    assert window.run("return document.activeElement.getAttribute('aria-label')").startswith("layer1")
    window.press(ENTER)
    assert "0" in window.run(names)
    window.press(ARROW_LEFT)
    window.press(ARROW_LEFT)
    window.press(ARROW_LEFT)
    assert "layer1" not in window.run(names)
    window.run("document.querySelector('#tree a.cell[aria-label^=\"backbone, backward\"]').click()")
    assert set(column(window, "phase")) == {"backward"}
    assert all(scope.startswith("backbone.") for scope in column(window, "scope"))
    assert set(column(window, "step")) == {0}  # the tree is of the culprit's step
    assert window.run("return document.activeElement.name") == "text"
    assert window.errors() == []


def test_a_call_of_the_picture_leads_to_its_row(window: Browser, tmp_path: Path) -> None:
    rows = result().calls
    show(window, tmp_path, result)
    assert window.run("return document.querySelectorAll('.around .box').length") == 5
    assert window.run("return document.querySelectorAll('.around a').length") == 4  # one is in the candidate only
    assert "grad_input.0 → grad_output.0: rel. L2 2.1e-1" in window.run("return document.querySelector('.around svg').textContent")
    window.run("document.querySelector('.around a .culprit').closest('a').focus()")
    window.press(ENTER)
    window.rest(0.2)
    assert set(column(window, "scope")) <= {"neck.lstm"}
    assert rows.num_rows == 1240


def test_sorting_and_thresholds_by_the_form(window: Browser, tmp_path: Path) -> None:
    show(window, tmp_path, result)
    choose(window, state="all", sort="error out")
    errors = column(window, "error_out")
    assert errors == sorted(errors, reverse=True)
    choose(window, sort="execution")
    order = column(window, "seq_candidate")
    assert order == sorted(order)
    choose(window, least="1e-3", sort="importance")
    assert min(column(window, "error_out")) >= 1e-3
    assert choose(window, least="", module="backbone.layer1").endswith("of 1,240")
    assert all(scope.startswith("backbone.layer1.") for scope in column(window, "scope"))
    assert choose(window, module="backbone.lay").startswith("0 of")  # a module, not the beginning of a name


def test_histograms_are_drawn_when_they_are_seen(window: Browser, tmp_path: Path) -> None:
    show(window, tmp_path, crowded)
    count = DEEP + "return [...document.querySelectorAll('.histogram')].filter((e) => all(e, 'canvas').length).length"
    assert window.run(f"return {MODEL} !== undefined", "histogram")
    drawn = window.run(count)
    assert drawn == 1
    window.run("document.querySelector('details.further').open = true")
    window.wait("document.querySelectorAll('[data-drawn]').length === 2")
    window.run("return new Promise((done) => setTimeout(done, 200))")
    assert window.run(count) == 2
    assert window.errors() == []


AUDIT = """
    const parse = (text) => { const p = text.match(/[0-9.]+/g).map(Number); return { rgb: p.slice(0, 3), a: p[3] ?? 1 }; };
    const lum = ([r, g, b]) => [r, g, b].map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, k) => sum + c * [0.2126, 0.7152, 0.0722][k], 0);
    const ground = (e) => {
        for (; e; e = e.parentElement) {
            const { rgb, a } = parse(getComputedStyle(e).backgroundColor);
            if (a > 0.99) return rgb;
        }
        return [255, 255, 255];
    };
    const bad = [];
    for (const e of document.body.querySelectorAll('*')) {
        if (!e.checkVisibility?.() || e.closest('svg, .bk-root') || e.shadowRoot) continue;
        if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
        const style = getComputedStyle(e), one = lum(parse(style.color).rgb), other = lum(ground(e));
        const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
        if (ratio < 4.5) bad.push(`${e.tagName}.${e.className} ${e.textContent.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
    }
    return bad;"""


def test_all_text_has_contrast(window: Browser, tmp_path: Path) -> None:
    """WCAG 2.1 AA for every element that shows text, against what lies behind it."""
    show(window, tmp_path, crowded)
    window.run("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    window.run("document.querySelectorAll('#tree ul[hidden]').forEach((part) => { part.hidden = false; })")
    window.run("document.getElementById('side-by-side').scrollIntoView()")
    window.wait("document.querySelectorAll('.node .deviates, .node [class*=bad-]').length > 0")
    for look in ("light", "dark"):
        window.look(look)
        assert window.run(AUDIT) == [], look
    window.look("light")


def test_all_that_can_be_done_by_mouse_can_be_reached_by_tab(window: Browser, tmp_path: Path) -> None:
    show(window, tmp_path, result)
    window.run("document.body.focus()")
    seen = set()
    name = "const e = document.activeElement; return e.id || e.name || e.className.baseVal || e.className || e.tagName"
    for _ in range(80):
        window.press(TAB)
        seen.add(window.run(name))
    wanted = {"skip", "theme", "next-command", "copy", "SUMMARY", "go", "fold", "text", "module", "state", "least", "sort"}
    wanted |= {"forest", "words"}
    assert wanted <= {word for name in seen for word in name.split()}


def test_a_narrow_window_needs_no_sideways_scrolling(window: Browser, tmp_path: Path) -> None:
    window.resize(500)
    show(window, tmp_path, crowded)
    wide, there = window.run("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert wide <= there == 500
    window.resize(1280)


def test_a_hundred_thousand_calls_sort_fast(window: Browser, tmp_path: Path) -> None:
    show(window, tmp_path, large)
    choose(window, state="all")
    script = """
        const form = document.getElementById('filters'), table = %s;
        const before = table.source.data;
        form.elements.sort.value = 'error_out';
        form.dispatchEvent(new Event('input', { bubbles: true }));
        return new Promise((done) => {
            const finish = () => done(true);
            const look = () => (table.source.data !== before ? requestAnimationFrame(finish) : setTimeout(look, 5));
            look();
        });""" % TABLE  # noqa: UP031 - braces are the script's
    assert window.run(script) < 1500
    assert len(column(window, "error_out")) == 100_000


def test_the_picture_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`make picture`, of another page."""
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("picture", root / "tools/picture.py")
    assert spec is not None
    assert spec.loader is not None
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    page = tmp_path / "index.html"
    page.write_text(rendered(result), encoding="utf-8")
    assert 5_000 < picture.photograph(page, tmp_path / "report.png", CHROMIUM) < picture.MOST
    assert (root / "docs/report.png").stat().st_size < picture.MOST
    monkeypatch.setenv("PATH", str(tmp_path))
    assert picture.main() == 0
    assert capsys.readouterr().out.startswith("no picture: none of chromium, ")
