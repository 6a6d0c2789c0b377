"""A tensor named on the command line: ``CAP:CALL:SLOT``, or a ``.npy`` file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trueup.doors.report.npy import read_npy
from trueup.doors.report.selecting import Call, Selection, find_call
from trueup.doors.report.tensor_view import payload_of, record_of
from trueup.foundation.model import NUMBERS, TensorStats, TrueupError
from trueup.foundation.words.wording import one_line

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trueup.foundation.store import Capture


@dataclass(frozen=True, slots=True)
class Operand:
    """A side of a comparison, as far as it was kept."""

    name: str
    """What it is, for a person."""
    where: str
    dtype: str | None
    shape: tuple[int, ...] | None
    values: NDArray[Any] | None
    stats: TensorStats | None = None
    sketch: NDArray[np.float64] | None = None
    digest: str | None = None
    missing: str = ""
    """Why there are no values."""


@dataclass(frozen=True, slots=True)
class Address:
    """``CAP:CALL:SLOT``, taken apart; no call: a file."""

    path: Path
    call: str = ""
    slot: str = ""


def read_address(text: str, like: Address | None = None) -> Address:
    """Take a name apart: the capture is the shortest directory that it begins with.

    Args:
        text: ``CAP:CALL:SLOT`` or a file; with ``like`` also a capture alone, of which the same call and slot are meant.
        like: the other side.

    Raises:
        TrueupError: it is neither.
    """
    whole = Path(text)
    if whole.is_file():
        return Address(whole)
    if like is not None and like.call and whole.is_dir():
        return replace(like, path=whole)
    at = text.find(":")
    while at >= 0:
        call, _, slot = text[at + 1 :].rpartition(":")
        if call and slot and Path(text[:at]).is_dir():
            return Address(Path(text[:at]), call, slot)
        at = text.find(":", at + 1)
    raise TrueupError(
        f"{one_line(text)} names no tensor.\n"
        "  expected: CAP:CALL:SLOT (CAP a directory, CALL a seq or scope/op#n, SLOT as `trueup show` lists it), or a .npy file\n"
        f"  got:      {one_line(text)!r}\n"
        "  next:     such as runs/cpu:neck.lstm/torch.lstm#0:output.0; `trueup show CAP` lists calls and slots"
    )


def operand(address: Address, chosen: Selection) -> Operand:
    """Return the tensor at an address.

    Args:
        address: where it is.
        chosen: among which calls of a capture; its path does not matter.

    Raises:
        TrueupError: it is not there, or cannot be read.
    """
    if not address.call:
        values = read_npy(address.path)
        return Operand(one_line(str(address.path)), "", values.dtype.name, values.shape, values)
    from trueup.foundation.store import open_capture

    capture = open_capture(address.path)
    call = find_call(capture, replace(chosen, path=address.path), address.call)
    return recorded(capture, address.path, call, record_of(call, address.slot))


def recorded(capture: Capture, path: Path, call: Call, record: dict[str, Any]) -> Operand:
    """Return the tensor of a slot's record.

    Raises:
        TrueupError: its elements cannot be read.
    """
    scope = f"{call.scope}/" if call.scope else ""
    name = one_line(f"{path}  {scope}{call.op}#{call.ordinal}  {record['slot']}")
    where = one_line(f"seq {call.seq}, {call.phase}, step {call.step}, rank {call.rank}, {call.level}")
    shape = record.get("shape")
    plain = isinstance(shape, list) and all(type(size) is int and 0 <= size < 2**48 for size in shape)
    sizes = tuple(shape) if plain and shape is not None else None
    if record.get("dtype") is None or sizes is None:
        return Operand(name, where, record.get("dtype"), sizes, None, missing="is no tensor")
    kept = Operand(name, where, record["dtype"], sizes, None, _stats(record), None, record.get("digest"))
    if record.get("payload_segment") is not None:
        return replace(kept, values=payload_of(capture, record))
    if kept.stats is None:
        return replace(kept, missing="only a digest was kept" if kept.digest else "nothing was kept but its shape")
    return replace(kept, sketch=_sketch(capture, record), missing="only statistics were kept")


def _stats(record: dict[str, Any]) -> TensorStats | None:
    if record.get("n_nan") is None:
        return None
    numbers = {name: float("nan") if record[name] is None else record[name] for name in NUMBERS}
    return TensorStats(numel=record["numel"], digest=record.get("digest"), **numbers)  # type: ignore[arg-type]


def _sketch(capture: Capture, record: dict[str, Any]) -> NDArray[np.float64] | None:
    from trueup.foundation.store import sketch_matrix

    place = {name: record[name] for name in ("rank", "step", "seq", "slot")}
    rows = sketch_matrix(capture.records(["sketch"], **place).column("sketch"))
    return None if len(rows) != 1 or np.isnan(rows).any() else rows[0]
