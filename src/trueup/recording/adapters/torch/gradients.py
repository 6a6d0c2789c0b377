"""The backward of api and module calls, seen from autograd nodes without touching the graph.

Before a call the gradient edges of its inputs are noted; after it, its nodes are walked from the outputs to those edges. A
pre-hook on an output's node sees ``grad_output``; a hook on a node that holds an input's edge sees that call's *own*
``grad_input``, not the sum over all users of the tensor. Where several nodes of a call hold the edge (a weight that an unfused
LSTM uses at each time step), their gradients are added up, for the operators inside are the device's own business. Full
backward hooks would insert functions into the graph, break in-place operators and miss keyword arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from trueup.recording.adapters.torch.context import Context, tag
from trueup.recording.adapters.torch.tensors import NamedTensors, quick_module

Gradients = list[tuple[str, torch.Tensor | None]]

MAX_NODES = 20_000

next_node: Callable[[], int] = torch.autograd._get_sequence_nr
"""Sequence number that the next autograd node of this thread gets: what a call makes is at or above it."""

ACCUMULATE = 2**64 - 1
"""Sequence number of the nodes that add to a leaf's ``.grad``: they run as soon as they can."""


class Into(Protocol):
    """Who records gradients: `slots.Slots`."""

    @property
    def active(self) -> bool:
        """Whether anything is recorded at present."""

    def observing(self, context: Context) -> AbstractContextManager[Any]:
        """Return a block of bookkeeping for the backward of a call, on whichever thread autograd executes it."""

    def gradients(self, context: Context, gradients: Gradients, task: int) -> None:
        """Record gradients that autograd delivers to or from a call."""

    def hook(self, context: Context, slots: list[tuple[int, str]], *, received: bool) -> Callable[..., None]:
        """Return the hook for autograd to call at a node."""


class Edges:
    """The gradient edges of a call's inputs, before it ran (an in-place call rebases them)."""

    __slots__ = ("first", "leaves", "slots")

    def __init__(self, inputs: NamedTensors) -> None:
        self.first = next_node()  # sequence number of the first node that the call can make
        self.slots: dict[tuple[Any, int], str] = {}
        """Edge (node, output number) -> the slot it enters by; one tensor passed twice shares its edge, under the first."""
        self.leaves: dict[int, str] = {}
        """Address of a leaf -> its slot: asking for the node that adds to its ``.grad`` would cost an operator."""
        _note_edges(inputs, self.slots, self.leaves)


def _note_edges_plainly(inputs: NamedTensors, slots: dict[tuple[Any, int], str], leaves: dict[int, str]) -> None:
    for slot, tensor in inputs:
        if tensor.requires_grad:
            try:
                # A Python-implemented node is its own owner while the tensor lives, so no ownership token is needed.
                node = tensor.grad_fn
            except RuntimeError:  # a view made without gradients whose base was written since: using it is an error too
                continue
            if node is None:
                leaves.setdefault(id(tensor), slot)
            else:
                slots.setdefault((node, tensor.output_nr), slot)


def watch(context: Context, edges: Edges, outputs: NamedTensors, into: Into | None, *, own: bool) -> None:
    """Hook the nodes of a call, from its ``outputs`` ``(slot, tensor)`` to the ``edges`` of its inputs from before it; ``into``
    receives the gradients, None marks nodes only. With ``own`` (api level) nodes are marked with the call, so that what they
    execute in backward is attributed, and nodes of an earlier call end the walk; otherwise calls inside are walked through."""
    by_node: dict[Any, list[tuple[int, str]]] = {}
    for slot, tensor in outputs:
        node = tensor.grad_fn
        if node is not None and (node, tensor.output_nr) not in edges.slots:
            by_node.setdefault(node, []).append((tensor.output_nr, "grad_" + slot))
    pending = []
    for node, slots in by_node.items():
        if not own or tag(node, context):
            pending.append(node)
        if into is not None:
            node.register_prehook(into.hook(context, slots, received=True))
    if pending:
        _walk(context, edges, pending, into, own=own)


def _walk(context: Context, edges: Edges, pending: list[Any], into: Into | None, *, own: bool) -> None:
    boundary = _boundary(context, edges.first, edges.slots, edges.leaves, pending, own, MAX_NODES)
    if into is None or not boundary:
        return
    names = [name for slots in boundary.values() for _, name in slots]
    if len(set(names)) < len(names):
        hook_sums(context, boundary, into)
        return
    for node, slots in boundary.items():
        node.register_hook(into.hook(context, slots, received=False))


def hook_sums(context: Context, boundary: dict[Any, list[tuple[int, str]]], into: Into) -> None:
    """Hook nodes some of which hold the same edge: their gradients are added up."""
    sums = _Sums(context, into, Counter(name for slots in boundary.values() for _, name in slots))
    for node, slots in boundary.items():
        node.register_hook(_summing_hook(slots, sums))


def _boundary_plainly(
    context: Context, first: int, known: dict[tuple[Any, int], str], leaves: dict[int, str], pending: list[Any], own: bool,
    most: int,
) -> dict[Any, list[tuple[int, str]]]:  # fmt: skip
    """Return the nodes of a call that hold an edge of its inputs, each with (position, name of the gradient): from ``pending``,
    which is emptied, over ``most`` nodes, down to the sequence number ``first``, the earliest it can have made; ``known`` are its
    edges with their slots, ``leaves`` the addresses of inputs that are leaves. With ``own``, end at nodes of another call, and
    mark the others as this one's."""
    seen: set[Any] = set(pending)
    boundary: dict[Any, list[tuple[int, str]]] = {}
    while pending and len(seen) < most:
        node = pending.pop()
        for k, edge in enumerate(node.next_functions):
            slot = known.get(edge)
            if slot is None:
                following = edge[0]
                if following is None or following in seen:
                    continue
                number = following._sequence_nr()
                if number == ACCUMULATE:
                    slot = leaves.get(id(following.variable)) if leaves else None
                elif number >= first and (not own or tag(following, context)):  # else it was made before, or by another call
                    seen.add(following)
                    pending.append(following)
            if slot is not None:
                boundary.setdefault(node, []).append((k, "grad_" + slot))
    return boundary


_compiled = quick_module()
_note_edges = _note_edges_plainly if _compiled is None else _compiled.note_edges
_boundary = _boundary_plainly if _compiled is None else _compiled.boundary


class _Sums:
    """Adds up the gradients of an edge that several nodes of a call hold, and passes the sum on when the last is there."""

    def __init__(self, context: Context, into: Into, uses: Counter[str]) -> None:
        self.context, self.into, self._uses = context, into, uses
        self._task = -1
        self._counts: Counter[str] = Counter()
        self._totals: dict[str, torch.Tensor] = {}

    def add(self, slots: Gradients) -> None:
        """Take the gradients that one node delivers."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._counts.clear()
            self._totals.clear()
        for slot, gradient in slots:
            self._accumulate(slot, gradient)
        ready = dict.fromkeys(slot for slot, _ in slots if self._counts[slot] == self._uses[slot])
        self._pass_on([slot for slot in ready if slot in self._totals])

    def _accumulate(self, slot: str, gradient: torch.Tensor | None) -> None:
        if not self._counts:
            # Some uses may never get a gradient: what there is by the end of the pass counts.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._counts[slot] += 1
        if gradient is not None:
            total = self._totals.get(slot)
            self._totals[slot] = gradient if total is None else total + gradient

    def _finish(self) -> None:
        if self.into.active:
            with self.into.observing(self.context):
                self._pass_on(list(self._totals))
        self._totals.clear()

    def _pass_on(self, slots: list[str]) -> None:
        if slots:
            self.into.gradients(self.context, [(slot, self._totals.pop(slot)) for slot in slots], self._task)


class GradientHook:
    """What autograd calls at a node with the gradients that go in or out: an object is lighter than a closure."""

    __slots__ = ("_context", "_into", "_slots")

    def __init__(self, context: Context, slots: list[tuple[int, str]], into: Into) -> None:
        self._context, self._slots, self._into = context, slots, into

    def __call__(self, gradients: tuple[torch.Tensor | None, ...], _: Any = None) -> None:
        """Record what is delivered."""
        into = self._into
        if into.active:
            with into.observing(self._context):
                picked = [(slot, gradients[k]) for k, slot in self._slots]
                into.gradients(self._context, picked, torch._C._current_graph_task_id())


def _summing_hook(slots: list[tuple[int, str]], sums: _Sums) -> Callable[[Any, Any], None]:
    def hook(grad_inputs: tuple[torch.Tensor | None, ...], _: tuple[torch.Tensor | None, ...]) -> None:
        if sums.into.active:
            with sums.into.observing(sums.context), torch.no_grad():
                sums.add([(slot, grad_inputs[k]) for k, slot in slots])

    return hook
