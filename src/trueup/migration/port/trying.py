"""`tried`: the rules of a user, whose examples are executed before any script is read."""

from __future__ import annotations

import ast
from importlib import metadata
from pathlib import Path

from trueup.foundation.model import TrueupError
from trueup.migration.port.flow import Project
from trueup.migration.port.reading import Script
from trueup.migration.port.rules import Given, Own, OwnName, OwnRules, OwnSink, builtin, own, refused
from trueup.migration.port.writing import Writer

TARGETS = ("npu", "agnostic")


def tried(path: Path) -> Own:
    """Read a user's rules, and keep those that hold for the PyTorch that is installed.

    Raises:
        TrueupError: the file cannot be used, or a rule does not make of its example what it says.
    """
    mine = own(path)
    for rule in mine.rules.shown:
        alone = Own(rules=_alone(rule))
        for to, after in zip(TARGETS, rule.example[1:], strict=True):
            wanted = _body(builtin().target[to].fill(after))
            made = _ported(path, alone, _modules(rule), rule.example[0], to)
            if _meaning(made) != _meaning(wanted):
                raise refused(path, "TOML", f"{rule.id!r} makes of its example, for {to}: {made!r}; the rule says {wanted!r}")
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return mine
    return Own(mine.converters, mine.rules.holding(version))


def _alone(rule: OwnName | Given | OwnSink) -> OwnRules:
    if isinstance(rule, OwnName):
        return OwnRules(name=(rule,))
    return OwnRules(argument=(rule,)) if isinstance(rule, Given) else OwnRules(sink=(rule,))


def _modules(rule: OwnName | Given | OwnSink) -> list[str]:
    """Return the modules that a rule's example needs."""
    names = [rule.under] if isinstance(rule, OwnName) else [call.rpartition(".")[0] for call in rule.calls]
    return list(dict.fromkeys(["torch", *(name for name in names if name.replace(".", "").isidentifier())]))


def _ported(path: Path, mine: Own, modules: list[str], before: str, to: str) -> str:
    """Return what becomes of an example, without the imports at its head."""
    head = "".join(f"import {name}\n" for name in modules)
    try:
        script = Script(path.with_suffix(".py"), f"{head}{before}\n".encode(), "example")
    except TrueupError as error:
        raise refused(path, "TOML", f"the example {before!r} is no Python: {str(error).rpartition(': ')[2]}") from None
    writer = Writer(Project([script], mine.beside(builtin())), script, to, mine)
    return _body(writer.text.decode())


def _meaning(text: str) -> str:
    """Return what quotes and blanks do not change; of what is no Python, itself."""
    try:
        return ast.dump(ast.parse(text))
    except (SyntaxError, ValueError):
        return text


def _body(text: str) -> str:
    """Return the lines of an example behind its imports."""
    lines = text.splitlines()
    while lines and lines[0].startswith(("import ", "from ")):
        lines.pop(0)
    return "\n".join(lines)
