"""Trueup finds the first call of a training run whose inputs agree with a trusted run and whose outputs do not.

    >>> import trueup
    >>> with trueup.capture("runs/npu", model=model) as cap:      # doctest: +SKIP
    ...     train(model)
    >>> result = trueup.compare("runs/cpu", "runs/npu")           # doctest: +SKIP
    >>> print(result)                                             # doctest: +SKIP
    DEVIATES  first culprit: neck.lstm, backward, step 0, rank 0  (torch.lstm / aten::_thnn_fused_lstm_cell_backward_impl)
              inputs agree (rel. L2 3e-8), outputs do not (rel. L2 2.1e-1, 3.5e6 x the expected rounding error)
              your code: centernet.py:57 in forward
              37 later calls deviate only because of it

Importing it imports no framework, and costs little: each name below is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # as typing has it, which every armed process would load for this alone
if TYPE_CHECKING:
    from typing import Any

    from trueup.adapters.torch.huggingface import TrainerCallback as TrainerCallback
    from trueup.adapters.torch.lightning import LightningCallback as LightningCallback
    from trueup.aligning import align as align
    from trueup.anomalies import overflow as overflow
    from trueup.audit import check as check
    from trueup.capturing import capture as capture
    from trueup.capturing import step as step
    from trueup.comparing import compare as compare
    from trueup.lockstepping import lockstep as lockstep
    from trueup.mitigating import apply_policy as apply_policy
    from trueup.model import Finding as Finding
    from trueup.model import Result as Result
    from trueup.model import TrueupError as TrueupError
    from trueup.pairing.models import convert_weights as convert_weights
    from trueup.pairing.models import map_models as map_models
    from trueup.readers import import_dump as import_dump
    from trueup.recorder.watch_options import WatchStopped as WatchStopped
    from trueup.rerun.replay import replay as replay
    from trueup.rerun.reproduce import reproduce as reproduce
    from trueup.seeds import seed_all as seed_all
    from trueup.shadowing import shadow as shadow
    from trueup.store import Capture as Capture
    from trueup.store import open_capture as open_capture
    from trueup.watching import watch as watch

__version__ = "0.1.0"

_HOMES = {
    "Capture": "trueup.store",
    "Finding": "trueup.model",
    "LightningCallback": "trueup.adapters.torch.lightning",
    "Result": "trueup.model",
    "TrainerCallback": "trueup.adapters.torch.huggingface",
    "TrueupError": "trueup.model",
    "WatchStopped": "trueup.recorder.watch_options",
    "align": "trueup.aligning",
    "apply_policy": "trueup.mitigating",
    "capture": "trueup.capturing",
    "check": "trueup.audit",
    "compare": "trueup.comparing",
    "convert_weights": "trueup.pairing.models",
    "import_dump": "trueup.readers",
    "lockstep": "trueup.lockstepping",
    "map_models": "trueup.pairing.models",
    "open_capture": "trueup.store",
    "overflow": "trueup.anomalies",
    "replay": "trueup.rerun.replay",
    "reproduce": "trueup.rerun.reproduce",
    "seed_all": "trueup.seeds",
    "shadow": "trueup.shadowing",
    "step": "trueup.capturing",
    "watch": "trueup.watching",
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
