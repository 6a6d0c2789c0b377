"""`assess`: a training run for a few steps on shapes alone, and each of its operators looked up.

Packages that a training reaches, and kernels in CUDA: of packages by the libraries that they link, of its own by source.
"""

from __future__ import annotations

import ast
import mmap
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.wording import counted
from trueup.migration.assess.support import (
    GRADES,
    NEWEST,
    Broken,
    Grade,
    Row,
    Run,
    Source,
    broken,
    check_version,
    graded,
    numbers,
    remedies,
    support,
)
from trueup.migration.port.proving import record
from trueup.migration.port.running import SIMULATED, redirected
from trueup.migration.rewrites import find, patch, prove
from trueup.recording.recorder.launch import run_to_the_end

INTO, STEPS, MOVED = "TRUEUP_SHAPES_INTO", "TRUEUP_SHAPES_STEPS", "TRUEUP_SHAPES_MOVED"
"""Environment variables that `trueup.simdev.shapes` reads."""
LIBRARIES = ("site-packages", "dist-packages")
ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
"""The last line of a traceback."""
TOLD: dict[Grade, tuple[str, str]] = {
    "kernel": ("has a kernel", "have a kernel"), "composite": ("is made of others", "are made of others"),
    "CPU fallback": ("goes through the CPU", "go through the CPU"), "unsupported": ("is not supported", "are not supported"),
    "dtype-limited": ("lacks a dtype", "lack a dtype"), "unknown": ("is in no table", "are in no table"),
}  # fmt: skip
"""Of one operator, and of several."""
ON_CPU = "The training puts nothing on a device: these are its calls on the CPU, as the device would get them."


@dataclass(frozen=True)
class Operator:
    """An operator with its grade. ``flops`` is of all its calls, multiplications and additions counted apart; 0 where PyTorch has
    no formula; ``share`` is of all FLOPs that PyTorch counts. ``remedies`` stand best first, ``places`` (the user's) by calls."""

    name: str
    grade: Grade
    why: str
    remedies: tuple[str, ...]
    calls: int
    flops: int
    share: float
    dtypes: tuple[str, ...]
    places: tuple[str, ...]


@dataclass(frozen=True)
class Offered:
    """A rewrite of the user's lines, proved by execution: what stands there, what takes its place, and why."""

    place: str
    title: str
    why: str
    proof: str
    before: str
    after: str
    source: str


@dataclass(frozen=True)
class Assessment:
    """What a training asks of a device. ``dynamic`` are lines whose shapes change, with why; ``reads`` lines that read numbers
    back, with how often in a step; ``memory`` is the most bytes that tensors of the device held at once in one process; ``failed``
    says why the run ended early."""

    product: str
    torch: str
    steps: int
    operators: tuple[Operator, ...]
    dynamic: tuple[tuple[str, str], ...]
    reads: tuple[tuple[str, float], ...]
    memory: int
    packages: tuple[Package, ...]
    extensions: tuple[Extension, ...]
    limits: tuple[Broken, ...]
    rewrites: tuple[Offered, ...]
    patch: str
    scripts: tuple[str, ...]
    failed: str | None
    sources: tuple[Source, ...]
    other: tuple[str, ...] = ()
    """Of a capture: scripts whose lines are not those that were recorded any more, in which no rewrite was looked for."""
    on_cpu: bool = False
    """Nothing of the training ran on a device: its calls are those of a run on the CPU."""
    moved: bool = False
    """The training names no device: its modules were moved to one when they were called."""

    @property
    def counts(self) -> dict[Grade, int]:
        """Return how many operators have each grade."""
        found = Counter(one.grade for one in self.operators)
        return {grade: found[grade] for grade in GRADES if found[grade]}

    @property
    def exit_code(self) -> int:
        """Return 0 where all runs on the device, 1 where something does not or goes through the CPU, 2 where nobody can tell."""
        bad = any(self.counts.get(grade) for grade in ("unsupported", "CPU fallback", "dtype-limited"))
        untold = self.failed or not self.operators or self.counts.get("unknown") or self.other or self.limits
        return 1 if bad or any(one.sure for one in self.limits) else 2 if untold else 0

    @property
    def sentence(self) -> str:
        """Return the conclusion in a sentence."""
        if not self.operators:
            return f"Could not tell: {self.failed or 'nothing ran on the device'}."
        parts = [f"{number} {TOLD[grade][number > 1]}" for grade, number in reversed(self.counts.items())]
        where = f"Ascend {self.product} (PyTorch {self.torch.partition('+')[0]})"
        whole = f"Of {counted(len(self.operators), 'operator')} on {where}, {', '.join(parts)}."
        listed = sum(one.share for one in self.operators if one.grade in ("kernel", "composite"))
        if 0 < listed < 1:
            whole += f" What has a kernel computes {percent(listed)} of the FLOPs."
        whole += " The training names no device: these are its operators as they would run on one." if self.moved else ""
        whole += f" Changed since, and not read: {', '.join(self.other)}." if self.other else ""
        whole += f" {ON_CPU}" if self.on_cpu else ""
        return whole + (f" The run ended early: {self.failed}." if self.failed else "")

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON-ready data."""
        whole = asdict(self) | {"sources": [msgspec.to_builtins(one) for one in self.sources]}
        return {"schema": "trueup-assess", "schema_version": 1, "sentence": self.sentence, "counts": self.counts, **whole}


def percent(share: float) -> str:
    """Write a share; what is not all is not written as 100 %, what is not nothing not as 0 %."""
    if 0 < share < 0.001:
        return "under 0.1 %"
    return "over 99.9 %" if 0.999 < share < 1 else f"{100 * share:.3g} %"


def assess(
    command: Sequence[str], *, product: str = "A2", cann: str = NEWEST, steps: int = 2, timeout: float | None = 600.0
) -> Assessment:
    """Run a training on a device that computes shapes and no numbers, and say what a real one has for it.

    One that puts nothing on a device runs once more, its modules moved to it (``moved``); where it has none, or does not run so, on
    the CPU, recorded, and its calls there are looked up (``on_cpu``).

    Args:
        command: the program and its arguments: ``("python", "train.py")``, for CUDA, an NPU, or whatever accelerator is there; or
            a script and its arguments, which this Python runs.
        product: of Ascend: A2, A3 or 950DT.
        cann: a version of CANN ("5.1"), whose limits are asked; the newest by default.
        steps: of the optimizer, after which the run ends.
        timeout: seconds that it may take; None: any.

    Raises:
        UsageError: that is no version of CANN.
        TrueupError: the command cannot start.
    """
    check_version(cann)
    command = _command(command)
    runs, failed = _shapes(command, steps, timeout)
    moved = bool(runs) and not any(run.rows for run in runs)
    if moved:
        runs, failed = _shapes(command, steps, timeout, moved=True)
    if not runs:
        raise TrueupError(
            f"Nothing of the command could be looked at.\n  where:    {' '.join(command)}\n"
            "  expected: a training in PyTorch, run by a Python that has trueup installed\n"
            f"  got:      {failed or 'no import of torch'}\n"
            "  next:     run the command by itself; then name that Python: trueup assess -- .venv/bin/python train.py"
        )
    found = _assessed(runs, product, cann, failed)
    if not moved or (found.operators and failed is None):
        return replace(found, moved=moved)
    with tempfile.TemporaryDirectory(prefix="trueup-assess-") as folder:
        into = Path(folder, "cpu")
        why = record(into, Path(), list(command), {SIMULATED: None}, steps, timeout=timeout)
        if why is not None:
            return replace(found, failed=f"nothing ran on the device; on the CPU {why}")
        its = assess_capture(into, product=product, cann=cann, timeout=timeout)
    return replace(its, packages=found.packages, limits=its.limits or found.limits, on_cpu=True)


def _shapes(command: Sequence[str], steps: int, timeout: float | None, *, moved: bool = False) -> tuple[list[Run], str | None]:
    """Run a command on shapes, with ``moved`` its modules on the device in any case; return what ran there, and why it failed."""
    with tempfile.TemporaryDirectory(prefix="trueup-assess-") as folder:
        into = Path(folder, "shapes")
        into.mkdir()
        log = Path(folder, "log")
        environment = {SIMULATED: "shapes", INTO: str(into), STEPS: str(steps), MOVED: "1" if moved else ""}
        ran = redirected(command, Path(folder), environment=environment, output=log, timeout=timeout)
        runs = [msgspec.json.decode(path.read_bytes(), type=Run) for path in sorted(into.glob("*.json"))]
        lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return runs, None if ran.exit_code == 0 else _last_words(lines, ran.exit_code)


def assess_capture(directory: Path, *, product: str = "A2", cann: str = NEWEST, timeout: float | None = 600.0) -> Assessment:
    """Say what a device has for the calls of a capture, of its first steps: each is made once more on shapes alone.

    Args:
        directory: of the capture. Its scripts are read where they were, for rewrites; a script in which a recorded line has another
            text now is left out.
        product: of Ascend: A2, A3 or 950DT.
        cann: a version of CANN, whose limits are asked.
        timeout: seconds that it may take; None: any.

    Raises:
        UsageError: that is no version of CANN.
        TrueupError: it holds no capture, or none of PyTorch's calls.
    """
    check_version(cann)
    capture = open_capture(directory)
    offered, made, other = _rewrites_of(capture)
    with tempfile.TemporaryDirectory(prefix="trueup-assess-") as folder:
        into, log = Path(folder), Path(folder, "log")
        command = [sys.executable, "-m", "trueup.simdev.recorded", str(directory.absolute())]
        environment = {**os.environ, SIMULATED: "shapes", INTO: folder}
        environment.pop(STEPS, None)
        code = run_to_the_end(command, environment, log, timeout)
        runs = [msgspec.json.decode(path.read_bytes(), type=Run) for path in into.glob("*.json")]
        lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    if not runs or not runs[0].rows:
        raise TrueupError(
            f"No operator of {directory} could be looked at.\n  expected: a capture of a training in PyTorch, level api or aten\n"
            f"  got:      {_last_words(lines, code) if code else 'no call of either'}\n  next:     trueup show {directory}"
        )
    runs[0].packages.clear()
    found = _assessed(runs, product, cann, None if code == 0 else _last_words(lines, code), offered)
    return replace(found, memory=0, rewrites=offered, patch=made, other=other)


def _rewrites_of(capture: Capture) -> tuple[tuple[Offered, ...], str, tuple[str, ...]]:
    """Return the rewrites of the catalogue at lines that a capture ran, the patch, and scripts that are not as they were."""
    lines: dict[str, dict[int, str | None]] = {}
    for rank in capture.ranks:
        for frames, text in capture.sites(rank).values():
            for at, frame in enumerate(frames):
                file, _, line = frame.partition(" in ")[0].rpartition(":")
                if file.endswith(".py") and line.isdecimal() and not any(place in file for place in LIBRARIES):
                    lines.setdefault(file, {}).setdefault(int(line), text if at == 0 else None)
    same, other = {}, []
    for file, its in lines.items():
        try:
            now = Path(file).read_text("utf-8").split("\n")  # its lines as Python counts them
        except (OSError, UnicodeDecodeError):
            other.append(file)
            continue
        if all(line <= len(now) and (text is None or now[line - 1].strip() == text.strip()) for line, text in its.items()):
            same[Path(file)] = set(its)
        else:
            other.append(file)
    return *_rewrites(same), tuple(os.path.relpath(file) for file in other)


def _command(command: Sequence[str]) -> Sequence[str]:
    if not command or not command[0].endswith((".py", ".ipynb")) or os.access(command[0], os.X_OK):
        return command
    if not Path(command[0]).is_file() or command[0].endswith(".ipynb"):
        got = "a notebook" if Path(command[0]).is_file() else "no such file"
        raise TrueupError(
            f"{command[0]} cannot be assessed.\n  expected: a script in Python, or a command that runs one\n  got:      {got}\n"
            "  next:     trueup assess -- python train.py"
        )
    return [sys.executable, *command]


def _last_words(lines: Sequence[str], code: int) -> str:
    """Return what a run said last: the line of the exception, where there is one; of several ranks, that of the first to fail."""
    ranked = [found for line in lines if (found := line.partition("]: ")[2]) and line.startswith("[rank") and ERROR.match(found)]
    if ranked:
        return ranked[0][:300].rstrip(".")
    errors = [line for line in lines if ERROR.match(line)]
    return (errors or lines or [f"exit code {code}"])[-1][:300].rstrip(".")


def _assessed(
    runs: Sequence[Run], product: str, cann: str, failed: str | None, known: tuple[Offered, ...] | None = None
) -> Assessment:
    rows = [row for run in runs for row in run.rows]
    version = runs[0].torch
    steps = max(max(run.steps for run in runs), 1)
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.operator, []).append(row)
    total = sum(row.flops for row in rows)
    operators = [_operator(name, its, product, numbers(version), total) for name, its in by_name.items()]
    operators.sort(key=lambda one: (GRADES.index(one.grade), -one.flops, -one.calls, one.name))
    changing = [row for row in rows if row.site and row.site[0] and row.is_dynamic]
    dynamic = dict.fromkeys((row.place for row in changing), "")
    dynamic.update((row.place, _dynamic(row)) for row in sorted(changing, key=_certainty, reverse=True))
    reads: Counter[str] = Counter()
    for row in rows:
        if row.operator == "aten::_local_scalar_dense" and row.site and row.site[0]:
            reads[row.place] += row.calls
    found = dict.fromkeys([run.script for run in runs] + [row.site[0] for row in rows if row.site])
    scripts = [Path(file) for file in found if file.endswith(".py") and not any(place in file for place in LIBRARIES)]
    where = {script: {row.site[1] for row in rows if row.site and row.site[0] == str(script)} for script in scripts}
    offered, made = _rewrites(where) if known is None else (known, "")
    titles = {one.place: one.title for one in offered}
    operators = [_with_rewrite(one, titles) for one in operators]
    imported = {name: place for run in runs for name, place in run.packages.items()}
    ran: Counter[str] = Counter()
    lacking: dict[str, list[str]] = {}
    bad = {one.name for one in operators if one.grade not in ("kernel", "composite")}
    for row in rows:
        ran[row.package] += row.calls
        if row.operator in bad and row.operator not in lacking.setdefault(row.package, []):
            lacking[row.package].append(row.operator)
    return Assessment(
        product, version, steps, tuple(operators), tuple(dynamic.items()),
        tuple((place, calls / steps) for place, calls in reads.most_common()), max(run.memory for run in runs),
        packages(imported, ran, lacking), extensions(scripts), broken(rows, imported, cann), offered, made,
        tuple(map(str, scripts)), failed, support().source,
    )  # fmt: skip


def _with_rewrite(one: Operator, titles: Mapping[str, str]) -> Operator:
    """Return an operator that needs a hand with the rewrite of its line as the equivalent, where there is one."""
    title = next((titles[place] for place in one.places if place in titles), None)
    return one if title is None or not one.remedies else replace(one, remedies=(f"rewrite: {title}", *one.remedies[1:]))


def _rewrites(where: Mapping[Path, Collection[int]]) -> tuple[tuple[Offered, ...], str]:
    """Return the rewrites that were found at lines that ran and proved, and the patch that makes them."""
    texts: dict[str, str] = {}
    found = []
    for script, lines in where.items():
        try:
            text = script.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            continue
        name = os.path.relpath(script)
        its = find(Path(name), text, lines)
        if its:
            texts[name] = text
            found += its
    asked = list({one.row.id: one.row for one in found}.values())
    proofs = {row.id: proof for row, proof in zip(asked, prove(asked), strict=True)}
    proved = [one for one in found if proofs[one.row.id].holds]
    offered = [
        Offered(f"{one.file}:{one.first}", row.title, row.why, proofs[row.id].sentence, one.before, one.after, row.source)
        for one in proved
        for row in [one.row]
    ]
    return tuple(offered), patch(proved, texts)


def _operator(name: str, rows: list[Row], product: str, version: tuple[int, ...], total: int) -> Operator:
    grade, why = min((graded(name, row, product, version) for row in rows), key=lambda one: GRADES.index(one[0]))
    places = Counter[str]()
    for row in rows:
        if graded(name, row, product, version)[0] == grade:
            places[row.place or "PyTorch itself"] += row.calls
    dtypes = tuple(sorted({dtype for row in rows for dtype in row.dtypes}))
    calls, flops = sum(row.calls for row in rows), sum(row.flops for row in rows)
    listed = tuple(place for place, _ in places.most_common())
    return Operator(name, grade, why, remedies(name, grade, rows), calls, flops, flops / total if total else 0.0, dtypes, listed)


def _certainty(row: Row) -> tuple[int, bool]:
    """Return the place of a row among those of its line: what depends on numbers by itself first, and forward before backward."""
    return ("shape", "mask").index(row.why) if row.why in ("shape", "mask") else 2, row.phase == "backward"


def _dynamic(row: Row) -> str:
    if row.why in ("shape", "mask"):
        what = "the shape of its result" if row.why == "shape" else "how many elements it writes"
        return f"{row.function or row.operator}: {what} depends on numbers"
    first, last = row.shapes[0], row.shapes[-1]
    return f"{row.function or row.operator}: {first[1]} in step {first[0]}, {last[1]} in step {last[0]}"


LINKED = (b"libcudart.so", b"libcuda.so.1", b"libnvrtc.so", b"libcublas.so", b"libcudnn.so")
"""Libraries of NVIDIA that a compiled module names where it has code for CUDA."""
KERNEL = re.compile(r"__global__\s+(?:\w+\s+)*?void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(")
MOST_FILES, MOST_BYTES = 400, 1 << 29
SKIPPED = {"node_modules", "site-packages", "build", "dist", "__pycache__"}
BUILDERS = ("load", "load_inline", "CUDAExtension")
"""Functions of torch.utils.cpp_extension that build kernels."""


@dataclass(frozen=True)
class Package:
    """A package beside PyTorch. ``calls`` is how many operators ran from it, ``lacking`` which of them the device lacks, ``cuda``
    its compiled modules that link CUDA."""

    name: str
    calls: int
    lacking: tuple[str, ...]
    cuda: tuple[str, ...]


@dataclass(frozen=True)
class Extension:
    """Kernels in CUDA beside the script: a source and its kernels, or a line that builds them."""

    place: str
    kernels: tuple[str, ...]


def linked(place: str) -> tuple[str, ...]:
    """Return the compiled modules of a package's folder, or the one file, that link CUDA, relative to the folder."""
    root = Path(place)
    files = sorted(root.rglob("*.so"))[:MOST_FILES] if root.is_dir() else [root] if root.suffix == ".so" else []
    return tuple(os.path.relpath(file, root.parent) for file in files if _links(file))


def _links(file: Path) -> bool:
    try:
        if not 0 < file.stat().st_size <= MOST_BYTES:
            return False
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as held:
            return any(held.find(name) >= 0 for name in LINKED)
    except OSError:
        return False


def packages(imported: Mapping[str, str], ran: Mapping[str, int], lacking: Mapping[str, Sequence[str]]) -> tuple[Package, ...]:
    """Return the packages that ran operators or link CUDA, most operators first."""
    found = [Package(name, ran.get(name, 0), tuple(lacking.get(name, ())), linked(place)) for name, place in imported.items()]
    return tuple(sorted((one for one in found if one.calls or one.cuda), key=lambda one: (-one.calls, one.name)))


def extensions(scripts: Sequence[Path]) -> tuple[Extension, ...]:
    """Return the kernels in CUDA in the folders of these scripts, and the lines of the scripts that build some."""
    found = [Extension(os.path.relpath(file), kernels) for file in _sources(scripts) if (kernels := _kernels(file))]
    for script in scripts:
        found += [Extension(f"{os.path.relpath(script)}:{line}", ()) for line in _builders(script)]
    return tuple(found)


def _sources(scripts: Sequence[Path]) -> Iterator[Path]:
    seen = 0
    for folder in dict.fromkeys(script.parent for script in scripts):
        for where, folders, names in os.walk(folder):
            folders[:] = [one for one in folders if not one.startswith(".") and one not in SKIPPED]
            for name in sorted(names):
                if name.endswith((".cu", ".cuh")) and seen < MOST_FILES:
                    seen += 1
                    yield Path(where, name)


def _kernels(file: Path) -> tuple[str, ...]:
    try:
        return tuple(dict.fromkeys(KERNEL.findall(file.read_text("utf-8", "replace")[:MOST_BYTES])))
    except OSError:
        return ()


def _builders(script: Path) -> Iterator[int]:
    try:
        tree = ast.parse(script.read_text("utf-8"))
    except (OSError, ValueError, SyntaxError):
        return
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "torch.utils.cpp_extension"
        for alias in node.names
        if alias.name in BUILDERS
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in names or (called.rpartition(".")[2] in BUILDERS and "cpp_extension" in called):
                yield node.lineno
