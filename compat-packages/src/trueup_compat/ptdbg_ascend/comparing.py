"""`compare` and `compare_distributed`: the native verdict, and the table that ptdbg_ascend wrote."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from trueup.comparison.result.comparing import compare as compare_captures
from trueup.doors.report.saving import save
from trueup.doors.report.spreadsheet import Named
from trueup.exchange.readers import import_dump
from trueup.exchange.readers.ascend import Marker, marker_beside, names_beside
from trueup.foundation.model import Result, TrueupError
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.wording import clean
from trueup_compat.narrowing import narrowed
from trueup_compat.ptdbg_ascend import table
from trueup_compat.ptdbg_ascend.errors import CompareException
from trueup_compat.ptdbg_ascend.parsing import rows_of

REQUIRED = ("npu_pkl_path", "bench_pkl_path")
KNOWN = (*REQUIRED, "npu_dump_data_dir", "bench_dump_data_dir", "is_print_compare_log")
EXPLAINED = "their rule looks at one row alone; the verdict explains these differences by rounding and by what the calls were given"
"""Of rows that do not pass beside a verdict that says aligned: gradients that are all rounding, as of a bias before a norm."""
_RANK = re.compile(r"rank(\d+)")


@dataclass(frozen=True, slots=True)
class _Side:
    capture: Capture
    named: Named
    rank: int | None
    steps: tuple[int, ...] | None
    has_stacks: bool


def compare(
    input_param: Mapping[str, Any], output_path: str | os.PathLike[str], stack_mode: bool = False, auto_analyze: bool = True,
    suffix: str = "", fuzzy_match: bool = False, *, columns: str | None = None,
) -> Result:  # fmt: skip
    """Compare two dumps: ``compare_result_{time}.csv``, ``advisor_{time}.txt``, and the native report in ``trueup_report_{time}``.

    Args:
        input_param: ``npu_pkl_path`` and ``bench_pkl_path``; the folders of tensors lie beside them, whatever the other keys say.
        output_path: an existing folder, or one that can be made.
        stack_mode: add a column of call stacks.
        auto_analyze: write the advisor's file.
        suffix: of the files' names.
        fuzzy_match: calls are matched without their numbers, which is done in any case.
        columns: ``2.3`` or ``6.0``; None: by the layout of the NPU's dump.

    Returns:
        What `trueup.compare` returns.

    Raises:
        CompareException: a key is missing, a file is none, or stacks are asked for that the dump does not have.
        TrueupError: the two cannot be compared.
    """
    del fuzzy_match
    return _compare(input_param, output_path, stack_mode, auto_analyze, suffix, columns, None)


def _compare(
    input_param: Mapping[str, Any], output_path: str | os.PathLike[str], stack_mode: bool, auto_analyze: bool, suffix: str,
    columns: str | None, overall: Result | None,
) -> Result:  # fmt: skip
    """Compare two dumps; ``overall``: the verdict on all ranks, which is told instead of that on this one."""
    unknown = [name for name in input_param if name not in KNOWN]
    lacking = [name for name in REQUIRED if not input_param.get(name)]
    if unknown or lacking:
        said = f"lacks {', '.join(lacking)}" if lacking else f"has unknown keys {', '.join(map(str, unknown))}"
        raise CompareException.of_parameter(f"input_param {said}: expected {', '.join(KNOWN)}")
    npu, bench = (Path(str(input_param[name])) for name in REQUIRED)
    folder, now = Path(output_path), f"{datetime.now():%Y%m%d%H%M%S}{suffix}"
    version = columns or _columns_of(npu)
    table.headings(version, "tensor", stacks=stack_mode)  # said before the comparison, not after
    candidate, baseline = _sides(npu, bench, folder / f"trueup_imported_{now}")
    if stack_mode and not candidate.has_stacks:
        raise CompareException(CompareException.INVALID_COMPARE_MODE, f"{npu} has no stacks: dump with mode='api_stack'")
    result = compare_captures(baseline.capture, candidate.capture)
    file = folder / f"compare_result_{now}.csv"
    named = baseline.named, candidate.named
    failed = table.write(file, result, named, candidate.rank, candidate.steps, version, stacks=stack_mode)
    if auto_analyze:
        _advise(folder / f"advisor_{now}.txt", overall or result, failed)
    if overall is None:
        _tell(result, folder / f"trueup_report_{now}")
    explained = f"; {EXPLAINED}" if failed.count and result.verdict == "aligned" else ""
    print(f"table: {file} ({failed.count} rows did not pass{explained})", flush=True)
    return result


def _tell(result: Result, report: Path) -> None:
    print(f"{result}\nreport: {save(result, report) / 'index.html'}", flush=True)


def compare_distributed(
    npu_dump_dir: str | os.PathLike[str], bench_dump_dir: str | os.PathLike[str], output_path: str | os.PathLike[str], **kwargs: Any
) -> dict[int, Result]:
    """Compare the ranks of two dumps, each folder of ``rankN`` with that of its number; return the results by rank.

    Args:
        npu_dump_dir: holds ``rank0``, ``rank1`` ...
        bench_dump_dir: the same.
        output_path: where the files go, with the ranks in their names.
        kwargs: `compare`'s ``stack_mode``, ``auto_analyze``, ``fuzzy_match``, ``columns``.

    Raises:
        CompareException: a folder holds no ranks, or the two hold different ones.
        TrueupError: two ranks cannot be compared.
    """
    unknown = sorted(set(kwargs) - {"stack_mode", "auto_analyze", "fuzzy_match", "columns"})
    if unknown:
        raise CompareException.of_parameter(f"compare_distributed knows no {', '.join(unknown)}")
    npu, bench = (_ranks(Path(path)) for path in (npu_dump_dir, bench_dump_dir))
    if npu.keys() != bench.keys():
        said = f"{npu_dump_dir} has ranks {sorted(npu)}, {bench_dump_dir} has {sorted(bench)}: expected the same"
        raise CompareException.of_parameter(said)
    overall = _over_all_ranks(npu, bench)
    if overall is not None:
        _tell(overall, Path(output_path) / f"trueup_report_{datetime.now():%Y%m%d%H%M%S}")
    found = {}
    for rank in sorted(npu):
        pair = {"npu_pkl_path": str(npu[rank]), "bench_pkl_path": str(bench[rank])}
        options = {"stack_mode": False, "auto_analyze": True, "columns": None} | kwargs
        options.pop("fuzzy_match", None)
        found[rank] = _compare(pair, output_path, suffix=f"_rank{rank}-rank{rank}", overall=overall, **options)
    return found


def _over_all_ranks(npu: Mapping[int, Path], bench: Mapping[int, Path]) -> Result | None:
    """Compare the captures behind all ranks: a collective's result is another rank's doing, which no rank alone can tell.

    None where there is one rank, or no one pair of captures that holds them all.
    """
    captures: list[Path] = []
    for side in (bench, npu):
        markers = {rank: marker_beside(pkl) for rank, pkl in side.items()}
        found = {(side[rank].parent / marker.capture).resolve() for rank, marker in markers.items() if marker is not None}
        steps = {marker.step for marker in markers.values() if marker is not None}
        if len(side) < 2 or None in markers.values() or len(found) != 1 or steps != {None}:
            return None
        captures += found
    try:
        return compare_captures(*captures)
    except TrueupError:  # each rank says why
        return None


def _ranks(folder: Path) -> dict[int, Path]:
    """Return the file of records of each rank, by number: as text rank10 comes before rank2."""
    found = {}
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    for entry in entries:
        if (match := _RANK.fullmatch(entry.name)) and entry.is_dir():
            files = sorted(entry.glob("*dump.pkl"))
            if len(files) != 1:
                said = f"{entry} holds {len(files)} files *dump.pkl: expected one"
                raise CompareException(CompareException.NO_DUMP_FILE_ERROR, said)
            found[int(match[1])] = files[0]
    if not found:
        raise CompareException(CompareException.INVALID_PATH_ERROR, f"{folder} has no folders rank0, rank1 ...: give a dump's")
    return found


def _columns_of(pkl: Path) -> str:
    first = next(rows_of(pkl), [""])[0]
    return "6.0" if re.search(r"\.\d+\.(forward|backward)", first) else "2.3"


def _sides(npu: Path, bench: Path, imported: Path) -> tuple[_Side, _Side]:
    """Return two dumps as captures: the native ones of the same runs if both are there, else the files of both, imported."""
    for pkl in (npu, bench):
        if not pkl.is_file():
            raise CompareException(CompareException.INVALID_FILE_ERROR, f"{pkl} is no file: expected a dump's dump.pkl")
    markers = marker_beside(npu), marker_beside(bench)
    if None not in markers and len({(marker.rank, marker.step) for marker in markers if marker is not None}) == 1:
        try:
            first, second = (_native(pkl, marker) for pkl, marker in zip((npu, bench), markers, strict=True) if marker is not None)
        except TrueupError as error:
            print(f"trueup: the native captures cannot be used, so the files are imported: {error}", flush=True)
        else:
            return first, second
    made = [_imported(pkl, imported / name) for pkl, name in ((npu, "npu"), (bench, "bench"))]
    return made[0], made[1]


def _native(pkl: Path, marker: Marker) -> _Side:
    native = pkl.parent / marker.capture
    if native.is_symlink():
        raise TrueupError(f"{native} is a link: give the dump with its own capture")
    plain = Path(os.path.normpath(native))  # for whoever reads it; not where a link above gives `..` another meaning
    native = plain if plain.is_dir() and plain.samefile(native) else native
    capture, names = narrowed(native, marker.rank, marker.step), names_beside(pkl)
    separator = "." if any(".forward" in name or ".backward" in name for name in names.values()) else "_"
    return _Side(capture, table.Names(names, marker, separator), marker.rank, None if marker.step is None else (marker.step,), True)


def _imported(pkl: Path, target: Path) -> _Side:
    capture = open_capture(import_dump(pkl.parent, target).path)
    return _Side(capture, table.ForeignNames(capture), None, None, bool(capture.sites(min(capture.ranks))))


def _advise(path: Path, result: Result, failed: table.Failed) -> None:
    """Write who is to blame: the first row of a culprit, else the first that did not pass; nobody where the runs are aligned."""
    aligned = result.verdict == "aligned"
    suspect = table.NONE if aligned else failed.first if failed.culprit == table.NONE else failed.culprit
    told = [f"Suspect Nodes: {suspect}", f"Expert Advice: {clean(str(result))}"]
    if failed.count and aligned:
        told.append(f"{failed.count} rows did not pass, the first {failed.first}: {EXPLAINED}")
    path.write_text("\n".join(told) + "\n", encoding="utf-8")
