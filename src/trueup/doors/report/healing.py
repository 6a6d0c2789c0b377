"""What became of a healing, on a terminal.

    HEALED  with 1 rule, crf, forward, step 0, rank 0 (torch.Tensor.add) is clean, and the rest of step 0 too
            policy: runs/large-healed/policy.toml
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.text import Text

from trueup.doors.report.terminal import print_lines
from trueup.foundation.words.wording import clean, one_line

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.analysis.remedy.healing import Healed

COLOURS = {"healed": "bold green", "nothing to heal": "bold green", "not healed": "bold red", "could not tell": "bold yellow"}


def render(found: Healed, console: Console) -> None:
    """Print it."""
    head = f"{found.verdict.upper()}  "
    first, *rest = clean(found.sentence).splitlines()
    print_lines(console, [head + first, *(" " * len(head) + line for line in rest)], len(head), COLOURS[found.verdict])
    for line in found.uses:
        console.print(Padding(Text(one_line(line), "dim", overflow="fold"), (0, 0, 0, len(head))))
    if found.policy is not None and found.policy.exists():
        console.print()
        console.print(Text(f"  {found.policy.name}", "bold"))
        console.print(Padding(Text(clean(found.policy.read_text(encoding="utf-8").rstrip()), "cyan"), (0, 0, 0, 4)))
    if found.verdict == "healed":
        console.print()
        console.print(Text.assemble(("next  ", "bold"), "keep it in the training:"))
        console.print(Text(f'      trueup.apply_policy(model, "{one_line(str(found.policy))}")', "cyan"), soft_wrap=True)
