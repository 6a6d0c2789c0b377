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

Patterns are those of `trueup capture --include`: globs, or regular expressions between slashes. Of several rules that match a call
the first holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueup.foundation.model import TrueupError
from trueup.recording.recorder.filters import Patterns

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SEE = "see docs/policy.md"
LARGEST = 1 << 20
"""Bytes that such a file may have."""

MOST_RULES = 1000
LEVELS = ("api", "module")
DTYPES = ("float32", "float64", "bfloat16")
DEVICES = ("cpu",)
PHASES = ("forward", "backward", "optimizer")
KEYS = ("scope", "op", "level", "phase", "dtype", "device", "deterministic", "returns")
RETURNS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class PolicyRule:
    """One rule: which calls, and how they are to be executed."""

    number: int
    """Place in the file, from 1."""
    level: str = "api"
    scope: str | None = None
    op: str | None = None
    phase: str | None = None
    """``forward``, ``backward`` or ``optimizer``; None is forward and backward."""
    dtype: str | None = None
    device: str | None = None
    deterministic: bool = False
    returns: str | None = None
    """Dtype of a module's floating results, where what they would have been cannot be told."""

    @property
    def moves(self) -> bool:
        """Whether tensors are cast or copied to another device."""
        return self.dtype is not None or self.device is not None

    @property
    def calls(self) -> str:
        """Say which calls: ``torch.nn.functional.linear in encoder.*``, ``module encoder.*``."""
        if self.level == "module":
            return " ".join(word for word in ("module", self.scope, f"({self.op})" if self.op else "") if word)
        return (self.op or "all functions") + ("" if self.scope is None else f" in {self.scope or 'no module'}")

    @property
    def change(self) -> str:
        """Say what is done to them: ``float32 on cpu, backward only``."""
        words = [" on ".join(w for w in (self.dtype, self.device) if w), "deterministic" if self.deterministic else ""]
        only = {None: "", "optimizer": "in the optimizer"}.get(self.phase, f"{self.phase} only")
        return ", ".join(word for word in (*words, only) if word)

    def __str__(self) -> str:
        return f"rule {self.number} ({self.calls}: {self.change})"

    def matcher(self) -> Callable[[str, str], bool]:
        """Return a function of scope and operator that tells whether the rule is for a call of its level."""
        scope, op = (None if p is None else Patterns([p]) for p in (self.scope, self.op))
        return lambda at, name: (scope is None or scope.match_name(at)) and (op is None or op.match_name(name))


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of a file, in order."""

    path: str
    text: str
    rules: tuple[PolicyRule, ...]


def load(path: str | Path) -> Policy:
    """Read a policy from a TOML file.

    Raises:
        TrueupError: there is no such file, or it is no policy.
    """
    file = Path(path)
    try:
        if not file.is_file():
            got = "a directory" if file.is_dir() else "something else than a file" if file.exists() else "nothing"
            raise TrueupError(_message(str(file), "", "a policy file", got))
        with file.open("rb") as stream:
            content = stream.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise TrueupError(_message(str(file), "", f"at most {LARGEST} bytes", f"{file.stat().st_size}; is it the right file?"))
        text = content.decode()
    except (UnicodeDecodeError, OSError) as error:
        said = error.strerror if isinstance(error, OSError) else f"bytes that are no UTF-8 ({error.reason} at byte {error.start})"
        raise TrueupError(_message(str(file), "", "a text file in TOML", said or str(error))) from None
    return parse(text, str(file))


def parse(text: str, name: str) -> Policy:
    """Read a policy from the text of a file of that name.

    Raises:
        TrueupError: it is none.
    """
    try:
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise TrueupError(_message(name, "", "TOML", str(error) or "too much nesting")) from None
    try:
        for key in content:
            if key != "rule":
                raise _Wrong(str(key), "tables headed [[rule]]", f"the key {key!r}")
        tables = content.get("rule", [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            got = "[rule] with single brackets" if isinstance(tables, dict) else _short(tables)
            raise _Wrong("rule", "tables headed [[rule]]", got)
        if not 0 < len(tables) <= MOST_RULES:
            raise _Wrong("rule", f"one to {MOST_RULES} rules", str(len(tables) or "none: it would change nothing"))
        return Policy(name, text, tuple(_rule(table, n) for n, table in enumerate(tables, 1)))
    except _Wrong as wrong:
        raise TrueupError(_message(name, wrong.where, wrong.expected, wrong.got)) from None


class _Wrong(Exception):
    def __init__(self, where: str, expected: str, got: str) -> None:
        super().__init__(where)
        self.where, self.expected, self.got = where, expected, got


def _message(name: str, where: str, expected: str, got: str) -> str:
    place = f"{name}, {where}" if where else name
    return (
        "The policy cannot be used; nothing was run with it.\n"
        f"  where:    {place}\n  expected: {expected}\n  got:      {got}\n  next:     {SEE}"
    )


def _rule(table: dict[str, Any], number: int) -> PolicyRule:
    at = f"rule {number}"
    for key in table:
        if key not in KEYS:
            raise _Wrong(f"{at}, key {key[:60]!r}", f"one of {', '.join(KEYS)}", f"{key[:60]!r}")
    rule = PolicyRule(
        number=number, level=_word(table, at, "level", LEVELS) or "api",
        scope=_pattern(table, at, "scope"), op=_pattern(table, at, "op"), phase=_word(table, at, "phase", PHASES),
        dtype=_word(table, at, "dtype", DTYPES), device=_word(table, at, "device", DEVICES),
        deterministic=_flag(table, at, "deterministic"), returns=_word(table, at, "returns", RETURNS),
    )  # fmt: skip
    if not (rule.moves or rule.deterministic):
        raise _Wrong(at, f"dtype ({', '.join(DTYPES)}), device (cpu) or deterministic = true", "a rule that changes nothing")
    if rule.scope is None and rule.op is None:
        raise _Wrong(at, "a scope or an op: a rule for every call would leave nothing of the run", "neither")
    if rule.op is not None and "::" in rule.op:
        raise _Wrong(
            f"{at}, key 'op'", "a function (torch.nn.functional.linear) or, with level = \"module\", a class of modules (Linear)",
            f"{rule.op!r}, an operator of level aten, which no rule reaches: name the function around it, as `trueup compare` does",
        )  # fmt: skip
    if rule.returns is not None and not (rule.level == "module" and rule.dtype):
        expected = "a rule with level = \"module\" and a dtype: what a function returns is known"
        raise _Wrong(f"{at}, key 'returns'", expected, "another rule")
    if rule.phase == "optimizer" and rule.level == "module":
        raise _Wrong(f"{at}, key 'phase'", "forward or backward for a module: no optimizer calls one", "'optimizer'")
    return rule


def _word(table: dict[str, Any], at: str, key: str, known: tuple[str, ...]) -> str | None:
    value = table.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or value not in known:
        also = "; leave it out for both" if key == "phase" else ""
        more = " (an activation that is recomputed belongs to forward)" if value == "recompute" else ""
        raise _Wrong(f"{at}, key {key!r}", f"one of {', '.join(known)}{also}", f"{_short(value)}{more}")
    return value


def _flag(table: dict[str, Any], at: str, key: str) -> bool:
    value = table.get(key, False)
    if not isinstance(value, bool):
        raise _Wrong(f"{at}, key {key!r}", "true or false", _short(value))
    return value


def _pattern(table: dict[str, Any], at: str, key: str) -> str | None:
    value = table.get(key)
    if value is None:
        return None
    where = f"{at}, key {key!r}"
    if not isinstance(value, str) or (key == "op" and not value):
        raise _Wrong(where, "a glob or a regular expression between slashes, as text", _short(value))
    try:
        Patterns([value])
    except TrueupError as error:
        raise _Wrong(where, "a glob or a regular expression between slashes", str(error)) from None
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
