"""The files of a reproducer: a test, its options, and a page that says what is expected.

Text of a capture reaches the page alone, as code spans; the test is made of an adapter's `source`, numbers and names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from trueup.foundation.words.wording import one_line, sci
from trueup.recording.execution.cases import Case

TEMPLATES = "reproducer"


def write_files(
    folder: Path, case: Case, told: Mapping[str, Any], *, device: str | None, against: str, notes: Sequence[str],
    origin: Sequence[tuple[str, str]], simulated: bool,
) -> Path:  # fmt: skip
    """Write test, options and page, and return the path of the test.

    Args:
        folder: it holds ``inputs.safetensors`` already.
        case: the call.
        told: what `trueup.recording.execution.case_errors.CaseErrors.saved` says.
        device: where it was tried; None: nowhere.
        against: the device that it is compared with.
        notes: what a reader must know beside.
        origin: where the call was recorded, as names and texts.
        simulated: whether npu is the simulated device.
    """
    name = told["name"]
    file = f"test_{name}.py"
    tried = device or (case.home if case.home != "cpu" else "npu")
    content = {
        "file": file, "name": name, "device": tried, "against": against, "headline": headline(case, told, device),
        "simulated": simulated, "random": told["random"], **{key: told[key] for key in ("title", "needs", "plugin")},
        **told["source"],
    }  # fmt: skip
    content["limits"] = [(ascii(slot), _limit(limit)) for slot, limit in told["limits"].items()]
    _render(folder / file, told["template"], content)
    _render(folder / "conftest.py", "conftest.py.j2", content | {"device": ascii(tried), "against": ascii(against)})
    measured = device if isinstance(told["device"], dict) and told["device"] else "the recorded device" if told["recorded"] else ""
    page = {
        "measured": measured, "expected": list(expectations(told, device, against)), "rows": list(_rows(told)), "notes": notes,
        "tensors": [(f"`{n}`", d, str(s)) for n, d, s in told["source"]["tensors"]],
        "origin": [(one_line(n), code(t)) for n, t in origin], "environment": list(_environment(case, told["environment"])),
    }  # fmt: skip
    _render(folder / "README.md", "README.md.j2", content | page)
    return folder / file


def headline(case: Case, told: Mapping[str, Any], device: str | None) -> str:
    """Say in one sentence what the reproducer shows, by names that were looked up and numbers."""
    phase = case.call.key.phase
    phase = phase if phase in ("forward", "backward", "optimizer", "recompute") else "forward"
    others = told["calls"] - 1
    after = "" if not others else " after another call," if others == 1 else f" after {others} other calls,"
    what = f"{told['function']}, {phase},{after}"
    worst = worst_slot(told)
    where = device if isinstance(told["device"], dict) and told["device"] else "the recorded device"
    if isinstance(told["device"], str):
        return f"{what} is not executed on {device}."
    if worst is None:
        return f"{what} as a training made it."
    slot, error = worst
    name = ascii(slot)[1:-1]
    if "form" in error:
        return f"{what} gives {name} of another form on {where}."
    if error["disagreeing"]:
        return f"{what} gives NaN, Inf or an extreme number in {name} on {where}, where there is none."
    size = error["relative"]
    many = f"{error['differing']:,} elements differ" if not error["rms"] or "differing" in told["limits"][slot] else ""
    many = many or (f"relative error {sci(size)}" if math.isfinite(size) else f"error {sci(error['rms'])} where zeros are expected")
    return f"{what} gives a wrong {name} on {where}: {many}."


def worst_slot(told: Mapping[str, Any]) -> tuple[str, Mapping[str, float]] | None:
    """Return the result that is the furthest beyond its limit, with its error; None where each is within it."""
    errors = told["device"] if isinstance(told["device"], dict) and told["device"] else told["recorded"]
    beyond = [(slot, error) for slot, error in errors.items() if excess(error, told["limits"][slot]) > 1]
    return max(beyond, key=lambda pair: excess(pair[1], told["limits"][pair[0]]), default=None)


def excess(error: Mapping[str, float], limit: Mapping[str, Any]) -> float:
    """Return how many times its limit an error is."""
    if "form" in error or error["disagreeing"]:
        return math.inf
    if "differing" in limit:
        return _over(error["differing"], limit["differing"])
    return max(_over(error[name], limit[name]) for name in ("rms", "largest"))


def _over(error: float, limit: float) -> float:
    return error / limit if limit > 0 else math.inf if error > 0 else 0.0


def expectations(told: Mapping[str, Any], device: str | None, against: str) -> Iterator[str]:
    """Yield what the test is expected to do."""
    if isinstance(told["device"], str):
        yield f"on {device} it cannot be executed: {one_line(told['device'])}"
    elif told["device"]:
        yield f"with `--device {device}` it {'fails' if worst_slot(told) else 'passes, here and now'}"
    elif told["recorded"] and worst_slot(told):
        yield "on the device of the training it fails: the recorded results are beyond the limits"
    elif told["recorded"]:
        yield f"the recorded results agree with those of {against}: it fails on a device that computes them wrong, and on no other"
    yield f"with `--device {against}` it passes"


def _rows(told: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    errors = told["device"] if isinstance(told["device"], dict) and told["device"] else told["recorded"]
    for slot, limit in told["limits"].items():
        error = errors.get(slot)
        if "differing" in limit:
            found = "" if error is None or "form" in error else f"{error['differing']:,} elements"
            yield code(slot), found, "", f"{limit['differing']:,} elements", "", cell(f"{limit['rule']}; {limit['origin']}")
            continue
        plain = error if error is not None and "form" not in error else None
        found = "another form" if error is not None and plain is None else "" if plain is None else sci(plain["rms"])
        largest = "" if plain is None else sci(plain["largest"])
        yield code(slot), found, largest, sci(limit["rms"]), sci(limit["largest"]), cell(f"{limit['rule']}; {limit['origin']}")


def _environment(case: Case, here: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    then = case.ranks.get(case.call.key.rank) or {}
    before = then.get("environment") if isinstance(then.get("environment"), dict) else {}
    assert before is not None
    for name in sorted({*map(str, before), *here}):
        yield code(name), code(str(before.get(name, ""))), code(here.get(name, ""))


def code(text: str) -> str:
    """Write foreign text as a code span of Markdown, which it cannot leave."""
    plain = one_line(text).replace("`", "'").replace("|", "¦")[:300]
    return f"`{plain}`" if plain.strip() else ""


def cell(text: str) -> str:
    """Write our own text as a cell of a table."""
    return one_line(text).replace("|", "¦")


def _limit(limit: Mapping[str, Any]) -> str:
    if "differing" in limit:
        return repr(int(limit["differing"]))
    return f"({float(limit['rms']):.3e}, {float(limit['largest']):.3e})"


def _render(path: Path, template: str, content: Mapping[str, Any]) -> None:
    text = resources.files(__package__).joinpath(TEMPLATES, template).read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=False, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    path.write_text(environment.from_string(text).render(**content), encoding="utf-8")
