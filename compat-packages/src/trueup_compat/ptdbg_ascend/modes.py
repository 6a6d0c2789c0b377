"""The dump modes: which calls a script wants, and what is written of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trueup_compat.names import CallName
from trueup_compat.ptdbg_ascend.errors import CompareException

MODES = ("all", "list", "range", "stack", "acl", "api_list", "api_stack")
SIDES = ("all", "forward", "backward", "input", "output")
SUMMARIES = {"all": "tensor", "summary": "stats", "md5": "digest"}
"""``summary_mode``, and the detail of a native capture."""

ACL = (
    "acl dumps the kernels of one API through the device's driver, which Trueup does not do. It would need an Ascend device, CANN, "
    "torch_npu with npu.init_dump, set_dump and finalize_dump, and an acl.json (dump_config).\n"
    "  next:     mode='list' with the same scope records the API's tensors on any device, and the operators below it come with\n"
    "            trueup capture --level aten --detail tensor -- COMMAND"
)

Wanted = Callable[[CallName | None], bool]


@dataclass(frozen=True, slots=True)
class Dump:
    """What ``set_dump_switch`` or ``configure_hook`` asked for, checked."""

    mode: str = "all"
    scope: tuple[str, ...] = ()
    api_list: tuple[str, ...] = ()
    filtered: bool = True
    sides: tuple[str, ...] = ("all",)
    summary: str = "all"

    @staticmethod
    def of(
        mode: str, scope: Sequence[str], api_list: Sequence[str], filtered: bool, sides: str | Sequence[str], summary: str
    ) -> Dump:
        """Check what a script asks for.

        Raises:
            CompareException: a value is unknown, or the mode lacks its list.
        """
        if mode not in MODES:
            raise CompareException(CompareException.INVALID_DUMP_MODE, f"mode {mode!r}: expected one of {', '.join(MODES)}")
        chosen = (sides,) if isinstance(sides, str) else tuple(sides)
        if not chosen or any(side not in SIDES for side in chosen):
            raise CompareException.of_parameter(f"dump_mode {sides!r}: expected of {', '.join(SIDES)}")
        if summary not in SUMMARIES:
            expected = ", ".join(SUMMARIES)
            raise CompareException(CompareException.INVALID_SUMMARY_MODE, f"summary_mode {summary!r}: expected {expected}")
        made = Dump(mode, tuple(scope), tuple(name.lower() for name in api_list), filtered, chosen, summary)
        made._check_lists()
        return made

    def _check_lists(self) -> None:
        count = len(self.scope)
        if any(not isinstance(name, str) for name in (*self.scope, *self.api_list)):
            raise CompareException.of_parameter("scope and api_list are lists of names")
        needs = {
            "list": (count >= 1, "at least one name in scope, such as ['Functional_linear_145_backward']"),
            "range": (count == 2, "exactly two names in scope: the first and the last API"),
            "stack": (count <= 2, "at most two names in scope"),
            "acl": (count == 1, "exactly one name in scope"),
            "api_list": (bool(self.api_list), "names in api_list, such as ['relu']"),
        }
        good, expected = needs.get(self.mode, (True, ""))
        if not good:
            raise CompareException.of_parameter(f"mode {self.mode!r} expects {expected}, got {count} names")
        if self.mode == "acl":
            raise CompareException(CompareException.INVALID_DUMP_MODE, ACL)

    @property
    def detail(self) -> str:
        """Detail of the native capture."""
        return "stats" if self.mode == "stack" else SUMMARIES[self.summary]

    @property
    def stacks(self) -> bool:
        """Whether call stacks are written."""
        return self.mode in ("stack", "api_stack")

    def wanted(self) -> Wanted | None:
        """Return what tells whether a call is wanted, None where all are; made anew whenever a dump is switched on."""
        if self.mode == "list" or (self.mode == "stack" and len(self.scope) == 1):
            return lambda name: name is not None and any(is_named(name, entry) for entry in self.scope)
        if self.mode == "range" or (self.mode == "stack" and len(self.scope) == 2):
            return _Range(*self.scope)
        if self.mode == "api_list":
            return lambda name: name is not None and any(_has(name, entry) for entry in self.api_list)
        return None


def is_named(name: CallName, entry: str) -> bool:
    """Tell whether an entry of ``scope`` names a call, in whole or by its beginning: ``Functional_conv2d_1`` is not ``..._10``.

    A row's name, as ``Functional_linear_145_backward_output.0``, names its call.
    """
    ours, theirs = f"{name.text('_').replace('.', '_')}_", f"{entry.replace('.', '_')}_"
    return ours.startswith(theirs) or theirs.startswith((f"{ours}input_", f"{ours}output_", f"{ours}stack_info_"))


def _has(name: CallName, entry: str) -> bool:
    return name.kind == "Distributed" if entry == "distributed" else entry in name.text("_").lower()


class _Range:
    """All calls from the first to the last named one, in the order of execution, whenever the first is met."""

    def __init__(self, first: str, last: str) -> None:
        self._first, self._last, self._inside = first, last, False

    def __call__(self, name: CallName | None) -> bool:
        """Tell whether a call lies in the range."""
        if name is None:
            return self._inside
        self._inside = self._inside or is_named(name, self._first)
        found = self._inside
        if found and is_named(name, self._last):
            self._inside = False
        return found
