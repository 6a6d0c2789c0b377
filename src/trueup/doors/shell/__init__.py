"""An interactive look at two captures (`trueup shell BASE CAND`), with the commands of precision_tool's prompt.

`session` holds the captures and their comparison, each read when a command first needs it; `lines` takes a line apart and runs
its command; `checking`, `looking` and `rerunning` hold the commands, which call what `trueup compare`, `show`, `diff`, `overflow`
and `capture` call; `prompt` is the terminal, with `completing`. Only `cli` imports this package, and `compat.precision_tool`.
"""

from __future__ import annotations

__all__ = ["run"]

from trueup.doors.shell.prompt import run
