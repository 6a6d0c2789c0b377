"""`port --run`: a training for CUDA on another device as it is, by the rules of `port` in the live process."""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from trueup.foundation import toml
from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import counted, unified_diff
from trueup.migration.port.porting import port, rewritten
from trueup.migration.port.rules import builtin
from trueup.recording.recorder.launch import program, run_to_the_end

REDIRECT, SIMULATED = "TRUEUP_REDIRECT", "TRUEUP_SIMULATED"
"""Environment variables that the end of ``import torch`` reads (`trueup.autoload`)."""


class Place(toml.Table):
    """A line of the user's where something for CUDA went to the device."""

    file: str
    line: int
    name: str
    what: str

    @property
    def place(self) -> str:
        """Return file and line, as seen from here."""
        return f"{os.path.relpath(self.file)}:{self.line}"


@dataclass(frozen=True)
class Ran:
    """What a redirected run did: the command's own exit code, and each place of the user's that asked for CUDA."""

    exit_code: int
    places: tuple[Place, ...]

    @property
    def sentence(self) -> str:
        """Return what was done, in a sentence."""
        files = len({one.file for one in self.places})
        ended = "" if self.exit_code == 0 else f" The command ended with exit code {self.exit_code}."
        if not self.places:
            return f"Nothing asked for CUDA.{ended}"
        return f"{counted(len(self.places), 'place')} in {counted(files, 'file')} asked for CUDA and went to the device.{ended}"

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON-ready data."""
        places = [msgspec.to_builtins(one) for one in self.places]
        return {"schema": "trueup-port-run", "schema_version": 1, "sentence": self.sentence, "places": places}


def table(device: str, into: Path) -> dict[str, Any]:
    """Return the rules of a port as the live process takes them (`trueup.recording.adapters.torch.redirecting`)."""
    rules = builtin()
    names = {
        f"{rule.under}.{name}": {
            "to": rule.npu.replace("{name}", name), "first": rule.first is not None, "positional": rule.positional,
            "keyword": rule.keyword.partition("=")[0] if rule.keyword else None,
        }
        for rule in rules.name
        for name in rule.names
        if rule.under.startswith("torch.cuda") and rule.npu is not None
    }  # fmt: skip
    sinks = [{"calls": one.calls, "position": one.position, "keywords": one.keywords, "kind": one.kind} for one in rules.sink]
    return {"device": device, "names": names, "sinks": sinks, "into": str(into)}


def redirected(
    command: Sequence[str], folder: Path, *, device: str = "", environment: Mapping[str, str] | None = None,
    output: Path | None = None, timeout: float | None = None,
) -> Ran:  # fmt: skip
    """Run a command with CUDA's calls sent to a device.

    Args:
        command: the program and its arguments.
        folder: an empty one, for what its processes write.
        device: a device type; empty for the accelerator that is there.
        environment: variables besides.
        output: file that what it prints goes to; else where our own goes.
        timeout: seconds after which it is ended.

    Raises:
        TrueupError: the command cannot start.
    """
    places = folder / "places"
    places.mkdir()
    path = folder / "redirect.json"
    path.write_text(json.dumps(table(device, places)))
    started = [program(command[0]), *command[1:]]
    try:
        code = run_to_the_end(started, {**os.environ, **(environment or {}), REDIRECT: str(path)}, output, timeout)
    except OSError as error:
        raise TrueupError(f"The command cannot start: {command[0]}: {error.strerror or error}") from None
    found: dict[tuple[str, int, str], Place] = {}
    for file in sorted(places.glob("*.json")):
        for one in msgspec.json.decode(file.read_bytes(), type=list[Place]):
            found.setdefault((one.file, one.line, one.name), one)
    return Ran(code, tuple(found.values()))


def run(command: Sequence[str], *, simulated: bool = False) -> Ran:
    """Run a command for CUDA on the accelerator that is there, or on the simulated one; raises TrueupError if it cannot start."""
    with tempfile.TemporaryDirectory(prefix="trueup-run-") as folder:
        return redirected(command, Path(folder), environment={SIMULATED: "1"} if simulated else {})


def patch(ran: Ran, to: Literal["agnostic", "npu"]) -> str:
    """Return what a run did in the live process as a patch for ``git apply``: the files whose lines asked for CUDA, ported.

    A device may be named in one line and used in another one, or in another file, so that files are ported whole; they are read
    together where there are several.

    Raises:
        TrueupError: one of them cannot be read.
    """
    files = sorted({Path(one.file) for one in ran.places})
    if not files:
        return ""
    root = files[0] if len(files) == 1 else Path(os.path.commonpath(files))
    base = root if root.is_dir() else root.parent
    made = ""
    for changed in port(root, to=to).changed:
        path = base / changed.path
        if path not in files:
            continue
        data = path.read_bytes()
        texts = (one.decode(errors="surrogateescape") for one in (data, rewritten(data, changed.changes)))
        old, new = (io.StringIO(text).readlines() for text in texts)  # lines as git has them
        made += unified_diff(old, new, Path(os.path.relpath(path)).as_posix())
    return made
