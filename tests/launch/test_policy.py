"""`trueup capture --policy`: without an edit of the script, in the manifest and on the terminal; a wrong file runs nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trueup

from .running import cli, said, script, trueup_run

pytestmark = pytest.mark.usefixtures("warm")


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_run_under_a_policy_says_what_it_changed(tmp_path: Path) -> None:
    first = '[[rule]]\nop = "torch.nn.functional.linear"\ndtype = "float64"\n'
    policy = written(tmp_path / "policy.toml", f'{first}[[rule]]\nlevel = "module"\nop = "LSTM"\ndevice = "cpu"\n')
    into = tmp_path / "run"
    run = trueup_run("capture", "--policy", policy, "-o", into, "--", *script("policy_run.py"))
    assert run.returncode == 0, run.stderr
    lines = said(run)
    first = f"{policy}, rule 1 (torch.nn.functional.linear: float64): 2 calls"
    second = f"{policy}, rule 2 (module (LSTM): cpu) changed nothing: no call matched"
    assert f"trueup: policy: {first}" in lines
    assert f"trueup: policy: {second}" in lines
    capture = trueup.open_capture(into)
    assert capture.root["policy"] == {"path": str(policy), "text": policy.read_text()}
    (manifest,) = capture.ranks.values()
    assert [(use["rule"], use["matched"], use["changed"]) for use in manifest["policy"]] == [(1, 2, 2), (2, 0, 0)]
    table = capture.records(["op", "slot", "dtype"], level="api")
    assert {row["dtype"] for row in table.to_pylist() if row["op"] == "torch.nn.functional.linear" and row["dtype"]} == {"bfloat16"}
    shown = trueup_run("show", into)
    assert "".join(f"policy {first}".split()) in "".join(shown.stdout.split())  # wrapped, wherever the path is long


@pytest.mark.parametrize(("text", "part"), [
    ('[[rule]]\nop = "a"\ndevice = "npu"\n', "got:      rule 1: device 'npu' is unknown: expected cpu"),
    ("x = [", "The policy cannot be used; nothing was run with it."),
    (None, "got:      No such file or directory"),
])  # fmt: skip
def test_a_wrong_file_runs_nothing(text: str | None, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "policy.toml"
    if text is not None:
        policy.write_text(text)
    proof = tmp_path / "proof"
    code, _, err = cli(capsys, "capture", "--policy", policy, "-o", tmp_path / "run", "--", "touch", proof)
    assert code == 2
    assert part in err
    assert not proof.exists()
    assert not (tmp_path / "run").exists()


def test_compiled_code_and_a_policy_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = written(tmp_path / "policy.toml", '[[rule]]\nop = "torch.*"\ndevice = "cpu"\n')
    code, _, err = cli(capsys, "capture", "--policy", policy, "--compile", "through", "-o", tmp_path / "run", "--", "true")
    assert code == 2
    assert "exclude each other" in err


def test_a_script_may_apply_its_own(tmp_path: Path) -> None:
    policy = written(tmp_path / "p.toml", '[[rule]]\nop = "torch.nn.functional.linear"\ndtype = "float64"\n')
    source = Path(script("policy_run.py")[1]).read_text().replace(
        "optimizer = ", f"import trueup; trueup.apply_policy(net, {str(policy)!r})\noptimizer = "
    )  # fmt: skip
    own = written(tmp_path / "own.py", source)
    run = trueup_run("capture", "-o", tmp_path / "run", "--", *script("policy_run.py")[:1], own)
    assert f"trueup: policy: {policy}, rule 1 (torch.nn.functional.linear: float64): 2 calls" in said(run)
    rows = trueup.open_capture(tmp_path / "run").records(["level", "op", "dtype"]).to_pylist()
    assert {row["dtype"] for row in rows if row["level"] == "api" and row["op"] == "torch.nn.functional.linear"} == {"bfloat16"}
    manifest = json.loads((tmp_path / "run" / "rank-00000" / "manifest.json").read_text())
    assert manifest["policy"][0]["changed"] == 2
