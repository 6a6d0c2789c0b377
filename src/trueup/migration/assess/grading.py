"""How well a device runs an operator, by the vendor's tables; and what to do, in the order of the porting guide."""

from __future__ import annotations

from collections.abc import Sequence

from trueup.foundation.words.wording import counted
from trueup.migration.assess.reading import Row
from trueup.migration.assess.support import Grade, has_kernel, support

DEVELOP = "develop the operator for the device"


def graded(name: str, row: Row, product: str, version: tuple[int, ...]) -> tuple[Grade, str]:
    """Grade an operator at one line. The vendor's list of kernels says that it runs; its pages of functions say in which dtypes."""
    if row.operator.startswith("c10d::"):
        return "kernel", ""  # the device's library of collectives; what it takes is a limit of the platform
    if row.kind == "custom":
        return "unknown", f"an operator of {name.partition('::')[0]}: no table has it"
    said = support().by_function.get(row.function)
    if said is not None and row.kind in ("composite", "view") and _root(name) != row.function.rpartition(".")[2]:
        said = None  # a view or a fill inside the function: what the page lacks is another operator
    if said is not None and product in said.lacking:
        return "unsupported", f"{row.function} does not run on {product}"
    if said is not None and "inference" in said.remarks:
        return "unsupported", f"{row.function} runs for inference alone"
    has = has_kernel(name, version)
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
