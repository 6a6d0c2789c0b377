"""A tap in a graph: an operation that hands tensors to Python when the graph executes, and changes nothing that others read.

The graph's own operations keep their inputs. A tap is one of the graph's control outputs, so that it is executed, and counts as
stateful, so that it is not pruned where one function is inlined into another; TensorFlow is kept from ordering other operations by
it (`functions`). What is tapped has one more reader: kernels that would fuse it away do not (docs/tensorflow.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.ops import script_ops

TAP = "PyFunc"
NAME = "trueup_tap"


def tap(graph: Any, tensors: Sequence[Any], deliver: Callable[..., None]) -> None:
    """Put a tap into a graph that is being built, or has just been.

    Args:
        graph: a FuncGraph.
        tensors: of the graph.
        deliver: called with their values, arrays that are valid while it runs, on whatever thread executes.
    """

    def told(*values: Any) -> list[Any]:
        deliver(*values)
        return []

    kept = getattr(graph, "_trueup_taps", None)
    if kept is None:
        kept = graph._trueup_taps = []
    kept.append(told)  # TensorFlow's registry forgets a function that nobody holds
    token = script_ops._py_funcs.insert(told)
    value = attr_value_pb2.AttrValue
    types = value.ListValue(type=[tensor.dtype.base_dtype.as_datatype_enum for tensor in tensors])
    attrs = {"token": value(s=token.encode()), "Tin": value(list=types), "Tout": value(list=value.ListValue(type=[]))}
    with graph.control_dependencies(None):
        made = graph._create_op_internal(TAP, list(tensors), [], name=NAME, attrs=attrs, compute_device=True)
    graph.control_outputs.append(made)
