"""The names of a capture's files, checks that keep a hostile name inside the capture, and manifests, which anyone may write.

::

    run/manifest.json                                what was recorded, and how
        processes/<pid>.json                         a report of each process that was armed
        unranked-<pid>/                              recorded before the ranks started; not read
        rank-00000/lock                              whose folder this is
                   manifest.json                     framework, devices, versions, seeds, status, notes
                   sites-0000.parquet                call stacks
                   tensors-0000.safetensors          payload
                   shadow-0000.parquet               local errors, of a shadow run (`trueup.recording.execution.shadow`)
                   step-000000/records-0000.parquet  one row per slot of a call
                   packed-0000.parquet               likewise, of many steps (`packing`)
                   series-0000.parquet               numbers by step, of a monitor (`series`); it has no records
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trueup.foundation.model import TrueupError

FORMAT_VERSION = 2  # 1 had no packed parts
URL = re.compile(r"(s3|gs|az):/{1,2}([^/].*)")
"""Of a URL that was taken for a path one slash is left."""
MANIFEST = "manifest.json"
LOCK = "lock"
PROCESSES = "processes"
UNRANKED = "unranked-"
TEMPORARY = ".tmp"
MONITOR = "monitor"  # key of the root manifest of what a monitor wrote
FETCHED = ".fetched.json"  # in a folder of the cache: which URL it stands for

RANK = re.compile(r"rank-([0-9]{5,9})")
STEP = re.compile(r"step-([0-9]{6,9})")
RECORDS = re.compile(r"records-([0-9]{4,9})\.parquet")
PACKED = re.compile(r"packed-([0-9]{4,9})\.parquet")
SITES = re.compile(r"sites-([0-9]{4,9})\.parquet")
SEGMENT = re.compile(r"tensors-([0-9]{4,9})\.safetensors")


def rank_name(rank: int) -> str:
    """Return ``rank-00000``."""
    return f"rank-{rank:05d}"


def step_name(step: int) -> str:
    """Return ``step-000000``."""
    return f"step-{step:06d}"


def records_name(part: int) -> str:
    """Return ``records-0000.parquet``."""
    return f"records-{part:04d}.parquet"


def holds_records(directory: Path) -> bool:
    """Tell whether some rank wrote records into a folder, whether or not that can be opened."""
    return any(entry for kind in ("step-*/records-*", "packed-*") for entry in directory.glob(f"rank-*/{kind}"))


def number(pattern: re.Pattern[str], name: str) -> int | None:
    """Return the number in a file name of that kind, None if it is of another kind."""
    match = pattern.fullmatch(name)
    return int(match[1]) if match else None


def real_file(root: Path, path: Path) -> Path:
    """Return ``path`` if it is a regular file inside ``root`` reached without leaving it. Raises FileNotFoundError if there is
    none, TrueupError if it is a link, a pipe or a device, or a folder on the way leads out of the capture."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise TrueupError(f"{path} is not a regular file: captures hold no links, pipes or devices; remove it")
    if not path.resolve().is_relative_to(root.resolve()):
        raise TrueupError(f"{path} leads out of the capture {root}: remove the link")
    return path


SIZE_LIMIT = 16 * 2**20  # largest manifest that is read, in bytes


def read_object(root: Path, path: Path) -> dict[str, Any]:
    """Read a JSON object of the capture ``root``. Raises FileNotFoundError if there is no such file, TrueupError if it cannot be
    read, is too large, is a link, or is no JSON object."""
    size = real_file(root, path).stat().st_size
    if size > SIZE_LIMIT:
        raise TrueupError(f"{path} is not read: expected at most {SIZE_LIMIT} bytes, got {size}; is it a manifest?")
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise TrueupError(f"{path} cannot be read: {error.strerror}; check its permissions") from None
    except (ValueError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise TrueupError(f"{path} is damaged: expected JSON, got {reason}; restore it or record again") from None
    if not isinstance(content, dict):
        raise TrueupError(f"{path} is damaged: expected a JSON object, got {type(content).__name__}; record again")
    return content


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "devices": (_texts, "a list of names"),
    "notes": (_texts, "a list of sentences"),
    **dict.fromkeys(("environment", "seeds", "versions"), (lambda value: isinstance(value, dict), "an object")),
    "imported": (lambda value: isinstance(value, dict) and _texts(value.get("lost", [])), "an object with a list lost"),
}
"""Fields of a rank's manifest that are read later, what their values must be, and that in words."""


def check_rank(content: dict[str, Any]) -> list[str]:
    """Take the fields out that are not what they must be; return a sentence for each."""
    wrong = [name for name, (is_right, _) in FIELDS.items() if name in content and not is_right(content[name])]
    return [
        f"{MANIFEST} has no {name} that can be read: expected {FIELDS[name][1]}, got {type(content.pop(name)).__name__}"
        for name in wrong
    ]


def new_folder(folder: Path) -> Path:
    """Return a folder that is to be written into; raises TrueupError if it holds something, or is no folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TrueupError(f"{folder} is not empty\n  next:     name another directory with -o, or remove it")
    return folder


def read_root(root: Path) -> dict[str, Any]:
    """Read a capture's own manifest; raises TrueupError if it is missing or unreadable, no capture, or of a newer format."""
    path = root / MANIFEST
    try:
        if not root.is_dir():
            found = "a file" if root.exists() else "nothing"
            raise TrueupError(f"{root} is not a capture: expected a directory, got {found}; check the path")
        content = read_object(root, path)
    except FileNotFoundError:
        raise TrueupError(
            f"{root} is not a capture: expected {MANIFEST} in it, got none; give the directory that was passed to -o"
        ) from None
    except OSError as error:
        raise TrueupError(f"{root} cannot be read: {error.strerror}; check its permissions") from None
    version = content.get("format_version")
    if type(version) is not int or version < 1:
        raise TrueupError(
            f"{path} is no manifest of a capture: expected a format_version of at least 1, got {repr(version)[:40]}; "
            "give the directory that was passed to -o"
        )
    if version > FORMAT_VERSION:
        raise TrueupError(
            f"{root} was recorded in a newer format: expected format_version up to {FORMAT_VERSION}, got {version}; "
            "upgrade trueup to read it"
        )
    return content


def url_of(path: str | Path) -> str | None:
    """Return the URL that a user gave for a capture, None where it is a path. Raises TrueupError where one holds more than bucket
    and name: a password in it would be written into reports."""
    found = URL.fullmatch(str(path))
    if found is None:
        return None
    if re.search(r"[@?#\\]|(?:^|/)\.\.?(?:/|$)", found[2]):
        raise TrueupError(
            "the URL of a capture cannot be used.\n  expected: s3://bucket/name, gs:// or az://\n"
            "  got:      more than bucket and name\n"
            "  next:     leave users, passwords and options to the environment (AWS_ACCESS_KEY_ID and the like)"
        )
    return f"{found[1]}://{found[2].rstrip('/')}"
