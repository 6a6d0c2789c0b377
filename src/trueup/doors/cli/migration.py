"""The commands over what a migration leaves behind: ``trueup explain-log`` (logs), ``trueup env`` (machines), ``trueup profile``
(where a step's time goes), ``trueup export`` (a model as ONNX, proved), and ``trueup checkpoint inspect|compare|repair`` (files of
weights: what they hold, how two differ, names brought back to the model's)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trueup.doors.cli import loading
from trueup.doors.cli.options import Command as Shared
from trueup.doors.cli.options import File, Html, Json, Number, Word, Words, save_as_json
from trueup.foundation.model import UsageError
from trueup.foundation.words.wording import clean


def explain_log(
    logs: Annotated[
        Words, typer.Argument(metavar="FILE...|-", help="Logs of one run: files, folders, - for standard input.")
    ] = None,
    operators: Annotated[bool, typer.Option("--operators", help="List the operators of CANN's host log instead.")] = False,
    step: Annotated[Word, typer.Option(metavar="REGEX", help="With --operators: the lines that say a step.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="How many lines of each kind to list.")] = 10,
    json: Json = None,
) -> int:
    """Say which error of a run's logs came first, across ranks, what it means and what to do; and what only follows from it.

    Exit code 0: nothing that stops a training; 1: an error that is known; 2: an error that no row knows, or of a rank whose log is
    missing. With --operators 1: something was compiled after the first step.
    """
    if not logs:
        raise UsageError(
            "There is no log to explain.\n  expected: files, folders, or - for standard input\n  got:      nothing\n"
            "  next:     trueup explain-log train.log ~/ascend/log"
        )
    with loading():
        from trueup.doors.report.migration import render_explanation, render_operators
        from trueup.doors.report.terminal import Terminal
        from trueup.migration.knowledge import explain
        from trueup.migration.knowledge import operators as list_operators

    console = Terminal()
    if operators:
        listed = list_operators(logs, step)
        render_operators(listed, limit, console)
        document, code = listed.document, listed.exit_code
    else:
        found = explain(logs)
        render_explanation(found, limit, console)
        document, code = found.document, found.exit_code
    save_as_json(document, json, console)
    return code


def env(
    machines: Annotated[Words, typer.Argument(metavar="[A [B]]", help="Captures, JSON of trueup env, files of NAME=value.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="How many variables to list.")] = 40,
    json: Json = None,
) -> int:
    """Say which variables and options this machine, another one, or two side by side run with: conflicts, and what changes numbers.

    Exit code 0: all goes together, nothing that changes numbers differs; 1: something does not, or does; 2: could not be read.
    """
    with loading():
        from trueup.doors.report.migration import render_environments
        from trueup.doors.report.terminal import Terminal
        from trueup.migration.knowledge.environment import environments

    console = Terminal()
    found = environments(machines or ())
    render_environments(found, limit, console)
    save_as_json(found.document, json, console)
    return found.exit_code


def profile(
    traces: Annotated[
        Words, typer.Argument(metavar="TRACE...|-- COMMAND...", help="Traces of a run's ranks, or a training.")
    ] = None,
    baseline: Annotated[File, typer.Option(metavar="TRACE", help="Say what became slower since this one.")] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Of a command: steps that are timed.")] = 5,
    html: Html = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="How many lines to list.")] = 20,
    json: Json = None,
) -> int:
    """Say where a training step's time goes (operator, copy and format, framework, compile, host, communication), and what to do.

    TRACE: JSON of torch.profiler or torch_npu, torch_npu's CSV or output folder, the table of key_averages(). Exit code 0: nothing
    stands out; 1: something slows the steps down, or became slower; 2: could not be read, or could not tell.
    """
    if not traces:
        raise UsageError(
            "There is nothing to profile.\n  expected: traces, or a training behind --\n  got:      nothing\n"
            "  next:     trueup profile trace.json, or trueup profile -- python train.py"
        )
    with loading():
        from trueup.doors.report.migration import profile_page, render_profile, render_steps_compared
        from trueup.doors.report.saving import write_text
        from trueup.doors.report.terminal import Terminal, print_written
        from trueup.migration.profile import compare, profiled
        from trueup.migration.profile import profile as read

    console = Terminal()
    found = [read(Path(one)) for one in traces] if all(map(is_trace, traces)) else profiled(traces, steps)
    slowest = max(found, key=lambda one: (one.exit_code == 1, one.window / max(one.steps, 1)))
    if len(found) > 1:
        for one in found:
            console.print(f"{clean(one.where)}: {clean(one.sentence)}", markup=False, soft_wrap=True)
        console.print()
    compared = None if baseline is None else compare(read(baseline), slowest)
    if compared is None:
        render_profile(slowest, limit, console)
    else:
        render_steps_compared(compared, limit, console)
    if html is not None:
        text = profile_page(slowest, compared)
        print_written(write_text(text, html, "a file that can be written, for the page"), console, "page")
    if compared is not None:
        save_as_json(compared.document, json, console)
        return compared.exit_code
    save_as_json(lambda: {**slowest.document(), "others": [one.document() for one in found if one is not slowest]}, json, console)
    return slowest.exit_code


def export(
    model: Annotated[str, typer.Argument(metavar="FILE.py:NAME", help="NAME is, or returns, a model and its inputs.")],
    output: Annotated[File, typer.Option("--output", "-o", metavar="FILE", help="The ONNX file to write.")] = None,
    check: Annotated[File, typer.Option(metavar="FILE", help="Check this ONNX file instead; nothing is written.")] = None,
    opset: Annotated[Number, typer.Option(metavar="N", min=7, max=30, help="Version of ONNX's operators.")] = None,
    capture: Annotated[
        File, typer.Option(metavar="DIR", help="Keep all values: DIR/framework and DIR/onnxruntime, for show and compare.")
    ] = None,
    json: Json = None,
) -> int:
    """Export a model to ONNX and prove that it computes the same, over several inputs and batch sizes; else name the first node.

    Exit code 0: the same numbers; 1: others; 2: it cannot be exported, read or run.
    """
    if (output is None) == (check is None):
        raise typer.BadParameter("name one file: --output to write it, or --check for one that is there", param_hint="--output")
    with loading():
        from trueup.doors.report.migration import render_exported
        from trueup.doors.report.terminal import Terminal
        from trueup.migration.export import export as run

    console = Terminal()
    found = run(model, output or check or Path(), opset=opset, check=check is not None, capture=capture)
    render_exported(found, console)
    save_as_json(found.document, json, console)
    return found.exit_code


def is_trace(word: str) -> bool:
    """Tell whether a word names a trace, or is part of a command."""
    return word.removesuffix(".gz").endswith((".json", ".csv", ".txt", ".log", ".out")) or Path(word).is_dir()


CHECKPOINTS = "Checkpoints: what they hold, how two differ, names repaired."
checkpoint = typer.Typer(add_completion=False, no_args_is_help=True, help=CHECKPOINTS)

One = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A file, or a folder of DCP, Megatron or shards.")]
Part = Annotated[Word, typer.Option(metavar="NAME", help="A part, as inspect names it; without: the weights.")]
Limit = Annotated[int, typer.Option(metavar="N", min=1, help="How many tensors to list.")]


@checkpoint.command(cls=Shared, epilog="Example: trueup checkpoint inspect model.pth")
def inspect(checkpoint: One, limit: Limit = 20, json: Json = None) -> int:
    """Say what a checkpoint holds, without running anything in it. Exit code 0: it is whole; 2: it cannot be read."""
    with loading():
        from trueup.doors.report.migration import inspected, render_inspected
        from trueup.doors.report.terminal import Terminal
        from trueup.migration.checkpoint import open_checkpoint

    console = Terminal()
    found = open_checkpoint(checkpoint)
    render_inspected(found, limit, console)
    save_as_json(lambda: inspected(found), json, console)
    return 0


@checkpoint.command(cls=Shared, epilog="Example: trueup checkpoint compare before.pt after.pt")
def compare(first: One, second: One, part: Part = None, limit: Limit = 20, json: Json = None) -> int:
    """Compare two checkpoints tensor by tensor, names without wrappers. Exit code 0: all alike; 1: not; 2: cannot be read."""
    with loading():
        from trueup.doors.report.migration import render_compared
        from trueup.doors.report.terminal import Terminal
        from trueup.migration.checkpoint import compare as run

    console = Terminal()
    found = run(first, second, part)
    render_compared(found, limit, console)
    save_as_json(found.document, json, console)
    return found.exit_code


@checkpoint.command(cls=Shared, epilog="Example: trueup checkpoint repair model.pth --like clean.pt -o fixed.safetensors")
def repair(
    checkpoint: One,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="A new file, .safetensors.")],
    like: Annotated[
        File, typer.Option(metavar="CHECKPOINT", help="Of the model as it is: torch.save(model.state_dict(), ...).")
    ] = None,
    part: Part = None,
    limit: Limit = 20,
    json: Json = None,
) -> int:
    """Write the weights of a checkpoint, and nothing else of it, under the names of the model, and prove it.

    Exit code 0: read back bitwise, and a strict load passes; 1: a strict load would fail; 2: cannot be read or written, or
    there is no --like to prove it by.
    """
    with loading():
        from trueup.doors.report.migration import render_repaired
        from trueup.doors.report.terminal import Terminal
        from trueup.migration.checkpoint import repair as run

    console = Terminal()
    found = run(checkpoint, output, like=like, part=part)
    render_repaired(found, limit, console)
    save_as_json(found.document, json, console)
    return found.exit_code
