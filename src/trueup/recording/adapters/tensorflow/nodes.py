"""A call that is seen: one that executes now, or one that stands in a graph and executes whenever the graph does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueup.recording.recorder import Call


class Node:
    """Where a call stands and, once it has executed, its number."""

    __slots__ = (
        "backward", "calls", "forward", "index", "inputs", "level", "op", "outputs", "parent", "passed", "phase", "scope", "site",
        "slots", "unseen", "uses", "value",
    )  # fmt: skip

    def __init__(
        self, level: str, phase: str, scope: str, op: str, *, parent: Node | None, forward: Node | None, site: int | None
    ) -> None:
        self.level, self.phase, self.scope, self.op = level, phase, scope, op
        self.parent, self.forward, self.site = parent, forward, site
        self.calls: list[Call] = []
        """Its executions in the present step: of what stands in the body of a loop there are several."""
        self.index: int | None = None
        """Its place in the order in which graphs were built; None for a call that executes now."""
        self.slots: list[tuple[str, int]] = []
        """Of a graph: slots and the numbers of their tensors."""
        self.unseen: list[str] = []
        """Of a graph: slots of which nothing is known."""
        self.value: str | None = None
        """Of a graph: the arguments that are no tensors."""
        self.inputs: dict[int, str] = {}
        """Tensors it was given, by their numbers; of a layer and of an operation."""
        self.outputs: dict[int, str] = {}
        self.uses: dict[int, int] = {}
        """Of a layer: how many operations inside read each of its inputs."""
        self.backward: Node | None = None
        self.passed = -1
        """Backward pass in which ``backward`` was begun; a second pass is another call."""

    @property
    def live(self) -> bool:
        """Whether it executes now."""
        return self.index is None

    def call(self, k: int = -1) -> Call | None:
        """Return its k-th execution in this step, where there is one; else the last."""
        if not self.calls:
            return None
        return self.calls[k] if -len(self.calls) <= k < len(self.calls) else self.calls[-1]


def number_of(tensor: Any) -> int:
    """Return the number of a tensor, eager or of a graph, which no other tensor of the process ever gets."""
    number: int = tensor._id
    return number
