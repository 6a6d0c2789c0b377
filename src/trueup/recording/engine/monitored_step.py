"""What a monitor makes of a training step, in whichever framework: which numbers, their names, and when the step ends.

A framework's probe adds what only it has: hooks, and a dozen small functions that take tensors and give numbers as tensors of one
element (`Kernels`). A number is computed by `StepProbe.sample`, and `StepProbe.add` says what becomes of it on the host once it is
there. So a framework that builds graphs puts both into the graph, and one that executes at once does it at once.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from trueup.recording.engine.monitoring import (
    PLANS,
    ROUTERS,
    Block,
    Floats,
    Layers,
    Listener,
    Names,
    Numbers,
    Wanted,
    by_layer,
    joined,
    labels,
    same,
)

Made = Callable[[Floats], Sequence[Block]]

ITERATIONS = 8  # of the power iteration: the largest singular value within 1 % but where two are nearly as large
EDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # of a histogram of updates, relative to the weights
GOLDEN = 1.618  # angle between the elements of the vector that it begins with, which is orthogonal to no likely one
DIGEST_BITS = (1 << 52) - 1  # a float64 holds them exactly

LOSS: Names = ("loss",)
SKIPPED: Names = ("skipped",)
SCALE: Names = ("loss_scale",)
COUNTS: Names = ("backward_passes", "tokens", "samples")
CLIP: Names = ("gradient_norm_before_clip", "clip_ratio")
TOTAL: Names = ("gradient_norm",)


def clip_blocks(most: float | None, got: Floats) -> Sequence[Block]:
    """Return the norm before clipping and, where the largest norm is known, the share that clipping leaves."""
    if most is None:
        return [(CLIP[:1], got)]
    ratio = min(1.0, most / got[0]) if got[0] > 0 else 1.0
    return [(CLIP, np.array([got[0], ratio]))]


class Kernels(Protocol):
    """Numbers of tensors: each a tensor of one element on the tensors' device, float32; or all in an array where they are on the
    host already. What is said to come after another thing comes after all of it."""

    def size(self, tensor: Any) -> int:
        """How many elements this rank holds; on the host."""

    def norms(self, tensors: Sequence[Any]) -> Numbers:
        """The l2 norm of each."""

    def differences(self, tensors: Sequence[Any], others: Sequence[Any]) -> Numbers:
        """The l2 norms of the differences, then those of the tensors."""

    def alike(self, tensors: Sequence[Any], others: Sequence[Any]) -> Numbers:
        """Of the pairs the sums of products, the sums of their signs, the l2 norms of the tensors, and of the others."""

    def above(self, momenta: Sequence[Any], variances: Sequence[Any]) -> Numbers:
        """The l2 norms of the variances, of the momenta, and of each pair the sum of the signs of ``variance - momentum ** 2``."""

    def spread(self, tensor: Any, ends: tuple[float, float] | None) -> Numbers:
        """The norm, the smallest and the largest element, how many are not zero; and how many are beyond ``ends``, or at the
        largest number of a half precision; last the number of elements, where only the device knows it."""

    def routes(self, logits: Any) -> list[Any]:
        """The share of the expert that is chosen most, the entropy of the mean choice, the largest size of a logit, and the mean
        entropy of a token's choice."""

    def moments(self, tensor: Any) -> list[Any]:
        """The mean, the kurtosis (3: normal), and how many elements are not finite."""

    def spectrum(self, weight: Any) -> list[Any]:
        """The largest singular value of a matrix, by a power iteration without random numbers, and its Frobenius norm."""

    def similarity(self, rows: Any) -> list[Any]:
        """The mean cosine of two different rows of a matrix."""

    def ends(self, tensors: Sequence[Any]) -> Numbers:
        """The least element of each, then the largest of each."""

    def moved(self, tensors: Sequence[Any], others: Sequence[Any]) -> Numbers:
        """How many elements of each are at most `EDGES` times the other's from it, an edge after another."""

    def matrix(self, weight: Any) -> Any:
        """A weight as a matrix (outputs, inputs), float32; None where it is no matrix."""


class StepProbe(ABC):
    """The half of a probe (`trueup.recording.engine.monitoring.Probe`) that no framework is in."""

    kernels: Kernels

    def __init__(self, listener: Listener, wanted: Wanted, models: Sequence[Any], optimizers: Sequence[Any]) -> None:
        self._listener, self._wanted = listener, wanted
        self._only = [weakref.ref(one) for one in optimizers]
        self._wanted_models = list(models)
        self._models: list[Any] = []
        self._names: dict[int, str] = {}  # of parameters, by identity
        self._plans: dict[tuple[int, bytes], Plan] = {}
        self._primary: weakref.ref[Any] | None = None
        self._host: list[Block] = []
        self._loss: Any = None
        self._counted = np.zeros(3)  # backward passes, tokens, samples of the present step
        self._clipped: list[tuple[Any, float | None]] = []  # norm before, and the largest allowed
        self._copies: list[Any] = []  # of parameters before the step
        self._local: dict[str, Any] = {}  # norms of gradients before reduction
        self._layers: Layers = self.make_layers()

    # ---------------------------------------------------------------- what a framework adds
    @abstractmethod
    def make_layers(self) -> Layers:
        """Return what reads the layers of models."""

    @abstractmethod
    def untracked(self) -> AbstractContextManager[Any]:
        """Return a context in which nothing that is computed gets a gradient."""

    @abstractmethod
    def add(self, numbers: Numbers, made: Made, *, sampled: bool = True) -> None:
        """Add numbers of the present step, and what makes blocks of them on the host; ``sampled``: not of each step."""

    @abstractmethod
    def send(self) -> list[Block] | None:
        """Let the step's numbers travel; return those that have arrived, None where none has."""

    @abstractmethod
    def parameters(self, optimizer: Any) -> list[Any]:
        """Return the parameters of an optimizer."""

    @abstractmethod
    def gradient(self, parameter: Any) -> Any:
        """Return a parameter's gradient, None where it has none."""

    @abstractmethod
    def moment(self, optimizer: Any, parameter: Any, *, second: bool = False) -> Any:
        """Return a parameter's first moment or momentum, or Adam's second moment; None where there is none."""

    @abstractmethod
    def rates(self, optimizer: Any) -> list[Any]:
        """Return the learning rates of an optimizer's groups: numbers, tensors, or None."""

    @abstractmethod
    def copied(self, tensors: Sequence[Any]) -> list[Any]:
        """Return copies that a step in place does not reach."""

    @abstractmethod
    def rank_and_world(self) -> tuple[int | None, int]:
        """Return this process's rank (None when nothing says so) and how many there are."""

    def sample(self, compute: Callable[[], Numbers]) -> Numbers:
        """Compute numbers for `add`."""
        return compute()

    def digests(self) -> None:  # noqa: B027 - a framework may have none
        """Take a digest of each parameter."""

    def settings(self) -> dict[str, Any]:
        """See `Probe`; a framework may not tell."""
        return {}

    def dtypes(self) -> dict[str, list[str]]:
        """See `Probe`."""
        return self._layers.dtypes()

    def scale(self, scaler: Any) -> Any:  # noqa: B027
        """Return the loss scale that a scaler has now, a tensor; None where it has none."""

    # ---------------------------------------------------------------- what all share
    def guarded(self, what: str, call: Callable[..., Any], *given: Any) -> None:
        """Call something of ours, which the training must not feel: without gradients, and what it raises is no matter of it."""
        try:
            with self.untracked():
                call(*given)
        except Exception as error:  # noqa: BLE001 - the training goes on
            self._listener.failed(error, what)

    @property
    def sampled(self) -> bool:
        """Whether the present step has everything."""
        return not self._listener.paused and self._listener.step % self._wanted.apart(self._listener.step) == 0

    def passed(self, gradients: Sequence[Any]) -> None:
        """Take the norm of the gradients that the backward passes of the step have made so far; None: none yet."""
        names = labels("accumulated_gradient_norm", [str(int(self._counted[0]) - 1)])
        held = [one for one in gradients if one is not None]
        if held:
            self.add(self.kernels.norms(held), lambda got: [(names, np.sqrt(np.sum(got * got, keepdims=True)))])

    def lost(self, loss: Any) -> None:
        """Take a loss, a number on its device that the training does not change."""
        self._loss = loss if self._loss is None else self._loss + loss
        self._counted[0] += 1

    def follows(self, optimizer: Any) -> bool:
        """Tell whether an optimizer is one of those that were asked for."""
        return not self._only or any(one() is optimizer for one in self._only)

    def named(self, place: int, parameter: Any) -> str:
        """Return the name of a parameter; one that no model holds has its place."""
        return self._names.setdefault(id(parameter), f"parameter{place}")

    def before(self, optimizer: Any, *, clips: bool = False) -> None:
        """An optimizer is about to step, with gradients in place; ``clips``: it changes them itself first, so their norms are taken
        after it (`gradients`)."""
        held = self.stepped_by(optimizer)
        if held is None:
            return
        whole = self.sampled
        if not (whole and held.plan.compare_with_momentum(self, optimizer, held, norms=not clips)) and not clips:
            held.plan.gradient_norms(self, held.gradients)
        if whole:
            if "extremes" in self._wanted.also:
                held.plan.extremes(self, "gradient", held.gradients)
            self._copies = self.copied(held.parameters)

    def gradients(self, optimizer: Any) -> Stepped | None:
        """Take the norms of the gradients."""
        held = self.stepped_by(optimizer)
        if held is not None:
            held.plan.gradient_norms(self, held.gradients)
        return held

    def stepped_by(self, optimizer: Any) -> Stepped | None:
        """Return the parameters that have a gradient now, None where none has; each is touched once, for none is in the caches."""
        every = self.parameters(optimizer)
        gradients = [self.gradient(one) for one in every]
        mask = bytes([one is not None for one in gradients])
        if 1 not in mask:
            return None
        key = id(optimizer), mask
        if key not in self._plans:
            if len(self._plans) > PLANS:
                self._plans.clear()
            self._plans[key] = Plan([self.named(k, one) for k, one in enumerate(every) if mask[k]], self._names.values())
        if 0 in mask:
            every, gradients = ([one for one, there in zip(held, mask, strict=True) if there] for held in (every, gradients))
        return Stepped(self._plans[key], every, gradients)

    def after(self, optimizer: Any) -> None:
        """An optimizer has stepped: take what that made."""
        held = self.stepped_by(optimizer) if self.sampled and self._copies else None
        if held is not None:
            held.plan.updates(self, optimizer, held.parameters, self._copies)
            if "extremes" in self._wanted.also:
                held.plan.extremes(self, "weight", held.parameters)
            if "updates" in self._wanted.also:
                held.plan.histogram(self, held.parameters, self._copies)
        if self._copies and "spectrum" in self._wanted.also:
            self._spectra(optimizer)
        self._copies = []

    def _spectra(self, optimizer: Any) -> None:
        """Take the spectra of the weights that are matrices, and how alike a router's experts are."""
        kernels, names, found = self.kernels, list[str](), list[Any]()
        for place, one in enumerate(self.parameters(optimizer)):
            if self.gradient(one) is None or kernels.matrix(one) is None:
                continue
            name = self.named(place, one)
            names += [f"spectral_norm/{name}", f"stable_rank/{name}"]
            found += self.sample(partial(self._spectrum, one))
            if name.rpartition(".")[0].rpartition(".")[2] in ROUTERS:
                names.append(f"router_similarity/{name}")
                found += self.sample(partial(self._similarity, one))
        held = tuple(names)
        whole = [not name.startswith("stable_rank") for name in held]

        def made(got: Floats) -> Sequence[Block]:
            with np.errstate(divide="ignore", invalid="ignore"):
                ranks = np.square(got / np.concatenate([[1.0], got[:-1]]))
            return [(same(held), np.where(whole, got, ranks))]

        if found:
            self.add(found, made)

    def _spectrum(self, weight: Any) -> Sequence[Any]:
        return self.kernels.spectrum(self.kernels.matrix(weight))

    def _similarity(self, weight: Any) -> Sequence[Any]:
        return self.kernels.similarity(self.kernels.matrix(weight))

    @property
    def optimizer(self) -> Any:
        """The optimizer whose steps end those of the training; None before the first."""
        return None if self._primary is None else self._primary()

    @property
    def modules(self) -> dict[str, dict[str, Any]]:
        """What the modules are that ran, and who called them."""
        return self._layers.seen

    def end(self, optimizer: Any, *, skipped: Any = False, scaler: Any = None) -> None:
        """End the step, if it is the optimizer that does: the first one of the training."""
        known = self._primary() if self._primary is not None else None
        first = known is None or known is optimizer
        if first and self.idle:
            self._forget()
            self._primary = weakref.ref(optimizer)
            self.over()
            return
        rates = self.rates(optimizer)
        names = labels("lr", [("" if first else f"{type(optimizer).__name__}.") + str(k) for k in range(len(rates))])
        if all(one is None or isinstance(one, (int, float)) for one in rates):
            self._host.append((names, np.array([np.nan if one is None else float(one) for one in rates])))
        else:
            self.add(rates, lambda got: [(names, got)], sampled=False)
        if not first:  # its numbers are of the step that the first optimizer ends
            return
        self._primary = weakref.ref(optimizer)
        self.skipped(skipped)
        scale = None if scaler is None else self.scale(scaler)
        if scale is not None:
            self.add([scale], lambda got: [(SCALE, got)], sampled=False)
        self.finish()

    @property
    def idle(self) -> bool:
        """Whether nothing is to be taken now."""
        return self._listener.paused

    def skipped(self, skipped: Any) -> None:
        """Say whether the optimizer left the weights as they are: loss scaling skipped the step, or gradients are accumulated."""
        self._host.append((SKIPPED, np.array([float(skipped)])))

    def end_step(self) -> None:
        """End the present step, for loops in which no optimizer of the framework does."""
        if self._listener.paused:
            self.over()
            return
        self.skipped(False)
        self.guarded("the end of a step", self.finish)

    def put_loss(self) -> None:
        """Add the loss of the step."""
        if self._loss is not None:
            self.add([self._loss], lambda got: [(LOSS, got)], sampled=False)

    def put_counts(self) -> None:
        """Add what was counted in the step."""
        self._host.append((COUNTS, self._counted))

    def finish(self) -> None:
        """Hand the step over."""
        self.put_loss()
        self.put_counts()
        for total, most in self._clipped[-1:]:
            if total is not None:
                self.add([total], partial(clip_blocks, most), sampled=False)
        if self._local:
            names, norms = list(self._local), list(self._local.values())
            layers, places = by_layer(names)
            local = labels("local_gradient_norm", layers)
            self.add(norms, lambda got: [(local, joined(got, places, len(layers)))])
        self._layers.finish()
        step = self._listener.step
        if self._wanted.digests and step % self._wanted.digests == 0 and self.rank_and_world()[1] > 1:
            self.digests()
        self.hand_over()

    def hand_over(self) -> None:
        """Send the numbers of the step; it is over once they are there."""
        arrived = self.send()
        self._forget()
        if arrived is not None:
            self._listener.arrived(arrived)
            self.over()

    def over(self) -> None:
        """The present step is over."""
        self._listener.ended()
        self._layers.awake = self.sampled

    def _forget(self) -> None:
        self._loss, self._counted, self._clipped, self._local = None, np.zeros(3), [], {}


class Stepped(NamedTuple):
    """What an optimizer steps with: the parameters that have a gradient, and what is taken of them."""

    plan: Plan
    parameters: list[Any]
    gradients: list[Any]


class Plan:
    """Names of series for one set of parameters with gradients."""

    def __init__(self, names: Sequence[str], known: Iterable[str]) -> None:
        self._layers, self._places = by_layer(names, known)
        self._labels = {
            kind: labels(kind, self._layers)
            for kind in (
                "gradient_norm", "update_ratio", "weight_norm", "momentum_norm", "variance_norm", "momentum_to_variance",
                "momentum_above_variance", "gradient_momentum_cosine", "gradient_momentum_agreement",
            )
        }  # fmt: skip

    def _of_layers(self, got: Floats) -> Floats:
        return joined(got, self._places, len(self._layers))

    def _sums(self, got: Floats) -> Floats:
        found: Floats = np.bincount(self._places, got, len(self._layers)).astype(np.float64)
        return found

    def gradient_norms(self, probe: StepProbe, gradients: Sequence[Any], clipped: Callable[[Floats], Floats] | None = None) -> None:
        """Take the norm of each layer's gradient and of all; ``clipped`` makes of the norms those after clipping."""

        def made(got: Floats) -> Sequence[Block]:
            with np.errstate(over="ignore", invalid="ignore"):
                return self._norms(got if clipped is None else clipped(got))

        probe.add(probe.kernels.norms(gradients), made, sampled=False)

    def _norms(self, held: Floats) -> list[Block]:
        layers = self._of_layers(held)
        return [(TOTAL, np.sqrt(np.sum(held * held, keepdims=True))), (self._labels["gradient_norm"], layers)]

    def compare_with_momentum(self, probe: StepProbe, optimizer: Any, held: Stepped, *, norms: bool = False) -> bool:
        """Take the cosine of gradient and momentum, and the share of elements whose signs agree, before the step mixes them; with
        ``norms`` those of gradients, too, which are read once then. Return False where there is no momentum yet."""
        momenta = [probe.moment(optimizer, one) for one in held.parameters]
        if any(one is None for one in momenta):
            return False
        kernels = probe.kernels
        sizes = self._sums(np.array([float(kernels.size(one)) for one in momenta]))

        def made(got: Floats) -> Sequence[Block]:
            dots, agree, of_gradients, of_momenta = got.reshape(4, -1)
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                size = self._of_layers(of_gradients) * self._of_layers(of_momenta)
                cosine = np.where(size > 0, self._sums(dots) / size, 0.0)  # a zero has no direction
                shares = (1 + self._sums(agree) / sizes) / 2
                return [
                    *(self._norms(of_gradients) if norms else ()),
                    (self._labels["gradient_momentum_cosine"], cosine), (self._labels["gradient_momentum_agreement"], shares),
                ]  # fmt: skip

        probe.add(probe.sample(lambda: kernels.alike(held.gradients, momenta)), made)
        return True

    def extremes(self, probe: StepProbe, what: str, tensors: Sequence[Any]) -> None:
        """Take the least and the largest element of each layer."""
        least, largest = labels(f"{what}_min", self._layers), labels(f"{what}_max", self._layers)

        def made(got: Floats) -> Sequence[Block]:
            low, high = np.full(len(self._layers), np.inf), np.full(len(self._layers), -np.inf)
            with np.errstate(invalid="ignore"):  # a NaN is both ends
                np.minimum.at(low, self._places, got[: len(self._places)])
                np.maximum.at(high, self._places, got[len(self._places) :])
            return [(least, low), (largest, high)]

        probe.add(probe.sample(lambda: probe.kernels.ends(tensors)), made)

    def histogram(self, probe: StepProbe, parameters: Sequence[Any], copies: Sequence[Any]) -> None:
        """Take which share of each layer's elements moved by at most so much of what they were."""
        names = same(tuple(f"update_within_{edge:.0e}/{layer}" for edge in EDGES for layer in self._layers))
        sizes = self._sums(np.array([float(probe.kernels.size(one)) for one in parameters]))

        def made(got: Floats) -> Sequence[Block]:
            return [(names, np.concatenate([self._sums(one) / sizes for one in got.reshape(len(EDGES), -1)]))]

        probe.add(probe.sample(lambda: probe.kernels.moved(parameters, copies)), made)

    def updates(self, probe: StepProbe, optimizer: Any, parameters: Sequence[Any], copies: Sequence[Any]) -> None:
        """Take what the step made: the ratio of update and weights, and the moments."""
        kernels = probe.kernels
        if len(copies) == len(parameters):

            def ratio(got: Floats) -> Sequence[Block]:
                made, held = (self._of_layers(half) for half in got.reshape(2, -1))
                with np.errstate(divide="ignore", invalid="ignore"):
                    return [(self._labels["update_ratio"], made / held), (self._labels["weight_norm"], held)]

            probe.add(probe.sample(lambda: kernels.differences(parameters, copies)), ratio)
        momenta = [probe.moment(optimizer, one) for one in parameters]
        if any(one is None for one in momenta):
            return
        variances = [probe.moment(optimizer, one, second=True) for one in parameters]
        if any(one is None for one in variances):
            probe.add(probe.sample(lambda: kernels.norms(momenta)), lambda got: [
                (self._labels["momentum_norm"], self._of_layers(got))
            ])  # fmt: skip
            return
        sizes = self._sums(np.array([float(kernels.size(one)) for one in momenta]))

        def moments(got: Floats) -> Sequence[Block]:
            of_v, of_m, larger = got.reshape(3, -1)
            v, m = self._of_layers(of_v), self._of_layers(of_m)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where(m == 0, 0.0, m / np.sqrt(v))  # nothing was stepped yet
                return [
                    (self._labels["momentum_norm"], m), (self._labels["variance_norm"], v),
                    (self._labels["momentum_to_variance"], ratio),
                    (self._labels["momentum_above_variance"], (1 - self._sums(larger) / sizes) / 2),
                ]  # fmt: skip

        probe.add(probe.sample(lambda: kernels.above(momenta, variances)), moments)
