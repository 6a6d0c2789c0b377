"""`trueup_golden` in the hands of a project: pytest runs tests of a folder of its own, which record, compare and fail."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import trueup
from launch.running import environment
from trueup.doors import pytest_plugin
from trueup.doors.pytest_plugin import Made, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytest_plugins = ["pytester"]

BLOCK = """
import os, pytest, torch

def block(scale=1.0):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    with torch.no_grad():
        model[3].weight *= scale
    return model

def step(model):
    model(torch.ones(5, 6)).square().mean().backward()
"""
PAGE = (Path(__file__).parents[2] / "docs/ci.md").read_text("utf-8")
TEST = PAGE.split("```python\n")[1].split("```")[0]
HERE = re.escape("goldens/test_block/test_block/torch-2.13.0-cpu")


@pytest.fixture(scope="module", autouse=True)
def _loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Load what a comparison loads: pytester takes away what its tests loaded, so each would load it anew."""
    runs = [tmp_path_factory.mktemp("loaded") / name for name in "ab"]
    for run in runs:
        with trueup.capture(run):
            torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    assert trueup.compare(*runs).verdict != "aligned"


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder whose pytest has the plugin, by its name here, whether or not this environment knows its entry point."""
    monkeypatch.delenv("CI", raising=False)
    pytester.makeconftest("pytest_plugins = ['trueup.doors.pytest_plugin']")
    return pytester


def ran(project: pytest.Pytester, *words: str) -> pytest.RunResult:
    return project.runpytest_inprocess("-p", "no:trueup", "-p", "no:cacheprovider", *words)


def goldens(project: pytest.Pytester) -> list[str]:
    return sorted(str(path.parent.relative_to(project.path)) for path in project.path.glob("goldens/**/torch*/manifest.json"))


def test_it_is_an_entry_point_of_the_distribution() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    assert tomllib.loads(text)["project"]["entry-points"]["pytest11"] == {"trueup": pytest_plugin.__name__}


def test_the_first_run_records_the_next_compares_and_a_fault_is_named(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.makepyfile(test_block=TEST)
    first = ran(project)
    first.assert_outcomes(passed=1)
    first.stdout.re_match_lines([".*trueup goldens.*", f"recorded {HERE}: commit it"])
    assert goldens(project) == ["goldens/test_block/test_block/torch-2.13.0-cpu"]
    assert not list(project.path.rglob("lock"))

    again = ran(project, "-rA")
    again.assert_outcomes(passed=1)
    again.stdout.re_match_lines([f"trueup: compared with .*/{HERE} \\(the same version and device\\)"])
    again.stdout.no_re_match_line(".*trueup goldens.*")

    monkeypatch.setenv("EPS", "1e-1")
    wrong = ran(project)
    wrong.assert_outcomes(failed=1)
    wrong.stdout.re_match_lines([
        r"DEVIATES  .*eps.*",
        rf"  golden:   {HERE} \(the same version and device\)",
        r"  this run: .*/run",
        rf"  look:     trueup compare {HERE} .*/run -o report",
        r"  accept:   pytest test_block.py::test_block --trueup-record",
    ])  # fmt: skip
    assert "Traceback" not in wrong.stdout.str()
    monkeypatch.setenv("CI", "true")
    ran(project, "--trueup-record").assert_outcomes(passed=1)  # whoever asks for it gets it
    ran(project).assert_outcomes(passed=1)


def test_a_missing_golden_fails_where_ci_is_set(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    project.makepyfile(test_block=TEST)
    refused = ran(project)
    refused.assert_outcomes(failed=1)
    refused.stdout.re_match_lines([
        "test_block.py::test_block has no golden.",
        "  where:    goldens/test_block/test_block",
        "  expected: torch-2.13.0-cpu, or one of another version or device",
        "  got:      none; CI is set, where none is recorded",
        "  next:     pytest test_block.py::test_block --trueup-record, where the test is right, and commit it",
    ])  # fmt: skip
    assert goldens(project) == []


def test_a_golden_of_another_version_stands_in_and_that_is_said(project: pytest.Pytester) -> None:
    project.makepyfile(test_block=TEST)
    ran(project)
    folder = project.path / "goldens/test_block/test_block"
    (folder / "torch-2.13.0-cpu").rename(folder / "torch-2.12.1-npu")
    ran(project).stdout.re_match_lines(
        ["compared torch-2.13.0-cpu with goldens/test_block/test_block/torch-2.12.1-npu: another device"]
    )


def test_a_test_that_fails_by_itself_leaves_no_golden(project: pytest.Pytester) -> None:
    project.makepyfile(test_block=TEST + "    assert False\n")
    ran(project, "--trueup-record").assert_outcomes(failed=1)
    assert goldens(project) == []


def test_parameters_and_names_have_goldens_of_their_own_beside_workers(project: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    project.makepyfile(test_block=f"""{BLOCK}
class TestAll:
    @pytest.mark.trueup(level="module", criterion="bitwise")
    @pytest.mark.parametrize("scale", ["1", "../2", "..-2"])
    def test_scaled(self, trueup_golden, scale):
        for name in ("first", "second"):
            with trueup_golden(model := block(float(scale[-1])), name=name):
                step(model)
""")
    ran(project, "-n", "1").assert_outcomes(passed=3)  # a worker costs an import of PyTorch; that it is another process counts
    ran(project).assert_outcomes(passed=3)
    found = goldens(project)
    assert len(found) == 6
    assert all(path.startswith("goldens/test_block/TestAll/test_scaled-") for path in found)
    assert "goldens/test_block/TestAll/test_scaled-1/first/torch-2.13.0-cpu" in found
    assert len({Path(path).parents[1] for path in found}) == 3
    assert {Path(path).parent.name for path in found} == {"first", "second"}


def test_a_marker_that_cannot_be_used_is_refused(project: pytest.Pytester) -> None:
    lines = ["trueup(tolerance=1)", "trueup(level='kernel')", "trueup(criterion='nosuch.toml')"]
    tests = [TEST.partition("def ")[2].replace("test_block(", f"test_{k}(") for k in range(3)]
    made = "".join(f"@pytest.mark.{line}\ndef {test}" for line, test in zip(lines, tests, strict=True))
    project.makepyfile(test_block=f"import os, pytest, torch\n{made}")
    ran(project)  # the last records: the criterion is not asked yet
    refused = ran(project)
    refused.assert_outcomes(errors=1, failed=2)
    refused.stdout.re_match_lines_random([
        ".*knows level, detail, criterion, mapping, by name, and not 'tolerance'", ".*kernel.*", ".*nosuch.toml.*",
    ])  # fmt: skip


COMMAND = """
import os, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
(model(torch.ones(3, 4)).square().mean() * float(os.environ.get("SCALE", 1))).backward()
"""


def test_a_command_is_run_and_compared(project: pytest.Pytester, warm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That every rank of torchrun is followed is tested in tests/launch/test_ranks.py, of the same way in."""
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    project.makepyfile(train=COMMAND)
    project.makepyfile(test_command=f"def test_it(trueup_golden):\n    trueup_golden.run([{warm!r}, 'train.py'], timeout=600)\n")
    ran(project).assert_outcomes(passed=1)
    assert goldens(project) == ["goldens/test_command/test_it/torch-2.13.0-cpu"]
    monkeypatch.setenv("SCALE", "1.5")
    wrong = ran(project)
    wrong.assert_outcomes(failed=1)
    wrong.stdout.re_match_lines(["DEVIATES.*"])


def test_one_rank_is_no_whole_run(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    project.makepyfile(test_block=TEST)
    ran(project).stdout.re_match_lines(["A golden is of a whole run, and this pytest is one of 2 ranks.", "  where:    test.*"])


def test_a_command_that_fails_or_records_nothing_fails(project: pytest.Pytester, warm: str) -> None:
    project.makepyfile(test_block=f"""
import pytest
@pytest.mark.parametrize("code", ["raise SystemExit(5)", "print('hello')"])
def test_command(trueup_golden, code):
    trueup_golden.run([{warm!r}, "-c", code])
""")
    failed = ran(project)
    failed.assert_outcomes(failed=2)
    failed.stdout.re_match_lines(["The command did not end well, or recorded nothing.", ".*", ".*", "  got:      5"])


def test_goldens_are_chosen_from_the_most_specific_down(tmp_path: Path) -> None:
    def chosen(made: Made, names: Sequence[str]) -> str:
        shutil.rmtree(tmp_path)
        for name in names:
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / "manifest.json").touch()
        found = nearest(tmp_path, made)
        return "" if found is None else f"{found[0].name}: {found[1]}"

    here = Made("torch", "2.13.0", "npu")
    names = ["paddle-3.3.1-npu", "torch-2.13.0-cuda", "torch-2.9.1-npu", "torch-2.13.1-npu", "torch-2.13.0-npu"]
    assert chosen(here, names) == "torch-2.13.0-npu: the same version and device"
    assert chosen(here, names[:4]) == "torch-2.13.1-npu: the same minor version and device"
    assert chosen(here, [*names[:3], "torch-2.10.0-npu"]) == "torch-2.10.0-npu: another version, the same device"
    assert chosen(here, names[:2]) == "torch-2.13.0-cuda: another device"
    assert chosen(here, names[:1]) == "paddle-3.3.1-npu: another framework"
    assert chosen(here, ["notes", ".torch-2.13.0-npu.tmp"]) == ""
