"""Arming a process that knows nothing of Trueup: when it imports a framework that has an adapter, its capture begins.

`trueup capture -- COMMAND` puts the folder ``site`` on PYTHONPATH; every Python process of the command then runs its
``sitecustomize``, which calls `install`. Standard library only, until a framework is really imported.

``importing`` follows the import, ``roles`` tells what kind of process this is, ``process`` is its life and its report.
"""

from __future__ import annotations

import os
import sys

VARIABLE = "TRUEUP_CAPTURE"
"""Environment variable that holds, as JSON: directory, run, options (encoded `CaptureOptions`), command, root."""

SITE = os.path.join(os.path.dirname(__file__), "site")  # noqa: PTH118, PTH120 - loaded at every start-up: no pathlib


def install() -> None:
    """Arm this process if the environment asks for it."""
    text = os.environ.get(VARIABLE)
    if not text:
        return
    from trueup.recording.adapters import ADAPTERS
    from trueup.recording.arming.importing import WhenImported

    for adapter in ADAPTERS:
        sys.meta_path.insert(0, WhenImported(adapter.name, text))
