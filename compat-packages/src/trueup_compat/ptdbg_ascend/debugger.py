"""`PrecisionDebugger` of versions 3 to 6: one object that dumps, or looks for overflow, step by step."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from trueup.recording.engine.replacing import Replacement
from trueup_compat.only_one import OnlyOne
from trueup_compat.ptdbg_ascend.dumping import Dumping
from trueup_compat.ptdbg_ascend.errors import CompareException
from trueup_compat.ptdbg_ascend.layout import DEBUGGER, Layout, checked_path
from trueup_compat.ptdbg_ascend.modes import ACL, Dump
from trueup_compat.ptdbg_ascend.overflow import OverflowCheck
from trueup_compat.ptdbg_ascend.switches import SCRIPT, is_on, overflow_check_of, seed_all
from trueup_compat.recording import models_of, rank_of

TAG = "ptdbg_dump"


class PrecisionDebugger(OnlyOne):
    """Dumps what runs between `start` and `stop`; `step` ends a step.

        debugger = PrecisionDebugger(dump_path="./dump", hook_name="dump", step=[0, 2])
        debugger.configure_hook(mode="api_stack")
        for batch in loader:
            debugger.start()
            ...
            debugger.stop()
            debugger.step()

    Args:
        dump_path: folder of the dump; None: ``$ASCEND_WORK_PATH/dump_data``.
        hook_name: ``dump`` or ``overflow_check``.
        rank: number of the rank's folder; None: of the process group, else of the model's device.
        step: the steps to dump; empty: all. After the last one the training is ended.
        enable_dataloader: start and stop with each batch of a `torch.utils.data.DataLoader`.
        model: dump its modules too.
        seed: seeds everything, where it is given; the tool did so whatever was given.

    Raises:
        CompareException: an argument is unknown.
    """

    hook_name: str = ""
    _error = CompareException.of_parameter

    def __init__(
        self, dump_path: str | os.PathLike[str] | None = None, hook_name: str | None = None, rank: int | None = None,
        step: Sequence[int] = (), enable_dataloader: bool = False, model: Any = None, seed: int | None = None,
    ) -> None:  # fmt: skip
        if self._made:
            return
        if hook_name not in ("dump", "overflow_check"):
            raise CompareException.of_parameter(f"hook_name {hook_name!r}: expected dump or overflow_check")
        if any(type(number) is not int or number < 0 for number in step):
            raise CompareException.of_parameter(f"step {step!r}: expected numbers of steps, such as [0, 2]")
        self._layout, self._path = Layout.of(DEBUGGER), checked_path(dump_path)
        self.hook_name, self._steps, self._rank, self._model = hook_name, tuple(step), rank, model
        if seed is not None:
            seed_all(seed)
        self._dump = Dump(filtered=False)
        self._most, self._filtered = 1, self._layout.filters
        self._number, self._begun = 0, False
        self._running: Dumping | OverflowCheck | None = None
        self._loader: Replacement | None = None
        type(self)._made = True
        if enable_dataloader:
            self._loader = Replacement(torch.utils.data.dataloader._BaseDataLoaderIter, "__next__", self._batches)
            self._loader.install()

    def configure_hook(
        self, mode: str = "api_stack", scope: Sequence[str] = (), api_list: Sequence[str] = (), filter_switch: str = "OFF",
        acl_config: str | None = None, backward_input: Sequence[str] = (), input_output_mode: Sequence[str] = ("all",),
        summary_only: bool = False, summary_mode: str | None = None, overflow_nums: int = 1, need_replicate: bool = False,
    ) -> None:  # fmt: skip
        """Say what is dumped, or how many overflows are allowed; before the first `start`.

        Raises:
            ValueError: ``summary_only`` and ``summary_mode`` are both given.
            CompareException: an argument is unknown, or asks for acl.
        """
        if mode == "acl" or acl_config is not None or backward_input:
            raise CompareException(CompareException.INVALID_DUMP_MODE, ACL)
        filtered = is_on(filter_switch, "filter_switch")
        if self.hook_name == "overflow_check":
            self._most, self._filtered = overflow_nums, filtered
            if need_replicate:
                print("trueup: need_replicate is not needed: `trueup reproduce` makes a script of a saved overflow", flush=True)
            return
        if summary_only and summary_mode is not None:
            raise ValueError("summary_only and summary_mode say the same: give one of them")
        summary = summary_mode or ("summary" if summary_only else "all")
        self._dump = Dump.of(mode, scope, api_list, filtered, input_output_mode, summary)

    @classmethod
    def start(cls) -> None:
        """Dump, or look, from here on.

        Raises:
            Exception: the last of the steps that were asked for is over: ``ptdbg: exit after iteration N``.
        """
        cls._the()._start()

    @classmethod
    def dumping(cls) -> Dumping | None:
        """Return what dumps at present, or did in a step before; None where nothing does."""
        running = None if cls._instance is None or not cls._made else cls._instance._running
        return running if isinstance(running, Dumping) else None

    def _start(self) -> None:
        if self._steps and self._number > max(self._steps):
            self._stop()
            raise Exception(f"ptdbg: exit after iteration {max(self._steps)}")  # scripts look for this text
        if self._steps and self._number not in self._steps:
            return
        if isinstance(self._running, OverflowCheck):
            self._running.keeper.on = True
        elif isinstance(self._running, Dumping):
            self._running.switch_on(self._dump)
        else:
            self._begin()

    def _begin(self) -> None:
        """Begin with the first step that is wanted; steps before it cost nothing."""
        SCRIPT.end()
        models, rank = models_of(self._model), rank_of(self._model, self._rank)
        if self.hook_name == "overflow_check":
            check = overflow_check_of(self._layout, self._path, TAG, rank, models, self._most, self._filtered)
            check.start()
            self._running = check
            return
        levels = ("module", "api") if models else ("api",)
        dumping = Dumping(self._layout, self._path, TAG, rank, models, levels)
        dumping.begin(self._dump.detail, by_hand=True)
        for _ in range(self._number):
            dumping.end_step()
        self._running = dumping
        dumping.switch_on(self._dump)

    def _stop(self) -> None:
        if isinstance(self._running, OverflowCheck):
            self._running.keeper.on = False
        elif isinstance(self._running, Dumping) and self._running.is_on:
            self._running.switch_off()

    def _step(self) -> None:
        self._stop()
        self._number += 1
        if isinstance(self._running, OverflowCheck):
            self._running.session.step()
        elif self._running is not None:
            self._running.end_step()

    def _finish(self) -> None:
        if self._loader is not None:
            self._loader.remove()
        if self._running is not None:
            self._running.finish()

    def _batches(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def following(loader: Any) -> Any:
            if self._begun:
                self._begun = False
                self._step()
            batch = original(loader)
            self._start()
            self._begun = True
            return batch

        return following
