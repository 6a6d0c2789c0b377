"""Yesterday's scripts, unedited: the old tools' functions over Trueup's capture and verdict, and the old tools' files beside ours.

One package for each tool: `ptdbg_ascend`, `msprobe`, `dumper`, `precision_tool`. The first three share `names` (what the tools
call a call and its tensors), `naming` (a recorder that gives those names and asks call by call whether it is wanted) and
`recording` (a capture that a script switches on and off); `clearing` removes what an earlier run left. A façade imports its
framework, which the script that calls it uses anyway. Nothing in Trueup imports this package; `trueup.exchange.readers` reads what
it writes by `marker`. `old_names` is no package: it is a folder that pip puts at the end of `sys.path`, so that
``import ptdbg_ascend`` finds the real one where there is one, and ours elsewhere. `trueup.compat` is another name of this package.
"""

from __future__ import annotations

from pathlib import Path

from trueup.recording.recorder import sites

if (_here := str(Path(__file__).resolve().parent)) not in sites.OURS:
    sites.OURS.append(_here)  # a call's stack is the user's code, not the façade's
