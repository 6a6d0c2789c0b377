"""A setting that differs, in words: ``AdamW lr: 0.001 in the baseline, 0.0011 in the candidate``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from trueup.foundation.model import SetOtherwise
from trueup.foundation.settings import ABSENT, GROUP, OF_PARAMETERS, Setting
from trueup.foundation.words.wording import ELLIPSIS, one_line, shorten

BASELINE, CANDIDATE = "in the baseline", "in the candidate"
NAMED = 3  # modules, parameters or operators that are named of many
WIDTH = 60


def setting_text(setting: Setting, sides: tuple[str, str] = (BASELINE, CANDIDATE)) -> str:
    """Say what is set differently, both values, and where; ``sides`` are the words for the two."""
    since = "" if setting.step is None else f" (from step {setting.step})"
    first, second = values(setting)
    if setting.name.endswith(OF_PARAMETERS):
        return f"{subject(setting)} is {first} {sides[0]}, {second} {sides[1]}"
    return f"{subject(setting)}: {first} {sides[0]}, {second} {sides[1]}{since}"


def values(setting: Setting) -> tuple[str, str]:
    """Write both values of a setting."""
    write = partial(_state, setting) if setting.name.endswith(OF_PARAMETERS) else value
    return write(setting.baseline), write(setting.candidate)


def _state(setting: Setting, held: Any) -> str:
    """Say what a parameter is: trained or frozen, its own or another one."""
    if setting.name.endswith("requires_grad"):
        return "absent" if held == ABSENT else "frozen" if held is False else "trained"
    return "its own" if held == ABSENT else f"tied to {value(held)}"


def subject(setting: Setting) -> str:
    """Say what is set: ``AdamW lr``, ``eps of 3 LayerNorms (1.norm, 2.norm, 3.norm)``, ``seed of torch``."""
    name, kind = one_line(setting.name), one_line(setting.kind)
    if setting.name.endswith(OF_PARAMETERS):
        name = name.rpartition(".")[0]
    if setting.group == "optimizer" and setting.places and not setting.places[0].startswith(GROUP):
        count = len(setting.places)
        return f"{kind} {name} of {f'{count:,} parameters (' if count > 1 else ''}{some(setting.places)}{')' * (count > 1)}"
    if setting.group == "module" and setting.places:
        shown = some([place or "the model" for place in setting.places])
        if len(setting.places) == 1:
            return f"{name} of {shown}" + (f" ({kind})" if kind != shown else "")  # a loss is called by its class
        return f"{name} of {len(setting.places):,} {kind}s ({shown})"
    if setting.group == "optimizer" and name == "class":
        return "optimizer"
    if (setting.group, name) == ("data", "loaders"):
        return "data loaders"
    if setting.group in ("optimizer", "data", "scaler"):
        return f"{kind} {name}".strip()
    if setting.group == "seed":
        return f"seed of {name}"
    if setting.group == "random" and name in ("python", "numpy"):
        return f"state of {name}'s random generator after the first step"
    if setting.group == "code":
        return "commit of the script's repository" if name == "commit" else f"code of {name}"
    if setting.group == "parallel":
        return {"ranks": "number of ranks", "groups": "groups of ranks"}.get(name, name)
    return f"version of {name}" if setting.group == "version" else name


def some(names: Sequence[str]) -> str:
    """Name the first of some."""
    return ", ".join(map(one_line, names[:NAMED])) + (ELLIPSIS if len(names) > NAMED else "")


def settings_text(settings: Sequence[Setting]) -> str:
    """Say several in one line; what two optimizers of a class have alike once."""
    return "; ".join(dict.fromkeys(map(setting_text, settings)))


def set_otherwise(settings: Sequence[Setting]) -> tuple[SetOtherwise, ...]:
    """Say of each setting what it is and both values, as rows of a table."""
    since = ("" if one.step is None else f" (from step {one.step})" for one in settings)
    rows = (SetOtherwise(subject(one) + later, *values(one), one.severity) for one, later in zip(settings, since, strict=True))
    return tuple(dict.fromkeys(rows))


def value(held: Any) -> str:
    """Write a value as a script would."""
    return shorten(one_line(str(held)), WIDTH)
