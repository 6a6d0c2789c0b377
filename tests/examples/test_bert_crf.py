"""The example overflows where its README says so, and its remedy heals it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trueup
from nursery import Nursery

FOLDER = Path(__file__).parents[2] / "examples" / "bert_crf"
SOURCE = str(Path(trueup.__file__).parents[1])


def started(path: Path) -> subprocess.Popen[str]:
    """Start the training with large emissions under `trueup capture`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))}
    script = [sys.executable, str(FOLDER / "train.py"), "--large"]
    command = [sys.executable, "-m", "trueup", "capture", "-o", str(path), "--level", "api", "--", *script]
    return subprocess.Popen(
        command, env=environment | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.usefixtures("warm")
def test_the_crf_is_named_and_float32_heals_it(nursery: Nursery, tmp_path: Path) -> None:
    nursery.load("transformers.models.bert.modeling_bert")
    first = started(tmp_path / "large")
    options = {"healed": ("--large", "--crf-float32"), "small": ()}
    runs = {
        name: nursery.script(tmp_path / f"{name}.log", FOLDER / "train.py", *given, directory=tmp_path / name, level="api")
        for name, given in options.items()
    }
    large, error = first.communicate(timeout=600)
    ends = [(first.returncode, error), *((run.wait(), run.complained) for run in runs.values())]
    assert [end for end in ends if end[0]] == []
    assert "nan" in large
    assert "step 2 loss" in runs["healed"].said
    assert "nan" not in runs["healed"].said + runs["small"].said
    found = trueup.overflow(tmp_path / "large")
    first = found.first
    assert first is not None
    assert (first.kind, first.place.scope, first.place.phase, first.place.op) == ("overflow", "crf", "forward", "torch.Tensor.add")
    assert "bert_crf.py" in str(first.place.source)
    assert (first.matters, found.exit_code) == ("accuracy-relevant", 1)
    assert 'scope = "crf"' in first.policy
    for name in ("healed", "small"):
        result = trueup.overflow(tmp_path / name)
        assert result.exit_code == 0, result.sentence
        assert result.expected, "the attention mask of BERT is the smallest float16"
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    run = [sys.executable, str(FOLDER / "train.py"), "--large"]
    told = subprocess.run(
        [sys.executable, "-m", "trueup", "heal", str(tmp_path / "large"), "--", *run],
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    expected, losses = runs["healed"].said.splitlines(), [line for line in told.stdout.splitlines() if line.startswith("step")]
    assert losses == expected[:2], "the suggested policy does what the option does in the code, for two steps"
    assert told.stdout.count("HEALED  with 1 rule, crf, forward, step 0, rank 0 (torch.Tensor.add) is clean, and the rest") == 1
    assert f'trueup.apply_policy(model, "{tmp_path}/large-healed/policy.toml")' in told.stdout
    assert found.try_next == f"trueup heal {tmp_path / 'large'} -- {' '.join(run)}"
