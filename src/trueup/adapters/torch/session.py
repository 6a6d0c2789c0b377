"""A running capture of PyTorch: the modes, the module calls, the optimizer hooks, and what they all record through."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import trueup
from trueup.adapters.torch.buffers import Buffers
from trueup.adapters.torch.context import Context, Threads, ThreadState, tagged
from trueup.adapters.torch.dispatch import DispatchMode
from trueup.adapters.torch.environment import describe_run, rank_and_world
from trueup.adapters.torch.functions import FunctionMode
from trueup.adapters.torch.modules import ModuleCalls
from trueup.adapters.torch.scopes import Scopes
from trueup.adapters.torch.statistics import resolve
from trueup.adapters.torch.tensors import describe
from trueup.model import TrueupError
from trueup.recorder import Call, CaptureOptions, Recorder
from trueup.recorder.options import in_ranges
from trueup.recorder.seen import sentence, unused
from trueup.store import claim

NamedTensors = Iterable[tuple[str, torch.Tensor]]

TORCH = str(Path(torch.__file__).parent)


class _Quiet:
    """Marks a thread as busy with Trueup's own work."""

    __slots__ = ("_before", "_state")

    def __init__(self, state: ThreadState) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._before, self._state.busy = self._state.busy, True

    def __exit__(self, *_: object) -> None:
        self._state.busy = self._before


class Session:
    """Everything the modes share. One at a time in a process."""

    def __init__(self, directory: Path, options: CaptureOptions, root: dict[str, Any]) -> None:
        self.options = options
        self.threads = Threads()
        self.scopes = Scopes()
        self.recorder = Recorder(directory, options, self._identify, resolve, internal=(TORCH,))
        self.buffers = Buffers(self.recorder)
        self.active = False
        self._root = root
        self._devices: dict[str, None] = {}
        self._function_mode = FunctionMode(self)
        self._dispatch_mode = DispatchMode(self) if "aten" in options.levels else None
        self._module_calls = ModuleCalls(self)
        self._hooks: list[Any] = []
        self._manual_steps = False
        self._kinds = set(options.levels)
        self.rank: int | None = None
        """Number of this process's folder, once it is claimed."""

    # ---------------------------------------------------------------- life
    def start(self) -> None:
        """Begin to see calls on this thread (and on the backward threads that autograd starts from it)."""
        self._module_calls.install()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        self.threads.state.observed = True
        self._function_mode.__enter__()
        if self._dispatch_mode is not None:
            self._dispatch_mode.__enter__()
        self._update_active()

    def stop(self) -> None:
        """Stop to see calls and finish the capture."""
        self.active = False
        if self._dispatch_mode is not None:
            self._dispatch_mode.__exit__(None, None, None)
        self._function_mode.__exit__(None, None, None)
        self._module_calls.remove()
        for hook in self._hooks:
            hook.remove()
        self.finish()

    def abandon(self) -> None:
        """Let go of the capture, in a forked child: the parent owns it."""
        self.active = False
        self.recorder.abandon()

    def finish(self) -> None:
        """Write what is left, without touching the modes (at the end of an armed process)."""
        self.active = False
        self._note_compile()
        self.recorder.close()

    def step(self) -> None:
        """End the present step."""
        self._manual_steps = True
        self._end_step()

    def _end_step(self) -> None:
        self.recorder.end_step()
        self.buffers.purge()
        self._update_active()

    def _update_active(self) -> None:
        rank, _ = rank_and_world()
        self.active = self.recorder.active and in_ranges(rank or 0, self.options.ranks)

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.threads.state.optimizer = True

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.threads.state.optimizer = False
        if not self._manual_steps:
            self._end_step()

    def report(self) -> dict[str, Any]:
        """Say what this process recorded, or why nothing."""
        recorder = self.recorder
        return {
            "rank": self.rank, "calls": recorder.calls, "steps": recorder.step, "failure": recorder.failure,
            "why": None if recorder.calls else why_nothing(self),
        }  # fmt: skip

    def claim(self) -> int:
        """Take this process's rank folder, once."""
        if self.rank is None:
            rank, _ = rank_and_world()
            self.rank = claim(self.recorder.directory, rank, self._root.get("run"))
        return self.rank

    def _identify(self) -> tuple[int, dict[str, Any], dict[str, Any]]:
        rank, _ = rank_and_world()
        number = self.claim()
        if rank is None and number:
            self.recorder.note(f"no rank was set; this process (pid {os.getpid()}) is rank {number} by order of arrival")
        return number, self._root, describe_run(list(self._devices)) | {"rank": number}

    # ---------------------------------------------------------------- what the modes call
    def quietly(self, state: ThreadState) -> _Quiet:
        """Return a context in which nothing that executes on this thread is a call."""
        return _Quiet(state)

    def records(self, level: str) -> bool:
        """Tell whether calls of a level are recorded."""
        return level in self._kinds

    def record_tensors(self, call: Call, tensors: NamedTensors) -> None:
        """Record inputs, with the call that produced each."""
        level = call.level if call.level == "aten" or "api" not in self._kinds else "api"
        for slot, tensor in tensors:
            self._slot(call, slot, tensor, self.buffers.producer(tensor, level))

    def record_outputs(self, call: Call, tensors: NamedTensors) -> None:
        """Record outputs."""
        for slot, tensor in tensors:
            self._slot(call, slot, tensor, None)

    def record_gradients(self, context: Context, gradients: list[tuple[str, torch.Tensor | None]]) -> None:
        """Record gradients that autograd delivers to or from a call."""
        if not self.active:
            return
        state = self.threads.state
        with self.quietly(state):
            call = context.backward_call(self.recorder)
            if not call.recorded:
                return
            for slot, tensor in gradients:
                if tensor is None:
                    continue
                received = slot.startswith("grad_output")
                self._slot(call, slot, tensor, self.buffers.producer(tensor, call.level) if received else None)
                if not received:
                    self.buffers.produced(tensor, call.level, call.seq, slot)

    def record_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the tensor on which `backward()` is called: the loss curve, kept whatever the filters say."""
        loss = args[0] if args else kwargs.get("self")
        if not isinstance(loss, torch.Tensor):
            return
        state = self.threads.state
        with self.quietly(state):
            parent = state.modules[-1] if state.modules else None
            call = self.recorder.begin(
                "api", "forward", "" if parent is None else parent.scope, "torch.Tensor.backward",
                parent=None if parent is None else parent.call.seq, site=self.recorder.sites.here(),
            )  # fmt: skip
            self.record_tensors(call, [("input.0", loss)])

    def mark_produced(self, call: Call, tensors: NamedTensors) -> None:
        """Note that a call computed these tensors."""
        for slot, tensor in tensors:
            self.buffers.produced(tensor, call.level, call.seq, slot)

    def mark_api_outputs(self, call: Call, inputs: NamedTensors, outputs: list[tuple[str, torch.Tensor]]) -> None:
        """Tell views from results of an api call; without the aten level, also what it wrote in place."""
        before = self.buffers.storages(list(inputs))
        given = {id(t) for _, t in inputs}
        for slot, tensor in outputs:
            in_place = id(tensor) in given
            if in_place and self._dispatch_mode is None:
                self.buffers.written(tensor)
            if in_place or not (self.buffers.storages([(slot, tensor)]) & before):
                self.buffers.produced(tensor, "api", call.seq, slot)

    def scope_of_backward(self, state: ThreadState) -> str:
        """Return the scope of an api call outside any module: that of the autograd node being executed, if one is."""
        owner = tagged(torch._C._current_autograd_node())
        return "" if owner is None else owner.scope

    def notice_module(self, module: torch.nn.Module, state: ThreadState) -> None:
        """Note what a module call tells about what cannot be seen."""
        if not state.observed and torch._C._current_graph_task_id() == -1:
            state.observed = True
            name = threading.current_thread().name
            self.recorder.note(f"thread {name} runs modules; only its module calls are seen, not its api and aten calls")

    def _slot(self, call: Call, slot: str, tensor: torch.Tensor, producer: tuple[int, str] | None) -> None:
        described = describe(tensor)
        self._devices.setdefault(described.device)
        self.recorder.slot(call, slot, described, self.buffers.statistics(tensor), producer)

    def _note_compile(self) -> None:
        dynamo = sys.modules.get("torch._dynamo.utils")
        frames = getattr(dynamo, "counters", {}).get("frames", {})
        if frames.get("total"):
            self.recorder.note(
                "torch.compile was used: under a capture PyTorch runs compiled code eagerly, operator by operator, so the "
                "numerics of the compiled kernels were not observed"
            )


_current: Session | None = None


class Capture:
    """A running capture: `step()` ends a step, leaving the ``with`` block ends the capture.

    Without `step()` a step ends with each optimizer's step; once it was called, only it ends steps.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def path(self) -> Path:
        """The capture directory."""
        return self._session.recorder.directory

    def step(self) -> None:
        """End the present step."""
        self._session.step()

    def __enter__(self) -> Capture:
        global _current
        if _current is not None:
            raise TrueupError(
                f"a capture into {_current.recorder.directory} is already running in this process; "
                "end it first (or run the script without `trueup capture`)"
            )
        if in_ranges(rank_and_world()[0] or 0, self._session.options.ranks):
            try:
                self._session.claim()
            except OSError as error:
                raise TrueupError(f"cannot write the capture {self.path}: {error.strerror or error}; choose another directory") from None
        _current = self._session
        self._session.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        global _current
        _current = None
        self._session.stop()
        recorder = self._session.recorder
        if error is None and recorder.failure is None:
            if recorder.calls == 0:
                print(f"trueup: nothing was captured into {self.path}: {why_nothing(self._session)}", file=sys.stderr)
            else:
                for item in unused(recorder.options, recorder.seen()).items():
                    print(f"trueup: note: {sentence(*item)}", file=sys.stderr)


def why_nothing(session: Session) -> str:
    """Explain an empty capture."""
    recorder = session.recorder
    if not in_ranges(rank_and_world()[0] or 0, session.options.ranks):
        return "this rank is not among the ranks selected"
    if said := unused(recorder.options, recorder.seen()):
        return "; ".join(sentence(*item) for item in said.items())
    if not recorder.seen().calls:
        return "no PyTorch call was executed while the capture was on"
    return "no call matched the level, phase, include and exclude options together"


def capture(
    directory: str | Path, model: torch.nn.Module | Iterable[torch.nn.Module] | None, options: CaptureOptions
) -> Capture:
    """Make a capture of what runs inside its ``with`` block; see `trueup.capture`."""
    root = {
        "trueup_version": trueup.__version__, "command": sys.argv[:64], "levels": list(options.levels), "detail": options.detail,
        "config": json.loads(options.to_json()),
    }  # fmt: skip
    session = Session(Path(directory), options, root)
    for root in [] if model is None else [model] if isinstance(model, torch.nn.Module) else model:
        session.scopes.register(root)
    return Capture(session)
