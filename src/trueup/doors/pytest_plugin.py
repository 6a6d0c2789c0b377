"""``trueup_golden``: what a test computes is compared with what it computed when it was right.

    def test_block(trueup_golden):
        with trueup_golden(block):                      # or: trueup_golden.run(["torchrun", "train.py"])
            block(batch).square().mean().backward()

    DEVIATES  first culprit: 2, forward, step 0, rank 0  (torch.nn.functional.layer_norm)
              ...
      golden:   tests/goldens/test_block/test_block/torch-2.13.0-cpu (the same version and device)
      this run: /tmp/pytest-of-you/pytest-1/trueup0/block
      look:     trueup compare tests/goldens/test_block/test_block/torch-2.13.0-cpu /tmp/... -o report
      accept:   pytest tests/test_block.py::test_block --trueup-record

A golden is a capture, ``goldens/<file>/<test>[/<name>]/<framework>-<version>-<device>`` beside the test. Of several the most
specific is taken: the same version and device, the same minor version, the device, the framework, any. ``--trueup-record`` records
anew; without a golden a test records its first, and fails where ``CI`` is set. Goldens are written when their test has passed.

Every pytest of an environment loads this file, so it imports nothing of its own before a test asks.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from trueup.foundation.store import Capture

MARKER = "trueup(level, detail, criterion, mapping): how trueup_golden records a test, and what it demands of it"
OPTIONS = {"level": ("module", "api"), "detail": "stats", "criterion": "default", "mapping": None}
PROPERTY = "trueup_golden"
NAME = re.compile(r"(?P<framework>[a-z]+)-(?P<version>\d+(?:\.\w+)*)-(?P<device>\w+)")
LIKENESS = (
    "the same version and device", "the same minor version and device", "another version, the same device",
    "another device", "another framework",
)  # fmt: skip
"""What a golden has in common with a run, the most specific first."""
PASSED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--trueup-record`` and the setting ``trueup_goldens``."""
    group = parser.getgroup("trueup", "goldens of training runs (fixture trueup_golden)")
    group.addoption("--trueup-record", action="store_true", help="record goldens anew instead of comparing with them")
    parser.addini("trueup_goldens", "folder of the goldens, as seen from a test's file", default="goldens")


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", MARKER)


class Made(NamedTuple):
    """What names a golden: framework, version, kind of device."""

    framework: str
    version: str
    device: str

    def __str__(self) -> str:
        return "-".join(self)

    @classmethod
    def of(cls, capture: Capture) -> Made:
        """Return what a capture was made by."""
        run = capture.ranks[min(capture.ranks)]
        framework = str(run["framework"])
        version = re.match(r"\d+(?:\.\w+)*", str(run["versions"][framework]))
        kinds = sorted({str(device).partition(":")[0] for device in run["devices"]} - {"cpu"})
        return cls(framework, version[0] if version else "0", kinds[0] if kinds else "cpu")

    def likeness(self, other: Made) -> int:
        """Return the place in ``LIKENESS`` of what two have in common."""
        same = [a == b for a, b in zip(self, other, strict=True)]
        minor = self.version.split(".")[:2] == other.version.split(".")[:2]
        return 0 if all(same) else 4 if not same[0] else 3 if not same[2] else 1 if minor else 2


def nearest(folder: Path, made: Made) -> tuple[Path, str] | None:
    """Return the most specific golden in a folder, and what it has in common with a run, None where there is none."""
    found = []
    for path in folder.glob("*/manifest.json"):
        read = NAME.fullmatch(path.parent.name)
        if read is not None:
            other = Made(*read.groups())
            version = [(int(part) if part.isdigit() else -1) for part in other.version.split(".")]
            found.append((-made.likeness(other), version, path.parent))
    if not found:
        return None
    likeness, _, path = max(found)
    return path, LIKENESS[-likeness]


class Golden:
    """The fixture: call it for a ``with`` block, or ``run`` a command."""

    def __init__(self, request: pytest.FixtureRequest, scratch: Callable[[], Path]) -> None:
        self._request, self._scratch = request, scratch
        self._record = bool(request.config.getoption("--trueup-record"))
        marker = request.node.get_closest_marker("trueup")
        self._options = OPTIONS | (marker.kwargs if marker else {})
        if unknown := sorted(set(self._options) - set(OPTIONS)) or (list(marker.args) if marker else []):
            raise pytest.UsageError(f"pytest.mark.trueup knows {', '.join(OPTIONS)}, by name, and not {unknown[0]!r}")
        self._recorded: list[tuple[Path, Path]] = []
        self._names: set[str] = set()

    @contextmanager
    def __call__(self, model: Any = None, *, name: str = "", steps: Any = None) -> Iterator[Any]:
        """Record the block, then compare it with the golden; a test with several gives each a name."""
        import trueup

        folder, run = self._place(name), self._scratch() / "run"
        with trueup.capture(run, model=model, level=self._options["level"], detail=self._options["detail"], steps=steps) as capture:
            yield capture
        self._settle(folder, run)

    def run(self, command: Sequence[str], *, name: str = "", timeout: float | None = None) -> None:
        """Run a command (``torchrun ...``) under capture, all its ranks, then compare them with the golden."""
        from trueup.foundation.model import TrueupError
        from trueup.recording.recorder.launch import execute, tell
        from trueup.recording.recorder.options import CaptureOptions

        folder, run = self._place(name), self._scratch() / "run"
        try:
            options = CaptureOptions.of(level=self._options["level"], detail=self._options["detail"])
            code = tell(run, options, execute(run, options, command, timeout=timeout))
        except TrueupError as error:
            pytest.fail(str(error), pytrace=False)
        if code:
            pytest.fail(
                "The command did not end well, or recorded nothing.\n"
                f"  where:    {shlex.join(command)}\n  expected: a training that ends with exit code 0\n  got:      {code}\n"
                "  next:     read what it printed, below",
                pytrace=False,
            )
        self._settle(folder, run)

    def _place(self, name: str) -> Path:
        from trueup.recording.engine.environment import rank_and_world

        test, (_, world) = self._request.node, rank_and_world()
        if world > 1:
            pytest.fail(
                f"A golden is of a whole run, and this pytest is one of {world} ranks.\n  where:    {test.nodeid}\n"
                "  expected: one pytest, which starts the ranks\n  got:      pytest under a launcher\n"
                '  next:     start it without, and have the test call trueup_golden.run(["torchrun", ..., "train.py"])',
                pytrace=False,
            )
        if name in self._names:
            raise pytest.UsageError(f"{test.nodeid} has two goldens named {name!r}: give each a name of its own")
        self._names.add(name)
        root = Path(self._request.path).parent / str(self._request.config.getini("trueup_goldens"))
        called = test.nodeid.partition("::")[2] or test.name
        return root.joinpath(Path(self._request.path).stem, *map(_safe, [*called.split("::", 1), *([name] if name else [])]))

    def _settle(self, folder: Path, run: Path) -> None:
        """Compare a run with its golden, or keep it as one."""
        from trueup.foundation.model import TrueupError
        from trueup.foundation.store import open_capture

        try:
            made = Made.of(open_capture(run))
            found = nearest(folder, made)
            if self._record or found is None:
                self._keep(run, folder / str(made))
                return
            golden, why = found
            print(f"trueup: compared with {golden} ({why})")  # pytest shows it of a test that fails, and with -rA
            if why != LIKENESS[0]:
                self._say(f"compared {made} with {_short(golden)}: {why}")
            self._compare(golden, why, run)
        except TrueupError as error:
            pytest.fail(str(error), pytrace=False)

    def _compare(self, golden: Path, why: str, run: Path) -> None:
        from trueup.doors.comparing import compare

        result = compare(golden, run, criterion=self._options["criterion"], mapping=self._options["mapping"])
        if result.verdict != "aligned":
            test = shlex.quote(self._request.node.nodeid)
            pytest.fail(
                f"{result.sentence}\n"
                f"  golden:   {_short(golden)} ({why})\n"
                f"  this run: {run}\n"
                f"  look:     trueup compare {shlex.quote(str(_short(golden)))} {shlex.quote(str(run))} -o report\n"
                f"  accept:   pytest {test} --trueup-record",
                pytrace=False,
            )

    def _keep(self, run: Path, golden: Path) -> None:
        if not self._record and os.environ.get("CI", "").lower() not in ("", "0", "false"):
            test = self._request.node.nodeid
            pytest.fail(
                f"{test} has no golden.\n"
                f"  where:    {_short(golden.parent)}\n"
                f"  expected: {golden.name}, or one of another version or device\n"
                "  got:      none; CI is set, where none is recorded\n"
                f"  next:     pytest {shlex.quote(test)} --trueup-record, where the test is right, and commit it",
                pytrace=False,
            )
        self._recorded.append((run, golden))

    def finish(self) -> None:
        """Write what was recorded, if the test passed."""
        if not self._recorded or not self._request.node.stash.get(PASSED, False):
            return
        for run, golden in self._recorded:
            fresh = golden.with_name(f".{golden.name}.tmp")
            shutil.rmtree(fresh, ignore_errors=True)
            shutil.copytree(run, fresh, ignore=shutil.ignore_patterns("lock", "processes"))
            shutil.rmtree(golden, ignore_errors=True)
            fresh.rename(golden)
            self._say(f"recorded {_short(golden)}: commit it")

    def _say(self, text: str) -> None:
        """Have a line said at the end of the session: a property reaches it from a worker of xdist, and stands in JUnit's XML."""
        self._request.node.user_properties.append((PROPERTY, text))


@pytest.fixture
def trueup_golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    """Compare what a block or a command computes with what it computed when it was right (a golden, kept beside the test)."""
    golden = Golden(request, lambda: tmp_path_factory.mktemp("trueup"))
    yield golden
    golden.finish()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Remember whether the test itself passed: its fixtures end after that."""
    report = yield
    if call.when == "call":
        item.stash[PASSED] = report.passed  # type: ignore[attr-defined]
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which goldens were recorded, and which stood in for others."""
    reports = [one for held in terminalreporter.stats.values() for one in held if getattr(one, "when", "") == "teardown"]
    reports += [one for one in terminalreporter.stats.get("failed", []) if getattr(one, "when", "") == "call"]
    said = {text: None for one in reports for key, text in getattr(one, "user_properties", ()) if key == PROPERTY}
    if said:
        terminalreporter.section("trueup goldens")
        for text in said:
            terminalreporter.line(text)


def _safe(name: str) -> str:
    """Return a name of a test, parameters and all, as one of a file: no path, nothing hidden, and not too long."""
    name = name.replace("[", "-", 1).removesuffix("]")
    plain = re.sub(r"[^\w.=+-]+", "-", name).strip("-.") or "test"
    if plain == name and len(plain) <= 80:
        return plain
    from hashlib import sha256

    return f"{plain[:80]}-{sha256(name.encode()).hexdigest()[:8]}"  # `a/b` and `a-b` are two parameters


def _short(path: Path) -> Path:
    """Return a path as seen from here, where it is inside."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
