"""The steps of a capture as relations look at them: what tensors hold, what calls were given, which calls were made."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from trueup.foundation.frameworks.trees import LIES, TRAINED
from trueup.foundation.model import TrueupError
from trueup.foundation.settings import modules_of
from trueup.foundation.store import Capture
from trueup.foundation.store.declared import require_records
from trueup.foundation.words.wording import counted

Key = tuple[str, str, str, str, int, str]  # level, phase, scope, op, ordinal, slot
PARAMETERS: Key = ("module", "forward", "", "parameters", 0, "param.")
"""What relations of all parameters are about, or of a class of them: they hold for layers, too, that no healthy run had."""
Called = tuple[str, str, str]  # level and phase, scope, op
LEVELS = ("module", "api")
ARGUMENTS = "arguments"
FEWEST = 3  # steps that a relation is learned from
COLUMNS = ["seq", "digest", "value", "dtype", "shape", "level", "phase", "scope", "op", "ordinal", "slot"]


@dataclass(frozen=True)
class Step:
    """What one rank did in one step."""

    number: int
    rank: int
    digests: Mapping[Key, str] = field(repr=False)  # in order of execution
    arguments: Mapping[Key, str] = field(repr=False)
    calls: tuple[Called, ...] = field(repr=False)
    tensors: Mapping[Key, tuple[str, tuple[int, ...]]] = field(repr=False)  # dtype and shape
    whole: bool = True  # False: calls may lack, or be of another step
    attributes: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)  # of parameters by their name

    @cached_property
    def counts(self) -> Counter[Called]:
        """How often each call was made."""
        return Counter(self.calls)

    @cached_property
    def sources(self) -> dict[str, list[Key]]:
        """By their digests the gradients that backward calls made."""
        found: dict[str, list[Key]] = {}
        for key, digest in self.digests.items():
            if key[1] == "backward" and key[5].startswith("grad_input"):
                found.setdefault(digest, []).append(key)
        return found

    @cached_property
    def order(self) -> dict[Key, int]:
        """The places of what is held."""
        return {key: n for n, key in enumerate((*self.digests, *self.arguments))}

    def given(self, key: Key) -> dict[str, Any]:
        """Return the arguments of the call that a tensor belongs to."""
        try:
            held = json.loads(self.arguments.get((*key[:5], ARGUMENTS), "{}"))
        except (ValueError, RecursionError):
            return {}
        return held if isinstance(held, dict) else {}


Ranks = dict[int, list[Step]]


def read_steps(capture: Capture, fewest: int) -> Ranks:
    """Read the steps of each rank; the first is left out where there are four or more. Raises TrueupError below ``fewest``."""
    require_records(capture)
    wanted = capture.steps[1:] if len(capture.steps) > FEWEST else capture.steps
    found = {rank: steps for rank in sorted(capture.ranks) if (steps := [
        step for number in wanted if (step := read_step(capture, rank, number)) is not None
    ])}  # fmt: skip
    there = min(map(len, found.values()), default=0)
    if there < fewest:
        raise TrueupError(
            f"The capture has too few steps.\n  where:    {capture.path}\n"
            f"  expected: at least {fewest} steps of levels module and api\n"
            f"  got:      {counted(there, 'step')}\n"
            "  next:     record them: trueup capture --steps 0:5 --level module --level api"
        )
    return found


def read_step(capture: Capture, rank: int, number: int, shift: int = 0) -> Step | None:
    """Read a step of a rank, None where it holds nothing; it is numbered ``shift`` more than in the capture."""
    rows: Mapping[str, Sequence[Any]] = capture.records(COLUMNS, rank=rank, step=number, level=LEVELS).to_pydict()
    digests: dict[Key, str] = {}
    arguments: dict[Key, str] = {}
    calls: dict[int, Called] = {}
    tensors: dict[Key, tuple[str, tuple[int, ...]]] = {}
    for seq, digest, value, dtype, shape, *held in zip(*(rows[name] for name in COLUMNS), strict=True):
        key: Key = tuple(held)
        calls.setdefault(seq, (f"{key[0]} {key[1]}", key[2], key[3]))
        if key[5] == ARGUMENTS and value is not None:
            arguments[key] = value
        elif digest is not None:
            digests[key] = digest
        if dtype is not None and shape is not None:
            tensors[key] = dtype, tuple(shape)
    made = tuple(calls[seq] for seq in sorted(calls))
    return Step(number + shift, rank, digests, arguments, made, tensors, attributes=attributes_of(capture, rank)) if calls else None


def attributes_of(capture: Capture, rank: int) -> dict[str, dict[str, str]]:
    """Return what parameters say of themselves, by their name: how they lie on the ranks, and whether they are trained."""
    found: dict[str, dict[str, str]] = {}
    for scope, module in modules_of(capture.ranks.get(rank, {})).items():
        for name, said in module.items():
            if name.endswith(LIES) and isinstance(said, str):
                told = {one.partition("=")[0]: one.partition("=")[2] or "True" for one in said.split()}
                found.setdefault(f"{scope}.{name.removesuffix(LIES)}", {}).update(told)
            elif name.endswith(TRAINED):
                found.setdefault(f"{scope}.{name.removesuffix(TRAINED)}", {})["requires_grad"] = str(bool(said))
    return found
