"""What `make demo` runs: the detector on two devices, one of them broken, and the operator that is to blame.

Trains on the CPU and on the simulated accelerator whose LSTM backward is wrong, records the first three steps of both,
prints the two loss curves and compares the recordings. Ends with 0 if the comparison found the deviation, as it should.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAIN = "examples/centernet/train.py"
FAULT = "lstm-backward-cell-gate"
RECORDED = "0:3"
PLOT_ROWS = 12


class DemoError(Exception):
    """The demo cannot go on; the message says why and what to do."""


def clear(directory: Path, proof: str) -> None:
    """Delete what an earlier demo left; refuse a directory that lacks `proof`, for it is not the demo's."""
    if not directory.exists():
        return
    if any(directory.iterdir()) and not (directory / proof).exists():
        raise DemoError(f"{directory} is in the way and holds no {proof}: move it away and start the demo again")
    shutil.rmtree(directory)


def show(command: list[str]) -> None:
    print("\n$ " + shlex.join(command), flush=True)


def trueup(*arguments: str) -> list[str]:
    """Return the command as this interpreter runs it."""
    return [sys.executable, "-m", "trueup", *arguments]


def train(device: str, fault: list[str], steps: int, into: Path) -> list[float]:
    """Train under capture into runs/<device>; return the losses of all steps."""
    capture = ["capture", "-o", f"runs/{device}", "--steps", RECORDED, "--"]
    options = ["--device", device, *fault, "--steps", str(steps)]
    show(["trueup", *capture, "python", TRAIN, *options])
    started = time.perf_counter()
    command = [*trueup(*capture), sys.executable, str(ROOT / TRAIN), *options]
    run = subprocess.run(command, cwd=into, stdout=subprocess.PIPE, text=True, check=False)
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)", run.stdout, re.MULTILINE)]
    if run.returncode or len(losses) != steps:
        raise DemoError(
            f"training on {device} ended with exit code {run.returncode} after {len(losses)} of {steps} steps:\n"
            f"{run.stdout}its messages on the error stream stand above"
        )
    print(f"{steps} steps in {time.perf_counter() - started:.1f} s, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


def curves(baseline: list[float], candidate: list[float], rows: int = PLOT_ROWS) -> str:
    """Draw two loss curves with characters: o the baseline, x the candidate, * where both fall on one spot."""
    finite = [loss for loss in baseline + candidate if abs(loss) < float("inf")]
    low, high = min(finite), max(finite)

    def row(loss: float) -> int | None:
        return round((high - loss) / ((high - low) or 1) * (rows - 1)) if abs(loss) < float("inf") else None

    lines = []
    for r in range(rows):
        marks = [" ox*"[(row(b) == r) + 2 * (row(c) == r)] for b, c in zip(baseline, candidate, strict=True)]
        lines.append(f"{high - r * (high - low) / (rows - 1):9.3f} | {' '.join(marks)}".rstrip())
    axis = " ".join(f"{step % 10}" for step in range(len(baseline)))
    return "\n".join([*lines, f"{'step':>9} | {axis}", "            o cpu   x npu   * both"])


def outcome(baseline: list[float], candidate: list[float], last: int = 5) -> str:
    """Say in a sentence how the second curve ended beside the first, as someone who has only the curves would."""
    expected, got = (sum(losses[-last:]) / len(losses[-last:]) for losses in (baseline, candidate))
    numbers = f"mean loss of the last steps: cpu {expected:.3f}, npu {got:.3f} ({got / expected - 1:+.0%})"
    if got > 1.05 * expected:
        return f"The same model, data and seed, no error, no NaN; but on npu the loss converges worse.\n{numbers}"
    return f"The same model, data and seed, no error, no NaN; the curves alone do not give the fault away.\n{numbers}"


def compare(into: Path) -> int:
    """Compare the two captures into report/; return the exit code of `trueup compare`."""
    command = ["compare", "runs/cpu", "runs/npu", "-o", "report/"]
    show(["trueup", *command])
    return subprocess.run(trueup(*command), cwd=into, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Find the broken operator behind a loss that converges worse.")
    parser.add_argument("--steps", type=int, default=30, help="training steps; the first three are recorded")
    parser.add_argument("--into", type=Path, default=ROOT, help="where runs/ and report/ are put (the repository)")
    args = parser.parse_args()
    started = time.perf_counter()
    try:
        for left, proof in (("runs/cpu", "manifest.json"), ("runs/npu", "manifest.json"), ("report", "verdict.json")):
            clear(args.into / left, proof)
        cpu = train("cpu", [], args.steps, args.into)
        npu = train("npu", ["--fault", FAULT], args.steps, args.into)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    print(f"\n{outcome(cpu, npu)}\n\n{curves(cpu, npu)}")
    code = compare(args.into)
    print(f"\nDone in {time.perf_counter() - started:.0f} s.")
    if code != 1:
        print(f"demo: compare ended with exit code {code}; the planted fault {FAULT} should give 1", file=sys.stderr)
        return 2
    print("Exit code 1 of compare is the expected end: it means the runs deviate (0: aligned, 2: could not tell).")
    print(f"The report is {args.into / 'report' / 'index.html'}; open it in a browser, it needs no network.")
    print("\nNow your own training:")
    print(f'  export PATH="{Path(sys.executable).parent}:$PATH"')
    print("  trueup capture -o runs/mine --steps 0:3 -- python train.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
