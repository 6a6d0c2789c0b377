"""The code that a process runs, as files say it: the commit of the script's repository, and a digest of each of its modules.

Git itself is not asked: the commit stands in ``.git/HEAD`` and what that names. Whether files were changed since shows in their
digests, which are of what was really imported.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import xxhash

MOST_FILES = 200
LARGEST = 1 << 20
"""Bytes of a file of code that is read."""
FOREIGN = ("site-packages", "dist-packages", "node_modules")
"""Folders whose code is a package's, of which versions tell."""


def code() -> dict[str, str]:
    """Return ``{"commit": hash, path below the repository: digest}`` of the script and of the modules beside it."""
    found: dict[str, str] = {}
    script = _file(sys.modules.get("__main__")) or Path(sys.argv[0] if sys.argv else "")
    with contextlib.suppress(OSError, ValueError):  # a folder that nobody may read tells nothing
        if script.is_file():
            script = script.resolve()
            root = next((one for one in script.parents if (one / ".git").exists()), None)
            if root is not None and (commit := _commit(root / ".git")):
                found["commit"] = commit
            found |= _digests(script, root or script.parent)
    return found


def _digests(script: Path, root: Path) -> dict[str, str]:
    ours = Path(__file__).resolve().parents[2]
    loaded = {path for one in list(sys.modules.values()) if (path := _file(one)) is not None}
    files = [one for one in loaded if root in one.parents and ours not in one.parents and not set(FOREIGN) & set(one.parts)]
    found = {}
    for one in [script, *sorted(files)][:MOST_FILES]:
        if one.stat().st_size <= LARGEST:
            found[one.relative_to(root).as_posix()] = xxhash.xxh3_64_hexdigest(one.read_bytes())
    return found


def _file(module: object) -> Path | None:
    held = getattr(module, "__dict__", {}).get("__file__")
    return Path(held) if isinstance(held, str) and held.endswith(".py") else None


def _commit(git: Path) -> str:
    """Return the commit that is checked out or nothing; in a worktree ``.git`` is a file that names the folder."""
    if git.is_file():
        git = git.parent / git.read_text().removeprefix("gitdir:").strip()
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head[:40]
    ref = head.removeprefix("ref:").strip()
    common = git / (git / "commondir").read_text().strip() if (git / "commondir").is_file() else git
    for folder in (git, common):
        if ".." not in ref and (folder / ref).is_file():
            return (folder / ref).read_text().strip()[:40]
    packed = (common / "packed-refs").read_text().splitlines() if (common / "packed-refs").is_file() else []
    return next((line.split(" ")[0][:40] for line in packed if line.endswith(f" {ref}")), "")
