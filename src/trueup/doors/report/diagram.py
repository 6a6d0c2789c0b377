"""The calls around a culprit, laid out in columns: producers to the left, consumers to the right, both runs in one picture.

Only places are computed here, from the numbers of nodes; text is the template's, which escapes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trueup.foundation.model import Edge, Evidence, Neighbour
from trueup.foundation.words.wording import one_line, sci, shorten

WIDTH, HEIGHT = 196, 66
GAP_X, GAP_Y = 36, 12
MARGIN = 4
NAME, LINE = 22, 27
"""Characters of the bold and of the other lines that fit into a box."""


@dataclass(frozen=True)
class Box:
    """A call, drawn."""

    x: int
    y: int
    node: Neighbour
    tone: str
    lines: tuple[str, str, str]
    title: str


@dataclass(frozen=True)
class Line:
    """A tensor, drawn from the right edge of its producer to the left edge of its consumer."""

    path: str
    tone: str
    side: str
    title: str


@dataclass(frozen=True)
class Diagram:
    """A picture of ``width`` by ``height`` pixels."""

    width: int
    height: int
    boxes: tuple[Box, ...]
    lines: tuple[Line, ...]
    headings: tuple[tuple[int, str], ...]


HEADINGS = {-2: "two before", -1: "makes an input", 0: "the call", 1: "reads an output", 2: "two after"}


def diagram(evidence: Evidence) -> Diagram | None:
    """Lay the neighbourhood out, or return None where the call has none."""
    if len(evidence.nodes) < 2:
        return None
    hops = sorted({node.hops for node in evidence.nodes})
    columns = {hop: [k for k, node in enumerate(evidence.nodes) if node.hops == hop] for hop in hops}
    tallest = max(map(len, columns.values()))
    top = 26
    height = top + tallest * (HEIGHT + GAP_Y) - GAP_Y + MARGIN
    places: dict[int, tuple[int, int]] = {}
    for place, hop in enumerate(hops):
        nodes = _untangled(columns[hop], evidence, places)
        free = (tallest - len(nodes)) * (HEIGHT + GAP_Y) // 2
        for row, k in enumerate(nodes):
            places[k] = MARGIN + place * (WIDTH + GAP_X), top + free + row * (HEIGHT + GAP_Y)
    boxes = tuple(_box(places[k], node) for k, node in enumerate(evidence.nodes))
    lines = tuple(_line(places, edge, evidence.nodes) for edge in evidence.edges)
    headings = tuple((MARGIN + place * (WIDTH + GAP_X), HEADINGS.get(hop, "")) for place, hop in enumerate(hops))
    return Diagram(2 * MARGIN + len(hops) * (WIDTH + GAP_X) - GAP_X, height, boxes, lines, headings)


def _untangled(nodes: list[int], evidence: Evidence, places: dict[int, tuple[int, int]]) -> list[int]:
    """Order a column by the mean height of what it hangs on in the columns before it, so that lines cross less."""

    def height(k: int) -> float:
        tied = [places[other][1] for e in evidence.edges for mine, other in ((e.source, e.target), (e.target, e.source))
                if mine == k and other in places]  # fmt: skip
        return sum(tied) / len(tied) if tied else math.inf

    return sorted(nodes, key=height)


def _box(place: tuple[int, int], node: Neighbour) -> Box:
    errors = f"in {_error(node.error_in)}, out {_error(node.error_out)}" if node.state else _absent(node)
    where = one_line(node.scope) or "outside any module"
    name = f"{one_line(node.op)}#{node.ordinal}"
    title = f"{where}\n{name}\n{node.phase}, step {node.step}, level {node.level}\n{errors}"
    return Box(*place, node, tone(node), (shorten(name, NAME), shorten(where, LINE), shorten(errors, LINE)), title)


def tone(node: Neighbour) -> str:
    """Name the colour of a call: culprit, deviates, incomparable, calm, or one-sided."""
    if node.hops == 0 or node.role == "culprit":
        return "culprit"
    if node.side != "both":
        return "one-sided"
    return node.state if node.state in ("deviates", "incomparable") else "calm"


def _absent(node: Neighbour) -> str:
    return f"only in the {node.side}" if node.side != "both" else "not compared"


def _line(places: dict[int, tuple[int, int]], edge: Edge, nodes: tuple[Neighbour, ...]) -> Line:
    x1, y1 = places[edge.source][0] + WIDTH, places[edge.source][1] + HEIGHT // 2
    x2, y2 = places[edge.target][0], places[edge.target][1] + HEIGHT // 2
    bend = max(24, abs(x2 - x1) // 2)
    path = f"M{x1} {y1}C{x1 + bend} {y1} {x2 - bend} {y2} {x2} {y2}"
    slots = " → ".join(map(one_line, edge.slots))
    on = "" if edge.side == "both" else f", only in the {edge.side}"
    said = f"{slots}: rel. L2 {_error(edge.error)}{on}"
    bad = nodes[edge.source].state == "deviates" and edge.error != 0
    return Line(path, "deviates" if bad else "calm", edge.side, said)


def _error(value: float) -> str:
    return "?" if math.isnan(value) else sci(value)


def edge_rows(evidence: Evidence) -> list[tuple[str, str, str, str, str]]:
    """Return the lines of the picture as text: ``(from, slot, to, slot, error)``."""
    named = [f"{one_line(node.scope)}/{one_line(node.op)}#{node.ordinal}".lstrip("/") for node in evidence.nodes]
    return [
        (
            named[edge.source], one_line(edge.slots[0]), named[edge.target], one_line(edge.slots[1]),
            _error(edge.error) + ("" if edge.side == "both" else f", only in the {edge.side}"),
        )
        for edge in evidence.edges
    ]  # fmt: skip
