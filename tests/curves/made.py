"""Made-up trainings: a loss that falls, with the noise of its data order and of its run."""

from __future__ import annotations

import numpy as np

from trueup.analysis.curves.run import Run, Series


def losses(seed: int, steps: int = 400, *, off: float = 0.0, run: float = 0.001, own: int = 0, since: int = 0) -> np.ndarray:
    """``off``: relative shift from step ``since`` on; ``run``: deviation from run to run; ``own``: tells runs of one seed apart."""
    at = np.arange(1, steps + 1)
    data, alone = np.random.default_rng(seed), np.random.default_rng([seed, own])
    noise = data.normal(0, 0.01, steps) + alone.normal(0, 0.001, steps) + alone.normal(0, run)
    return (2 + 3 * at**-0.5) * np.exp(noise + off * (at > since))


def made(seed: int, name: str = "", **options: float) -> Run:
    values = losses(seed, **options)  # type: ignore[arg-type]
    return Run(name or f"run-seed{seed}", {"loss": Series.of(enumerate(values.tolist(), 1))})
