"""The example overflows where its README says so, and its remedy heals it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import trueup

FOLDER = Path(__file__).parents[2] / "examples" / "bert_crf"
SOURCE = str(Path(trueup.__file__).parents[1])


def started(path: Path, *options: str, policy: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))}
    script = [sys.executable, str(FOLDER / "train.py"), *options]
    command = [sys.executable, "-m", "trueup", "capture", "-o", str(path), "--level", "api", *policy, "--", *script]
    return subprocess.Popen(
        command, env=environment | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_the_crf_is_named_and_float32_heals_it(tmp_path: Path) -> None:
    runs = {"large": ("--large",), "healed": ("--large", "--crf-float32"), "small": ()}
    processes = {name: started(tmp_path / name, *options) for name, options in runs.items()}
    said = {name: (*process.communicate(timeout=200), process.returncode) for name, process in processes.items()}
    assert {name: code for name, (_, _, code) in said.items()} == dict.fromkeys(runs, 0), said
    assert "nan" in said["large"][0]
    assert "nan" not in said["healed"][0] + said["small"][0]
    large = trueup.overflow(tmp_path / "large")
    first = large.first
    assert first is not None
    assert (first.kind, first.place.scope, first.place.phase, first.place.op) == ("overflow", "crf", "forward", "torch.Tensor.add")
    assert "bert_crf.py" in str(first.place.source)
    assert (first.matters, large.exit_code) == ("accuracy-relevant", 1)
    assert 'scope = "crf"' in first.policy
    for name in ("healed", "small"):
        result = trueup.overflow(tmp_path / name)
        assert result.exit_code == 0, result.sentence
        assert result.expected, "the attention mask of BERT is the smallest float16"
    (tmp_path / "policy.toml").write_text(first.policy)
    run = started(tmp_path / "ruled", "--large", policy=("--policy", str(tmp_path / "policy.toml")))
    assert run.communicate(timeout=200)[0] == said["healed"][0], "the suggested policy does what the option does in the code"
    assert trueup.overflow(tmp_path / "ruled").exit_code == 0
