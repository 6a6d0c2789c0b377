"""A simulated accelerator: device type ``npu`` in PyTorch, on the CPU, healthy or broken in a known way.

>>> from trueup import simdev
>>> simdev.install()                                            # torch.npu, .npu(), .to("npu"), autocast("npu") ...
>>> with simdev.inject("lstm-backward-cell-gate"):              # broken until the block ends
...     train(model.to("npu"))
>>> simdev.fired()[0]
Fired(fault='lstm-backward-cell-gate', op='aten::_thnn_fused_lstm_cell_backward_impl', ordinal=0, phase='backward')

The package imports PyTorch when the device is installed, not before, so that the tables can be listed without it. Only
examples, tests and the command line use it; no other part of Trueup may depend on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueup.simdev.tables import FAULTS, NOISE, Fault, Noise

if TYPE_CHECKING:
    import torch

    from trueup.simdev.injection import Fired, Switch

__all__ = ["FAULTS", "NOISE", "Fault", "Noise", "fired", "heal", "inject", "install", "noise", "raw"]


def install() -> None:
    """Make the device type ``npu`` known to PyTorch; a second call does nothing. Honours ``TRUEUP_SIMDEV_FAULT`` and
    ``TRUEUP_SIMDEV_NOISE`` (names separated by commas); raises TrueupError where a name is unknown, or another backend has taken
    PyTorch's only private device type."""
    from trueup.simdev import device

    device.install()


def inject(name: str) -> Switch:
    """Break the device by a row of `FAULTS` until `heal` or the end of the returned context manager; raises TrueupError if there
    is none."""
    install()
    from trueup.simdev import injection

    return injection.inject(name)


def noise(name: str) -> Switch:
    """Let the device round differently by a row of `NOISE` until `heal` or the end of the returned context manager; raises
    TrueupError if there is none."""
    install()
    from trueup.simdev import injection

    return injection.noise(name)


def heal() -> None:
    """Switch all faults and noise off."""
    from trueup.simdev import injection

    injection.heal()


def fired() -> list[Fired]:
    """Return the calls whose bits a fault changed, in order, at most 1000."""
    from trueup.simdev import injection

    return injection.fired()


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the CPU tensor behind an npu tensor, sharing its memory; nothing is dispatched."""
    from trueup.simdev import tensor as tensors

    return tensors.raw(tensor)
