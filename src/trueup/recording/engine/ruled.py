"""One call under a rule of a policy: its tensors are copied to the rule's dtype or device, it runs, its results are copied back.

A `RuledCall` decides between running a call as it is, in the other way, or in both, forward and backward apart. What it asks of a
framework is a `Framework`: functions, all in one module of the adapter, which is handed over as it is.

A copy is an operation that autograd knows, so gradients are cast back on their way. A tensor that is given twice is copied once:
what is one tensor stays one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from trueup.foundation.model import TrueupError
from trueup.recording.policy_file import PolicyRule
from trueup.recording.recorder.arguments import Place, holding

Arguments = tuple[Any, ...]
Way = Callable[[Arguments], Any]
"""Executes a call with its arguments: values that may hold tensors."""
Form = tuple[str, Any]
"""Dtype, by its name, and device."""

NOTHING = "their tensors have that dtype and device already"
VIEW = "they return an argument or a view of it, and compute nothing"
NO_GRADIENT = "no gradient flows through them"
INSIDE = "they run inside a call that the policy changes"
CONVERTS = "they convert a tensor, and compute nothing"
EXPLAINED = (RuntimeError, NotImplementedError, TypeError, ValueError)
"""Errors that get the context of the policy; subclasses (out of memory) stay what they are."""
MOST_KNOWN = 4096

WIDER: dict[str, dict[str, str]] = {
    "float32": {"float16": "float32", "bfloat16": "float32", "complex32": "complex64"},
    "float64": {
        "float16": "float64", "bfloat16": "float64", "float32": "float64", "complex32": "complex128", "complex64": "complex128",
    },
    "bfloat16": {"float16": "bfloat16", "float32": "bfloat16", "float64": "bfloat16"},
}  # fmt: skip
"""What each dtype of a policy does to dtypes; the rest stays. Formats of 8 bits mean nothing without their scales."""

_REAL = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


class PolicyFailed(TrueupError, RuntimeError):
    """A call cannot be executed as a rule asks for."""


def failed(rule: PolicyRule, where: str, got: str, advice: str) -> PolicyFailed:
    """Return the error of a call that cannot be executed as a rule asks for."""
    return PolicyFailed(
        f"The policy cannot be kept.\n  where:    {where}\n  expected: {rule}\n  got:      {got}\n  next:     {advice}"
    )


class CannotSplit(Exception):
    """Why the forward and the backward of a call cannot run in different ways."""


class ReturnsArgument(CannotSplit):
    """The call returns an argument or a view of one: it computes nothing."""


@contextmanager
def set_to(value: Any, setting: Callable[[], Any], put: Callable[[Any], None]) -> Iterator[None]:
    """Give a setting of the framework (read by ``setting``, written by ``put``) a value in a block."""
    before = setting()
    put(value)
    try:
        yield
    finally:
        put(before)


class Framework(Protocol):
    """What a policy asks of a framework: functions of one module."""

    # ---------------------------------------------------------------- tensors
    def tensors_in(self, value: Any) -> list[Any]:
        """Return every tensor of a nested value, in order."""

    def mapped(self, value: Any, change: Callable[[Any], Any], *, kind: type | None = None) -> Any:
        """Return a nested value with every tensor (or object of another kind) changed; what holds none is returned as it is."""

    def is_plain(self, tensor: Any) -> bool:
        """Tell whether a tensor may be copied: what is not is given, and returned, as it is."""

    def dtype_name(self, tensor: Any) -> str:
        """Return the name of a tensor's dtype."""

    def device_of(self, tensor: Any) -> Any:
        """Return a tensor's device."""

    def on_host(self, tensor: Any) -> bool:
        """Tell whether a tensor is in host memory, or has none."""

    def in_form(self, tensor: Any, form: Form | None) -> Any:
        """Return a tensor in a dtype and on a device (None: its dtype, on the host), by operations that autograd sees; itself
        where it already is."""

    def version(self, tensor: Any) -> int | None:
        """Return how often a tensor was written; None where nobody counts."""

    def memory(self, tensor: Any) -> Hashable:
        """Return a key that tensors in one piece of memory share; None where it is not known."""

    def lies_alike(self, original: Any, made: Any) -> bool:
        """Tell whether a copy lies in memory as its original does, so that it may stand for it."""

    def differs(self, original: Any, made: Any) -> bool:
        """Tell whether a copy has other values than its original."""

    def write_back(self, original: Any, made: Any) -> None:
        """Write into an original what the call wrote into its copy, by operations that autograd sees."""

    def copies(self, framework: Framework, rule: PolicyRule) -> Copies:
        """Return the function that makes the copies a rule asks for."""

    # ---------------------------------------------------------------- calls
    def needs_gradient(self, tensor: Any) -> bool:
        """Tell whether a gradient is asked of a tensor."""

    def gradients_on(self) -> bool:
        """Tell whether autograd records."""

    def autocast(self, tensors: Iterable[Any]) -> tuple[Any, ...]:
        """Return the dtypes to which autocast casts on the devices of some tensors; nothing, or None alone, where it is off."""

    def promoted(self, dtypes: Sequence[str]) -> str:
        """Return the dtype of a result that is computed from several floating-point or complex ones."""

    def complex_of(self, dtype: str) -> str:
        """Return the complex dtype of which a floating-point one is a part."""

    def names(self, value: Any) -> str:
        """Tell whether an argument is a ``"dtype"`` or a ``"device"`` of the framework; else return nothing."""

    def dtypes_follow(self, name: str) -> bool:
        """Tell whether the dtypes of the results of a function of that name follow from its inputs, as a rule."""

    def written(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int] | None:
        """Return addresses of tensors that a function writes without counting it in their version; None: it may be any."""

    def alone_on_copies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[tuple[Any, Any]]:
        """Return a block in which a call has no effect, with copies of its arguments: no record, no gradient, no number drawn."""

    def split(
        self, forward: Way, backward: Way, arguments: Arguments, buffers: frozenset[int], refuse: Callable[[str], Exception]
    ) -> Any:
        """Execute a call whose results come from ``forward`` and gradients from ``backward``, a different way; ``buffers`` are
        the addresses of tensors among all that it reads which it writes without harm to its gradients (running statistics),
        ``refuse`` makes the exception for a backward that cannot be computed, from the reason. Raises CannotSplit."""

    def unseen(self) -> AbstractContextManager[Any]:
        """Return a block in which nothing is a call."""

    def without_autocast(self, tensors: Iterable[Any], device: str | None) -> AbstractContextManager[Any]:
        """Return a block in which autocast is off; ``device``: where the rule has the call run."""

    def deterministic(self) -> AbstractContextManager[Any]:
        """Return a block in which algorithms are deterministic."""

    def mark(self) -> int:
        """Return a mark by which autograd nodes of this call are told from earlier ones."""

    def draws(self, tensors: Iterable[Any], arguments: Arguments) -> Callable[[], bool]:
        """Return a function that tells later whether random numbers were drawn."""

    # ---------------------------------------------------------------- modules
    def held(self, module: Any) -> tuple[list[Place], list[Any]]:
        """Return the parameters, buffers and other tensors that a module and those inside hold, and where they stand."""

    def rewritten(self, module: Any) -> frozenset[int]:
        """Return addresses of what a module writes in its forward without counting it."""

    def refuse(self, rule: PolicyRule, name: str, module: Any) -> None:
        """Raise `PolicyFailed` for a module whose tensors a rule cannot take elsewhere."""


class Copies:
    """The tensors that a call is given instead of its own."""

    def __init__(self, framework: Framework, rule: PolicyRule) -> None:
        self._framework = framework
        self._wider, self._to_host = WIDER.get(rule.dtype or "", {}), rule.device is not None
        self._held: dict[int, tuple[Any, Any, int | None]] = {}
        """By the address of a copy: the original, the copy, its version when it was made."""
        self._made: dict[int, Any] = {}  # by the address of an original, which `_held` keeps alive: its copy

    def __bool__(self) -> bool:
        return bool(self._held)

    def __call__(self, tensor: Any) -> Any:
        """Return the stand-in of a tensor: a copy, or itself where its dtype and device are those of the rule."""
        found = self._made.get(id(tensor))
        if found is not None:
            return found
        made = self.copied(tensor)
        if made is tensor:
            return tensor
        self._made[id(tensor)] = made
        self._held[id(made)] = tensor, made, self._framework.version(made)
        return made

    def changes(self, tensor: Any) -> bool:
        """Tell whether the rule asks for another dtype or device than a tensor has."""
        framework = self._framework
        if not framework.is_plain(tensor):
            return False
        return framework.dtype_name(tensor) in self._wider or (self._to_host and not framework.on_host(tensor))

    def copied(self, tensor: Any) -> Any:
        """Return a tensor in the rule's dtype and on its device, or the tensor itself where it already is what is asked for."""
        if not self.changes(tensor):
            return tensor
        framework = self._framework
        if self._to_host and not framework.on_host(tensor):
            tensor = framework.in_form(tensor, None)
        wide = self._wider.get(framework.dtype_name(tensor))
        return tensor if wide is None else framework.in_form(tensor, (wide, framework.device_of(tensor)))

    def original(self, tensor: Any) -> Any:
        """Return the original of a copy, else None; a copy that lies otherwise in memory, and was not written, is no stand-in.
        ``contiguous`` returns the copy itself, where it would have made another tensor of the original."""
        original, made, before = self._held.get(id(tensor), (None, tensor, None))
        if original is None:
            return None
        framework = self._framework
        return original if framework.lies_alike(original, made) or framework.version(made) != before else None

    def shows(self, tensor: Any) -> bool:
        """Tell whether a tensor is a view of a copy."""
        memories = {self._framework.memory(made) for _, made, _ in self._held.values()}
        return (at := self._framework.memory(tensor)) is not None and at in memories

    def written(self, also: frozenset[int] = frozenset(), *, all_of_them: bool = False) -> list[tuple[Any, Any]]:
        """Return ``(original, copy)`` of what the call wrote; ``also``: ids of originals that it writes without counting it in
        their version."""
        framework = self._framework
        return [
            (original, made) for original, made, before in self._held.values()
            if all_of_them or id(original) in also
            or (framework.differs(original, made) if before is None else framework.version(made) != before)
        ]  # fmt: skip


class RuledCall:
    """A call that a rule is for, of a framework, named in words, which ``run`` executes with arguments like those it was given.
    ``returns`` gives from a number the form of that tensor of its result, None to leave it as it is; ``written`` the addresses of
    tensors that it writes without counting it in their version, None where it may be any."""

    def __init__(
        self, framework: Framework, rule: PolicyRule, name: str, run: Way, arguments: Arguments,
        returns: Callable[[int, Any], Form | None], written: frozenset[int] | None,
    ) -> None:  # fmt: skip
        self.framework, self.rule, self.name, self._run, self.arguments = framework, rule, name, run, arguments
        self._returns, self._written = returns, written
        self.tensors = framework.tensors_in(arguments)

    @property
    def changes(self) -> bool:
        """Whether the rule's dtype or device makes a difference."""
        framework, tensors = self.framework, [t for t in self.tensors if self.framework.is_plain(t)]
        if any(map(framework.copies(framework, self.rule).changes, tensors)):
            return True
        return self.rule.dtype is not None and any(map(_is_number, tensors)) and any(framework.autocast(tensors))

    def draws(self) -> Callable[[], bool]:
        """Return a function that tells later whether random numbers were drawn."""
        return self.framework.draws(self.tensors, self.arguments)

    def execute(self, backward: Any) -> tuple[Any, str]:
        """Execute the call; return its result, and why it was left as it was, if it was. ``backward`` makes the backward of calls
        deterministic, and says where there is one (``hook(results, mark, name)``). Raises PolicyFailed."""
        if not self.rule.deterministic:
            return self._moved()
        first, phase = self.framework.mark(), self.rule.phase
        if phase != "backward":
            with self.framework.deterministic():
                result, left = self._moved()
        else:
            result, left = self._moved()
            left = NO_GRADIENT if not self.rule.moves else left
        results = self.framework.tensors_in(result)
        if phase in (None, "backward") and backward.hook(results, first, f"{self.name}, {self.rule}"):
            left = ""
        return result, "" if phase != "backward" else left

    def _moved(self) -> tuple[Any, str]:
        if not self.rule.moves:
            return self._plain(self.arguments), ""
        if not self.changes:
            return self._plain(self.arguments), NOTHING
        if self.rule.phase in (None, "optimizer"):
            return self._otherwise(self.arguments)
        if not (self.framework.gradients_on() and any(map(self.framework.needs_gradient, self.tensors))):
            return self._otherwise(self.arguments) if self.rule.phase == "forward" else (self._plain(self.arguments), NO_GRADIENT)
        ways: list[Way] = [lambda arguments: self._otherwise(arguments)[0], self._plain]
        forward, backward = ways if self.rule.phase == "forward" else ways[::-1]
        try:
            every = frozenset(map(id, self.tensors)) if self._written is None else self._written
            return self.framework.split(forward, backward, self.arguments, every, self._not_split), ""
        except ReturnsArgument:
            return self._plain(self.arguments), VIEW
        except CannotSplit as reason:
            raise self._not_split(str(reason)) from None

    def _plain(self, arguments: Arguments) -> Any:
        try:
            return self._run(arguments)
        except EXPLAINED as error:
            if not (self.rule.deterministic and "deterministic" in str(error)):
                raise
            raise self._failed(str(error)) from error

    def _otherwise(self, arguments: Arguments) -> tuple[Any, str]:
        framework, copies = self.framework, self.framework.copies(self.framework, self.rule)
        try:
            with framework.unseen():
                given = framework.mapped(arguments, copies)
            with framework.without_autocast(self.tensors, self.rule.device):
                result = self._run(given)
        except EXPLAINED as error:
            if type(error) not in EXPLAINED:
                raise
            raise self._failed(str(error)) from error
        views = any(copies.shows(tensor) and copies.original(tensor) is None for tensor in framework.tensors_in(result))
        with framework.unseen():
            wrote = self._what_it_wrote(copies, arguments)
        if views and not (self.rule.level == "module" or wrote):
            return self._run(arguments), VIEW
        with framework.unseen():
            for original, made in wrote:
                framework.write_back(original, made)
            return self._restored(result, copies), ""

    def _what_it_wrote(self, copies: Copies, arguments: Arguments) -> list[tuple[Any, Any]]:
        if self._written is None:
            return copies.written(all_of_them=True)
        places = [n for n, tensor in enumerate(self.tensors) if id(tensor) in self._written]
        if not places:
            return copies.written()
        now = self.framework.tensors_in(arguments)  # of a forward that is computed again they are others
        return copies.written(frozenset(id(now[n]) for n in places))

    def _restored(self, result: Any, copies: Copies) -> Any:
        number = iter(range(1 << 30))

        def restore(tensor: Any) -> Any:
            place = next(number)
            original = copies.original(tensor)
            if original is not None:
                return original
            form = self._returns(place, tensor) if self.framework.is_plain(tensor) else None
            return tensor if form is None else self.framework.in_form(tensor, form)

        return self.framework.mapped(result, restore)

    def _not_split(self, reason: str) -> PolicyFailed:
        got = f"its forward and its backward cannot run in different ways: {reason}"
        return failed(self.rule, self.name, got, "leave out phase, and both run in the same way")

    def _failed(self, got: str) -> PolicyFailed:
        advice = "name another dtype or device, or fewer calls (level, scope, op); see docs/policy.md"
        return failed(self.rule, self.name, got, advice)


# -------------------------------------------------------------------------------------------------- functions and modules
def function_call(
    framework: Framework, rule: PolicyRule, scope: str, name: str, func: Callable[..., Any], args: tuple[Any, ...],
    kwargs: dict[str, Any], alone: Callable[[], AbstractContextManager[Any]],
) -> RuledCall:  # fmt: skip
    """Return the call of a function or operator, called in ``scope``, that ``rule`` is for; ``alone`` makes a block in which no
    rule holds."""
    known: list[Any] = []

    def returns(number: int, result: Any) -> Form | None:
        if not known:
            known.append(forms(framework, name, func, args, kwargs) or form_of(framework, framework.tensors_in((args, kwargs))))
        found = known[0]
        if isinstance(found, tuple):
            form = found[number] if number < len(found) else None
        else:
            form = None if found is None else _narrowed(rule, framework.dtype_name(result), found(result))
        if form is None or rule.returns is None or not result.is_floating_point():
            return form
        return rule.returns, form[1]

    def run(given: Arguments) -> Any:
        with alone():  # in the backward of a split call the policy would meet it again
            return func(*given[0], **given[1])

    where = f"{scope}/{name}" if scope else name
    return RuledCall(framework, rule, where, run, (args, kwargs), returns, framework.written(name, args, kwargs))


def module_call(
    framework: Framework, rule: PolicyRule, scope: str, module: Any, forward: Callable[..., Any], args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> RuledCall:  # fmt: skip
    """Return the call of a module, whose forward is replaced on the object, below its own hooks, with its tensors and those of
    the modules inside while it runs. Raises PolicyFailed where the modules inside have no complete parameters now."""
    name = f"{scope or 'the model'} ({type(module).__name__})"
    places: list[Place] = []
    held: list[Any] = []
    written = frozenset[int]()
    if rule.moves:
        framework.refuse(rule, name, module)
        places, held = framework.held(module)
        written = framework.rewritten(module)
    given_tensors = framework.tensors_in((args, kwargs))
    inputs = [tensor for tensor in given_tensors if _is_number(tensor)]
    form = form_of(framework, inputs or [t for t in held if t.is_floating_point()] or given_tensors)

    def run(given: Arguments) -> Any:
        with holding(places, held, given[2]):
            return forward(*given[0], **given[1])

    def returns(_: int, result: Any) -> Form | None:
        if form is None:
            return None
        found, own = form(result), framework.dtype_name(result)
        if rule.returns is not None and result.is_floating_point():
            return rule.returns, found[1]
        if any(framework.autocast([*inputs, *held])):  # which dtype it would have had only its code knows; autocast takes any
            return own, found[1]
        return _narrowed(rule, own, found)

    return RuledCall(framework, rule, name, run, (args, kwargs, tuple(held)), returns, written)


def _is_number(tensor: Any) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _narrowed(rule: PolicyRule, own: str, form: Form) -> Form:
    """Return the form in which to return a result: its own dtype unless the rule can have made it from the one expected."""
    made = rule.dtype is not None and WIDER[rule.dtype].get(form[0]) == own
    return (form[0] if made else own), form[1]


# -------------------------------------------------------------------------------------- what a call would have returned
_known: dict[Any, tuple[Form, ...] | None] = {}


def forms(
    framework: Framework, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Form, ...] | None:
    """Return dtype and device of each tensor that a function would return, None where its inputs tell (`form_of`). Where they are
    of several dtypes, or autocast or an argument chooses one, the call runs once in its own way, on copies and out of every
    sight, and what is learned holds for all calls that look alike."""
    tensors = framework.tensors_in((args, kwargs))
    cast = framework.autocast(tensors)
    plain = (
        framework.dtypes_follow(name) and not any(cast)
        and len({framework.dtype_name(tensor) for tensor in tensors if _is_number(tensor)}) == 1
        and len({str(framework.device_of(tensor)) for tensor in tensors}) == 1
        and not any(framework.names(value) == "dtype" for value in (*args, *kwargs.values()))
    )  # fmt: skip
    if plain:
        return None
    key = name, cast, _signature(framework, args), _signature(framework, kwargs)
    if key not in _known:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = _tried(framework, func, args, kwargs)
    return _known[key]


def _signature(framework: Framework, value: Any) -> Any:
    """Describe an argument by what may decide a dtype; sizes and numbers do not."""
    if isinstance(value, (tuple, list)):
        return tuple(_signature(framework, item) for item in value)
    if isinstance(value, dict):
        return tuple((str(key), _signature(framework, item)) for key, item in value.items())
    if isinstance(value, (bool, str)) or framework.names(value):
        return str(value)
    if any(tensor is value for tensor in framework.tensors_in(value)):
        return framework.dtype_name(value), str(framework.device_of(value)), not len(value.shape)
    return type(value)


def _tried(
    framework: Framework, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Form, ...] | None:
    with framework.alone_on_copies(args, kwargs) as (args, kwargs):
        try:
            result = func(*args, **kwargs)
        except Exception:  # noqa: BLE001 - that it fails as it is may be why there is a policy; the inputs have to tell then
            return None
    return tuple((framework.dtype_name(tensor), framework.device_of(tensor)) for tensor in framework.tensors_in(result))


def form_of(framework: Framework, inputs: list[Any]) -> Callable[[Any], Form] | None:
    """Return a function that gives the form of a result as promoted from the inputs; None without inputs."""
    if not inputs:
        return None
    device = framework.device_of(next((tensor for tensor in inputs if not framework.on_host(tensor)), inputs[0]))
    numbers = [framework.dtype_name(tensor) for tensor in inputs if _is_number(tensor)]
    narrow = framework.promoted(numbers) if numbers else None

    def form(result: Any) -> Form:
        if narrow is None or not _is_number(result):
            return framework.dtype_name(result), device
        real = _REAL.get(narrow, narrow)
        return (framework.complex_of(real) if result.is_complex() else real), device

    return form


# ---------------------------------------------------------------------------------- forward in one way, backward in another
@dataclass(frozen=True, slots=True)
class _Numbered:
    """Stands for the n-th tensor in a nested value."""

    number: int


class SplitCall:
    """One execution of a call, from its forward to its backward, which computes the forward again where checkpointing would, at
    the cost of one more forward. A call that writes its arguments, returns a view of them, or is differentiated twice cannot be
    split, which is said."""

    def __init__(
        self, tensors_in: Callable[[Any], list[Any]], mapped: Callable[..., Any], forward: Way, backward: Way, arguments: Arguments,
        buffers: frozenset[int],
    ) -> None:  # fmt: skip
        self._tensors_in, self._mapped, self.forward, self.backward = tensors_in, mapped, forward, backward
        distinct = {id(tensor): tensor for tensor in tensors_in(arguments)}
        places = {address: place for place, address in enumerate(distinct)}
        self.tensors: list[Any] = list(distinct.values())
        self.buffers = [id(tensor) in buffers for tensor in self.tensors]
        self._arguments = mapped(arguments, lambda tensor: _Numbered(places[id(tensor)]))
        self._result: Any = None

    def arguments(self, tensors: Sequence[Any]) -> Arguments:
        """Return the arguments with other tensors in their places."""
        return self._filled(self._arguments, tensors)  # type: ignore[no-any-return]

    def keep(self, result: Any, written: Callable[[Any], bool] | None = None) -> tuple[Any, ...]:
        """Take the result apart; anything but tensors, and tensors ``written`` as buffers, is kept for `result`."""
        own = [t for t in self._tensors_in(result) if written is None or not written(t)]
        distinct = {id(tensor): tensor for tensor in own}
        places = {address: place for place, address in enumerate(distinct)}
        self._result = self._mapped(result, lambda t: _Numbered(places[id(t)]) if id(t) in places else t)
        return tuple(distinct.values())

    def result(self, tensors: Sequence[Any]) -> Any:
        """Return the result with the tensors that autograd knows."""
        return self._filled(self._result, tensors)

    def _filled(self, value: Any, tensors: Sequence[Any]) -> Any:
        return self._mapped(value, lambda place: tensors[place.number], kind=_Numbered)
