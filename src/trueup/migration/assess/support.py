"""What a device has, from the table that comes along (`npu.toml`, made by tools/npu_support.py from the vendor's own): how well it
runs an operator, and what to do where it does not, in the order of the porting guide.

Limits of the platform (`limits.toml`): what a run breaks, for one version of CANN.

What an assessed run wrote (`trueup.simdev.shapes`): a row for each operator at each line of the user's.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from trueup.foundation import toml
from trueup.foundation.model import UsageError
from trueup.foundation.words.wording import counted

Grade = Literal["kernel", "composite", "dtype-limited", "CPU fallback", "unsupported", "unknown"]
GRADES: tuple[Grade, ...] = ("unsupported", "CPU fallback", "dtype-limited", "unknown", "composite", "kernel")
"""From the worst on."""
PRODUCTS = ("A2", "A3", "950DT")


class Source(toml.Table):
    """Where facts are from."""

    repository: str
    commit: str
    paths: tuple[str, ...]


class Kernels(toml.Table):
    """Operators with a kernel, from one version of PyTorch on, until another if there is one."""

    since: str
    names: tuple[str, ...]
    until: str | None = None

    def has(self, version: tuple[int, ...]) -> bool:
        """Return whether a version of PyTorch is among them; one newer than all tables counts as the newest."""
        return numbers(self.since) <= version and (self.until is None or version <= numbers(self.until))


class Functions(toml.Table):
    """Functions of PyTorch of which the same is said: products without them, dtypes, remarks."""

    names: tuple[str, ...]
    lacking: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    remarks: tuple[Literal["inference", "falls-back"], ...] = ()


class Support(toml.Table):
    """The table of a device."""

    source: tuple[Source, ...]
    kernels: tuple[Kernels, ...]
    functions: tuple[Functions, ...]

    @functools.cached_property
    def by_function(self) -> dict[str, Functions]:
        """Return what is said of each function."""
        return {name: one for one in self.functions for name in one.names}


class _Support(Support, dict=True):
    pass


@functools.cache
def support() -> Support:
    """Return the table of Ascend NPUs."""
    return toml.checked(toml.packaged("trueup.migration.assess", "npu.toml"), _Support)


@functools.cache
def kernels(version: tuple[int, ...]) -> frozenset[str]:
    """Return the operators that have a kernel under a version of PyTorch: ``add.out``, without the namespace."""
    return frozenset(name for one in support().kernels if one.has(version) for name in one.names)


def has_kernel(operator: str, version: tuple[int, ...], forms: Sequence[str] = ()) -> bool:
    """Return whether an operator has a kernel, itself or by its structured form: ``add_.Tensor`` by ``add.out``; ``forms`` are
    those that PyTorch knows (``softplus_backward.grad_input``)."""
    root, _, overload = operator.removeprefix("aten::").partition(".")
    plain = root.removesuffix("_") if not root.endswith("__") else root
    tail = f".{overload}" if overload else ""
    named = (root + tail, plain + tail, f"{plain}.out", f"{plain}.{overload}_out", *forms)
    return any(name in kernels(version) for name in named)


def numbers(version: str) -> tuple[int, ...]:
    """Return major and minor of a version: of 2.13.0+cpu 2 and 13."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


DEVELOP = "develop the operator for the device"


def graded(name: str, row: Row, product: str, version: tuple[int, ...]) -> tuple[Grade, str]:
    """Grade an operator at one line. The vendor's list of kernels says that it runs; its pages of functions say in which dtypes."""
    if row.operator.startswith("c10d::"):
        return "kernel", ""  # the device's library of collectives; what it takes is a limit of the platform
    if row.kind == "untold":
        return "unknown", f"the capture does not say how it was called ({row.untold}): record with --detail tensor"
    if row.kind == "custom":
        return "unknown", f"an operator of {name.partition('::')[0]}: no table has it"
    said = support().by_function.get(row.function)
    if said is not None and row.kind in ("composite", "view") and _root(name) != row.function.rpartition(".")[2]:
        said = None  # a view or a fill inside the function: what the page lacks is another operator
    if said is not None and product in said.lacking:
        return "unsupported", f"{row.function} does not run on {product}"
    if said is not None and "inference" in said.remarks:
        return "unsupported", f"{row.function} runs for inference alone"
    has = has_kernel(name, version, row.forms)
    if not has:
        if row.kind == "view":
            return "composite", "a view, which computes nothing"
        if row.kind == "composite":
            return "composite", "PyTorch makes it of other operators"
        return "CPU fallback", "the device has no kernel: each call copies its tensors to the CPU and back"
    missing = [dtype for dtype in row.dtypes if said is not None and said.dtypes and dtype not in said.dtypes]
    if missing and not set(row.dtypes) & set(said.dtypes if said is not None else ()):
        listed = ", ".join(said.dtypes if said else ())
        return "dtype-limited", f"it gets {', '.join(missing)}; the vendor's page of {row.function} lists {listed}"
    return "kernel", ""


def _root(operator: str) -> str:
    return operator.partition("::")[2].partition(".")[0].removesuffix("_")


def remedies(name: str, grade: Grade, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return what to do, best first: an equivalent of operators that the device has, the CPU, an operator of one's own."""
    if grade == "dtype-limited":
        return ("cast its inputs to a dtype that it takes",)
    if grade == "unknown":
        return "ask its package for the device", "write it with PyTorch's functions", DEVELOP
    if grade not in ("unsupported", "CPU fallback"):
        return ()
    calls = counted(sum(row.calls for row in rows), "call")
    copies = "it is copied there and back already" if grade == "CPU fallback" else "copy its inputs there and its results back"
    return _equivalent(name, rows), f"run it on the CPU: {copies}, {calls} in these steps", DEVELOP


def _equivalent(name: str, rows: Sequence[Row]) -> str:
    if any(row.decomposes for row in rows):
        package, _, plain = name.partition("::")
        return f"PyTorch makes it of others: torch._decomp.get_decompositions([torch.ops.{package}.{plain.partition('.')[0]}])"
    return "write it with other functions of PyTorch"


NEWEST = "newest"


class Limit(toml.Table):
    """A row: what is asked of a run, and of which versions of CANN: the first that has it, the last whose documents say so, and the
    first whose documents say otherwise (``ended``). Without ``until`` it is open-ended: no source says that it ended."""

    id: str
    asks: Literal["group-size", "collective-dtype", "fixed-shapes", "dtype", "package", "dimensions"]
    says: str
    remedy: str
    source: str
    since: str | None = None
    until: str | None = None
    ended: str | None = None
    ended_source: str = ""
    allowed: tuple[int | str, ...] = ()
    forbidden: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    most: int = 0

    def holds(self, version: str) -> bool | None:
        """Return whether a version of CANN has it; None for one between the last that is known to and the first that has not."""
        if version == NEWEST:
            return self.ended is None
        if self.since is not None and _order(version) < _order(self.since):
            return False
        if self.until is None or _order(version) <= _order(self.until):
            return True
        return None if self.ended is None or _order(version) < _order(self.ended) else False

    @property
    def known(self) -> str:
        """Return where it is from, and until when it is known to hold."""
        if self.ended is not None:
            return f"{self.source}; not in CANN {self.ended} ({self.ended_source})"
        return f"{self.source}; no source says that it ended"


class _Table(toml.Table):
    limit: tuple[Limit, ...]


@dataclass(frozen=True)
class Broken:
    """A limit that a run breaks, at its lines; not ``sure`` where nobody says whether this version of CANN has it."""

    id: str
    says: str
    remedy: str
    places: tuple[str, ...]
    source: str
    sure: bool = True


@functools.cache
def limits() -> tuple[Limit, ...]:
    """Return the table."""
    return toml.checked(toml.packaged("trueup.migration.assess", "limits.toml"), _Table).limit


def check_version(version: str) -> None:
    """Raise UsageError where a text is no version of CANN, as ``5.1``, ``8.0.RC1`` and ``newest`` are."""
    if version != NEWEST and not re.fullmatch(r"\d+(\.\w+)*", version):
        raise UsageError(
            f"There is no CANN {version}.\n  expected: {NEWEST}, or a version: 5.1, 8.0.RC1\n  got:      {version}\n"
            "  next:     docs/assess.md says which versions have which limits"
        )


def broken(rows: Sequence[Row], imported: Iterable[str], version: str = NEWEST) -> tuple[Broken, ...]:
    """Return the limits of a version of CANN that a run breaks."""
    found = []
    for limit in limits():
        holds = limit.holds(version)
        if holds is False:
            continue
        if limit.asks == "package":
            hits = {name: [""] for name in imported if name in limit.names}
        else:
            hits = {}
            for row in rows:
                for value in ASKED[limit.asks](limit, row):
                    hits.setdefault(value, []).append(row.place)
        if hits:
            said = limit.says.format(found=", ".join(sorted(hits)))
            said += "" if holds else f" (whether in CANN {version}, nobody says)"
            places = dict.fromkeys(place for each in hits.values() for place in each if place)
            found.append(Broken(limit.id, said, limit.remedy, tuple(places), limit.known, holds is True))
    return tuple(found)


def _group_size(limit: Limit, row: Row) -> list[str]:
    return [str(size) for size in row.groups if size and size not in limit.allowed]


def _collective_dtype(limit: Limit, row: Row) -> list[str]:
    return [dtype for dtype in row.dtypes if dtype not in limit.allowed] if row.groups else []


def _fixed_shapes(limit: Limit, row: Row) -> list[str]:  # noqa: ARG001 - one signature for all
    return ["shape"] if row.site and row.site[0] and row.is_dynamic else []


def _dtype(limit: Limit, row: Row) -> list[str]:
    if row.operator.removeprefix("aten::").partition(".")[0] not in limit.operators:
        return []
    return [one for one in row.dtypes if (limit.allowed and one not in limit.allowed) or one in limit.forbidden]


def _dimensions(limit: Limit, row: Row) -> list[str]:
    counts = [len(re.findall(r"\d+", one)) for _, shapes in row.shapes for one in re.findall(r"\([^)]*\)", shapes)]
    return [str(count) for count in counts if count > limit.most]


ASKED: dict[str, Callable[[Limit, Row], list[str]]] = {
    "group-size": _group_size, "collective-dtype": _collective_dtype, "fixed-shapes": _fixed_shapes, "dtype": _dtype,
    "dimensions": _dimensions,
}  # fmt: skip


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


FULL = 8
"""Shapes of a row, of which the run keeps no more: whether they changed between steps cannot be told then."""


class Row(msgspec.Struct):
    """An operator at one line of the user's, as the run wrote it."""

    operator: str
    kind: Literal["kernel", "composite", "view", "custom", "untold"]
    phase: Literal["forward", "backward"]
    function: str
    dtypes: list[str]
    site: tuple[str, int, str] | None
    calls: int
    flops: int
    shapes: list[tuple[int, str]]
    why: Literal["shape", "mask", "meta"] | None
    """The shape of its result, or how many elements it writes, depends on numbers; ``meta``: PyTorch has no shapes of it."""
    decomposes: bool
    package: str = ""
    groups: list[int] = []
    forms: list[str] = []
    """Its forms that write into what they are given, of which PyTorch makes it: ``gelu.out``."""
    untold: str = ""
    """Why nobody knows what a function of a capture is made of."""

    @property
    def place(self) -> str:
        """Return the user's line, or whose backward it is."""
        if self.site is None:
            return ""
        file, line, name = self.site
        return f"{os.path.relpath(file)}:{line}" if file else f"backward of {name.removesuffix('0').removesuffix('Backward')}"

    @property
    def varies(self) -> bool:
        """Return whether its shapes in one step are others than in another."""
        steps: dict[int, set[str]] = {}
        for step, shapes in self.shapes:
            steps.setdefault(step, set()).add(shapes)
        several = list(steps.values())
        return len(self.shapes) < FULL and any(one != several[0] for one in several[1:])

    @property
    def is_dynamic(self) -> bool:
        """Return whether its shapes change, or depend on numbers."""
        return self.varies or self.why in ("shape", "mask")


class Run(msgspec.Struct):
    """What one process wrote: ``memory`` is the most bytes of its tensors, ``packages`` are those imported, with their folders."""

    steps: int
    torch: str
    rows: list[Row]
    memory: int = 0
    packages: dict[str, str] = {}
    script: str = ""
