"""The rule by which training steps end when nobody calls `step()`.

A step ends where the first forward begins after all of its optimizers have stepped; which those are the first step tells: the
ones that hold parameters of the modules that ran in it. Where optimizers turn out to step in no fixed pattern, each optimizer's
step with a forward after it ends a step.

The rule sees only the order of events, so two runs of one program count alike, on whatever device.
"""

from __future__ import annotations

from collections.abc import Callable


class Steps:
    """Tells from forwards and optimizer steps when a training step ends. Optimizers are numbers.

    Each event returns whether the present step ends, for forwards and begun optimizer steps *before* the event; whoever asks
    then calls `ended`.
    """

    def __init__(self) -> None:
        self.manual = False
        """Whether `step()` was called: from then on only it ends steps."""
        self.irregular = False
        """Whether an optimizer stepped twice in a step or joined later: no pattern tells what an iteration is."""
        self.stepped: set[int] = set()
        """Optimizers that have stepped in the present step."""
        self.pattern: frozenset[int] | None = None
        """The optimizers of a step, known after the first."""
        self._forward = False
        self._waiting = False
        self._over = False
        """Whether an optimizer ended a step, and nothing that this hears of came since."""

    def by_hand(self) -> bool:
        """`step()` was called: return whether the present step ends, or the optimizer's step ended it just before."""
        ends, self.manual = self.manual or not self._over, True
        return ends

    def forward(self, *, inside: bool, others: Callable[[], bool]) -> bool:
        """A forward of a model begins.

        Args:
            inside: an optimizer's step is under way, which evaluates a closure.
            others: asked in the first step: does an optimizer that has not stepped hold parameters that ran?
        """
        self._over = False
        over = bool(self.stepped) and not (self.manual or inside or self._waiting)
        if over and not self.irregular and self._incomplete(others):
            self._waiting = True
            over = False
        if not over:
            self._forward = True
        return over

    def begin(self, optimizer: int) -> bool:
        """An optimizer begins to step."""
        self._over = False
        again = optimizer in self.stepped
        if again and not self._waiting:  # nothing ran since: the step is over (LBFGS runs its forwards inside)
            return not self.manual
        if again or (self.pattern is not None and optimizer not in self.pattern):
            self.irregular = True
        return False

    def end(self, optimizer: int) -> bool:
        """An optimizer has stepped, or was told to skip its step. Without forwards nothing else tells where a step ends."""
        self.stepped.add(optimizer)
        self._waiting = False
        self._over = not (self._forward or self.manual)
        return self._over

    def ended(self) -> None:
        """The present step has ended."""
        if self.pattern is None and self._forward and self.stepped:
            self.pattern = frozenset(self.stepped)
        self.stepped.clear()
        self._forward = self._waiting = False

    def _incomplete(self, others: Callable[[], bool]) -> bool:
        return others() if self.pattern is None else not self.pattern <= self.stepped
