"""The commands around a run that moves. Before it: ``trueup port SCRIPT|FOLDER -o OUT``, ``trueup assess -- COMMAND``, and ``trueup
simdev run -- COMMAND``, a command with the simulated accelerator (``trueup simdev list`` says what that can get wrong, and what it
may legitimately do differently).

Over what it leaves behind: ``trueup explain-log`` (logs), ``trueup env`` (machines), ``trueup profile`` (where a step's time goes),
``trueup export`` (a model as ONNX, proved), and ``trueup checkpoint inspect|compare|repair`` (files of weights: what they hold, how
two differ, names brought back to the model's).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from trueup.doors.cli import loading
from trueup.doors.cli.options import Command as Shared
from trueup.doors.cli.options import (
    File,
    Following,
    Html,
    Json,
    Number,
    Output,
    Overwrite,
    Simulated,
    Timeout,
    Word,
    Words,
    cleared,
    required,
    save_as_json,
)
from trueup.foundation.model import UsageError
from trueup.foundation.words.wording import clean, counted

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.migration.port import Ported
    from trueup.simdev.tables import Row

PROVE = "Run it in both folders, the original on the CPU, the port on the simulated device, and compare."


ALSO = (
    "Edits that change numbers or the device: int32-labels, drop-last, shuffle-validation, float32, one-device, similar, "
    "specify-device, no-jit; with commas between."
)
DISTRIBUTED = "The script that starts it, seen from the folder: one process becomes several, by torchrun."

simdev = typer.Typer(
    name="simdev",
    help="The simulated accelerator: a device `npu` on the CPU, with faults and noise to switch on.",
    no_args_is_help=True,
    add_completion=False,
)


class To(str, Enum):
    """Which device the new script is for."""

    agnostic = "agnostic"
    npu = "npu"


def port(
    source: Annotated[Words, typer.Argument(metavar="SCRIPT|FOLDER | -- COMMAND...", help="What is ported; or run.")] = None,
    output: Annotated[File, typer.Option("--output", "-o", metavar="DIR", help="A new folder; or the source, in place.")] = None,
    to: Annotated[To, typer.Option(help="agnostic: one script for CUDA, NPU and CPU; npu: with torch_npu.")] = To.agnostic,
    rules: Annotated[File, typer.Option("--rules", "-r", metavar="FILE", help="Rules of your own (docs/port.md).")] = None,
    also: Annotated[Word, typer.Option(metavar="NAMES", help=ALSO)] = None,
    distributed: Annotated[Word, typer.Option(metavar="MAIN", help=DISTRIBUTED)] = None,
    model: Annotated[Word, typer.Option(metavar="NAME", help="With --distributed: the model's variable.")] = None,
    prove: Annotated[Word, typer.Option(metavar="COMMAND", help=PROVE)] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="With --prove: how many.")] = 3,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit code 1 if there is something to change.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Take back what a port wrote into SCRIPT|FOLDER.")] = False,
    tables: Annotated[bool, typer.Option("--tables", help="Write change_list.csv and unsupported_api.csv into DIR, too.")] = False,
    live: Annotated[bool, typer.Option("--run", help="Write nothing: run a command, CUDA's calls sent to the device.")] = False,
    simulated: Simulated = False,
    overwrite: Overwrite = False,
    patch: Annotated[File, typer.Option(metavar="FILE", help="With --run: save what was done as a patch, for git apply.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="How many lines to list.")] = 20,
    html: Html = None,
    json: Json = None,
) -> int:
    """Write a training's scripts anew for another device: the smallest change, and a reason for each line that is left.

    Exit code 0: done, and with --prove the same; 1: with --check there is something to change, with --prove it trains otherwise; 2:
    could not be written, proved or taken back, or a file of the folder that may need changes could not be read.
    """
    words = required(source, "port", "port train.py -o ported", "a script or a folder; with --run a command")
    if live:
        return _run_live(words, to, simulated=simulated, limit=limit, patch=patch, json=json)
    place = _one_place(words)
    if undo:
        return _take_back(place)
    _refuse(place, output, prove, check=check)
    with loading():
        from trueup.doors.report.port import render, render_page, save_tables
        from trueup.doors.report.saving import write_text
        from trueup.doors.report.terminal import Terminal, print_written
        from trueup.migration.port import port as run
        from trueup.migration.port.proving import words_of

    if prove is not None:
        words_of(prove)  # refused before anything is written
    console, target = Terminal(), None if check else output
    if overwrite and target is not None and not place.resolve().is_relative_to(target.resolve()):  # that is a port in place
        cleared(target, "a port", ("trueup-port.json",))
    names = also.split(",") if also else ()
    result = run(place, target, to=to.value, rules=rules, also=names, distributed=distributed, model=model)
    result = replace(result, proof_follows=prove is not None)
    render(result, limit, console)
    if tables and target is not None:
        for path in save_tables(result, target if target.is_dir() else target.parent):
            print_written(path, console)
    code, document = 1 if check and result.changes else 0, result.document()
    if prove is not None and target is not None:
        code = _prove(result, place, target, prove, steps, document, spread=distributed is not None)
    code = code or (2 if result.open else 0)
    if html is not None:
        print_written(write_text(render_page(document), html, "a file that can be written, for the page"), console, "page")
    save_as_json(lambda: document, json, console)
    return code


def _one_place(words: list[str]) -> Path:
    """Return the script or folder; raises UsageError where there are several."""
    if len(words) > 1:
        raise UsageError(
            f"One script or folder is ported at a time.\n  expected: {words[0]}\n  got:      {' '.join(words)}\n"
            f"  next:     trueup port {words[0]} -o ported; or with --run, to run a command"
        )
    return Path(words[0])


def _refuse(place: Path, output: Path | None, prove: str | None, *, check: bool) -> None:
    """Raise UsageError where nothing says where to write, or what is not written is to be proved."""
    if output is None and not check:
        raise UsageError(
            "Nothing says where the new scripts go.\n  expected: -o OUT, or --check\n  got:      neither\n"
            f"  next:     trueup port {place} -o ported"
        )
    if prove is not None and check:
        raise UsageError(
            "A port that is not written cannot be proved.\n  expected: --prove, or --check\n  got:      both\n"
            f"  next:     trueup port {place} -o ported --prove {prove!r}"
        )


def _run_live(
    words: list[str], to: To, *, simulated: bool, limit: int, patch: Path | None, json: Path | None
) -> int:
    """Run a command with CUDA's calls sent to the device; return its exit code."""
    with loading():
        from trueup.doors.report.port import render_ran
        from trueup.doors.report.saving import write_patch
        from trueup.doors.report.terminal import Terminal, print_written
        from trueup.migration.port.running import patch as patch_of
        from trueup.migration.port.running import run

    console, ran = Terminal(), run(words, simulated=simulated)
    render_ran(ran, limit, console)
    if patch is not None:
        print_written(write_patch(patch_of(ran, to.value), patch), console, "patch")
    save_as_json(ran.document, json, console)
    return ran.exit_code


def _take_back(place: Path) -> int:
    with loading():
        from trueup.doors.report.port import render_undone
        from trueup.doors.report.terminal import Terminal
        from trueup.migration.port import undo

    count, kept = undo(place)
    render_undone(count, kept, Terminal())
    return 2 if kept else 0


def _prove(
    ported: Ported, place: Path, output: Path, command: str, steps: int, document: dict[str, Any], *, spread: bool
) -> int:
    """Run the command before and after, with ``spread`` as several processes, too; the document gets what was found."""
    with loading():
        from trueup.doors.report.port import render_proof
        from trueup.doors.report.terminal import Terminal
        from trueup.migration.port.proving import prove, prove_spread

    proof = prove(place, output, command, steps=steps, look=ported.look, branches=ported.branches)
    render_proof(proof, Terminal())
    document["proof"] = {"sentence": proof.sentence, "exit_code": proof.exit_code, "steps": proof.steps}
    if not spread:
        return proof.exit_code
    several = prove_spread(output, command, steps=steps)
    render_proof(several, Terminal())
    document["spread"] = asdict(several)
    return max(proof.exit_code, several.exit_code)


class Product(str, Enum):
    """Of Ascend."""

    a2 = "A2"
    a3 = "A3"
    dt950 = "950DT"


def assess(
    command: Annotated[Words, typer.Argument(metavar="SCRIPT | CAPTURE | -- COMMAND...", help="What to run.")] = None,
    product: Annotated[Product, typer.Option(help="The device's product.")] = Product.a2,
    cann: Annotated[str, typer.Option(metavar="VERSION", help="Of CANN, whose limits are asked.")] = "newest",
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps of the optimizer, after which the run ends.")] = 2,
    timeout: Timeout = 600.0,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="How many rows of each kind to list.")] = 20,
    json: Json = None,
    output: Output = None,
    patch: Annotated[File, typer.Option(metavar="FILE", help="Save the rewrites as a patch, for git apply.")] = None,
) -> int:
    """Say which operators a training needs and what an Ascend NPU has for them, before it is ported; shapes run, numbers do not.

    Of a capture: the same of the calls that it holds, without running anything of the training.

    Exit code 0: all run on the device; 1: some do not, or go through the CPU; 2: could not tell.
    """
    words = required(command, "run", "assess")
    with loading():
        from trueup.doors.report.port import render_assessment, save_assessment
        from trueup.doors.report.saving import write_patch
        from trueup.doors.report.terminal import Terminal, print_saved, print_written
        from trueup.migration.assess import assess as run
        from trueup.migration.assess import assess_capture

    console = Terminal()
    if len(words) == 1 and Path(words[0]).is_dir():
        found = assess_capture(Path(words[0]), product=product.value, cann=cann, timeout=timeout or None)
    else:
        found = run(words, product=product.value, cann=cann, steps=steps, timeout=timeout or None)
    render_assessment(found, limit, console)
    if patch is not None:
        written = write_patch(found.patch, patch)
        print_written(written, console, "patch" if found.patch else "empty patch")
    if output is not None:
        print_saved(save_assessment(found, output), console)
    save_as_json(found.document, json, console)
    return found.exit_code


@simdev.command(
    "run", cls=Shared, context_settings={"allow_interspersed_args": False}, epilog="Example: trueup simdev run -- python train.py"
)
def run_command(
    command: Following = None,
    devices: Annotated[int, typer.Option(metavar="N", min=1, help="How many devices there are.")] = 1,
) -> int:
    """Run a command with a device `npu` in PyTorch and in Paddle, where it is built the first time; in TensorFlow `npu_device` and
    `npu_bridge` find it. TRUEUP_SIMULATED=1 before `python` reaches PyTorch alone. The exit code is the command's."""
    from trueup.recording.recorder.launch import program, run_to_the_end, search_path

    words = required(command, "run", "simdev run")
    given = {"TRUEUP_SIMULATED": "1", "TRUEUP_SIMULATED_DEVICES": str(devices), "PYTHONPATH": search_path(os.environ)}
    return run_to_the_end([program(words[0]), *words[1:]], {**os.environ, **given}, None, None)


@simdev.command("list", cls=Shared, epilog="Example: trueup simdev list")
def list_table() -> None:
    """List the faults and the noise of the simulated accelerator."""
    from trueup.doors.report.terminal import Terminal
    from trueup.simdev import FAULTS, NOISE

    render_catalogue(FAULTS.values(), NOISE.values(), Terminal())


def render_catalogue(faults: Collection[Row], noise: Collection[Row], console: Console) -> None:
    """Print all rows: name, operator and phase; what happens; what is to blame."""
    console.print(Text(f"{counted(len(faults), 'fault')}: the comparison must name them", "bold"))
    for row in faults:
        _print(row, console)
    console.print()
    console.print(Text(f"{counted(len(noise), 'kind')} of noise: legitimate differences that it must not blame", "bold"))
    for row in noise:
        _print(row, console)


def _print(row: Row, console: Console) -> None:
    console.print()
    console.print(Text.assemble((row.name, "bold"), "  ", (f"{row.op}, {row.phase}", "dim")))
    console.print(Padding(Text(row.what), (0, 0, 0, 4), expand=False))
    console.print(Padding(Text.assemble(("to blame: ", "dim"), row.blame), (0, 0, 0, 4), expand=False))


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
