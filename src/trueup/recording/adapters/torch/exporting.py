"""A model of a script to ONNX by ``torch.onnx`` (dynamo), and the numbers of the model and of each node of the exported graph."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trueup.recording.adapters.torch.exported_graph import Graph
from trueup.recording.adapters.torch.recorded_call import to_numpy


class Model:
    """A model, set to evaluate, with the inputs that its maker gives. Raises ValueError where the script gives none."""

    def __init__(self, script: Path, name: str) -> None:
        made = runpy.run_path(str(script), run_name="trueup_export").get(name)
        made = made() if callable(made) and not isinstance(made, torch.nn.Module) else made
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], torch.nn.Module):
            raise ValueError(f"{name} is {type(made).__name__}")
        model, inputs = made
        self.inputs: tuple[torch.Tensor, ...] = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        if not all(isinstance(one, torch.Tensor) for one in self.inputs):
            raise ValueError("inputs that are no tensors")
        self.model = model.cpu().eval()
        self._made: dict[bool, Any] = {}

    @property
    def batch(self) -> int:
        """Return the size of the first axis of the inputs, 0 where they do not have one in common."""
        sizes = {one.shape[0] if one.dim() else 0 for one in self.inputs}
        return sizes.pop() if len(sizes) == 1 else 0

    def variants(self, batches: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
        """Return the inputs, and for each batch size others of the same kind and range."""
        generator = torch.Generator().manual_seed(0)

        def other(one: torch.Tensor, size: int) -> torch.Tensor:
            shape = (size, *one.shape[1:])
            if one.dtype.is_floating_point:
                return (torch.randn(shape, generator=generator) * one.float().std(correction=0) + one.float().mean()).to(one.dtype)
            if one.dtype == torch.bool:
                return torch.randint(0, 2, shape, generator=generator).bool()
            return torch.randint(int(one.min()), int(one.max()) + 1, shape, generator=generator).to(one.dtype)

        return [self.inputs, *(tuple(other(one, size) for one in self.inputs) for size in batches)]

    @staticmethod
    def arrays(inputs: Sequence[torch.Tensor]) -> list[np.ndarray[Any, Any]]:
        """Return inputs as arrays of the same dtypes."""
        return [to_numpy(one) for one in inputs]

    def export(self, file: Path, opset: int | None, *, dynamic: bool) -> None:
        """Write the model as ONNX; raises what torch.onnx raises."""
        self._made[dynamic] = self._program(opset, dynamic=dynamic)
        self._made[dynamic].save(str(file), external_data=False)

    def _program(self, opset: int | None = None, *, dynamic: bool) -> Any:
        shapes = tuple({0: torch.export.Dim("batch")} for _ in self.inputs) if dynamic else None
        return torch.onnx.export(
            self.model, self.inputs, dynamo=True, opset_version=opset, dynamic_shapes=shapes, verbose=False, external_data=False,
        )  # fmt: skip

    def outputs(self, inputs: Sequence[torch.Tensor]) -> list[np.ndarray[Any, Any]]:
        """Return the tensors that the model makes, in order."""
        return _outputs(self.model, inputs)

    def exact(self, inputs: Sequence[torch.Tensor]) -> list[np.ndarray[Any, Any]]:
        """Return the same of the model in float64; raises what the model raises, where its code names a dtype."""
        model = copy.deepcopy(self.model).double()
        return _outputs(model, [one.double() if one.dtype.is_floating_point else one for one in inputs])

    def graph(self, *, dynamic: bool) -> Graph:
        """Return the graph that torch.onnx exports, or exported; raises what torch.onnx raises."""
        return Graph(self._exported(dynamic=dynamic))

    def proto(self, *, dynamic: bool) -> Any:
        """Return the ONNX model of that graph."""
        return self._exported(dynamic=dynamic).model_proto

    def _exported(self, *, dynamic: bool) -> Any:
        if dynamic not in self._made:
            self._made[dynamic] = self._program(dynamic=dynamic)
        return self._made[dynamic]


def _outputs(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> list[np.ndarray[Any, Any]]:
    with torch.no_grad():
        leaves = torch.utils._pytree.tree_leaves(model(*inputs))
    return [to_numpy(one) for one in leaves if isinstance(one, torch.Tensor)]
