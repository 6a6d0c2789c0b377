"""``index.html``: one file that needs no network, for a browser.

Everything captured is foreign: Jinja escapes it, data blocks escape ``<``, control characters are spelled out, and a
content security policy allows exactly the scripts that were put in, by their hash, and no connection at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trueup.analysis.remedy.advice import next_command, policy_to_try
from trueup.doors.report import charts
from trueup.doors.report.diagram import diagram, edge_rows
from trueup.doors.report.facts import (
    METHODS,
    environment_rows,
    loss_rows,
    neighbour_lines,
    norm_remarks,
    norm_rows,
    policy_lines_of,
    producers,
    slot_rows,
    step_lines,
    worst_lines,
)
from trueup.doors.report.modules import module_tree
from trueup.doors.report.packing import important_first, pack
from trueup.foundation.model import Evidence, Finding, Result
from trueup.foundation.words.sentence import HEADS, evidence, operators
from trueup.foundation.words.wording import clean, counted, number, one_line, sci, times

if TYPE_CHECKING:
    from trueup.analysis.recipes.found import RecipeResult

STATIC_ROWS = 200
"""How many deviating calls the page also holds as plain rows, for print and for browsers without scripts."""
UNMATCHED_ROWS = 500
CULPRIT_CARDS = 20
SCRIPTS = ("page.js", "charts.js", "calls.js")
STATES = (
    ("compared", "compared"), ("equal", "bitwise equal"), ("agrees", "agree"),
    ("inherited", "of them by what their inputs explain"), ("deviates", "deviate"),
    ("incomparable", "not comparable"), ("only_baseline", "only in the baseline"), ("only_candidate", "only in the candidate"),
)  # fmt: skip
"""The counts of a result, and what they are called."""
FLOOR, CEILING = -10.0, 1.0
"""Ends of the error scale, as powers of ten."""


def render_page(result: Result, recipe: RecipeResult | None = None) -> str:
    """Return the text of index.html; with the steps of a recipe that was followed, if there is one."""
    interactive = charts.available()
    scripts = [*charts.library(), *map(ours, SCRIPTS)] if interactive else [ours("page.js")]
    blocks = _blocks(result) if interactive else {}
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            _facts(result),
            **_page_facts(result),
            interactive=interactive,
            drawn=set(blocks),
            style=Markup(ours("style.css")),
            scripts=[Markup(script) for script in scripts],
            blocks={name: embedded(data) for name, data in blocks.items()},
            policy=policy(scripts),
            recipe=recipe,
        )
    )


def render_fragment(result: Result) -> str:
    """Return the verdict as a fragment of HTML for a notebook, without scripts."""
    return environment().get_template("fragment.html.j2").render(_facts(result))


def embedded(data: Any) -> Markup:
    """Write data as strict JSON that cannot end the script element around it, nor open a comment in it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def policy(scripts: Sequence[str]) -> str:
    """Return a content security policy that allows these scripts, inline styles and data images, and nothing else."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    images = "img-src data:; font-src data:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; {images}"


def _facts(result: Result) -> dict[str, Any]:
    lines = [line.strip() for line in result.sentence.splitlines()] or [""]
    head = HEADS[result.verdict].strip()
    first, _, named = lines[0].removeprefix(head).strip().partition("  (")
    deviating = important_first(result.matched).slice(0, STATIC_ROWS).to_pylist()
    return {
        "result": result,
        "head": head,
        "first_line": first,
        "named": named.removesuffix(")"),
        "other_lines": lines[1:],
        "advice": next_command(result),
        "remedy": policy_to_try(result),
        "policies": policy_lines_of(result),
        "culprits": [_card(finding, n) for n, finding in enumerate(result.culprits[:CULPRIT_CARDS])],
        "unmatched": [(finding, neighbour_lines(finding)) for finding in result.unmatched[:UNMATCHED_ROWS]],
        "static_calls": [row for row in deviating if row.get("state") not in ("equal", "agrees")],
        "methods": METHODS,
        "states": STATES,
    }


def _blocks(result: Result) -> dict[str, Any]:
    """Return what the page's scripts read: charts, the table's layout, the calls."""
    made: dict[str, Any] = {
        "calls-data": pack(result.calls),
        "calls-model": charts.calls_table(max(result.baseline.ranks, result.candidate.ranks) > 1),
        "overview-model": charts.overview(),
    }
    for name, label, rows in (("loss", "loss", loss_rows(result)), ("norm", "gradient norm", norm_rows(result))):
        if rows:
            made[f"{name}-model"] = charts.curves(label, rows)
    for n, finding in enumerate(result.culprits[:CULPRIT_CARDS]):
        for k, spread in enumerate(finding.evidence.histograms if finding.evidence else ()):
            made[f"histogram-{n}-{k}-model"] = charts.histogram(spread)
    return made


def _page_facts(result: Result) -> dict[str, Any]:
    """Return what the page shows and a notebook does not."""
    environment = environment_rows(result)
    step = result.culprits[0].step if result.culprits else None  # later steps deviate everywhere: they tell nothing
    return {
        "steps": step_lines(result),
        "norm_remarks": norm_remarks(result),
        "tree": module_tree(result.matched if step is None else result.matched.filter(pc.equal(result.matched["step"], step))),
        "tree_step": step,
        "differing": [row for row in environment if row[3]],
        "alike": [row for row in environment if not row[3]],
        "several_ranks": max(result.baseline.ranks, result.candidate.ranks) > 1,
    }


def _card(finding: Finding, n: int = 0) -> dict[str, Any]:
    evidence_of = finding.evidence or Evidence()
    scale = [("inputs", finding.error_in), ("expected", finding.expected), ("outputs", finding.error_out)]
    return {
        "finding": finding,
        "operators": operators(finding),
        "evidence": evidence(finding),
        "slots": slot_rows(finding),
        "scale": [(name, sci(error), _position(error)) for name, error in scale],
        "ratio": times(finding.ratio) if math.isfinite(finding.expected) else "",
        "number": n,
        "evidence_of": evidence_of,
        "histograms": [one_line(spread.slot) for spread in evidence_of.histograms],
        "worst": worst_lines(finding),
        "producers": producers(finding),
        "diagram": diagram(evidence_of),
        "edges": edge_rows(evidence_of),
    }


def _position(error: float) -> int:
    """Place an error on the logarithmic scale, in percent."""
    if not math.isfinite(error):
        return 100
    if error <= 0:
        return 0
    return round(100 * min(1.0, max(0.0, (math.log10(error) - FLOOR) / (CEILING - FLOOR))))


def ours(name: str) -> str:
    """Return the text of a file of the page."""
    return resources.files("trueup.doors.report").joinpath("template", name).read_text(encoding="utf-8")


def environment() -> Environment:
    """Return what renders a template: foreign text is escaped, its control characters spelled out."""
    made = Environment(
        loader=PackageLoader("trueup.doors.report", "template"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    made.filters.update(sci=sci, number=number, counted=counted, go=_go)
    return made


def _go(filters: dict[str, Any]) -> str:
    """Write the filters that a link to the table of calls sets, as the text of an attribute."""
    return json.dumps({name: value for name, value in filters.items() if value is not None})


def _finalize(value: Any) -> Any:
    """Spell out control characters in whatever text a template shows."""
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value
