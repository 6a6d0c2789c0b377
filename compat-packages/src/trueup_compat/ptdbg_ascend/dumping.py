"""One dump of a script: a native capture behind it, and the tool's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trueup.foundation.model import PHASES
from trueup.recording.recorder import CaptureOptions
from trueup_compat.names import CallName
from trueup_compat.naming import Names
from trueup_compat.ptdbg_ascend.errors import CompareException
from trueup_compat.ptdbg_ascend.layout import VERSION, Layout
from trueup_compat.ptdbg_ascend.modes import Dump
from trueup_compat.ptdbg_ascend.tree import Tree
from trueup_compat.recording import Recording

SEEN = tuple(phase for phase in PHASES if phase != "optimizer")
"""What is recorded: the tools' guides leave the optimizer out, and its calls depend on the form (fused, foreach) that it has."""


@dataclass(slots=True)
class Dumping:
    """Counts calls from `begin` on and dumps them between `switch_on` and `switch_off`."""

    layout: Layout
    path: Path
    tag: str
    rank: int
    models: Sequence[torch.nn.Module]
    levels: tuple[str, ...] = ("api",)
    names: Names = field(default_factory=Names)
    tree: Tree = field(init=False)
    _recording: Recording | None = field(default=None, init=False)
    _dump: Dump = field(default_factory=Dump, init=False)
    _matched: int = field(default=0, init=False)
    """Calls that were dumped since it was switched on."""
    _captures: int = field(default=0, init=False)
    """Captures that were written before the present one."""

    def __post_init__(self) -> None:
        root = self.layout.root(self.path, self.tag)
        levels = ("module", "api") if self.layout.has_module_dump else self.levels
        self.tree = Tree(self.layout, root, self.layout.native(self.path, self.tag), self.rank, levels)

    @property
    def is_on(self) -> bool:
        """Whether calls are recorded at present."""
        return self._recording is not None and self._recording.recorder.on

    @property
    def step(self) -> int:
        """The present step."""
        return 0 if self._recording is None else self._recording.recorder.step

    def begin(self, detail: str = "tensor", *, by_hand: bool = False) -> None:
        """Begin to count; ``by_hand``: nothing but `end_step` ends steps.

        Raises:
            TrueupError: another capture is running in this process.
        """
        levels = ("module", "api") if self.layout.has_module_dump else self.levels
        options = CaptureOptions.of(level=levels, detail=detail, phase=SEEN)
        native = self.layout.native(self.path, self.tag)
        self.tree.native = native if not self._captures else native.with_name(f"{native.name}-{self._captures + 1}")
        recording = Recording(
            self.tree.native, options, self.models, self.names, self._written, all_modules="module" in self.levels
        )
        recording.start()
        if by_hand:
            recording.session.steps_by_hand()
        self._recording = recording

    def switch_on(self, dump: Dump) -> None:
        """Dump from now on.

        Raises:
            TrueupError: the folder holds what is not to be written over.
        """
        by_hand = self._recording is not None and self._recording.session.optimizers.steps.manual
        if self._recording is not None and self._recording.recorder.options.detail != dump.detail:
            self._end()
        if self._recording is None:
            self.begin(dump.detail, by_hand=by_hand)
        assert self._recording is not None
        if self.is_on:
            self.switch_off()
        self._dump = dump
        self._recording.switch_on(dump.wanted())

    def switch_off(self) -> None:
        """Dump no more, and write the files."""
        if self._recording is not None:
            self._recording.switch_off()
            matched, self._matched = self._matched, 0
            if self._dump.mode == "list":
                print(f"The number of matched dump is {matched}", flush=True)

    def dump_module(self, module: torch.nn.Module, name: str) -> None:
        """Dump a module under a name, and no function, until `dump_functions`.

        Raises:
            CompareException: this version has no such thing.
        """
        if "module" in self.levels:
            print("trueup: module_dump has no effect: the debugger has the model, so each module is dumped", flush=True)
            return
        if not self.layout.has_module_dump:
            said = f"module_dump is of versions 5 and 6, and this dump is of version {self.layout.version}"
            raise CompareException.of_parameter(f"{said}: set {VERSION}=6.0, or use PrecisionDebugger")
        if self._recording is None:
            raise CompareException.of_parameter("module_dump comes after start(), or after register_hook(model, acc_cmp_dump)")
        self._recording.dump_module(module, name)

    def dump_functions(self) -> None:
        """Go on with functions."""
        if self._recording is not None:
            self._recording.dump_functions()

    def end_step(self) -> None:
        """End the present step; numbers of calls begin anew."""
        if self._recording is not None:
            self._recording.end_step()
            self.names.reset()

    def finish(self) -> None:
        """End the capture and write what is left."""
        self._end()

    def _end(self) -> None:
        if self._recording is not None:
            self._recording.finish()
            self._captures += self._recording.used  # another kind of dump gets a capture of its own
            self._recording = None

    def _written(self, native_rank: int, names: dict[int, CallName]) -> None:
        self._matched += self.tree.write(self._dump, native_rank, names)
