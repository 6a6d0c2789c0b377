"""The backward of api and module calls, seen from autograd nodes without touching the graph.

Before a call the gradient edges of its inputs are noted; after it, its nodes are walked from the outputs to those edges. A
pre-hook on an output's node sees ``grad_output``; a hook on a node that holds an input's edge sees that call's *own*
``grad_input``, not the sum over all users of the tensor. Full backward hooks would insert functions into the graph, break
in-place operators and miss keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from trueup.adapters.torch.context import Context, tag, tagged

Edges = dict[tuple[Any, int], list[str]]
"""Gradient edge (node, output number) -> the slots it enters by; one tensor passed twice shares its edge."""

Record = Callable[[Context, list[tuple[str, torch.Tensor | None]]], None]
"""Receives gradients as ``(slot, tensor)`` when autograd delivers them."""

MAX_NODES = 20_000


def input_edges(inputs: Iterable[tuple[str, torch.Tensor]]) -> Edges:
    """Note the gradient edges of a call's inputs before it runs (an in-place call rebases them)."""
    edges: Edges = {}
    for slot, tensor in inputs:
        if tensor.requires_grad:
            # A Python-implemented node is its own owner while the tensor lives, so no ownership token is needed.
            node = tensor.grad_fn if tensor.grad_fn is not None else get_gradient_edge(tensor).node
            edges.setdefault((node, tensor.output_nr), []).append(slot)
    return edges


def watch(
    context: Context, edges: Edges, outputs: Iterable[tuple[str, torch.Tensor]], record: Record | None, *, own: bool
) -> None:
    """Hook the nodes of a call, from its outputs to its input edges.

    Args:
        context: the call; with ``own`` its nodes are marked with it, so that what they execute in backward is attributed.
        edges: what `input_edges` returned before the call.
        outputs: ``(slot, tensor)`` of the call's results.
        record: receives the gradients; None marks nodes only.
        own: nodes already marked by an earlier call end the walk (api level); otherwise calls inside are walked through.
    """
    pending: list[Any] = []
    by_node: dict[Any, list[tuple[int, str]]] = {}
    for slot, tensor in outputs:
        node = tensor.grad_fn
        if node is None or (node, tensor.output_nr) in edges:
            continue
        by_node.setdefault(node, []).append((tensor.output_nr, slot.replace("output", "grad_output", 1)))
    for node, slots in by_node.items():
        if not own or tag(node, context):
            pending.append(node)
        if record is not None:
            node.register_prehook(_output_hook(context, slots, record))
    _walk(context, edges, pending, record, own=own)


def _walk(context: Context, edges: Edges, pending: list[Any], record: Record | None, *, own: bool) -> None:
    seen: set[Any] = set(pending)
    uses: dict[str, int] = {}
    while pending and len(seen) < MAX_NODES:
        node = pending.pop()
        boundary: list[tuple[int, str]] = []
        for k, edge in enumerate(node.next_functions):
            following = edge[0]
            if following is None:
                continue
            slots = edges.get(edge)
            if slots is not None:
                boundary.append((k, _gradient_slot(slots[0], uses)))
            elif following not in seen and not _outside(following, context, own=own):
                seen.add(following)
                pending.append(following)
        if boundary and record is not None:
            node.register_hook(_input_hook(context, boundary, record))


def _outside(node: Any, context: Context, *, own: bool) -> bool:
    """Tell whether a node was made before the call; marks it as the call's own otherwise."""
    if node.name() == "torch::autograd::AccumulateGrad":
        return True
    if own:
        return not tag(node, context)
    owner = tagged(node)
    return owner is not None and owner.call.seq < context.call.seq


def _gradient_slot(slot: str, uses: dict[str, int]) -> str:
    """``input.0`` -> ``grad_input.0``; the gradient through a second use of the tensor is ``grad_input.0.use1``."""
    name = slot.replace("input", "grad_input", 1) if slot.startswith("input") else f"grad_{slot}"
    uses[name] = uses.get(name, -1) + 1
    return name if uses[name] == 0 else f"{name}.use{uses[name]}"


def _output_hook(context: Context, slots: list[tuple[int, str]], record: Record) -> Callable[[Any], None]:
    def hook(grads: tuple[torch.Tensor | None, ...]) -> None:
        record(context, [(slot, grads[k]) for k, slot in slots])

    return hook


def _input_hook(context: Context, slots: list[tuple[int, str]], record: Record) -> Callable[[Any, Any], None]:
    def hook(grad_inputs: tuple[torch.Tensor | None, ...], _: tuple[torch.Tensor | None, ...]) -> None:
        record(context, [(slot, grad_inputs[k]) for k, slot in slots])

    return hook
