"""`trueup capture -- COMMAND`: run a command whose Python processes capture themselves, then say what was captured."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from trueup.foundation.model import TrueupError
from trueup.foundation.version import VERSION
from trueup.recording.arming import SITE, VARIABLE
from trueup.recording.recorder import summary
from trueup.recording.recorder.options import CaptureOptions

PASSED_ON = (signal.SIGINT, signal.SIGTERM)
TIMED_OUT = 124
"""What `execute` returns for a command that did not end in time, as timeout(1) does."""
GRACE = 10.0
"""Seconds between asking a command that is too late to end, and ending it."""


def run(options: Mapping[str, Any], command: Sequence[str]) -> int:
    """Run a command under capture.

    Args:
        options: ``directory``, ``policy`` (path of a policy to run with, or None), and the keywords of `CaptureOptions.of`.
        command: the program and its arguments.

    Returns:
        The command's own exit code if it failed (128 + n if signal n ended it), 2 if nothing was captured or the capture
        failed and the run was to stop then (``on_error``), else 0.

    Raises:
        TrueupError: an option is wrong, the command cannot start, or the directory is not empty or cannot be written.
    """
    chosen = dict(options)
    directory = Path(chosen.pop("directory")).absolute()
    policy = _policy(chosen.pop("policy", None), chosen)
    parsed = CaptureOptions.of(**{k: v for k, v in chosen.items() if v is not None})
    order: dict[str, Any] = {} if policy is None else {"policy": list(policy)}
    return summary.tell(directory, parsed, execute(directory, parsed, command, **order))


def execute(
    directory: Path, options: CaptureOptions, command: Sequence[str], *, environment: Mapping[str, str] | None = None,
    output: Path | None = None, timeout: float | None = None, **order: Any,
) -> int:  # fmt: skip
    """Run a command whose processes arm themselves; return its exit code, as a shell would, or `TIMED_OUT`.

    Args:
        directory: where they write.
        options: what they see.
        command: the program and its arguments.
        environment: variables that are set for it besides.
        output: file that what it prints goes to; else where our own goes.
        timeout: seconds after which it is ended, with all that it started.
        order: what else they are told (see `trueup.recording.arming.process`).

    Raises:
        TrueupError: the command cannot start, or the directory is not empty or cannot be written.
    """
    program = _program(command[0])
    made = _prepare(directory)
    try:
        told = {**_environment(directory, options, list(command), order), **(environment or {})}
        return _execute([program, *command[1:]], told, output, timeout)
    except OSError as error:
        _undo(made)
        raise TrueupError(_not_started(command[0], f"{program}: {error.strerror or error}")) from None


def _policy(path: str | None, options: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return path and text of the policy to run with."""
    if path is None:
        return None
    from trueup.recording.policies import load

    read = load(path)
    if options.get("compile") == "through":
        raise TrueupError(
            "A policy and --compile=through exclude each other; nothing was run.\n"
            f"  where:    --policy {path}\n  expected: --compile=off, which runs the Python code of what was compiled\n"
            "  got:      through\n"
            "  next:     leave out --compile=through: no rule reaches into compiled code"
        )
    return read.path, read.text


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        path = Path(name)
        if path.is_dir():
            got = "a directory"
        elif path.is_file():
            got = "a file that is not executable" if os.sep in name else f"a file that is not on PATH; write ./{name}"
        else:
            got = "no such file" if os.sep in name else "no program of that name on PATH"
        raise TrueupError(_not_started(name, got))
    return found


def _not_started(name: str, got: str) -> str:
    return (
        f"The command cannot start; nothing was captured.\n"
        f"  where:    {name}\n"
        f"  expected: a program on PATH, or the path of an executable\n"
        f"  got:      {got}\n"
        f"  next:     correct what follows -- (for example: trueup capture -o runs/cpu -- python train.py)"
    )


def _prepare(directory: Path) -> list[Path]:
    """Make the directory and prove that it can be written; return the folders that were made, innermost first."""
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise TrueupError(_not_writable(directory, f"{directory} is not empty"))
        probe = directory / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        _undo(made)
        raise TrueupError(_not_writable(directory, _obstacle(directory, error))) from None
    return made


def _undo(made: Sequence[Path]) -> None:
    for folder in made:
        try:
            folder.rmdir()
        except OSError:  # it was never made
            continue


def _obstacle(directory: Path, error: OSError) -> str:
    place = next((place for place in (directory, *directory.parents) if place.exists()), directory)
    return f"{place} is a directory: {error.strerror}" if place.is_dir() else f"{place} is not a directory"


def _not_writable(directory: Path, got: str) -> str:
    return (
        f"The capture cannot be written; nothing was run.\n"
        f"  where:    {directory}\n"
        f"  expected: a new or an empty directory that can be written\n"
        f"  got:      {got}\n"
        f"  next:     name another directory with -o, or remove this one"
    )


def _environment(
    directory: Path, options: CaptureOptions, command: list[str], more: Mapping[str, Any]
) -> dict[str, str]:
    root: dict[str, Any] = {
        "trueup_version": VERSION,
        "command": command,
        "levels": list(options.levels),
        "detail": options.detail,
        "config": json.loads(options.to_json()),
        "run": uuid.uuid4().hex,
    }
    order = {"directory": str(directory), "options": options.to_json(), "root": root, **more}
    if "policy" in more:
        root["policy"] = dict(zip(("path", "text"), more["policy"], strict=True))
    package = str(Path(__file__).resolve().parents[3])
    # An installed Trueup is found by its own Python; its neighbours must not get before those of another one.
    installed = Path(package).name in ("site-packages", "dist-packages")
    path = [SITE, *([] if installed else [package]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, VARIABLE: json.dumps(order), "PYTHONPATH": os.pathsep.join(path)}


def _execute(command: list[str], environment: dict[str, str], output: Path | None, timeout: float | None) -> int:
    """Run to the end, passing on the signals that ask us to stop; return the exit code as a shell would.

    A command with a time limit is the first of a process group of its own, which is ended as a whole.

    Raises:
        OSError: the command did not start.
    """
    started: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        asked.append(number)
        own_group = timeout is not None
        if started and (own_group or not (number == signal.SIGINT and asked.count(number) == 1 and _has_terminal())):
            started[0].send_signal(number)

    handlers = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        with nullcontext() if output is None else output.open("wb") as file:
            errors = None if file is None else subprocess.STDOUT
            own = timeout is not None
            started.append(subprocess.Popen(command, env=environment, stdout=file, stderr=errors, start_new_session=own))
        for number in asked:  # before there was anything to pass it on to
            started[0].send_signal(number)
        code = _waited(started[0], timeout)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _waited(process: subprocess.Popen[bytes], timeout: float | None) -> int:
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(GRACE)
        return TIMED_OUT


def _has_terminal() -> bool:
    """Tell whether Ctrl-C in our terminal reaches the command by itself: a second one would cut its clean-up short."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False
