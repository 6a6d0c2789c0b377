"""The commands for what a run left behind: ``trueup explain-log FILE...`` and ``trueup env``."""

from __future__ import annotations

from typing import Annotated

import typer

from trueup.doors.cli import loading
from trueup.doors.cli.options import Json, Word, Words, save_as_json
from trueup.foundation.model import TrueupError


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
        raise TrueupError(
            "There is no log to explain.\n  expected: files, folders, or - for standard input\n  got:      nothing\n"
            "  next:     trueup explain-log train.log ~/ascend/log"
        )
    with loading():
        from trueup.doors.report.knowledge import render_explanation, render_operators
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
        from trueup.doors.report.knowledge import render_environments
        from trueup.doors.report.terminal import Terminal
        from trueup.migration.knowledge.environment import environments

    console = Terminal()
    found = environments(machines or ())
    render_environments(found, limit, console)
    save_as_json(found.document, json, console)
    return found.exit_code
