"""What a communication operator says of itself: what it reads, what it writes, among which ranks, and who asked for it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import distributed

from trueup.recording.adapters.torch.tensors import named_tensors
from trueup.recording.recorder.surroundings import ranks_in_words

LIBRARIES = ("c10d", "_c10d_functional")
"""Operator libraries of PyTorch that communicate."""

WAIT = "_c10d_functional::wait_tensor"

INPUTS = frozenset({"input", "inputs", "input_tensor", "input_tensors", "input_list"})
OUTPUTS = frozenset({"output", "outputs", "output_tensor", "output_tensors", "output_lists"})
IN_PLACE = frozenset({"tensor", "tensors"})
"""Arguments that are sent, received or both, which only the operator's name tells."""

RECEIVES = frozenset({"recv_", "recv_any_source_", "irecv"})
SENDS = frozenset({"send", "isend"})
TO_ROOT = frozenset({"reduce_"})
FROM_ROOT = frozenset({"broadcast_"})
NOTHING = frozenset({"barrier", "monitored_barrier_"})

OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
           "recv_object_list")  # fmt: skip
"""Functions that send pickled objects: their bytes are no tensors of the training, and differ where the objects are equal."""

SCALARS = ("src", "dst", "tag", "output_split_sizes", "input_split_sizes", "op_list", "peer_list", "tag_list")
"""Arguments that are kept as they are."""

MODULES = tuple(f"{distributed.__path__[0]}/{name}.py" for name in ("distributed_c10d", "_functional_collectives"))
"""Files whose public functions are what users call."""

PASSED = tuple(
    f"{torch.__path__[0]}/{name}"
    for name in (
        "_ops.py", "_library/", "autograd/function.py", "distributed/c10d_logger.py", "overrides.py",
        "utils/_contextlib.py", "utils/_python_dispatch.py", "utils/_stats.py", "_compile.py", "_dynamo/eval_frame.py",
    )
)  # fmt: skip
"""Files that stand between an operator and the function that a user called."""


def communicates(op: Any) -> bool:
    """Tell whether an operator of `LIBRARIES` talks to other ranks: it is told a group."""
    return any(argument.name in ("process_group", "group_name") for argument in op._schema.arguments)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who issued a collective: ``torch.distributed``'s public function, or None; ``native``: autograd, from C++."""

    function: str | None
    native: bool

    @property
    def objects(self) -> bool:
        """Whether pickled objects are sent."""
        return self.function is not None and self.function.rpartition(".")[2] in OBJECTS


@dataclass(slots=True)
class Communication:
    """One execution of a communication operator."""

    inputs: list[tuple[str, torch.Tensor]]
    outputs: list[tuple[str, torch.Tensor]]
    scratch: list[tuple[str, torch.Tensor]]
    """Inputs that it may write to without a meaning: what a rank that is not the root of a reduction ends up with."""
    group: Any
    """The `ProcessGroup`; None where it cannot be told."""
    sync: bool
    arguments: dict[str, Any]


def read(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Communication:
    """Sort the arguments of a communication operator into what it reads, writes and is told."""
    schema = op._schema
    name = schema.name.partition("::")[2]
    given = {a.name: args[k] if k < len(args) else kwargs.get(a.name, a.default_value) for k, a in enumerate(schema.arguments)}
    group = _group(given)
    rank = group.rank() if group is not None else -1
    found = Communication([], [], [], group, given.get("async_op") is False, {})
    root = given.get("root_rank")
    for argument, value in given.items():
        if argument in INPUTS or (argument in IN_PLACE and _is_read(name, root, rank)):
            found.inputs += tensors("input", value)
        if argument in OUTPUTS or argument == "out" or (argument in IN_PLACE and _is_written(name, root, rank)):
            found.outputs += tensors("output", value)
    if name in TO_ROOT and root != rank:
        found.scratch = found.inputs
    found.arguments = describe(given, group)
    return found


def _is_read(name: str, root: int | None, rank: int) -> bool:
    if name in FROM_ROOT:
        return root == rank
    return name not in RECEIVES | NOTHING


def _is_written(name: str, root: int | None, rank: int) -> bool:
    if name in TO_ROOT | FROM_ROOT:
        return (root == rank) == (name in TO_ROOT)
    return name not in SENDS | NOTHING


def tensors(prefix: str, value: Any) -> list[tuple[str, torch.Tensor]]:
    """Name the tensors of an argument; a list of one list is that list."""
    while isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    return list(named_tensors(prefix, value))


def _group(given: dict[str, Any]) -> Any:
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, str):
        try:
            return torch._C._distributed_c10d._resolve_process_group(group)
        except RuntimeError:
            return None
    return distributed.ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group


def describe(given: dict[str, Any], group: Any) -> dict[str, Any]:
    """Say what a collective was told, ranks as global ones."""
    said: dict[str, Any] = {name: given[name] for name in SCALARS if given.get(name) is not None}
    if (reduction := given.get("reduce_op")) is not None:
        said["reduce_op"] = reduction.upper() if isinstance(reduction, str) else _reduction(reduction)
    if "async_op" in given:
        said["async_op"] = bool(given["async_op"])
    if group is None:
        return said
    ranks = _ranks(group)
    if ranks is not None:
        said["ranks"] = ranks_in_words(ranks)
        for name in ("src", "dst"):
            if name in said:
                said[name] = ranks[said[name]]
        if (root := given.get("root_rank")) is not None:
            said["root"] = ranks[root]
    said["group"], said["group_desc"] = group.group_name, group.group_desc
    return said


def _reduction(boxed: Any) -> str | None:
    try:
        value = boxed.op()
    except (RuntimeError, AttributeError):  # PyTorch before 2.9 boxed it without methods
        return None
    return next((name for name, member in distributed.ReduceOp.RedOpType.__members__.items() if int(member) == value), None)


def _ranks(group: Any) -> list[int] | None:
    """Return the global ranks of a group in its own order, None for one that `torch.distributed` does not know."""
    try:
        return list(distributed.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return None


def encode(arguments: dict[str, Any]) -> str:
    """Write the arguments of a collective as JSON."""
    return json.dumps(arguments, sort_keys=True)


def caller() -> Caller:
    """Find who issued the operator that is executing, from the stack."""
    frame: FrameType | None = sys._getframe(2)
    function = None
    while frame is not None:
        code = frame.f_code
        if code.co_filename in MODULES:
            if not code.co_name.startswith("_") and code.co_name != "batch_isend_irecv":  # what it calls says more
                function = code.co_name
        elif not code.co_filename.startswith(PASSED) and code.co_filename != __file__ and not _is_ours(code.co_filename):
            break
        frame = frame.f_back
    native = function is None and (frame is None or frame.f_code.co_name == "_engine_run_backward")
    return Caller(None if function is None else f"torch.distributed.{function}", native)


OURS = __file__.rpartition("/")[0]


def _is_ours(file: str) -> bool:
    return file.startswith(OURS)
