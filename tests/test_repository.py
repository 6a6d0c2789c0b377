"""What holds for the repository as a whole: its pages, its pins, its size, the cost of importing it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
FRAMEWORKS = ("torch", "tensorflow", "paddle", "jax", "transformers")

# Written as patterns that do not match themselves, for this file is searched too.
FORBIDDEN = {
    "a registry's host": r"pypi[.]org|pythonhosted[.]org|download[.]pytorch[.]org|registry[.]npmjs|anaconda[.]org",
    "a registry's option": r"--(?:extra-)?index[-]url\b|--find[-]links\b|--trusted[-]host\b",
    "a folder outside the repository": r"[.][.]/shared\b|/work/(?:shared|main|venv|wt|[.]library)",
}


def listed(command: list[str]) -> list[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")


def files() -> list[Path]:
    """Return what git tracks or would; without git, everything outside hidden and generated folders."""
    if (ROOT / ".git").exists():
        names = listed(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        found = [ROOT / name for name in names if name]
    else:
        generated = {"runs", "report", "build", "dist", "__pycache__"}
        found = [
            path
            for path in ROOT.rglob("*")
            if not any(part in generated or part.startswith(".") for part in path.relative_to(ROOT).parts)
        ]
    return sorted(path for path in found if path.is_file())


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


PAGES = [path for path in files() if path.suffix == ".md"]


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names(what: str) -> None:
    found = [f"{name(path)}: {match[0]}" for path in files() if (match := re.search(FORBIDDEN[what], text(path)))]
    assert found == []


def without_code(page: str) -> str:
    return re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)


def anchors(page: str) -> set[str]:
    """Return the anchors GitHub gives to the page's headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_link_to_what_exists(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(text(page))):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target) if target else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(text(path))):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_name_files_that_exist(page: Path) -> None:
    references = re.findall(r"\b((?:src|tests|examples|docs|benchmarks)/[\w./-]*\w)", text(page))
    assert [path for path in references if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_name_make_targets_that_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text(ROOT / "Makefile"), flags=re.MULTILINE))
    named = re.findall(r"(?:`|\$ )make ([a-z-]+)", text(page))
    assert [target for target in named if target not in targets] == []


def test_ci_runs_the_test_command() -> None:
    assert text(ROOT / ".ci/run").rstrip().endswith("exec make test")
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


@pytest.mark.parametrize("target", ["demo", "test", "lint", "bench", "bench-locate", "docs", "clean", "help"])
def test_make_target_can_be_planned_and_torch_comes_first(target: str, tmp_path: Path) -> None:
    command = ["make", "--dry-run", f"VENV={tmp_path}/env", target]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    installs = [line for line in run.stdout.splitlines() if "pip install" in line]
    assert not installs or "torch==2.13.0 " in installs[0]


@pytest.mark.parametrize("target", ["bench", "bench-locate"])
def test_make_target_runs_a_script_that_exists(target: str) -> None:
    plan = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [path for path in re.findall(r"benchmarks/\w+\.py", plan) if not (ROOT / path).exists()] == []


def constraints() -> dict[str, dict[str, str]]:
    """Return package -> Python version -> pinned version; refuses any line that is more than a pin."""
    pins: dict[str, dict[str, str]] = {}
    for line in text(ROOT / "constraints.txt").splitlines():
        if not line or line.startswith("#"):
            continue
        pin = re.fullmatch(r'([a-z0-9-]+)==([0-9a-z.]+)(?:; python_version (<|>=) "3\.11")?', line)
        assert pin, f"constraints.txt: expected name==version, got {line!r}"
        package, version, where = pin.groups()
        for python in PYTHONS:
            if where is None or (where == "<") == (python == "3.10"):
                assert python not in pins.setdefault(package, {}), f"{package} is pinned twice for Python {python}"
                pins[package][python] = version
    return pins


def test_every_dependency_is_pinned_for_every_python() -> None:
    project = tomllib.loads(text(ROOT / "pyproject.toml"))["project"]
    wanted = project["dependencies"] + [line for extra in project["optional-dependencies"].values() for line in extra]
    missing = []
    for line in wanted:
        package = re.match(r"[A-Za-z0-9-]+", line)[0].lower()
        pythons = {"3.10"} if "python_version < '3.11'" in line else set(PYTHONS)
        if package not in (project["name"], "trueup-compat") and not pythons <= set(constraints().get(package, {})):
            missing.append(line)
    assert missing == []
    assert set(constraints()["torch"].values()) == {"2.13.0"}


def test_both_distributions_are_of_the_same_version() -> None:
    ours, old = (tomllib.loads(text(ROOT / path / "pyproject.toml"))["project"] for path in ("", "compat-packages"))
    assert ours["optional-dependencies"]["compat"] == [f"{old['name']}=={old['version']}"]
    assert old["dependencies"][0] == f"{ours['name']}[shell]=={ours['version']}"


def test_files_in_src_are_small() -> None:
    source = [path for path in files() if path.is_relative_to(ROOT / "src") or path.is_relative_to(ROOT / "compat-packages")]
    source = [path for path in source if "Made by tools/" not in text(path).partition("\n")[0]]  # a table that a script wrote
    assert [f"{name(path)}: {n} lines" for path in source if (n := len(text(path).splitlines())) > 600] == []


PLANTED = {
    "foundation/store/reader.py": ("from trueup.comparison.verdict.judge import judge", "A floor imports only the floors below it"),
    "comparison/graph/streams.py": ("from trueup.comparison.measures.measure import measure", "A comparison goes one way"),
    "comparison/verdict/judge.py": ("from trueup.foundation.words.sentence import verdict_lines", "A comparison gives facts"),
    "foundation/facts/why.py": ("from trueup.foundation.words.wording import counted", "The ground"),
    "recording/engine/session.py": ("from trueup.recording.adapters.torch.context import Scopes", "What all adapters share"),
    "recording/adapters/torch/modes.py": ("from trueup.recording.adapters.torch.session import Session", "No circle inside"),
    "recording/adapters/paddle/tensors.py": ("from trueup.recording.adapters.torch import tensors", "No adapter knows another"),
    "analysis/audit/casts.py": ("import torch", "Frameworks are imported in adapters alone"),
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources and of the contracts that they keep."""
    copy = tmp_path_factory.mktemp("house")
    for source in ("src/trueup", "compat-packages/src/trueup_compat"):
        shutil.copytree(ROOT / source, copy / Path(source).name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "native"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


@pytest.mark.parametrize("file", PLANTED)
def test_an_import_that_goes_up_is_found(house: Path, file: str) -> None:
    line, contract = PLANTED[file]
    path = house / "trueup" / file
    sound = path.read_text("utf-8")
    path.write_text(f"{sound}\n\ndef planted() -> None:\n    {line}\n", "utf-8")
    environment = os.environ | {"PYTHONPATH": str(house), "COLUMNS": "200"}
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    found = subprocess.run(command, cwd=house, env=environment, capture_output=True, text=True)
    path.write_text(sound, "utf-8")
    broken = [line for line in found.stdout.splitlines() if "BROKEN" in line]
    assert found.returncode == 1
    assert any(line.startswith(contract) for line in broken)


def changelog(repository: Path, tag: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repository / ".github/changelog.py"), tag]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_release_prints_the_changelog_s_section(tmp_path: Path) -> None:
    for file in (".github/changelog.py", "src/trueup/foundation/version.py", "pyproject.toml", "compat-packages/pyproject.toml"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    page = "# Changelog\n\n## 0.1.0 - 2026-12-01\n\n### Fixed\n\n- A thing.\n\n## 0.0.1\n\n- Before.\n"
    (tmp_path / "CHANGELOG.md").write_text(page)
    assert changelog(tmp_path, "v0.1.0").stdout == "### Fixed\n\n- A thing.\n"
    (tmp_path / "CHANGELOG.md").write_text("## Unreleased\n\n- A thing.\n")
    run = changelog(tmp_path, "v0.1.0")
    assert (run.returncode, "has no section '## 0.1.0'" in run.stderr) == (1, True)
    assert changelog(tmp_path, "v0.2.0").stderr.endswith("version.py names version 0.1.0, expected 0.2.0\n")


def test_hooks_run_what_the_environment_holds() -> None:
    entries = re.findall(r"entry: \.venv/bin/(\S+)", text(ROOT / ".pre-commit-config.yaml"))
    assert entries == ["ruff", "lint-imports", "codespell", "python"]
    assert "repo: local" in text(ROOT / ".pre-commit-config.yaml")


@pytest.mark.parametrize("name", ["QUICK", "GROUND"])
def test_tests_that_the_makefile_names_exist(name: str) -> None:
    listed = re.search(rf"^{name} := ((?:.*\\\n)*.*)$", text(ROOT / "Makefile"), re.MULTILINE)[1].replace("\\\n", " ").split()
    assert listed
    assert [path for path in listed if not (ROOT / path).exists()] == []


def test_the_files_that_the_tour_and_the_compiled_parts_name_exist() -> None:
    known = {path.name for path in files()}
    texts = [ROOT / "docs/tour.md", *(ROOT / "src/trueup").rglob("native/*.[ch]")]
    assert [f"{name(path)}: {one}" for path in texts for one in re.findall(r"\b\w+[.]py\b", text(path)) if one not in known] == []
