"""A process that tries chains of calls on a device, so that one that crashes it takes nothing along: both its ends.

    with Trying("npu", "cpu", simulated=True) as trying:
        answer = trying.judge(chain)            # {'outcome': Outcome}, {'error': why}, or {'crashed': how}
        answer = trying.write(chain, folder)    # what a reproducer says; inputs.safetensors lies in the folder
    with Trying("npu", "cpu", afresh=True) as trying:
        answer = trying.judge(Recorded("runs/cpu", 0, (4705, 4711)))    # on a device that has done nothing before

The process reads lines of JSON from standard input and answers on its original standard output. Only a child touches the device,
forked once the framework is imported, so a crash costs no start of Python. With ``afresh`` each chain has its own child: nothing
that an earlier one left in memory or in a kernel's state matters.
"""

from __future__ import annotations

import base64
import importlib
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from trueup.analysis.rerun.processes import LATE, Worker, executing, how_ended
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture, open_capture
from trueup.recording.execution.case_errors import CaseErrors
from trueup.recording.execution.cases import Chain
from trueup.recording.execution.judging import Outcome
from trueup.recording.execution.local_error import criterion, thresholds
from trueup.recording.execution.recorded import ContextBroken, NotReplayable, RecordedCall, RecordedCalls


@dataclass(frozen=True)
class Recorded:
    """Calls of a capture as a chain, by their execution numbers."""

    capture: Path
    rank: int
    seqs: tuple[int, ...]
    linked: bool = True  # whether results are handed on (`Chain.of`)


class _Remembered(RecordedCalls):
    """The calls of a capture; those that were asked for stay in memory."""

    def __init__(self, capture: Capture) -> None:
        super().__init__(capture)
        self._asked: dict[tuple[int, int], RecordedCall] = {}

    def at(self, rank: int, seq: int) -> RecordedCall:
        """Return the call with this execution number."""
        if (rank, seq) not in self._asked:
            self._asked[rank, seq] = super().at(rank, seq)
        return self._asked[rank, seq]


class Trying(Worker):
    """A process that tries cases on ``device`` (None: not here, nothing is judged) and on ``against``. ``simulated``: ``npu`` is
    Trueup's own; ``imports``: a module that makes a device known; ``timeout``: seconds for a chain; ``afresh``: each on a device
    that has done nothing before. Raises TrueupError if a device is not there."""

    module = "trueup.analysis.rerun.chain_process"

    def __init__(
        self, device: str | None, against: str, *, framework: str = "torch", simulated: bool = False, imports: str = "",
        timeout: float = 120.0, afresh: bool = False,
    ) -> None:  # fmt: skip
        self._folder = tempfile.TemporaryDirectory()
        self._settings = {
            "device": device, "against": against, "framework": framework, "simulated": simulated, "imports": imports,
            "timeout": timeout, "afresh": afresh,
        }  # fmt: skip
        self._timeout = timeout
        self._running = False
        self.tried = 0
        self._start()

    def _start(self) -> None:
        self._begin([sys.executable, "-m", self.module], self._settings)
        self._running = True

    @property
    def seeded(self) -> bytes:
        """State of the CPU's generator at seed 0."""
        return base64.b64decode(self.greeting["seeded"])

    def __enter__(self) -> Trying:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._running:
            self.end()
        self._folder.cleanup()

    def judge(self, chain: Chain | Recorded) -> dict[str, Any]:
        """Execute a chain on both devices and judge its last call."""
        self.tried += 1
        answer = self._send(chain, {"do": "judge"})
        if "outcome" in answer:
            answer["outcome"] = Outcome.from_json(answer["outcome"])
        return answer

    def settle(self, chain: Chain | Recorded) -> dict[str, Any]:
        """Return under ``chain`` the chain, in memory, with the results of ``against``."""
        into = Path(self._folder.name) / "settled"
        answer = self._send(chain, {"do": "settle", "into": str(into)})
        if "error" not in answer and "crashed" not in answer:
            answer["chain"] = Chain.read(into)
        return answer

    def write(self, chain: Chain, recorded: Chain | None, folder: Path) -> dict[str, Any]:
        """Write the tensors of a chain to a folder and return what the test and its page say."""
        beside = None
        if recorded is not None:
            beside = str(Path(self._folder.name) / "recorded")
            recorded.write(Path(beside))
        return self._send(chain, {"do": "write", "into": str(folder), "recorded": beside})

    def _send(self, chain: Chain | Recorded, message: Mapping[str, Any]) -> dict[str, Any]:
        if not self._running:
            self._start()
        if isinstance(chain, Recorded):
            named: dict[str, Any] = {"recorded_calls": asdict(chain) | {"capture": str(chain.capture)}}
        else:
            named = {"chain": str(Path(self._folder.name) / "chain")}
            chain.write(Path(named["chain"]))
        answer = self._exchange(named | dict(message), self._timeout + 5)
        if answer is None:
            self._running = False
            return {"crashed": self.end()}
        found: dict[str, Any] = answer
        return found


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    calls: dict[str, RecordedCalls] = {}
    try:
        _import(settings)
        child = _Child(settings, calls)
        first = child.ask({"do": "prepare"})
    except TrueupError as error:
        first = {"error": str(error)}
    if "crashed" in first:
        first = {"error": f"Making the devices ready {first['crashed']}"}
    print(json.dumps({"ready": True, "notes": []} | first), file=answers, flush=True)
    if "error" in first:
        return
    for line in sys.stdin:
        message = json.loads(line)
        if settings["afresh"]:
            _read_ahead(message, calls)  # before the child is made, which then has it
            child = _Child(settings, calls)
        print(json.dumps(child.ask(message)), file=answers, flush=True)


class _Child:
    """A process that begins as this one is and does the work; after a crash a new one costs no start of Python."""

    def __init__(self, settings: dict[str, Any], calls: dict[str, RecordedCalls]) -> None:
        self._settings, self._calls = settings, calls
        self._pid = 0

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the child's answer, or how it ended."""
        if not self._pid:
            self._fork()
        try:
            print(json.dumps(message), file=self._questions, flush=True)
            line = self._answers.readline()
        except BrokenPipeError:
            line = ""
        if self._settings["afresh"] or not line.endswith("\n"):
            ended = self._end()
            if not line.endswith("\n"):
                return {"crashed": ended}
        found: dict[str, Any] = json.loads(line)
        return found

    def _fork(self) -> None:
        asked, asking = os.pipe()
        answered, answering = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            try:
                os.close(asking)
                os.close(answered)
                with os.fdopen(asked, encoding="utf-8") as lines, os.fdopen(answering, "w", encoding="utf-8") as out:
                    _work(lines, out, self._settings, self._calls)
            finally:
                os._exit(0)  # nothing of the parent's is to be cleaned up here
        os.close(asked)
        os.close(answering)
        self._questions = os.fdopen(asking, "w", encoding="utf-8")
        self._answers = os.fdopen(answered, encoding="utf-8")

    def _end(self) -> str:
        with suppress(BrokenPipeError):
            self._questions.close()
        self._answers.close()
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._pid = 0
        return LATE if code == -signal.SIGALRM else how_ended(code)


def _work(lines: IO[str], out: IO[str], settings: dict[str, Any], calls: dict[str, RecordedCalls]) -> None:
    ready = False
    for line in lines:
        signal.alarm(math.ceil(settings["timeout"]))
        message = json.loads(line)
        try:
            if not ready:
                _prepare(settings)
            ready = True
            if message["do"] == "prepare":
                answer = {"seeded": base64.b64encode(executing(settings["framework"]).CASES.seeded()).decode()}
            else:
                answer = _answer(message, settings, calls)
        except TrueupError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=out, flush=True)
        signal.alarm(0)


def _import(settings: dict[str, Any]) -> None:
    """Import what children need; this touches no device but the simulated one, whose memory is the host's."""
    adapter = executing(settings["framework"])
    if settings["imports"]:
        try:
            module = importlib.import_module(settings["imports"])
        except ImportError as error:
            said = f"{settings['imports']} cannot be imported: {error}\n  next:     name another module by --import"
            raise TrueupError(said) from None
        getattr(module, "install", lambda: None)()  # as the test's ``--import`` does
    criterion(), thresholds()
    if settings["simulated"]:
        adapter.provide("npu", simulated=True)


def _prepare(settings: dict[str, Any]) -> None:
    adapter = executing(settings["framework"])
    own = os.environ.get("OMP_NUM_THREADS", "")
    adapter.limit_threads(max(1, min(4, int(own) if own.isdigit() else os.cpu_count() or 1)))
    for device in (settings["device"], settings["against"]):
        if device is not None:
            adapter.provide(device, simulated=settings["simulated"])


def _read_ahead(message: Mapping[str, Any], calls: dict[str, RecordedCalls]) -> None:
    named = message.get("recorded_calls")
    if named is None:
        return
    if named["capture"] not in calls:
        calls[named["capture"]] = _Remembered(open_capture(named["capture"]))
    for seq in named["seqs"]:
        calls[named["capture"]].at(named["rank"], seq)


def _chain(message: Mapping[str, Any], calls: dict[str, RecordedCalls]) -> Chain:
    named = message.get("recorded_calls")
    if named is None:
        return Chain.read(Path(message["chain"]))
    _read_ahead(message, calls)
    of = calls[named["capture"]]
    return Chain.of(of, [of.at(named["rank"], seq) for seq in named["seqs"]], linked=named["linked"])


def _answer(message: dict[str, Any], settings: dict[str, Any], calls: dict[str, RecordedCalls]) -> dict[str, Any]:
    cases = executing(settings["framework"]).CASES
    try:
        chain = _chain(message, calls)
        if message["do"] == "judge":
            _, outcome = cases.judged(chain, settings["device"], settings["against"])
            return {"outcome": outcome.to_json()}
        if message["do"] == "settle":
            cases.settled(chain, settings["against"]).held().write(Path(message["into"]))
            return {}
        return _write(cases, chain, message, settings)
    except ContextBroken as reason:
        return {"error": str(reason), "broken": reason.seq}
    except (NotReplayable, TrueupError) as reason:
        return {"error": " ".join(str(reason).split())}
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, MemoryError, OverflowError) as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def _write(cases: CaseErrors, chain: Chain, message: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    recorded = {}
    if message["recorded"] is not None:
        before = Chain.read(Path(message["recorded"])).target
        recorded = {slot: t.array() for slot, t in before.call.outputs.items() if t.kept}
    return cases.saved(cases.written(chain, settings["device"], settings["against"], recorded), Path(message["into"]))


if __name__ == "__main__":
    main()
