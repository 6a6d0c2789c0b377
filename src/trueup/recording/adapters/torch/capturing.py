"""The capture of PyTorch that runs in this process, and `trueup.capture` for PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from trueup.recording.adapters.torch.session import Session
from trueup.recording.recorder import CaptureOptions
from trueup.recording.recorder.running import Capture, Running, root_manifest, roots

running: Running[Session] = Running()


def capture(
    directory: str | Path, model: torch.nn.Module | Iterable[torch.nn.Module] | None, options: CaptureOptions
) -> Capture[Session]:
    """Make a capture of what runs inside its ``with`` block; see `trueup.capture`."""
    session = Session(Path(directory), options, root_manifest(options))
    for root in roots(model, torch.nn.Module):
        session.scopes.register(root)
    return Capture(session, running)
