"""``--overwrite``: what an earlier run of a command left goes before the command begins; nothing old stays where it fails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from trueup.doors.cli.options import cleared
from trueup.foundation.model import UsageError

PAGES = {
    "compare": "verdict.json calls.parquet series.json", "align": "align.json verdict.json calls.parquet", "curves": "curves.json",
    "overflow": "overflow.json", "report": "trend.json", "assess": "assess.json",
}  # fmt: skip
"""The files of a report beside its page; others in its folder stay."""
KINDS = {
    "watch": ("what a watch saved", ("step-*",)),
    "monitor": ("what a monitor wrote", ("manifest.json", "rank-*")),
    "replay": ("what was executed", ("**/replay.json",)),
    "verify-capture": ("what was executed", ("replay.json",)),
    "triage": ("a triage", ("runs.jsonl",)),
    "heal": ("a healing", ("runs.jsonl",)),
    "bisect": ("a search", ("journal.jsonl",)),
}
"""What a command goes on with, or refuses to write into, and the files that tell it."""
FILES = {"invariants": (".json",), "export": (".onnx",), "repair": (".safetensors",), "convert-weights": (".safetensors", ".npz")}
DEFAULTS = {"triage": "trueup-triage", "bisect": "trueup-bisect", "heal": "{path}-healed", "report": "trend"}
WRITTEN = {"output", "json", "html", "csv", "xlsx", "junit", "sarif", "patch"}


def make_room(name: str, given: Mapping[str, Any], paths: Set[str], *, by_itself: bool) -> None:
    """Remove what an earlier run left where a command writes, which was given words, some of them ``paths``; one that does it
    ``by_itself`` is only kept from removing what it reads. Raises UsageError where something else is there."""
    word = given.get("output") or DEFAULTS.get(name, "").format(**given)
    if not word:
        return
    output = Path(word)
    if name not in PAGES:
        _keep(output, (given[key] for key in paths - WRITTEN))
    if by_itself:
        return
    if name in PAGES:
        pages = [output / file for file in PAGES[name].split()]
        if any(page.is_file() for page in pages):
            for page in (output / "index.html", *pages):
                page.unlink(missing_ok=True)
    elif name in KINDS:
        cleared(output, *KINDS[name])
    elif name in FILES and output.is_file() and not given.get("check"):
        if output.suffix not in FILES[name]:
            raise UsageError(
                f"Only a file that ends in {' or '.join(FILES[name])} is overwritten.\n  where:    {output}\n"
                "  next:     name another one with -o"
            )
        output.unlink()


def _keep(output: Path, values: Iterable[Any]) -> None:
    """Raise UsageError where what would be removed is, or holds, what the command reads."""
    for value in values:
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if one is not None and Path(one).exists() and Path(one).resolve().is_relative_to(output.resolve()):
                raise UsageError(
                    f"It would remove what it reads.\n  where:    {output}\n  got:      {one}, and --overwrite\n"
                    "  next:     name another place with -o"
                )
