"""Module paths: the scope of a call is the path of the innermost module that is running."""

from __future__ import annotations

import weakref
from collections import defaultdict

import torch

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes under which wrappers (DataParallel, DDP, torch.compile, FSDP, checkpoint_wrapper) hold the user's module."""

WRAPPER_CLASSES = (
    "DataParallel", "DistributedDataParallel", "OptimizedModule", "FullyShardedDataParallel", "CheckpointWrapper",
)  # fmt: skip


class Scopes:
    """Gives each module its path. The first root with parameters is ``""``; further roots start with their class name."""

    def __init__(self) -> None:
        self._paths: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._roots: defaultdict[str, int] = defaultdict(int)
        self._has_main = False

    def register(self, root: torch.nn.Module, name: str | None = None) -> None:
        """Name a root module and all modules below it."""
        prefix = self._root_name(root) if name is None else name
        for path, module in root.named_modules():
            clean = _without_wrappers(root, path)
            self._paths.setdefault(module, ".".join(part for part in (prefix, clean) if part))

    def path(self, module: torch.nn.Module, parent: torch.nn.Module | None) -> str:
        """Return the path of a module that starts to run inside ``parent`` (None: outside any module)."""
        found = self._paths.get(module)
        if found is None:
            if parent is None:
                self.register(module)
            else:  # built after its parent was registered
                name = next((k for k, m in parent.named_children() if m is module), type(module).__name__)
                above = self._paths.get(parent, "")
                self.register(module, f"{above}.{name}" if above else name)
            found = self._paths[module]
        return found

    def parameters(self) -> dict[int, str]:
        """Return the paths of all parameters that the known modules hold at present, by the parameter's id."""
        found: dict[int, str] = {}
        for module, path in list(self._paths.items()):
            for name, parameter in module._parameters.items():
                if parameter is not None:  # a tied one goes by its first name
                    found.setdefault(id(parameter), f"{path}.{name}" if path else name)
        return found

    def _root_name(self, root: torch.nn.Module) -> str:
        if not self._has_main and next(root.parameters(), None) is not None:
            self._has_main = True
            return ""
        inner = root
        while type(inner).__name__ in WRAPPER_CLASSES:
            inner = next(m for k, m in inner.named_children() if k in WRAPPERS)
        name = type(inner).__name__
        self._roots[name] += 1
        return name if self._roots[name] == 1 else f"{name}~{self._roots[name]}"


def _without_wrappers(root: torch.nn.Module, path: str) -> str:
    parts: list[str] = []
    module = root
    for part in path.split(".") if path else ():
        if not (part in WRAPPERS and type(module).__name__ in WRAPPER_CLASSES):
            parts.append(part)
        module = module._modules[part]
    return ".".join(parts)
