"""Both runs side by side, in headless Chromium."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trueup.doors.report import charts
from trueup.foundation.model import Result

from .browser import ABSENT, CHROMIUM, DRIVER, Browser, browser
from .results import HOSTILE, culprit, rendered, result
from .test_html import hostile

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=ABSENT)

ARROW_LEFT, ARROW_RIGHT, ARROW_DOWN, ENTER = "\ue012", "\ue014", "\ue015", "\ue007"
READY = "document.getElementById('side-by-side').dataset.ready !== undefined"
PARTS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def layers(count: int = 4, each: int = 2) -> pa.Table:
    """Calls of a decoder in one step; the softmax of layer 2 is the culprit, and one call of each run is alone."""
    scopes = [f"model.layers.{n}.{part}" for n in range(count) for part in PARTS for _ in range(each)]
    size = len(scopes)
    order = np.arange(size)
    state, role = np.full(size, "equal", object), np.full(size, "", object)
    first = scopes.index("model.layers.2.self_attn")
    state[first:], role[first], role[first + 1 :] = "passes on", "culprit", "victim"
    state[first] = "deviates"
    baseline, candidate = (pa.array([None if at == alone else int(at) for at in order], pa.int64()) for alone in (1, 3))
    state[1], state[3], role[1], role[3] = "only candidate", "only baseline", "", ""
    error = np.where(state == "equal", 0.0, 0.2)
    return pa.table(
        {
            "rank": np.zeros(size, np.int32), "step": np.zeros(size, np.int32),
            "phase": ["forward"] * size, "level": ["api"] * size,
            "scope": scopes, "op": ["torch.softmax" if at == first else "torch.nn.functional.linear" for at in order],
            "ordinal": (order % each).astype(np.int32), "seq_baseline": baseline, "seq_candidate": candidate, "error_in": error,
            "error_out": error, "expected": np.full(size, 1e-7), "ratio": np.where(state == "passes on", 0.5, 9.0), "state": state,
            "role": role, "rule": ["move"] * size, "source": [HOSTILE] * size,
        }
    )  # fmt: skip


def show(window: Browser, make: Callable[[], Result], folder: Path) -> None:
    page = folder / "index.html"
    page.write_text(rendered(make), encoding="utf-8")
    window.open(page)
    window.run("document.getElementById('side-by-side').scrollIntoView()")
    window.wait(READY)


def decoder() -> Result:
    return result(calls=layers())


def names(window: Browser, side: str) -> list[Any]:
    rows = f"[...document.querySelectorAll('[data-side={side}] .node')]"
    return list(window.run(f"return {rows}.map((e) => e.querySelector('.name').textContent)"))


def chosen(window: Browser) -> list[Any]:
    picked = "[...document.querySelectorAll('.node[aria-selected=true]')]"
    return list(window.run(f"return {picked}.map((e) => e.title || e.textContent)"))


def test_it_opens_on_the_culprit_in_both_trees(window: Browser, tmp_path: Path) -> None:
    show(window, decoder, tmp_path)
    picked = "return [...document.querySelectorAll('.node[aria-selected=true] .name')].map((e) => e.textContent)"
    assert window.run(picked) == ["torch.softmax#0", "torch.softmax#0"]
    assert "rule" in window.run("return document.getElementById('chosen').textContent")
    assert window.run("return document.querySelector('.node[aria-selected=true] .cell').className") == "cell culprit bad-3"
    assert window.errors() == []


def test_it_opens_on_a_culprit_that_one_run_alone_has(window: Browser, tmp_path: Path) -> None:
    rows = layers()
    rows = rows.set_column(rows.column_names.index("role"), "role", pa.array([""] * rows.num_rows))
    show(window, lambda: result(culprits=(culprit(seq=(-1, 1)),), calls=rows), tmp_path)
    assert chosen(window) == ["torch.nn.functional.linear#1"]
    assert "only in the candidate" in window.run("return document.getElementById('chosen').textContent")


def test_each_tree_has_its_own_names_and_they_are_linked(window: Browser, tmp_path: Path) -> None:
    """The baseline calls the layers ``blocks``, in place of ``layers``, and its attention an operator of another name."""
    rows = layers()
    other = [name.as_py().replace("layers", "blocks") if "self_attn" in name.as_py() else None for name in rows["scope"]]
    softmax = ["torch.nn.functional.softmax" if op.as_py() == "torch.softmax" else None for op in rows["op"]]
    rows = rows.append_column("scope_baseline", pa.array(other)).append_column("op_baseline", pa.array(softmax))
    show(window, lambda: result(calls=rows), tmp_path)
    picked = "return [...document.querySelectorAll('.node[aria-selected=true] .name')].map((e) => e.textContent)"
    assert window.run(picked) == ["torch.nn.functional.softmax#0", "torch.softmax#0"]
    told = window.run("return document.getElementById('chosen').textContent")
    assert "model.layers.2.self_attn (model.blocks.2.self_attn in the baseline)" in told
    window.press(ARROW_LEFT)
    for side, other in (("baseline", "candidate"), ("candidate", "baseline")):
        window.run(f"document.querySelector('[data-side={side}]').focus()")
        window.press(ARROW_LEFT)
        linked = f"document.querySelector('[data-side={other}] .node[aria-selected=true]').title"
        assert window.run(f"return {linked}").startswith("model.layers.2" if other == "candidate" else "model.blocks.2")


def test_what_one_run_alone_has_stands_in_its_tree_alone(window: Browser, tmp_path: Path) -> None:
    show(window, decoder, tmp_path)
    window.run("document.querySelector('#side-by-side [name=unfold]').click()")
    window.run("document.querySelectorAll('[data-side]').forEach((e) => { e.scrollTop = 0; })")
    window.wait("document.querySelectorAll('.node:has(.call) .alone').length === 2")
    only = "document.querySelector('[data-side=baseline] .node:has(.call):has(.alone)')"
    assert window.run(f"return {only}.textContent") == "torch.nn.functional.linear#1only here"
    window.run(f"{only}.click()")
    assert ", only in the baseline" in window.run("return document.getElementById('chosen').textContent")
    assert len(chosen(window)) == 1


def test_folding_and_choosing_are_linked_and_answer_to_keys(window: Browser, tmp_path: Path) -> None:
    show(window, decoder, tmp_path)
    window.run("document.querySelector('#side-by-side [name=fold]').click()")
    assert names(window, "baseline") == names(window, "candidate") == ["model"]
    window.run("document.querySelector('[data-side=candidate] .node').click()")
    window.run("document.querySelector('[data-side=candidate]').focus()")
    window.press(ARROW_RIGHT)
    window.press(ARROW_RIGHT)
    window.press(ENTER)
    assert names(window, "baseline") == names(window, "candidate") == ["model", "layers", "0", "1", "2", "3"]
    window.press(ARROW_DOWN)
    assert chosen(window) == ["model.layers.0"] * 2
    window.press(ARROW_LEFT)
    assert chosen(window) == ["model.layers"] * 2
    window.press(ARROW_LEFT)
    assert names(window, "baseline") == ["model", "layers"]


def test_search_goes_from_one_to_the_next(window: Browser, tmp_path: Path) -> None:
    show(window, decoder, tmp_path)
    typed = """
        const field = document.querySelector('#side-by-side [name=words]');
        field.value = arguments[0]; field.dispatchEvent(new Event('input', { bubbles: true })); field.focus();"""
    found = "document.querySelector('#side-by-side output').value"
    window.run(typed, "layers.3 UP_PROJ linear")
    window.wait(f"{found} === '2 found'")
    for nth in ("1 of 2", "2 of 2", "1 of 2"):
        window.press(ENTER)
        assert window.run(f"return {found}") == nth
    assert chosen(window) == ["torch.nn.functional.linear#0"] * 2
    window.run(typed, "no such module")
    window.wait(f"{found} === '0 found'")
    assert window.errors() == []


def test_foreign_names_are_text(window: Browser, tmp_path: Path) -> None:
    show(window, hostile, tmp_path)
    window.run("document.querySelector('#side-by-side [name=unfold]').click()")
    assert window.run("return document.querySelectorAll('#side-by-side img, #side-by-side script').length") == 0
    assert window.run("return window.hacked === undefined")
    assert any("onerror" in name for name in names(window, "candidate"))
    assert window.errors() == []


def test_the_trees_need_no_library(window: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "available", lambda: False)
    show(window, decoder, tmp_path)
    assert "torch.softmax#0" in names(window, "candidate")
    assert window.errors() == []


def test_a_hundred_thousand_nodes_stay_fluid(window: Browser, tmp_path: Path) -> None:
    """80 layers as of a model with 70 billion parameters; only rows in sight are elements."""
    rows = layers(80, 125)
    assert rows.num_rows == 100_000
    shown = dataclasses.replace(result(calls=rows), settings=())
    show(window, lambda: shown, tmp_path)
    unfold = "document.querySelector('#side-by-side [name=unfold]').click()"
    took = window.run(f"const from = performance.now(); {unfold}; return performance.now() - from")
    height = window.run("return document.querySelector('[data-side=candidate]').scrollHeight")
    assert height > 26 * 70_000
    frames = """
        const box = document.querySelector('[data-side=candidate]'), spent = [], done = arguments[0];
        let last = performance.now(), nth = 0;
        const next = () => {
            const now = performance.now();
            if (nth) spent.push(now - last);
            last = now;
            if (nth++ === 40) { spent.sort((a, b) => a - b); done(spent[spent.length >> 1]); return; }
            box.scrollTop = (box.scrollHeight / 41) * nth;
            requestAnimationFrame(next);
        };
        requestAnimationFrame(next);"""
    median = window._post("execute/async", script=frames, args=[])
    elements = window.run("return document.querySelectorAll('.node').length")
    print(f"unfolded in {took:.0f} ms, a frame of scrolling {median:.0f} ms, {elements} elements")
    assert elements < 120
    assert took < 2000
    assert median < 200
