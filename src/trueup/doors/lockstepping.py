"""`trueup.lockstep`: two models in one process, call by call, until they part."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trueup.foundation.model import TrueupError

if TYPE_CHECKING:
    from trueup.recording.execution.lockstep_result import LockstepResult


def lockstep(
    model_a: Any, model_b: Any, inputs: Any = (), *, loss: Callable[[Any], Any] | None = None, backward: bool = True,
    level: str = "api",
) -> LockstepResult:  # fmt: skip
    """Run two models with the same inputs, call by call, and stop at the first call that computes something else.

        on_cpu, on_npu = Net(), copy.deepcopy(net).to("npu")
        print(trueup.lockstep(on_cpu, on_npu, batch))

    Each function that ``model_a`` calls is executed once more on ``model_b``'s device, in its dtype, with copies of the same inputs
    and, in backward, the same gradients, so that errors do not add up. At level ``module`` each module of ``model_b`` is called
    with what the module of the same path in ``model_a`` was given. The models are meant to be the same but for device and dtype.
    Gradients, buffers and random states are put back.

    Args:
        model_a: the trusted model.
        model_b: the model under suspicion.
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments, on ``model_a``'s device.
        loss: takes what ``model_a`` returns and gives the scalar to start the backward from; else its ``loss``, or its outputs
            weighted by fixed numbers.
        backward: False compares the forward alone.
        level: ``api`` goes by functions, ``module`` by modules: where the two models' code differs inside of them.

    Raises:
        TrueupError: ``model_b`` lacks a module of ``model_a``, or PyTorch is not imported.
    """
    if "torch" not in sys.modules:
        raise TrueupError("lockstep found no framework: import torch before you call trueup.lockstep")
    if level not in ("api", "module"):
        raise TrueupError(f"level {level!r} of a lockstep is unknown: expected api or module")
    from trueup.recording.adapters.torch.lockstep import Lockstep
    from trueup.recording.adapters.torch.lockstep_functions import FunctionLockstep

    keywords = dict(inputs) if isinstance(inputs, Mapping) else {}
    arguments = () if isinstance(inputs, Mapping) else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    made = FunctionLockstep if level == "api" else Lockstep
    return made(model_a, model_b).run(arguments, keywords, loss, backward=backward)
