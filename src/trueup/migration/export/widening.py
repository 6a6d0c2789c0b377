"""A file in bfloat16 for onnxruntime, which has few kernels of it on the CPU: each node computes in float32, and what it makes is
rounded to bfloat16, as PyTorch's kernels on the CPU do.

    x (bfloat16) -> Relu -> y            x (float32) -> Relu -> y/raw -> Cast to bfloat16 -> y/narrow -> Cast to float32 -> y

So all that nodes read is float32 that bfloat16 holds, too. Graphs within nodes (If, Loop) stay as they are.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

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
