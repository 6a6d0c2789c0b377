from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from report.results import HOSTILE, culprit, result
from trueup.doors.cli import main
from trueup.doors.report.saving import RULES, sarif, write_junit
from verdict.captures import Recording

ROOT = Path(__file__).parents[2]


def read(file: Path) -> ElementTree.Element:
    return ElementTree.fromstring(file.read_text("utf-8"))


def test_junit_has_the_comparison_and_each_culprit(tmp_path: Path) -> None:
    stack = ("/usr/lib/python3.11/site-packages/torch/nn/f.py:9 in lstm", "/home/me/net.py:57 in forward")
    made = result(culprits=(culprit(stack=stack), culprit(scope=HOSTILE, source=None, stack=())))
    suite = read(write_junit(made, tmp_path / "new/junit.xml"))[0]
    assert {**suite.attrib} == {"name": "trueup compare", "tests": "3", "failures": "3", "errors": "0"}
    whole, first, hostile = suite
    assert whole.attrib == {"classname": "trueup.compare", "name": f"{made.candidate.path} against {made.baseline.path}"}
    assert whole[0].text == made.sentence
    assert whole[0].attrib["message"] == made.sentence.splitlines()[0]
    assert first.attrib == {
        "classname": "trueup.culprit", "name": "neck.lstm, backward, step 0, rank 0", "file": "/home/me/net.py", "line": "57",
    }  # fmt: skip
    assert "\x1b" not in hostile.attrib["name"]
    assert "<script>" in hostile.attrib["name"]


@pytest.mark.parametrize(("verdict", "counts"), [("aligned", ("0", "0")), ("inconclusive", ("0", "1")), ("deviates", ("1", "0"))])
def test_junit_is_green_where_runs_are_aligned_alone(tmp_path: Path, verdict: str, counts: tuple[str, str]) -> None:
    suite = read(write_junit(dataclasses.replace(result(verdict), culprits=()), tmp_path / "junit.xml"))[0]
    assert (suite.get("failures"), suite.get("errors")) == counts


def test_sarif_stands_at_the_users_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    source = f"{tmp_path}/models/my net.py:57 in forward"
    here = culprit(source=source, stack=(), confidence="could be rounding", cause="eps differs")
    far = culprit(kind="random", scope="", source="/far/net.py:1 in f", stack=())
    log = sarif(result(culprits=(here, culprit(source=None, stack=()), far)))
    (run,) = log["runs"]
    assert [one["level"] for one in run["results"]] == ["warning", "error", "error"]
    assert run["results"][0]["message"]["text"] == "torch.lstm in neck.lstm, backward, step 0, rank 0: eps differs"
    assert run["results"][2]["message"]["text"].startswith("torch.lstm, backward, step 0, rank 0: ")
    places = [one["locations"][0].get("physicalLocation") for one in run["results"]]
    assert places == [
        {"artifactLocation": {"uri": "models/my%20net.py"}, "region": {"startLine": 57}},
        None,
        {"artifactLocation": {"uri": "file:///far/net.py"}, "region": {"startLine": 1}},
    ]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["operator", "random"]
    assert run["invocations"][0]["exitCode"] == 1


REQUIRED = {
    "log": "version runs", "run": "tool", "tool": "driver", "driver": "name", "rules": "id", "shortDescription": "text",
    "invocations": "executionSuccessful", "toolExecutionNotifications": "message", "results": "message", "message": "text",
    "physicalLocation": "artifactLocation",
}  # fmt: skip
ALLOWED = REQUIRED | {
    "run": "tool invocations results properties", "driver": "name version rules", "rules": "id shortDescription",
    "invocations": "executionSuccessful exitCode toolExecutionNotifications", "toolExecutionNotifications": "message level",
    "results": "message ruleId level locations", "locations": "physicalLocation logicalLocations",
    "physicalLocation": "artifactLocation region", "artifactLocation": "uri", "region": "startLine",
    "logicalLocations": "fullyQualifiedName kind",
}  # fmt: skip
"""What OASIS' schema of SARIF 2.1.0 demands of each object, and of the names that it knows those that are written. The whole schema
found nothing on 2026-11-27."""


def keeps(kind: str, held: Any) -> None:
    if isinstance(held, list):
        for one in held:
            keeps(kind, one)
    elif isinstance(held, dict) and kind != "properties":
        assert set(REQUIRED.get(kind, "").split()) <= set(held) <= set(ALLOWED[kind].split()), kind
        for name, one in held.items():
            keeps("run" if name == "runs" else name, one)
    elif kind == "level":
        assert held in ("none", "note", "warning", "error")
    elif kind in ("text", "uri", "id", "name", "fullyQualifiedName"):
        assert isinstance(held, str)
        assert held
    elif kind == "startLine":
        assert held >= 1


@pytest.mark.parametrize("verdict", ["aligned", "inconclusive", "deviates"])
def test_sarif_is_as_the_standard_has_it(verdict: str) -> None:
    culprits = (culprit(stack=("/me/net.py:3 in f",)), culprit(source=None, stack=()), culprit(scope=HOSTILE))
    log = sarif(dataclasses.replace(result(verdict), culprits=culprits if verdict == "deviates" else ()))
    keeps("log", log)
    assert log["version"] == "2.1.0"


def test_sarif_is_empty_where_runs_are_aligned_alone() -> None:
    counts = {}
    for verdict in ("aligned", "inconclusive", "deviates"):
        found = sarif(dataclasses.replace(result(verdict), culprits=()))["runs"][0]["results"]
        counts[verdict] = [one["ruleId"] for one in found]
    assert counts == {"aligned": [], "inconclusive": ["inconclusive"], "deviates": ["deviates"]}


def test_each_kind_of_finding_is_described() -> None:
    import typing

    from trueup.foundation.model import Finding

    kinds = typing.get_args(typing.get_type_hints(Finding)["kind"])
    assert set(kinds) <= set(RULES)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    made = []
    for factor in (1, 2):
        run = Recording()
        run.call("aten::neg", [np.ones(4, np.float32)], [-factor * np.ones(4, np.float32)])
        made.append(run.write(tmp_path_factory.mktemp("ci") / "run"))
    return made[0], made[1]


def test_compare_writes_both_and_says_where(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Path("report/junit.xml"), Path("report/trueup.sarif")
    line = "trueup compare runs/cpu runs/npu -o report --junit report/junit.xml --sarif report/trueup.sarif"
    assert f"$ {line}\n" in (ROOT / "docs/ci.md").read_text("utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name, run in zip(("cpu", "npu"), runs, strict=True):
        (tmp_path / "runs" / name).symlink_to(run)
    code = main(line.split()[1:])
    assert code == 1
    assert capsys.readouterr().out.splitlines()[-3:] == [f"junit  {files[0]}", "", f"sarif  {files[1]}"]
    assert read(files[0])[0].get("failures") == "2"


@pytest.mark.parametrize(("at", "fail_on", "code", "said"), [
    ((0, 1), "never", 0, "exit-code=1\nverdict=deviates\n"),
    ((0, None), "deviates", 2, "exit-code=2\nverdict=\n"),
])  # fmt: skip
def test_the_action_compares_and_tells(
    runs: tuple[Path, Path], tmp_path: Path, at: tuple[int, int | None], fail_on: str, code: int, said: str
) -> None:
    yaml = pytest.importorskip("yaml")
    action = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
    step = action["runs"]["steps"][-1]
    given = {"baseline": runs[0], "candidate": tmp_path if at[1] is None else runs[1], "report": tmp_path / "r", "options": "-q"}
    values = {name: str(given.get(name, action["inputs"][name].get("default"))) for name in action["inputs"]} | {"fail-on": fail_on}
    environment = {name: values[text[len("${{ inputs.") : -len(" }}")]] for name, text in step["env"].items()}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/trueup").symlink_to(Path(sys.executable).with_name("trueup"))
    search = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    ran = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]], capture_output=True, text=True, check=False,
        env={**os.environ, **environment, "PATH": search, "GITHUB_OUTPUT": str(tmp_path / "out")},
    )  # fmt: skip
    assert (ran.returncode, (tmp_path / "out").read_text()) == (code, said), ran.stderr
    assert (tmp_path / "r/trueup.sarif").exists() == (at[1] is not None)
