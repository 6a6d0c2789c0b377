"""Names of tensors brought back to those of the model: what wrappers put before or between them is taken off, where it stands and
nowhere else.

    module.conv1.weight                         DataParallel, DistributedDataParallel
    _orig_mod.conv1.weight                      torch.compile
    a._fsdp_wrapped_module.b.weight             FullyShardedDataParallel
    a._checkpoint_wrapped_module.b.weight       activation checkpointing
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping

ANYWHERE = ("_orig_mod", "_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module", "_forward_module")
"""Names of modules that wrappers alone have."""
BEFORE = ("module",)
"""Names that wrappers have and that models may have, too: taken off at the front alone."""
_WRAPPER = re.compile(rf"(?:(?<=\.)|^)(?:{'|'.join(ANYWHERE)})\.")


def unwrapped(names: Collection[str]) -> dict[str, str]:
    """Return each name without what wrappers added; a name keeps it where two would become one."""
    found = {name: _without(name) for name in names}
    counts = Counter(found.values())
    return {name: new if counts[new] == 1 else name for name, new in found.items()}


def _without(name: str) -> str:
    new = _WRAPPER.sub("", name)
    while any(new.startswith(f"{word}.") for word in BEFORE) and "." in new:
        new = new.partition(".")[2]
    return new


def matched(saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return saved names with the names of a model that they are: alike without wrappers, or after one prefix and one suffix that
    most names share. Shapes must be alike; a name that fits several, or none, is left out."""
    plain = unwrapped(saved)
    pairs = {name: new for name, new in plain.items() if new in wanted}
    rest = {name: (new, _WRAPPER.sub("", name)) for name, new in plain.items() if name not in pairs}  # "module" may be the model's
    taken = set(pairs.values())
    affixes: Counter[tuple[str, str, str, str]] = Counter()
    open_ = [name for name in wanted if name not in taken]
    for name, forms in rest.items():
        for want in open_:
            if saved[name] == wanted[want]:
                affixes.update({affix for form in forms if (affix := _affix(form, want)) is not None})
    for (drop, add, cut, tail), _ in sorted(affixes.items(), key=lambda one: (-one[1], sum(map(len, one[0])))):
        for name, form in [(name, form) for name, forms in rest.items() for form in forms]:
            if name in rest and form.startswith(drop) and form.endswith(cut):
                want = add + form[len(drop) : len(form) - len(cut)] + tail
                if want in wanted and want not in taken and wanted[want] == saved[name]:
                    pairs[name] = want
                    taken.add(want)
                    del rest[name]
    return pairs


def _affix(name: str, want: str) -> tuple[str, str, str, str] | None:
    """Return what to take off the front and to put there, and the same for the end, to make one name of another: whole parts
    between points at the front, and a last part that begins or ends alike."""
    if name == want:
        return "", "", "", ""
    if name.endswith(f".{want}"):
        return name[: -len(want)], "", "", ""
    if want.endswith(f".{name}"):
        return "", want[: -len(name)], "", ""
    if name.startswith(want) and not name[len(want)].isalnum():
        return "", "", name[len(want) :], ""
    if want.startswith(name) and not want[len(name)].isalnum():
        return "", "", "", want[len(name) :]
    middle = re.search(rf"(?:^|\.){re.escape(want)}(?=[._])", name)
    if middle is not None:
        start = middle.end() - len(want)
        return name[:start], "", name[middle.end() :], ""
    return None
