"""Packages that a training reaches, and kernels in CUDA: of packages by the libraries that they link, of its own by source."""

from __future__ import annotations

import ast
import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
