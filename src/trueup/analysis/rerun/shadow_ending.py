"""What `trueup capture --shadow -- COMMAND` says when the command has ended."""

from __future__ import annotations

import sys
from pathlib import Path

from trueup.foundation.model import TrueupError
from trueup.recording.execution.shadow_result import open_result


def tell(directory: Path, code: int, *, decides: bool) -> int:
    """Say on stderr what the shadow found.

    Args:
        directory: the capture.
        code: exit code of the command.
        decides: whether a command that succeeded takes the verdict's exit code.

    Returns:
        ``code``; with ``decides`` and a command that succeeded 0 nothing wrong, 1 wrong, 2 could not tell.
    """
    try:
        result = open_result(directory)
    except TrueupError as error:  # nothing was captured, and that was said
        if directory.exists():
            print(f"trueup: what the shadow found cannot be read: {error}", file=sys.stderr, flush=True)
        return code or (2 if decides else 0)
    for line in result.sentence.splitlines():
        print(f"trueup: {line}", file=sys.stderr)
    print(f"trueup: the table of errors: trueup shadow-report {directory}", file=sys.stderr, flush=True)
    return code or (result.exit_code if decides else 0)
