"""All recorded calls of a capture, executed again: which ones, in how many processes, and how far it got when it was killed.

    OUT/replay.json        what was asked for; with the verdict, once it is there
    OUT/outcomes.jsonl     one line for each call that is done, appended as it comes: what a killed replay goes on from
    OUT/outcomes.parquet   the same as a table

`replay` judges each call. `verify` executes each where it was recorded: the same bits show that the capture holds all its calls
need. Of several models on one device `Screening` makes one list of operators, and says what the device computes wrong in which:

    npu computes 1 of 41 operators wrong, in 2 of 3 models: torch.nn.functional.gelu (bert, gpt); vit does not use it

Most models align on a new device, and some do not (PaddlePaddle on Ascend alignment guide, several models): each is replayed, and
the operators that are wrong in any of them are one policy, and in Paddle the device's own black list.

Which calls behind a culprit are wrong by themselves a comparison asks, for their inputs are off already, so the size of an error
does not tell whose it is. A shadow run of the capture says so, else each is computed again from its own inputs:

    >>> own = OwnErrors(open_capture("runs/cpu"), open_capture("runs/npu"), seconds=60)     # doctest: +SKIP
    >>> own(0, [(814, 814), (822, 822)])                                        # doctest: +SKIP
    {814: None, 822: Reason(why=<Why.RECOMPUTED>, facts=(0.31, 2.1e-06))}
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trueup.analysis.rerun import processes as processing
from trueup.analysis.rerun.processes import Journal, executing, framework_of
from trueup.foundation.facts.operators import has
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.model import DETAILS, PHASES, TrueupError
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.wording import counted, one_line
from trueup.recording.execution import shadow
from trueup.recording.execution.judging import BLAMED, BY_PARTS, OPEN, Arrays, Outcome, Replay, same_bytes, worse
from trueup.recording.execution.recorded import NotReplayable, RecordedCall, RecordedCalls
from trueup.recording.policy_file import in_toml
from trueup.recording.recorder.options import Patterns

LEVELS = ("aten", "api")

TOLD = {"accurate": False, "ill-conditioned": False, "wrong": True}  # by the verdict on a call; others are unknown


@dataclass(frozen=True)
class Settings:
    """What to replay, and where."""

    base: str
    device: str
    levels: tuple[str, ...] = LEVELS
    phases: tuple[str, ...] = tuple(p for p in PHASES if p != "collective")
    patterns: tuple[str, ...] = ()  # globs or ``/expressions/`` on operators and scopes, or execution numbers
    dedup: bool = False
    draws: bool = True
    simulated: bool = False
    recorded: bool = False  # judge the recorded results and not the device's
    threads: int = 0  # of each process; 0: the framework's default
    reference: str = "float64"
    verify: bool = False  # execute where it was recorded, and compare bits


def replay(
    base: str | Path, device: str, output: str | Path | None = None, *, processes: int = 0, timeout: float = 300.0, **options: Any
) -> Replay:
    """Execute recorded calls again, each with its recorded inputs, and judge each by itself.

    >>> trueup.replay("runs/gpu", "npu", patterns=("*layer_norm*",)).sentence
    'npu computes aten::native_layer_norm forward wrong from the recorded inputs (...).'

    Args:
        base: a capture, best of detail ``tensor``.
        device: where: ``npu``, ``cuda:1``, ``cpu``.
        output: where results are kept; one that holds a part of the same replay is gone on with. None: nothing is kept.
        processes: 0 executes the calls in this one, where a crash is a crash.
        timeout: seconds that a call may take before its process is ended.
        options: fields of `Settings`.

    Raises:
        TrueupError: the capture cannot be read, the device is not there, or ``output`` holds another replay.
    """
    options.setdefault("recorded", device.partition(":")[0] == "cpu")
    settings = Settings(str(base), device, **options)
    return run(settings, None if output is None else Path(output), processes=processes, timeout=timeout)


def run(settings: Settings, output: Path | None = None, *, processes: int = 1, timeout: float = 300.0) -> Replay:
    """Execute the calls of a capture again and judge each; arguments and errors as in `replay`."""
    started = time.perf_counter()
    capture = open_capture(settings.base)
    journal = Journal(output, asdict(settings))
    tasks = _Tasks(settings, RecordedCalls(capture), journal.done)
    notes: dict[str, None] = {}
    if processes:
        processing.execute(asdict(settings), tasks, journal, processes, timeout, notes)
    else:
        _here(settings, tasks, journal, notes)
    if not tasks.found and not journal.done:
        raise TrueupError(_nothing(settings, capture.path))
    outcomes = [replace(o, times=tasks.times.get(o.place, 1)) for o in journal.done.values()]
    for text in [*capture.problems, *_said(outcomes)]:
        notes.setdefault(text)
    found = Replay(
        settings.base, _subject(settings, capture.ranks), settings.reference, sorted(outcomes, key=lambda o: o.place), tuple(notes),
        time.perf_counter() - started,
    )  # fmt: skip
    journal.finish(found)
    return found


def _subject(settings: Settings, ranks: dict[int, dict[str, Any]]) -> str:
    """Name what is judged: the device, or that of the capture."""
    if not settings.recorded:
        return settings.device
    names = [name for rank in ranks.values() for name in rank.get("devices") or ()]
    return f"{next((n for n in names if n != 'cpu'), 'cpu')}, as recorded,"


def _said(outcomes: Sequence[Outcome]) -> list[str]:
    drawn = sum(o.drawn for o in outcomes)
    text = f"{drawn:,} calls were given inputs that were drawn to match recorded numbers: the capture holds no elements"
    return [text] if drawn else []


def _nothing(settings: Settings, path: Path) -> str:
    chosen = f"level {', '.join(settings.levels)}, phase {', '.join(settings.phases)}"
    asked = f", calls {', '.join(settings.patterns)}" if settings.patterns else ""
    expected = f"calls of {chosen}{asked}"
    return f"{path} has no call to replay\n  expected: {expected}\n  got:      none\n  next:     `trueup show {path}` lists them"


class _Tasks:
    """The calls in order of execution, handed out to whoever asks next."""

    def __init__(self, settings: Settings, calls: RecordedCalls, done: dict[tuple[int, int, int], Outcome]) -> None:
        self._settings, self._calls, self._done = settings, calls, done
        self._patterns = Patterns(tuple(p for p in settings.patterns if not p.isdigit()))
        self._numbers = {int(p) for p in settings.patterns if p.isdigit()}
        self._lock = threading.Lock()
        self._iterator = self._walk()
        self.found = 0
        self.times: dict[tuple[int, int, int], int] = {}

    def next(self) -> RecordedCall | None:
        """Return the next call, or None."""
        with self._lock:
            return next(self._iterator, None)

    def _walk(self) -> Iterator[RecordedCall]:
        first: dict[tuple[Any, ...], tuple[int, int, int]] = {}
        for rank in sorted(self._calls.capture.ranks):
            for step in self._calls.capture.steps:
                for call in self._calls.of_step(rank, step, self._settings.levels, self._settings.phases):
                    place = (rank, step, call.seq)
                    if not self._chosen(call):
                        continue
                    self.found += 1
                    if self._settings.dedup:
                        same = first.setdefault(call.signature(), place)
                        self.times[same] = self.times.get(same, 0) + 1
                        if same != place:
                            continue
                    if place not in self._done:
                        yield call

    def _chosen(self, call: RecordedCall) -> bool:
        if not call.computed:
            return False
        if not self._settings.patterns:
            return True
        return call.seq in self._numbers or (bool(self._patterns) and self._patterns.match(call.key.scope, call.key.op))


def _here(settings: Settings, tasks: _Tasks, journal: Journal, notes: dict[str, None]) -> None:
    from trueup.analysis.rerun.processes import prepare

    replayer, _ = prepare(asdict(settings))
    notes.update(dict.fromkeys(replayer.notes()))
    with replayer.undisturbed():
        while (call := tasks.next()) is not None:
            journal.add(replayer.verify(call) if settings.verify else replayer.replay(call))


IDENTITY = ("scope", "op", "ordinal", "slot", "seq")
PLACE = ("payload_segment", "payload_key", "payload_view", "digest")


@dataclass(frozen=True)
class Verification:
    """What `verify` returns."""

    capture: str
    replay: Replay = field(repr=False)
    damaged: tuple[str, ...] = ()  # recorded tensors whose bytes are not those that were recorded, a sentence each

    @property
    def reproduced(self) -> int:
        """Calls that gave the recorded results, bit for bit."""
        return sum(o.verdict == "accurate" for o in self.replay.outcomes)

    @property
    def by_parts(self) -> int:
        """Of those, calls of the user's own code, reproduced by the calls inside them."""
        return sum(o.verdict == "accurate" and o.rule == BY_PARTS for o in self.replay.outcomes)

    @property
    def reasons(self) -> list[tuple[str, str, int]]:
        """``(operator, why, calls)`` of the others, most calls first."""
        found = Counter((f"{o.level} {o.kind}", o.sentence) for o in self.replay.outcomes if o.verdict != "accurate")
        return [(kind, why, number) for (kind, why), number in found.most_common()]

    @property
    def exit_code(self) -> int:
        """0: every call is reproduced and every tensor is sound; 1: some are not."""
        return int(bool(self.reasons or self.damaged))

    @property
    def sentence(self) -> str:
        """Say the result in one sentence."""
        total = len(self.replay.outcomes)
        share = f"{self.reproduced:,} of {total:,} calls ({self.reproduced / total:.1%})" if total else "no call"
        code = f" ({self.by_parts:,} of them, whose code is in no capture, by the calls inside them)" if self.by_parts else ""
        if self.reasons:
            said = f"{share} give the recorded bits when they are executed again{code}; the others are named below."
        else:
            said = f"All {total:,} calls give the recorded bits when they are executed again{code}"
            said += "." if self.damaged else ": the recording is complete."
        lost = len(self.damaged)
        return said + (f" {lost:,} recorded {'tensor is' if lost == 1 else 'tensors are'} damaged." if lost else "")


def verify(
    capture: str | Path, *, levels: tuple[str, ...] = LEVELS, patterns: tuple[str, ...] = (), processes: int = 1,
    simulated: bool = False, output: Path | None = None,
) -> Verification:  # fmt: skip
    """Execute every call of a capture on the device that recorded it; raises TrueupError without that device or the bytes."""
    opened = open_capture(capture)
    if opened.root.get("detail") != "tensor":
        raise TrueupError(
            f"{capture} keeps no elements, so nothing can be compared bit by bit\n  expected: a capture of detail tensor\n"
            f"  got:      detail {opened.root.get('detail')}\n  next:     trueup capture --detail tensor -o DIR -- COMMAND"
        )
    device, threads = _where(opened)
    settings = Settings(
        str(capture), device, levels, patterns=patterns, simulated=simulated, threads=threads, verify=True, draws=False
    )
    return Verification(str(capture), run(settings, output, processes=processes), tuple(damaged(opened)))


def again(capture: Capture, number: int) -> Sequence[Outcome]:
    """Execute the functions of one number, of all ranks and steps, where they were recorded, and compare bits."""
    device, threads = _where(capture)
    settings = Settings(str(capture.path), device, ("api",), patterns=(str(number),), threads=threads, verify=True, draws=False)
    return run(settings, None, processes=1).outcomes


def damaged(capture: Capture) -> Iterator[str]:
    """Read all kept tensors; yield a sentence for each that is lost or holds other bytes than were recorded."""
    seen: set[tuple[Any, ...]] = set()
    for rank, step in capture.sizes:
        for row in capture.records([*IDENTITY, *PLACE], rank=rank, step=step).to_pylist():
            place = (rank, row["payload_segment"], row["payload_key"], str(row["payload_view"]), row["digest"])
            if row["payload_segment"] is None or place in seen:
                continue
            seen.add(place)
            try:
                capture.payload(rank, *(row[name] for name in PLACE))
            except TrueupError as error:
                scope = f"{row['scope']}/" if row["scope"] else ""
                yield f"{scope}{row['op']}#{row['ordinal']} {row['slot']} (seq {row['seq']}, step {step}, rank {rank}): {error}"


def _where(capture: Capture) -> tuple[str, int]:
    """Return the device that recorded a capture and its number of threads, on which sums depend."""
    first: dict[str, Any] = next(iter(capture.ranks.values()), {})
    names = [name for name in first.get("devices") or () if isinstance(name, str)]
    device = next((name for name in names if not name.startswith(("cpu", "meta"))), "cpu")
    threads = str((first.get("environment") or {}).get("num_threads", ""))
    return device, int(threads) if threads.isdigit() and int(threads) < 1024 else 0


HALVES = ("float16", "bfloat16")
PADDLE = "paddle._C_ops."  # functions that are Paddle's kernels by name
NAMED = 3  # operators that the sentence names


@dataclass(frozen=True, slots=True)
class Screened:
    """An operator of a level: the models by what became of it there, the phases in which it is wrong, its worst call."""

    op: str
    level: str
    wrong: tuple[str, ...]
    accurate: tuple[str, ...]  # all its calls that could be judged are right
    unknown: tuple[str, ...]  # used there, and no call could be judged
    absent: tuple[str, ...]
    phases: tuple[str, ...]
    worst: Outcome

    @property
    def said(self) -> str:
        """Say where it is wrong, and how that fits the models in which it is not."""
        rest = [
            f"{_listed(names)} {one if len(names) == 1 else several}"
            for names, one, several in (
                (self.accurate, "uses it and is right", "use it and are right"),
                (self.unknown, "could not be judged", "could not be judged"),
                (self.absent, "does not use it", "do not use it"),
            )
            if names
        ]  # fmt: skip
        return "; ".join([f"{self.op} ({', '.join(self.wrong)})", *rest])


@dataclass(frozen=True)
class Screening:
    """What `screen` returns: operators that are wrong somewhere come first, those of most models before others."""

    device: str
    models: Mapping[str, Replay] = field(repr=False)
    operators: Sequence[Screened] = field(repr=False)

    @property
    def wrong(self) -> list[Screened]:
        """Operators that are wrong in some model. Of level aten those alone whose model shows nothing at level api."""
        found = [one for one in self.operators if one.wrong]
        above = {model for one in found if one.level == "api" for model in one.wrong}
        return [one for one in found if one.level == "api" or not above.issuperset(one.wrong)]

    @property
    def verdict(self) -> str:
        """Say it in a word, as ``replay.json`` does."""
        return {0: "accurate", 1: "wrong", 2: "inconclusive"}[self.exit_code]

    @property
    def exit_code(self) -> int:
        """0: every model could be judged and is accurate; 1: an operator is wrong; 2: of some model nothing could be judged."""
        return 1 if self.wrong else max(replay.exit_code for replay in self.models.values())

    @property
    def sentence(self) -> str:
        """Say the result in one sentence."""
        wrong, models = self.wrong, len(self.models)
        untold = [name for name, replay in self.models.items() if replay.exit_code == 2]
        rest = f"; {_listed(untold)} could not be judged" if untold else ""
        if not wrong:
            if len(untold) == models:
                return f"Could not tell{rest}."
            return f"{self.device} computes no operator of {counted(models - len(untold), 'model')} wrong{rest}."
        hit = len({name for one in wrong for name in one.wrong})
        of = sum(one.level == wrong[0].level for one in self.operators)
        more = f", and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        named = "; ".join(one.said for one in wrong[:NAMED])
        count = f"{len(wrong)} of {counted(of, 'operator')} wrong, in {hit} of {models} models"
        return f"{self.device} computes {count}: {named}{more}{rest}."

    @property
    def policy(self) -> str:
        """Return the operators that are wrong anywhere as a policy for all models; empty where no rule reaches any."""
        return "\n".join(text for one in self.wrong if one.level == "api" for text in _rules(one))

    @property
    def black_list(self) -> str:
        """Return them as Paddle's devices take it (``CUSTOM_DEVICE_BLACK_LIST``); empty for another framework."""
        kernels = [
            one.op.removeprefix(PADDLE) + ("_grad" if phase == "backward" else "")
            for one in self.wrong if one.op.startswith(PADDLE)
            for phase in one.phases if phase in ("forward", "backward")
        ]  # fmt: skip
        return ",".join(dict.fromkeys(kernels))


def screen(models: Mapping[str, Replay]) -> Screening:
    """Join the replays of several models, by their names, into one list of operators."""
    found: defaultdict[tuple[str, str], defaultdict[str, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for name, replay in models.items():
        for outcome in replay.outcomes:
            found[outcome.level, outcome.op][name].append(outcome)
    operators = [_screened(op, level, of, models) for (level, op), of in found.items()]
    operators.sort(key=lambda one: (not one.wrong, one.level != "api", -len(one.wrong), worse(one.worst)))
    return Screening(next(iter(models.values())).device, models, operators)


def _screened(op: str, level: str, of: Mapping[str, Sequence[Outcome]], models: Mapping[str, Replay]) -> Screened:
    wrong = tuple(name for name, calls in of.items() if any(call.verdict in BLAMED for call in calls))
    unknown = tuple(name for name, calls in of.items() if all(call.verdict in OPEN for call in calls))
    every = [call for calls in of.values() for call in calls]
    return Screened(
        op, level, wrong, tuple(name for name in of if name not in {*wrong, *unknown}), unknown,
        tuple(name for name in models if name not in of),
        tuple(dict.fromkeys(call.phase for call in every if call.verdict in BLAMED)), min(every, key=worse),
    )  # fmt: skip


def _rules(one: Screened) -> list[str]:
    """Return the rules that run an operator on the CPU: the phase alone where one is wrong, the optimizer's by themselves."""
    phases = [phase for phase in one.phases if phase != "optimizer"]
    kinds = [""] * bool(phases) if set(phases) - {"backward"} else phases
    kinds += ["optimizer"] * ("optimizer" in one.phases)
    wider = 'dtype = "float32"\n' if any(half in one.worst.shapes for half in HALVES) else ""  # the CPU lacks kernels of them
    where = one_line(f"# wrong in {', '.join(one.wrong)}: {one.worst.sentence}")
    return [
        f'{where}\n[[rule]]\nop = {in_toml(one.op)}\ndevice = "cpu"\n{wider}' + (f'phase = "{kind}"\n' if kind else "")
        for kind in kinds
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return a name for each capture: its folder's, or the whole path where two folders have one name."""
    short = [path.name for path in paths]
    return short if len(set(short)) == len(paths) else [str(path) for path in paths]


class OwnErrors:
    """Tells which of a candidate's calls are wrong by themselves (`comparison.verdict.judged.OwnErrors`), within ``seconds``. If
    the baseline kept tensors too, a call that is as wrong there is not: its operator computes that way."""

    def __init__(self, baseline: Capture, candidate: Capture, seconds: float) -> None:
        self._captures, self._left = (baseline, candidate), seconds
        self._judges: dict[int, tuple[Any, RecordedCalls] | None] = {}
        self._shadow: dict[tuple[int, int], Reason | None] | None = None

    def __call__(self, rank: int, calls: Sequence[tuple[int, int]]) -> Mapping[int, Reason | None]:
        """Return, by number in the candidate, why a call is wrong by itself, or None if it is not."""
        if found := self._of_shadow():
            return {seq: found[rank, seq] for _, seq in calls if (rank, seq) in found}
        told: dict[int, Reason | None] = {}
        for before, after in self._in_turn(rank, calls):
            started = time.monotonic()
            if self._left <= 0:
                break
            judged = self._judged(1, rank, after)
            if judged is not None and judged[0] and (its := self._judged(0, rank, before)) is not None and its[0]:
                judged = False, None
            if judged is not None:
                told[after] = judged[1]
            self._left -= time.monotonic() - started
        return told

    def _in_turn(self, rank: int, calls: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Put the first call of each kind first, then the second ones, so that each kind is looked at before time runs out."""
        judge = self._judge(1)
        if judge is None:
            return []
        order: list[tuple[int, int, tuple[int, int]]] = []
        count = Counter[tuple[str, str, str]]()
        for before, after in calls:
            call = _call(judge[1], rank, after)
            if call is not None:
                kind = call.key.level, call.key.phase, call.key.op
                order.append((count[kind], len(order), (before, after)))
                count[kind] += 1
        return [pair for *_, pair in sorted(order)]

    def _judged(self, side: int, rank: int, seq: int) -> tuple[bool, Reason | None] | None:
        """Return whether a call is wrong from its own inputs, and by how much; None if unknown."""
        judge = self._judge(side)
        call = None if judge is None else _call(judge[1], rank, seq)
        if judge is None or call is None:
            return None
        replayer = judge[0]
        with replayer.undisturbed():
            try:
                result = replayer.execute(call, replayer.target)
                if _is_as_recorded(call, result.arrays):  # no float64 is needed to see it
                    return False, None
            except (NotReplayable, TrueupError):
                return None
            outcome = replayer.replay(call, result)
        wrong = TOLD.get(outcome.verdict)
        return None if wrong is None else (wrong, _reason(outcome.error, outcome.explained) if wrong else None)

    def _judge(self, side: int) -> tuple[Any, RecordedCalls] | None:
        """Return what computes the calls of a side again, on the CPU; None if nothing can."""
        if side not in self._judges:
            capture = self._captures[side]
            self._judges[side] = None
            if capture.root.get("detail") == DETAILS[-1]:
                try:
                    adapter = executing(framework_of(capture))
                    adapter.provide("cpu", simulated=False)
                except TrueupError:
                    return None
                calls = RecordedCalls(capture)
                self._judges[side] = adapter.Replayer(calls, "cpu", draws=False, recorded=True), calls
        return self._judges[side]

    def _of_shadow(self) -> dict[tuple[int, int], Reason | None]:
        """Return what the candidate's table of errors says, by rank and number; nothing if it is no shadow run."""
        if self._shadow is None:
            table, _ = shadow.read(self._captures[1].path, self._captures[1].ranks)
            found: dict[tuple[int, int], Reason | None] = {}
            unknown = set()
            for row in table.select(["rank", "seq", "state", "error", "explained"]).to_pylist():
                key, wrong = (row["rank"], row["seq"]), TOLD.get(row["state"])
                if wrong:
                    found[key] = _reason(row["error"], row["explained"])
                elif wrong is None:
                    unknown.add(key)
                else:
                    found.setdefault(key, None)
            for key in self._views() if found else ():  # which a shadow does not judge, for they compute nothing
                found.setdefault(key, None)
            self._shadow = {key: why for key, why in found.items() if why is not None or key not in unknown}
        return self._shadow

    def _views(self) -> Iterator[tuple[int, int]]:
        """Yield rank and number of the candidate's calls that only show what they were given."""
        rows = self._captures[1].records(columns=["rank", "seq", "op"])
        shown = [op for op in pc.unique(rows["op"]).to_pylist() if op is not None and has(op, "view")]
        for row in rows.filter(pc.is_in(rows["op"], pa.array(shown, pa.string()))).to_pylist():
            yield row["rank"], row["seq"]


def _call(calls: RecordedCalls, rank: int, seq: int) -> RecordedCall | None:
    """Return a call that can be computed again."""
    try:
        call = calls.at(rank, seq)
    except TrueupError:
        return None
    return call if call.computed and call.key.level != "module" and call.key.phase != "collective" else None


def _is_as_recorded(call: RecordedCall, arrays: Arrays) -> bool:
    """Tell whether computing a call again gave all its recorded results to the bit."""
    return all(slot in arrays and t.kept and same_bytes(arrays[slot], t.array()) for slot, t in call.outputs.items())


def _reason(error: float | None, explained: float | None) -> Reason:
    numbers = (math.nan if number is None else float(number) for number in (error, explained))
    return Why.RECOMPUTED(*numbers)
