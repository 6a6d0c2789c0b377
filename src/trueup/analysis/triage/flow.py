"""The three steps, in order, up to the first that explains the difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from trueup.analysis.triage import anomalies, network, optimisations
from trueup.analysis.triage.found import Outcome, Triage, Trial
from trueup.analysis.triage.running import Runner, losses_of
from trueup.analysis.triage.table import Table, load
from trueup.foundation.model import TrueupError
from trueup.foundation.redaction import redacted
from trueup.foundation.store import open_capture

STEPS = 10
TIMEOUT = 3600.0
DIRECTORY = "trueup-triage"
NAMES = (anomalies.NAME, optimisations.NAME, network.NAME)


def triage(
    command: Sequence[str], output: str | Path | None = None, *, baseline: str | Path | None = None, steps: int = STEPS,
    timeout: float | None = TIMEOUT, table: Table | None = None, every: bool = False,
    tell: Callable[[Trial], None] = lambda _: None,
) -> Triage:  # fmt: skip
    """Run a command with and without what optimises it, and say which step explains that its training is wrong.

    Args:
        command: the training; it is run some ten times, ``steps`` steps each.
        output: for the runs and the report; else ``trueup-triage``, or the next free of that name.
        baseline: a capture of the training where it is right.
        steps: after how many a run ends.
        timeout: seconds after which a run is ended; None: never.
        table: the switches; else those that come along (`trueup.analysis.triage.table.load`).
        every: make all steps, also after one that explains it.
        tell: called with each run that was made.

    Raises:
        TrueupError: the command cannot start, the baseline is no capture, or ``output`` holds something.
    """
    folder = _folder(output)
    before = None if baseline is None else open_capture(baseline)
    runner = Runner(command, folder / "runs", table or load(), steps=steps, timeout=timeout, tell=tell)
    as_it_is = runner.losses("as it is")
    outcomes: list[Outcome] = []

    def made(place: Path | None) -> Sequence[Callable[[], Outcome]]:
        search = optimisations.Search(runner, folder, as_it_is, None if before is None else losses_of(before))
        return (
            lambda: anomalies.look(runner, folder, place), search.look, lambda: network.look(runner, folder, place),
        )  # fmt: skip

    if as_it_is.failed:
        outcomes.append(Outcome(NAMES[0], "could not tell", f"run as it is, {as_it_is.failed}", as_it_is.remarks))
        outcomes += [Outcome(name, "not reached", "the command does not run") for name in NAMES[1:]]
    else:
        for name, look in zip(NAMES, made(None if before is None else Path(before.path)), strict=True):
            explained = next((one.name for one in outcomes if one.status == "DEVIATES"), None)
            if explained is not None and not every:
                outcomes.append(Outcome(name, "not reached", f"{explained} explains it; --all goes on"))
            else:
                outcomes.append(look())
    named = None if before is None else str(before.path)
    return Triage(tuple(redacted(command)), folder, outcomes, runner.trials, named, as_it_is.framework)


def _folder(output: str | Path | None) -> Path:
    if output is None:
        names = (Path(f"{DIRECTORY}{'' if k == 1 else f'-{k}'}") for k in range(1, 10_000))
        return next(name for name in names if not name.exists())
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TrueupError(f"{folder} is not empty\n  next:     name another directory with -o, or remove it")
    return folder
