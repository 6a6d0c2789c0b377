"""Dumps as TensorFlow's debuggers write them, of a small training that NumPy computes; ``with_tensorflow`` has real ones."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from trueup.exchange.readers.contents import DTYPES, _classes
from trueup.exchange.readers.tfdbg2 import masked

Array = np.ndarray[Any, Any]
NUMBERS = {name: number for number, name in reversed(DTYPES.items())}
DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"
TIME = 1795338855000000


def message(kind: str, /, **fields: Any) -> Any:
    return _classes()[kind](**fields)


def tensor(array: Any) -> Any:
    array = np.asarray(array)
    shape = message("Shape", dim=[message("Dim", size=size) for size in array.shape])
    return message("TensorProto", dtype=NUMBERS[array.dtype.name], tensor_shape=shape, tensor_content=array.tobytes())


def training(steps: int = 2, fault: float = 0.0) -> list[dict[str, Array]]:
    """A linear layer, its loss and its update, each operation of each step by its name."""
    generator = np.random.default_rng(0)
    x, w = generator.standard_normal((4, 8)).astype(np.float32), generator.standard_normal((8, 3)).astype(np.float32)
    found = []
    for _ in range(steps):
        product = x @ w
        product[-1] *= 1 + np.float32(fault)
        out = np.maximum(product, 0)
        grad = (2 * out / out.size).astype(np.float32)
        update = x.T @ grad
        loss = np.float32((out**2).mean())
        found.append({"x": x, "read": w, "product": product, "out": out, "loss": loss, "grad": grad, "update": update})
        w = w - np.float32(0.1) * update
    return found


# ------------------------------------------------------------------------------------------------------------------ version 1
NODES = [
    ("net/w", "VarHandleOp", []), ("net/MatMul/ReadVariableOp", "ReadVariableOp", ["__copy_net/w_0"]), ("x", "Placeholder", []),
    ("net/MatMul", "_MklMatMul", ["x", "__copy_net/MatMul/ReadVariableOp_0", "^__dbg_net/w:0_0_DebugIdentity"]),
    ("net/Relu", "Relu", ["__copy_net/MatMul_0"]), ("Mean", "Mean", ["net/Relu:0"]),
    ("gradients/net/Relu_grad/ReluGrad", "ReluGrad", ["__copy_net/Relu_0"]),
    ("gradients/net/MatMul_grad/MatMul_1", "MatMul", ["x", "__copy_gradients/net/Relu_grad/ReluGrad_0"]),
    ("SGD/update_net/w/ResourceApplyGradientDescent", "ResourceApplyGradientDescent",
     ["__copy_net/w_0", "__copy_gradients/net/MatMul_grad/MatMul_1_0"]),
]  # fmt: skip
OUTPUTS = {
    "net/MatMul/ReadVariableOp": "read", "net/MatMul": "product", "net/Relu": "out", "Mean": "loss",
    "gradients/net/Relu_grad/ReluGrad": "grad", "gradients/net/MatMul_grad/MatMul_1": "update",
}  # fmt: skip


def tfdbg(root: Path, fault: float = 0.0, *, debug: str = "DebugIdentity", graph: bool = True) -> Path:
    """Write runs of a session as ``DumpingDebugWrapperSession`` does."""
    for k, step in enumerate(training(fault=fault)):
        time = TIME + k * 100000
        run = root / f"run_{time}_{1 - k}"  # the number says nothing
        device = run / "_tfdbg_device_,job_localhost,replica_0,task_0,device_CPU_0"
        device.mkdir(parents=True)
        told = json.dumps({"session_run_index": k + 2, "input_names": ["x:0"]}).encode()
        name = f"_tfdbg_core_metadata_sessionrun{k + 2:014}_{time}"
        write(run / name, message("Event", log_message=message("LogMessage", message=told)))
        if graph:
            nodes = [message("NodeDef", name=n.encode(), op=o.encode(), input=[i.encode() for i in given]) for n, o, given in NODES]
            nodes.append(message("NodeDef", name=b"__copy_net/Relu_0", op=b"Copy", input=[b"net/Relu"]))
            graph_def = message("GraphDef", node=nodes).SerializeToString()
            write(device / f"_tfdbg_graph_hash123_{time}", message("Event", graph_def=graph_def))
        for n, (node, name) in enumerate(OUTPUTS.items()):
            path = device / f"{node}_0_{debug}_{time + n}"
            path.parent.mkdir(parents=True, exist_ok=True)
            array = step[name] if debug == "DebugIdentity" else summary(step[name])
            value = message("Value", node_name=f"{node}:0:{debug}".encode(), tensor=tensor(array))
            write(path, message("Event", summary=message("Summary", value=[value])))
    return root


def summary(array: Array) -> Array:
    """What DebugNumericSummary gives."""
    array = np.asarray(array)
    numbers = [1, array.size, 0, 0, (array < 0).sum(), (array == 0).sum(), (array > 0).sum(), 0]
    numbers += [array.min(), array.max(), array.mean(), array.var(), NUMBERS[array.dtype.name], array.ndim, *array.shape]
    return np.array(numbers, np.float64)


def write(path: Path, event: Any) -> None:
    path.write_bytes(event.SerializeToString())


# ------------------------------------------------------------------------------------------------------------------ version 2
KERAS, TENSORFLOW = "/x/site-packages/keras/src", "/x/site-packages/tensorflow/python"
SOURCES = [
    "/home/a/train.py", f"{KERAS}/layers/layer.py", f"{KERAS}/optimizers/base_optimizer.py", f"{TENSORFLOW}/eager/backprop.py",
    f"{TENSORFLOW}/ops/variables.py",
]  # fmt: skip
FRAMES = {
    "user": (0, 10, "step", "loss = model(x)"), "layer": (1, 1002, "__call__", "return f()"), "optimizer": (2, 462, "apply", ""),
    "tape": (3, 1066, "gradient", ""), "making": (4, 51, "default_variable_creator_v2", ""), "begin": (2, 71, "__init__", ""),
}  # fmt: skip
FORWARD, BACKWARD, UPDATE = ("user", "layer"), ("user", "tape"), ("user", "optimizer")
OPERATIONS = [
    ("x", "Placeholder", [], FORWARD), ("net/MatMul/ReadVariableOp/resource", "Placeholder", [], FORWARD),
    ("net/MatMul/ReadVariableOp", "ReadVariableOp", ["net/MatMul/ReadVariableOp/resource:0"], FORWARD),
    ("net/MatMul", "MatMul", ["x:0", "net/MatMul/ReadVariableOp:0"], FORWARD), ("net/Relu", "Relu", ["net/MatMul:0"], FORWARD),
    ("Mean", "Mean", ["net/Relu:0"], ("user",)), ("gradient_tape/net/ReluGrad", "ReluGrad", ["net/Relu:0"], BACKWARD),
    ("gradient_tape/net/MatMul/MatMul_1", "MatMul", ["x:0", "gradient_tape/net/ReluGrad:0"], BACKWARD),
    ("sgd/AssignSubVariableOp", "AssignSubVariableOp",
     ["net/MatMul/ReadVariableOp/resource:0", "gradient_tape/net/MatMul/MatMul_1:0"], UPDATE),
]  # fmt: skip
TRACED = {
    "net/MatMul/ReadVariableOp": "read", "net/MatMul": "product", "net/Relu": "out", "Mean": "loss",
    "gradient_tape/net/ReluGrad": "grad", "gradient_tape/net/MatMul/MatMul_1": "update",
}  # fmt: skip
GRAPH = b"5c338f7b"


def tfdbg2(root: Path, fault: float = 0.0, *, mode: int = 7, data: bool = True) -> Path:
    """Write a directory as ``enable_dump_debug_info`` does: a function that trains, after its variable was made."""
    root.mkdir(parents=True)
    prefix = root / "tfdbg_events.1795338865.host"
    ids = {name: name.encode() for name in FRAMES}
    lines = {n: message("FileLine", file_index=i, line=at, func=f.encode(), code=c.encode()) for n, (i, at, f, c) in FRAMES.items()}
    version = message("DebugMetadata", tensorflow_version=b"2.21.0", file_version=b"debug.Event:1")
    write_events(f"{prefix}.metadata", [{"debug_metadata": version}])
    write_events(f"{prefix}.source_files", [{"source_file": message("SourceFile", file_path=path.encode())} for path in SOURCES])
    frames = [{"stack_frame_with_id": message("StackFrame", id=ids[name], place=line)} for name, line in lines.items()]
    write_events(f"{prefix}.stack_frames", frames)
    write_events(f"{prefix}.graphs", [{"graph_op_creation": _created(*operation)} for operation in OPERATIONS])
    executions = [_executed("VarHandleOp", [], [7], [], ("user", "making"), mode, 0.5), _made_first(mode)]
    traces = []
    for k, step in enumerate(training(fault=fault)):
        start = 10.0 * (k + 1)
        if data:
            executions.append(_executed("IteratorGetNext", [6], [100 + k], [step["x"]], ("user",), mode, start))
        for n, (name, of) in enumerate(TRACED.items()):
            given = message(
                "GraphExecutionTrace", tfdbg_context_id=GRAPH, op_name=name.encode(), tensor_debug_mode=mode,
                tensor_proto=kept(step[of], mode), device_name=DEVICE.encode(),
            )  # fmt: skip
            traces.append({"wall_time": start + 1 + n / 100, "graph_execution_trace": given})
        inputs = [100 + k if data else 99, 7]
        executions.append(_executed("__inference_step_1", inputs, [200 + k], [step["loss"]], ("user",), mode, start + 2, GRAPH))
    write_events(f"{prefix}.execution", executions)
    write_events(f"{prefix}.graph_execution_traces", traces)
    return root


def _created(name: str, kind: str, inputs: list[str], stack: tuple[str, ...]) -> Any:
    given = [one.encode() for one in inputs]
    where = _location(stack)
    return message(
        "GraphOpCreation", op_type=kind.encode(), op_name=name.encode(), graph_id=GRAPH, input_names=given, code_location=where
    )


def _location(stack: tuple[str, ...]) -> Any:
    return message("CodeLocation", stack_frame_ids=[one.encode() for one in stack])


def _made_first(mode: int) -> dict[str, Any]:
    """The first value of the variable, and what an optimizer makes as it begins, are no part of a step."""
    return _executed("Fill", [1, 2], [8], [np.zeros(3, np.float32)], ("user", "begin"), mode, 0.6)


def _executed(
    kind: str, inputs: list[int], outputs: list[int], arrays: list[Array], stack: tuple[str, ...], mode: int, time: float,
    graph: bytes = b"",
) -> dict[str, Any]:
    return {
        "wall_time": time,
        "execution": message(
            "Execution", op_type=kind.encode(), graph_id=graph, input_tensor_ids=inputs, output_tensor_ids=outputs,
            tensor_debug_mode=mode, tensor_protos=[kept(array, mode) for array in arrays], code_location=_location(stack),
        ),
    }  # fmt: skip


def kept(array: Any, mode: int) -> Any:
    """What a mode keeps of a tensor."""
    array = np.asarray(array)
    if mode == 7:
        return tensor(array)
    counts = [np.isneginf(array).sum(), np.isposinf(array).sum(), np.isnan(array).sum()]
    number, rank, size = NUMBERS[array.dtype.name], array.ndim, array.size
    sizes = [*array.shape, *[0] * 6][:6] if rank <= 6 else array.shape[-6:]
    numbers = {
        2: [1, sum(counts) > 0], 3: [1, size, *counts], 5: [1, number, rank, size, *sizes],
        4: [1, 0, number, rank, size, *counts, (array < 0).sum(), (array == 0).sum(), (array > 0).sum()],
        8: [-math.inf if counts[0] else 0, math.inf if counts[1] else 0, math.nan if counts[2] else 0],
    }  # fmt: skip
    return message("TensorProto") if mode == 1 else tensor(np.array(numbers[mode], np.float64))


def write_events(path: str, events: list[dict[str, Any]]) -> None:
    Path(path).write_bytes(b"".join(framed(message("DebugEvent", **event).SerializeToString()) for event in events))


def framed(data: bytes) -> bytes:
    """A record of a TFRecord file."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(length)) + data + struct.pack("<I", masked(data))
