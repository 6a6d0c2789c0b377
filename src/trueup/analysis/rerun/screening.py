"""Several models on one device: their operators as one list, and what of it the device computes wrong in which model.

    npu computes 1 of 41 operators wrong, in 2 of 3 models: torch.nn.functional.gelu (bert, gpt); vit does not use it

Most models align on a new device, and some do not (PaddlePaddle on Ascend alignment guide, several models): each is replayed, and
the operators that are wrong in any of them are one policy, and in Paddle the device's own black list.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trueup.foundation.words.wording import counted, one_line
from trueup.recording.execution.judging import BLAMED, OPEN, Outcome, Replay, worse
from trueup.recording.policy_file import in_toml

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
