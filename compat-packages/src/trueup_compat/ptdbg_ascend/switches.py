"""The functions that a script calls: ``set_dump_path``, ``register_hook``, ``set_dump_switch`` and the others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trueup.doors.training import seed_all as seed_everything
from trueup_compat.ptdbg_ascend.dumping import Dumping
from trueup_compat.ptdbg_ascend.errors import CompareException
from trueup_compat.ptdbg_ascend.layout import FUNCTIONS, Layout, checked_path, checked_tag
from trueup_compat.ptdbg_ascend.modes import ACL, Dump
from trueup_compat.ptdbg_ascend.overflow import OverflowCheck
from trueup_compat.recording import models_of, rank_of


def acc_cmp_dump(*_: Any, **__: Any) -> None:
    """Name the dump to `register_hook`; it is not called."""


def overflow_check(*_: Any, **__: Any) -> None:
    """Name the overflow check to `register_hook`; it is not called."""


@dataclass(slots=True)
class _Script:
    """What the script of this process has asked for so far."""

    path: Path | None = None
    tag: str = "ptdbg_dump"
    dumping: Dumping | None = None
    check: OverflowCheck | None = None
    backward_input: tuple[str, ...] = ()

    def end(self) -> None:
        """End what is running."""
        for running in (self.dumping, self.check):
            if running is not None:
                running.finish()
        self.dumping = self.check = None


SCRIPT = _Script()


def seed_all(seed: int = 1234, mode: bool = False) -> None:
    """Seed Python, NumPy and PyTorch on every device; ``mode`` asks for deterministic algorithms.

    Raises:
        TrueupError: the seed is out of range.
    """
    seed_everything(seed, deterministic=bool(mode))
    torch.backends.cudnn.deterministic = True  # the tool set both whatever ``mode`` was
    torch.backends.cudnn.benchmark = False


def set_dump_path(fpath: str | os.PathLike[str] | None = None, dump_tag: str = "ptdbg_dump") -> None:
    """Say where dumps go: a folder, or the ``.pkl`` in it that version 2.3 asked for.

    Raises:
        CompareException: the path or the tag has characters that the tool refuses.
    """
    SCRIPT.path, SCRIPT.tag = checked_path(fpath), checked_tag(dump_tag)


def register_hook(
    model: Any, hook: Any, overflow_nums: int = 1, dump_mode: str = "api", dump_config: str = "", rank: int | None = None,
    **unused: Any,
) -> None:  # fmt: skip
    """Begin to count the calls of the script, to be dumped (`acc_cmp_dump`), or to look for overflow (`overflow_check`).

    Args:
        model: the module, or modules, whose paths name the scopes.
        hook: `acc_cmp_dump` or `overflow_check`.
        overflow_nums: overflows after which the training ends; -1: never.
        dump_mode: ``api``; ``acl`` is refused with what it would need.
        dump_config: of acl.
        rank: number of the rank's folder.
        unused: what versions took beside (``dump_step``); said, and of no effect.

    Raises:
        CompareException: ``set_dump_path`` was not called, or an argument is unknown.
        TrueupError: another capture is running in this process.
    """
    if hook not in (acc_cmp_dump, overflow_check):
        raise CompareException.of_parameter(f"hook {hook!r}: expected acc_cmp_dump or overflow_check")
    if dump_mode == "acl" or dump_config:
        raise CompareException(CompareException.INVALID_DUMP_MODE, ACL)
    if dump_mode != "api":
        raise CompareException.of_parameter(f"dump_mode {dump_mode!r}: expected api or acl")
    for name in unused:
        print(f"trueup: register_hook's {name} has no effect", flush=True)
    if SCRIPT.path is None:
        set_dump_path(None, SCRIPT.tag)
    assert SCRIPT.path is not None
    SCRIPT.end()
    layout, models, number = Layout.of(FUNCTIONS), models_of(model), rank_of(model, rank)
    if hook is overflow_check:
        SCRIPT.check = overflow_check_of(layout, SCRIPT.path, SCRIPT.tag, number, models, overflow_nums, layout.filters)
        SCRIPT.check.start()
    else:
        SCRIPT.dumping = Dumping(layout, SCRIPT.path, SCRIPT.tag, number, models)
        SCRIPT.dumping.begin()


def overflow_check_of(
    layout: Layout, path: Path, tag: str, rank: int, models: Sequence[torch.nn.Module], most: int, filtered: bool
) -> OverflowCheck:
    """Make a check.

    Raises:
        CompareException: the number of overflows is none.
    """
    if type(most) is not int or (most < 1 and most != -1):
        raise CompareException.of_parameter(f"overflow_nums {most!r}: expected 1 or more, or -1 to go on whatever is found")
    return OverflowCheck(layout, path, tag, rank, models, most, filtered)


def set_dump_switch(
    switch: str, mode: str = "all", scope: Sequence[str] = (), api_list: Sequence[str] = (), filter_switch: str | None = None,
    dump_mode: str | Sequence[str] = "all", summary_only: bool = False, summary_mode: str = "all",
) -> None:  # fmt: skip
    """Dump from here on, or no more.

    Args:
        switch: ``ON`` or ``OFF``; ``OFF`` writes the files.
        mode: ``all``, ``list``, ``range``, ``stack``, ``api_list`` or ``api_stack``; ``acl`` is refused with what it would need.
        scope: names of calls; one or more for list, two for range, up to two for stack.
        api_list: parts of names (``["relu"]``), or ``distributed``.
        filter_switch: ``ON`` leaves integers, booleans, scalars and empty tensors out; ``ON`` up to version 3, ``OFF`` from 4 on.
        dump_mode: of ``all``, ``forward``, ``backward``, ``input``, ``output``, one or a list.
        summary_only: no tensors, statistics alone.
        summary_mode: ``all``, ``summary`` (the same as ``summary_only``) or ``md5``.

    Raises:
        CompareException: `register_hook` was not called, or an argument is unknown.
        TrueupError: the files cannot be written.
    """
    dumping = SCRIPT.dumping
    if not is_on(switch, "switch"):
        if dumping is not None:
            dumping.switch_off()
        return
    if dumping is None:
        raise CompareException.of_parameter("set_dump_switch comes after register_hook(model, acc_cmp_dump): call that first")
    filtered = dumping.layout.filters if filter_switch is None else is_on(filter_switch, "filter_switch")
    summary = "summary" if summary_only and summary_mode == "all" else summary_mode
    dumping.switch_on(Dump.of(mode, scope, api_list, filtered, dump_mode, summary))


def set_overflow_check_switch(switch: str, filter_switch: str | None = None) -> None:
    """Look for overflow from here on, or no more; `register_hook` begins with ``ON``.

    Raises:
        CompareException: `register_hook` was not called with `overflow_check`, or a value is none of ``ON`` and ``OFF``.
    """
    on = is_on(switch, "switch")
    if SCRIPT.check is None:
        raise CompareException.of_parameter(
            "set_overflow_check_switch comes after register_hook(model, overflow_check): call that first",
        )
    if filter_switch is not None:
        SCRIPT.check.filtered = is_on(filter_switch, "filter_switch")
    SCRIPT.check.keeper.on = on


def set_backward_input(backward_input: Sequence[str]) -> None:
    """Take the ``.npy`` that an acl dump would give to a backward; nothing else uses them, which is said.

    Raises:
        CompareException: it is no list of existing ``.npy`` files.
    """
    paths = [str(path) for path in backward_input]
    for path in paths:
        if not path.endswith(".npy") or not Path(path).is_file():
            raise CompareException(CompareException.INVALID_PATH_ERROR, f"backward_input {path!r}: expected an existing .npy file")
    SCRIPT.backward_input = tuple(paths)
    print(
        "trueup: set_backward_input is for mode acl, which is not there: a recorded backward is executed again, with the gradients "
        "that it got, by `trueup replay`",
        flush=True,
    )


def is_on(value: str, what: str) -> bool:
    """Read a switch.

    Raises:
        CompareException: it is neither ``ON`` nor ``OFF``.
    """
    if value not in ("ON", "OFF"):
        raise CompareException.of_parameter(f"{what} {value!r}: expected ON or OFF")
    return value == "ON"
