"""A model of a script to ONNX by ``torch.onnx`` (dynamo), and the numbers of the model and of each node of the exported graph.

What the nodes of an exported graph make of the values before them: the framework's numbers, and a judgement of another's.

    graph = Graph(torch_onnx_program)
    run = graph.run(inputs, {"layer_norm": "layer_norm", "last_hidden_state": "layer_norm_3"})   # a file's names: the graph's
    run.values["layer_norm"]                                   # the framework's, float32
    run.judge("layer_norm", array).verdict                     # 'accurate', for what another made of ``run.values`` before it

The truth is float64: the nodes from the nearest named values to this one, each computed again in float64. Rounding explains of the
last node what the criterion grants its operator, and of those before it how far their grants, carried through the nodes between,
move the truth.
"""

from __future__ import annotations

import copy
import math
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.fx.node import map_arg

from trueup.foundation.facts.slots import roundoff
from trueup.foundation.words.wording import first_line
from trueup.recording.adapters.torch.functions import Operator
from trueup.recording.adapters.torch.recorded_call import to_numpy
from trueup.recording.adapters.torch.reference import NoReference, Reference
from trueup.recording.adapters.torch.shadowing import operand
from trueup.recording.execution.local_error import Distance, LocalError, Operation, judge, rounding


class Model:
    """A model, set to evaluate, with the inputs that its maker gives. Raises ValueError where the script gives none."""

    def __init__(self, script: Path, name: str) -> None:
        made = runpy.run_path(str(script), run_name="trueup_export").get(name)
        made = made() if callable(made) and not isinstance(made, torch.nn.Module) else made
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], torch.nn.Module):
            raise ValueError(f"{name} is {type(made).__name__}")
        model, inputs = made
        self.inputs: tuple[torch.Tensor, ...] = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        if not all(isinstance(one, torch.Tensor) for one in self.inputs):
            raise ValueError("inputs that are no tensors")
        self.model = model.cpu().eval()
        self._made: dict[bool, Any] = {}

    @property
    def batch(self) -> int:
        """Return the size of the first axis of the inputs, 0 where they do not have one in common."""
        sizes = {one.shape[0] if one.dim() else 0 for one in self.inputs}
        return sizes.pop() if len(sizes) == 1 else 0

    def variants(self, batches: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
        """Return the inputs, and for each batch size others of the same kind and range."""
        generator = torch.Generator().manual_seed(0)

        def other(one: torch.Tensor, size: int) -> torch.Tensor:
            shape = (size, *one.shape[1:])
            if one.dtype.is_floating_point:
                return (torch.randn(shape, generator=generator) * one.float().std(correction=0) + one.float().mean()).to(one.dtype)
            if one.dtype == torch.bool:
                return torch.randint(0, 2, shape, generator=generator).bool()
            return torch.randint(int(one.min()), int(one.max()) + 1, shape, generator=generator).to(one.dtype)

        return [self.inputs, *(tuple(other(one, size) for one in self.inputs) for size in batches)]

    @staticmethod
    def arrays(inputs: Sequence[torch.Tensor]) -> list[np.ndarray[Any, Any]]:
        """Return inputs as arrays of the same dtypes."""
        return [to_numpy(one) for one in inputs]

    def export(self, file: Path, opset: int | None, *, dynamic: bool) -> None:
        """Write the model as ONNX; raises what torch.onnx raises."""
        self._made[dynamic] = self._program(opset, dynamic=dynamic)
        self._made[dynamic].save(str(file), external_data=False)

    def _program(self, opset: int | None = None, *, dynamic: bool) -> Any:
        shapes = tuple({0: torch.export.Dim("batch")} for _ in self.inputs) if dynamic else None
        return torch.onnx.export(
            self.model, self.inputs, dynamo=True, opset_version=opset, dynamic_shapes=shapes, verbose=False, external_data=False,
        )  # fmt: skip

    def outputs(self, inputs: Sequence[torch.Tensor]) -> list[np.ndarray[Any, Any]]:
        """Return the tensors that the model makes, in order."""
        return _outputs(self.model, inputs)

    def exact(self, inputs: Sequence[torch.Tensor]) -> list[np.ndarray[Any, Any]]:
        """Return the same of the model in float64; raises what the model raises, where its code names a dtype."""
        model = copy.deepcopy(self.model).double()
        return _outputs(model, [one.double() if one.dtype.is_floating_point else one for one in inputs])

    def graph(self, *, dynamic: bool) -> Graph:
        """Return the graph that torch.onnx exports, or exported; raises what torch.onnx raises."""
        return Graph(self._exported(dynamic=dynamic))

    def proto(self, *, dynamic: bool) -> Any:
        """Return the ONNX model of that graph."""
        return self._exported(dynamic=dynamic).model_proto

    def _exported(self, *, dynamic: bool) -> Any:
        if dynamic not in self._made:
            self._made[dynamic] = self._program(dynamic=dynamic)
        return self._made[dynamic]


def _outputs(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> list[np.ndarray[Any, Any]]:
    with torch.no_grad():
        leaves = torch.utils._pytree.tree_leaves(model(*inputs))
    return [to_numpy(one) for one in leaves if isinstance(one, torch.Tensor)]


Values = dict[str, np.ndarray[Any, Any]]
Grants = dict[tuple[str, int], float]  # what rounding explains of a node's n-th result, relative
DRAWS = 3  # how often the truth's inputs are moved by one unit: some signs cancel


class Graph:
    """The graph that torch.onnx exports, with its nodes by name."""

    def __init__(self, program: Any) -> None:
        self.module = program.exported_program.module()
        self.nodes = {node.name: node for node in self.module.graph.nodes}
        self._texts = {node.name: node.format_node() for node in program.exported_program.graph.nodes}
        leaves = torch.utils._pytree.tree_leaves(self.module.graph.output_node().args[0])
        self._outputs = [getattr(leaf, "name", None) for leaf in leaves]

    def named(self, texts: Mapping[str, str], outputs: Sequence[str]) -> dict[str, str]:
        """Return which values of a file are which nodes' here. Names are numbered, so that one counts only where its node's text is
        the same: operator and arguments, as torch.onnx keeps them in a file. ``outputs`` of the file are the graph's, in order."""
        found = {name: name for name, text in texts.items() if name in self.nodes and text == self._texts.get(name)}
        if len(outputs) == len(self._outputs):
            found |= {name: node for name, node in zip(outputs, self._outputs, strict=True) if node is not None}
        return found

    def run(self, inputs: Sequence[torch.Tensor], names: Mapping[str, str]) -> GraphRun:
        """Execute the graph; tensors of the named nodes are kept."""
        kept: dict[str, Any] = {}
        wanted = set(names.values())

        class Keeping(torch.fx.Interpreter):
            def run_node(self, n: Any) -> Any:
                made = super().run_node(n)
                if n.name in wanted or n.op in ("placeholder", "get_attr") or not isinstance(made, torch.Tensor | tuple | list):
                    kept[n.name] = made
                return made

        with torch.no_grad():
            Keeping(self.module).run(*inputs)
        return GraphRun(self, kept, {name: node for name, node in names.items() if isinstance(kept.get(node), torch.Tensor)})


class GraphRun:
    """One execution: ``values`` by the file's names (of the graph's dtypes), and what another computed of them, judged."""

    def __init__(self, graph: Graph, kept: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self._graph, self._kept, self._names = graph, kept, names
        self._order = {name: at for at, name in enumerate(graph.nodes)}
        self._reference = Reference(torch.device("cpu"), torch.float64)
        self.values: Values = {name: to_numpy(kept[node]) for name, node in names.items()}

    def line(self, name: str) -> str:
        """Return the stack of a value's node, innermost last, as torch.onnx keeps it."""
        node = self._graph.nodes.get(self._names.get(name, ""))
        return "" if node is None else str(node.meta.get("stack_trace") or "")

    def judge(self, name: str, other: np.ndarray[Any, Any]) -> LocalError | None:
        """Judge what another made of the named values before ``name``; None where its shape or dtype is not the graph's."""
        own = self.values[name]
        if own.shape != other.shape or own.dtype != other.dtype:
            return None
        nodes = self._between(self._names[name])
        last, which = _computed(nodes)
        operation = Operation(_operator(last))
        try:
            exact, grants = self._run(nodes, {})
        except NoReference:
            unit = 4 * roundoff(own.dtype.name)  # two results, each rounded; nothing is known of what is between
            return judge(operation, own.dtype.name, Distance.of(own.astype(np.float64), other), None, rounding=unit)
        truth = exact.numpy()
        target, baseline = Distance.of(truth, other), Distance.of(truth, own)
        explained = grants.pop((last.name, which), 0.0)
        if grants:
            explained += self._moved(nodes, grants, truth, draw=0).relative
        found = judge(operation, own.dtype.name, target, baseline, rounding=explained)
        for draw in range(DRAWS):
            if found.verdict not in ("wrong", "suspicious"):
                break
            moved = self._moved(nodes, grants | self._units(nodes), truth, draw=draw + 1)
            found = judge(operation, own.dtype.name, target, baseline, rounding=explained, perturbed=moved)
        return found

    def _between(self, name: str) -> list[Any]:
        """Return the nodes from the nearest kept values to one, in order."""
        found, waiting = {name}, [name]
        while waiting:
            for given in self._graph.nodes[waiting.pop()].all_input_nodes:
                if given.name not in self._kept and given.name not in found:
                    found.add(given.name)
                    waiting.append(given.name)
        return [self._graph.nodes[name] for name in sorted(found, key=self._order.__getitem__)]

    def _run(self, nodes: Sequence[Any], shaken: Mapping[tuple[str, int], float], draw: int = 0) -> tuple[Any, Grants]:
        """Compute nodes in float64, floating values moved by a share of their size (``shaken``); return what the last makes, and
        what rounding explains of each. Raises NoReference where one of them cannot be computed again."""
        signs = torch.Generator().manual_seed(draw)
        made: dict[str, Any] = {}
        grants: Grants = {}

        def value(node: Any) -> Any:
            if node.name in made:
                return made[node.name]
            return _shaken(self._kept[node.name], node.name, shaken, signs)

        for node in nodes:
            args, kwargs = _plain(map_arg((node.args, node.kwargs), value))
            result = _wide(self._computed(node, args, kwargs))
            if not shaken:
                grants |= _granted(node, args, result)
            made[node.name] = result if node is nodes[-1] else _shaken(result, node.name, shaken, signs)
        return made[nodes[-1].name], grants

    def _computed(self, node: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(node.target, torch._ops.OpOverload):
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                raise NoReference("a higher-order operator")
            return node.target(*args, **kwargs)
        operator = Operator.of(node.target)
        prepared = self._reference.prepare(operator, node.target, args, kwargs)
        if len(node.target._schema.returns) == 1 and operator.name not in self._reference.formulas:
            try:
                with torch.no_grad():
                    return node.target(*prepared.args, **prepared.kwargs)
            except (RuntimeError, TypeError, ValueError) as error:
                raise NoReference(first_line(error)) from None
        slots = self._reference.run(prepared, {})
        results = [slots.get(f"output.{at}") for at in range(len(node.target._schema.returns))]
        return results[0] if len(results) == 1 else tuple(results)

    def _units(self, nodes: Sequence[Any]) -> Grants:
        """Return one unit in the last place for each kept value that the nodes read."""
        read = {given.name for node in nodes for given in node.all_input_nodes}.intersection(self._kept)
        return {(name, 0): torch.finfo(self._kept[name].dtype).eps for name in read if _is_floating(self._kept[name])}

    def _moved(self, nodes: Sequence[Any], shaken: Grants, truth: np.ndarray[Any, Any], *, draw: int) -> Distance:
        return Distance.of(truth, self._run(nodes, shaken, draw)[0].numpy())


def _computed(nodes: Sequence[Any]) -> tuple[Any, int]:
    """Return the node that computed what the last one hands on, and which of its results that is."""
    node, which = nodes[-1], 0
    while not isinstance(node.target, torch._ops.OpOverload) and node.args and node.args[0] in nodes:
        which = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], int) else 0
        node = node.args[0]
    return node, which


def _plain(value: Any) -> Any:
    """Return arguments in plain lists: a graph has lists of its own."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, tuple):
        return tuple(_plain(one) for one in value)
    return {name: _plain(one) for name, one in value.items()} if isinstance(value, dict) else value


def _wide(value: Any) -> Any:
    """Return a value, or several, in float64: what a node makes of no tensor (``zeros``) is float32."""
    if isinstance(value, tuple | list):
        return type(value)(_wide(one) for one in value)
    return value.double() if _is_floating(value) else value


def _operator(node: Any) -> str:
    return str(node.target._schema.name) if isinstance(node.target, torch._ops.OpOverload) else str(node.target)


def _shaken(value: Any, name: str, by: Mapping[tuple[str, int], float], signs: torch.Generator) -> Any:
    """Return a value, or several, moved up or down by a share of the root mean square."""
    if isinstance(value, tuple | list):
        return type(value)(_shaken(one, name, {(name, 0): by.get((name, at), 0.0)}, signs) for at, one in enumerate(value))
    share = by.get((name, 0), 0.0)
    if not share or not _is_floating(value):
        return value
    size = operand("", torch.float32, value).l2 / math.sqrt(max(value.numel(), 1)) or 1.0
    up = torch.randint(0, 2, value.shape, generator=signs).mul_(2).sub_(1)
    return value.double() + up * size * share


def _granted(node: Any, args: Sequence[Any], result: Any) -> Grants:
    """Return what the criterion grants a node's results, relative to their norms."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {}
    given = [(f"input.{at}", of, value) for at, (of, value) in enumerate(zip(node.args, args, strict=True))]
    flat = [
        (f"{slot}.{at}" if isinstance(of, list | tuple) else slot, one, tensor)
        for slot, of, value in given
        for at, (one, tensor) in enumerate(zip(of, value, strict=True) if isinstance(of, list | tuple) else [(of, value)])
    ]
    inputs = [operand(slot, _dtype(one, 0), tensor) for slot, one, tensor in flat if _is_floating(tensor)]
    results = list(enumerate(result if isinstance(result, tuple | list) else [result]))
    outputs = {at: operand(f"output.{at}", _dtype(node, at), one) for at, one in results if _is_floating(one)}
    granted = rounding(Operation(_operator(node)), inputs, list(outputs.values())) if outputs else {}
    return {(node.name, at): granted[one.slot] for at, one in outputs.items()}


def _is_floating(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.dtype.is_floating_point


def _dtype(node: Any, which: int) -> torch.dtype:
    """Return the dtype that a node's result has in the framework."""
    value = node.meta.get("val")
    value = value[which] if isinstance(value, tuple | list) else value
    return value.dtype if isinstance(value, torch.Tensor) else torch.float32
