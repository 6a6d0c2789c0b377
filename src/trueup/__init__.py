"""Trueup finds the first call of a training run whose inputs agree with a trusted run and whose outputs do not.

    >>> import trueup
    >>> with trueup.capture("runs/npu", model=model) as cap:      # doctest: +SKIP
    ...     train(model)
    >>> result = trueup.compare("runs/cpu", "runs/npu")           # doctest: +SKIP
    >>> print(result)                                             # doctest: +SKIP
    DEVIATES  first culprit: neck.lstm, backward, step 0, rank 0  (torch.lstm / aten::_thnn_fused_lstm_cell_backward_impl)
              inputs agree (rel. L2 3e-8), outputs do not (rel. L2 2.1e-1, 3.5e6 x the expected rounding error)
              your code: centernet.py:57 in forward
              37 later calls deviate because their inputs do

Importing it imports no framework, and costs little: each name below is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module

from trueup.foundation.version import VERSION as __version__

TYPE_CHECKING = False  # as typing has it, which every armed process would load for this alone
if TYPE_CHECKING:
    from typing import Any

    from trueup.analysis.anomalies import overflow as overflow
    from trueup.analysis.audit import check as check
    from trueup.analysis.audit.preflight import preflight as preflight
    from trueup.analysis.bisection import bisect as bisect
    from trueup.analysis.pairing.models import convert_weights as convert_weights
    from trueup.analysis.pairing.models import map_models as map_models
    from trueup.analysis.rerun.replay import replay as replay
    from trueup.analysis.rerun.reproduce import reproduce as reproduce
    from trueup.doors.comparing import align as align
    from trueup.doors.comparing import compare as compare
    from trueup.doors.comparing import curves as curves
    from trueup.doors.training import apply_policy as apply_policy
    from trueup.doors.training import capture as capture
    from trueup.doors.training import lockstep as lockstep
    from trueup.doors.training import monitor as monitor
    from trueup.doors.training import seed_all as seed_all
    from trueup.doors.training import shadow as shadow
    from trueup.doors.training import step as step
    from trueup.doors.training import watch as watch
    from trueup.exchange.readers import import_dump as import_dump
    from trueup.foundation.model import Finding as Finding
    from trueup.foundation.model import Result as Result
    from trueup.foundation.model import TrueupError as TrueupError
    from trueup.foundation.store import Capture as Capture
    from trueup.foundation.store import open_capture as open_capture
    from trueup.migration.port import port as port
    from trueup.recording.adapters.torch.trainers import LightningCallback as LightningCallback
    from trueup.recording.adapters.torch.trainers import TrainerCallback as TrainerCallback
    from trueup.recording.recorder.options import WatchStopped as WatchStopped


_HOMES = {
    "Capture": "trueup.foundation.store",
    "Finding": "trueup.foundation.model",
    "LightningCallback": "trueup.recording.adapters.torch.trainers",
    "Result": "trueup.foundation.model",
    "TrainerCallback": "trueup.recording.adapters.torch.trainers",
    "TrueupError": "trueup.foundation.model",
    "WatchStopped": "trueup.recording.recorder.options",
    "align": "trueup.doors.comparing",
    "apply_policy": "trueup.doors.training",
    "bisect": "trueup.analysis.bisection",
    "capture": "trueup.doors.training",
    "check": "trueup.analysis.audit",
    "compare": "trueup.doors.comparing",
    "convert_weights": "trueup.analysis.pairing.models",
    "curves": "trueup.doors.comparing",
    "import_dump": "trueup.exchange.readers",
    "lockstep": "trueup.doors.training",
    "map_models": "trueup.analysis.pairing.models",
    "monitor": "trueup.doors.training",
    "open_capture": "trueup.foundation.store",
    "overflow": "trueup.analysis.anomalies",
    "port": "trueup.migration.port",
    "preflight": "trueup.analysis.audit.preflight",
    "replay": "trueup.analysis.rerun.replay",
    "reproduce": "trueup.analysis.rerun.reproduce",
    "seed_all": "trueup.doors.training",
    "shadow": "trueup.doors.training",
    "step": "trueup.doors.training",
    "watch": "trueup.doors.training",
}

__all__ = [
    "Capture", "Finding", "LightningCallback", "Result", "TrainerCallback", "TrueupError", "WatchStopped", "__version__",
    "align", "apply_policy", "bisect", "capture", "check", "compare", "convert_weights", "curves", "import_dump", "lockstep",
    "map_models", "monitor", "open_capture", "overflow", "port", "preflight", "replay", "reproduce", "seed_all", "shadow", "step",
    "watch",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trueup' has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(_HOMES[name]), name)  # the next one who asks finds it
    return found
