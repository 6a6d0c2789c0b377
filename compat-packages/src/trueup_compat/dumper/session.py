"""The context manager: a native capture of operators while the block runs, an HDF5 file when it ends."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from types import TracebackType

import torch

from trueup.foundation.model import TrueupError
from trueup.foundation.store import layout
from trueup.foundation.words.wording import counted
from trueup.recording.adapters.torch.session import Session, capture, running
from trueup.recording.engine.session import Capture
from trueup.recording.recorder import CaptureOptions
from trueup_compat.dumper import kernels
from trueup_compat.dumper.hdf5 import NATIVE, Seqids, groups_of, h5py, seqids_of, taken_from, write
from trueup_compat.dumper.overflowing import overflowed
from trueup_compat.recording import clear

LEVELS = ("api", "aten")


class dumper:
    """Dump, or load and dump, what PyTorch's operators get and give inside a ``with`` block.

    Args:
        enabled: False: the block runs as if it were not there.
        use_dump: write all inputs and outputs of each operator.
        use_load: give each operator the inputs that its counterpart in ``load_file_path`` had, and write its outputs under that
            one's number: each operator's own error, with none handed on.
        check_overflow: name the operators that overflow in the block, and write those alone.
        dump_path: the file, or an existing folder for one named by the time; None: the present folder.
        load_file_path: a file that ``use_dump`` wrote, with its capture (``FILE.trueup``) beside it.
        load_with_acl_dump: with ``use_load``: dump the kernels below the operators of that file, too, as ``./acl.json`` says; on
            a device whose ``torch.npu`` has ``init_dump``, `set_dump` and `finalize_dump`.

    Raises:
        TrueupError: the arguments exclude each other, a path is none, or a capture is running in this process.
    """

    def __init__(
        self, enabled: bool = True, use_dump: bool = False, use_load: bool = False, check_overflow: bool = False,
        dump_path: str | os.PathLike[str] | None = None, load_file_path: str | os.PathLike[str] | None = None,
        load_with_acl_dump: bool = False,
    ) -> None:  # fmt: skip
        if use_dump and load_file_path and not use_load:
            print("trueup: load_file_path without use_load loaded nothing in torch.utils.dumper; here it loads", flush=True)
            use_dump, use_load = False, True
        chosen = [name for name, on in (("use_dump", use_dump), ("use_load", use_load), ("check_overflow", check_overflow)) if on]
        if len(chosen) > 1:
            raise TrueupError(f"{' and '.join(chosen)} exclude each other: give dumper one of them")
        if load_with_acl_dump:
            if not use_load:
                raise TrueupError("load_with_acl_dump dumps the kernels of loaded operators: give use_load=True and load_file_path")
            kernels.device()
        self._kernels = load_with_acl_dump
        self._mode = chosen[0] if enabled and chosen else None
        self._file = _file(dump_path) if self._mode else None
        self._load: Path | None = None
        self._groups: set[str] = set()
        if use_load:
            self._load = _capture_of(load_file_path)
            self._groups = groups_of(str(load_file_path))
            if self._file is not None and load_file_path and self._file.resolve() == Path(load_file_path).resolve():
                raise TrueupError(f"dump_path and load_file_path are both {self._file}: write to another file")
        self._capture: Capture[Session] | None = None

    def __enter__(self) -> dumper:
        if self._mode is None or self._file is None:
            return self
        h5py()  # said before the run, not after
        running.refuse_second("`trueup capture`, or another dumper around this one")
        native = Path(f"{self._file}{NATIVE}")
        clear(native)
        forced = (None, None) if self._load is None else (str(self._load), "aten")
        options = CaptureOptions.of(level=LEVELS, detail="tensor", inputs_from=forced[0], force=forced[1])
        self._capture = capture(native, None, options)
        self._capture.__enter__()
        if running.session is not None:
            running.session.steps_by_hand()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._capture is None or self._file is None:
            return
        path = self._capture.path
        self._capture.__exit__(kind, error, trace)
        self._capture = None
        if kind is not None or not (path / layout.MANIFEST).exists():  # it is said that nothing ran
            return
        if self._mode == "check_overflow":
            found = overflowed(path)
            for name, said in found.items():
                print(f"[overflow] IR name: {name}: {said}", flush=True)
            if found:
                write(path, self._file, only=set(found))
            return
        known: Seqids | None = None if self._load is None else seqids_of(self._load, self._groups)
        written = write(path, self._file, known=known, inputs=self._load is None)
        if self._kernels and self._load is not None:
            dumped = kernels.dump(self._load, self._groups)
            print(f"trueup: kernels of {counted(dumped, 'operator')} dumped", flush=True)
        said = f"{counted(written, 'operator')} in {self._file}; use_load and compare read {path}, too: take it along"
        print(f"trueup: {said}", flush=True)


def install() -> None:
    """Make ``torch.utils.dumper`` this one, for scripts that call it by that name."""
    torch.utils.dumper = dumper


def _file(path: str | os.PathLike[str] | None) -> Path:
    given = Path(path) if path else Path()
    if given.is_dir():
        return given / f"{datetime.now():%Y%m%d_%H%M%S.%f}.h5"
    if not given.parent.is_dir():
        raise TrueupError(f"dump_path {given}: there is no folder {given.parent}; make it first")
    return given


def _capture_of(path: str | os.PathLike[str] | None) -> Path:
    """Return the capture beside a file, which has what the file has no place for: which function each operator belongs to."""
    if not path:
        raise TrueupError("use_load needs load_file_path: the file that use_dump wrote on the other device")
    native = Path(f"{os.fspath(path)}{NATIVE}")
    if not native.is_dir() and (taken := taken_from(os.fspath(path))) is not None:
        native = taken
    if not native.is_dir():
        raise TrueupError(
            f"{path} cannot be loaded: the capture {native} is not beside it.\n"
            f"  expected: the file and that folder, as use_dump left them\n"
            f"  got:      {'the file alone' if Path(path).is_file() else 'neither'}\n"
            "  next:     copy both from where they were dumped; a file of the real torch.utils.dumper can be compared, not loaded"
        )
    return native
