"""What a training is set to, as the process holds it: the settings of its optimizers, modules, data loaders and argument parsers.

They are read from objects at the end of the first step, never from files: a configuration that was overridden tells nothing. An
optimizer is asked each time it steps, which costs microseconds; what changed since is kept with its step, so that two schedules
can be told apart. Values are scalars and short lists of them; what else an attribute holds is left out.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any

import xxhash

from trueup.foundation.frameworks.trees import AUTOCAST, DTYPE, LIES, TIED, TRAINED, OptimizerFacts, path
from trueup.foundation.redaction import redacted
from trueup.recording.engine import live_objects
from trueup.recording.engine.built import Built
from trueup.recording.engine.delivered import Delivered
from trueup.recording.engine.live_objects import plain
from trueup.recording.engine.replacing import Around

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
        for loss in live_objects.losses(found):
            modules.setdefault(loss["class"], loss)
        for number, known in self._alive.items():
            if schedule := live_objects.schedule(found, known()):
                with self._lock:
                    self._optimizers[number].setdefault("schedule", schedule)
        self._name_parameters(modules)
        drawn = {name: _digest(name) for name, state in _states().items() if self._began.get(name, state) != state}
        return {
            "modules": modules, "data": sorted((plain(self._loader(one)) for one in loaders), key=str),
            "arguments": live_objects.arguments(found), "scalers": live_objects.scalers(found),
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
