"""Recorded tensors, each checked against the digest of its record, and measured against those of another run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trueup.comparison.graph.streams import Array, Located
from trueup.kernels import Pair, hexadecimal, pair
from trueup.model import TrueupError
from trueup.store import Capture
from trueup.store.parallel import side_by_side

Payload = Callable[[Located, "int | None"], Array | None]
"""Returns the tensor that a record names, None where it is lost: also where it has not the digest that the record has."""

Wanted = tuple[tuple[Located, "int | None"], ...]
"""Where a tensor of the baseline and one of the candidate lie, with their digests."""

HEAPS = 32
"""Tasks that pairs of tensors are measured in, several at a time."""


def read_payload(capture: Capture, rank: int, place: Located, expected: int | None) -> Array | None:
    """Return a tensor, None where it is lost: the capture then says so, and its sketch is measured instead."""
    segment, key, view = place
    try:
        return capture.payload(rank, segment, key, view, None if expected is None else hexadecimal(expected))
    except TrueupError as error:
        text = f"rank {rank}: {error}"
    if text not in capture.lost:
        capture.lost.append(text)
    return None


def compare_payloads(payloads: tuple[Payload, Payload], wanted: Sequence[Wanted]) -> dict[Wanted, Pair | None]:
    """Measure pairs of tensors, several at a time; None where one is lost, they differ in size, or a dtype holds no numbers."""
    heaps = [wanted[first::HEAPS] for first in range(min(HEAPS, len(wanted)))]  # a task for each pair would cost more than it does
    done = side_by_side(lambda heap: [(one, _pair(payloads, one)) for one in heap], heaps)
    return dict(one for heap in done for one in heap)


def _pair(payloads: tuple[Payload, Payload], wanted: Wanted) -> Pair | None:
    first, second = (payload(*one) for payload, one in zip(payloads, wanted, strict=True))
    if first is None or second is None or first.size != second.size:
        return None
    try:
        return pair(*((first, second) if first.shape == second.shape else (first.reshape(-1), second.reshape(-1))))
    except TypeError:  # a dtype that holds no numbers
        return None
