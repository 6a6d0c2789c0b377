"""The native capture, or watch, that begins with the old tool's call and ends with the process."""

from __future__ import annotations

import atexit
import importlib.util
import sys
from pathlib import Path
from typing import Any

import trueup
from trueup.foundation.model import TrueupError
from trueup.foundation.store import layout
from trueup_compat.clearing import remove
from trueup_compat.precision_tool import config

DEVICE = "npu_bridge"
"""The device's plug-in for TensorFlow: where it is, the device dumps by the keys in the config."""

_running: dict[str, Any] = {}


def begin(actions: tuple[str, ...]) -> None:
    """Begin what the actions ask for: ``overflow`` watches, else ``dump`` records the candidate; on the device itself nothing.

    Raises:
        TrueupError: something that is no capture is in the way.
    """
    if on_device() or not {"overflow", "dump"} & set(actions):
        return
    if "overflow" in actions:
        _watch()
    else:
        capture(config.candidate())


def on_device() -> bool:
    """Return whether the device's own plug-in is installed; the simulated device has one that dumps nothing."""
    found = importlib.util.find_spec(DEVICE)
    return found is not None and type(found.loader).__module__ != "trueup.simdev.standins"


def capture(directory: Path) -> None:
    """Begin to record operations with their tensors, in the steps of ``TF_DUMP_STEP``, in place of what an earlier run left."""
    if _taken(directory):
        return
    _clear(directory)
    block = trueup.capture(directory, level="api", detail="tensor", steps=config.steps())
    _begin(block, directory, f"steps {config.TF_DUMP_STEP} are recorded in {_shown(directory)}")


def _clear(directory: Path) -> None:
    """Remove the capture of an earlier run, which one process alone can know it is.

    Raises:
        TrueupError: this is one of several, and something of its rank is there; or what is there is no capture.
    """
    from trueup.recording.adapters.tensorflow.session import rank_and_world

    rank, world = rank_and_world()
    if world == 1:
        remove(directory)
    elif (directory / layout.rank_name(rank or 0)).exists():
        raise TrueupError(
            f"{_shown(directory)} holds a run of {world} processes, and siblings may be writing there by now.\n"
            "  next:     remove it before the run begins"
        )


def _watch() -> None:
    directory = config.overflow()
    if _taken(directory):
        return
    for saved in saved_steps(directory):
        _clear(saved)
    for told in (*directory.glob("watch-rank-*.json"), *directory.glob("stop")):
        told.unlink(missing_ok=True)
    block = trueup.watch(None, directory)
    _begin(block, directory, f"all steps are watched; those that overflow are saved in {_shown(directory)}")


def saved_steps(directory: Path) -> list[Path]:
    """Return the captures that a watch saved."""
    return sorted(path for path in directory.glob("step-*") if (path / layout.MANIFEST).is_file())


def _taken(directory: Path) -> bool:
    """Tell whether this process records there already; what goes elsewhere is said, and goes on."""
    if not _running:
        return False
    before = next(iter(_running))
    if before != str(directory):
        print(f"trueup: {before} is being recorded: {_shown(directory)} is not, too", file=sys.stderr)
    return True


def _begin(block: Any, directory: Path, said: str) -> None:
    block.__enter__()
    _running[str(directory)] = block
    atexit.register(end)
    print(f"trueup: {said}", file=sys.stderr)


def end() -> None:
    """End what was begun, as the end of the process does."""
    while _running:
        _, block = _running.popitem()
        block.__exit__(None, None, None)
    atexit.unregister(end)


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
