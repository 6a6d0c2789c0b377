"""Whether a capture holds all that its calls need: each is executed where it was recorded, and must give the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trueup.analysis.rerun.replay import LEVELS, Settings, run
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture, open_capture
from trueup.recording.execution.outcomes import BY_PARTS, Replay

NAMED = ("scope", "op", "ordinal", "slot", "seq")
PLACE = ("payload_segment", "payload_key", "payload_view", "digest")


@dataclass(frozen=True)
class Verification:
    """What `verify` returns."""

    capture: str
    replay: Replay = field(repr=False)
    damaged: tuple[str, ...] = ()
    """Recorded tensors whose bytes are not those that were recorded, a sentence each."""

    @property
    def reproduced(self) -> int:
        """Calls whose results are the recorded ones, bit for bit."""
        return sum(o.verdict == "accurate" for o in self.replay.outcomes)

    @property
    def by_parts(self) -> int:
        """Of those, calls that are code of the user's: reproduced by the calls inside them."""
        return sum(o.verdict == "accurate" and o.rule == BY_PARTS for o in self.replay.outcomes)

    @property
    def reasons(self) -> list[tuple[str, str, int]]:
        """``(operator, why, calls)`` of the others, most calls first."""
        found = Counter((f"{o.level} {o.kind}", o.sentence) for o in self.replay.outcomes if o.verdict != "accurate")
        return [(kind, why, number) for (kind, why), number in found.most_common()]

    @property
    def exit_code(self) -> int:
        """0: every call is reproduced and every tensor is sound, 1: some are not."""
        return int(bool(self.reasons or self.damaged))

    @property
    def sentence(self) -> str:
        """Say the result in one sentence."""
        total = len(self.replay.outcomes)
        share = f"{self.reproduced:,} of {total:,} calls ({self.reproduced / total:.1%})" if total else "no call"
        code = f" ({self.by_parts:,} of them, whose code is in no capture, by the calls inside them)" if self.by_parts else ""
        if self.reasons:
            said = f"{share} give the recorded bits when they are executed again{code}; the others are named below."
        else:
            said = f"All {total:,} calls give the recorded bits when they are executed again{code}"
            said += "." if self.damaged else ": the recording is complete."
        lost = len(self.damaged)
        return said + (f" {lost:,} recorded {'tensor is' if lost == 1 else 'tensors are'} damaged." if lost else "")


def verify(
    capture: str | Path, *, levels: tuple[str, ...] = LEVELS, patterns: tuple[str, ...] = (), processes: int = 1,
    simulated: bool = False, output: Path | None = None,
) -> Verification:  # fmt: skip
    """Execute every call of a capture on the device that recorded it.

    Raises:
        TrueupError: the capture cannot be read, keeps no bytes, or its device is not there.
    """
    opened = open_capture(capture)
    if opened.root.get("detail") != "tensor":
        raise TrueupError(
            f"{capture} keeps no elements, so nothing can be compared bit by bit\n  expected: a capture of detail tensor\n"
            f"  got:      detail {opened.root.get('detail')}\n  next:     trueup capture --detail tensor -o DIR -- COMMAND"
        )
    device, threads = _where(opened)
    settings = Settings(
        str(capture), device, levels, patterns=patterns, simulated=simulated, threads=threads, verify=True, draws=False
    )
    return Verification(str(capture), run(settings, output, processes=processes), tuple(damaged(opened)))


def damaged(capture: Capture) -> Iterator[str]:
    """Read all tensors that were kept; yield a sentence for each that is lost or holds other bytes than were recorded."""
    seen: set[tuple[Any, ...]] = set()
    for rank, step in capture.sizes:
        for row in capture.records([*NAMED, *PLACE], rank=rank, step=step).to_pylist():
            place = (rank, row["payload_segment"], row["payload_key"], str(row["payload_view"]), row["digest"])
            if row["payload_segment"] is None or place in seen:
                continue
            seen.add(place)
            try:
                capture.payload(rank, *(row[name] for name in PLACE))
            except TrueupError as error:
                scope = f"{row['scope']}/" if row["scope"] else ""
                yield f"{scope}{row['op']}#{row['ordinal']} {row['slot']} (seq {row['seq']}, step {step}, rank {rank}): {error}"


def _where(capture: Capture) -> tuple[str, int]:
    """Return the device that recorded a capture and its number of threads, on which sums depend."""
    first: dict[str, Any] = next(iter(capture.ranks.values()), {})
    names = [name for name in first.get("devices") or () if isinstance(name, str)]
    device = next((name for name in names if not name.startswith(("cpu", "meta"))), "cpu")
    threads = str((first.get("environment") or {}).get("num_threads", ""))
    return device, int(threads) if threads.isdigit() and int(threads) < 1024 else 0
