"""Small dumps in the layouts of tools that cannot be run any more, by the rules of their sources.

All tell the same run: a linear layer, a ReLU and a sum, forward and backward, in NumPy.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass
class Call:
    kind: str
    api: str
    index: int
    phase: str
    inputs: list[Any]
    outputs: list[Any]


def run(fault: float = 0.0, seed: int = 0) -> list[Call]:
    """Return the calls of the run; ``fault`` is added to an element of what the ReLU computes."""
    random = np.random.default_rng(seed)
    x, w, b = (random.standard_normal(shape).astype(np.float32) for shape in ((4, 3), (5, 3), (5,)))
    hidden = x @ w.T + b
    active = np.maximum(hidden, 0)
    active[0, 0] += np.float32(fault)
    loss = active.sum(dtype=np.float32)
    grad = np.ones_like(active)
    grad_hidden = grad * (hidden > 0)
    return [
        Call("Functional", "linear", 0, "forward", [x, w, b], [hidden]),
        Call("Functional", "relu", 0, "forward", [hidden, False], [active]),
        Call("Torch", "sum", 0, "forward", [active], [np.asarray(loss)]),
        Call("Functional", "relu", 0, "backward", [grad], [grad_hidden]),
        Call("Functional", "linear", 0, "backward", [grad_hidden], [grad_hidden.sum(0), grad_hidden @ w, x.T @ grad_hidden]),
    ]


def ptdbg(
    root: Path, version: str = "2.3", kind: str = "all", *, prefix: str = "", rank: int = 0, step: int = 0, fault: float = 0.0
) -> Path:
    """Write a ptdbg dump: ``version`` 2.3, 2.0 (att) or 6.0; ``kind`` all, statistics, md5, stack or overflow.

    ``prefix`` is that of the mode (``api_stack_``, ``list_``, ``range_``); with ``api_stack_`` there are stacks.
    """
    folder = root / f"ptdbg_dump_v{version}"
    folder = folder / f"step{step}" / f"rank{rank}" if version == "6.0" else folder / f"rank{rank}"
    tensors = folder / f"{prefix}dump"
    (tensors if kind == "all" else folder).mkdir(parents=True)
    lines = []
    for call in run(fault):
        for side, values in (("input", call.inputs), ("output", call.outputs)):
            for k, value in enumerate(values):
                name = ptdbg_name(version, call, f"{side}.{k}")
                row = _ptdbg_row(name, value, version, kind)
                if row is None or kind == "stack":
                    continue
                lines.append(row)
                if kind == "all" and isinstance(value, np.ndarray):
                    np.save(tensors / f"{name}.npy", value)
        if prefix == "api_stack_" or kind == "stack":
            frames = [
                ["/env/site-packages/torch/nn/functional.py", "1900", "linear", "return torch._C._nn.linear(input, weight)"],
                ["/home/user/model.py", "12", "forward", "return self.act(self.fc(x))"],
                ["/home/user/train.py", "40", "<module>", None],
            ]
            lines.append([ptdbg_name(version, call, "stack_info"), frames])
    (folder / f"{prefix}dump.pkl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def ptdbg_name(version: str, call: Call, slot: str) -> str:
    if version == "6.0":
        return f"{call.kind}.{call.api}.{call.index}.{call.phase}.{slot}"
    return f"{call.kind}_{call.api}_{call.index}_{call.phase}_{slot}"


def _ptdbg_row(name: str, value: Any, version: str, kind: str) -> list[Any] | None:
    if not isinstance(value, np.ndarray):  # filter_switch OFF
        return [name, 1, [], str(type(value)), "[]", [value] * (4 if version == "6.0" else 3)]
    numbers = [float(value.max()), float(value.min()), float(value.mean())]
    numbers += [float(np.linalg.norm(value))] if version == "6.0" else []
    checksum: Any = f"{zlib.crc32(value.tobytes()):08x}" if kind == "md5" else []
    if kind == "overflow":
        return [name, 101, [], f"torch.{value.dtype}", list(value.shape)]
    flag = 0 if version == "6.0" else 1
    return [name, flag, checksum, f"torch.{value.dtype}", list(value.shape), [] if kind == "md5" else numbers]


def ptdbg_bfloat16(root: Path) -> Array:
    """Write a dump of one bfloat16 tensor, which is saved as float32, and return it."""
    value = np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16)
    folder = root / "rank0" / "dump"
    folder.mkdir(parents=True)
    np.save(folder / "Torch_exp_0_forward_input.0.npy", value.astype(np.float32))
    row = ["Torch_exp_0_forward_input.0", 1, [], "torch.bfloat16", [6], [5.0, 0.0, 2.5]]
    (root / "rank0" / "dump.pkl").write_text(json.dumps(row) + "\n")
    return value


def hdf5(path: Path, device: int = 10) -> Path:
    """Write a file of torch.utils.dumper: operators by IR name and seqid, half stored as float32."""
    import h5py

    vendor = "Npu" if device == 10 else "Cudnn"
    numbers = {"float32": 1, "int64": 7, "bool": 9, "float16": 10}

    def save(group: Any, name: str, value: Array, kind: int = 0) -> None:
        stored = value.astype(np.float32) if value.dtype == np.float16 else value
        dataset = group.create_dataset(name, data=stored)
        dataset.attrs["DeviceType"], dataset.attrs["DataType"] = device, numbers.get(value.dtype.name, 1)
        dataset.attrs["FormatType"], dataset.attrs["Type"] = 2, kind
        dataset.attrs["Stride"] = [step // value.itemsize for step in value.strides]

    linear, relu, *_ = run()
    with h5py.File(path, "w") as file:
        for seqid, (op, inputs, outputs) in enumerate((
            ("addmm", {"self": linear.inputs[2], "mat1": linear.inputs[0], "mat2": linear.inputs[1].T.copy()}, linear.outputs),
            ("relu", {"self": relu.inputs[0]}, relu.outputs),
            (f"{vendor}ConvolutionBackward", {"grad": relu.outputs[0].astype(np.float16)}, relu.outputs),
        ), 1):  # fmt: skip
            group = file.create_group(f"/{op}/{seqid}/input")
            for name, value in inputs.items():
                save(group, name, value)
            save(file.create_group(f"/{op}/{seqid}/output"), "result", outputs[0])
        save(file["addmm/1/input"], "alpha", np.float32(1), 7)
        vector = file.create_group("/cat/4/input/tensors")
        for k in range(2):
            save(vector, f"tensors_{k}", relu.outputs[0][k], 1)
    return path


def padiff(root: Path, framework: str = "torch", fault: float = 0.0) -> Path:
    """Write PaDiff's reports of one step, with paths of another machine."""
    folder = root / "model" / "step_0" / "rank_0"
    for name in ("tensors", "weights", "grads"):
        (folder / name).mkdir(parents=True)
    linear, relu, total, relu_back, linear_back = run(fault)
    count = 0

    def saved(value: Array) -> dict[str, str]:
        nonlocal count
        np.save(folder / "tensors" / f"tensor_{count}.npy", value)
        count += 1
        return {
            "path": f"/home/other/padiff_dump/model/step_0/rank_0/tensors/tensor_{count - 1}.npy",
            "shape": f"torch.Size({list(value.shape)})", "dtype": f"{framework}.{value.dtype}", "place": "cpu", "layout": "strided",
        }  # fmt: skip

    def node(
        name: str, route: str, step: int, output: Array, gradient: Array | None, children: list[Any], kind: str = "net"
    ) -> dict[str, Any]:
        return {
            "name": name, "route": route, "type": kind, "fwd_outputs": [saved(output)],
            "bwd_grads": [] if gradient is None else [saved(gradient)],
            "metas": {"fwd_step": 2 * step, "bwd_step": 2 * step + 1, "net_id": step}, "children": children,
            "stack": 'File "/home/user/model.py", line 12, in forward\n    return self.fc(x)\n',
        }  # fmt: skip

    tree = node("Model", "", 3, total.outputs[0], None, [
        node("Linear", "fc", 0, linear.outputs[0], linear_back.outputs[1], []),
        node("ReLU", "act", 2, relu.outputs[0], relu_back.outputs[0], [
            node(f"{framework}.nn.functional.relu", "", 1, relu.outputs[0], None, [], "api"),
        ]),
    ])  # fmt: skip
    header = {"model_name": "model", "framework": framework, "file_path": "/home/other/report.json"}
    report = {**header, "layer_map": {"route": [], "fullname": []}, "tree": [tree]}
    (folder / "report.json").write_text(json.dumps(report, indent=4))
    np.save(folder / "weights" / "weights_0.npy", linear.inputs[1])
    np.save(folder / "grads" / "grads_0.npy", linear_back.outputs[2].T)
    leaf = {
        "name": "Linear", "route": "fc", "repr": "Linear(3, 5)", "available": True, "children": [],
        "weights": {"weight": "/home/other/padiff_dump/weights/weights_0.npy"},
        "grads": {"weight": "/home/other/padiff_dump/grads/grads_0.npy", "bias": None},
    }  # fmt: skip
    top = {"name": "Model", "route": "", "repr": "", "available": False, "weights": {}, "grads": {}, "children": [leaf]}
    (folder / "params.json").write_text(json.dumps({**header, "tree": top}, indent=4))
    return root


def tensorflow(folder: Path, kernels: bool = False, fault: float = 0.0) -> Path:
    """Write the .npy of tfdbg_ascend, or of an Ascend dump that msaccucmp converted."""
    folder.mkdir(parents=True)
    linear, relu, *_ = run(fault)
    time = 1589195081588018
    for k, (kind, node, value) in enumerate((
        ("MatMulV2", "fc_MatMul", linear.outputs[0]), ("Relu", "act_Relu", relu.outputs[0]),
        ("ReluGrad", "gradients_act_Relu_grad_ReluGrad", np.ones_like(relu.outputs[0])),
    )):  # fmt: skip
        name = f"{kind}.{node}.{1147 + k}.{time + k}.output.0" if kernels else f"{node}.0.{time + k}"
        np.save(folder / f"{name}.npy", value)
    np.save(folder / "7f3a9c.npy", relu.inputs[0])
    (folder / "mapping.csv").write_text(f"7f3a9c,a_very/long/name_BiasAdd.0.{time + 7}\n")
    return folder


def arrays(folder: Path, torch: Any = None) -> Path:
    """Write a folder of .npy and .npz, and .pt where PyTorch is given."""
    linear, relu, *_ = run()
    (folder / "rank1" / "encoder").mkdir(parents=True)
    np.save(folder / "rank1" / "encoder" / "fc.output.1.npy", linear.outputs[0])
    np.savez_compressed(folder / "rank1" / "state.npz", a=linear.inputs[0], b=np.asfortranarray(linear.inputs[1]))
    np.save(folder / "rank1" / "big_endian.npy", relu.outputs[0].astype(">f4"))
    if torch is not None:
        state = {"w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "list": [torch.ones(2)]}
        torch.save(state, folder / "rank1" / "model.pt")
    return folder


def files(folder: Path) -> Iterator[Path]:
    """Yield the files of a dump."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
