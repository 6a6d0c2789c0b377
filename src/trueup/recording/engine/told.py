"""What a script was told, as objects that are alive hold it: parsed arguments, resolved configurations, losses, schedules, scalers.

Each is known by its class, which is looked up where its module is already loaded: nothing is imported, and no attribute of any
object that is no such one is read. Values are scalars and short lists of them; what else an attribute holds is left out.
"""

from __future__ import annotations

import enum
import gc
import math
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

SCALARS = (bool, int, float, str, type(None))
LONGEST_LIST = 16
"""Items of a list that is kept: strides, betas, sizes of layers; a longer one is data."""
LONGEST_TEXT = 200
DEEPEST = 8
"""Mappings in mappings of a configuration that are read."""
Classes = tuple[tuple[str, str], ...]  # by module: they count where it is loaded
PARSED: Classes = (("transformers.training_args", "TrainingArguments"),)
"""Classes, beside argparse's (Megatron's arguments are one), whose attributes are the arguments of a script."""
CONFIGURED = {
    ("omegaconf.dictconfig", "DictConfig"): "_content", ("deepspeed.runtime.config", "DeepSpeedConfig"): "_param_dict",
}  # fmt: skip
"""Classes of configurations, with the attribute that holds the mapping: OmegaConf and Hydra, DeepSpeed."""
LOSSES: Classes = (("keras.src.losses.loss", "Loss"),)
"""Classes of losses that are no modules."""
SCHEDULES: Classes = (("torch.optim.lr_scheduler", "LRScheduler"),)
"""Classes of what changes the learning rate of its ``optimizer``."""
SCALERS: Classes = (
    ("torch.amp.grad_scaler", "GradScaler"), ("paddle.amp.grad_scaler", "AmpScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScalerBase"),
)  # fmt: skip
"""Classes of what scales losses and gradients."""


def _loaded(some: Sequence[tuple[str, str]]) -> tuple[type, ...]:
    return tuple(kind for module, name in some if isinstance(kind := getattr(sys.modules.get(module), name, None), type))


def classes() -> tuple[type, ...]:
    """Return the classes whose objects tell something."""
    return (Namespace, *_loaded((*PARSED, *CONFIGURED, *LOSSES, *SCHEDULES, *SCALERS)))


def arguments(found: Sequence[Any], models: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the arguments of a script, those of nested configurations by their paths (``optimizer.lr``), with what Lightning's
    models keep of them; where two objects give a name two values, a list of both, in an order of their own."""
    parsed: list[Mapping[Any, Any]] = [vars(one) for one in found if isinstance(one, (Namespace, *_loaded(PARSED)))]
    parsed += [held for model in models if isinstance(held := getattr(model, "_hparams", None), Mapping)]
    for (module, name), attribute in CONFIGURED.items():
        of = [one for one in found if isinstance(one, _loaded([(module, name)]))]
        parsed += [vars(one)[attribute] for one in of if vars(one).get("_parent") is None and attribute in vars(one)]
    said: dict[str, list[Any]] = {}
    for one in parsed:
        for name, value in _flat(one).items():
            if not name.startswith("_") and value not in said.setdefault(name, []):
                said[name].append(value)
    return {name: values[0] if len(values) == 1 else sorted(values, key=repr) for name, values in said.items()}


def _flat(held: Any, prefix: str = "", depth: int = DEEPEST) -> dict[str, Any]:
    """Return the values of a mapping of mappings by their paths; OmegaConf wraps each value, and what it refers to stays a name."""
    found: dict[str, Any] = {}
    for name, value in held.items() if isinstance(held, Mapping) else ():
        inner = (
            vars(value).get("_content", vars(value).get("_val", value)) if type(value).__module__.startswith("omegaconf") else value
        )
        if isinstance(inner, list):
            inner = [vars(one).get("_val", one) if type(one).__module__.startswith("omegaconf") else one for one in inner]
        if isinstance(inner, Mapping) and depth:
            found |= _flat(inner, f"{prefix}{name}.", depth - 1)
        else:
            found |= {f"{prefix}{name}": kept for kept in plain({str(name): inner}).values()}
    return found


def losses(found: Sequence[Any]) -> list[dict[str, Any]]:
    """Return what losses are set to, in an order of their own."""
    mine = [one for one in found if isinstance(one, _loaded(LOSSES))]
    return sorted(
        (
            {"class": type(one).__name__} | plain({n: v for n, v in vars(one).items() if n[0] != "_" and n != "name"})
            for one in mine
        ),
        key=str,
    )


def scalers(found: Sequence[Any]) -> list[dict[str, Any]]:
    """Return what scalers of losses are set to, in an order of their own."""
    mine = [one for one in found if isinstance(one, _loaded(SCALERS))]
    held = [{name.lstrip("_"): value for name, value in vars(one).items() if not name.endswith("tracker")} for one in mine]
    return sorted(({"class": type(one).__name__} | plain(own) for one, own in zip(mine, held, strict=True)), key=str)


def schedule(found: Sequence[Any], optimizer: Any) -> str:
    """Name what changes the learning rate of an optimizer: ``CosineAnnealingLR``, ``LambdaLR (warmup)``."""
    mine = [one for one in found if isinstance(one, _loaded(SCHEDULES)) and vars(one).get("optimizer") is optimizer]
    return ", ".join(sorted(map(_schedule, mine)))


def _schedule(one: Any) -> str:
    functions = [getattr(each, "func", each) for each in vars(one).get("lr_lambdas") or ()]
    names = dict.fromkeys(name for each in functions if (name := getattr(each, "__name__", "")))
    return type(one).__name__ + (f" ({', '.join(names)})" if names else "")


def plain(held: Mapping[Any, Any]) -> dict[str, Any]:
    """Return what of a mapping is a scalar, or a short list of scalars; numbers of NumPy's kind are Python's."""
    found: dict[str, Any] = {}
    for name, value in held.items():
        if isinstance(name, str) and not name.startswith("__") and (kept := _plain(value)) is not _NOTHING:
            found[name] = kept
    return found


_NOTHING = object()


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, SCALARS):  # or a class that derives from one, as NumPy's float64
        value = None if value is None else next(kind for kind in (bool, int, float, str) if isinstance(value, kind))(value)
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)  # JSON has no infinity
        return value[:LONGEST_TEXT] if isinstance(value, str) else value
    if isinstance(value, (list, tuple)) and len(value) <= LONGEST_LIST:
        items = [_plain(one) for one in value]
        return _NOTHING if any(one is _NOTHING for one in items) else items
    return _NOTHING


def alive(wanted: tuple[type, ...]) -> list[Any]:
    """Return the objects of some classes, or of classes that derive from them; no attribute of any is read.

    An object of a class that is written in Python refers to its class, so they are found by that. ``gc.get_objects()`` would hand
    out all objects, with the tuples that other threads are just filling (``tuple(x for x in y)``): CPython raises SystemError there
    if anybody holds one.
    """
    classes: dict[int, type] = {}
    todo = list(wanted)
    while todo:
        kind = todo.pop()
        if id(kind) not in classes:
            classes[id(kind)] = kind
            todo += type.__subclasses__(kind)
    return [one for one in gc.get_referrers(*classes.values()) if id(type(one)) in classes]
