"""An interactive look at two captures (`trueup shell BASE CAND`), with the commands of precision_tool's prompt.

`session` holds the captures and their comparison, each read when a command first needs it; `commands` call what `trueup compare`,
`show`, `diff`, `overflow` and `capture` call; `prompt` takes lines and runs them; `completion`, of the extra `shell`,
is what Tab offers. Only `cli` and `trueup_compat.precision_tool` import this package.
"""

from __future__ import annotations

__all__ = ["run"]

from trueup.doors.shell.prompt import run
