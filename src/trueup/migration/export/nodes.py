"""Node by node: what onnxruntime makes of the framework's values before a node, and what a fresh export writes there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trueup.migration.export.capturing import Values
from trueup.migration.export.widening import NARROW

MADE = "/made of the framework's values"
LINE = re.compile(r'File "([^"]+)", line (\d+)')
APART = 1e-6
"""Relative difference from which two settings are not the same: the export writes float32, whose rounding is 6e-8."""

Run = Callable[[Any, Mapping[str, Any]], list[np.ndarray[Any, Any]]]
Inputs = Sequence[np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Node:
    """A node that differs: its name in the file, operator, line of the model, relative error of what it makes of the framework's
    values, the judge's word (`wrong`, `suspicious`, or `setting`: only its settings differ) and sentence, and its settings that a
    fresh export writes otherwise."""

    name: str
    op: str
    source: str
    error: float
    word: str
    why: str
    settings: tuple[str, ...]


def differing(onnx: Any, proto: Any, run: Run, executed: Sequence[tuple[Inputs, Any]], *, fresh: Any) -> list[Node]:
    """Return the nodes that differ, in the file's order.

    Args:
        onnx: the package.
        proto: the file; ``run(model, feeds)`` gives the outputs of one like it.
        executed: inputs, and the framework's run of them (`recording.adapters.torch.exported_graph.GraphRun`).
        fresh: what an export of the model gives now; None: that is the file.
    """
    makers = {name: node for node in proto.graph.node for name in node.output}
    names = [name for name in makers if all(name in one.values for _, one in executed)]
    cut = _cut(onnx, proto, {name: executed[0][1].values[name] for name in names})
    worst: dict[str, Any] = {}
    for inputs, one in executed:
        given = dict(zip((info.name for info in proto.graph.input), inputs, strict=False))
        for name, made in zip(names, run(cut, given | {name: one.values[name] for name in names}), strict=True):
            found = one.judge(name, made)
            if found is None or found.verdict in ("wrong", "suspicious"):
                before = worst.get(name)
                if name not in worst or (before is not None and (found is None or found.excess > before.excess)):
                    worst[name] = found
    told = {} if fresh is None else settings(onnx, proto, fresh)
    inside = {} if fresh is None else _other_operators(fresh, makers, set(names), worst)
    worst |= {name: worst[into] for name, (into, _) in inside.items()}
    told |= {name: (*told.get(name, ()), said) for name, (_, said) in inside.items()}
    return [_node(name, makers[name], worst, told, one) for name in makers if name in worst or name in told]


def _other_operators(
    fresh: Any, makers: Mapping[str, Any], judged: set[str], worst: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
    """Return, by first outputs, nodes of other operators than those of these names in a fresh export: into which judged value that
    differs each goes, and what is said of it. Another operator that changes no number is another form, and no fault."""
    new = {node.output[0]: node.op_type for node in fresh.graph.node if node.output}
    found: dict[str, tuple[str, str]] = {}
    for into in worst:
        waiting, seen = [into], {into}
        while waiting:
            name = waiting.pop()
            node = makers.get(name)
            if node is None:
                continue
            if name == node.output[0] and new.get(name, node.op_type) != node.op_type:
                found[name] = into, f"it is {node.op_type}, a fresh export has {new[name]}"
            more = [one for one in node.input if one not in judged and one not in seen]
            seen.update(more)
            waiting += more
    return found


def _node(name: str, node: Any, worst: Mapping[str, Any], settings: Mapping[str, tuple[str, ...]], run: Any) -> Node:
    source = line(kept(node, "stack_trace")) or line(run.line(name))
    told = settings.get(name, ())
    if name not in worst:
        return Node(node.name or name, node.op_type, source, 0.0, "setting", "", told)
    found = worst[name]
    if found is None:
        return Node(node.name or name, node.op_type, source, float("inf"), "wrong", "its shape or dtype is another", told)
    sentence = found.sentence.replace("the baseline", "the framework")
    return Node(node.name or name, node.op_type, source, found.error, found.verdict, sentence, told)


def _cut(onnx: Any, proto: Any, values: Values) -> Any:
    """Return a model in which each node reads what it is given of ``values``, and not what the nodes before it make."""
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    for node in model.graph.node:
        node.output[:] = [name + MADE if name in values else name for name in node.output]
    del model.graph.output[:], model.graph.value_info[:]
    kind = onnx.helper.np_dtype_to_tensor_dtype
    model.graph.input.extend(onnx.helper.make_tensor_value_info(name, kind(one.dtype), None) for name, one in values.items())
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name + MADE) for name in values)
    return model


def settings(onnx: Any, proto: Any, fresh: Any) -> dict[str, tuple[str, ...]]:
    """Return, by a node's first output, numbers that it has otherwise than the node of that name and operator in a fresh export:
    attributes, and constants that it reads."""
    held, new = ({one.name: one for one in model.graph.initializer} for model in (proto, fresh))
    nodes = {node.output[0]: node for node in fresh.graph.node if node.output}

    def array(one: Any) -> Any:
        held = onnx.numpy_helper.to_array(one)
        return held.astype(np.float32) if held.dtype == NARROW else held

    def of(node: Any, other: Any) -> Iterator[str]:
        before = {one.name: onnx.helper.get_attribute_value(one) for one in other.attribute}
        for one in node.attribute:
            value = onnx.helper.get_attribute_value(one)
            if isinstance(value, float | bytes) and one.name in before and not _alike(value, before[one.name]):
                yield f"{one.name} is {_text(value)}, a fresh export has {_text(before[one.name])}"
        for at, (name, was) in enumerate(zip(node.input, other.input, strict=False)):
            if name in held and was in new and not _alike(a := array(held[name]), b := array(new[was])):
                both = f"is {_text(a)}, a fresh export has {_text(b)}" if a.size == b.size == 1 else "is not that of a fresh export"
                yield f"input {at} ({name}) {both}"

    pairs = [(node.output[0], node, nodes[node.output[0]]) for node in proto.graph.node if node.output and node.output[0] in nodes]
    found = {name: tuple(of(node, other)) for name, node, other in pairs if node.op_type == other.op_type}
    return {name: told for name, told in found.items() if told}


def _alike(one: Any, other: Any) -> bool:
    """Tell whether two settings are the same, as far as they are words or floating-point numbers in the same form."""
    a, b = np.asarray(one), np.asarray(other)
    if a.dtype.kind != "f" or b.dtype.kind != "f":
        return a.dtype.kind != "S" or bool(one == other)
    if a.size == b.size == 1:
        a, b = a.reshape(()), b.reshape(())
    return a.shape != b.shape or bool(np.allclose(a.astype(np.float64), b.astype(np.float64), rtol=APART, atol=0, equal_nan=True))


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return f"{float(np.asarray(value).reshape(-1)[0]):.7g}"


def line(stack: str) -> str:
    """Return the model's line of a stack: the innermost of yours, else of a library, else of PyTorch."""
    frames = LINE.findall(stack)
    own = [frame for frame in frames if "-packages/" not in frame[0]]
    libraries = [frame for frame in frames if "-packages/torch/" not in frame[0]]
    return ":".join((own or libraries or frames)[-1]) if frames else ""


def kept(node: Any, name: str) -> str:
    """Return what torch.onnx keeps of a node."""
    return next((str(one.value) for one in node.metadata_props if one.key == f"pkg.torch.onnx.{name}"), "")
