"""``python -m trueup_compat.precision_tool.cli``: the tool's prompt, which is `trueup shell` over what ``precision_data`` holds.

    PrecisionTool > ac -c
    PrecisionTool > vcs -c 0.98 -l 10

Behind the name a command may stand: one of the prompt's (``cli.py vcs -c 0.98``), or ``tf_dump``, ``npu_dump``, ``npu_overflow``
with the training to run, ``vector_compare``, ``compare``, ``data FOLDER``.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trueup.doors.report.terminal import Terminal
from trueup.exchange.readers import import_dump
from trueup.foundation.model import TrueupError
from trueup.foundation.store import layout
from trueup.foundation.words.wording import clean
from trueup_compat.precision_tool import config
from trueup_compat.precision_tool.recording import saved_steps

PROMPT = "PrecisionTool > "
SAME = {"compare": "cp", "vector_compare": "vc"}
RUNNING = {"npu_dump": "PRECISION_TOOL_DUMP", "npu_overflow": "PRECISION_TOOL_OVERFLOW"}
FOREIGN = {"tf": ("tf/dump",), "npu": ("npu/debug_0/dump", "temp/decode/dump_convert")}
"""Where the tool has .npy files of a side, below ``precision_data``."""


def run(arguments: Sequence[str]) -> int:
    """Run a command, or the prompt; return an exit code as `trueup shell` does.

    Raises:
        TrueupError: there is nothing to look at, or a command cannot be run.
    """
    words = list(arguments)
    if words and words[0] == "data":
        if len(words) < 2:
            raise TrueupError("data needs the folder that holds precision_data.\n  next:     cli.py data FOLDER [COMMAND]")
        config.ROOT_DIR = str(Path(words[1]).parent if Path(words[1]).name == "precision_data" else Path(words[1]))
        words = words[2:]
    if words and words[0] == "tf_dump":
        return _tf_dump(words[1:])
    if words and words[0] in RUNNING:
        return _train(words[1:], RUNNING[words[0]])
    from trueup.doors.shell import run as shell

    baseline, candidate, overflows = _captures()
    words[:1] = [SAME.get(word, word) for word in words[:1]]
    lines = [shlex.join(words)] if words else []
    return shell(baseline, candidate, Terminal(), lines, prompt=PROMPT, results=config.results(), overflows=overflows)


def _captures() -> tuple[Path, Path | None, tuple[Path, ...]]:
    """Return the baseline, the candidate and the steps that overflowed, as far as they are there.

    Raises:
        TrueupError: nothing is.
    """
    sides = [_side("tf", config.baseline()), _side("npu", config.candidate())]
    there = [path for path in sides if path is not None]
    overflows = tuple(saved_steps(config.overflow()))
    if not there and not overflows:
        raise TrueupError(
            f"There is nothing to look at in {config.data()}.\n"
            "  expected: what sess_dump or session_dump_config(config, action='dump') recorded, or action='overflow' found\n"
            "  got:      none of it\n  next:     run the training with one of them, in this folder; or cli.py data FOLDER"
        )
    both = [*there, *overflows[: 0 if there else 1]]
    return both[0], both[1] if len(there) > 1 else None, overflows


def _side(name: str, native: Path) -> Path | None:
    """Return a side's native capture, else one made of the .npy files that the tool left."""
    if (native / layout.MANIFEST).is_file():
        return native
    for folder in (config.data() / place for place in FOREIGN[name]):
        if any(folder.rglob("*.npy")):
            target = config.data() / "temp" / "imported" / name
            if not (target / layout.MANIFEST).is_file():
                print(import_dump(folder, target), file=sys.stderr)
            return target
    return None


def _tf_dump(command: list[str]) -> int:
    """Run a training that calls nothing of the tool, and record it as the baseline."""
    if not command:
        raise TrueupError("tf_dump needs the training.\n  expected: cli.py tf_dump 'python train.py'\n"
                          "  got:      nothing\n  next:     what sess_dump recorded needs no conversion: cli.py alone opens it")
    from trueup.recording.recorder import launch
    from trueup_compat.clearing import remove

    remove(config.baseline())
    options = {"directory": str(config.baseline()), "level": "api", "detail": "tensor", "steps": config.steps()}
    return launch.run(options, _words(command))


def _train(command: list[str], variable: str) -> int:
    """Run a training that calls ``session_dump_config`` without an action."""
    if not command:
        raise TrueupError(f"There is no training to run.\n  next:     name it, or set {variable}=True when you run it yourself")
    try:
        return subprocess.run(_words(command), env={**os.environ, variable: "True"}, check=False).returncode
    except OSError as error:
        raise TrueupError(f"{clean(command[0])} cannot be started: {error.strerror}; check its name and path") from None


def _words(command: list[str]) -> list[str]:
    return shlex.split(command[0]) if len(command) == 1 else command


def main() -> None:
    """Run; an error is one message and exit code 2."""
    try:
        sys.exit(run(sys.argv[1:]))
    except TrueupError as error:
        print(f"trueup: {clean(str(error))}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
