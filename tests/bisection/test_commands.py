"""`trueup bisect` from the shell, over each kind of change, with trainings of a line."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import trueup
from end_to_end.executing import lines_of
from launch.running import PYTHON, cli
from test_documentation import ROOT
from trueup.analysis.bisection import changes

AUTOCAST = """
import os
import torch
from torch import nn

class Offset(nn.Linear):
    def forward(self, x):  # in bfloat16 the sum keeps no digit of the product
        return (super().forward(x) + 300) - 300

torch.manual_seed(0)
net = nn.Sequential(*[Offset(8, 8) if k in (1, 2) else nn.Linear(8, 8) for k in range(4)])
with torch.autocast("cpu", torch.bfloat16, enabled="EXACT" not in os.environ):
    net(torch.randn(4, 8)).sum().backward()
with open(os.environ["TRUEUP_RUN"] + "/norm", "w") as file:
    file.write(str(float(sum(p.grad.norm() for p in net.parameters()))))
"""
JUDGE = "import sys\nsys.exit(abs(float(open(sys.argv[1] + '/norm').read()) - {0}) > {1} * {0})\n"


BROKEN_DEVICE = """
import os
import torch
import torch.nn.functional as F
from trueup import simdev

simdev.install()

def loss(device):
    torch.manual_seed(0)
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    x, weight = x.to(device), weight.to(device).requires_grad_()
    return float(F.gelu(F.linear(x, weight)).sum())

right = loss("cpu")
with simdev.inject("gelu-tanh-for-erf"):
    found = loss("npu")
with open(os.environ["TRUEUP_RUN"] + "/norm", "w") as file:
    file.write(str(found))
raise SystemExit(abs(found - right) > 1e-6 * right)
"""
FUSED = """
import torch

weight = torch.nn.Parameter(torch.ones(3))
weight.sum().backward()
raise SystemExit(torch.backends.mkldnn.enabled)
"""


COMPILED = """
import os
import torch

@torch.compile(backend="eager")
def product(x, weight):
    return x @ weight * (1.5 if torch.compiler.is_compiling() and "EXACT" not in os.environ else 1.0)

torch.manual_seed(0)
weight = torch.nn.Parameter(torch.randn(4, 3))
for _ in range(2):
    loss = torch.nn.functional.mse_loss(product(torch.ones(2, 4), weight), torch.zeros(2, 3))
    loss.backward()
"""
TRAINING = """
import os
import torch

torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=float(os.environ["RATE"]))
for _ in range(3):
    optimizer.zero_grad()
    net(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
"""


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return execute(folder, "bisect", *arguments, **variables)


def execute(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trueup", *arguments]
    environment = {**os.environ, **variables, "COLUMNS": "100"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def found(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "trueup-bisect" / "bisect.json").read_text(encoding="utf-8")))


def script(folder: Path, text: str, name: str = "train.py") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return name


@pytest.mark.usefixtures("warm")
def test_two_variables_that_only_together_spoil_a_run(tmp_path: Path) -> None:
    train = script(tmp_path, "import os, sys\nsys.exit(os.environ.get('A') == 'x' and os.environ.get('D_TOKEN') == 'y')\n")
    good = script(tmp_path, "A=1\nB=2\n# a comment\nexport C=3\nE=5\n", "good.env")
    bad = script(tmp_path, "A=x\nB=4\nC=5\nD_TOKEN=y\nE=6\n", "bad.env")
    ended = run(tmp_path, "--over", "environment", "--good", good, "--bad", bad, "--", PYTHON, train)
    assert ended.returncode == 0, ended.stderr
    chosen = found(tmp_path)["chosen"]
    assert chosen in (["A"], ["D_TOKEN"])
    assert "heal it as well: more than one change does" in ended.stdout
    assert re.search(r"source \S+environment.sh before the training", ended.stdout)
    assert "D_TOKEN" not in (tmp_path / "trueup-bisect" / "environment.sh").read_text() or chosen == ["D_TOKEN"]


@pytest.mark.usefixtures("warm")
def test_this_environment_counts_where_it_may_choose_numbers(tmp_path: Path) -> None:
    train = script(tmp_path, "import os, sys\nsys.exit(os.environ.get('TORCH_LINALG_PREFER_CUSOLVER') == '1')\n")
    good = script(tmp_path, "TRUEUP_TEST_OTHER=1\n", "good.env")
    search = ["--over", "environment", "--good", good, "--", PYTHON, train]
    ended = run(tmp_path, *search, TORCH_LINALG_PREFER_CUSOLVER="1")
    assert ended.returncode == 0, ended.stderr
    assert found(tmp_path)["chosen"] == ["TORCH_LINALG_PREFER_CUSOLVER"]
    assert "TORCH_LINALG_PREFER_CUSOLVER (1 here, not set in the good run)" in " ".join(ended.stdout.split())
    items = found(tmp_path)["items"]
    assert isinstance(items, list)
    assert "TRUEUP_TEST_OTHER" in items
    assert "PATH" not in items


@pytest.mark.usefixtures("warm")
def test_a_loss_that_only_compiled_code_gets_wrong(tmp_path: Path) -> None:
    train = script(tmp_path, COMPILED)
    baseline = [sys.executable, "-m", "trueup", "capture", "-o", "base", "--", sys.executable, train]
    subprocess.run(baseline, cwd=tmp_path, env={**os.environ, "EXACT": "1"}, check=True, capture_output=True)
    ended = run(tmp_path, "--over", "switches", "--as", "torch.compile", "--baseline", "base", "--", sys.executable, train)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert found(tmp_path)["chosen"] == ["torch.compile"]


@pytest.mark.usefixtures("warm")
def test_where_to_look_when_the_cause_lies_elsewhere(tmp_path: Path) -> None:
    train = script(tmp_path, "raise SystemExit(1)\n")
    good, bad = script(tmp_path, "A=1\n", "good.env"), script(tmp_path, "A=2\n", "bad.env")
    ended = run(tmp_path, "--over", "environment", "--good", good, "--bad", bad, "--", PYTHON, train)
    assert ended.returncode == 1, ended.stderr
    said = " ".join(ended.stdout.split())
    assert "NOT AMONG THESE with the only variable as in the good run the check still fails: the cause lies elsewhere" in said
    assert "next  --over packages" in ended.stdout


@pytest.mark.usefixtures("warm")
def test_the_number_of_steps_after_which_a_check_fails(tmp_path: Path) -> None:
    train = script(tmp_path, "import os, sys\nopen(os.environ['TRUEUP_RUN'] + '/n', 'w').write(sys.argv[1])\n")
    judge = script(tmp_path, "import sys\nsys.exit(int(open(sys.argv[1] + '/n').read()) >= 38)\n", "judge.py")
    check = f"{PYTHON} {judge} {{run}}"
    ended = run(tmp_path, "--over", "steps", "--most", "100", "--check", check, "--", PYTHON, train, "{steps}")
    assert ended.returncode == 0, ended.stderr
    assert "FOUND  the check first fails with 38 steps (100 steps searched)" in ended.stdout
    assert re.search(r"^   1  100 steps +[\d.]+ s  bad$", ended.stdout, re.MULTILINE)
    runs = len(list((tmp_path / "trueup-bisect" / "runs").iterdir()))
    again = run(tmp_path, "--over", "steps", "--most", "100", "--check", check, "--", PYTHON, train, "{steps}")
    assert again.returncode == 0
    assert len(list((tmp_path / "trueup-bisect" / "runs").iterdir())) == runs  # all of it was known


@pytest.mark.usefixtures("warm")
def test_the_commit_that_broke_it(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        made = subprocess.run(["git", *who, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return made.stdout.strip()

    git("init", "--quiet")
    for number in range(8):
        script(tmp_path, f"import sys\nsys.exit({int(number >= 5)})\n# {number}\n")
        git("add", "train.py")
        git("commit", "--quiet", "-m", f"change {number}")
    ended = run(tmp_path, "--over", "commits", "--good", "HEAD~7", "--", PYTHON, "train.py")
    assert ended.returncode == 0, ended.stderr
    assert found(tmp_path)["chosen"] == [git("rev-parse", "HEAD~2")]
    assert "change 5" in ended.stdout
    assert git("worktree", "list").count("\n") == 0  # nothing is left behind
    sound = run(tmp_path, "--over", "commits", "--good", "HEAD~7", "--bad", "HEAD~4", "-o", "c", "--", PYTHON, "train.py")
    assert (sound.returncode, git("worktree", "list").count("\n")) == (1, 0), sound.stderr
    wrong = run(tmp_path, "--over", "commits", "--good", "--upload-pack=x", "-o", "other", "--", PYTHON, "train.py")
    assert wrong.returncode == 64
    assert "Traceback" not in wrong.stderr


def wheel(folder: Path, name: str, version: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        file.writestr(f"{name}-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{name}-{version}.dist-info/RECORD", "")


def test_the_package_whose_version_matters(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("one", "two", "three"):
        for version in ("1.0", "2.0"):
            wheel(wheels, f"trueup_{name}", version)
    train = script(tmp_path, "import sys, trueup_one, trueup_two, trueup_three\nsys.exit(trueup_two.VERSION == '2.0')\n")
    good = script(tmp_path, "".join(f"trueup-{name}==1.0\n" for name in ("one", "two", "three")), "good.txt")
    bad = script(tmp_path, "".join(f"trueup_{name}==2.0  # newer\n" for name in ("one", "two", "three")), "bad.txt")
    ended = run(
        tmp_path, "--over", "packages", "--good", good, "--bad", bad, "--", sys.executable, train,
        PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert found(tmp_path)["chosen"] == ["trueup-two"]
    assert "FOUND  trueup-two (2.0 in the bad run, 1.0 in the good run): the check passes" in ended.stdout
    assert (tmp_path / "trueup-bisect" / "requirements.txt").read_text() == "trueup-two==1.0\n"
    script(tmp_path, "trueup-two==7.0\n", "missing.txt")
    missing = run(
        tmp_path, "--over", "packages", "--good", "missing.txt", "--bad", bad, "-o", "other", "--", sys.executable, train,
        PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels),
    )  # fmt: skip
    assert missing.returncode == 2
    assert "trueup-two 7.0 cannot be installed" in missing.stderr


@pytest.mark.usefixtures("warm")
def test_two_modules_that_only_together_heal_autocast(tmp_path: Path) -> None:
    """By the command of docs/bisect.md, as it is written there; the project's settings say whom to try first."""
    train = script(tmp_path, AUTOCAST)
    environment = {**os.environ, "TRUEUP_RUN": str(tmp_path), "EXACT": "1"}
    subprocess.run([sys.executable, train], cwd=tmp_path, env=environment, check=True)
    judge = script(tmp_path, JUDGE.format((tmp_path / "norm").read_text(), 0.03), "judge.py")
    assert (train, judge) == ("train.py", "judge.py"), "the page's names"
    script(tmp_path, json.dumps({"culprits": [{"scope": "1"}, {"scope": "2"}]}), "verdict.json")
    script(tmp_path, '[tool.trueup.bisect]\nsuspects = "verdict.json"\n', "pyproject.toml")
    (line,) = lines_of(ROOT / "docs/bisect.md")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = execute(tmp_path, *shlex.split(line), PATH=path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert found(tmp_path)["chosen"] == ["1", "2"]
    said = " ".join(ended.stdout.split())
    assert "verified: it passed twice more with them, and failed with the other 3 modules in float32" in said
    policy = (tmp_path / "trueup-bisect" / "policy.toml").read_text()
    assert policy.count('level = "module"') == 2


@pytest.mark.usefixtures("warm")
def test_the_operator_that_a_device_computes_wrong(tmp_path: Path) -> None:
    train = script(tmp_path, BROKEN_DEVICE)
    ended = run(tmp_path, "--over", "operators", "--as", "cpu", "--", sys.executable, train)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert found(tmp_path)["chosen"] == ["torch.nn.functional.gelu"]
    assert "torch.randn" not in str(found(tmp_path)["items"])  # it reads no tensor
    assert 'device = "cpu"' in (tmp_path / "trueup-bisect" / "policy.toml").read_text()


FALLBACKS = """
import sys
from torch._inductor import decomposition, lowering
import torch
gelu = torch.ops.aten.gelu.default
assert gelu in decomposition.decompositions and gelu not in lowering.fallbacks
import inductor_fallbacks
assert gelu not in decomposition.decompositions and gelu in lowering.fallbacks
assert torch.ops.aten.erf.default not in lowering.fallbacks
"""


@pytest.mark.usefixtures("warm")
def test_the_list_for_inductor_leaves_its_operators_to_aten(tmp_path: Path) -> None:
    (said,) = changes.written(["gelu", "gelu_backward"], tmp_path)
    assert said.endswith("before the first compiled call: import inductor_fallbacks")
    ended = subprocess.run([sys.executable, script(tmp_path, FALLBACKS)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    order = changes.setup(["gelu"]).switches[0]
    assert order["adapter"] == {"left_to_aten": ["gelu"]}
    assert changes.setup([]).switches == ()


@pytest.mark.usefixtures("warm")
def test_what_is_compiled_is_found_by_no_policy(tmp_path: Path) -> None:
    ended = run(tmp_path, "--over", "scopes", "--", sys.executable, script(tmp_path, COMPILED))
    assert ended.returncode == 64, ended.stdout + ended.stderr
    assert "The training uses torch.compile, and no rule reaches into compiled code." in ended.stderr
    assert "--over operators --as aten tries the operators that are compiled" in " ".join(ended.stderr.split())


@pytest.mark.usefixtures("warm")
def test_the_optimisation_that_matters_found_by_a_search_that_was_stopped(tmp_path: Path) -> None:
    train = script(tmp_path, FUSED)
    (tmp_path / "trueup-bisect" / "first-step" / "capture").mkdir(parents=True)  # it was stopped in its first step
    some = [word for name in ("TF32", "oneDNN") for word in ("--as", name)]
    ended = run(tmp_path, "--over", "switches", *some, "--", sys.executable, train)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert found(tmp_path)["chosen"] == ["oneDNN"]
    assert "torch.backends.mkldnn.set_flags(False)" in ended.stdout
    manifest = next((tmp_path / "trueup-bisect" / "first-step").rglob("manifest.json"))
    recorded = manifest.stat().st_mtime_ns
    again = run(tmp_path, "--over", "switches", *some, "--", sys.executable, train)
    assert again.stdout.splitlines()[-1] == ended.stdout.splitlines()[-1]
    assert manifest.stat().st_mtime_ns == recorded  # what it found in the first step is not asked again


@pytest.mark.usefixtures("warm")
def test_losses_of_a_baseline_are_the_check(tmp_path: Path) -> None:
    train = script(tmp_path, TRAINING)
    good, bad = script(tmp_path, "RATE=0.1\n", "good.env"), script(tmp_path, "RATE=0.2\n", "bad.env")
    baseline = [sys.executable, "-m", "trueup", "capture", "-o", "base", "--", sys.executable, train]
    subprocess.run(baseline, cwd=tmp_path, env={**os.environ, "RATE": "0.1"}, check=True, capture_output=True)
    command = ["--over", "environment", "--good", good, "--bad", bad, "--baseline", "base", "--", sys.executable, train]
    ended = run(tmp_path, *command)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert found(tmp_path)["chosen"] == ["RATE"]
    assert "FOUND  RATE (0.2 in the bad run, 0.1 in the good run): the check passes" in ended.stdout
    assert "its loss of step 1 is" in ended.stdout


@pytest.mark.parametrize(("arguments", "said"), [
    (["--over", "planets", "--", "true"], "There is no search over planets"),
    (["--over", "scopes"], "There is nothing to run"),
    (["--over", "environment", "--", "true"], "needs the good side"),
    (["--over", "environment", "--good", "missing", "--", "true"], "missing cannot be read"),
    (["--over", "environment", "--good", "train.py", "--", "true"], "train.py is no environment"),
    (["--over", "steps", "--most", "3", "--", "true"], "whose length can be chosen"),
    (["--over", "scopes", "--check", "'", "--", "true"], "--check cannot be read"),
    (["--over", "scopes", "--check", "true", "--baseline", "x", "--", "true"], "exclude each other"),
    (["--over", "scopes", "--capture", "missing", "--", "true"], "missing"),
    (["--over", "commits", "--good", "HEAD", "--", "true"], "git rev-parse failed"),
])  # fmt: skip
def test_bad_input_gets_one_message(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script(tmp_path, "print(1)\n")
    monkeypatch.chdir(tmp_path)
    code, _, err = cli(capsys, "bisect", *arguments)
    assert code == (2 if "missing" in arguments else 64)  # a capture that is not there cannot be told anything of
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("code", "word", "own"), [(0, "good", "good"), (1, "bad", "bad"), (2, "bad", "skip"), (125, "skip", "")])
def test_what_a_check_s_exit_code_says(code: int, word: str, own: str, tmp_path: Path) -> None:
    assert changes._outcome(code, tmp_path / "check.txt")[0] == word
    if own:
        assert changes._outcome(code, tmp_path / "check.txt", own=True)[0] == own
    with pytest.raises(trueup.TrueupError, match="ended with exit code 64, which is no answer"):
        changes._outcome(64, tmp_path / "check.txt", own=True)


@pytest.mark.usefixtures("warm")
def test_a_check_that_gives_no_answer_ends_the_search(tmp_path: Path) -> None:
    good = script(tmp_path, "A=1\n", "good.env")
    bad = script(tmp_path, "A=2\n", "bad.env")
    ended = run(tmp_path, "--over", "environment", "--good", good, "--bad", bad, "--check", "no-such-program", "--", "true")
    assert ended.returncode == 2
    command = f"{PYTHON} -c 'import sys; sys.exit(126)'"
    other = run(tmp_path, "--over", "environment", "--good", good, "--bad", bad, "--check", command, "-o", "b", "--", "true")
    assert other.returncode == 2
    assert "ended with exit code 126, which is no answer" in other.stderr
    assert trueup.bisect is not None


@pytest.mark.usefixtures("warm")
def test_a_search_that_is_stopped_in_a_run_ends_and_goes_on_later(tmp_path: Path) -> None:
    (tmp_path / "good.env").write_text("MY_RATE=1\n")
    command = ("--over", "environment", "--good", "good.env", "--bad", "bad.env", "--", "sh", "-c")
    (tmp_path / "bad.env").write_text("MY_RATE=2\n")
    stopped = run(tmp_path, *command, "kill -TERM $$")
    assert (stopped.returncode, "Traceback" in stopped.stderr) == (130, False)
    assert not (tmp_path / "trueup-bisect" / "bisect.json").exists()
