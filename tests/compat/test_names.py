"""The names by which the old tools' functions are imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import trueup
import trueup_compat
from compat import SOURCES
from trueup_compat.ptdbg_ascend import switches

COMPAT = Path(trueup_compat.__file__).parents[2]


def python(*arguments: str, path: str = SOURCES) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}
    )


def test_both_names_are_one_module() -> None:
    import trueup.compat.ptdbg_ascend.switches as other

    assert other is switches
    assert (other.__name__, other.__spec__.name) == ("trueup_compat.ptdbg_ascend.switches",) * 2
    assert trueup.compat.ptdbg_ascend is sys.modules["trueup_compat.ptdbg_ascend"]


def test_a_module_runs_by_either_name() -> None:
    for name in ("trueup.compat.dumper", "trueup_compat.dumper"):
        run = python("-m", name, "compare", "--help")
        assert (run.returncode, run.stderr) == (0, "")
        assert "-g" in run.stdout


def test_without_the_distribution_it_is_named() -> None:
    run = python("-c", "import sys\nsys.modules['trueup_compat'] = None\nimport trueup\nimport trueup.compat.msprobe")
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: trueup.compat needs the distribution trueup-compat, which is not installed; "
        "install it: pip install 'trueup[compat]'"
    )


def test_a_real_tool_goes_before_the_old_name(tmp_path: Path) -> None:
    shutil.copytree(COMPAT, tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    built = tmp_path / "site"
    run = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(built)],
        cwd=tmp_path / "source", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    ask = f"import site\nsite.addsitedir({str(built)!r})\nimport ptdbg_ascend\nprint(ptdbg_ascend.__file__)"
    source = str(Path(trueup.__file__).parents[1])
    assert python("-c", ask, path=source).stdout.strip() == str(built / "trueup_compat/old_names/ptdbg_ascend/__init__.py")
    (built / "ptdbg_ascend").mkdir()
    (built / "ptdbg_ascend/__init__.py").touch()
    assert python("-c", ask, path=source).stdout.strip() == str(built / "ptdbg_ascend/__init__.py")
