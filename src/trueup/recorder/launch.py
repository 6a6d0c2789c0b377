"""`trueup capture -- COMMAND`: run a command whose Python processes capture themselves, then say what was captured."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trueup
from trueup.arming import SITE, VARIABLE
from trueup.model import TrueupError
from trueup.recorder.options import CaptureOptions
from trueup.store import open_capture


def run(options: Mapping[str, Any], command: Sequence[str]) -> int:
    """Run a command under capture.

    Args:
        options: ``directory``, and the keywords of `CaptureOptions.of`.
        command: the program and its arguments.

    Returns:
        The command's own exit code if it failed, 2 if nothing was captured, else 0.

    Raises:
        TrueupError: an option is wrong, the command cannot start, or the directory holds a capture or cannot be written.
    """
    chosen = dict(options)
    directory = Path(chosen.pop("directory")).resolve()
    parsed = CaptureOptions.of(**{k: v for k, v in chosen.items() if v is not None})
    program = shutil.which(command[0])
    if program is None:
        raise TrueupError(f"cannot start {command[0]!r}: no such program on PATH; nothing was captured")
    _prepare(directory)
    code = _execute([program, *command[1:]], _environment(directory, parsed, list(command)))
    captured = _summarise(directory, code)
    return code if code else 0 if captured else 2


def _prepare(directory: Path) -> None:
    if directory.is_dir() and any(directory.iterdir()):
        raise TrueupError(f"{directory} is not empty: nothing was run; choose another -o or remove it")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise TrueupError(f"cannot write {directory}: {error.strerror}; nothing was run; choose another -o") from None


def _environment(directory: Path, options: CaptureOptions, command: list[str]) -> dict[str, str]:
    import json

    run_id = uuid.uuid4().hex
    root = {
        "trueup_version": trueup.__version__, "command": command, "levels": list(options.levels), "detail": options.detail,
        "config": json.loads(options.to_json()), "run": run_id,
    }  # fmt: skip
    order = {"directory": str(directory), "options": options.to_json(), "root": root}
    package = str(Path(trueup.__file__).resolve().parents[1])
    inherited = os.environ.get("PYTHONPATH", "")
    path = [SITE, *([] if package in sys.path[1:] and "site-packages" in package else [package]), *filter(None, [inherited])]
    return {**os.environ, VARIABLE: json.dumps(order), "PYTHONPATH": os.pathsep.join(path)}


def _execute(command: list[str], environment: dict[str, str]) -> int:
    """Run to the end, passing on the signals that ask us to stop."""
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        raise TrueupError(f"cannot start {command[0]!r}: {error.strerror}; nothing was captured") from None
    handlers = {s: signal.signal(s, lambda number, _: process.send_signal(number)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _summarise(directory: Path, code: int) -> bool:
    """Say on stderr what was captured and by whom; return whether anything was."""
    ended = f"; the command ended with exit code {code}" if code else ""
    try:
        capture = open_capture(directory)
    except TrueupError:
        capture = None
    silent = _silent_processes(directory)
    if capture is None or not capture.rows:
        why = "; ".join(silent) if silent else "no process of the command imported PyTorch"
        print(f"trueup: nothing was captured into {directory}: {why}{ended}", file=sys.stderr)
        return False
    ranks = f", {len(capture.ranks)} ranks" if len(capture.ranks) > 1 else ""
    print(
        f"trueup: captured {capture.rows:,} slots over {len(capture.steps)} steps{ranks} into {directory}{ended}",
        file=sys.stderr,
    )
    for text in [*silent, *capture.problems]:
        print(f"trueup: note: {text}", file=sys.stderr)
    return True


def _silent_processes(directory: Path) -> list[str]:
    """Describe the armed processes that recorded nothing, with their reasons."""
    import json

    said = []
    for path in sorted((directory / "processes").glob("*.json")):
        report = json.loads(path.read_text())
        if not report.get("calls"):
            argv = " ".join(map(str, report.get("argv", [])[:3]))
            said.append(f"process {report.get('pid')} ({argv}) captured nothing: {report.get('failure') or report.get('why')}")
    return said
