"""A process that tries cases on a device, so that one that crashes it takes nothing along: both its ends.

    with Trying("npu", "cpu", simulated=True) as trying:
        answer = trying.judge(case)         # {'case': Case, 'outcome': Outcome}, {'error': why}, or {'crashed': how}
        answer = trying.write(case, folder) # what a reproducer says; inputs.safetensors lies in the folder

The process reads lines of JSON from its standard input and answers in lines on what was its standard output.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trueup.model import TrueupError
from trueup.rerun.cases import Case
from trueup.rerun.outcomes import Outcome
from trueup.rerun.processes import Worker

INPUTS = "inputs.safetensors"


class Trying(Worker):
    """A process that tries cases.

    Args:
        device: the one that fails; None: it is not here, and nothing is judged.
        against: the one that it is compared with.
        simulated: ``npu`` is Trueup's simulated device.
        timeout: seconds that a case may take.

    Raises:
        TrueupError: a device is not there.
    """

    module = "trueup.rerun.trying"

    def __init__(self, device: str | None, against: str, *, simulated: bool = False, timeout: float = 120.0) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._settings = {"device": device, "against": against, "simulated": simulated}
        self._timeout = timeout
        self._running = False
        self.tried = 0
        self._start()

    def _start(self) -> None:
        self._begin([sys.executable, "-m", self.module], self._settings)
        self._running = True

    def __enter__(self) -> Trying:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._running:
            self.end()
        self._folder.cleanup()

    def judge(self, case: Case) -> dict[str, Any]:
        """Execute a case on both devices and judge it."""
        self.tried += 1
        answer = self._send(case, {"do": "judge"})
        if "outcome" in answer:
            answer["outcome"] = Outcome.from_json(answer["outcome"])
        return answer

    def settle(self, case: Case) -> dict[str, Any]:
        """Return under ``case`` the case with the results of ``against``."""
        answer = self._send(case, {"do": "settle", "into": str(Path(self._folder.name) / "settled")})
        if "error" not in answer and "crashed" not in answer:
            answer["case"] = Case.read(Path(self._folder.name) / "settled")
        return answer

    def write(self, case: Case, recorded: Case | None, folder: Path) -> dict[str, Any]:
        """Write the tensors of a case to a folder and return what the test and its page say."""
        if recorded is not None:
            recorded.write(Path(self._folder.name) / "recorded")
        beside = None if recorded is None else str(Path(self._folder.name) / "recorded")
        return self._send(case, {"do": "write", "into": str(folder), "recorded": beside})

    def _send(self, case: Case, message: Mapping[str, Any]) -> dict[str, Any]:
        if not self._running:
            self._start()
        path = Path(self._folder.name) / "case"
        case.write(path)
        answer = self._exchange({"case": str(path)} | dict(message), self._timeout)
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
    try:
        _prepare(settings)
        print(json.dumps({"ready": True, "notes": []}), file=answers, flush=True)
    except TrueupError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line), settings)), file=answers, flush=True)


def _prepare(settings: dict[str, Any]) -> None:
    try:
        import torch
    except ImportError:
        raise TrueupError("reproduce executes calls with PyTorch, which is not installed\n  next:     pip install torch") from None

    from trueup.adapters.torch.replaying import provide

    torch.set_num_threads(max(1, min(4, torch.get_num_threads())))
    for device in (settings["device"], settings["against"]):
        if device is not None:
            provide(device, simulated=settings["simulated"])


def _answer(message: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    from trueup.adapters.torch import case_errors
    from trueup.adapters.torch.recorded_call import NotReplayable

    case = Case.read(Path(message["case"]))
    try:
        if message["do"] == "judge":
            _, outcome = case_errors.judged(case, settings["device"], settings["against"])
            return {"outcome": outcome.to_json()}
        if message["do"] == "settle":
            case_errors.settled(case, settings["against"]).write(Path(message["into"]))
            return {}
        return _write(case, message, settings)
    except (NotReplayable, TrueupError) as reason:
        return {"error": " ".join(str(reason).split())}
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, MemoryError, OverflowError) as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def _write(case: Case, message: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    from trueup.adapters.torch import case_errors

    recorded = {}
    if message["recorded"] is not None:
        before = Case.read(Path(message["recorded"]))
        recorded = {slot: t.array() for slot, t in before.call.outputs.items() if t.kept}
    return save_inputs(case_errors.written(case, settings["device"], settings["against"], recorded), Path(message["into"]))


def save_inputs(told: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write the tensors of `trueup.adapters.torch.case_errors.written` to a folder, and return the rest of it, as JSON takes it."""
    from safetensors.torch import save_file

    from trueup.adapters.torch.environment import switches

    source = told["source"]
    save_file({k: t.contiguous() for k, t in source.tensors.items()}, folder / INPUTS)
    (folder / INPUTS).chmod(0o644)
    parts = {
        "expression": source.expression, "body": source.body, "helpers": sorted(source.helpers),
        "tensors": [[k, str(t.dtype), list(t.shape)] for k, t in source.tensors.items()],
    }  # fmt: skip
    return told | {"source": parts, "environment": switches()}


if __name__ == "__main__":
    main()
