"""What the user wants executed in another way: `policy.toml`.

    [[rule]]                                   # a function, wherever it is called
    op = "torch.nn.functional.softmax"
    dtype = "float32"

    [[rule]]                                   # a module, forward and backward, on the CPU
    level = "module"
    scope = "encoder.layers.3.attn"
    device = "cpu"

    [[rule]]                                   # the backward alone
    scope = "encoder.*"
    op = "torch.nn.functional.embedding"
    phase = "backward"
    deterministic = true

    [[rule]]                                   # a setting, as another run has it
    level = "optimizer"
    op = "AdamW"
    set = { lr = 0.001 }

Patterns are those of `trueup capture --include`: globs, or regular expressions between slashes. Of several rules that match a call
the first holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from trueup.foundation import toml
from trueup.foundation.model import TrueupError
from trueup.recording.recorder.options import Patterns

SEE = "see docs/policy.md"
MOST_RULES = 1000
Dtype = Literal["float32", "float64", "bfloat16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
DEVICES = ("cpu",)
SCALARS = (bool, int, float, str)


class Rule(toml.Table, eq=False):
    """A table ``[[rule]]``: which calls, and how they are to be executed."""

    level: Literal["api", "module", "optimizer", "amp"] = "api"
    scope: str | None = None
    op: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    phase: Literal["forward", "backward", "optimizer"] | None = None
    """None is forward and backward; an activation that is recomputed belongs to forward."""
    dtype: Dtype | None = None
    device: Literal["cpu"] | None = None
    deterministic: bool = False
    returns: Literal["float16", "bfloat16", "float32", "float64"] | None = None
    """Dtype of the floating results, where it is not to be the one that they would have had, or that is not known (a module's)."""
    set: dict[str, Any] | None = None
    """Values of a module's attributes, a function's arguments, of GradScaler and autocast (``amp``), or an optimizer's settings;
    these may be ``[[0, 0.1], [5, 0.05]]``: from which step on."""

    def __post_init__(self) -> None:
        for pattern in (self.scope, self.op):
            _ = None if pattern is None else _patterns(pattern)
        if not (self.moves or self.deterministic or self.set):
            raise ValueError(
                f"it changes nothing: expected dtype ({', '.join(DTYPES)}), device (cpu), deterministic = true or set"
            )
        self._check_values()
        if self.scope is None and self.op is None:
            raise ValueError("it has neither a scope nor an op: a rule for every call would leave nothing of the run")
        if self.op is not None and "::" in self.op:
            raise ValueError(
                f"op {self.op!r} is an operator of level aten, which no rule reaches: name the function around it, as `trueup "
                'compare` does (torch.nn.functional.linear), or, with level = "module", a class of modules (Linear)'
            )
        if self.returns is not None and not (self.level in ("api", "module") and self.dtype):
            raise ValueError("returns is for a rule with a dtype, of functions or modules")
        if self.phase == "optimizer" and self.level == "module":
            raise ValueError("a module has no phase 'optimizer': no optimizer calls one; expected forward or backward")

    def _check_values(self) -> None:
        if self.level in ("optimizer", "amp") and not self.set:
            raise ValueError(f'level = "{self.level}" is for a rule with set: an optimizer\'s functions have phase = "optimizer"')
        if self.set and (self.moves or self.deterministic or self.phase or self.returns):
            raise ValueError("set stands alone: dtype, device, deterministic, phase and returns belong into a rule of their own")
        for name, value in (self.set or {}).items():
            plain = [value] if isinstance(value, SCALARS) else value
            if self.level == "optimizer" and not isinstance(value, SCALARS):
                good = bool(value) and isinstance(value, list) and all(map(_is_of_a_step, value))
            else:
                good = isinstance(plain, list) and all(isinstance(one, SCALARS) for one in plain)
            if not good:
                wanted = "a number, a text, true, false" + (
                    ", or pairs of a step and a value" if self.level == "optimizer" else ", or a list of them"
                )
                raise ValueError(f"set.{name}: expected {wanted}")

    @property
    def moves(self) -> bool:
        """Whether tensors are cast or copied to another device."""
        return self.dtype is not None or self.device is not None

    @property
    def calls(self) -> str:
        """Say which calls: ``torch.nn.functional.linear in encoder.*``, ``module encoder.*``."""
        if self.level == "module":
            return " ".join(word for word in ("module", self.scope, f"({self.op})" if self.op else "") if word)
        if self.level in ("optimizer", "amp"):
            return " ".join(word for word in (self.level, self.op, self.scope) if word)
        return (self.op or "all functions") + ("" if self.scope is None else f" in {self.scope or 'no module'}")

    @property
    def change(self) -> str:
        """Say what is done to them: ``float32 on cpu, backward only``."""
        values = [f"{name} = {_shown(value)}" for name, value in (self.set or {}).items()]
        words = [*values, " on ".join(w for w in (self.dtype, self.device) if w), "deterministic" if self.deterministic else ""]
        only = {None: "", "optimizer": "in the optimizer"}.get(self.phase, f"{self.phase} only")
        return ", ".join(word for word in (*words, only) if word)

    def is_hidden_by(self, other: Rule) -> bool:
        """Tell whether another rule before this one, for the same calls, leaves it nothing to do."""
        same = all(getattr(self, part) == getattr(other, part) for part in ("level", "scope", "op", "phase"))
        return same and bool(self.set) == bool(other.set) and set(self.set or ()) <= set(other.set or ())

    def matcher(self) -> Callable[[str, str], bool]:
        """Return a function of scope and operator that tells whether the rule is for a call of its level."""
        scope, op = (None if p is None else _patterns(p) for p in (self.scope, self.op))
        return lambda at, name: (scope is None or scope.match_name(at)) and (op is None or op.match_name(name))


class PolicyRule(Rule, kw_only=True, eq=False):
    """One rule of a file, with its place there, from 1."""

    number: int

    def __str__(self) -> str:
        return f"rule {self.number} ({self.calls}: {self.change})"


class _Rules(toml.Table):
    rule: tuple[Rule, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.rule) <= MOST_RULES:
            raise ValueError(f"{len(self.rule) or 'no'} rules, expected one to {MOST_RULES}")


def _is_of_a_step(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int and isinstance(pair[1], SCALARS)


def _shown(value: Any) -> str:
    """Write a value of ``set``; of one for each of many steps the first."""
    steps = isinstance(value, list) and bool(value) and all(map(_is_of_a_step, value))
    return f"{value[0][1]} and what it is in {len(value) - 1} later steps" if steps else str(value)


def _patterns(text: str) -> Patterns:
    try:
        return Patterns([text])
    except TrueupError as error:
        raise ValueError(str(error)) from None


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of a file, in order."""

    path: str
    text: str
    rules: tuple[PolicyRule, ...]


def exactly(*names: str) -> str:
    """Return a pattern that matches these names alone."""
    if len(names) == 1 and not re.search(r"[*?\[/]", names[0]):
        return names[0]
    return f"/^(?:{'|'.join(map(re.escape, names))})$/"


def in_toml(text: str) -> str:
    """Write a TOML string: a JSON string is one, but for the DEL that JSON leaves bare."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def load(path: str | Path) -> Policy:
    """Read a policy from a TOML file; raise `TrueupError` where there is no such file, or it is no policy."""
    file = Path(path)
    if file.exists() and not file.is_file():  # a pipe would never end
        raise _unusable(file, f"{'a directory' if file.is_dir() else 'something else than a file'}, expected a file")
    return parse(toml.text_of(file, "a policy file", SEE), str(file))


def parse(text: str, name: str) -> Policy:
    """Read a policy from the text of a file of that name; raise `TrueupError` where it is none."""
    try:
        rules = toml.checked(toml.parsed(text), _Rules).rule
    except ValueError as error:
        raise _unusable(name, str(error)) from None
    return Policy(name, text, tuple(PolicyRule(number=n, **msgspec.structs.asdict(rule)) for n, rule in enumerate(rules, 1)))


BEGINS = re.compile(r"^(?=\[\[rule\]\])", re.MULTILINE)


def laid_over(new: str, old: str) -> str:
    """Return the text of a policy with the rules of ``new``, then those of ``old`` that are left something to do: of several rules
    for a call the first holds. Raises TrueupError where a text is no policy."""
    first, kept = parse(new, "new rules").rules, parse(old, "old rules").rules
    texts = [text for text in BEGINS.split(old) if text.startswith("[[rule]]")]
    if len(texts) == len(kept):  # else written in another way: all of them stay
        left = (text for text, rule in zip(texts, kept, strict=True) if not any(map(rule.is_hidden_by, first)))
        old = "\n".join(text.rstrip() + "\n" for text in left)
    return "\n".join(text.rstrip() + "\n" for text in (new, old) if text.strip())


def _unusable(name: str | Path, got: str) -> TrueupError:
    return TrueupError(
        f"The policy cannot be used; nothing was run with it.\n  where:    {name}\n  got:      {got}\n  next:     {SEE}"
    )
