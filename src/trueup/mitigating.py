"""`trueup.apply_policy`: the one entry to mitigation."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.model import TrueupError

if TYPE_CHECKING:
    from trueup.adapters.torch.policies import AppliedPolicy


def apply_policy(model: Any | Iterable[Any] | None, policy: str | Path) -> AppliedPolicy:
    """Execute calls as a policy says: in a wider dtype, on the CPU or deterministically.

        handle = trueup.apply_policy(model, "policy.toml")
        train(model)
        print(*handle.uses(), sep="\\n")      # how many calls each rule changed
        handle.remove()                      # or: with trueup.apply_policy(...): train(model)

    The policy holds for this process, on the thread that applies it and in its backward passes. A rule that changes nothing is said
    on stderr when the handle is removed, or when the process ends. Under ``trueup capture`` the manifest says what ran with it.

    Args:
        model: the module, or modules, whose paths name the scopes; None: the first module with parameters that runs is the root.
        policy: path of a file (docs/policy.md).

    Raises:
        TrueupError: the file is no policy, PyTorch is not imported, or a capture follows compiled code (``compile="through"``).
    """
    if "torch" not in sys.modules:
        raise TrueupError("apply_policy found no framework: import torch before you call trueup.apply_policy")
    from trueup.adapters.torch.policies import apply_policy as apply_torch

    return apply_torch(model, str(policy))
