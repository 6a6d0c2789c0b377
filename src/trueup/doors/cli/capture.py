"""``trueup capture -o DIR [options] -- COMMAND``: run a training command and record what it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from trueup.doors.cli import selection
from trueup.foundation.model import LEVELS, PHASES, TrueupError

Several = Optional[list[str]]  # noqa: UP045 - typer evaluates it on Python 3.10
Word = Optional[str]  # noqa: UP045

Command = Annotated[Several, typer.Argument(metavar="-- COMMAND...", show_default=False, help="What to run.")]
Output = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--output", "-o", metavar="DIR", show_default=False, help="Where the capture goes."),
]
Level = Annotated[Several, typer.Option(metavar="LEVEL", help="module, api or aten, repeated; or all (the default).")]
Detail = Annotated[
    str, typer.Option(metavar="DETAIL", help="digest, stats or tensor: how much is kept of each tensor.")
]
Steps = Annotated[Word, typer.Option(metavar="STEPS", help="0:3 (steps 0, 1, 2), 5: or 0,2,5; else all.")]
Stop = Annotated[bool, typer.Option("--stop", help="End the run when the last of --steps is recorded.")]
Ranks = Annotated[Word, typer.Option(metavar="RANKS", help="Likewise; else all.")]
Include = Annotated[
    Several, typer.Option(metavar="PATTERN", help="Scopes or operators to record: a glob or /expression/.")
]
Exclude = Annotated[Several, typer.Option(metavar="PATTERN", help="Scopes or operators to leave out.")]
Phase = Annotated[Several, typer.Option(metavar="PHASE", help=f"{', '.join(PHASES)}; else all.")]
OnError = Annotated[
    str,
    typer.Option("--on-error", metavar="WHAT", help="continue or stop: the run, where the capture cannot be written."),
]
Compile = Annotated[
    str,
    typer.Option(
        metavar="COMPILE",
        help="off runs the Python code of what torch.compile compiled and sees all of it; through follows the compiled run.",
    ),
]
Policy = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(metavar="FILE", show_default=False, help="Run calls as this policy.toml says (docs/policy.md)."),
]

Shadow = Annotated[
    Word,
    typer.Option(
        metavar="DEVICE:DTYPE", show_default=False,
        help="Compute each operator once more there (cpu:float64) with the same inputs, and say which is wrong by itself.",
    ),
]  # fmt: skip
InputsFrom = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        metavar="BASE", show_default=False,
        help="Give each module what it was given in this capture (of --detail tensor), so that it shows its own error alone.",
    ),
]  # fmt: skip
Force = Annotated[
    Word,
    typer.Option(
        metavar="LEVEL", show_default=False,
        help="With --inputs-from: to which calls: module, api or aten; else the first of these that BASE has.",
    ),
]  # fmt: skip
ShadowSample = Annotated[
    float, typer.Option("--shadow-sample", metavar="SHARE", help="Share of the calls; the first of each kind always.")
]
ShadowSeed = Annotated[int, typer.Option("--shadow-seed", metavar="N", help="Chooses which.")]
ShadowTime = Annotated[
    Word,
    typer.Option("--shadow-time", metavar="LIMIT", show_default=False, help="Most that a step may take longer: 200ms, 0.5x."),
]
ShadowLargest = Annotated[
    float, typer.Option("--shadow-largest", metavar="MB", help="Calls with a larger tensor are left out, and counted.")
]
ShadowExit = Annotated[
    bool,
    typer.Option("--shadow-exit", help="Exit with 1 where a call is wrong, 2 where nobody can tell; else as the command did."),
]


def capture(
    command: Command = None,
    output: Output = None,
    level: Level = None,
    detail: Detail = "stats",
    steps: Steps = None,
    stop: Stop = False,
    ranks: Ranks = None,
    include: Include = None,
    exclude: Exclude = None,
    phase: Phase = None,
    on_error: OnError = "continue",
    compile: Compile = "off",
    policy: Policy = None,
    inputs_from: InputsFrom = None,
    force: Force = None,
    shadow: Shadow = None,
    shadow_sample: ShadowSample = 1.0,
    shadow_seed: ShadowSeed = 0,
    shadow_time: ShadowTime = None,
    shadow_largest: ShadowLargest = 1024.0,
    shadow_exit: ShadowExit = False,
) -> int:
    """Run a command and record what its training computes.

    The command needs no edit; python, torchrun and scripts that start workers are all followed.
    """
    if output is None or not command:
        missing = "-o DIR, where the capture goes" if output is None else "a command to run"
        example = "trueup capture -o runs/cpu -- python train.py"
        raise TrueupError(
            f"There is nothing to capture.\n  expected: {missing}\n  got:      none\n  next:     {example}"
        )
    options: dict[str, Any] = {
        "directory": str(output),
        "level": selection.levels(level) or LEVELS,
        "detail": detail,
        "steps": steps,
        "stop": stop,
        "ranks": ranks,
        "include": tuple(include or ()) or None,
        "exclude": tuple(exclude or ()) or None,
        "phase": selection.words(phase) or None,
        "on_error": on_error,
        "compile": compile,
        "policy": None if policy is None else str(policy),
    }
    if inputs_from is not None:
        from trueup.recording.execution.golden_inputs import GoldenInputs

        force = selection.one(force, LEVELS, "--force")
        GoldenInputs(inputs_from, force)  # that it can lend its inputs is found out before anything runs
        options |= {"inputs_from": str(inputs_from.absolute()), "force": force}
    elif force is not None:
        said = "--force needs a baseline.\n  expected: --inputs-from BASE\n  got:      none\n  next:     name one, or leave it out"
        raise TrueupError(said)

    from trueup.recording.recorder import launch

    if shadow is None:
        return launch.run(options, command)

    from dataclasses import asdict

    from trueup.analysis.rerun.shadow_ending import tell
    from trueup.recording.execution.shadow_options import ShadowOptions

    chosen = ShadowOptions.of(shadow, sample=shadow_sample, seed=shadow_seed, time=shadow_time, largest_mb=shadow_largest)
    return tell(output, launch.run(options | {"shadow": asdict(chosen)}, command), decides=shadow_exit)
