"""What a training is set to, as the process holds it: the settings of its optimizers, modules, data loaders and argument parsers,
of parsed arguments, resolved configurations, losses, schedules and scalers.

They are read from objects at the end of the first step, never from files: a configuration that was overridden tells nothing. An
optimizer is asked each time it steps, which costs microseconds; what changed since is kept with its step, so that two schedules
can be told apart. Some are known by their class (`live_classes.toml`), looked up where its module is loaded: nothing is imported.
Which objects there are `Built` knows. Values are scalars and short lists of them; what else an attribute holds is left out.

Which samples a rank is given in the first step is told by a digest of each, so that ranks which share some can be told. A loader
hands out batches; what lies along the first axis of their tensors in host memory are samples. Only batches that are handed out to
one of several ranks while gradients are recorded count: those of an evaluation are the same on all ranks. The same sample that is
augmented at random has another digest. A batch of 256 pictures of 224 x 224 in float32, 154 MB, took 18 ms on one core.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import math
import random
import sys
import threading
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from trueup.foundation import toml
from trueup.foundation.frameworks.trees import AUTOCAST, DTYPE, LIES, TIED, TRAINED, OptimizerFacts, path
from trueup.foundation.redaction import redacted
from trueup.recording.engine.replacing import Around, Built

SCALARS = (bool, int, float, str, type(None))
LONGEST_LIST = 16
"""Items of a list that is kept: strides, betas, sizes of layers; a longer one is data."""
LONGEST_TEXT = 200
DEEPEST = 8
"""Mappings in mappings of a configuration that are read."""

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
MOST_CHANGES = 10_000
"""Changes of an optimizer's settings that are kept; a schedule changes one value a step."""
MOST_MODULES = 100_000
FORM = 3
"""Raised when more is recorded: what a capture of an earlier form does not say is not compared."""
MOST_NAMES = 10_000
"""Parameters of an optimizer whose names are kept."""
ADDRESS = ".address"
"""End of a module's setting that says where a parameter lies: an optimizer's parameters are known by it. It is not kept."""
NAMES = ("name", "full_name", "name_scope", "input_names", "output_names")
SAMPLING = ("shuffle", "seed", "drop_last", "num_replicas", "rank", "replacement", "num_samples", "batch_size")
PLACED = ("tensor_model_parallel", "sequence_parallel", "expert_tp", "allreduce")
PARTITIONED = ("partition_dim", "partition_stride")
LOADING = ("batch_size", "drop_last", "num_workers", "prefetch_factor", "pin_memory", "persistent_workers")

MOST_SAMPLES = 4096
MOST_BYTES = 1 << 28
"""Of a batch that is looked at."""


class LiveClass(toml.Table):
    """A class whose living objects say how a training is set; ``holds`` is the attribute with the mapping of a configuration."""

    module: str
    name: str = msgspec.field(name="class")
    holds: str = ""


class LiveClasses(toml.Table):
    """The rows of ``live_classes.toml``, by what their objects are."""

    argument: tuple[LiveClass, ...]
    configuration: tuple[LiveClass, ...]
    whole: tuple[LiveClass, ...]
    loss: tuple[LiveClass, ...]
    schedule: tuple[LiveClass, ...]
    scaler: tuple[LiveClass, ...]


@cache
def _known() -> LiveClasses:
    return toml.checked(toml.packaged("trueup.foundation.facts", "live_classes.toml"), LiveClasses)


def _loaded(some: Sequence[LiveClass]) -> tuple[type, ...]:
    return tuple(kind for one in some if isinstance(kind := getattr(sys.modules.get(one.module), one.name, None), type))


def live_names() -> list[tuple[str, str]]:
    """Return module and name of each class whose objects say how a training is set."""
    known = _known()
    rows = (*known.argument, *known.configuration, *known.whole, *known.loss, *known.schedule, *known.scaler)
    return [(one.module, one.name) for one in rows]


def live_wholes() -> tuple[type, ...]:
    """Return the loaded classes of modules that hold a model and are never called themselves."""
    return _loaded(_known().whole)


def arguments(found: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of a script, those of nested configurations by their paths (``optimizer.lr``, ``layers.0.p``); where two
    objects give a name two values, a list of both, in an order of their own."""
    parsed: list[Mapping[Any, Any]] = [vars(one) for one in found if isinstance(one, (Namespace, *_loaded(_known().argument)))]
    for row in _known().configuration:
        of = [one for one in found if isinstance(one, _loaded([row]))]
        parsed += [vars(one)[row.holds] for one in of if vars(one).get("_parent") is None and row.holds in vars(one)]
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
        if isinstance(inner, (list, tuple)):
            inner = [vars(one).get("_val", one) if type(one).__module__.startswith("omegaconf") else one for one in inner]
            if len(inner) <= LONGEST_LIST and not all(isinstance(one, SCALARS) for one in inner):
                inner = {str(at): one for at, one in enumerate(inner)}
        if isinstance(inner, Mapping) and depth:
            found |= _flat(inner, f"{prefix}{name}.", depth - 1)
        else:
            found |= {f"{prefix}{name}": kept for kept in plain({str(name): inner}).values()}
    return found


def losses(found: Sequence[Any]) -> list[dict[str, Any]]:
    """Return what losses are set to, in an order of their own."""
    mine = [one for one in found if isinstance(one, _loaded(_known().loss))]
    return sorted(
        (
            {"class": type(one).__name__} | plain({n: v for n, v in vars(one).items() if n[0] != "_" and n != "name"})
            for one in mine
        ),
        key=str,
    )


def scalers(found: Sequence[Any]) -> list[dict[str, Any]]:
    """Return what scalers of losses are set to, in an order of their own."""
    mine = [one for one in found if isinstance(one, _loaded(_known().scaler))]
    held = [{name.lstrip("_"): value for name, value in vars(one).items() if not name.endswith("tracker")} for one in mine]
    return sorted(({"class": type(one).__name__} | plain(own) for one, own in zip(mine, held, strict=True)), key=str)


def schedule_of(found: Sequence[Any], optimizer: Any) -> str:
    """Name what changes the learning rate of an optimizer: ``CosineAnnealingLR``, ``LambdaLR (warmup)``."""
    mine = [one for one in found if isinstance(one, _loaded(_known().schedule)) and vars(one).get("optimizer") is optimizer]
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


class Settings:
    """Gathers what a run is set to: ``facts`` reads an optimizer (None where it cannot be read now, as inside a graph),
    ``modules`` a model (``{scope: {"class": name, attribute: value}}``), ``note`` says what could not be read, ``built`` knows
    the objects that a training is set by, ``loaders`` are the framework's classes of data loaders, and ``loader`` reads one;
    ``seeds`` tells those of the framework's generators, which a rank may set again after the capture began; ``names`` gives a
    model and what it holds the names that their calls are recorded by, ``autocast`` says to which dtype what a model computes is
    cast now."""

    def __init__(
        self, facts: Callable[[Any], OptimizerFacts | None], modules: Callable[[Any], Mapping[str, Mapping[str, Any]]],
        note: Callable[[str], None], built: Built, loaders: tuple[type, ...] = (),
        loader: Callable[[Any], Mapping[str, Any]] | None = None, seeds: Callable[[], Mapping[str, int]] = dict,
        names: Callable[[Any], Mapping[str, str]] = lambda _: {}, autocast: Callable[[Any], str] = lambda _: "",
    ) -> None:  # fmt: skip
        self._facts, self._modules, self._note, self._built, self._loaders = facts, modules, note, built, loaders
        self._loader, self._framework_seeds, self._names = _loader if loader is None else loader, seeds, names
        self._autocast = autocast
        self._models: list[tuple[weakref.ref[Any], str]] = []
        self._optimizers: dict[int, dict[str, Any]] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._addresses: dict[int, list[list[int]]] = {}
        self._clipping = ""
        self._seeds: dict[str, int] = {}
        self._now: dict[int, list[dict[str, Any]]] = {}
        self._held: dict[str, Any] | None = None
        self._new = False
        self._lock = threading.Lock()
        """Held while what optimizers are set to changes: the writer's thread reads it."""
        self.delivered: Delivered | None = None  # what loaders hand out, where the adapter watches them
        self._began = _states()
        self._seeding = [Around(owner, "seed", partial(self._seeded, name)) for name, owner in _generators().items()]
        for one in self._seeding:
            one.install()

    def close(self) -> None:
        """Leave nothing of ours in the generators of Python and NumPy."""
        for one in self._seeding:
            one.remove()
        if self.delivered is not None:
            self.delivered.end()

    def _seeded(self, name: str, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Python's or NumPy's generator is given a seed, of which its state tells nothing."""
        given = [*args, *kwargs.values()]
        if self._held is None and given and isinstance(given[0], int):
            self._seeds[name] = int(given[0])
        original(*args, **kwargs)

    def clips(self, how: str) -> None:
        """Gradients are clipped, for the optimizer that steps next."""
        self._clipping = how

    def entered(self, model: Any) -> None:
        """A model begins to run outside any other."""
        if self._held is None and not any(known() is model for known, _ in self._models):
            self._models.append((weakref.ref(model), self._autocast(model)))

    def stepping(self, number: int, optimizer: Any, step: int) -> None:
        """An optimizer begins to step: keep what it is set to, where that is not as it was."""
        try:
            facts = self._facts(optimizer)
            if facts is None:
                return
        except Exception as error:  # noqa: BLE001 - an optimizer of the user's own may hold anything
            self._note(f"what {type(optimizer).__name__} is set to could not be read: {type(error).__name__}")
            return
        clipping, self._clipping = facts.clipping or self._clipping, ""
        groups = [_as_given(type(optimizer), _unnamed({**facts.settings, **more})) for more in ({}, *facts.groups)]
        known = self._optimizers.get(number)
        if known is None:
            more = {name: said for name, said in (("clipping", clipping), ("schedule", facts.schedule)) if said}
            self._alive[number], self._addresses[number] = (
                weakref.ref(optimizer),
                [[id(one) for one in group] for group in facts.held],
            )
            with self._lock:
                self._optimizers[number] = {
                    "class": facts.classes[0] if facts.classes else "", **more, "groups": groups, "changes": [],
                }  # fmt: skip
        elif groups != self._now[number] and len(known["changes"]) < MOST_CHANGES:
            for at, (before, after) in enumerate(zip(self._now[number], groups, strict=False)):
                changed = {name: value for name, value in after.items() if before.get(name) != value}
                known["changes"] += [[step, at, changed]] if changed else []
        else:
            return
        self._now[number], self._new = groups, True

    def step_ended(self) -> None:
        """The first step has ended: modules, loaders and arguments are what they are."""
        if self._held is not None:
            return
        self._held = {}
        try:
            self._held = self._read()
        except Exception as error:  # noqa: BLE001 - what stands in objects of the user's is anybody's guess
            self._note(f"what the run is set to could not be read in full: {type(error).__name__}")
        self._new = True  # last: the writer's thread asks for news at any time

    def _read(self) -> dict[str, Any]:
        modules: dict[str, Any] = {}
        models = [(model, cast) for known, cast in self._models if (model := known()) is not None]
        for model, cast in models:
            try:
                read = self._modules(model)
            except Exception as error:  # noqa: BLE001 - as above
                self._note(f"what {type(model).__name__} is set to could not be read: {type(error).__name__}")
                continue
            names = self._names(model)
            within = names.get("", "")
            for scope, held in read.items():
                if len(modules) < MOST_MODULES:
                    modules[_named(scope, names)] = _unnamed(_tied_within(held, names))
            if cast and within in modules:
                modules[within][AUTOCAST] = cast
        found = self._built.of(object)
        loaders = [one for one in found if isinstance(one, self._loaders)]
        for loss in losses(found):
            modules.setdefault(loss["class"], loss)
        for number, known in self._alive.items():
            if schedule := schedule_of(found, known()):
                with self._lock:
                    self._optimizers[number].setdefault("schedule", schedule)
        self._name_parameters(modules)
        drawn = {name: _digest(name) for name, state in _states().items() if self._began.get(name, state) != state}
        return {
            "modules": modules, "data": sorted((plain(self._loader(one)) for one in loaders), key=str),
            "arguments": arguments(found), "scalers": scalers(found),
            "random": drawn, "seeds": self._seeds | dict(self._framework_seeds()),
            "samples": [] if self.delivered is None else self.delivered.end(),
        }  # fmt: skip

    def _name_parameters(self, modules: dict[str, dict[str, Any]]) -> None:
        """Say which parameters each group of an optimizer holds, by what the modules say of where these lie."""
        names: dict[int, str] = {}
        for scope, held in modules.items():
            for name in [one for one in held if one.endswith(ADDRESS)]:
                names.setdefault(held.pop(name), path(scope, name.removesuffix(ADDRESS)))
        for number, groups in self._addresses.items():
            if 0 < sum(map(len, groups)) <= MOST_NAMES and all(names.keys() >= set(group) for group in groups):
                with self._lock:
                    self._optimizers[number]["parameters"] = [[names[one] for one in group] for group in groups]

    def news(self) -> dict[str, Any] | None:
        """Return all of it, for the manifest, where something came since it was asked last; secrets are masked."""
        if not self._new:
            return None
        self._new = False
        with self._lock:
            optimizers = [{**self._optimizers[number]} for number in sorted(self._optimizers)]
        found = {"form": FORM, **(self._held or {}), "optimizers": optimizers}
        return dict(redacted({name: value for name, value in found.items() if value}))


def by_scope(modules: Iterable[tuple[str, dict[str, Any], Iterable[tuple[str, Any, bool]]]]) -> dict[str, dict[str, Any]]:
    """Return by scope what modules are set to, with dtypes, frozen and tied ones of their ``(name, parameter, whether it is
    trained)``."""
    found: dict[str, dict[str, Any]] = {}
    seen: dict[int, str] = {}
    for scope, held, parameters in modules:
        found[scope] = held
        for name, parameter, trained in parameters:
            held[f"{name}{DTYPE}"] = str(parameter.dtype).rpartition(".")[2]
            held[f"{name}{ADDRESS}"] = id(parameter)
            if said := placement(parameter):
                held[f"{name}{LIES}"] = said
            if not trained:
                held[f"{name}{TRAINED}"] = False
            first = seen.setdefault(id(parameter), path(scope, name))
            if first != path(scope, name):
                held[f"{name}{TIED}"] = first
    return found


def _named(scope: str, names: Mapping[str, str]) -> str:
    """Name a module as its calls are: one that was named before a model around it ran keeps its name (``names``, by path in the
    model that ran)."""
    return names.get(scope, path(names.get("", ""), scope))


def _tied_within(held: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Name what parameters are tied to as their modules' calls are named."""
    tied = {name: value.rpartition(".") for name, value in held.items() if name.endswith(TIED)}
    return {**held, **{name: path(_named(scope, names), weight) for name, (scope, _, weight) in tied.items()}}


def _as_given(kind: type, held: dict[str, Any]) -> dict[str, Any]:
    """Name private attributes as the arguments of the class's constructor that they hold: ``_beta2`` is ``beta2``."""
    known = {*held, "learning_rate"}  # which schedules change; what holds at a step is ``lr``
    given = {f"_{name}": name for name in constructor(kind) if name not in known}
    return {given.get(name, name): value for name, value in held.items()}


@lru_cache(maxsize=1000)
def constructor(kind: type) -> frozenset[str]:
    """Return the names of what a class's constructor is given."""
    try:
        return frozenset(inspect.signature(kind).parameters)
    except (TypeError, ValueError):  # written in C, or says something else of itself
        return frozenset()


@lru_cache(maxsize=1000)
def inputs_of(function: Callable[..., Any] | None) -> dict[str, Any]:
    """Return, as the setting ``inputs``, the names of what a method of a module is given by position, where that is several;
    nothing where there is no such method (a TorchScript class has none)."""
    if function is None:
        return {}
    try:
        known = [one.name for one in inspect.signature(function).parameters.values() if one.kind in POSITIONAL][1:]
    except (TypeError, ValueError):
        return {}
    return {"inputs": known} if len(known) > 1 else {}


def _unnamed(held: Mapping[Any, Any]) -> dict[str, Any]:
    """Leave out the names that Paddle and Keras make up and count for the whole process (``dense_3``): nothing depends on them."""
    return plain({name: value for name, value in held.items() if name not in NAMES})


def _loader(loader: Any) -> dict[str, Any]:
    found = {"class": type(loader).__name__, **{name: getattr(loader, name, None) for name in LOADING}}
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None) or getattr(batches, "sampler", None)
    for what, one in (("batch_sampler", batches), ("sampler", sampler)):
        if one is not None:
            found[what] = type(one).__name__
            found |= {f"{what}.{name}": vars(one)[name] for name in SAMPLING if name in getattr(one, "__dict__", {})}
    generator = getattr(loader, "generator", None) or getattr(sampler, "generator", None)
    if generator is not None and hasattr(generator, "initial_seed"):
        found["seed"] = generator.initial_seed()
    samples = getattr(sampler, "__len__", None)
    with contextlib.suppress(Exception):  # a sampler of the user's own may say anything, or wait
        found |= {"samples": int(samples())} if samples is not None and type(sampler).__module__.startswith("torch.") else {}
    return found


def _generators() -> dict[str, Any]:
    """Return the modules of Python's and NumPy's generators, by name; NumPy loads its own when it is first asked for."""
    import numpy.random

    return {"python": random, "numpy": numpy.random}


def _states() -> dict[str, Any]:
    """Return the states of Python's and NumPy's generators, to be compared with ``==``."""
    name, keys, *rest = _generators()["numpy"].get_state()
    return {"python": random.getstate(), "numpy": (name, keys.tobytes(), *rest)}


def _digest(name: str) -> str:
    """Return a digest of a generator's state, which nothing else tells of."""
    state = random.getstate() if name == "python" else _generators()[name].get_state()
    return xxhash.xxh3_64_hexdigest(repr(state).encode())


def placement(parameter: Any) -> str:
    """Return what a parameter says of how it lies on the ranks; empty where neither library has written anything on it.

        tensor_model_parallel partition_dim=0 partition_stride=3    Megatron: rows, of three packed weights a piece each
        sequence_parallel                                           Megatron: a replica whose gradient is a term of a sum
        ds_shape=41x16 ds_part=328                                  DeepSpeed, ZeRO 3: flat, 328 elements on this rank
        zero_group=0 zero_flat=128:656 zero_weight=0:656            DeepSpeed, ZeRO 1 and 2: 656 elements, from the first on, lie
                                                                    in the flat buffer of the group from 128 on

    Only attributes are read that the object holds itself; nothing is computed.
    """
    held = getattr(parameter, "__dict__", None)
    if not held:
        return ""
    told = [f"{name}={value}" if not value else name for name in PLACED if type(value := held.get(name)) is bool]
    told += [f"{name}={value}" for name in PARTITIONED if type(value := held.get(name)) is int]
    shape, part = held.get("ds_shape"), held.get("ds_tensor")
    if isinstance(shape, tuple) and all(type(size) is int for size in shape):
        told += [f"ds_shape={'x'.join(map(str, shape))}"]
        told += [f"ds_part={part.numel()}"] if part is not None and hasattr(part, "numel") else []
    mapping = held.get("_hp_mapping")
    for name, address in (("zero_flat", "hp_fragment_address"), ("zero_weight", "lp_fragment_address")):
        at = getattr(mapping, address, None)
        start, length = getattr(at, "start", None), getattr(at, "numel", None)
        if type(start) is int and type(length) is int:
            told.append(f"{name}={start}:{length}")
    group = getattr(mapping, "param_group_index", None)
    return " ".join([*told, *([f"zero_group={group}"] if type(group) is int else [])])


class Delivered:
    """Watches the iterators of a framework's loaders, which ``kinds`` names, until the first step is over. ``rows`` views a tensor
    in host memory as an array, None for anything else; ``shares`` tells whether this rank is one of several and records gradients
    now."""

    def __init__(self, kinds: Iterable[type], rows: Callable[[Any], NDArray[Any] | None], shares: Callable[[], bool]) -> None:
        self._rows, self._shares = rows, shares
        self._around = [Around(kind, "__next__", self._next) for kind in kinds]
        self._digests: list[str] = []
        self._failed = False
        for one in self._around:
            one.install()

    def end(self) -> list[str]:
        """Watch no longer; return the digests, in the order in which the samples came; none where some could not be looked at."""
        self._around, around = [], self._around
        for one in around:
            one.remove()
        return [] if self._failed else self._digests

    def _next(self, original: Callable[..., Any], *args: Any) -> Any:
        batch = original(*args)
        if self._around and not self._failed and self._shares():
            try:
                self._digests += self._samples(batch)
            except Exception:  # noqa: BLE001 - a batch may be any object of the user's
                self._failed = True
            self._failed = self._failed or len(self._digests) > MOST_SAMPLES
        return batch

    def _samples(self, batch: Any) -> list[str]:
        arrays = [rows for one in _leaves(batch) if (rows := self._rows(one)) is not None and rows.ndim]
        count = len(arrays[0]) if arrays else 0
        if any(len(one) != count for one in arrays) or sum(one.nbytes for one in arrays) > MOST_BYTES:
            raise ValueError("no samples along the first axis, or too many bytes")
        texts = [np.ascontiguousarray(one).reshape(-1).view(np.uint8).data for one in arrays if one.size]
        found = []
        for at in range(count if texts else 0):
            state = xxhash.xxh3_64()
            for text in texts:
                length = len(text) // count
                state.update(text[at * length : (at + 1) * length])
            found.append(state.hexdigest())
        return found


def _leaves(value: Any, depth: int = 0) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)) and depth < 4:
        for one in value[:256]:
            yield from _leaves(one, depth + 1)
    else:
        yield value
