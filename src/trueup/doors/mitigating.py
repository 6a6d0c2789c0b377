"""`trueup.apply_policy`: the one entry to mitigation."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.foundation.model import TrueupError
from trueup.recording.adapters import ADAPTERS, listed, meant

if TYPE_CHECKING:
    from trueup.recording.adapters.paddle.policies import AppliedPolicy as PaddlePolicy
    from trueup.recording.adapters.torch.policies import AppliedPolicy


def apply_policy(model: Any | Iterable[Any] | None, policy: str | Path) -> AppliedPolicy | PaddlePolicy:
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
        TrueupError: the file is no policy, neither PyTorch nor Paddle is imported, a rule asks for what
            Paddle cannot do, or a capture follows compiled code (``compile="through"``).
    """
    found = meant(model)
    if found is None:
        names = listed([one.name for one in ADAPTERS if "policy" not in one.lacks])
        raise TrueupError(f"apply_policy found no framework: import {names} before you call trueup.apply_policy")
    if "policy" in found.lacks:
        raise TrueupError(f"a policy is not there for {found.title} yet ({found.page} says what there is)")
    apply: Any = import_module(f"trueup.recording.adapters.{found.name}.policies").apply_policy
    handle: AppliedPolicy | PaddlePolicy = apply(model, str(policy))
    return handle
