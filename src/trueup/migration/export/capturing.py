"""Values of two runs of one exported graph as two captures: ``framework`` and ``onnxruntime``.

A call is a node of the graph that torch.onnx exported, with what it read of other nodes, what it made and its line; the same in
both, so `trueup compare` names the first that differs. onnxruntime's has ONNX's nodes beside (level ``aten``), with their weights.

A file in bfloat16 for onnxruntime, which has few kernels of it on the CPU: each node computes in float32, and what it makes is
rounded to bfloat16, as PyTorch's kernels on the CPU do.

    x (bfloat16) -> Relu -> y            x (float32) -> Relu -> y/raw -> Cast to bfloat16 -> y/narrow -> Cast to float32 -> y

So all that nodes read is float32 that bfloat16 holds, too. Graphs within nodes (If, Loop) stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from trueup.foundation.kernels import digest, hexadecimal, summarize
from trueup.foundation.model import PACKED, TrueupError
from trueup.foundation.store import Writer, claim, layout, statistics
from trueup.foundation.version import VERSION

Values = dict[str, np.ndarray[Any, Any]]
COLUMNS = (
    "seq", "parent", "phase", "level", "scope", "op", "ordinal", "slot", "forward_seq", "site", "producer_seq", "producer_slot",
    "dtype", "shape", "numel", "digest", "payload_segment", "payload_key", "value",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A node: where it stands (scope), operator, line of the model, names of the values that it reads and makes."""

    level: str
    scope: str
    op: str
    source: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def write(folder: Path, device: str, calls: Sequence[Call], values: Values) -> None:
    """Write the calls of one run with their tensors. Raises TrueupError if a capture is there, or the folder cannot be written."""
    if (folder / layout.MANIFEST).exists():
        raise TrueupError(
            f"A capture is there already.\n  where:    {folder}\n  expected: a new folder\n  got:      one with a capture\n"
            "  next:     name another, or remove it"
        )
    levels = list(dict.fromkeys(call.level for call in calls))
    root = {"run": "export", "trueup_version": VERSION, "levels": levels, "detail": "tensor", "config": {}}
    manifest = {"framework": "torch", "devices": [device], "versions": {}, "seeds": {}, "world_size": 1, "environment": {}}
    try:
        claim(folder, 0, "export")
        writer = Writer(folder, 0, root, manifest)
        writer.add_sites([(seq, [call.source], None) for seq, call in enumerate(calls) if call.source])
        writer.write_records(0, _columns(list(_rows(calls)), values, writer))
        writer.close()
    except OSError as error:
        raise TrueupError(
            f"A capture cannot be written.\n  where:    {folder}\n  expected: a folder with room\n"
            f"  got:      {error.strerror or error}\n  next:     make room, or name another folder"
        ) from None


def _rows(calls: Sequence[Call]) -> Iterable[tuple[dict[str, Any], str]]:
    made: dict[tuple[str, str], tuple[int, str]] = {}
    counts: Counter[tuple[str, str, str]] = Counter()
    for seq, call in enumerate(calls):
        key = call.level, call.scope, call.op
        row = {"seq": seq, "phase": "forward", "level": key[0], "scope": key[1], "op": key[2], "ordinal": counts[key]}
        row["site"] = seq if call.source else None
        counts[key] += 1
        for at, name in enumerate(call.inputs):
            producer = made.get((call.level, name), (None, None))
            yield row | {"slot": f"input.{at}", "producer_seq": producer[0], "producer_slot": producer[1]}, name
        for at, name in enumerate(call.outputs):
            made[call.level, name] = seq, f"output.{at}"
            yield row | {"slot": f"output.{at}"}, name


def _columns(rows: Sequence[tuple[dict[str, Any], str]], values: Values, writer: Writer) -> dict[str, Any]:
    packed = np.empty((len(rows), PACKED))
    measured: list[int] = []
    for at, (row, name) in enumerate(rows):
        array = values.get(name)
        if array is None or (array.dtype.kind not in "biufc" and array.dtype != NARROW):
            continue
        array = np.ascontiguousarray(array)
        key = hexadecimal(digest(array))
        segment, place = writer.add_payload(key, array.dtype.name, array.shape, array.tobytes())
        row |= {"dtype": array.dtype.name, "shape": list(array.shape), "numel": array.size, "digest": key}
        row |= {"payload_segment": segment, "payload_key": place}
        summarize(array, packed[len(measured)])
        measured.append(at)
    columns: dict[str, Any] = {name: [row.get(name) for row, _ in rows] for name in COLUMNS}
    return columns | statistics(packed[: len(measured)], np.array(measured, np.int64), len(rows))


NARROW = np.dtype(ml_dtypes.bfloat16)
ROUNDED = "onnxruntime, which has few kernels of bfloat16, computes each node in float32 and rounds what it makes"


def widened(onnx: Any, proto: Any) -> tuple[Any, frozenset[str]]:
    """Return a model that onnxruntime can run in place of one in bfloat16, and the names of its values in bfloat16; where none
    is, the model itself."""
    narrow, wide = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
    typed = onnx.shape_inference.infer_shapes(proto).graph
    infos = (*typed.input, *typed.value_info, *typed.output)
    names = {one.name for one in infos if one.type.tensor_type.elem_type == narrow}
    names |= {one.name for one in proto.graph.initializer if one.data_type == narrow}
    if not names:
        return proto, frozenset()
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    graph = model.graph
    del graph.value_info[:]
    for info in (*graph.input, *graph.output):
        if info.type.tensor_type.elem_type == narrow:
            info.type.tensor_type.elem_type = wide
    for one in graph.initializer:
        if one.data_type == narrow:
            one.CopyFrom(_wide(onnx, one))
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype") and attribute.i == narrow:
                attribute.i = wide
            if attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type == narrow:
                attribute.t.CopyFrom(_wide(onnx, attribute.t))
        made = [name for name in node.output if name in names]
        node.output[:] = [f"{name}/raw" if name in names else name for name in node.output]
        graph.node.append(node)
        for name in made:
            graph.node.append(onnx.helper.make_node("Cast", [f"{name}/raw"], [f"{name}/narrow"], to=narrow))
            graph.node.append(onnx.helper.make_node("Cast", [f"{name}/narrow"], [name], to=wide))
    return model, frozenset(names)


def _wide(onnx: Any, tensor: Any) -> Any:
    return onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float32), tensor.name)
