# ruff: noqa: E501, PT018 - tables of values
"""`trueup env`: what a machine runs with, what does not go together, and two machines side by side."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from trueup.doors.cli import main
from trueup.foundation.model import TrueupError
from trueup.foundation.settings import conflicts, fact, severity
from trueup.migration.knowledge.environment import Machine, _differences, _governor, _holds, _shared, environments, this_machine

PAGE = (Path(__file__).parents[2] / "docs/env.md").read_text("utf-8")


def env(folder: Path, name: str, **values: str) -> str:
    file = folder / name
    file.write_text("".join(f"{key}={value}\n" for key, value in values.items()) + "HOME=/root\n", "utf-8")
    return str(file)


def test_rows_of_variables_come_before_the_rest_and_say_what_they_do() -> None:
    assert [severity("switch", name) for name in ("INF_NAN_MODE_ENABLE", "HCCL_DETERMINISTIC", "TASK_QUEUE_ENABLE", "odd")] == [
        "changes",
        "may",
        "cannot",
        "may",
    ]
    assert (fact("HCCL_EXEC_TIMEOUT") or {})["default"] == "1836"
    assert fact("HOME") is None
    assert len(conflicts()) >= 18
    for row in conflicts():
        assert row["says"] and row["origin"]
        assert all(re.search(rf"\b{name}\b", row["when"]) for name in row["names"].split())
        assert all(fact(name) is not None or name == "NVIDIA_TF32_OVERRIDE" for name in row["names"].split())


@pytest.mark.parametrize(
    ("term", "values", "holds"),
    [("A", {"A": ""}, True), ("!A", {}, True), ("A=1", {"A": "1"}, True), ("A=1", {}, False), ("A=", {"A": ""}, True), ("A!=0", {"A": "2"}, True),
     ("A!=0", {}, False), ("A!=*x:True*", {}, True), ("A!=*x:True*", {"A": "x:True,y:1"}, False), ("A<B", {"A": "1", "B": "2"}, True),
     ("HCCL_EVENT_TIMEOUT<=HCCL_EXEC_TIMEOUT", {"HCCL_EXEC_TIMEOUT": "3600"}, True), ("HCCL_EVENT_TIMEOUT<=HCCL_EXEC_TIMEOUT", {}, False)],
)  # fmt: skip
def test_conditions(term: str, values: dict[str, str], holds: bool) -> None:
    assert _holds(term, values) == holds


@pytest.mark.parametrize("row", conflicts(), ids=lambda row: row["when"])
def test_each_conflict_is_found_and_a_clean_machine_has_none(row: dict[str, str]) -> None:
    values: dict[str, str] = {}
    for term in row["when"].split():
        name, _, value = term.replace("!=", "=").partition("=")
        if "<" in term:
            small, large = re.split("<=?", term)
            values |= {small: "1", large: "2"}
        elif "!=" in term:
            values.setdefault(name, "2" if value == "0" else "other")
        else:
            values[name] = value.replace("[01]", "1").replace("[1-9]", "2").rstrip("*") if "=" in term else values.get(name, "1")
    assert row["says"] in [one.says for one in Machine("x", values, {}).conflicts]
    assert Machine("x", {"TASK_QUEUE_ENABLE": "2", "HCCL_CONNECT_TIMEOUT": "600"}, {}).conflicts == ()


def test_two_machines_side_by_side(tmp_path: Path) -> None:
    first = env(
        tmp_path,
        "a.txt",
        ACL_OP_SELECT_IMPL_MODE="high_performance",
        TASK_QUEUE_ENABLE="1",
        OMP_NUM_THREADS="8",
        HCCL_EXEC_TIMEOUT="60",
    )
    second = env(tmp_path, "b.txt", OMP_NUM_THREADS="4", HCCL_EXEC_TIMEOUT="60")
    found = environments([first, second])
    assert [(one.name, one.baseline, one.candidate) for one in found.differences] == [
        ("ACL_OP_SELECT_IMPL_MODE", "high_performance", "not set"),
        ("OMP_NUM_THREADS", "8", "4"),
    ]  # TASK_QUEUE_ENABLE=1 is what holds anyway
    assert found.exit_code == 1
    assert (
        found.sentence
        == "ACL_OP_SELECT_IMPL_MODE is high_performance in the first and not set in the second, which changes numbers."
    )
    assert environments([second, second]).sentence == "Nothing that changes numbers differs."
    empty = tmp_path / "c.txt"
    empty.write_text("HOME=/root\n")
    assert [one.name for one in environments([str(empty), first]).differences] == [
        "ACL_OP_SELECT_IMPL_MODE",
        "OMP_NUM_THREADS",
        "HCCL_EXEC_TIMEOUT",
    ]


def test_switches_are_compared_where_both_sides_say_some() -> None:
    capture = Machine("a", {"cudnn.allow_tf32": "True", "OMP_NUM_THREADS": "2"}, {"torch": "2.13.0"})
    file = Machine("b", {"OMP_NUM_THREADS": "4"}, {})
    other = Machine("c", {"cudnn.allow_tf32": "False", "OMP_NUM_THREADS": "2"}, {"torch": "2.12.0"})
    assert [one.name for one in _differences(capture, file)] == ["OMP_NUM_THREADS"]
    assert [(one.name, one.severity) for one in _differences(capture, other)] == [("cudnn.allow_tf32", "changes"), ("torch", "may")]


def test_json_of_another_machine_and_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    monkeypatch.setenv("SOME_TOKEN", "hf_secret")
    saved = tmp_path / "env.json"
    main(["env", "--json", str(saved)])
    document = json.loads(saved.read_text())
    assert document["machines"][0]["values"]["TASK_QUEUE_ENABLE"] == "2"
    assert "hf_secret" not in saved.read_text()
    assert environments([str(saved), str(saved)]).exit_code in (0, 1)
    assert "TASK_QUEUE_ENABLE" in capsys.readouterr().out


def test_what_is_no_environment_is_said(tmp_path: Path) -> None:
    odd = tmp_path / "odd.json"
    for text, got in (
        ('{"schema": "other"}', "JSON of another kind"),
        ("[" * 9, "no line of NAME=value"),
        ("{" + '"a":{' * 5000, "JSON of another kind"),
    ):
        odd.write_text(text)
        with pytest.raises(TrueupError, match=got):
            environments([str(odd)])
    with pytest.raises(TrueupError, match="Too many machines"):
        environments(["a", "b", "c"])
    with pytest.raises(TrueupError, match="cannot be read"):
        environments([str(tmp_path / "none")])


def test_the_host(tmp_path: Path) -> None:
    governor = tmp_path / "governor"
    assert _governor(governor) is None
    governor.write_text("powersave\n")
    advice = _governor(governor)
    assert advice is not None
    assert (advice.got, "cpupower frequency-set -g performance" in advice.remedy) == ("powersave", True)
    governor.write_text("performance\n")
    assert _governor(governor) is None
    assert _shared(tmp_path / "none") is None
    assert "python" in this_machine({}).versions


def test_the_page_s_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
    for part in re.split(r"^==> ", blocks[0][1], flags=re.MULTILINE)[1:]:
        name, _, body = part.partition(" <==\n")
        (tmp_path / name).write_text(body, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["env", "gpu.txt", "npu.txt"]) == 1
    out = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert blocks[1][1].partition("\n")[2].strip() in out


def test_what_changes_numbers_comes_first_and_defaults_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("npu.txt").write_text("ASCEND_LAUNCH_BLOCKING=1\nINF_NAN_MODE_ENABLE=0\nTASK_QUEUE_ENABLE=2\n", "utf-8")
    assert main(["env", "npu.txt"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("INF_NAN_MODE_ENABLE=0 turns Inf and NaN into numbers")
    rows = [line.split()[:4] for line in out.splitlines()]
    assert ["TASK_QUEUE_ENABLE", "2", "1", "stay"] in rows
    assert ["INF_NAN_MODE_ENABLE", "0", "1", "change"] in rows
