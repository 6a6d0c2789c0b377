"""`port`: scripts written anew for another device, beside the old ones; `undo`: what it wrote, taken back."""

from __future__ import annotations

import ast
import bisect
import itertools
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import msgspec
import xxhash

from trueup.foundation import toml
from trueup.foundation.model import TrueupError
from trueup.foundation.store.durable import write_file
from trueup.foundation.words.wording import counted
from trueup.migration.port import choosing, reading
from trueup.migration.port.choosing import NO_CHOICE, OF_DISTRIBUTED, Distributor
from trueup.migration.port.flow import Project
from trueup.migration.port.reading import Script
from trueup.migration.port.remaining import Kernels, branches, in_settings
from trueup.migration.port.rules import Given, Name, Own, OwnName, OwnRules, OwnSink, Rules, Switch, builtin, own, refused
from trueup.migration.port.writing import Edit, Writer

RECORD = "trueup-port.json"
"""What a port changed, beside what it wrote: for a report, and to take it back."""
SKIPPED = {".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
MOST = 20_000
"""Files that a folder may have."""
MOST_BYTES = 64 << 20
"""Bytes that a file that is no script is looked at with."""
LETTERS = re.compile(rb"cuda|nccl", re.IGNORECASE)
READABLE = f"a script that Python {sys.version_info[0]}.{sys.version_info[1]} reads"
RUN = "try it by trueup simdev run -- python train.py (TRUEUP_SIMULATED=1 reaches PyTorch alone)"
ELSEWHERE = {
    "import paddle": f"a script of Paddle says paddle.set_device('npu'): {RUN}",
    "import tensorflow": f"a script of TensorFlow imports npu_device (npu_bridge before version 2): {RUN}",
}
"""What is said of scripts of another framework, by what they import."""
NOTEBOOK = "a notebook: save it as a script first (jupyter nbconvert --to script)"


@dataclass(frozen=True)
class Change:
    """One change: bytes of a line, by which rule and why. Places are of the new script."""

    line: int
    start: int
    before: str
    after: str
    rule: str
    why: str


@dataclass(frozen=True)
class Seen:
    """A line that has the letters and stays, and the reason; ``look``: somebody has to look at it."""

    path: str
    line: int
    text: str
    reason: str
    look: bool


@dataclass(frozen=True)
class Changed:
    """A script with changes; digests are XXH3-128 of the bytes."""

    path: str
    before: str
    after: str
    changes: tuple[Change, ...]
    lines: tuple[tuple[int, str, str], ...]
    """The lines that differ, as a number in the old script and the text before and after; runs of lines are joined."""


@dataclass(frozen=True)
class Ported:
    """What `port` did. ``unread`` are scripts that could not be read and were copied as they are, with the reason."""

    to: str
    scripts: int
    lines: int
    changed: tuple[Changed, ...]
    seen: tuple[Seen, ...]
    unread: tuple[str, ...]
    since: str | None
    written: Path | None
    effects: tuple[str, ...] = ()
    """What changes in the training itself, beside the device."""
    added: tuple[str, ...] = ()
    """Files that came along, by their path in the output."""
    branches: tuple[str, ...] = ()
    """Lines that do something else where an accelerator is there, with their condition."""
    open: tuple[str, ...] = ()
    """Those of ``unread`` that may name a device: whether they have something to change, nobody could tell."""
    proof_follows: bool = False
    """Whether the port is run next: its proof has the word then, and ``sentence`` says of none that it lacks."""

    @property
    def changes(self) -> int:
        """Return the number of changes."""
        return sum(len(one.changes) for one in self.changed)

    @property
    def look(self) -> list[Seen]:
        """Return the lines that somebody has to look at."""
        return [one for one in self.seen if one.look]

    @property
    def sentence(self) -> str:
        """Return what was done, in a sentence."""
        if not self.changes:
            what = f"Nothing to change in {counted(self.scripts, 'script')}"
        else:
            done = "Converted" if self.proof_follows else "Converted, not proved"
            what = f"{done if self.written else 'To convert'}: {counted(self.changes, 'change')} in "
            what += f"{len(self.changed)} of {counted(self.scripts, 'script')}, for {self.to}"
            what += f" (PyTorch {self.since} or later)" if self.since and self.to == "agnostic" else ""
        rest = [counted(len(self.look), "line") + " to look at"] if self.look else []
        unsure = f" ({', '.join(self.open[:3])}{' ...' if self.open[3:] else ''} may need changes)" if self.open else ""
        rest += [counted(len(self.unread), "file") + " not read" + unsure] if self.unread else []
        return what + ("; " + " and ".join(rest) if rest else "") + "."

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON-ready data."""
        return {
            "schema": "trueup-port", "schema_version": 1, "sentence": self.sentence, "to": self.to, "since": self.since,
            "scripts": self.scripts, "lines": self.lines, "changed": [asdict(one) for one in self.changed],
            "seen": [asdict(one) for one in self.seen], "unread": list(self.unread), "open": list(self.open),
            "effects": list(self.effects), "added": list(self.added), "branches": list(self.branches),
        }  # fmt: skip


def port(
    source: str | Path,
    output: str | Path | None = None,
    *,
    to: Literal["agnostic", "npu"] = "agnostic",
    rules: str | Path | None = None,
    also: Iterable[str] = (),
    distributed: str | None = None,
    model: str | None = None,
) -> Ported:
    """Write a training's scripts anew for another device, and say what was changed and what was left.

    Args:
        source: a script, or a folder of them.
        output: where the new ones go: a folder that is not there yet, or the source itself, to change it in place. None: nothing
            is written.
        to: ``agnostic``, one script for CUDA, NPU and CPU; or ``npu``, with torch_npu.
        rules: rules of your own, as TOML or JSON (docs/port.md).
        also: edits that change numbers, by name (`choosing.EFFECTS`); what each does is in ``effects``.
        distributed: the script that starts the training, as seen from the folder: one process becomes several, a device each.
        model: with ``distributed``: the variable of the model, where no optimizer shows it.

    Raises:
        TrueupError: the source cannot be read, or is no Python; the output is there already, or cannot be written.
    """
    root = Path(source)
    chosen = choosing.checked(also)
    mine = Own() if rules is None else tried(Path(rules))
    known = mine.beside(builtin())
    known = known.with_similar() if "similar" in chosen else known
    files = _scripts(root)
    base = root if root.is_dir() else root.parent
    scripts, unread = _read(root, base, files)
    project = Project(scripts, known)
    spread = None if distributed is None else Distributor(project, distributed, base, model)
    writers = _writers(project, to, mine, chosen, spread, unread)
    texts = {writer.script.path: writer.text for writer in writers if writer.edits}
    changed = tuple(_changed(writer, base) for writer in writers if writer.edits)
    left: list[tuple[Path, int, str, str, bool]] = [
        *((writer.script.path, one.line, one.text, one.reason, one.look) for writer in writers for one in writer.left),
        *((*found, True) for found in in_settings(_walk(root) if root.is_dir() else (), to, known.variable)),
    ]
    seen = tuple(Seen(str(path.relative_to(base)), line, text, why, look) for path, line, text, why, look in left)
    used = {edit.rule for writer in writers for edit in writer.edits}
    target = None if output is None else Path(output)
    lines = sum(len(script.lines) for script in scripts)
    added = {} if distributed is None else Distributor.files(distributed)
    effects = tuple(choosing.EFFECTS[name] for name in chosen if any(rule.startswith(name) for rule in used))
    if distributed is not None:
        effects = (*OF_DISTRIBUTED, *([NO_CHOICE] if "specify-device" in chosen else []), *effects)
    asking = tuple(f"{script.path.relative_to(base)}:{line}, {text}" for script, line, text in branches(project))
    said, unsure = tuple(unread.values()), tuple(str(path.relative_to(base)) for path in unread if _may_name_a_device(path))
    result = Ported(to, len(files), lines, changed, seen, said, _since(known, used), target, effects, tuple(added), asking, unsure)
    if target is not None:
        _write(root, target, texts, result, added)
    return result


def _since(known: Rules, used: set[str]) -> str | None:
    """Return the newest version that a rule which was used asks for."""
    with_versions: list[Name | Switch] = [*known.name, *known.switch]
    versions = [rule.since for rule in with_versions if rule.id in used and rule.since]
    return max(versions, key=_version, default=None)


def _read(root: Path, base: Path, files: Sequence[Path]) -> tuple[list[reading.Script], dict[Path, str]]:
    """Return the scripts, and what there is to say of each file that was not read."""
    scripts: list[reading.Script] = []
    unread: dict[Path, str] = {}
    for path in files:
        try:
            scripts.append(reading.read(path, ".".join(path.relative_to(base).with_suffix("").parts)))
        except TrueupError as error:
            if not root.is_dir():
                raise _refused(root, READABLE, str(error), "mend it there, and port it again") from None
            unread[path] = str(error)
    if not any(b"torch" in script.data for script in scripts):
        first = "".join(f"; {one}" for one in list(unread.values())[:1])
        other = next((name for name in ELSEWHERE for script in scripts if name.encode() in script.data.lower()), None)
        raise TrueupError(
            f"{root} does not use PyTorch.\n  expected: a training script that imports torch, or a folder with one\n"
            f"  got:      {counted(len(scripts), 'script')} without it" + f"{first}\n"
            f"  next:     {ELSEWHERE[other] if other else 'name the folder that holds the training'}"
        )
    unread |= {path: f"{path} is a link: it was not followed, and is not in the output" for path in _links(root)}
    notebooks = [path for path in (_walk(root) if root.is_dir() else ()) if path.suffix == ".ipynb"]
    return scripts, unread | {path: f"{path} is {NOTEBOOK}" for path in notebooks}


def _may_name_a_device(path: Path) -> bool:
    """Return whether a file that was not read may have something to change: it has the letters, is too large to look at, or is a
    link to scripts, which is not followed."""
    try:
        if path.is_symlink():
            return path.suffix == ".py" or (path.is_dir() and any(one.suffix == ".py" for one in path.iterdir()))
        return path.stat().st_size > MOST_BYTES or LETTERS.search(path.read_bytes()) is not None
    except OSError:
        return True


def _writers(
    project: Project, to: str, mine: Own, chosen: tuple[str, ...], spread: Distributor | None, unread: dict[Path, str]
) -> list[Writer]:
    """Return what writes each script anew; what would be no Python is left as it was, and said in ``unread``."""
    asked = "specify-device" in chosen and spread is None  # several processes would all have the device of DEVICE_ID
    devices = choosing.device_of_environment(project, to) if asked else {}
    kernels = Kernels(project)
    writers = []
    for script in project.scripts:
        more = [
            *(() if spread is None else spread.edits[script]),
            *choosing.edits(project, script, chosen),
            *devices.get(script, ()),
        ]
        writer = Writer(project, script, to, mine, more, kernels)
        writer.left += [] if spread is None else spread.left[script]
        why = _why_not(writer) if writer.edits else None
        if why is None:
            writers.append(writer)
        else:
            unread[script.path] = f"{script.path}: what was to be written {why}"
    return writers


def undo(folder: str | Path) -> tuple[int, tuple[str, ...]]:
    """Take back what `port` wrote: in each script the changes whose text still stands there.

    Returns:
        How many changes were taken back, and a sentence for each that was not, for the script was edited there since.

    Raises:
        TrueupError: the folder holds no port.
    """
    root = Path(folder)
    root = root.parent if root.is_file() else root
    record = root / RECORD
    text = toml.text_of(record, "a folder that trueup port wrote", "name the folder that was given to -o", most=1 << 28)
    try:
        content = msgspec.json.decode(text.encode())
        files = [toml.checked(one, _Recorded) for one in content["changed"]]
        added = [str(name) for name in content.get("added", [])]
    except (ValueError, KeyError, TypeError) as error:
        raise TrueupError(f"{record} is damaged: {error}") from None
    count, kept = 0, []
    for name in (*(file.path for file in files), *added):
        if not (root / name).resolve().is_relative_to(root.resolve()):
            raise TrueupError(f"{record} names {name}, which is outside of {root}: nothing was undone")
    for file in files:
        path = root / file.path
        try:
            data = path.read_bytes()
        except OSError as error:
            kept.append(f"{file.path}: {error.strerror}")
            continue
        encoding = reading.encoding_of(data)
        for change in sorted(file.changes, key=lambda one: -one.start):
            after = change.after.encode(encoding, "replace")
            if data[change.start : change.start + len(after)] == after:
                data = data[: change.start] + change.before.encode(encoding) + data[change.start + len(after) :]
                count += 1
            else:
                kept.append(f"{file.path}, line {change.line}: it was edited since")
        write_file(path, [data])
    for name in added:
        (root / name).unlink(missing_ok=True)
    record.unlink()
    return count, tuple(kept)


class _Recorded(toml.Table):
    path: str
    before: str
    after: str
    changes: tuple[Change, ...]
    lines: list[Any]


def _scripts(root: Path) -> list[Path]:
    if root.is_dir():
        files = sorted(_walk(root))
        found = [path for path in files if path.suffix == ".py"]
        if not found:
            notebook = next((path.name for path in files if path.suffix == ".ipynb"), None)
            got = "none" if notebook is None else f"{notebook}, {NOTEBOOK}"
            raise _refused(root, "a folder with scripts of Python", got, "name the folder that holds the training")
        return found
    if not root.is_file():
        raise _refused(root, "a script, or a folder of scripts", "nothing there")
    if root.suffix == ".ipynb":
        script = root.with_suffix(".py")
        raise _refused(root, "a script", NOTEBOOK, f"jupyter nbconvert --to script {root}; trueup port {script} -o ported")
    return [root]


def _refused(path: Path, expected: str, got: str, following: str = "trueup port train.py -o ported") -> TrueupError:
    return TrueupError(f"{path} cannot be ported.\n  expected: {expected}\n  got:      {got}\n  next:     {following}")


def _walk(root: Path) -> Iterator[Path]:
    """Yield the files of a folder; what a link points to is not its own."""
    count, todo = 0, [root]
    while todo:
        for path in sorted(todo.pop().iterdir()):
            if path.is_symlink() or path.name in SKIPPED:
                continue
            if path.is_dir():
                todo.append(path)
            elif path.is_file():
                count += 1
                if count > MOST:
                    raise _refused(root, f"at most {MOST:,} files", "more: name the folder that holds the training")
                yield path


def _folders(root: Path) -> list[Path]:
    """Return a folder and those in it, empty ones, too."""
    folders = [root, *(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())] if root.is_dir() else []
    return [one for one in folders if not SKIPPED.intersection(one.relative_to(root).parts)]


def _links(root: Path) -> list[Path]:
    """Return the links in a folder, which are left out."""
    return sorted(path for folder in _folders(root) for path in folder.iterdir() if path.is_symlink())


def _changed(writer: Writer, base: Path) -> Changed:
    script, changes, shift = writer.script, [], 0
    data = script.data
    for edit in writer.edits:
        before, after = data[edit.start : edit.end], edit.text.encode()
        start = len(script.encoded(data[: edit.start])) + shift
        changes.append(Change(script.line_at(edit.start), start, before.decode(), edit.text, edit.rule, edit.why))
        shift += len(script.encoded(after)) - len(script.encoded(before))
    path = str(script.path.relative_to(base))
    was, now = (xxhash.xxh3_128_hexdigest(one) for one in (script.encoded(data), writer.text))
    return Changed(path, was, now, tuple(changes), tuple(_lines(data, writer.edits)))


def rewritten(data: bytes, changes: Sequence[Change]) -> bytes:
    """Return the bytes of a script with its changes."""
    encoding = reading.encoding_of(data)
    for change in changes:
        end = change.start + len(change.before.encode(encoding))
        data = data[: change.start] + change.after.encode(encoding) + data[end:]
    return data


def _lines(data: bytes, edits: Sequence[Edit]) -> Iterator[tuple[int, str, str]]:
    """Yield runs of changed lines: the first one's number, the text before, the text after. Edits are in order."""
    lines = data.splitlines(keepends=True)
    starts = list(itertools.accumulate(map(len, lines), initial=0))
    runs: list[tuple[int, int, list[Edit]]] = []
    for edit in edits:
        first, last = (bisect.bisect_right(starts, at) - 1 for at in (edit.start, edit.end))
        whole = edit.start == starts[first] and edit.text.endswith("\n") and edit.start == edit.end
        end = first if whole else last if edit.end == starts[last] > edit.start else last + 1
        if runs and first <= runs[-1][1]:
            run = runs.pop()
            runs.append((run[0], max(run[1], end), [*run[2], edit]))
        else:
            runs.append((first, end, [edit]))
    for first, end, inside in runs:
        at, text = starts[first], b""
        for edit in inside:
            text, at = text + data[at : edit.start] + edit.text.encode(), edit.end
        old = data[starts[first] : starts[min(end, len(lines))]]
        text += data[at : starts[min(end, len(lines))]]
        before, after = (re.sub(r"\r\n?", "\n", one.decode("utf-8-sig", "replace")).removesuffix("\n") for one in (old, text))
        yield first + 1, before, after


def _write(root: Path, target: Path, texts: dict[Path, bytes], result: Ported, added: dict[str, str]) -> None:
    """Write all or nothing: into a folder beside the target, which then takes its name."""
    base = root if root.is_dir() else root.parent
    record = json.dumps(result.document(), indent=1).encode()
    try:
        if target.resolve() in (root.resolve(), base.resolve()):
            if texts and (base / RECORD).exists():
                raise _refused(base, "scripts as they were written", f"a port, in {RECORD}: take it back with --undo first")
            for name in added:
                if (base / name).exists():
                    raise _refused(base, f"no {name}, which is to be written", "one that is there", "name a new folder with -o")
            for path, text in (*texts.items(), *((base / name, one.encode()) for name, one in added.items())):
                write_file(path, [text])
            if texts:
                write_file(base / RECORD, [record])
            return
        if target.exists():
            raise TrueupError(
                f"{target} is there already.\n  expected: a folder that is not there yet, or the source itself\n"
                "  got:      one with something in it\n  next:     name another with -o, or take the old one away"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        inside = _folders(root)  # before there is one more
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
            new = Path(folder) / "new"
            new.mkdir()
            for one in inside:
                (new / one.relative_to(base)).mkdir(parents=True, exist_ok=True)
            for path in _walk(root) if root.is_dir() else [root]:
                if path.is_relative_to(Path(folder)):
                    continue
                to = new / path.relative_to(base)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, to)
                if path in texts:
                    to.write_bytes(texts[path])
            for name, content in added.items():
                if (new / name).exists():
                    raise _refused(base, f"no {name}, which is to be written", "one that is there", "rename yours first")
                (new / name).write_text(content)
                (new / name).chmod(0o755 if content.startswith("#!") else 0o644)
            (new / RECORD).write_bytes(record)
            new.rename(target)
    except OSError as error:
        raise TrueupError(
            f"{target} cannot be written.\n  expected: a folder that can be made there\n  got:      {error.strerror or error}\n"
            "  next:     name another with -o"
        ) from None


def _why_not(writer: Writer) -> str | None:
    """Return why a script is left as it is; None where what is to be written is whole."""
    try:
        ast.parse(writer.text)
    except UnicodeEncodeError as error:
        return f"has {error.object[error.start : error.end]!r}, which {writer.script.encoding} lacks: save it as UTF-8 first"
    except (SyntaxError, ValueError):
        return "is no Python; it was left as it is: report this"
    return None


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


# ---------------------------------------------------------------- a user's rules
# Their examples are executed before any script is read.
TARGETS = ("npu", "agnostic")


def tried(path: Path) -> Own:
    """Read a user's rules, and keep those that hold for the PyTorch that is installed.

    Raises:
        TrueupError: the file cannot be used, or a rule does not make of its example what it says.
    """
    mine = own(path)
    for rule in mine.rules.shown:
        alone = Own(rules=_alone(rule))
        for to, after in zip(TARGETS, rule.example[1:], strict=True):
            wanted = _body(builtin().target[to].fill(after))
            made = _ported(path, alone, _modules(rule), rule.example[0], to)
            if _meaning(made) != _meaning(wanted):
                raise refused(path, "TOML", f"{rule.id!r} makes of its example, for {to}: {made!r}; the rule says {wanted!r}")
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return mine
    return Own(mine.converters, mine.rules.holding(version))


def _alone(rule: OwnName | Given | OwnSink) -> OwnRules:
    if isinstance(rule, OwnName):
        return OwnRules(name=(rule,))
    return OwnRules(argument=(rule,)) if isinstance(rule, Given) else OwnRules(sink=(rule,))


def _modules(rule: OwnName | Given | OwnSink) -> list[str]:
    """Return the modules that a rule's example needs."""
    names = [rule.under] if isinstance(rule, OwnName) else [call.rpartition(".")[0] for call in rule.calls]
    return list(dict.fromkeys(["torch", *(name for name in names if name.replace(".", "").isidentifier())]))


def _ported(path: Path, mine: Own, modules: list[str], before: str, to: str) -> str:
    """Return what becomes of an example, without the imports at its head."""
    head = "".join(f"import {name}\n" for name in modules)
    try:
        script = Script(path.with_suffix(".py"), f"{head}{before}\n".encode(), "example")
    except TrueupError as error:
        raise refused(path, "TOML", f"the example {before!r} is no Python: {str(error).rpartition(': ')[2]}") from None
    writer = Writer(Project([script], mine.beside(builtin())), script, to, mine)
    return _body(writer.text.decode())


def _meaning(text: str) -> str:
    """Return what quotes and blanks do not change; of what is no Python, itself."""
    try:
        return ast.dump(ast.parse(text))
    except (SyntaxError, ValueError):
        return text


def _body(text: str) -> str:
    """Return the lines of an example behind its imports."""
    lines = text.splitlines()
    while lines and lines[0].startswith(("import ", "from ")):
        lines.pop(0)
    return "\n".join(lines)
