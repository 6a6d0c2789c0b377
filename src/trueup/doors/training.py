"""What a training script calls: `trueup.capture` and `step`, `watch`, `monitor`, `shadow`, `lockstep`, `apply_policy`, `seed_all`.
Each finds the framework that the script imported and hands over to its adapter; none imports a framework itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy  # noqa: F401 - `seed_all` seeds it, also where the script has not imported it yet

from trueup.foundation.model import LEVELS, TrueupError
from trueup.recording.arming.process import seed_imported
from trueup.recording.recorder.options import (
    BUDGET,
    FRAMES,
    LARGEST_MB,
    CaptureOptions,
    NumberSet,
    ShadowOptions,
    WatchOptions,
    capture_options,
)
from trueup.recording.registry import ADAPTERS, Adapter, listed, meant

if TYPE_CHECKING:
    from trueup.analysis.monitor.session import Monitor
    from trueup.analysis.watch.watcher import Watch
    from trueup.recording.adapters.torch.shadowing_block import Shadow
    from trueup.recording.engine.policies import AppliedPolicy
    from trueup.recording.engine.session import Capture
    from trueup.recording.execution.shadow import LockstepResult


def capture(
    directory: str | Path,
    *,
    model: Any = None,
    level: str | Sequence[str] = LEVELS,
    detail: str = "stats",
    steps: NumberSet = None,
    ranks: NumberSet = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    phase: str | Sequence[str] | None = None,
    on_error: str = "continue",
    compile: str = "off",
    inputs_from: str | Path | None = None,
    force: str | None = None,
) -> Capture[Any]:
    """Record what a training run does, in a ``with`` block.

        with trueup.capture("runs/cpu", model=model, steps=range(0, 3)) as cap:
            for batch in loader:
                ...; loss.backward(); optimizer.step(); optimizer.zero_grad()
                cap.step()      # optional: without it optimizers tell where a step ends

    Args:
        directory: where the capture goes; must not hold one yet.
        model: the module, or modules, whose paths name the scopes; without it the first module with parameters that runs is
            the root.
        level: one or more of ``module``, ``api``, ``aten``, or ``all``.
        detail: ``digest``, ``stats`` or ``tensor``.
        steps: steps to record: ``range(0, 3)``, ``[0, 7]``, ``"0:3"``; None records all.
        ranks: ranks to record, in the same forms.
        include: globs (``neck.*``, ``*softmax*``) or ``/regular expressions/`` on scope, operator or ``scope/operator``.
        exclude: the same; wins over ``include``.
        phase: one or more of ``forward``, ``recompute``, ``backward``, ``optimizer``, ``collective``, ``data``.
        compile: ``off`` runs the Python code of what torch.compile compiled, so that every level sees the whole run;
            ``through`` runs the compiled code and sees its modules from outside, library calls and fused kernels. A note in the
            capture tells which.
        inputs_from: a capture of detail ``tensor``: each module of this run computes with what it was given there, and its backward
            with the gradients it got there, so that the capture holds each one's own error. This is the one option that changes the
            training.
        force: what is given them: ``module``, or each call of level ``api`` or ``aten``; else the first of these that the capture
            has.
        on_error: ``continue`` goes on training, loudly, when the capture cannot be written; ``stop`` raises in the training.

    Raises:
        TrueupError: an option is unknown or selects nothing, the directory holds a capture or cannot be written, a capture
            is already running, or no framework is imported.
    """
    options = CaptureOptions.of(
        level=level, detail=detail, steps=steps, ranks=ranks, include=include, exclude=exclude, phase=phase, on_error=on_error,
        compile=compile, inputs_from=None if inputs_from is None else str(inputs_from), force=force,
    )  # fmt: skip
    framework = _framework(model, "capture")
    from trueup.recording.engine.session import capture as begin

    adapted: Any = import_module(f"trueup.recording.adapters.{framework.name}.session")
    return begin(adapted.Session, directory, model, options)


def _framework(model: Any, caller: str, feature: str = "", said: str = "") -> Adapter:
    """Return the adapter of a model's framework, else of the one imported; raises TrueupError where none is, or it lacks that."""
    found = meant(model)
    if found is None:
        names = listed([one.name for one in ADAPTERS if feature not in one.lacks])
        raise TrueupError(f"{caller} found no framework: import {names} before you call trueup.{caller}")
    if feature in found.lacks:
        raise TrueupError(f"{said} is not there for {found.title} yet ({found.page} says what there is)")
    return found


def step() -> None:
    """End the present step of the capture that runs in this process; where none runs, do nothing, at next to no cost.

        for batch in loader:
            ...
            trueup.step()       # may stay in the script

    For loops in which no optimizer of the framework steps, or not once per step. Once it was called, only it ends the steps of that
    capture. It works under ``trueup capture -- COMMAND`` and inside ``with trueup.capture(...)`` alike.
    """
    for adapter in ADAPTERS:
        session = sys.modules.get(f"trueup.recording.adapters.{adapter.name}.session")
        if session is not None:
            session.running.step()


def watch(
    model: Any = None, directory: str | Path = "trueup-watch", *, stop_after: int | str | None = None, frames: int = FRAMES,
    budget: int | str = BUDGET, level: str | Sequence[str] | None = None, phase: str | Sequence[str] | None = None,
    include: str | Sequence[str] | None = None, exclude: str | Sequence[str] | None = None, steps: NumberSet = None,
    ranks: NumberSet = None, compile: str = "off",
) -> Watch:  # fmt: skip
    """Watch a training run for NaN, Inf and saturation, in a ``with`` block.

        with trueup.watch(model, "runs/watch", stop_after=1):
            for batch in loader:
                ...; loss.backward(); optimizer.step(); optimizer.zero_grad()

    While all is well nothing is written. On a hit the call is named, executed once more from what the step was given, and saved
    with its inputs and outputs and the calls around it as a capture of its own, ``runs/watch/step-000412``.

    Args:
        model: the module, or modules, whose paths name the scopes; without it the first module with parameters that runs is the
            root.
        directory: where hits are saved; made with the first.
        stop_after: hits after which the run is stopped by `WatchStopped` (exit code 3); None or ``"never"`` goes on.
        frames: calls saved before the bad one, and after it, with their statistics.
        budget: bytes that each rank may write; hits beyond it are counted and named, not saved.
        level: one or more of ``module``, ``api``, ``aten``, or ``all``; by default ``api``.
        phase: as for `trueup.capture`; by default all but ``optimizer``.
        include: as for `trueup.capture`.
        exclude: as for `trueup.capture`.
        steps: steps to watch; None watches all.
        ranks: ranks that watch; None: all.
        compile: as for `trueup.capture`.

    Raises:
        TrueupError: an option is unknown or selects nothing, the directory holds something, a capture is already running, or
            no framework is imported that can be watched.
        WatchStopped: in the training, after the last hit that was allowed.
    """
    options = capture_options(level, phase, include, exclude, steps, ranks, compile)
    chosen = WatchOptions.of(stop_after, frames, budget)
    found = _framework(model, "watch", "watch", "watch")
    models: Iterable[Any] = [] if model is None else model if isinstance(model, (list, tuple)) else [model]
    from trueup.analysis.watch.watcher import Watch
    from trueup.recording.engine.session import root_manifest

    adapted: Any = import_module(f"trueup.recording.adapters.{found.name}.watching")
    return Watch(adapted.WatchSession(Path(directory), options, chosen, root_manifest(options, "tensor")), models)


def monitor(
    model: Any = None, optimizer: Any = None, directory: str | Path = "trueup-monitor", *, every: int = 10, digests: int = 100,
    ranks: NumberSet = None, alerts: bool = True, on_alert: str | Sequence[str] = "message", command: str | None = None,
    invariants: str | Path | None = None, check: int = 300, also: str | Sequence[str] = (), step: int | None = None,
) -> Monitor:  # fmt: skip
    """Take a training's numbers all the time, and say when one leaves its own past.

        monitor = trueup.monitor(model, optimizer, "runs/monitor")
        for batch in loader:
            ...; loss.backward(); optimizer.step(); optimizer.zero_grad()

    The loss, learning rates, the loss scale and the norms of gradients are taken in each step, the rest in some (docs/monitor.md).
    What is written is a capture that `trueup.compare` lines up with another monitored run. A directory that holds an earlier
    monitor's is gone on with. Loss, gradients and random numbers stay bitwise what they are without it.

    Args:
        model: the module, or modules; without it those that run in the first step.
        optimizer: one, or several, whose steps are followed; without it all. The first to step ends the training step.
        directory: where the series go.
        every: steps between two that have everything: moments, update ratios, activations, attention, routers.
        digests: steps between digests of the parameters, where there are several ranks; 0: none.
        ranks: ranks that monitor; None: all.
        alerts: look for spikes, drift, frozen and vanishing layers, ranks that part.
        on_alert: one or more of ``message``, ``stop`` (by `WatchStopped`, exit code 3) and ``capture`` (the next step in detail).
        command: run with each alert as JSON on its standard input; no shell.
        invariants: file of `trueup invariants` on a healthy run; what breaks one of its relations is an alert.
        check: steps between two checks of the invariants; a check records three steps by digests.
        also: one or more of ``moments``, ``spectrum``, ``output-gradients``, ``collectives``, ``modules``, ``inputs``,
            ``extremes``, ``micro-batches`` and ``updates`` (docs/monitor.md).
        step: number of the first step; None: 0, or where an earlier monitor's series end, as the optimizer's state says.

    Raises:
        TrueupError: an option is unknown, the directory holds something else, or no framework is imported that can be monitored.
        WatchStopped: in the training, after an alert, where ``on_alert`` says ``stop``.
    """
    from trueup.analysis.monitor.session import Monitor, MonitorOptions, root_manifest

    options = MonitorOptions.of(every, digests, ranks, alerts, on_alert, command, invariants, check, also)
    framework = _framework(model, "monitor", "monitor", "monitor")
    models = [] if model is None else list(model) if isinstance(model, (list, tuple)) else [model]
    optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    return Monitor(Path(directory), options, framework, root_manifest(options, sys.argv[:64]), models, optimizers, step).start()


def shadow(
    model: Any = None,
    reference: str = "cpu",
    dtype: Any = "float64",
    sample: float = 1.0,
    *,
    directory: str | Path | None = None,
    seed: int = 0,
    time: str | float | None = None,
    largest_mb: float = LARGEST_MB,
    steps: NumberSet = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    phase: str | Sequence[str] | None = None,
    formulas: Mapping[str, Callable[[dict[str, Any], dict[str, Any]], Any]] | None = None,
    quiet: bool = False,
) -> Shadow:
    """Execute each operator as usual and once more on a trusted device, with the same inputs; say which is wrong by itself.

        with trueup.shadow(model) as shadow:
            train_one_step(model)
        print(shadow.result.culprit)        # None, or the first call whose own error is beyond rounding

    The training is not touched: loss, gradients, random numbers and version counters are bitwise what they were. There is no second
    run, no dump, and no accumulated error.

    Args:
        model: the module, or modules, whose paths name the scopes; without it the first module with parameters that runs.
        reference: device that computes each call again.
        dtype: ``torch.float64`` or ``torch.float32``, or its name.
        sample: share of the calls, chosen by ``seed`` and the call's key; the first of each kind always is among them.
        directory: where the rows and the table of errors go, a capture; None keeps the table in memory.
        time: most that a step may take longer: ``"200ms"``, ``"0.5x"`` (of its own time), or milliseconds.
        largest_mb: calls with a larger tensor are left out, and counted.
        steps: steps to shadow, as in `trueup.capture`; so are ``include``, ``exclude`` and ``phase``.
        formulas: references of operators that Trueup does not know, ``{"npu::rms": formula}``: ``formula(arguments, outputs)`` gets
            the arguments by name, widened, and the outputs there were, and returns what they should be, ``{"output.0": tensor}``.
        quiet: print nothing at the end.

    Raises:
        TrueupError: an option is wrong, the reference cannot compute, the directory holds a capture or cannot be written, a capture
            is already running, or PyTorch is not imported.
    """
    name = str(dtype).removeprefix("torch.")
    options = ShadowOptions.of(f"{reference}:{name}", sample=sample, seed=seed, time=time, largest_mb=largest_mb)
    if "torch" not in sys.modules:
        raise TrueupError("shadow found no framework: import torch before you call trueup.shadow")
    from trueup.recording.adapters.torch.shadowing_block import shadow as shadow_torch

    return shadow_torch(
        model, options, directory, formulas, steps=steps, include=include, exclude=exclude, phase=phase, quiet=quiet
    )


def lockstep(
    model_a: Any, model_b: Any, inputs: Any = (), *, loss: Callable[[Any], Any] | None = None, backward: bool = True,
    level: str = "api",
) -> LockstepResult:  # fmt: skip
    """Run two models with the same inputs, call by call, and stop at the first call that computes something else.

        on_cpu, on_npu = Net(), copy.deepcopy(net).to("npu")
        print(trueup.lockstep(on_cpu, on_npu, batch))

    Each function that ``model_a`` calls is executed once more on ``model_b``'s device, in its dtype, with copies of the same inputs
    and, in backward, the same gradients, so that errors do not add up. At level ``module`` each module of ``model_b`` is called
    with what the module of the same path in ``model_a`` was given. The models are meant to be the same but for device and dtype.
    Gradients, buffers and random states are put back.

    Args:
        model_a: the trusted model.
        model_b: the model under suspicion.
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments, on ``model_a``'s device.
        loss: takes what ``model_a`` returns and gives the scalar to start the backward from; else its ``loss``, or its outputs
            weighted by fixed numbers.
        backward: False compares the forward alone.
        level: ``api`` goes by functions, ``module`` by modules: where the two models' code differs inside of them.

    Raises:
        TrueupError: ``model_b`` lacks a module of ``model_a``, or PyTorch is not imported.
    """
    if "torch" not in sys.modules:
        raise TrueupError("lockstep found no framework: import torch before you call trueup.lockstep")
    if level not in ("api", "module"):
        raise TrueupError(f"level {level!r} of a lockstep is unknown: expected api or module")
    from trueup.recording.adapters.torch.lockstep import FunctionLockstep, ModuleLockstep

    keywords = dict(inputs) if isinstance(inputs, Mapping) else {}
    arguments = () if isinstance(inputs, Mapping) else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    made = FunctionLockstep if level == "api" else ModuleLockstep
    return made(model_a, model_b).run(arguments, keywords, loss, backward=backward)


def apply_policy(model: Any | Iterable[Any] | None, policy: str | Path) -> AppliedPolicy:
    """Execute calls as a policy says: in a wider dtype, on the CPU or deterministically.

        handle = trueup.apply_policy(model, "policy.toml")
        train(model)
        print(*handle.uses(), sep="\\n")      # how many calls each rule changed
        handle.remove()                      # or: with trueup.apply_policy(...): train(model)

    The policy holds for this process, on the thread that applies it and in its backward passes. A rule that changes nothing is said
    on stderr when the handle is removed, or when the process ends. Under ``trueup capture`` the manifest says what ran with it.

    Args:
        model: the module, or modules, whose paths name the scopes; None: the first module with parameters that runs is the root.
        policy: path of a file (docs/policy.md).

    Raises:
        TrueupError: the file is no policy, neither PyTorch nor Paddle is imported, a rule asks for what
            Paddle cannot do, or a capture follows compiled code (``compile="through"``).
    """
    found = _framework(model, "apply_policy", "policy", "a policy")
    apply: Any = import_module(f"trueup.recording.adapters.{found.name}.policies").apply_policy
    handle: AppliedPolicy = apply(model, str(policy))
    return handle


def seed_all(seed: int = 1234, *, deterministic: bool = False) -> None:
    """Seed Python, NumPy and every framework that is already imported, on every device it knows.

    Args:
        seed: 0 to 2**32 - 1.
        deterministic: also ask the frameworks for deterministic kernels (slower; PyTorch raises where it has none).

    Example:
        >>> import trueup
        >>> trueup.seed_all(1234)

    Raises:
        TrueupError: the seed is out of range.
    """
    if not 0 <= seed < 2**32:
        raise TrueupError(f"seed {seed} is out of range: expected 0 to {2**32 - 1}")
    os.environ["PYTHONHASHSEED"] = str(seed)  # for processes started from here; this one has its hash seed already
    seed_imported(seed)
    if deterministic and (torch := sys.modules.get("torch")) is not None:
        _make_deterministic(torch)
    if deterministic and (tensorflow := sys.modules.get("tensorflow")) is not None:
        tensorflow.config.experimental.enable_op_determinism()


def _make_deterministic(torch: Any) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
