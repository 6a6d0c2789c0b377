"""The example is an ordinary, repeatable training run on real pictures; its demo draws and cleans up with care."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from nursery import Nursery

FOLDER = Path(__file__).parents[2] / "examples" / "centernet"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"centernet_example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo, centernet = load("demo"), load("centernet")


@pytest.fixture(scope="module")
def data() -> ModuleType:
    return load("data")  # here, for it imports SciPy, in each worker that collects this file


def test_loss_falls_and_a_second_run_repeats_it(nursery: Nursery, tmp_path: Path) -> None:
    long, short = (nursery.script(tmp_path / steps, FOLDER / "train.py", "--steps", steps) for steps in ("30", "3"))
    assert (long.wait(), short.wait(), long.complained) == (0, 0, "")
    lines = long.said.splitlines()
    assert short.said.splitlines() == lines[:3]
    losses = [float(re.match(r"step \d+ loss (\S+) heat \S+ size \S+ offset \S+$", line)[1]) for line in lines]
    assert len(losses) == 30
    assert np.mean(losses[-5:]) < 0.5 * losses[0]


def test_train_knows_nothing_of_capture() -> None:
    assert "capture" not in (FOLDER / "train.py").read_text()


@pytest.mark.parametrize("option", ["--fault", "--noise"])
def test_a_fault_needs_the_simulated_device(option: str, nursery: Nursery, tmp_path: Path) -> None:
    run = nursery.script(tmp_path / "log", FOLDER / "train.py", "--device", "cpu", option, "any")
    assert run.wait() == 2
    assert "--fault and --noise need --device npu: only the simulated accelerator can be told to differ" in run.complained


def test_boxes_lie_in_their_photograph(data: ModuleType) -> None:
    for name in data.NAMES:
        height, width = data.photograph(name).shape[:2]
        for label, (left, top, right, bottom) in data.BOXES[name]:
            assert label in data.CLASSES
            assert 0 <= left < right <= width, (name, label)
            assert 0 <= top < bottom <= height, (name, label)


def test_a_batch_has_a_peak_and_a_cell_for_every_object(data: ModuleType) -> None:
    batch = next(data.batches(batch_size=14, seed=0))
    assert batch["image"].shape == (14, 3, 96, 96)
    assert batch["heat"].shape == (14, len(data.CLASSES), 24, 24)
    objects = batch["mask"].bool()
    assert objects.any(dim=1).sum() >= 12
    for n, k in objects.nonzero().tolist():
        row, column = divmod(int(batch["cell"][n, k]), 24)
        assert batch["heat"][n, :, row, column].max() == 1
        assert 0 <= batch["offset"][n, k].min() <= batch["offset"][n, k].max() <= 1


def test_batches_repeat_with_their_seed_and_differ_without(data: ModuleType) -> None:
    first, same, other = (next(data.batches(7, seed))["image"] for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("box", [(10.0, 14.0), (3.0, 30.0), (1.0, 1.0)])
def test_gaussian_radius_keeps_the_overlap_and_no_more(data: ModuleType, box: tuple[float, float]) -> None:
    height, width = box
    r = data.gaussian_radius(height, width, overlap=0.7)
    common = (height - r) * (width - r)
    shifted = common / (2 * height * width - common)
    shrunk = (height - 2 * r) * (width - 2 * r) / (height * width)
    grown = height * width / ((height + 2 * r) * (width + 2 * r))
    assert min(shifted, shrunk, grown) == pytest.approx(0.7)


def test_a_perfect_prediction_costs_next_to_nothing(data: ModuleType) -> None:
    batch = next(data.batches(batch_size=7, seed=0))
    grid = batch["heat"].shape[-1]
    outputs = {"heat": torch.where(batch["heat"] == 1, 20.0, -20.0)}
    for key in ("size", "offset"):
        field = torch.zeros(7, 2, grid * grid)
        for n, k in batch["mask"].nonzero().tolist():
            field[n, :, batch["cell"][n, k]] = batch[key][n, k]
        outputs[key] = field.view(7, 2, grid, grid)
    assert all(term < 1e-3 for term in centernet.losses(outputs, batch).values())


def test_curves_mark_both_runs_and_survive_nan() -> None:
    assert demo.curves([3.0, 2.0, 1.0], [3.0, 3.0, float("nan")], rows=3) == "\n".join(
        [
            "    3.000 | * x",
            "    2.000 |   o",
            "    1.000 |     o",
            "     step | 0 1 2",
            "            o cpu   x npu   * both",
        ]
    )


def test_outcome_says_worse_only_when_it_is() -> None:
    assert demo.outcome([2.0, 1.0], [2.0, 1.3]) == (
        "The same model, data and seed, no error, no NaN; but on npu the loss converges worse.\n"
        "mean loss of the last steps: cpu 1.500, npu 1.650 (+10%)"
    )
    assert demo.outcome([2.0, 1.0], [2.0, 1.0]) == (
        "The same model, data and seed, no error, no NaN; the curves alone do not give the fault away.\n"
        "mean loss of the last steps: cpu 1.500, npu 1.500 (+0%)"
    )


def test_clear_deletes_only_what_a_demo_left(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    for directory, file in ((mine, "manifest.json"), (other, "thesis.tex")):
        directory.mkdir()
        (directory / file).touch()
    demo.clear(mine, "manifest.json")
    assert not mine.exists()
    with pytest.raises(demo.DemoError, match=r"in the way and holds no manifest\.json: move it away and start"):
        demo.clear(other, "manifest.json")
    assert other.exists()
