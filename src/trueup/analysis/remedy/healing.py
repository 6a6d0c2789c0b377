"""From an overflow to a policy that is known to heal it: take the suggested rule, run the step again with it, judge it again.

runs/large-healed/policy.toml     the rules: more each round, then the fewest that heal it
runs/large-healed/run-1           the capture of the first round, of the step found and the one after it
runs/large-healed/runs.jsonl      the runs that ended: an interrupted search goes on after them
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from trueup.analysis.anomalies import overflow
from trueup.analysis.anomalies.effects import NARROW, wider_function, wider_module
from trueup.analysis.audit.amp import amp
from trueup.analysis.kept_runs import KeptRuns, fewest
from trueup.foundation.facts.anomaly import Anomaly, OverflowResult
from trueup.foundation.facts.operators import has, named
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.store.columns import SCALE_COLUMNS, Overview, scales
from trueup.foundation.store.declared import policy_lines
from trueup.foundation.words.wording import counted
from trueup.recording.policy_file import load, parse
from trueup.recording.recorder import launch

POLICY = "policy.toml"
LOSS = 0.05  # share of a single step's loss that may differ (Paddle on Ascend alignment guide: forward, single step)
ROUNDS = 6  # runs at most: each adds rules for the call that overflows next
LEFT_OUT = 12  # runs at most that try fewer rules, once the run is healed

HealWord = Literal["healed", "not healed", "nothing to heal", "could not tell"]


@dataclass(frozen=True)
class Healed:
    """What became of it."""

    verdict: HealWord
    sentence: str  # several lines of plain text
    policy: Path | None = None  # the file that was tried last
    runs: tuple[Path, ...] = ()
    uses: tuple[str, ...] = ()  # what each rule changed in the last run
    result: OverflowResult | None = None  # of the last run

    @property
    def exit_code(self) -> int:
        """0 healed, or nothing to heal; 1 not healed; 2 could not tell."""
        return {"healed": 0, "nothing to heal": 0, "not healed": 1, "could not tell": 2}[self.verdict]


def heal(
    capture: str | Path, command: Sequence[str], output: str | Path | None = None, *, policy: str | Path | None = None,
    rounds: int = ROUNDS,
) -> Healed:  # fmt: skip
    """Find the fewest rules with which the step that overflowed does not, by running its ``command`` again until that step is
    recorded. ``policy`` is verified, in one run; else the rule that `trueup.overflow` suggests is tried, and those for what
    overflows then, in at most ``rounds`` runs; then fewer of them, in at most `LEFT_OUT` more. policy.toml and captures go to
    ``output``, else ``<capture>-healed``. Raises TrueupError if the capture or the policy cannot be read, the command does not
    start, or ``output`` holds something."""
    opened = open_capture(capture)
    before = overflow(opened)
    first = _first(before)
    if first is None and (policy is not None or amp(opened).collapsed) and _all_skipped(opened):
        return verify(opened.path, None, command, policy, output, rounds=rounds)
    if first is None:
        return Healed("nothing to heal", f"nothing in {opened.path} matters: {before.sentence.splitlines()[0]}")
    given = "" if policy is None else load(policy).text
    with KeptRuns(_folder(opened, output), command, ["heal", str(opened.path), given, rounds]) as kept:
        tries = _Tries(opened, command, kept, first)
        rules: tuple[str, ...] = (given,) if policy is not None else _more(opened, first, (), 0)
        if not rules:
            return Healed("not healed", f"no rule is known for {first.place.name}: {_why_none(first)}")
        kept.folder.mkdir(parents=True, exist_ok=True)
        gradients = 0  # rounds in which a gradient overflowed
        while True:
            result = tries.run(rules)
            if result is None:
                said = f"the command ended with exit code {tries.code} under the policy"
                return Healed("could not tell", said, tries.policy, tuple(tries.runs))
            now = _first(result)
            if now is None or policy is not None or len(tries.runs) >= rounds:
                break
            gradients += now.place.phase == "backward"
            more = _more(open_capture(tries.runs[-1]), now, rules, gradients)
            if not more:
                break
            rules += more
        fewer = rules
        if tries.clean(rules) and policy is None:
            fewer = tries.fewest(rules)
        return _ended(first, now, tries, fewer)


def _more(capture: Capture, now: Anomaly, rules: tuple[str, ...], gradients: int) -> tuple[str, ...]:
    """Return rules to add for a call that overflows under ``rules``; of a gradient, which has the dtype of its tensor, ever more of
    the calls on its way: 1, 1, 4, 16 ..."""
    if now.place.phase == "backward" and now.policy:
        way = tuple(rule for rule in wider_on_the_way(capture, now) if rule not in rules)
        if way:
            return way[: 4 ** max(gradients - 1, 0)]
    return (now.policy,) if now.policy and now.policy not in rules else ()


@dataclass
class _Tries:
    """Runs of a training under rules, up to the step after the one that overflowed."""

    opened: Capture
    command: Sequence[str]
    kept: KeptRuns
    first: Anomaly
    runs: list[Path] = field(default_factory=list)
    results: dict[frozenset[str], tuple[Path, OverflowResult | None]] = field(default_factory=dict)
    code: int = 0
    short: bool = False  # whether more rules might have been left out

    @property
    def policy(self) -> Path:
        return self.kept.folder / POLICY

    def run(self, rules: Sequence[str]) -> OverflowResult | None:
        """Run it and judge the run; None if the training failed."""
        self.policy.write_text("".join(rules), encoding="utf-8")
        self.runs.append(self.kept.folder / f"run-{len(self.runs) + 1}")
        step = self.first.place.step
        options: dict[str, Any] = {"level": tuple(sorted(self.opened.levels)), "steps": f"{step}:{step + 2}", "stop": True}
        options |= {"directory": str(self.runs[-1]), "policy": str(self.policy), "doing": f"healing, {self.runs[-1].name}"}
        run = self.runs[-1]
        self.code, _ = self.kept.made(run.name, [list(rules), step], [run], partial(launch.run, options, self.command))
        result = None if self.code or not self.runs[-1].exists() else overflow(self.runs[-1])
        self.results[frozenset(rules)] = self.runs[-1], result
        return result

    def clean(self, rules: Sequence[str]) -> bool:
        """Tell whether the run under some rules was recorded and is clean."""
        run, result = self.results[frozenset(rules)]
        whole = result is not None and result.verdict != "inconclusive" and self.first.place.step in open_capture(run).steps
        return whole and result is not None and _first(result) is None

    def fewest(self, rules: tuple[str, ...]) -> tuple[str, ...]:
        """Leave out what can be left out, in at most `LEFT_OUT` more runs."""
        most = len(self.runs) + LEFT_OUT

        def enough(some: tuple[str, ...]) -> bool:
            if frozenset(some) not in self.results:
                if len(self.runs) >= most:
                    self.short = True
                    return False
                self.run(some)
            return self.clean(some)

        found = fewest(rules, enough)
        self.policy.write_text("".join(found), encoding="utf-8")
        return found


def verify(
    capture: str | Path, wide: str | Path | None, command: Sequence[str], policy: str | Path | None,
    output: str | Path | None = None, *, rounds: int = ROUNDS,
) -> Healed:  # fmt: skip
    """Run a training of mixed precision with a policy and judge it: no call may overflow in a way that matters, unless it does so
    in a float32 run, too, a step has to be made, and each loss has to be within `LOSS` of that run's. Where the policy does not
    suffice, what `trueup.analysis.audit.amp` advises of that run is laid over it, and it runs again.

    Args:
        capture: the run of mixed precision, whose steps and levels are recorded again.
        wide: a capture of the float32 run; None: losses are not compared.
        command: the training.
        policy: rules, as those of `trueup check --amp --policy`; None: those.
        output: folder for the policy and the captures, else ``<capture>-healed``.
        rounds: runs at most.

    Raises:
        TrueupError: a capture or the policy cannot be read, the command does not start, or ``output`` holds something.
    """
    opened, other = open_capture(capture), None if wide is None else open_capture(wide)
    given = text = amp(opened).policy if policy is None else load(policy).text
    folder = _folder(opened, output)
    asked = ["verify", str(opened.path), None if other is None else str(other.path), given, rounds]
    with KeptRuns(folder, command, asked) as kept:
        folder.mkdir(parents=True, exist_ok=True)
        runs: list[Path] = []
        while True:
            (folder / POLICY).write_text(text, encoding="utf-8")
            runs.append(folder / f"run-{len(runs) + 1}")
            found = _proved(opened, other, command, folder / POLICY, runs[-1], kept)
            if found.verdict != "not healed" or len(runs) >= rounds:
                break
            advised = amp(runs[-1])
            if not (advised.faults or _all_skipped(open_capture(runs[-1]))) or _said(advised.policy) <= _said(text):
                break
            text = advised.policy
    if len(runs) > 1:
        more = ", ".join(sorted(_said(text) - _said(given)))
        found = _with(found, found.verdict, f"{found.sentence}\nthe policy that it began with did not suffice; now: {more}")
    return replace(found, runs=tuple(runs))


def _said(text: str) -> set[str]:
    """Return the rules of a policy in words."""
    return {f"{rule.calls}: {rule.change}" for rule in parse(text, POLICY).rules} if text else set()


def _folder(opened: Capture, output: str | Path | None) -> Path:
    return Path(f"{opened.path}-healed" if output is None else output)


def _proved(
    opened: Capture, other: Capture | None, command: Sequence[str], policy: Path, run: Path, kept: KeptRuns
) -> Healed:
    """Run a training under a policy, and judge it."""
    steps = f"{min(opened.steps)}:{max(opened.steps) + 1}"
    order = {"directory": str(run), "level": tuple(sorted(opened.levels)), "steps": steps, "policy": str(policy)}
    order["doing"] = f"healing, {run.name}"
    code, _ = kept.made(run.name, policy.read_text("utf-8"), [run], partial(launch.run, order, command))
    if code or not run.exists():
        return Healed("could not tell", f"the command ended with exit code {code} under the policy", policy, (run,))
    now = open_capture(run)
    result, uses = overflow(now), tuple(policy_lines(now.ranks.values()))

    def ends(verdict: HealWord, sentence: str) -> Healed:
        return Healed(verdict, sentence, policy, (run,), uses, result)

    first = first_beside(result.anomalies, () if other is None else overflow(other).anomalies)
    if first is not None:
        return ends("not healed", f"with the policy: {first.sentence}")
    skipped = [skipped for _, _, skipped in _scales(now)]
    if skipped and all(skipped):  # losses of weights that nothing changed prove nothing
        said = f"with the policy the scaler skipped all of {counted(len(skipped), 'step')}"
        return ends("not healed", f"{said}: trueup check --amp {run} says where to start")
    if other is None:
        made = f"{len(skipped) - sum(skipped)} of {counted(len(skipped), 'step')} are made, and nothing that matters overflows"
        return ends("healed", f"{made}; a float32 run as --baseline would judge the loss, too")
    before, after, right = (_losses(one) for one in (opened, now, other))
    common = sorted(after.keys() & right.keys())
    if not common:
        return ends("could not tell", "the runs have no loss in common")
    apart = max(_apart(after[step], right[step]) for step in common)
    was = max((_apart(before[step], right[step]) for step in common if step in before), default=math.nan)
    if apart <= LOSS:
        steps = counted(len(common), "step")
        said = f"the loss is within {apart:.2%} of the float32 run's in {steps}; it was {was:.2%} off without the policy"
        return ends("healed", said)
    off = f"the loss is {apart:.2%} off the float32 run's, more than {LOSS:.0%}"
    return ends("not healed", f"with the policy nothing overflows that does not in float32, too, and {off}")


def _all_skipped(capture: Capture) -> bool:
    """Tell whether a loss scale was there and no step was made."""
    skipped = [skipped for _, _, skipped in _scales(capture)]
    return bool(skipped) and all(skipped)


def first_beside(now: Sequence[Anomaly], there: Sequence[Anomaly]) -> Anomaly | None:
    """Return the first of ``now`` that counts and that no call makes alike in the float32 run (``there``): no policy heals that."""
    known = {_alike(one) for one in there}
    return next((one for one in now if _counts(one) and _alike(one) not in known), None)


def _losses(capture: Capture) -> dict[int, float]:
    """Return the loss of each step, without the scale that it was multiplied by before its backward."""
    overview = Overview(capture)
    overview.add_the_rest(())
    by_step = {step: scale for step, scale, _ in _scales(capture)}
    return {step: loss / (by_step.get(step) or 1.0) for step, loss in overview.losses.items()}


def _scales(capture: Capture) -> list[tuple[int, float, bool]]:
    """Return the loss scale of each step that has one, and whether the scaler skipped the step."""
    overview = Overview(capture)
    overview.add_the_rest(())
    scaled = capture.records(columns=list(SCALE_COLUMNS), step=overview.scaled, op=named("scaler")) if overview.scaled else None
    return [] if scaled is None else list(scales(scaled))


def _apart(one: float, other: float) -> float:
    """Return how far a loss is from another one, by its size; infinite where one is NaN."""
    return abs(one - other) / max(abs(other), 1e-12) if math.isfinite(one) and math.isfinite(other) else math.inf


def _ended(first: Anomaly, now: Anomaly | None, tries: _Tries, rules: Sequence[str]) -> Healed:
    run, result = tries.results[frozenset(rules)]
    assert result is not None
    opened, policy = open_capture(run), tries.policy
    more = Healed("could not tell", "", policy, (*(one for one in tries.runs if one != run), run),
                  tuple(policy_lines(opened.ranks.values())), result)  # fmt: skip
    name = f"{first.place.name} ({first.place.op})"
    if result.verdict == "inconclusive" or first.place.step not in opened.steps:
        text = f"step {first.place.step} was not recorded again, so what became of {name} is not known"
        return _with(more, "could not tell", text)
    if now is None:
        count = len(load(policy).rules)
        lines = [f"with {counted(count, 'rule')}, {name} is clean, and the rest of step {first.place.step} too"]
        if len(rules) > 1:
            lines.append("more of them might be left out: not all was tried" if tries.short else "none of them can be left out")
        return _with(more, "healed", "\n".join([*lines, f"policy: {policy}"]))
    lines = [f"with the policy: {now.sentence}", f"policy: {policy}"]
    if _casts_itself(first, now):
        where = now.place.source or now.place.scope
        why = "its module runs in a wider dtype, and the code in it casts, which no rule undoes"
        lines.insert(1, f"{why}: change the cast, {where}")
    elif now.place.phase == "backward" and (cast := cast_on_the_way(opened, now)):
        lines.insert(1, f"the code casts the tensor whose gradient it is, which no rule undoes: change the cast, {cast}")
    elif not now.policy:
        lines.insert(1, f"no rule is known for it: {_why_none(now)}")
    return _with(more, "not healed", "\n".join(lines))


def _casts_itself(first: Anomaly, now: Anomaly) -> bool:
    """Tell whether a call overflows in a narrow dtype again, in the forward of a module in a wider one, autocast off."""
    same = all(getattr(now.place, part) == getattr(first.place, part) for part in ("phase", "level", "scope", "op", "ordinal"))
    in_module = now.place.phase == "forward" and 'level = "module"' in first.policy
    return same and in_module and any(slot.dtype in NARROW for slot in now.slots)


def _with(found: Healed, verdict: HealWord, sentence: str) -> Healed:
    return replace(found, verdict=verdict, sentence=sentence)


def _first(result: OverflowResult) -> Anomaly | None:
    return next((one for one in result.anomalies if _counts(one)), None)


def _counts(one: Anomaly) -> bool:
    return one.matters != "harmless" and one.place.seq >= 0


def _alike(one: Anomaly) -> tuple[str, ...]:
    return one.kind, one.place.phase, one.place.scope, one.place.op


def _why_none(one: Anomaly) -> str:
    if one.kind in ("input", "parameters", "collective"):
        return "no call is to blame that could run differently"
    if one.kind == "vanishes":
        return "a gradient that small comes of what the model computes, or of its weights, and not of a dtype's range"
    if one.place.phase == "backward":
        return "a gradient has the dtype of its tensor; a smaller loss scale helps"
    if one.kind == "nan":
        return "NaN in float32 is mathematics (the logarithm of a negative number, 0/0), not range"
    return "a wider dtype does not help"


# ---------------------------------------------------------------- gradients
# Which calls go on in float32 so that a gradient fits: the one whose backward overflows, then those that made what it read.
#
#     loss <- head <- mid <- tanh <- enc       the gradient of what `mid` read overflows, and has the dtype of that tensor:
#                                              rules for `mid`, `tanh`, `enc`, nearest first
#
# A rule is for a module that holds no other, else for a function in its scope.
COLUMNS = ("seq", "parent", "level", "phase", "scope", "op", "slot", "dtype", "forward_seq", "producer_seq", "site")

Row = Mapping[str, Any]


def wider_on_the_way(capture: Capture, found: Anomaly) -> tuple[str, ...]:
    """Return rules for the call whose backward overflows, and for all whose narrow results led to it, nearest first.

    Args:
        capture: the run, at any level; of a module alone the modules are known, and no function.
        found: a call of the backward.
    """
    calls = _calls(capture, found)
    parts = [row[0]["scope"].split(".") for row in calls.values()]
    held = {"", *(".".join(names[:k]) for names in parts for k in range(1, len(names)))}
    rules = dict.fromkeys(_rule(calls, seq, held) for seq in _back(calls, _forward(calls, found.place.seq)))
    return tuple(rule for rule in rules if rule)


def cast_on_the_way(capture: Capture, found: Anomaly) -> str:
    """Return the line that casts a wide tensor whose gradient overflows, ``train.py:8 in forward``; nothing where none does."""
    calls = _calls(capture, found)
    for seq in _back(calls, _forward(calls, found.place.seq)):
        first, read = calls[seq][0], [row["dtype"] for row in calls[seq] if str(row["slot"]).startswith("input.")]
        narrows = any(row["dtype"] in NARROW for row in calls[seq]) and not any(dtype in NARROW for dtype in read)
        if narrows and first["level"] == "api" and has(first["op"], "converts"):
            frames, _ = capture.sites(found.place.rank).get(first["site"], ((), None))
            return frames[0] if frames else str(first["op"])
    return ""


def _calls(capture: Capture, found: Anomaly) -> dict[int, list[Row]]:
    """Return the calls of a step, by place in its order, each as its rows."""
    calls: dict[int, list[Row]] = defaultdict(list)
    for row in capture.records(columns=list(COLUMNS), rank=found.place.rank, step=found.place.step).to_pylist():
        calls[row["seq"]].append(row)
    return calls


def _forward(calls: Mapping[int, list[Row]], seq: int | None) -> int | None:
    """Return the forward call whose backward a call belongs to, by itself or by a call around it."""
    while seq is not None and seq in calls:
        row = calls[seq][0]
        if row["forward_seq"] is not None:
            return int(row["forward_seq"])
        seq = row["parent"]
    return None


def _back(calls: Mapping[int, list[Row]], start: int | None) -> Iterator[int]:
    """Go from a call to those that made the tensors it read, and on, in the forward pass; only through what is narrow somewhere."""
    inside = [seq for seq, rows in calls.items() if rows[0]["parent"] == start and rows[0]["phase"] in ("forward", "recompute")]
    waiting, seen = deque([start] if start in calls else inside[::-1]), {start}  # at level aten what the function called
    while waiting:
        seq = waiting.popleft()
        if seq is None or seq not in calls or calls[seq][0]["phase"] not in ("forward", "recompute"):
            continue
        yield seq
        for row in calls[seq]:
            made = row["producer_seq"]
            if str(row["slot"]).startswith("input.") and str(row["dtype"]).startswith(("float", "bfloat")) and made not in seen:
                seen.add(made)
                waiting.append(made)


def _rule(calls: Mapping[int, list[Row]], seq: int, held: set[str]) -> str:
    """Return the rule for a call that reads or gives something narrow; nothing for a view, which computes in no dtype."""
    row = calls[seq][0]
    scope, op = row["scope"], None
    if not any(one["dtype"] in NARROW for one in calls[seq]):
        return ""
    if scope and scope not in held:
        return wider_module(scope)
    outer: int | None = seq
    while outer is not None and outer in calls and calls[outer][0]["scope"] == scope:
        op = calls[outer][0]["op"] if calls[outer][0]["level"] == "api" else op
        outer = calls[outer][0]["parent"]
    if op is None:
        return wider_module(scope) if scope else ""
    return "" if has(op, "view") or has(op, "converts") or "::" in op else wider_function(scope, op)
