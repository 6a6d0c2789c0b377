"""Hyper-parameters that came along with a port: a script that was moved to more devices was given another batch, and with it a
learning rate, clipping or a schedule, which change the training whatever the devices do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trueup.foundation.settings import ABSENT, Setting, aliases
from trueup.foundation.words.setting_sentence import BASELINE, CANDIDATE, subject, value

BATCH = ("samples in a step", "global_batch_size", "batch_size")  # the surest first
RATE = "lr"
MOVED = ("devices", "world_size", "framework")
NEAR = 0.01
"""How far a learning rate may be from a rule's, relative to it."""


def came_along(settings: Sequence[Setting], baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> str:
    """Say which hyper-parameters differ between runs on other devices, or on another number of them; empty where none does."""
    if all(baseline.get(name) == candidate.get(name) for name in MOVED) and not _code_differs(settings):
        return ""
    found = {name: one for one in reversed(settings) if (name := _hyper(one))}
    batch = next((_times(found[name]) for name in BATCH if name in found), None)
    said = [_said(name, one, batch) for name, one in sorted(found.items(), key=lambda pair: _place(pair[0]))]
    return f"hyper-parameters came along with the port: {'; '.join(said)}" if said else ""


def _code_differs(settings: Sequence[Setting]) -> bool:
    return any(one.group == "code" for one in settings)


def _place(name: str) -> int:
    return (*BATCH, RATE).index(name) if name in (*BATCH, RATE) else len(BATCH) + 1


def _hyper(setting: Setting) -> str:
    """Return the name under which a setting is a hyper-parameter, empty where it is none."""
    if setting.group == "optimizer" and setting.severity == "changes" and setting.name not in ("parameters", "optimizers"):
        return setting.name
    if setting.group == "data" and setting.name in BATCH:
        return setting.name
    if setting.group == "argument" and (name := aliases().get(setting.name.rpartition(".")[2])):
        return "" if name == "seed" else name
    return ""


def _times(setting: Setting) -> float | None:
    sides = setting.baseline, setting.candidate
    if all(isinstance(one, (int, float)) and not isinstance(one, bool) and one > 0 for one in sides):
        return float(sides[1] / sides[0])
    return None


def _said(name: str, setting: Setting, batch: float | None) -> str:
    if ABSENT in (setting.baseline, setting.candidate):
        side, held = (CANDIDATE, setting.candidate) if setting.baseline == ABSENT else (BASELINE, setting.baseline)
        return f"{subject(setting)} {side} alone ({value(held)})"
    times, rule = _times(setting), ""
    if name == RATE and batch is not None and times is not None and batch != 1:
        rules = [(said, factor) for said, factor in _rules(batch) if abs(times / factor - 1) <= NEAR]
        linear = setting.baseline * batch
        rule = f", {rules[0][0]}" if rules else f"; in proportion to the batch it would be {linear:.3g}"
    often = f" ({times:.3g} times{rule})" if times is not None and times >= 1 else ""
    often = often or (f" (1/{1 / times:.3g} of it{rule})" if times else "")
    return f"{subject(setting)} {value(setting.baseline)} to {value(setting.candidate)}{often}"


def _rules(batch: float) -> Iterator[tuple[str, float]]:
    """Yield by what a learning rate follows the batch: Goyal et al. 2017; Krizhevsky 2014, and for Adam Malladi et al. 2022."""
    yield "in proportion to the batch", batch
    yield "by the root of the batch", math.sqrt(batch)
