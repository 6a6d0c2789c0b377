"""What the cases of this folder share: a training that is recorded, and a kernel that is broken below all that records."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import trueup
import zoo
from trueup.foundation.model import Finding, Result

Change = Callable[..., Tensor]
"""Takes the right result and the arguments, returns the wrong result; in place where the operator is."""


@contextmanager
def broken(op: str, change: Change, nth: int | None = 0) -> Iterator[list[int]]:
    """Replace the CPU's kernel of an operator (``aten::_softmax``): no call more, no argument other, another result.

    Args:
        nth: which execution goes wrong, from 0; None for each.

    Yields:
        the numbers of the executions that went wrong so far.
    """
    kernel = torch.library.get_kernel(op, "CPU")
    seen = 0
    wrong: list[int] = []

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        result = kernel.call_boxed(keyset, *args, **kwargs)
        seen += 1
        if nth not in (None, seen - 1):
            return result
        wrong.append(seen - 1)
        with torch._C.DisableTorchFunction(), _disable_current_modes():  # what the broken kernel computes is no call
            return change(result, *args, **kwargs)

    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is overridden is the point
            library.impl(op.removeprefix("aten::"), run, "CPU", with_keyset=True)
        yield wrong
    finally:
        library._destroy()


def noisy(deviation: float) -> Change:
    """Return a change that adds normal noise of that standard deviation, the same in each run."""
    source = torch.Generator().manual_seed(99)
    return lambda result, *_: result + deviation * torch.randn(result.shape, generator=source)


def record(directory: Path, step: Callable[[], Any], model: Any = None, *, steps: int = 1, **options: Any) -> Path:
    """Run training steps under a capture, of detail ``stats`` unless told otherwise, and return its directory."""
    with trueup.capture(directory, model=model, on_error="stop", **options) as capture:
        for _ in range(steps):
            step()
            capture.step()
    return directory


def named(result: Result) -> Finding:
    """Return the first culprit of runs that must deviate; what was said instead shows where it does not."""
    assert result.verdict == "deviates", result.sentence
    assert result.culprit is not None
    return result.culprit


def told(result: Result) -> str:
    """Return all that a result says in words: the sentence, the notes, what is unmatched."""
    return "\n".join([result.sentence, *result.notes, *(finding.sentence for finding in result.unmatched)])


def trained(
    folder: Path, model: str = "gpt2", alter: Callable[[Any], Any] | None = None, *, steps: int = 1, **options: Any
) -> Path:
    """Record the training of a model of the zoo on the CPU.

    Args:
        alter: takes the `zoo.Training` before its first step and changes it, or returns a context to train in.
    """
    training = zoo.build(model, "cpu")
    around = None if alter is None else alter(training)
    with around if around is not None else nullcontext():
        return record(folder, training.step, training.model, steps=steps, **options)
