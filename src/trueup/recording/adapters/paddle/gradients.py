"""The backward of operators and Layers, seen without touching the graph.

What comes to a call is seen by a hook on each of its output tensors; it runs before the node does, which may compute in the
memory of what it got. What a call itself makes of it is seen by a post-hook on the GradNodes that hold its inputs' edges: a hook on
an input tensor would see the sum over all its users.

Post-hooks have to return what they were given, and Paddle 3.3 cannot take back a slot that holds several gradients
(``CastPyArg2SmallVectorOfVectorOfTensor`` in eager_utils.cc converts the whole tuple in the place of the item): it raises, or
crashes the process. So nodes of operators that take a list of tensors (``LISTS``, and whatever was called with one) get none, nor
do those of PyLayers, which never call theirs, and of custom operators. Of such a call the hook on an input tensor tells the
gradient, where no other call used that tensor; where one did, a note says that it is not known.

Paddle 3.3 also never frees a post-hook, nor the tensors that it calls it with: 4 MB a call for gradients of that size. So what a
hook gave back is emptied once Paddle has taken it, which is when the next hook runs or the pass ends.

Backward passes: which one runs, what is asked of it, and what is to be done when it is over. Everything that starts one
(``Tensor.backward``, ``paddle.autograd.backward``, ``paddle.grad``) looks up ``run_backward`` or ``run_partial_grad`` in
``core.eager`` when it is called (Paddle 2.6 to 3.3), and it ends when that returns.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import paddle
from paddle.base import core

from trueup.recording.adapters.paddle.context import Context, SessionCore, ThreadState
from trueup.recording.adapters.paddle.tensors import FACTS, NamedTensors, holds
from trueup.recording.engine.replacing import Around, Replacement

MAX_NODES = 20_000
MAX_EDGES = 12
"""Largest number of edges of a node at which gradients are matched by their shapes, where some did not come."""
LEAF = "GradNodeAccumulation"

LISTS = frozenset(FACTS["lists"].split())
SHARED = (
    "gradients of inputs that an operator on a list of tensors, a PyLayer or a recurrent kernel shares with another call are not "
    "recorded for it: Paddle tells only their sum"
)

UNMATCHED = "gradients that {op} makes are not recorded: Paddle does not tell which of them is for which input"


class Edges:
    """Where the inputs of a call hang in the graph, before it ran (a call in place changes that)."""

    __slots__ = ("shapes", "slots", "tensors")

    def __init__(self, inputs: NamedTensors) -> None:
        self.shapes: dict[str, list[int]] = {}  # shape of each input, which its gradient has, too, by the name of the gradient
        self.slots: dict[int, list[str]] = {}
        """Address of the node that made an input (of a leaf: that adds to its gradient) -> the slots of the inputs from there."""
        self.tensors: list[tuple[str, paddle.Tensor, int]] = []
        for slot, tensor in inputs:
            if not tensor.stop_gradient and (node := tensor.grad_fn) is not None:
                address = node.node_ptr()
                self.slots.setdefault(address, []).append(slot)
                self.shapes[f"grad_{slot}"] = list(tensor.shape)
                self.tensors.append((slot, tensor, address))

    def __bool__(self) -> bool:
        return bool(self.slots)


class Graph:
    """Hooks what calls leave in the graph. One for a session."""

    def __init__(self, session: SessionCore) -> None:
        self._session = session
        self._made: dict[int, int] = {}
        """Address of a node -> the call that left it; an address may be another node's by now, which then is newer."""
        self._users: dict[int, list[int]] = {}
        """Address of a node -> how many calls read what it made; hooks keep the number of their own graph."""
        self.posts = self.tensors = True  # whether post-hooks of nodes, and hooks of tensors, work here (`session.examine`)
        self._leaf_hooks: list[tuple[paddle.Tensor, int]] = []
        self._returned: tuple[Any, ...] = ()  # what the last post-hook gave back

    def reset(self) -> None:
        """Forget the graph: a backward pass has consumed it."""
        self._made.clear()
        self._users.clear()

    def release(self) -> None:
        """Remove our hooks from parameters, where they would stay, and empty the objects that Paddle keeps alive."""
        self._empty_returned()
        hooks, self._leaf_hooks = self._leaf_hooks, []
        for tensor, number in hooks:
            tensor._remove_grad_hook(number)

    def watch(self, context: Context, edges: Edges, outputs: NamedTensors, *, listed: bool, own: bool) -> None:
        """Hook the gradients that come to a call and that it makes: ``edges`` of its inputs are from before it ran, ``outputs``
        are ``(slot, tensor)``. With ``own`` it is an operator and its nodes are its own, else a Layer, inside which calls lie;
        ``listed``: it was given a list of tensors, or is a PyLayer, and its nodes get no post-hook."""
        if not self.tensors:
            return
        pending: list[Any] = []
        number = context.call.seq
        for slot, tensor in outputs:
            if tensor.stop_gradient or (node := tensor.grad_fn) is None or node.name() == LEAF:
                continue
            address = node.node_ptr()
            if address in edges.slots:  # it returned an input
                continue
            tensor._register_grad_hook(self._on_tensor(context, f"grad_{slot}"))
            if not any(known.node_ptr() == address for known in pending):
                pending.append(node)
        if not pending or not edges:
            return
        if own:
            for address in edges.slots:
                self._users.setdefault(address, [0])[0] += 1
        if own and listed:
            self._made.update((node.node_ptr(), number) for node in pending)
            self._hook_inputs(context, edges.tensors)
            return
        boundary, unsafe = self._boundary(number, edges, pending, own=own)
        self._hook_nodes(context, edges, boundary)
        if unsafe and not own and not self._session.records("api"):  # nobody counts who uses the input
            self._session.recorder.note(SHARED)
        elif unsafe:
            self._hook_inputs(context, [item for item in edges.tensors if item[2] in unsafe])

    def _boundary(self, number: int, edges: Edges, pending: list[Any], *, own: bool) -> tuple[list[tuple[Any, int, int]], set[int]]:
        """Walk from the outputs' nodes to the inputs' edges; return ``(node, position, address of the edge)`` where a post-hook
        sees the gradient, and the edges where none can."""
        seen = {node.node_ptr() for node in pending}
        boundary: list[tuple[Any, int, int]] = []
        unsafe: set[int] = set()
        while pending and len(seen) < MAX_NODES:
            node = pending.pop(0)
            if own:
                self._made[node.node_ptr()] = number
            safe = self.posts and is_safe(node.name())
            for position, following in enumerate(node.next_functions):
                if following is None:
                    continue
                address = following.node_ptr()
                if address in edges.slots:
                    if safe:
                        boundary.append((node, position, address))
                    else:
                        unsafe.add(address)
                elif address not in seen and self._made.get(address, number) >= number and following.name() != LEAF:
                    seen.add(address)
                    pending.append(following)
        return [item for item in boundary if item[2] not in unsafe], unsafe

    def _hook_nodes(self, context: Context, edges: Edges, boundary: list[tuple[Any, int, int]]) -> None:
        names = _names(edges, boundary)
        uses = Counter(name for _, _, name in names)
        sums = _Sums(self._session, context, uses) if any(count > 1 for count in uses.values()) else None
        by_node: dict[int, tuple[Any, list[tuple[int, str]]]] = {}
        for node, position, name in names:
            by_node.setdefault(node.node_ptr(), (node, []))[1].append((position, name))
        for node, slots in by_node.values():
            live = [following is not None for following in node.next_functions]
            node._register_post_hook(self._on_node(context, slots, live, edges.shapes, sums))

    def _hook_inputs(self, context: Context, tensors: list[tuple[str, paddle.Tensor, int]]) -> None:
        """See the gradients of a call on its input tensors, where they are its alone."""
        taken: set[int] = set()
        for slot, tensor, address in tensors:
            if id(tensor) in taken:
                continue
            taken.add(id(tensor))
            number = tensor._register_grad_hook(self._on_input(context, f"grad_{slot}", address))
            if tensor.is_leaf:
                self._leaf_hooks.append((tensor, number))

    def _empty_returned(self) -> None:
        """Let go of the memory of what a post-hook gave back: only the wrapper that was made for it is left, for good."""
        returned, self._returned = self._returned, ()
        for gradient in returned:
            if isinstance(gradient, paddle.Tensor):
                gradient._clear()

    # ------------------------------------------------------------------------------------------------------------- hooks
    def _on_tensor(self, context: Context, name: str) -> Callable[[Any], None]:
        session = self._session

        def received(gradient: Any) -> None:
            call = context.backward_call(session.recorder, session.passes.number(session.threads.state))
            if call.recorded and holds(gradient):
                session.slots.received(call, [(name, gradient)])

        return self.hook(context.call.op, received)

    def _on_input(self, context: Context, name: str, address: int) -> Callable[[Any], None]:
        session, users = self._session, self._users.setdefault(address, [1])

        def delivered(gradient: Any) -> None:
            if users[0] > 1:
                session.recorder.note(SHARED)
                return
            call = context.backward_call(session.recorder, session.passes.number(session.threads.state))
            if call.recorded and holds(gradient):
                session.slots.delivered(call, [(name, gradient)])

        return self.hook(context.call.op, delivered)

    def hook(self, what: str, record: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a hook on a tensor that records its gradient. What is raised in it is kept until the pass has ended: C++ would
        make an OSError of it, of Ctrl-C too."""
        session = self._session

        def hook(gradient: Any) -> None:
            try:
                state = session.threads.state
                if session.active and not state.busy:
                    with session.observing(state, what):
                        record(gradient)
            except BaseException as error:  # noqa: BLE001
                session.passes.defer(error)

        return hook

    def _on_node(
        self, context: Context, slots: list[tuple[int, str]], live: list[bool], shapes: dict[str, list[int]], sums: _Sums | None
    ) -> Callable[[Any, Any], Any]:
        session = self._session

        def hook(made: tuple[Any, ...], _: tuple[Any, ...]) -> tuple[Any, ...]:
            self._empty_returned()
            self._returned = made
            try:
                state = session.threads.state
                if session.active and not state.busy:
                    with session.observing(state, context.call.op):
                        along = _along_edges(made, live, {k: shapes[name] for k, name in slots})
                        picked = [(name, gradient) for k, name in slots if holds(gradient := along[k])] if along else []
                        if along is None or any(list(gradient.shape) != shapes[name] for name, gradient in picked):
                            session.recorder.note(UNMATCHED.format(op=context.call.op))
                            return made
                        number = session.passes.number(state)
                        call = context.backward_call(session.recorder, number)
                        if sums is not None:
                            picked = sums.add(picked, number)
                        if call.recorded:
                            session.slots.delivered(call, picked)
            except BaseException as error:  # noqa: BLE001 - through C++ it would become an OSError, Ctrl-C too
                session.passes.defer(error)
            return made

        return hook


_NODE = re.compile(r"(\w+?)(Double|Triple)?GradNode(Final)?")


def plain_name(node: str) -> str | None:
    """Return ``addn`` for ``AddNGradNodeFinal``; None for a node that is not made for an operator of Paddle's own."""
    found = _NODE.fullmatch(node)
    return None if found is None else found[1].replace("_", "").lower()


def is_safe(node: str) -> bool:
    """Tell whether a post-hook may be put on a node of this name; those of PyLayers, programs and custom operators get none."""
    name = plain_name(node)
    return name is not None and name not in LISTS


def _names(edges: Edges, boundary: list[tuple[Any, int, int]]) -> list[tuple[Any, int, str]]:
    """Name the gradients at the boundary by the slots of the inputs they are for; several inputs from one node (the parts of a
    split) are told apart by their order, that of the arguments, and gradients of one input used several times inside share a
    name, and are added up."""
    uses = Counter(address for _, _, address in boundary)
    given: Counter[int] = Counter()
    names = []
    for node, position, address in boundary:
        slots = edges.slots[address]
        slot = slots[given[address]] if uses[address] == len(slots) else slots[0]
        given[address] += 1
        names.append((node, position, f"grad_{slot}"))
    return names


def _along_edges(made: tuple[Any, ...], live: list[bool], shapes: dict[int, list[int]]) -> list[Any] | None:
    """Return the gradients that a node made (None or empty where it made nothing) in the order of its edges; None where they do
    not tell which is whose. A node may have no edge for an input that never takes a gradient (an index, a running mean): then
    they belong to the edges that are ``live``, which lead somewhere, or to the only ones whose ``shapes`` they have."""
    if len(made) == len(live):
        return list(made)
    present = [gradient for gradient in made if holds(gradient)]
    ends = [position for position, leads in enumerate(live) if leads]
    found = [ends] if len(ends) == len(present) else []
    if not found and len(present) < len(ends) <= MAX_EDGES:
        own = [list(gradient.shape) for gradient in present]
        found = [list(some) for some in combinations(ends, len(present)) if [shapes.get(position) for position in some] == own]
    if len(found) != 1:
        return None
    along: list[Any] = [None] * len(live)
    for position, gradient in zip(found[0], present, strict=True):
        along[position] = gradient
    return along


class _Sums:
    """Adds up the gradients of an input that a call uses several times, and gives the sum when the last is there."""

    def __init__(self, session: SessionCore, context: Context, uses: Counter[str]) -> None:
        self._session, self._context, self._uses = session, context, uses
        self._pass = -1
        self._counts: Counter[str] = Counter()
        self._totals: dict[str, paddle.Tensor] = {}

    def add(self, gradients: list[tuple[str, paddle.Tensor]], number: int) -> list[tuple[str, paddle.Tensor]]:
        """Take the gradients that one node delivers in a backward pass; return those that are complete."""
        if number != self._pass:
            self._pass = number
            self._counts.clear()
            self._totals.clear()
        ready = []
        for name, gradient in gradients:
            if self._uses[name] == 1:
                ready.append((name, gradient))
                continue
            self._counts[name] += 1
            with paddle.no_grad():
                total = self._totals.get(name)
                # A copy: Paddle adds up gradients in the memory of the first that comes.
                self._totals[name] = gradient.clone() if total is None else paddle.add(total, gradient)
            if self._counts[name] == self._uses[name]:
                ready.append((name, self._totals.pop(name)))
        if self._totals:
            self._session.passes.at_end(self.finish)
        return ready

    def finish(self) -> None:
        """Record the gradients that are left at the end of the pass: some uses may never get one."""
        left, self._totals = list(self._totals.items()), {}
        call = self._context.backward
        if left and call is not None and call.recorded and self._session.active:
            self._session.slots.delivered(call, left)


LOSS = "run_backward"
PASSES = (LOSS, "run_partial_grad")
"""Functions of ``core.eager`` from which a backward pass starts."""
INTERRUPTED = re.compile(r"\(External\) KeyboardInterrupt.*\bAt:\s*\S*trueup/recording/adapters/paddle/", re.DOTALL)
"""What C++ makes of Ctrl-C in one of our hooks."""


class Passes:
    """Numbers backward passes and tells the rest of a session when one begins and ends."""

    def __init__(self, session: SessionCore) -> None:
        self._session = session
        self._numbers = itertools.count()
        self._last = -1
        self._finish: dict[int, list[Callable[[], None]]] = {}  # what is to be done at the end of a pass, by its number
        self._deferred: BaseException | None = None

    def replacements(self) -> list[Replacement]:
        """Return what stands in the places from which a pass starts."""
        return [Around(core.eager, name, partial(self._run, name)) for name in PASSES]

    def number(self, state: ThreadState) -> int:
        """Return the number of the pass that runs on this thread; of one that was started past us, that of the last."""
        return state.passes[-1] if state.passes else self._last

    def defer(self, error: BaseException) -> None:
        """Raise an exception when the pass that runs has ended, and not inside it, where C++ would make an OSError of it."""
        self._deferred = self._deferred or error

    def at_end(self, finish: Callable[[], None]) -> None:
        """Call ``finish`` when the pass that runs has ended; one inside it, as of a recomputed block, may end before."""
        calls = self._finish.setdefault(self.number(self._session.threads.state), [])
        if finish not in calls:
            calls.append(finish)

    def _run(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        session = self._session
        state = session.threads.state
        if state.busy or session.over:
            return original(*args, **kwargs)
        outermost = not state.passes
        self._last = next(self._numbers)
        if session.active and outermost and name == LOSS and args:
            with session.observing(state, "the loss"):
                loss = args[0][0] if isinstance(args[0], (list, tuple)) and args[0] else args[0]
                if isinstance(loss, paddle.Tensor) and loss._is_initialized():
                    session.loss("paddle.Tensor.backward", loss)
        state.passes.append(self._last)
        session.buffers.passed()
        try:
            return original(*args, **kwargs)
        except OSError as error:
            if INTERRUPTED.match(str(error)):  # between two lines of a hook of ours, where nothing catches it
                raise KeyboardInterrupt from None
            raise
        finally:
            self._ended(state, outermost=outermost)

    def _ended(self, state: ThreadState, *, outermost: bool) -> None:
        session = self._session
        with session.observing(state, "the end of a backward pass"):
            for number in list(self._finish) if outermost else [state.passes[-1]]:
                for finish in self._finish.pop(number, []):
                    finish()
            session.buffers.passed()
            if outermost:
                session.graph.release()
                session.graph.reset()
        state.passes.pop()
        if outermost:
            session.optimizers.backward(state)
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            raise deferred
