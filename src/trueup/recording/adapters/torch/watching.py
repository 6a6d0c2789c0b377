"""`trueup.watch` for PyTorch; what it is made of is in the files ``watching_*`` beside this one and in `trueup.analysis.watch`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from trueup.analysis.watch.watch import Watch
from trueup.recording.adapters.torch.capturing import running
from trueup.recording.adapters.torch.watching_session import WatchSession
from trueup.recording.recorder import CaptureOptions
from trueup.recording.recorder.running import root_manifest
from trueup.recording.recorder.watch_options import WatchOptions


def watch(directory: Path, models: Iterable[torch.nn.Module], options: CaptureOptions, chosen: WatchOptions) -> Watch:
    """Make a watch of what runs inside its ``with`` block; see `trueup.watch`."""
    return Watch(WatchSession(directory, options, chosen, root_manifest(options, "tensor")), running, models)
