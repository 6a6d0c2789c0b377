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
    from trueup.analysis.pairing.models import convert_weights as convert_weights
    from trueup.analysis.pairing.models import map_models as map_models
    from trueup.analysis.rerun.replay import replay as replay
    from trueup.analysis.rerun.reproduce import reproduce as reproduce
    from trueup.comparison.result.comparing import compare as compare
    from trueup.doors.aligning import align as align
    from trueup.doors.capturing import capture as capture
    from trueup.doors.capturing import step as step
    from trueup.doors.lockstepping import lockstep as lockstep
    from trueup.doors.mitigating import apply_policy as apply_policy
    from trueup.doors.seeds import seed_all as seed_all
    from trueup.doors.shadowing import shadow as shadow
    from trueup.doors.watching import watch as watch
    from trueup.exchange.readers import import_dump as import_dump
    from trueup.foundation.model import Finding as Finding
    from trueup.foundation.model import Result as Result
    from trueup.foundation.model import TrueupError as TrueupError
    from trueup.foundation.store import Capture as Capture
    from trueup.foundation.store import open_capture as open_capture
    from trueup.recording.adapters.torch.huggingface import TrainerCallback as TrainerCallback
    from trueup.recording.adapters.torch.lightning import LightningCallback as LightningCallback
    from trueup.recording.recorder.watch_options import WatchStopped as WatchStopped


_HOMES = {
    "Capture": "trueup.foundation.store",
    "Finding": "trueup.foundation.model",
    "LightningCallback": "trueup.recording.adapters.torch.lightning",
    "Result": "trueup.foundation.model",
    "TrainerCallback": "trueup.recording.adapters.torch.huggingface",
    "TrueupError": "trueup.foundation.model",
    "WatchStopped": "trueup.recording.recorder.watch_options",
    "align": "trueup.doors.aligning",
    "apply_policy": "trueup.doors.mitigating",
    "capture": "trueup.doors.capturing",
    "check": "trueup.analysis.audit",
    "compare": "trueup.comparison.result.comparing",
    "convert_weights": "trueup.analysis.pairing.models",
    "import_dump": "trueup.exchange.readers",
    "lockstep": "trueup.doors.lockstepping",
    "map_models": "trueup.analysis.pairing.models",
    "open_capture": "trueup.foundation.store",
    "overflow": "trueup.analysis.anomalies",
    "replay": "trueup.analysis.rerun.replay",
    "reproduce": "trueup.analysis.rerun.reproduce",
    "seed_all": "trueup.doors.seeds",
    "shadow": "trueup.doors.shadowing",
    "step": "trueup.doors.capturing",
    "watch": "trueup.doors.watching",
}

__all__ = [
    "Capture", "Finding", "LightningCallback", "Result", "TrainerCallback", "TrueupError", "WatchStopped", "__version__",
    "align", "apply_policy", "capture", "check", "compare", "convert_weights", "import_dump", "lockstep", "map_models",
    "open_capture", "overflow", "replay", "reproduce", "seed_all", "shadow", "step", "watch",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trueup' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
