"""Optimisations of TensorFlow switched off for the whole process (`engine.replacing`), whatever the script asks for.

Eager code and functions read their settings from ``Context.config``, sessions from the ``ConfigProto`` that they are given: both
are forced to what the switches say when they are read, so a setting that the script makes later does not undo it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.client import session as client
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from trueup.recording.engine.replacing import Around, Replacement, WhenLoaded

NPU = "NpuOptimizer"
"""Name of the optimizer that Ascend's adapter for TensorFlow 1 puts into a session's settings."""

_rewrites: dict[str, Any] = {}
"""Fields of RewriterConfig: a number, a truth value, or the name of one of the field's values."""
_optimizer: dict[str, Any] = {}
"""Fields of OptimizerOptions, likewise."""
_npu: dict[str, str] = {}
"""Parameters of Ascend's optimizer."""


def rewriter(fields: Mapping[str, Any]) -> None:
    """Force fields of ``graph_options.rewrite_options`` (grappler)."""
    _check(rewriter_config_pb2.RewriterConfig(), fields)
    _rewrites.update(fields)
    _stand_in()


def optimizer_options(fields: Mapping[str, Any]) -> None:
    """Force fields of ``graph_options.optimizer_options`` (function inlining, common subexpressions, XLA auto-clustering)."""
    _check(config_pb2.OptimizerOptions(), fields)
    _optimizer.update(fields)
    _stand_in()


def xla_functions(_: bool) -> None:
    """Run ``tf.function(jit_compile=True)``, and Keras' ``compile(jit_compile=True)``, as any other function."""

    def made(original: Callable[..., None], function: Any, *args: Any, **kwargs: Any) -> None:
        original(function, *args, **kwargs)
        if function._jit_compile:
            function._jit_compile = None

    Around(polymorphic_function.Function, "__init__", made).install()


def fusion_switch_file(path: str) -> None:
    """Give a fusion switch file to Ascend's adapters: to ``NpuOptimizer`` of sessions, and to ``npu_device`` where it is loaded."""
    _npu["fusion_switch_file"] = path
    _stand_in()

    def tell() -> None:
        import npu_device  # type: ignore[import-not-found]

        npu_device.global_options().fusion_switch_file = path

    WhenLoaded("npu_device", tell).install()


def force(config: Any) -> Any:
    """Write what is forced into a ConfigProto, and return it."""
    for message, fields in (
        (config.graph_options.rewrite_options, _rewrites), (config.graph_options.optimizer_options, _optimizer),
    ):  # fmt: skip
        for name, value in fields.items():
            setattr(message, name, _value(message, name, value))
    for custom in config.graph_options.rewrite_options.custom_optimizers:
        if custom.name == NPU:
            for name, text in _npu.items():
                custom.parameter_map[name].s = text.encode()
    return config


def _check(message: Any, fields: Mapping[str, Any]) -> None:
    """Raise `ValueError` now where this version of TensorFlow has no such field."""
    for name, value in fields.items():
        if name not in message.DESCRIPTOR.fields_by_name:
            raise ValueError(f"{type(message).__name__} has no field {name}")
        setattr(message, name, _value(message, name, value))


def _value(message: Any, name: str, value: Any) -> Any:
    kind = message.DESCRIPTOR.fields_by_name[name].enum_type
    return kind.values_by_name[value].number if isinstance(value, str) and kind is not None else value


_standing: list[Replacement] = []


def _stand_in() -> None:
    if _standing:
        return
    _standing.append(Replacement(context.Context, "config", _forced_property))
    _standing.append(Around(client.BaseSession, "__init__", _forced_argument))
    for replacement in _standing:
        replacement.install()


def _forced_property(original: property) -> property:
    return property(lambda self: force(original.fget(self)), doc=original.__doc__)  # type: ignore[misc]


def _forced_argument(original: Callable[..., None], session: Any, target: Any = "", graph: Any = None, config: Any = None) -> None:
    given = config_pb2.ConfigProto()
    if config is not None:
        given.CopyFrom(config)
    original(session, target, graph, force(given))
