"""One pass over a tensor, on the device where it lives.

Each kernel returns the packed float64 vector of `trueup.kernels` and, where the bytes are at hand, their digest. A device with a
kernel of its own registers it here; any other gets `on_device`: torch operators whose result stays on the device until the next
flush. Digests are of the bytes (xxh3), which only host memory offers cheaply: on other devices they are taken for the details
``digest`` and ``tensor``, which bring the bytes over anyway.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trueup.adapters.torch.host import on_host
from trueup.kernels import MASKING
from trueup.kernels.sketch import GROUP, lanes, signs
from trueup.model import LANES, NUMBERS
from trueup.recorder import Statistics

Kernel = Callable[[torch.Tensor, str], Statistics]

def on_device(tensor: torch.Tensor, detail: str) -> Statistics:
    """Measure a tensor with torch operators on its own device; nothing is waited for unless the bytes are asked for."""
    tensor = tensor.detach()
    if detail != "stats":
        return on_host(tensor.cpu(), detail)
    if torch.is_autocast_enabled(tensor.device.type):
        with torch.autocast(tensor.device.type, enabled=False):
            return Statistics(values=packed_on_device(tensor))
    return Statistics(values=packed_on_device(tensor))


def packed_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Fill the packed vector, shape ``(PACKED,)`` float64, with torch operators on the tensor's device.

    The same definitions and sketch constants as `trueup.kernels.summarize`; sums run in the device's order.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    dtype = tensor.dtype
    x = tensor.reshape(-1).to(torch.float64)
    finite = torch.isfinite(x)
    if str(dtype).removeprefix("torch.") in MASKING:  # masks: see trueup.kernels.summarize
        finite = finite & (x.abs() < torch.finfo(dtype).max)
    kept = torch.where(finite, x, 0.0)
    count = finite.sum()
    inf = torch.full((), torch.inf, dtype=torch.float64, device=x.device)
    nan = torch.full_like(inf, torch.nan)
    size = x.numel()
    numbers = {
        "min": torch.where(finite, x, torch.inf).min() if size else inf,
        "max": torch.where(finite, x, -torch.inf).max() if size else -inf,
        "mean": kept.sum() / count,
        "l2": torch.linalg.vector_norm(kept),
        "n_nan": torch.isnan(x).sum(),
        "n_posinf": (x == torch.inf).sum(),
        "n_neginf": (x == -torch.inf).sum(),
        "n_zero": (x == 0).sum(),
        "n_subnormal": _count_subnormal(x, dtype),
        "n_saturated": (x.abs() == torch.finfo(dtype).max).sum() if dtype.is_floating_point else torch.zeros_like(count),
    }
    for name in ("min", "max", "mean", "l2"):
        numbers[name] = torch.where(count > 0, numbers[name], nan)
    return torch.cat([torch.stack([numbers[name].to(torch.float64) for name in NUMBERS]), _sketch(kept)])


def _count_subnormal(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not dtype.is_floating_point:
        return torch.zeros((), dtype=torch.int64, device=x.device)
    return ((x != 0) & (x.abs() < torch.finfo(dtype).smallest_normal)).sum()


def _sketch(x: torch.Tensor) -> torch.Tensor:
    groups = max(1, -(-x.numel() // GROUP))
    padded = torch.nn.functional.pad(x, (0, groups * GROUP - x.numel())).view(groups, GROUP // LANES, LANES)
    sign, source = _constants(groups, x.device)
    return (padded * sign).sum(1).flatten()[source].view(groups, LANES).sum(0)


_CONSTANTS: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}


def _constants(groups: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    found = _CONSTANTS.get((groups, device))
    if found is None:
        rows = GROUP // LANES
        sign = torch.from_numpy(signs(0, groups * rows)).view(groups, rows, LANES)
        found = sign.to(device), torch.from_numpy(lanes(0, groups)).to(device)
        if len(_CONSTANTS) < 256:
            _CONSTANTS[(groups, device)] = found
    return found


KERNELS: dict[str, Kernel] = {"cpu": on_host}


def measure(tensor: torch.Tensor, detail: str) -> Statistics:
    """Measure a tensor with the kernel of its device."""
    return KERNELS.get(tensor.device.type, on_device)(tensor, detail)


def resolve(batch: list[Statistics]) -> None:
    """Bring the vectors that are still on a device to the host: one transfer per device."""
    waiting: dict[torch.device, dict[int, Statistics]] = {}
    for stats in batch:
        if isinstance(stats.values, torch.Tensor):
            waiting.setdefault(stats.values.device, {})[id(stats)] = stats
    for device, group in waiting.items():
        synchronize = getattr(getattr(torch, device.type, None), "synchronize", None)
        if synchronize is not None:  # the numbers may come from a stream that this thread knows nothing of
            synchronize(device)
        host = torch.stack([stats.values for stats in group.values()]).cpu().numpy()
        for stats, row in zip(group.values(), host, strict=True):
            stats.values = row
