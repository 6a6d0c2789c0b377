"""A stranger: a small real training that was not looked at while Trueup was made, with another implementation and wrong formulas.

    @stranger("vae", "Pictures through a bottleneck", wrongs={"variance-for-deviation": Place("mul|exp", scope="encoder")})
    def vae(form: str, device: str) -> Steps: ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from silent.case import Place

PLAIN, AGAIN, ANEW = "plain", "again", "anew"
Build = Callable[[str, str], "Steps"]


@dataclass
class Steps:
    """The modules in training, and a function that trains one step and returns its loss."""

    model: nn.Module
    step: Callable[[], Tensor]


@dataclass(frozen=True)
class Stranger:
    """A row of the table of strangers."""

    name: str
    what: str
    build: Build
    """From a form (`PLAIN`, one of ``rights`` or one of ``wrongs``) and a device."""
    wrongs: dict[str, Place]
    """Wrong formulas written by hand, and where each first shows."""
    rights: tuple[str, ...]
    """Other right implementations."""
    dense: bool
    """False where gradients are sparse, which the simulated device does not have."""
    held_out: bool
    """True: nobody looks at what is said of it while anything is mended; it tells whether mending is general."""
    steps: int


STRANGERS: dict[str, Stranger] = {}


def stranger(
    name: str,
    what: str,
    wrongs: dict[str, Place],
    *,
    rights: tuple[str, ...] = (AGAIN,),
    dense: bool = True,
    held_out: bool = False,
    steps: int = 2,
) -> Callable[[Build], Build]:
    """Enter the function that builds a training into `STRANGERS`."""

    def enter(build: Build) -> Build:
        STRANGERS[name] = Stranger(name, what, build, wrongs, rights, dense, held_out, steps)
        return build

    return enter


class Altered(TorchDispatchMode):
    """Runs the CPU's operators as the simulated device runs them now: broken by a fault, or with sums in another order.

    It works where the device itself does not, under the CPU's autocast and for sparse gradients. Operators that only the device has
    (its fused attention, its dropout) are not altered.
    """

    lowest = True  # a capture stands above it, so that it sees an operator and not what the altered one is made of

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from trueup.simdev.tensor import interceptors, plan_of

        interceptor = interceptors.get(func)
        if interceptor is None:
            return func(*args, **kwargs or {})
        with torch._C.DisableTorchFunction():  # nor the functions
            return interceptor(plan_of(func), func, args, kwargs or {})
