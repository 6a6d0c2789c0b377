"""What the name of a slot tells: whether its call reads or makes it, whether it is a gradient, a weight, an element of a list. And
what its dtype tells: the unit roundoff, the one number that all budgets are made of."""

from __future__ import annotations

from collections.abc import Callable

STEP = "optimizer.step"  # operator of the call that stands for an optimizer's, whatever operators it is made of
INNER = "grad_input.node."  # how slots begin that are gradients of tensors inside a call (`trueup.exchange.readers.ascend`)


Asked = Callable[[str], bool]


def _holds(part: str) -> Asked:
    return lambda name: part in name


def _begins(*parts: str) -> Asked:
    return lambda name: name.startswith(parts)


is_input: Asked = _begins("input.", "param.", "grad_output.", "gradient.")  # whether a slot is read by its call
is_output: Asked = _begins("output.", "grad_input.", "grad_param.")  # whether a slot is computed by its call
is_weight: Asked = _begins("param.")  # whether a slot is a parameter of a module
is_gradient_slot: Asked = _holds("grad")  # whether a slot holds a gradient
is_incoming_gradient: Asked = _begins("grad_output")  # whether a slot holds the gradient that a backward gets
is_gradient: Asked = _begins("grad_")  # whether a slot is one of a backward, and holds a gradient
is_gradient_of_input: Asked = _begins("grad_input.")  # whether a slot holds the gradient that a backward gives for an input
is_gradient_of_step: Asked = _begins("gradient.")  # whether a slot holds what an optimizer's step is given for a weight
is_result: Asked = _begins("output.")  # whether a slot holds a result of a forward
is_argument: Asked = _begins("input.")  # whether a slot holds an argument of a forward
is_of_parameter: Asked = _begins("grad_param.")  # whether a slot holds the gradient of a parameter, at a module
is_of_module: Asked = _begins("param.", "grad_param.", "output.buffer.")  # whether a module's class names it: a weight, a buffer
is_inner: Asked = _begins(INNER)  # whether a slot holds the gradient of a tensor inside a call, as another tool's dump has it
is_foreign: Asked = _begins(INNER, "grad_param.")
"""Whether no native capture has such a slot: gradients inside a call, and of parameters at a module."""


def is_variance(slot: str) -> bool:
    """Tell whether a slot holds a variance."""
    return slot.endswith("var")


def is_returned(slot: str) -> bool:
    """Tell whether a slot holds what a forward call returns, and not an argument or a buffer that it wrote."""
    return is_result(slot) and slot.split(".")[1].isdigit()


def is_written(slot: str) -> bool:
    """Tell whether a slot holds an argument or a buffer that a forward call wrote beside what it returns."""
    return is_result(slot) and not is_returned(slot)


def element(slot: str) -> int:
    """Return which element of a list a slot is, -1 where it is none: ``input.1.3``, ``output.self.3`` and ``output.3`` are 3."""
    *head, last = slot.split(".")
    return int(last) if last.isdigit() and (len(head) > 1 or is_result(slot)) else -1


UNIT_ROUNDOFF: dict[str, float] = {
    "float64": 2.0**-53, "complex128": 2.0**-53,
    "float32": 2.0**-24, "complex64": 2.0**-24,
    "float16": 2.0**-11, "complex32": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4, "float8_e4m3fnuz": 2.0**-4, "float8_e5m2": 2.0**-3, "float8_e5m2fnuz": 2.0**-3,
}  # fmt: skip
"""Half the distance from 1 to the next number (IEEE 754-2019; OCP 8-bit formats 1.0). Integers and bools round nothing."""

LEAST: dict[str, float] = {
    "float16": 2.0**-24, "complex32": 2.0**-24,
    "float8_e4m3fn": 2.0**-9, "float8_e4m3fnuz": 2.0**-10, "float8_e5m2": 2.0**-16, "float8_e5m2fnuz": 2.0**-17,
}  # fmt: skip
"""The smallest numbers above 0 of dtypes that gradients get near to (the same standards): below the normal numbers the distance of
neighbours, however small they are. A result x is rounded to x (1 + d) + e, where e is at most half of it (Higham 2002, 2.8)."""

SINGLE = UNIT_ROUNDOFF["float32"]  # what kernels of 16-bit and 8-bit dtypes compute in
TF32 = 2.0**-11  # of a float32 operand rounded to the 10 stored bits of TF32 and HF32


def roundoff(dtype: str | None) -> float:
    """Return the unit roundoff of a dtype by its name, 0 for integers and what is unknown."""
    return UNIT_ROUNDOFF.get(dtype or "", 0.0)


def underflow(dtype: str | None) -> float:
    """Return by how much, absolutely, a number is rounded that is too small for the precision of its dtype; 0 where none is."""
    return LEAST.get(dtype or "", 0.0) / 2


def is_discrete(dtype: str) -> bool:
    """Tell whether a dtype is one of integers or bools."""
    return dtype.startswith(("int", "uint", "bool"))
