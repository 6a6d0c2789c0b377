"""The page as text; tests/report/test_page.py looks at it in a browser."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pytest

from trueup.doors.report import charts
from trueup.doors.report.html import embedded, pack, render_fragment, render_page, told_apart
from trueup.foundation.model import Evidence, Result, Rule, SetOtherwise

from .results import HOSTILE, calls, crowded, culprit, evidence, large, missing, ranks, rendered, result, run


def hostile() -> Result:
    """Everything foreign is hostile."""
    h = HOSTILE
    bad = dataclasses.replace(run(h, h, 0.1), framework=h, devices=(h,), environment={h: h}, notes=(h,), gradient_source=h)
    rows = calls(40, 20)
    for name in ("scope", "op", "rule", "source", "phase", "level"):
        rows = rows.set_column(rows.column_names.index(name), name, pa.array([h] * rows.num_rows))
    found = culprit(scope=h, op=h, source=h, source_line=h, stack=(h, h), rule=h, api=h, aten=(h,), level=h, phase=h)
    found = dataclasses.replace(
        found, slots=tuple(dataclasses.replace(s, slot=h, dtype=(h, ""), shape=(h, h), reason=h) for s in found.slots)
    )
    shown = evidence()
    nodes = tuple(dataclasses.replace(node, scope=h, op=h, phase=h, level=h) for node in shown.nodes)
    edges = tuple(dataclasses.replace(edge, slots=(h, h)) for edge in shown.edges)
    spreads = tuple(dataclasses.replace(spread, slot=h) for spread in shown.histograms)
    worst = tuple(dataclasses.replace(element, slot=h) for element in shown.worst)
    found = dataclasses.replace(found, evidence=Evidence(spreads, worst, nodes, edges, 1, (h,)))
    alone = dataclasses.replace(missing(), scope=h, op=h, source=h)
    alone = dataclasses.replace(alone, neighbours=tuple(dataclasses.replace(n, scope=h, op=h) for n in alone.neighbours))
    return result(
        culprits=(found, found), unmatched=(alone,), notes=(h,), rules=(Rule(h, h, h, 1, 1),),
        criterion=h, baseline=bad, candidate=bad, calls=rows,
    )  # fmt: skip


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def blocks(page: str) -> dict[str, str]:
    return dict(re.findall(r'<script type="application/json" id="([\w-]+)">(.*?)</script>', page, re.DOTALL))


def test_hostile_text_makes_no_element_and_no_script() -> None:
    page, plain = (
        rendered(hostile),
        render_page(result(culprits=(culprit(), culprit()), unmatched=(missing(),), notes=("n",))),
    )
    assert "\x1b" not in page
    assert "\u202e" not in page
    kinds = [sorted({tag for tag, _ in Elements(text).seen}) for text in (page, plain)]
    assert set(kinds[0]) <= set(kinds[1])
    assert "img" not in kinds[0]
    assert not [attrs for _, attrs in Elements(page).seen if any(name.startswith("on") for name in attrs)]
    assert "{{7*7}}" in page  # shown, not evaluated
    assert "hacked" in json.dumps(json.loads(blocks(page)["calls-data"]))


def test_data_blocks_are_strict_json_without_markup() -> None:
    assert str(embedded({"a": "</script><!--&"})) == '{"a":"\\u003c/script\\u003e\\u003c!--\\u0026"}'
    with pytest.raises(ValueError, match="Out of range"):
        embedded(float("nan"))


def test_the_policy_allows_the_scripts_inside_and_nothing_from_elsewhere() -> None:
    page = rendered(result)
    policy = next(a["content"] for t, a in Elements(page).seen if t == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    for script in re.findall(r"<script>(.*?)</script>", page, re.DOTALL):
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    elements = Elements(page).seen
    assert not [a for t, a in elements if "src" in a or t in ("link", "iframe", "object", "embed", "base")]
    assert all((a.get("href") or "#").startswith("#") for _, a in elements)


def test_packed_calls_are_the_calls() -> None:
    rows = calls(500, 20)
    packed = pack(rows)
    columns = packed["columns"]

    def numbers(name: str, kind: str) -> np.ndarray:  # type: ignore[type-arg]
        return np.frombuffer(zlib.decompress(base64.b64decode(columns[name]["data"])), kind)

    assert (packed["rows"], packed["total"]) == (500, 500)
    role = [columns["role"]["values"][code] for code in numbers("role", "<i4")]
    assert role == ["culprit"] + ["victim"] * 19 + [""] * 480
    victims = numbers("seq_candidate", "<i4")[1:20]
    assert (np.diff(victims) > 0).all()
    back = dict(zip(numbers("seq_candidate", "<i4"), numbers("error_out", "<f4"), strict=True))
    kept = dict(zip(rows["seq_candidate"].to_pylist(), rows["error_out"].to_pylist(), strict=True))
    assert all(back[seq] == pytest.approx(error, rel=1e-6) for seq, error in kept.items())


def test_a_page_holds_the_most_important_calls_only() -> None:
    packed = pack(calls(500, 20), limit=30)
    assert (packed["rows"], packed["total"]) == (30, 500)
    assert set(packed["columns"]["state"]["values"]) == {"deviates", "agrees"}


def test_missing_and_empty_columns_are_packed() -> None:
    packed = pack(pa.table({"step": pa.array([], pa.int32())}))
    assert packed["rows"] == 0
    assert packed["columns"]["scope"]["values"] == []
    assert pack(pa.table({"step": [1], "error_out": [None]}))["rows"] == 1


def test_a_page_is_small() -> None:
    assert sum(map(len, charts.library())) < 2.1e6  # 1.95 MB with Bokeh 3.9: core, widgets, tables; 0.72 MB compressed
    assert len(rendered(crowded)) < 1e6
    assert len(rendered(large)) < 4e6


def test_the_library_is_the_one_whose_hashes_the_policy_has() -> None:
    page = rendered(result)
    parts = [zlib.decompress(base64.b64decode(part)).decode() for part in json.loads(blocks(page)["library"])]
    assert parts == list(charts.library())
    assert all(base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() in page for part in parts)


def test_without_bokeh_the_page_has_plain_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "available", lambda: False)
    page = render_page(result())
    assert len(page) < 120_000
    assert "trueup[report]" in page
    assert set(blocks(page)) == {"calls-data"}  # of the two trees
    assert page.count("deviates") > 38


def test_what_is_said() -> None:
    page = re.sub(r"<script>.*?</script>", "", rendered(crowded), flags=re.DOTALL)
    for text in (
        "torch.lstm, backward: inputs agree, outputs do not",
        "first culprit: neck.lstm, backward, step 0, rank 0", "torch.lstm / aten::_thnn_fused_lstm_cell_backward…",
        "trueup show runs/npu --scope neck.lstm", "rounding.float32.matmul", "rows, _ = self.lstm(rows)", "12 NaN",
        "float32 → bfloat16", "the candidate capture was interrupted", "2 calls inside autograd.Function",
        "could be rounding",
        "default: error relative to the rounding noise", "eps = 1e-05",
    ):  # fmt: skip
        assert text in page, text


def test_an_aligned_page_has_no_culprit() -> None:
    page = rendered(result, "aligned")
    assert 'data-verdict="aligned"' in page
    assert 'id="culprit"' not in page
    assert '<details class="more" id="more"' in page  # the calls are folded


def test_what_only_passes_an_error_on_is_not_said_to_deviate() -> None:
    rows = calls(60, 12)
    rows = rows.set_column(rows.column_names.index("ratio"), "ratio", pa.array([0.4] * 59 + [3.0]))
    states = dict(zip(rows["role"].to_pylist(), told_apart(rows)["state"].to_pylist(), strict=True))
    assert states["culprit"] == "deviates"  # whatever its ratio
    told = told_apart(rows)["state"].to_pylist()
    assert (told.count("deviates"), told.count("passes on"), told[-1]) == (2, 10, "deviates")
    page = render_page(result(calls=rows))
    assert page.count(">passes on</td>") == 10
    assert '<div class="passes_on some"><dt>pass on what they got</dt><dd>10</dd></div>' in page


def test_settings_that_differ_are_a_table() -> None:
    rows = (SetOtherwise("AdamW lr", "0.001", HOSTILE, "changes"), SetOtherwise("commit", "a", "b", "cannot"))
    page = render_page(result(settings=rows))
    assert "AdamW lr</th>" in page
    assert "1 difference that cannot change the numbers" in page
    assert "<img" not in page
    assert 'id="settings"' not in rendered(result)


def test_the_notebook_fragment() -> None:
    fragment = result()._repr_html_()
    assert fragment == render_fragment(result())
    assert "<script" not in fragment
    assert "<b>DEVIATES</b>" in fragment
    assert "<b>2.1e-1</b>" in fragment
    assert "1,240 compared, 1,110 bitwise equal" in fragment
    assert {tag for tag, _ in Elements(render_fragment(hostile())).seen} <= {
        "div", "p", "b", "code", "table", "tr", "th", "td"
    }  # fmt: skip


def test_bokeh_is_imported_only_for_a_page() -> None:
    rooms = "trueup.doors.report, trueup.foundation.words.sentence, trueup.doors.report.terminal"
    code = f"import sys, {rooms}; print('bokeh' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_first_difference_on_each_rank_is_a_table() -> None:
    page = rendered(ranks)
    for text in ('id="ranks"', "First on each rank", "c10d::allreduce_", "rank 0, arose on rank 1", "rank 2, cause not known"):
        assert text in page, text
    assert 'id="ranks"' not in rendered(crowded)
