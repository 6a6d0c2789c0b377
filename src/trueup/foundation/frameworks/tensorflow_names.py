"""What the names of operations in a graph of TensorFlow tell: forward, backward or optimizer, and of which operation.

``tf.gradients`` puts the backward of ``net/MatMul`` under ``gradients/net/MatMul_grad``, a GradientTape under
``gradient_tape/net/``; an optimizer of TensorFlow 1 works beside ``Adam/update_net/w``.
"""

from __future__ import annotations

import re

GRADIENT = re.compile(r"(?:.*/)?gradients(?:_\d+)?/(?:(.+)_grad/)?")
APPLIES = re.compile(r"(?:Resource)?(?:Sparse)?Apply[A-Z]")
UPDATE = re.compile(r"(.*?)/update(?:_|/)")
READS = frozenset({"ReadVariableOp", "VariableV2", "Variable"})
"""They give what a variable holds. That counts as given to them: no call says who wrote the variable."""
_MKL = re.compile(r"^_Mkl(?:Native)?(?=[A-Z])")
TAPE = re.compile(r"(?:.*/)?gradient_tape/")
PASSED_OVER = frozenset(
    """
    Placeholder PlaceholderWithDefault Const NoOp VarHandleOp DestroyResourceOp VarIsInitializedOp Shape ShapeN Size Rank
    StopGradient PreventGradient ControlTrigger VariableShape BroadcastGradientArgs
    DebugIdentityV2 Assert Print PrintV2 MergeSummary ScalarSummary WriteScalarSummary DisableCopyOnRead EnsureShape
    """.split()
)
"""Operations that compute nothing that a comparison asks for; a capture leaves them out."""


def device_name(text: str | None) -> str:
    """Return ``cpu``, ``gpu:0``, ``npu:1`` ... for ``/job:localhost/replica:0/task:0/device:GPU:0``."""
    kind, _, number = (text or "").rpartition("device:")[2].lower().partition(":")
    return "cpu" if kind in ("", "cpu") else f"{kind}:{number or 0}"


def operation(kind: str) -> str:
    """Return ``tf.raw_ops.MatMul`` for ``MatMul``, and for ``_MklMatMul``, its kernel on a CPU with oneDNN."""
    return f"tf.raw_ops.{_MKL.sub('', kind).lstrip('_')}"


def standing(name: str, kind: str, updated: frozenset[str]) -> tuple[str, str, str | None]:
    """Return what the name of a graph's operation (``net/head/MatMul``, of type ``kind``) tells: its phase, its scope (with dots)
    and, in the backward, its forward operation. ``updated`` holds optimizers' scopes: the part before ``/update`` of an operation
    that applies gradients."""
    if APPLIES.match(kind) or any(name.startswith(f"{scope}/") for scope in updated):
        return "optimizer", "", None
    if (found := GRADIENT.match(name)) is not None:
        forward = found[1]
        return "backward", ".".join((forward or "").split("/")[:-1]), forward
    if (taped := TAPE.match(name)) is not None:
        return "backward", ".".join(name[taped.end() :].split("/")[:-1]), None
    return "forward", ".".join(name.split("/")[:-1]), None
