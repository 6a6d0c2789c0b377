"""`map.toml` as `trueup map` writes it: every pair of modules on a line, the unsure ones with the reason."""

from __future__ import annotations

import json
from pathlib import Path

from trueup.analysis.pairing.proposing import Pair, Proposal
from trueup.foundation.frameworks.trees import Tree
from trueup.foundation.model import TrueupError

HEAD = """\
# Which module of the candidate is which of the baseline: proposed by `trueup map`, to be read before it is believed.
# Pairs with `unsure` want a look; correct a name, or delete the line. docs/alignment.md says what else may stand here.

made = {{ baseline = {baseline}, candidate = {candidate} }}   # frameworks
"""


def text(proposal: Proposal) -> str:
    """Return the file."""
    names = (json.dumps(tree.framework) for tree in (proposal.baseline, proposal.candidate))
    lines = [HEAD.format(**dict(zip(("baseline", "candidate"), names, strict=True)))]
    sides = (("baseline", proposal.baseline, proposal.only_baseline), ("candidate", proposal.candidate, proposal.only_candidate))
    for side, _, only in sides:
        lines += [f"# only in the {side}: {name}" for name in only]
    alone = [_alone(side, tree, scope) for side, tree, _ in sides for scope in proposal.alone(side) if tree.layer(scope)]
    lines += ["layer = [", *(f"    {_line(pair)}," for pair in proposal.pairs), *(f"    {one}," for one in alone), "]", ""]
    return "\n".join(lines)


def _line(pair: Pair) -> str:
    told = {"baseline": pair.baseline, "candidate": pair.candidate, "kind": pair.kind, "unsure": pair.unsure}
    said = {name: value for name, value in told.items() if value or name in ("baseline", "candidate")}
    inside = ", ".join(f"{name} = {json.dumps(value)}" for name, value in said.items())
    return f"{{ {inside} }}"


def _alone(side: str, tree: Tree, scope: str) -> str:
    """Say what a layer without counterpart is: of attention, projections that the other framework packs into one matrix."""
    layer = tree.layer(scope)
    return f"{{ {side} = {json.dumps(scope)}, kind = {json.dumps(layer.name if layer is not None else '')} }}"


def write(proposal: Proposal, path: str | Path) -> Path:
    """Write the file.

    Raises:
        TrueupError: it cannot be written.
    """
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text(proposal), "utf-8")
    except OSError as error:
        raise TrueupError(f"cannot write {file}: {error.strerror or error}; choose another place") from None
    return file
