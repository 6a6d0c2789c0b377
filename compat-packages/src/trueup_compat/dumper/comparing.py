"""``compare -m MY.h5 -g GOLDEN.h5``: the columns of msaccucmp, and the native verdict."""

from __future__ import annotations

import csv
import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from trueup.comparison.result.comparing import compare as compare_captures
from trueup.doors.report.capture_view import read_npy
from trueup.doors.report.saving import replaced, save, text_cell
from trueup.exchange.readers import hdf5 as reader
from trueup.exchange.readers import import_dump
from trueup.exchange.readers.contents import BROKEN, reason
from trueup.exchange.readers.dump import ForeignCall, ForeignTensor, Notes, Tree, UnreadableError
from trueup.foundation.kernels import digest
from trueup.foundation.kernels.metrics import Msaccucmp
from trueup.foundation.model import Result, TrueupError
from trueup_compat.dumper.hdf5 import h5py
from trueup_compat.narrowing import beside

COLUMNS = (
    "Index", "NPUDump", "NPUDumpPath", "GroundTruthPath", "DataType", "Shape", "CosineSimilarity", "MaxAbsoluteError",
    "AccumulatedRelativeError", "RelativeEuclideanDistance", "KullbackLeiblerDivergence", "StandardDeviation", "MeanAbsoluteError",
    "RootMeanSquareError", "MaxRelativeError", "MeanRelativeError", "CompareFailReason",
)  # fmt: skip
ABSENT = "NaN"

Place = tuple[str, str, str, int]


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor of a file."""

    op: str
    seqid: int
    side: str
    tensor: ForeignTensor

    @property
    def shape(self) -> str:
        return "x".join(map(str, self.tensor.shape or ())) or "()"


def compare(
    mine: str | os.PathLike[str], golden: str | os.PathLike[str], output: str | os.PathLike[str] = "."
) -> tuple[Path, Result]:
    """Compare two files; return the table, ``result_{time}.csv``, and the native verdict.

    An operator's counterpart is the one of its number where ``mine`` was loaded (it has no inputs), else the one with the same
    name, scope and phase that is as many calls after the first. What has none has a row, too.

    Raises:
        TrueupError: a file cannot be read, or h5py is not installed.
    """
    library = h5py()
    sides = [_slots(Path(path)) for path in (mine, golden)]
    loaded = not any(slot.side == "input" for slot in sides[0].values())
    if loaded:
        sides = [{_by_number(slot): slot for slot in side.values()} for side in sides]
    keys = [*sides[0], *([] if loaded else [key for key in sides[1] if key not in sides[0]])]
    path = Path(output) / f"result_{datetime.now():%Y%m%d%H%M%S}.csv"
    with (
        library.File(mine, "r") as here, library.File(golden, "r") as there,
        replaced(path, "a file for the table") as temporary, temporary.open("w", newline="", encoding="utf-8") as file,
    ):  # fmt: skip
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for index, key in enumerate(keys):
            row = _row(sides[0].get(key), sides[1].get(key), here, there)
            table.writerow([index, *(text_cell(cell) if isinstance(cell, str) else cell for cell in row)])
    return path, _verdict(Path(mine), Path(golden), path.with_name(f"trueup_report_{path.stem.removeprefix('result_')}"))


def _slots(path: Path) -> dict[Any, _Slot]:
    """Return the tensors of a file, by what their counterparts share."""
    notes = Notes()
    if not path.is_file():
        raise TrueupError(f"{path} is no file: expected an .h5 that torch.utils.dumper, or trueup_compat.dumper, wrote")
    dump = reader.find(Tree(path, notes), notes)
    if dump is None:
        raise TrueupError(f"{path} is no HDF5 file: expected one that torch.utils.dumper, or trueup_compat.dumper, wrote")
    found: dict[Any, _Slot] = {}
    counts: Counter[tuple[str, str, str]] = Counter()
    for call in dump.parts[0].calls():
        kind = call.phase, call.scope, call.op
        place = *kind, counts[kind]
        counts[kind] += 1
        for slot in _of_call(call):
            found[place, slot.tensor.slot] = slot
    return found


def _of_call(call: ForeignCall) -> Iterator[_Slot]:
    for tensor in call.tensors:
        op, seqid, side = tensor.name.split("/")[:3]
        yield _Slot(op, int(seqid), side, tensor)


def _by_number(slot: _Slot) -> tuple[str, int, str]:
    return slot.op, slot.seqid, slot.tensor.slot


def _row(mine: _Slot | None, golden: _Slot | None, here: Any, there: Any) -> Sequence[Any]:
    known = mine or golden
    assert known is not None
    head = [
        f"{known.op}:{known.seqid}", f"/{mine.tensor.name}" if mine else "", f"/{golden.tensor.name}" if golden else "",
        known.tensor.dtype or "", known.shape,
    ]  # fmt: skip
    if mine is None or golden is None:
        return [*head, *[ABSENT] * 10, "no such tensor in the golden file" if mine else "no such tensor in my file"]
    try:
        arrays = [reader.load(file[slot.tensor.name], slot.tensor.dtype) for file, slot in ((there, golden), (here, mine))]
    except (UnreadableError, *BROKEN) as error:
        return [*head, *[ABSENT] * 10, f"cannot be read: {error if isinstance(error, UnreadableError) else reason(error)}"]
    return [*head, *_compared(*arrays)]


def _compared(golden: Any, mine: Any) -> list[Any]:
    """Return the ten measures of two arrays, and why there are none."""
    if golden.shape != mine.shape:
        return [*[ABSENT] * 10, f"shapes differ: {list(mine.shape)}, golden {list(golden.shape)}"]
    if not golden.size:
        return [*[ABSENT] * 10, "the tensors are empty"]
    try:
        said = "a single element: its cosine is the sign" if golden.size == 1 else ""
        return [*_measures(Msaccucmp.of(golden, mine)), said]
    except TypeError as error:
        return [*[ABSENT] * 10, str(error)]


def compare_arrays(mine: Path, golden: Path, output: Path) -> tuple[Path, list[tuple[str, Any]], bool | None]:
    """Compare two ``.npy`` files; return the table, ``file_result_{time}.csv``, its columns and values, and whether the elements
    are equal (None: could not tell). Raises TrueupError if a file cannot be read."""
    there, here = read_npy(golden), read_npy(mine)
    row = [0, mine.stem, str(mine), str(golden), here.dtype.name, "x".join(map(str, here.shape)) or "()", *_compared(there, here)]
    path = output / f"file_result_{datetime.now():%Y%m%d%H%M%S}.csv"
    with replaced(path, "a file for the table") as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([COLUMNS, [text_cell(cell) if isinstance(cell, str) else cell for cell in row]])
    equal = there.dtype == here.dtype and digest(there) == digest(here) if there.shape == here.shape else None
    return path, list(zip(COLUMNS, row, strict=True)), equal


def _measures(found: Msaccucmp) -> Iterator[Any]:
    (mean, spread), (my_mean, my_spread) = found.standard_deviation
    told = f"({my_mean:.3f};{my_spread:.3f}),({mean:.3f};{spread:.3f})"
    values: list[Any] = [
        found.cosine, found.max_absolute, found.accumulated_relative, found.relative_euclidean, found.kullback_leibler, told,
        found.mean_absolute, found.rmse, found.max_relative, found.mean_relative,
    ]  # fmt: skip
    for value in values:
        yield value if isinstance(value, str) or math.isfinite(value) else ABSENT if math.isnan(value) else f"{value}"


def _verdict(mine: Path, golden: Path, report: Path) -> Result:
    """Compare the captures of the two runs: those beside the files, else the files as captures."""
    with tempfile.TemporaryDirectory(prefix="trueup-dumper-") as scratch:
        found = [beside(path, ".trueup") for path in (golden, mine)]
        if None in found:
            found = [import_dump(path, Path(scratch) / side).path for side, path in (("golden", golden), ("mine", mine))]
        result = compare_captures(*[path for path in found if path is not None])
        save(result, report)
    return result
