"""The page of ``trueup overflow --html``: one file that needs no network, in the style of the comparison's report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from trueup.doors.report.facts import numbers
from trueup.doors.report.html import environment, ours, policy
from trueup.foundation.model import TensorStats
from trueup.foundation.words.anomaly_sentence import HEADS, bad_numbers, counts, operators
from trueup.foundation.words.wording import number, one_line

if TYPE_CHECKING:
    from trueup.foundation.facts.anomaly import Anomaly, OverflowResult, Place, ScaleStep

CARDS = 50
STEPS = 500
"""Steps of a loss scale that are listed; the line has all."""
CURVE = 720, 120
"""Width and height of that line in pixels."""
RULE = (
    "An infinity (or a dtype's largest number, which masks are made of) is expected where every call that reads it, in forward "
    "and in backward, gives clean and finite numbers, or numbers that are healed themselves. No list of operators decides that. "
    "Who asked for an infinity (it stands among the arguments of the call) decides only whom to name where it is not healed."
)


def render_page(result: OverflowResult) -> str:
    """Return the text of index.html."""
    scripts = [ours("page.js")]
    lines = [line.strip() for line in result.sentence.splitlines()] or [""]
    head = HEADS[result.verdict].strip()
    return environment().get_template("overflow.html.j2").render(
        result=result,
        head=head,
        tone={"found": "deviates", "inconclusive": "inconclusive"}.get(result.verdict, "aligned"),
        first_line=lines[0].removeprefix(head).strip(),
        other_lines=lines[1:],
        cards=[_card(one) for one in result.anomalies[:CARDS]],
        scale=result.scale[:STEPS],
        curve=scale_curve(result.scale),
        rule=RULE,
        style=Markup(ours("style.css")),
        scripts=[Markup(script) for script in scripts],
        policy=policy(scripts),
    )  # fmt: skip


def scale_curve(history: Sequence[ScaleStep]) -> dict[str, Any] | None:
    """Lay out the loss scale of the first rank over the steps, logarithmic; None where there is no line to draw."""
    first = min((one.rank for one in history), default=0)
    mine = [one for one in history if one.rank == first and one.scale > 0 and math.isfinite(one.scale)]
    if len({one.step for one in mine}) < 2:
        return None
    powers = [math.log2(one.scale) for one in mine]
    low, high = math.floor(min(powers)), max(math.ceil(max(powers)), math.floor(min(powers)) + 1)
    width, height = CURVE
    left, last = mine[0].step, max(mine[-1].step - mine[0].step, 1)
    points = [
        (round((one.step - left) / last * width, 1), round((high - power) / (high - low) * height, 1))
        for one, power in zip(mine, powers, strict=True)
    ]
    return {
        "width": width, "height": height, "low": 2.0**low, "high": 2.0**high, "first": left, "last": mine[-1].step,
        "path": "M" + " L".join(f"{x},{y}" for x, y in points),
        "skipped": [(*point, one) for point, one in zip(points, mine, strict=True) if one.skipped][:STEPS],
    }  # fmt: skip


def _card(one: Anomaly) -> dict[str, Any]:
    return {
        "one": one,
        "operators": operators(one),
        "slots": [
            (slot, numbers(slot.stats) if isinstance(slot.stats, TensorStats) else None, counts(slot), str(slot.stats or ""))
            for slot in one.slots
        ],
        "led": [(_name(led.place), led, number(led.largest), bad_numbers(led.bad)) for led in one.led],
    }


def _name(place: Place) -> str:
    return one_line(f"{place.scope}/{place.op}" if place.scope else place.op)
