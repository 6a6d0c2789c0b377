"""Proof of a cause: the setting that a verdict names is set back, and what is left is what was called independent of it.

Whoever mends the named cause has to find the other ones as they were said, none of its victims, and nothing new: `kept_word`
holds two comparisons with one baseline to that, of the run as it was and of the run in which the cause was undone.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from trueup.analysis.kept_runs import KeptRuns
from trueup.comparison.result.causes import CASTING
from trueup.comparison.result.comparing import compare
from trueup.foundation.model import DETAILS, Finding, Result
from trueup.foundation.settings import ABSENT, OF_PARAMETERS, Setting, differing, values_by_step
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.sentence import argument_name, changed_arguments
from trueup.foundation.words.setup_sentence import setting_text
from trueup.foundation.words.wording import ELLIPSIS, one_line
from trueup.recording.policy_file import SCALARS, exactly, in_toml
from trueup.recording.recorder import launch

POLICY = "policy.toml"
ROUNDS = 4
Word = Literal["healed", "nothing to heal", "not healed", "could not tell"]


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of the findings of a comparison once the cause of one of them was undone; each in words."""

    undone: tuple[str, ...]  # what was set back
    gone: bool  # whether no part of that is left
    left: tuple[str, ...]  # what was named as independent, and is there still
    new: tuple[str, ...]  # what was not named: it was taken for a victim
    lost: tuple[str, ...]  # what was named as independent, and went with the cause

    @property
    def holds(self) -> bool:
        """Whether all went as the first comparison said."""
        return self.gone and not self.new and not self.lost


def kept_word(before: Result, after: Result, undone: Sequence[str]) -> Kept:
    """Compare what two verdicts name, of a run and of the run in which ``undone``, parts of the first one's causes, were set
    back."""
    named, now, back = _named(before), _named(after), [_key(one) for one in undone]
    def is_back(keys: Keys, said: str) -> bool:
        return keys[0] in back or said in undone  # a call without a cause is named by itself

    together = {keys for one in after.culprits if any(_is_named(k, named, before) for k in _keys(one)) for keys in _keys(one)}
    new = [said for keys, said in now.items() if keys not in together and not _is_named(keys, named, before)]
    lost = [said for keys, said in named.items() if not (is_back(keys, said) or _is_named(keys, now, after))]
    left = [said for keys, said in now.items() if not is_back(keys, said) and said not in new]
    new = [said for keys, said in now.items() if said in new and not is_back(keys, said)]
    return Kept(tuple(undone), not any(is_back(*one) for one in now.items()), tuple(left), tuple(new), tuple(lost))


Keys = tuple[str, str]
"""A cause without its counts, or nothing, and the call where it shows first."""


def _is_named(keys: Keys, named: Iterable[Keys], result: Result) -> bool:
    """Tell whether a verdict names a cause: as one of its own, as the call without one, or in a note."""
    if keys[0] != "" and keys[0] in _uncounted(result.sentence):
        return True
    return any(keys[0] == other[0] != "" or (keys[1] == other[1] and "" in (keys[0], other[0])) for other in named)


def parts_of(finding: Finding) -> list[str]:
    """Return the causes of a finding, each by itself."""
    return [part.partition(": ")[2] if part.startswith(ORDER) else part for part in finding.cause.split("; ") if part]


ORDER = "batches in another order from step"


def _named(result: Result) -> dict[Keys, str]:
    """Return what a verdict names, in words: each cause once, and calls that have none."""
    found: dict[Keys, str] = {}
    for one in result.culprits:
        for keys, part in _keys(one).items():
            found.setdefault(keys, part)
    return found


def _keys(finding: Finding) -> dict[Keys, str]:
    """Return the parts of a finding's cause, which are named where one of them is; of one without a cause its call."""
    call = f"{finding.phase} {finding.level} {finding.scope} {finding.op}"
    return {(_key(part), call): part or _call(finding) for part in parts_of(finding) or [""]}


def _call(finding: Finding) -> str:
    return f"{finding.name} ({finding.op})"


def _key(part: str) -> str:
    """Return what tells a cause from others: not how many calls show it, nor which operators do it."""
    return _uncounted(part if " in the baseline, " in part else part.partition(": ")[0])


def _uncounted(text: str) -> str:
    text = re.sub(r"gradients are changed (in the \w+ only), as by clipping[^:;]*", r"gradients are clipped \1", text)
    return re.sub(r"\d[\d,]* of \d[\d,]* (parameters differ \([^)]*\))?", "some ", text)  # with some that are named


@dataclass(frozen=True, slots=True)
class Undone:
    """What came of setting causes back, one after the other."""

    verdict: Word
    sentence: str  # several lines of plain text
    policy: Path | None = None  # the rules of all rounds
    runs: tuple[Path, ...] = ()
    kept: tuple[Kept, ...] = ()  # a proof for each round
    uses: tuple[str, ...] = ()  # what each rule changed in the last run

    @property
    def exit_code(self) -> int:
        """0 healed, or nothing to heal; 1 not healed; 2 could not tell."""
        return {"healed": 0, "nothing to heal": 0, "not healed": 1, "could not tell": 2}[self.verdict]


def undo(
    baseline: str | Path, candidate: str | Path, command: Sequence[str], output: str | Path | None = None, *, rounds: int = ROUNDS
) -> Undone:
    """Set the cause of the first culprit back to the baseline's value, by a policy in a run of the candidate's ``command``, and the
    next one, in at most ``rounds`` runs; say of each what it left. policy.toml and captures go to ``output``, else
    ``<candidate>-healed``. Raises TrueupError if a capture cannot be read, the command does not start, or ``output`` holds
    something."""
    first, second = open_capture(baseline), open_capture(candidate)
    before = compare(first, second)
    if before.verdict == "aligned":
        return Undone("nothing to heal", before.sentence.splitlines()[0])
    folder = Path(f"{second.path}-healed" if output is None else output)
    with KeptRuns(folder, command, ["undo", str(first.path), str(second.path), rounds]) as made:
        text, runs, kept = "", list[Path](), list[Kept]()
        while len(runs) < rounds:
            found = next((one for one in before.culprits if rules_for(one, first, second)), None)
            if found is None:
                break
            rules = rules_for(found, first, second)
            folder.mkdir(parents=True, exist_ok=True)
            text += "\n".join(rule for _, rule in rules)
            (folder / POLICY).write_text(text, encoding="utf-8")
            runs.append(folder / f"run-{len(runs) + 1}")
            order = _as_recorded(second) | {"directory": str(runs[-1]), "policy": str(folder / POLICY)}
            order["doing"] = f"healing, {runs[-1].name} of at most {rounds}"
            code, _ = made.made(runs[-1].name, text, [runs[-1]], partial(launch.run, order, command))
            if code or not runs[-1].exists():
                said = f"the command ended with exit code {code} under the policy"
                return Undone("could not tell", said, folder / POLICY, tuple(runs), tuple(kept))
            after = compare(first, open_capture(runs[-1]))
            kept.append(kept_word(before, after, [part for part, _ in rules]))
            before = after
            if not kept[-1].gone or after.verdict == "aligned":
                break
    by_hand = shlex.join(["trueup", "heal", str(second.path), "--baseline", str(first.path), "--undone"])
    return _ended(before, folder / POLICY if runs else None, runs, kept, f"{BY_HAND}: {by_hand} RUN")


def judge(baseline: str | Path, candidate: str | Path, undone: str | Path) -> Undone:
    """Say the same of a run in which somebody set the first cause back by hand; raise TrueupError if a capture cannot be read."""
    before, after = compare(baseline, candidate), compare(baseline, undone)
    if before.culprit is None:
        return Undone("nothing to heal", before.sentence.splitlines()[0])
    return _ended(after, None, [Path(undone)], [by_hand(before, after)])


def by_hand(before: Result, after: Result) -> Kept:
    """Compare what two verdicts name where somebody set back the cause of the first culprit, or a part of it; or mended its call,
    where it has no cause."""
    now = {keys[0] for keys in _named(after)}
    parts = [] if before.culprit is None else parts_of(before.culprit) or [_call(before.culprit)]
    return kept_word(before, after, [one for one in parts if _key(one) not in now] or parts)


def _ended(now: Result, policy: Path | None, runs: Sequence[Path], kept: Sequence[Kept], by_hand: str = "") -> Undone:
    lines = [line for one in kept for line in undone_lines(one.undone, one.gone, one.left, one.new, one.lost)]
    verdict: Word = "could not tell" if now.verdict == "inconclusive" else "healed" if now.verdict == "aligned" else "not healed"
    if kept and now.verdict == "aligned":
        count = "1 cause" if len(kept) == 1 else f"{len(kept)} causes"
        lines.insert(0, f"with {count} set back, {runs[-1]} is aligned with the baseline")
    elif kept and kept[-1].gone:
        lines.insert(0, f"left: {now.sentence.splitlines()[0].partition('  ')[2]}")
    elif kept:
        lines.insert(0, f"what was set back did not heal it: {'; '.join(kept[-1].undone)}")
    else:
        lines = [f"no rule of a policy reaches it: {now.sentence.splitlines()[0].partition('  ')[2]}", by_hand]
    return Undone(verdict, "\n".join(lines), policy, tuple(runs), tuple(kept))


BY_HAND = "set it back in the script, record that as RUN, and have it judged"


def _as_recorded(capture: Capture) -> dict[str, Any]:
    """Return the options of a capture that make another one like it."""
    config = capture.root.get("config")
    held: Mapping[str, Any] = config if isinstance(config, Mapping) else {}
    found: dict[str, Any] = {"level": tuple(sorted(capture.levels))}
    if capture.root.get("detail") in DETAILS:
        found["detail"] = capture.root["detail"]
    if held.get("steps") is not None and capture.steps:  # else the training was recorded to its end
        found |= {"steps": f"{capture.steps[0]}:{capture.steps[-1] + 1}", "stop": True}
    return found


# --------------------------------------------------------------------------------------------- rules that undo a cause
def rules_for(finding: Finding, baseline: Capture, candidate: Capture) -> list[tuple[str, str]]:
    """Return ``(cause in words, text of the rules that undo it)`` for each part of a finding's cause that rules can undo."""
    first, second = (capture.ranks.get(finding.rank, {}) for capture in (baseline, candidate))
    last = min((side.steps[-1] for side in (baseline, candidate) if side.steps), default=None)
    parts, found = parts_of(finding), []
    for one in differing(first, second, last):
        if (said := setting_text(one)) in parts and (rules := _undoing(one, first)):
            found.append((said, rules))
    return found or _argument(finding)


def _undoing(setting: Setting, baseline: Mapping[str, Any]) -> str:
    """Return the rules that undo a setting; empty where none reaches it."""
    make = RULES.get(setting.group)
    return "" if make is None or setting.baseline == ABSENT or setting.candidate == ABSENT else make(setting, baseline)


def _of_module(setting: Setting, _: Mapping[str, Any]) -> str:
    same_kind = type(setting.baseline) is type(setting.candidate)
    if setting.name.endswith(OF_PARAMETERS) or setting.name in CASTING or not _plain(setting.baseline) or not same_kind:
        return ""
    return _rule("module", {"scope": exactly(*setting.places)}, setting.name, setting.baseline)


def _of_optimizer(setting: Setting, baseline: Mapping[str, Any]) -> str:
    rules = []
    for place in setting.places:
        values = values_by_step(baseline, setting.kind, place, setting.name)
        if not values or not all(isinstance(value, SCALARS) for _, value in values):
            return ""
        value = values[0][1] if len(values) == 1 else [[step, value] for step, value in values]
        rules.append(_rule("optimizer", {"scope": place, "op": exactly(setting.kind)}, setting.name, value))
    return "\n".join(rules)


RULES: dict[str, Callable[[Setting, Mapping[str, Any]], str]] = {"module": _of_module, "optimizer": _of_optimizer}


def _argument(finding: Finding) -> list[tuple[str, str]]:
    """Return the rule that gives a function the baseline's argument."""
    op = finding.api or finding.op
    if finding.kind != "argument" or finding.level == "module" or "::" in op or finding.phase not in ("forward", "recompute"):
        return []
    given = [values for slot in finding.slots if slot.slot == "arguments" for values in changed_arguments(slot)]
    where = {"op": exactly(op)} | ({} if finding.alike else {"scope": exactly(finding.scope)})
    found = []
    for given_as, before, after in given:
        name = argument_name(finding.op, given_as)
        part = f"{name} of {op}: {before} in the baseline, {after} in the candidate"
        if part in parts_of(finding) and "absent" not in (before, after) and _plain(value := json.loads(before)):
            found.append((part, _rule("api", where, name, value)))
    return found


def _plain(value: Any) -> bool:
    several = isinstance(value, list) and bool(value) and all(isinstance(one, SCALARS) for one in value)
    return several or isinstance(value, SCALARS)


def _rule(level: str, where: Mapping[str, str], name: str, value: Any) -> str:
    keys = [f"level = {in_toml(level)}", *(f"{key} = {in_toml(held)}" for key, held in where.items())]
    return "\n".join(["[[rule]]", *keys, f"set = {{ {_toml_key(name)} = {_value(value)} }}"]) + "\n"


def _toml_key(name: str) -> str:
    return name if name.isidentifier() else in_toml(name)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return in_toml(value) if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else repr(value)


NAMED = 3  # causes that are named of many


def undone_lines(
    undone: Sequence[str], gone: bool, left: Sequence[str], new: Sequence[str], lost: Sequence[str]
) -> list[str]:  # fmt: skip
    """Say what was set back, and whether what is left is what was called independent of it."""
    lines = [f"set back: {_some(undone)}" + ("" if gone else "; the verdict names it still")]
    if left:
        lines.append(f"left, as it was said: {_some(left)}")
    if new:
        lines.append(f"left, and taken for a victim before: {_some(new)}")
    if lost:
        lines.append(f"gone with it, and called independent before: {_some(lost)}")
    return lines


def _some(names: Sequence[str]) -> str:
    return "; ".join(map(one_line, names[:NAMED])) + (ELLIPSIS if len(names) > NAMED else "")
