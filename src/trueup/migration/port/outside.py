"""What decides a device and stands in no script: a file of settings, a launch script, a value that a script reads from one.

None is rewritten, for others read them, too; each is listed with what to say there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from trueup.migration.port.flow import Project, is_translated
from trueup.migration.port.reading import Script
from trueup.migration.port.rules import Kind

SETTINGS = {".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf", ".gin", ".sh", ".bash", ".slurm", ".sbatch"}
LARGEST = 1 << 20
"""Bytes of a file of settings: what is larger holds data."""
MOST = 50
"""Lines of one file that are listed."""
VALUE = re.compile(
    r"(?:[:=]\s*|--[\w.-]+[ =])(?P<quote>[\"']?)(?P<value>cuda(?::\d+)?|(?i:nccl))(?P=quote)\s*(?:[,}\])#;\\]|$|\s-)"
    r"|\b(?P<variable>CUDA_VISIBLE_DEVICES|CUDA_LAUNCH_BLOCKING|PYTORCH_CUDA_ALLOC_CONF)="
)
"""A value that reads as a device or a backend, an option with one, a variable of the environment that CUDA reads."""
SAY: dict[str, dict[str, str]] = {
    "npu": {"backend": "say hccl where it says nccl", "device": "say npu where it says cuda"},
    "agnostic": {
        "backend": "leave the backend out, or say what the device's own is (hccl for an NPU)",
        "device": "say the device that is there (npu, cuda)",
    },
}
VARIABLES = {"npu": "an NPU reads {new}", "agnostic": "only CUDA reads it: an NPU's is {new}"}


def in_settings(paths: Iterable[Path], to: str, names: dict[str, str]) -> Iterator[tuple[Path, int, str, str]]:
    """Yield path, line, text and reason of lines in files of settings that choose a device. ``names`` are an NPU's variables of the
    environment by CUDA's."""
    for path in paths:
        if path.suffix not in SETTINGS or path.stat().st_size > LARGEST:
            continue
        count = 0
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
            found = None if line.lstrip().startswith(("#", ";", "//")) else VALUE.search(line)
            if found is None:
                continue
            kind = "backend" if (found["value"] or "").lower() == "nccl" else "device"
            say = VARIABLES[to].format(new=names[found["variable"]]) if found["variable"] else SAY[to][kind]
            yield path, number, line.strip()[:200], f"not in a script, so it was not rewritten: {say}"
            count += 1
            if count == MOST:
                break


def from_outside(project: Project, script: Script, to: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield the arguments of a script's calls that are a backend or a device and come from no script, with the reason."""
    for node in sorted(script.scopes, key=lambda one: getattr(one, "lineno", 0)):
        for value, kind in project.sinks(script, node) if isinstance(node, ast.Call) else ():
            if kind != "type" and _is_from_outside(project, script, value, kind):
                yield value, f"a {kind} from outside of the scripts (a file of settings, a command line): {SAY[to][kind]}"


def _is_from_outside(project: Project, script: Script, value: ast.AST, kind: Kind) -> bool:
    """Return whether nothing shows what a value is: no text reaches it, and no option whose words are translated. Of devices those
    alone that are read by a name that says so (``settings["device"]``): what else is unknown is mostly a parameter."""
    if kind == "device" and "device" not in str(_key(value)).lower():
        return False
    seen: set[object] = set()
    todo: list[tuple[Script, ast.AST]] = [(script, value)]
    is_open = False
    while todo:
        where, expression = todo.pop()
        origins = list(project.origins(where, expression))
        is_open = is_open or not origins
        for origin in origins:
            if not isinstance(origin, tuple):
                return False
            if origin in seen:
                continue
            seen.add(origin)
            if origin[0] == "option" and any(is_translated(*one, kind) for one in project.added.get(str(origin[2]), ())):
                return False
            kept = project.values.get(origin, [])
            todo += kept
            is_open = is_open or not kept
    return is_open


def _key(expression: ast.AST) -> object:
    return expression.slice.value if isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant) else None
