"""A few steps of any training under ``torch.profiler``, then two in which each call of PyTorch's says the user's line: times and
lines come from different steps, since looking for lines slows the host down. (Kineto's stacks know a function's first line alone.)
A step ends where the first optimizer has stepped; after the last one the process ends.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import sysconfig
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.profiler import profile, schedule
from torch.utils.data.dataloader import _BaseDataLoaderIter

from trueup.recording.adapters.torch.functions import line_of

VARIABLE = "TRUEUP_PROFILE"
"""Environment variable: a folder for what is found, then ``:`` and the number of steps to time."""
WARM_UP = 2  # steps before the first that is timed: kernels are built and memory is taken there
WITH_LINES = 2  # steps in which lines are looked for
_PLACES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
_INSTALLED = (str(Path(torch.__file__).parent), str(Path(__file__).parents[3]), *_PLACES)


class Lines(TorchFunctionMode):
    """Counts the user's lines that call PyTorch, by the operator's name as the profiler writes it, and those that load data."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Counter[str]] = defaultdict(Counter)
        self._load = _BaseDataLoaderIter.__next__

    def __enter__(self) -> Any:
        load, lines = self._load, self

        def next_batch(loader: Any) -> Any:
            lines.see(f"enumerate(DataLoader)#{type(loader).__name__}.__next__")
            return load(loader)

        _BaseDataLoaderIter.__next__ = next_batch
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        _BaseDataLoaderIter.__next__ = self._load
        super().__exit__(*error)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a call, and make it."""
        if not torch.compiler.is_compiling():
            self.see(f"aten::{getattr(function, '__name__', '')}")
        return line_of(function, kwargs or {})(function, *args, **(kwargs or {}))

    def see(self, name: str) -> None:
        """Count the innermost line that is neither PyTorch's, nor Python's, nor ours."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_INSTALLED):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None:
            self.found[name][f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"] += 1


def compiled_again(since: float) -> list[str]:
    """Say which functions Dynamo compiled again from a moment on (seconds since 1970), how often, and which guard first failed."""
    module = sys.modules.get("torch._dynamo.utils")
    found: dict[str, list[str]] = defaultdict(list)
    for one in () if module is None else module.get_compilation_metrics():
        if one.recompile_reason and (one.start_time_us or 0) >= since * 1e6:
            where = f"{os.path.relpath(one.co_filename)}:{one.co_firstlineno}" if one.co_filename else "?"
            found[f"{one.co_name} ({where})"].append(re.sub(r"^\d+/\d+: ", "", one.recompile_reason).splitlines()[0])
    return [f"{name} was compiled again {len(why)} time{'s' * (len(why) > 1)}: {why[0]}" for name, why in found.items()]


class Profiling:
    """The profile of one process; ``times-PID.json``, ``lines-PID.json`` and ``compiled-PID.json`` are left in the folder."""

    def __init__(self, folder: Path, steps: int, process: int) -> None:
        self._times, self._to_lines, self._to_compiled = (
            folder / f"{what}-{process}.json" for what in ("times", "lines", "compiled")
        )  # fmt: skip
        self._since = 0.0
        plan = schedule(wait=0, warmup=1, active=steps, repeat=1)
        self._profile = profile(schedule=plan, on_trace_ready=self._save)
        self._lines = Lines()
        self._optimizer: Any = None
        self._seen = 0
        self._timed = WARM_UP + steps + 1

    def begin(self) -> None:
        """Wait for optimizers from now on."""
        register_optimizer_step_post_hook(self._stepped)
        atexit.register(self._give_up)

    def _save(self, one: Any) -> None:
        if self._seen == self._timed:
            one.export_chrome_trace(str(self._times))

    def _give_up(self) -> None:
        """Stop before a process ends that made too few steps: with a profile running, torch 2.13 ends in a segmentation fault."""
        if WARM_UP <= self._seen < self._timed:
            self._profile.stop()

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            return
        self._seen += 1
        if self._seen == WARM_UP:
            self._since = time.time()
            self._profile.start()
        elif WARM_UP < self._seen <= self._timed:
            self._profile.step()
        if self._seen == self._timed:
            self._profile.stop()
            self._to_compiled.write_text(json.dumps(compiled_again(self._since)))
            self._lines.__enter__()
        if self._seen == self._timed + WITH_LINES:
            self._lines.__exit__(None, None, None)
            self._to_lines.write_text(json.dumps(self._lines.found))
            sys.exit(0)


def begin(asked: str) -> None:
    """Profile this process as the variable says, `VARIABLE`."""
    folder, _, steps = asked.rpartition(":")
    Profiling(Path(folder), int(steps), os.getpid()).begin()
