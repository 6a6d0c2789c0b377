"""What an operator should have computed: the same call, on copies of its inputs, in a wider dtype on a trusted device.

    >>> golden = Golden(torch.device("cpu"), torch.float64)
    >>> call = golden.prepare(operator, (x, y), {})       # aten::add_: before it runs, for x is about to be written
    >>> golden.run(call, {"output.0": x})
    {'output.0': tensor([...], dtype=torch.float64)}

Nothing of the training's is touched: inputs are copied to the reference device and widened there, so that the device under
suspicion does no arithmetic for its own judgement. An operator that only some devices have, or whose result is made for its own
backward alone, has a formula in `golden_formulas`; what cannot be computed again raises `NoReference` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from trueup.foundation.facts.operators import has, says
from trueup.recording.adapters.torch.dispatch import Operator, _outputs
from trueup.recording.adapters.torch.golden_formulas import FORMULAS, Formula
from trueup.recording.adapters.torch.layouts import is_plain

Tensors = dict[str, torch.Tensor]
Change = Callable[[torch.Tensor], torch.Tensor]

RANDOM = "random: another draw is as good"
FOREIGN = "an operator of another library, for which no reference is known"
OPAQUE = "a higher-order operator: what it executes is not seen"
HANDED_OUT = "it hands out memory and computes nothing"
SUBCLASS = "a tensor that is no plain array"

INSTEAD: dict[str, Any] = {"half_to_float": False, "pin_memory": None, "generator": None}
"""Arguments that mean nothing, or the wrong thing, to the reference."""


class NoReference(Exception):
    """A call cannot be computed again; the text says why, in a few words."""


@dataclass(slots=True)
class Prepared:
    """A call with copies of its inputs on the reference device."""

    operator: Operator
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtypes: tuple[torch.dtype, ...]
    """Of its floating tensors, in order, as the training had them."""

    def named(self) -> dict[str, Any]:
        """Return the arguments by name, defaults included."""
        arguments = self.func._schema.arguments
        bound = {argument.name: argument.default_value for argument in arguments}
        bound.update(zip(bound, self.args, strict=False))
        return bound | self.kwargs


class Golden:
    """Computes calls of dispatcher operators again.

    Args:
        device: where; nothing but copies runs elsewhere.
        dtype: the real floating dtype to compute in; complex numbers take the complex one of that width.
        formulas: of operators that Trueup does not know (``"npu::npu_rms_norm"``); see `golden_formulas.Formula`.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, formulas: Mapping[str, Formula] | None = None) -> None:
        self.device, self.dtype = device, dtype
        self._complex = torch.complex128 if dtype == torch.float64 else torch.complex64
        self._formulas = {**FORMULAS, **(formulas or {})}

    def why_not(self, operator: Operator, func: Any) -> str | None:
        """Say why an operator has no reference, whatever its arguments; None where it may have one."""
        if operator.opaque:
            return OPAQUE
        if operator.name in self._formulas:
            return None
        if has(operator.name, "memory"):
            return HANDED_OUT
        if torch.Tag.nondeterministic_seeded in func.tags:
            return RANDOM
        return None if operator.name.startswith("aten::") else FOREIGN

    def prepare(self, operator: Operator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared:
        """Copy the inputs of a call that is about to run.

        Raises:
            NoReference: the call cannot be computed again.
        """
        if (reason := self.why_not(operator, func)) is not None:
            raise NoReference(reason)
        names = [argument.name for argument in func._schema.arguments]
        seen: list[torch.dtype] = []
        with alone():
            copied = tuple([self._argument(name, v, operator, seen) for name, v in zip(names, args, strict=False)])
            named = {name: self._argument(name, v, operator, seen) for name, v in kwargs.items()}
        if has(func._opname, "compares") and seen:
            copied, named = tuple([_rounded(v, seen[0]) for v in copied]), {k: _rounded(v, seen[0]) for k, v in named.items()}
        return Prepared(operator, func, copied, named, tuple(seen))

    def run(self, call: Prepared, actual: Tensors, change: Change | None = None) -> Tensors:
        """Compute a call; return the outputs that can be compared, by slot.

        Args:
            call: the call; its inputs stay as they are.
            actual: the outputs there were, widened, which a formula may need (the mask of a dropout).
            change: makes other inputs of the floating ones first.

        Raises:
            NoReference: the reference refused.
        """
        args, kwargs = call.args, call.kwargs
        with alone():
            if change is not None:
                args, kwargs = _mapped(args, change), {k: _mapped(v, change) for k, v in kwargs.items()}
            elif call.operator.written:  # what it only reads need not be copied
                places, names = ({place[k] for place in call.operator.written} for k in (0, 1))
                args = tuple([_mapped(v, torch.clone) if k in places else v for k, v in enumerate(args)])
                kwargs = {k: _mapped(v, torch.clone) if k in names else v for k, v in kwargs.items()}
            try:
                return self._computed(Prepared(call.operator, call.func, args, kwargs, call.dtypes), actual)
            except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
                said = (str(error).strip() or type(error).__name__).splitlines()[0][:100]
                raise NoReference(f"the reference refused: {said}") from None

    def _computed(self, call: Prepared, actual: Tensors) -> Tensors:
        formula = self._formulas.get(call.operator.name)
        if formula is not None:
            found = formula(call.named(), actual)
            if found is None:
                raise NoReference(RANDOM)
            return found
        result = call.func(*call.args, **call.kwargs)
        outputs, _ = _outputs(call.operator, call.args, call.kwargs, result)
        unchecked = says(call.operator.name, "unchecked") or ()
        return {slot: tensor for slot, tensor in outputs if slot not in unchecked}

    def _argument(self, name: str, value: Any, operator: Operator, seen: list[torch.dtype]) -> Any:
        return INSTEAD[name] if name in INSTEAD else self._moved(value, bool(operator.written), seen)

    def _moved(self, value: Any, copy: bool, seen: list[torch.dtype]) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dtype.is_floating_point or value.dtype.is_complex:
                seen.append(value.dtype)
            return self.tensor(value, copy=copy)
        if type(value) in (list, tuple):
            return type(value)([self._moved(item, copy, seen) for item in value])
        if isinstance(value, torch.device):
            return self.device
        return self.widened(value) if isinstance(value, torch.dtype) else value

    def tensor(self, tensor: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
        """Copy a tensor to the reference device and widen it there; without ``copy`` it may be the tensor itself.

        Raises:
            NoReference: it is sparse, nested, quantised or of a class that wraps others.
        """
        if not is_plain(tensor) or tensor.device.type == "meta":
            raise NoReference(SUBCLASS)
        moved = tensor if tensor.device == self.device else tensor.to(self.device)
        wide = moved.to(self.widened(moved.dtype))  # on the reference device, not on the one that is judged
        return wide.clone() if copy and wide is tensor else wide

    def widened(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the reference holds one."""
        if dtype.is_complex:
            return self._complex
        return self.dtype if dtype.is_floating_point and dtype.itemsize <= self.dtype.itemsize else dtype


def alone() -> AbstractContextManager[Any]:
    """Return a context without the user's modes and without gradients: our arithmetic is nobody's call."""
    return _Alone() if torch._C._len_torch_dispatch_stack() else torch.no_grad()


class _Alone:
    def __enter__(self) -> None:
        self._modes, self._gradients = _disable_current_modes(), torch.no_grad()
        self._modes.__enter__()
        self._gradients.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._gradients.__exit__(*error)
        self._modes.__exit__(*error)


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, float) or not dtype.is_floating_point or dtype.itemsize < 2:  # float8 is compared as something wider
        return value
    return torch.tensor(value, dtype=dtype).item()


def _mapped(value: Any, change: Change) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    return type(value)([_mapped(item, change) for item in value]) if type(value) in (list, tuple) else value
