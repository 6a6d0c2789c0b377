"""What `trueup explain-log` finds in labelled pieces of logs, and how fast it reads: ``python benchmarks/logs.py [--size MB]``.

Precision: of the pieces in which it names a row, those whose row is right. Recall: of the pieces with an error that a row explains,
those that get it. Innocent: pieces in which nothing stopped, and which it says nothing of.
"""

from __future__ import annotations

import argparse
import re
import resource
import tempfile
import time
from pathlib import Path

from trueup.migration.knowledge import explain

PIECES = Path(__file__).with_name("log_pieces.txt")


def pieces() -> list[tuple[set[str], str]]:
    """Return each piece with its labels: rows, ``?`` (no row may explain it), ``-`` (nothing stopped)."""
    parts = re.split(r"^== ", PIECES.read_text("utf-8"), flags=re.MULTILINE)[1:]
    return [(set(label.split()), body) for label, _, body in (part.partition("\n") for part in parts)]


def said(body: str, file: Path) -> str:
    """Return the row that is named as the first error, ``?`` for one that no row knows, ``-`` for none."""
    file.write_text(body, "utf-8")
    found = explain([str(file)])
    return found.first.row.id if found.first and found.first.row else "?" if found.exit_code else "-"


def main() -> None:
    """Print the figures, and each piece that is read otherwise than it is labelled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=100, help="MB of logs to read, made of the pieces")
    size = parser.parse_args().size
    held = pieces()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "piece.log"
        got = [(labels, said(body, file), body) for labels, body in held]
        errors = [one for one in got if "-" not in one[0]]
        named = [one for one in got if one[1] not in "?-"]
        known = [one for one in errors if one[0] != {"?"}]
        right, silent = sum(name in labels for labels, name, _ in named), [one for one in got if "-" in one[0]]
        print(f"{len(got)} pieces, {len(silent)} innocent")
        print(f"precision {right} of {len(named)}, recall {sum(n in ls for ls, n, _ in known)} of {len(known)}")
        seen, quiet = sum(name != "-" for _, name, _ in errors), sum(name == "-" for _, name, _ in silent)
        print(f"seen at all {seen} of {len(errors)}, innocent {quiet} of {len(silent)}")
        for labels, name, body in got:
            if name not in labels:
                print(f"  {' '.join(sorted(labels))}: {name}: {body[:110]!r}")
        text = "".join(body for labels, body in held if "-" in labels) * 40 + "".join(body for _, body in held)
        file.write_text(text * (size * 1_000_000 // len(text.encode()) + 1), "utf-8")
        before, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        explain([str(file)])
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        took = f"{cpu:.1f} s of CPU, {time.perf_counter() - wall:.1f} s"
        print(f"{file.stat().st_size / 1e6:.0f} MB in {took}, {after.ru_maxrss / 1024:.0f} MB of memory")


if __name__ == "__main__":
    main()
