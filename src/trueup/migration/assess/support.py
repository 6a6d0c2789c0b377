"""What a device has, from the table that comes along (`npu.toml`, made by tools/npu_support.py from the vendor's own)."""

from __future__ import annotations

import functools
from typing import Literal

from trueup.foundation import toml

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


def has_kernel(operator: str, version: tuple[int, ...]) -> bool:
    """Return whether an operator has a kernel, itself or by its structured form: ``add_.Tensor`` by ``add.out``."""
    root, _, overload = operator.removeprefix("aten::").partition(".")
    plain = root.removesuffix("_") if not root.endswith("__") else root
    tail = f".{overload}" if overload else ""
    forms = (root + tail, plain + tail, f"{plain}.out", f"{plain}.{overload}_out")
    return any(name in kernels(version) for name in forms)


def numbers(version: str) -> tuple[int, ...]:
    """Return major and minor of a version: of 2.13.0+cpu 2 and 13."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])
