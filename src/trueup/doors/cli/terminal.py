"""Where commands print."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console


class Terminal(Console):
    """Standard output. A reader who leaves (``| head``) ends the printing and nothing else: what is to be saved is, and the exit
    code is the verdict's."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)

    def on_broken_pipe(self) -> None:
        """Print no more."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
