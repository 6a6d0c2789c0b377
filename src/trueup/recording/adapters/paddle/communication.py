"""What a call of Paddle's ``ProcessGroup`` says of itself: what it reads, what it writes, among which ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trueup.recording.adapters.paddle.tensors import NamedTensors, named_tensors
from trueup.recording.recorder.surroundings import ranks_in_words

STREAM = "_on_calc_stream"
"""End of the name of a method that is done when what follows on its stream begins: it returns a task that nobody waits for."""

METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "all_reduce": ("all_reduce", ("tensor", "op")),
    "allreduce": ("all_reduce", ("tensor", "op")),
    "broadcast": ("broadcast", ("tensor", "src")),
    "send": ("send", ("tensor", "dst")),
    "send_partial": ("send", ("tensor", "dst", "num", "id")),
    "recv": ("recv", ("tensor", "src")),
    "recv_partial": ("recv", ("tensor", "src", "num", "id")),
    "reduce": ("reduce", ("tensor", "dst", "op")),
    "all_gather": ("all_gather", ("out", "in")),
    "all_gather_into_tensor": ("all_gather", ("out", "in")),
    "all_gather_partial": ("all_gather", ("out", "in", "num", "id")),
    "reduce_scatter": ("reduce_scatter", ("out", "in", "op")),
    "reduce_scatter_tensor": ("reduce_scatter", ("out", "in", "op")),
    "scatter": ("scatter", ("out", "in", "src")),
    "scatter_tensor": ("scatter", ("out", "in", "src")),
    "gather": ("gather", ("in", "out", "dst")),
    "all_to_all": ("alltoall", ("out", "in")),
    "all_to_all_tensor": ("alltoall", ("out", "in")),
    "all_to_all_single": ("alltoall_single", ("out", "in", "out_sizes", "in_sizes")),
    "alltoall": ("alltoall", ("in", "out")),
    "alltoall_single": ("alltoall_single", ("in", "out", "in_sizes", "out_sizes")),
    "barrier": ("barrier", ()),
}
"""Methods of ``core.ProcessGroup`` (Paddle 3.3): the function of `paddle.distributed` that they are, and their first arguments."""

OLD_ORDER = {("all_gather", 2): ("in", "out"), ("scatter", 3): ("in", "out", "src")}
"""Arguments of the older form of a method, by its name and how many it is given."""

KEPT = ("num", "id", "out_sizes", "in_sizes")
"""Arguments that are kept as they are."""


@dataclass(slots=True)
class Communication:
    """One call of a method that communicates."""

    function: str
    """``paddle.distributed.all_reduce``."""
    inputs: NamedTensors = field(default_factory=list)
    outputs: NamedTensors = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)


def read(method: str, group: Any, args: tuple[Any, ...]) -> Communication:
    """Sort the arguments of a method into what it reads, writes and is told.

    Args:
        method: its name, without `STREAM`.
        group: the ``ProcessGroup``.
        args: its arguments.
    """
    function, names = METHODS[method]
    given = dict(zip(OLD_ORDER.get((method, len(args)), names), args, strict=False))
    ranks, number = _group(group)
    found = Communication(f"paddle.distributed.{function}", arguments={name: given[name] for name in KEPT if name in given})
    root = given.get("src", given.get("dst"))
    is_root = root == group.rank()
    if function in ("send", "recv"):
        found.arguments["dst" if function == "send" else "src"] = ranks[root] if root is not None else None
    elif root is not None:
        found.arguments["root"] = ranks[root]
    if (reduction := given.get("op")) is not None:
        found.arguments["reduce_op"] = str(reduction).rpartition(".")[2]
    found.arguments |= {"ranks": ranks_in_words(ranks), "group": str(number)}
    reads, writes = _directions(function, is_root=is_root)
    if reads:
        found.inputs = named_tensors("input", _listed(given.get("tensor", given.get("in"))))
    if writes:
        found.outputs = named_tensors("output", _listed(given.get("tensor", given.get("out"))))
    return found


def _directions(function: str, *, is_root: bool) -> tuple[bool, bool]:
    """Tell whether a rank gives something, and whether it gets something."""
    return {
        "send": (True, False), "recv": (False, True), "broadcast": (is_root, not is_root), "reduce": (True, is_root),
        "scatter": (is_root, True), "gather": (True, is_root), "barrier": (False, False),
    }.get(function, (True, True))  # fmt: skip


def _listed(value: Any) -> Any:
    """Return one tensor as it is; a list of one is that tensor."""
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def _group(group: Any) -> tuple[list[int], int]:
    """Return the global ranks of a group in its own order, and its number."""
    from paddle.distributed import collective

    for number, known in collective._get_group_map().items():
        if known._pg is group or (known._pg is not None and known._pg.name() == group.name() and len(known.ranks) == group.size()):
            return list(known.ranks), int(number)
    return list(range(group.size())), -1
