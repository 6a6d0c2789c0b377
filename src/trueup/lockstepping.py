"""`trueup.lockstep`: two models in one process, call by call, until they part."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trueup.model import TrueupError

if TYPE_CHECKING:
    from trueup.rerun.lockstep_result import LockstepResult


def lockstep(
    model_a: Any, model_b: Any, inputs: Any = (), *, loss: Callable[[Any], Any] | None = None, backward: bool = True
) -> LockstepResult:
    """Run two models with the same inputs, module by module, and stop at the first module that computes something else.

        on_cpu, on_npu = Net(), copy.deepcopy(net).to("npu")
        print(trueup.lockstep(on_cpu, on_npu, batch))

    Each module of ``model_b`` is called with what the module of the same path in ``model_a`` was given, and in backward gets its
    gradients, so that errors do not add up. The models are meant to be the same but for device and dtype. Gradients, buffers and
    random states are put back.

    Args:
        model_a: the trusted model.
        model_b: the model under suspicion.
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments, on ``model_a``'s device.
        loss: takes what ``model_a`` returns and gives the scalar to start the backward from; else its ``loss``, or its outputs
            weighted by fixed numbers.
        backward: False compares the forward alone.

    Raises:
        TrueupError: ``model_b`` lacks a module of ``model_a``, or PyTorch is not imported.
    """
    if "torch" not in sys.modules:
        raise TrueupError("lockstep found no framework: import torch before you call trueup.lockstep")
    from trueup.adapters.torch.lockstep import Lockstep

    keywords = dict(inputs) if isinstance(inputs, Mapping) else {}
    arguments = () if isinstance(inputs, Mapping) else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    return Lockstep(model_a, model_b).run(arguments, keywords, loss, backward=backward)
