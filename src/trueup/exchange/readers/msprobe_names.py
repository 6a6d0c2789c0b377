"""Names of entries in msprobe's files taken apart: ``Functional.linear.0.forward``, ``Module.head.Linear.parameters_grad.0``."""

from __future__ import annotations

from dataclasses import dataclass

from trueup.exchange.readers import names


@dataclass(slots=True)
class Name:
    """A name of dump.json taken apart."""

    kind: str
    """``Functional``, ``Module`` ..."""
    parts: list[str]
    index: str
    backward: bool

    def key(self) -> str:
        """Return what names the call: a module's gradients of parameters belong to its backward."""
        return ".".join((self.kind, *self.parts, self.index, "backward" if self.backward else "forward"))

    def forward(self) -> str | None:
        """Return the key of the forward call of a backward call."""
        return ".".join((self.kind, *self.parts, self.index, "forward")) if self.backward else None


def parse(name: str) -> Name | None:
    """Take a name apart: ``Functional.linear.0.forward``, ``Module.head.Linear.backward.0``, ``...parameters_grad.0``."""
    parts = name.split(".")
    if len(parts) >= 4 and parts[0] in names.MODULES and parts[-2] in ("forward", "backward", "parameters_grad"):
        return Name(parts[0], parts[1:-2], parts[-1], parts[-2] != "forward")
    if len(parts) >= 4 and parts[-1] in ("forward", "backward") and parts[-2].isdigit():
        return Name(parts[0], parts[1:-2], parts[-2], parts[-1] == "backward")
    if len(parts) >= 3 and parts[0] in names.MODULES and parts[-1] == "parameters_grad":  # versions before call indices
        return Name(parts[0], parts[1:-1], "0", True)
    return None


def key_of(name: str) -> str:
    """Return what names the call of an entry; the name itself where it is of no known form."""
    parsed = parse(name)
    return name if parsed is None else parsed.key()
