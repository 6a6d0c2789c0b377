"""The flow of README.md, docs/your-runs.md, docs/export-metrics.md and the demo's page, as typed: capture, compare, look."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

import trueup
from end_to_end.executing import lines_of, wrong
from nursery import Nursery
from readers import writers
from trueup.doors.cli import main
from trueup.doors.report.document import schema

ROOT = Path(__file__).parents[2]
COMPARE = "compare runs/cpu runs/npu -o report"
NO_COMPILER = "ignore:trueup's compiled statistics kernel is missing:RuntimeWarning"

Run = subprocess.CompletedProcess[str]


def trueup_(python: str, *arguments: str | Path, cwd: Path = ROOT) -> Run:
    source = str(Path(trueup.__file__).parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": NO_COMPILER,
        "COLUMNS": "200",
    }
    command = [python, "-m", "trueup", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment)


@pytest.fixture(scope="module")
def runs(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Capture the CPU, the broken and the healthy accelerator, as the README says."""
    desk = tmp_path_factory.mktemp("desk")
    (desk / "examples").symlink_to(ROOT / "examples")
    broken = lines_of(ROOT / "README.md")[1]
    for line in (*lines_of(ROOT / "README.md")[:2], broken.replace("runs/npu", "runs/healthy").partition(" --fault")[0]):
        command = [nursery.python if word == "python" else word for word in shlex.split(line)]
        run = trueup_(nursery.python, *command, *(["--steps", "3"] if "healthy" in line else []), cwd=desk)
        assert run.returncode == 0, run.stderr
        assert len(re.findall(r"^step \d loss ", run.stdout, re.M)) == 3
        assert re.fullmatch(rf"trueup: captured [\d,]+ slots over 3 steps into {desk}/runs/\w+\n", run.stderr)
    return desk / "runs"


@pytest.fixture(scope="module")
def compared(runs: Path, nursery: Nursery) -> tuple[Run, Path]:
    """Compare as the first line after the captures does, which is the same on all pages."""
    return trueup_(nursery.python, *COMPARE.split(), cwd=runs.parent), runs.parent / "report"


def test_the_broken_operator_is_named_first(compared: tuple[Run, Path]) -> None:
    run, _ = compared
    assert (run.returncode, run.stderr) == (1, "")
    first, second, third, *_ = run.stdout.splitlines()
    assert first.startswith("DEVIATES  first culprit: neck.lstm, backward, step 0, rank 0  (torch.lstm / aten::")
    assert second.strip().startswith("inputs agree (rel. L2 ")
    assert re.fullmatch(r"your code: \S*centernet\.py:\d+ in forward", third.strip())


def test_verdict_json(compared: tuple[Run, Path]) -> None:
    _, report = compared
    verdict = json.loads((report / "verdict.json").read_text(), parse_constant=pytest.fail)
    assert (verdict["verdict"], verdict["exit_code"]) == ("deviates", 1)
    first = verdict["culprits"][0]
    assert (first["scope"], first["phase"], first["step"], first["rank"]) == ("neck.lstm", "backward", 0, 0)
    assert re.search(r"centernet\.py:\d+ in forward$", first["source"])
    assert set(schema()["required"]) <= set(verdict)
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    jsonschema.validate(verdict, schema(), cls=jsonschema.Draft202012Validator)


def test_report_is_one_file_that_needs_no_network(compared: tuple[Run, Path]) -> None:
    _, report = compared
    assert sorted(path.name for path in report.iterdir()) == ["calls.parquet", "index.html", "verdict.json"]
    page = (report / "index.html").read_text()
    assert "neck.lstm" in page
    references = References(page)
    assert references.fetched == []
    assert "default-src 'none'" in references.policy, "the browser is told to fetch nothing, whatever a script asks"


class References(HTMLParser):
    """What a page's elements make a browser fetch, and the policy that it sets itself."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.policy = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "meta" and values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"] or ""
        names = ("src", "srcset", "poster", "data", *(("href",) if tag != "a" else ()))
        self.fetched += [v for n in names if (v := values.get(n)) and not v.startswith(("#", "data:"))]


def test_a_healthy_accelerator_is_aligned(runs: Path, nursery: Nursery) -> None:
    run = trueup_(nursery.python, "compare", runs / "cpu", runs / "healthy")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("ALIGNED  ")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "torch.nn.init.kaiming_uniform_"),
        (["--tree"], "neck"),
        (["--scope", "neck.lstm", "--phase", "backward", "--step", "0", "--level", "api"], "torch.lstm"),
        (["--op", "*lstm*", "--level", "aten"], "aten::_thnn_fused_lstm_cell"),
        (["--tensor", "neck.lstm/torch.lstm#0", "output.0", "--step", "0", "--phase", "forward"], "output.0"),
    ],
    ids=["all", "tree", "scope", "op", "tensor"],
)
def test_show(
    runs: Path, options: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, said = main(["show", str(runs / "npu"), *options]), capsys.readouterr()
    assert (code, said.err) == (0, "")
    assert expected in said.out


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("page", ["README.md", "docs/your-runs.md", "examples/centernet/README.md", "docs/export-metrics.md"])
def test_the_other_commands_of_a_page(
    page: str, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs.parent)
    if not Path("dump_npu").exists():
        writers.padiff(Path("dump_npu"))
    lines = [line for line in lines_of(ROOT / page) if not line.startswith("capture")]
    assert lines[0].startswith(COMPARE)  # which `compared` ran
    assert "\n".join(filter(None, [wrong(line, capsys) for line in lines[1:]])) == ""
