"""``index.html``: one file that needs no network, for a browser.

Everything captured is foreign: Jinja escapes it, data blocks escape ``<``, control characters are spelled out, and a
content security policy allows exactly the scripts that were put in, by their hash, and no connection at all.

Bokeh's JavaScript is compressed in the page, and becomes script elements when it opens: the policy knows their hashes, too.

The table of calls travels inside the page, one compressed column each, repeated text stored once. A column is ``{"kind": "int32" |
"float32" | "text", "data": base64(zlib(little-endian numbers))}``; a text column's numbers point into its ``values``. 100,000 calls
take about 1 MB. The module tree is built from the same table, so it needs no model: ``a.b.c`` stands below ``a.b``.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trueup.analysis.remedy.advice import next_command, policy_to_try
from trueup.doors.report import charts, result_view
from trueup.doors.report.charts import diagram, edge_rows
from trueup.foundation.model import PHASES, Evidence, Finding, Result
from trueup.foundation.words.answers import answers
from trueup.foundation.words.sentence import HEADS, evidence, operators, ranks_alike
from trueup.foundation.words.wording import clean, counted, number, one_line, sci, times

if TYPE_CHECKING:
    from trueup.analysis.recipes.recipe import RecipeResult


STATIC_ROWS = 100  # how many deviating calls the page also holds as plain rows, for print and for browsers without scripts
UNMATCHED_ROWS = 500
CULPRIT_CARDS = 20
SCRIPTS = ("page.js", "charts.js", "calls.js", "graphs.js")
CURVES = {"loss": result_view.loss_rows, "norm": result_view.norm_rows}
STATES = (
    ("compared", "compared"), ("equal", "bitwise equal"), ("agrees", "agree"),
    ("inherited", "of them by what their inputs explain"), ("deviates", "deviate"),
    ("incomparable", "not comparable"), ("only_baseline", "only in the baseline"), ("only_candidate", "only in the candidate"),
)  # fmt: skip
"""The counts of a result, and what they are called."""
PASSES = "passes on"
"""State, on the page, of a call that deviates by no more than its inputs explain."""
FLOOR, CEILING = -10.0, 1.0  # ends of the error scale, as powers of ten


def render_page(result: Result, recipe: RecipeResult | None = None) -> str:
    """Return the text of index.html; with the steps of a recipe that was followed, if there is one."""
    interactive = charts.available()
    shown = dataclasses.replace(result, calls=told_apart(result.calls))
    blocks = _blocks(shown, interactive=interactive)
    return page(
        "page.html.j2",
        [ours(name) for name in SCRIPTS],
        charts.library() if interactive else (),
        **_facts(shown),
        **_page_facts(shown),
        interactive=interactive,
        drawn=set(blocks),
        blocks={name: embedded(data if name == "calls-data" else drawn(data)) for name, data in blocks.items()},
        recipe=recipe,
        tone=result.verdict,
    )


def render_fragment(result: Result) -> str:
    """Return the verdict as a fragment of HTML for a notebook, without scripts."""
    return environment().get_template("fragment.html.j2").render(_facts(result))


def page(template: str, scripts: Sequence[str], library: Sequence[str] = (), **content: Any) -> str:
    """Return the text of a page that needs no network and lets no script run but these; ``library`` travels compressed."""
    with ThreadPoolExecutor(max(1, len(library))) as pool:  # zlib needs no interpreter
        packed = [pool.submit(_packed, script) for script in library]
        style, marked = Markup(ours("style.css")), [Markup(script) for script in scripts]

        def parts() -> Markup:  # asked for last
            return embedded([one.result() for one in packed])

        content |= {"style": style, "scripts": marked, "library": parts if library else None}
        return environment().get_template(template).render(content, policy=policy([*library, *scripts]))


def embedded(data: Any) -> Markup:
    """Write data as strict JSON that cannot end the script element around it, nor open a comment in it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def drawn(model: Mapping[str, Any]) -> str:
    """Compress what a chart is drawn from; the page unpacks it."""
    return _squeeze(json.dumps(model, allow_nan=False, separators=(",", ":")).encode())


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
        "policies": result_view.policy_lines_of(result),
        "culprits": [_card(finding, n) for n, finding in enumerate(result.culprits[:CULPRIT_CARDS])],
        "unmatched": [(finding, result_view.neighbour_lines(finding)) for finding in result.unmatched[:UNMATCHED_ROWS]],
        "static_calls": [row for row in deviating if row.get("state") not in ("equal", "agrees")],
        "methods": result_view.METHODS,
        "states": STATES,
        "alike_ranks": ranks_alike(result.occurrences),
    }


def _blocks(result: Result, *, interactive: bool) -> dict[str, Any]:
    """Return what the page's scripts read: the calls; and with Bokeh charts and the table's layout."""
    made: dict[str, Any] = {"calls-data": pack(result.calls)}
    if not interactive:
        return made
    made |= {
        "calls-model": charts.calls_table(max(result.baseline.ranks, result.candidate.ranks) > 1),
        "overview-model": charts.overview(),
    }
    losses, norms = result_view.loss_rows(result), result_view.norm_rows(result)
    for name, label, rows in (("loss", "loss", losses), ("norm", "gradient norm", norms)):
        if rows:
            made[f"{name}-model"] = charts.curves(label, rows)
            if result_view.coincide(rows):
                made[f"{name}-difference-model"] = charts.difference(label, rows)
    for n, finding in enumerate(result.culprits[:CULPRIT_CARDS]):
        for k, spread in enumerate(finding.evidence.histograms if finding.evidence else ()):
            made[f"histogram-{n}-{k}-model"] = charts.histogram(spread)
    return made


def _page_facts(result: Result) -> dict[str, Any]:
    """Return what the page shows and a notebook does not."""
    environment = result_view.environment_rows(result)
    step = result.culprits[0].step if result.culprits else None  # later steps deviate everywhere: they tell nothing
    return {
        "said": answers(result),
        "settings": [one for one in result.settings if one.severity != "cannot"],
        "settings_aside": [one for one in result.settings if one.severity == "cannot"],
        "tally": _tally(result),
        "steps": result_view.step_lines(result),
        "sameness": {name: result_view.sameness(rows(result)) for name, rows in CURVES.items()},
        "norm_remarks": result_view.norm_remarks(result),
        "loss_remark": result_view.loss_remark(result),
        "tree": module_tree(result.matched if step is None else result.matched.filter(pc.equal(result.matched["step"], step))),
        "tree_step": step,
        "differing": [row for row in environment if row[3]],
        "alike": [row for row in environment if not row[3]],
        "several_ranks": max(result.baseline.ranks, result.candidate.ranks) > 1,
    }


def _tally(result: Result) -> list[tuple[str, str, int]]:
    """Count calls as ``(state, what it is called, how many)``, those apart that only pass an error on."""
    passing = pc.sum(pc.equal(result.calls["state"], PASSES)).as_py() or 0
    held = result.counts | {PASSES: passing, "deviates": max(0, result.counts.get("deviates", 0) - passing)}
    named = [(state, label, held.get(state, 0)) for state, label in STATES]
    place = next(n for n, (state, *_) in enumerate(named) if state == "deviates")
    named.insert(place + 1, (PASSES, "pass on what they got", passing))
    return [one for one in named if one[2] or one[0] in ("compared", "equal", "deviates")]


def told_apart(calls: pa.Table) -> pa.Table:
    """Return a table of calls whose state says of a call that its inputs explain (below 1 x) that it passes on what it got."""
    if not {"state", "role", "ratio"} <= set(calls.column_names):
        return calls
    state, role = (pc.fill_null(calls[name].cast(pa.string()), "") for name in ("state", "role"))
    explained = pc.fill_null(pc.less(calls["ratio"].cast(pa.float64()), 1.0), fill_value=False)
    passing = pc.and_(pc.and_(pc.equal(state, "deviates"), pc.not_equal(role, "culprit")), explained)
    told = pc.if_else(passing, PASSES, calls["state"].cast(pa.string()))
    return calls.set_column(calls.column_names.index("state"), "state", told)


def _card(finding: Finding, n: int = 0) -> dict[str, Any]:
    evidence_of = finding.evidence or Evidence()
    scale = [("inputs", finding.error_in), ("expected", finding.expected), ("outputs", finding.error_out)]
    return {
        "finding": finding,
        "operators": operators(finding),
        "evidence": evidence(finding),
        "slots": result_view.slot_rows(finding),
        "scale": [(name, sci(error), _position(error)) for name, error in scale],
        "ratio": times(finding.ratio) if math.isfinite(finding.expected) else "",
        "number": n,
        "evidence_of": evidence_of,
        "histograms": [one_line(spread.slot) for spread in evidence_of.histograms],
        "worst": result_view.worst_lines(finding),
        "producers": result_view.producers(finding),
        "diagram": diagram(evidence_of, (finding.error_in, finding.error_out)),
        "edges": edge_rows(evidence_of),
    }


def _position(error: float) -> int:
    """Place an error on the logarithmic scale, in percent."""
    if not math.isfinite(error):
        return 100
    if error <= 0:
        return 0
    return round(100 * min(1.0, max(0.0, (math.log10(error) - FLOOR) / (CEILING - FLOOR))))


def at_the_margin(*texts: str) -> list[str]:
    """Return lines of a script without the indentation that all of them share, for which a narrow page has no room."""
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    shared = min((line[: len(line) - len(line.lstrip())] for line in lines), key=len, default="")
    return ["\n".join(line.removeprefix(shared) for line in text.splitlines()) for text in texts]


def ours(name: str) -> str:
    """Return the text of a file of the page."""
    return resources.files("trueup.doors.report").joinpath("template", name).read_text(encoding="utf-8")


@cache
def environment() -> Environment:
    """Return what renders a template: foreign text is escaped, its control characters spelled out. It keeps what it compiled."""
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


ROWS = 250_000  # how many calls a page holds; the rest stays in calls.parquet and the page says so

TEXTS = ("phase", "level", "scope", "op", "state", "role", "rule", "source", "paired", "scope_baseline", "op_baseline")
WHOLE = ("rank", "step", "ordinal", "seq_baseline", "seq_candidate")
ERRORS = ("error_in", "error_out", "expected", "ratio")
ROLES = ("culprit", "victim", "inherited")
RANKED = ("deviates", PASSES, "incomparable", "only baseline", "only candidate", "agrees", "equal")


def pack(calls: pa.Table, limit: int = ROWS) -> dict[str, Any]:
    """Pack the ``limit`` calls of ``Result.calls`` that matter most: culprits, then deviating calls, then the others, each in
    order of execution; a missing column is packed as empty. JSON-ready ``{"rows": kept, "total": all, "columns": {name:
    column}}``."""
    ordered = important_first(calls).slice(0, limit)
    columns: dict[str, Any] = {name: _text(_column(ordered, name, pa.string())) for name in TEXTS}
    for name in WHOLE:
        columns[name] = _numbers(_column(ordered, name, pa.int64()), "int32", -1)
    for name in ERRORS:
        columns[name] = _numbers(_column(ordered, name, pa.float64()), "float32", float("nan"))
    return {"rows": ordered.num_rows, "total": calls.num_rows, "columns": columns}


def important_first(calls: pa.Table) -> pa.Table:
    """Sort calls: culprits, victims, deviating, not comparable, of one run, agreeing, equal; each in order of execution."""
    keys = {
        "by_role": _rank(_column(calls, "role", pa.string()), ROLES),
        "by_state": _rank(_column(calls, "state", pa.string()), RANKED),
        "by_step": _column(calls, "step", pa.int64()),
        "by_seq": _column(calls, "seq_candidate", pa.int64()),
        "by_rank": _column(calls, "rank", pa.int64()),
    }
    return calls.take(pc.sort_indices(pa.table(keys), [(name, "ascending") for name in keys]))


def _rank(column: pa.ChunkedArray, order: tuple[str, ...]) -> pa.ChunkedArray:
    return pc.fill_null(pc.index_in(column, pa.array(order)), len(order))


def _column(table: pa.Table, name: str, kind: pa.DataType) -> pa.ChunkedArray:
    if name not in table.column_names:
        return pa.chunked_array([pa.nulls(table.num_rows, kind)])
    return pc.cast(table[name], kind)


def _text(column: pa.ChunkedArray) -> dict[str, Any]:
    encoded = pc.fill_null(column, "").combine_chunks().dictionary_encode()
    codes = np.asarray(encoded.indices, dtype="<i4")
    return {"kind": "text", "data": _squeeze(codes.tobytes()), "values": [one_line(v) for v in encoded.dictionary.to_pylist()]}


def _numbers(column: pa.ChunkedArray, kind: str, absent: float) -> dict[str, Any]:
    with np.errstate(over="ignore"):
        values = pc.fill_null(column, absent).to_numpy().astype(np.dtype(kind).newbyteorder("<"))
    return {"kind": kind, "data": _squeeze(values.tobytes())}


@cache
def _packed(script: str) -> str:
    """Compress a script of the library: the same for every page of a process."""
    return _squeeze(script.encode())


def _squeeze(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content, 6)).decode("ascii")


NODES = 2500  # most nodes shown; of a larger tree the upper levels
STEPS = (1e-4, 1e-2)  # relative errors from which a deviating cell is coloured more strongly
OUTSIDE = "outside any module"


@dataclass
class Cell:
    """The calls of one phase below a node."""

    calls: int = 0
    deviates: int = 0
    incomparable: int = 0
    error: float = 0.0  # largest relative L2 error among their outputs, of those that deviate where any does

    def add(self, other: Cell) -> None:
        """Take another cell's calls in."""
        self.calls += other.calls
        self.incomparable += other.incomparable
        if bool(other.deviates) == bool(self.deviates):
            self.error = max(self.error, other.error)
        elif other.deviates:
            self.error = other.error
        self.deviates += other.deviates

    @property
    def tone(self) -> str:
        """Name of its colour: calm, unsure, or one of three for what deviates."""
        if self.deviates:
            return f"bad-{1 + sum(self.error >= limit for limit in STEPS)}"
        return "unsure" if self.incomparable else "calm"

    @property
    def text(self) -> str:
        """What stands in it."""
        if self.deviates:
            return sci(self.error)
        return "not comparable" if self.incomparable else "equal" if self.error == 0 else sci(self.error)


@dataclass
class Module:
    """A scope with what lies below it."""

    name: str
    path: str
    cells: dict[str, Cell] = field(default_factory=dict)
    children: dict[str, Module] = field(default_factory=dict)
    culprits: int = 0
    is_open: bool = False

    @property
    def deviates(self) -> int:
        """Deviating calls below it."""
        return sum(cell.deviates for cell in self.cells.values())

    @property
    def calls(self) -> int:
        """Calls below it."""
        return sum(cell.calls for cell in self.cells.values())


@dataclass(frozen=True)
class Modules:
    """The whole tree, the phases that occur, and how many nodes were left out."""

    root: Module
    phases: tuple[str, ...]
    omitted: int


def module_tree(calls: pa.Table) -> Modules:
    """Add up the calls of every scope and of the scopes below it."""
    root = Module("all calls", "", is_open=True)
    seen: set[str] = set()
    for entry in _grouped(calls):
        cell = Cell(entry["calls"], 0, 0, entry["error"])
        cell.deviates = cell.calls if entry["state"] in ("deviates", PASSES) else 0
        cell.incomparable = cell.calls if entry["state"] == "incomparable" else 0
        seen.add(entry["phase"])
        for node in _path(root, entry["scope"]):
            node.cells.setdefault(entry["phase"], Cell()).add(cell)
            node.culprits += entry["calls"] if entry["role"] == "culprit" else 0
    _open_culprits(root)
    known = [phase for phase in PHASES if phase in seen]
    return Modules(root, (*known, *sorted(seen - set(known))), _cut(root))


def _grouped(calls: pa.Table) -> Iterator[dict[str, Any]]:
    if not calls.num_rows:
        return
    names = ("scope", "phase", "state", "role")
    table = pa.table({name: pc.fill_null(calls[name].cast(pa.string()), "") for name in names} | {"error": calls["error_out"]})
    grouped = table.group_by(list(names)).aggregate([("error", "max"), ([], "count_all")])
    for row in grouped.to_pylist():
        error = row["error_max"]
        yield {
            "scope": row["scope"], "phase": row["phase"], "state": row["state"], "role": row["role"],
            "calls": row["count_all"], "error": math.inf if error is None or math.isnan(error) else error,
        }  # fmt: skip


def _path(root: Module, scope: str) -> list[Module]:
    """Return the nodes from the root down to a scope, made where they are not there yet."""
    nodes = [root]
    parts = scope.split(".") if scope else [""]
    for k, part in enumerate(parts):
        path = ".".join(parts[: k + 1])
        made = nodes[-1].children.setdefault(part, Module(one_line(part) or OUTSIDE, path))
        nodes.append(made)
    return nodes


def _open_culprits(node: Module) -> None:
    """Open the way to each culprit, and nodes with a single child on the way."""
    for child in node.children.values():
        child.is_open = child.culprits > 0 or (node.is_open and len(node.children) == 1)
        _open_culprits(child)


def _cut(root: Module) -> int:
    """Drop the deepest levels until the tree is small enough; return how many nodes went."""
    levels = [[root]]
    while levels[-1]:
        levels.append([child for node in levels[-1] for child in node.children.values()])
    total = kept = 0
    last = None
    for depth, nodes in enumerate(levels):
        total += len(nodes)
        if last is None and total > NODES and depth:
            last = depth - 1
        kept += len(nodes) if last is None else 0
    if last is not None:
        for node in levels[last]:
            node.children = {}
    return total - kept
