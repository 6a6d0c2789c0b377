"""Settings of two frameworks side by side: what the tables know is compared by PyTorch's names; of the rest nothing is said."""

from __future__ import annotations

from typing import Any

import pytest

from trueup.foundation.frameworks.dialect import Dialect
from trueup.foundation.frameworks.mapping import Mapping
from trueup.foundation.settings import differing


def manifest(framework: str, kind: str, groups: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    modules = more.pop("modules", {})
    optimizer = {"class": kind, "groups": groups, "changes": more.pop("changes", []), **more}
    return {"framework": framework, "settings": {"form": 3, "optimizers": [optimizer], "modules": modules}}


def said(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(one.name, one.baseline, one.candidate) for one in differing(first, second)]


TORCH = {"lr": 0.1, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.0, "fused": None}
PADDLE = {"lr": 0.1, "beta1": 0.9, "beta2": 0.98, "epsilon": 1e-8, "weight_decay": 0.0, "lazy_mode": False}
KERAS = {"lr": 0.1, "beta_1": 0.9, "beta_2": 0.98, "epsilon": 1e-8, "weight_decay": 0.0, "use_ema": False}


@pytest.mark.parametrize(("framework", "group"), [("paddle", PADDLE), ("tensorflow", KERAS)])
def test_names_and_settings_of_one_framework_are_no_differences(framework: str, group: dict[str, Any]) -> None:
    here, there = manifest("torch", "Adam", [TORCH]), manifest(framework, "Adam", [group])
    assert said(here, there) == said(there, here) == []
    there["settings"]["optimizers"][0]["groups"] = [{**group, "lr": 0.10000000149}]  # in float32
    assert said(here, there) == []
    there["settings"]["optimizers"][0]["groups"] = [{**group, "epsilon": 1e-6}]
    assert said(here, there) == [("eps", 1e-8, 1e-6)]


def test_clipping_is_named_in_the_words_of_one_framework() -> None:
    here = manifest("torch", "Adam", [TORCH], clipping="norm at 1")
    for how, others in [("ClipGradByGlobalNorm at 1.0", []), ("ClipGradByNorm at 1.0", ["norm of each gradient at 1"])]:
        found = said(here, manifest("paddle", "Adam", [PADDLE], clipping=how))
        assert found == [("clipping", "norm at 1", other) for other in others]
    assert said(here, manifest("paddle", "Adam", [PADDLE])) == [("clipping", "norm at 1", "none of its own")]  # by hand, perhaps
    keras = manifest("tensorflow", "Adam", [KERAS], clipping="global_clipnorm of all gradients at 2.0")
    assert said(here, keras) == [("clipping", "norm at 1", "norm at 2")]


def test_a_decay_of_which_a_function_decides_is_not_compared() -> None:
    groups = [{**TORCH, "weight_decay": 0.1}, TORCH]
    chosen = {**PADDLE, "weight_decay": 0.1, "apply_decay_param_fun": "decays"}
    assert said(manifest("torch", "AdamW", groups), manifest("paddle", "AdamW", [chosen])) == []
    everywhere = said(manifest("torch", "AdamW", groups), manifest("paddle", "AdamW", [{**PADDLE, "weight_decay": 0.1}]))
    assert everywhere == [("weight_decay", [0.1, 0.0], [0.1])]


def test_a_schedule_is_compared_step_by_step() -> None:
    here = manifest("torch", "SGD", [{"lr": 0.1}], changes=[[1, 0, {"lr": 0.2}]])
    there = manifest("paddle", "SGD", [{"lr": 0.1}], changes=[[1, 0, {"lr": 0.1}]])
    (one,) = differing(here, there)
    assert (one.name, one.baseline, one.candidate, one.step) == ("lr", 0.2, 0.1, 1)


def test_an_optimizer_or_a_layer_that_no_table_has_says_nothing() -> None:
    here, there = manifest("torch", "Adam", [TORCH]), manifest("paddle", "Mine", [PADDLE])
    assert said(here, there) == []
    here = manifest("torch", "Adam", [TORCH], modules={"norm": {"class": "LayerNorm", "training": True, "eps": 1e-5}})
    there = manifest("paddle", "Adam", [PADDLE], modules={"norm": {"class": "LayerNorm", "training": False, "_epsilon": 1e-3}})
    assert sorted(said(here, there)) == [("eps", 1e-5, 1e-3), ("training", True, False)]
    there["settings"]["modules"]["norm"]["class"] = "MyNorm"
    assert said(here, there) == []
    for odd in ([7], [{"class": "Adam", "groups": 7, "changes": 7, "parameters": 7, "clipping": 7}]):
        assert said(here, {"framework": "paddle", "settings": {"optimizers": odd, "modules": {"norm": 7}}}) == []


TORCH_CONVOLUTION, PADDLE_CONVOLUTION = "torch.nn.functional.conv2d", "paddle._C_ops.conv2d"


@pytest.mark.parametrize(("torch", "paddle", "same"), [
    ("{}", '{"stride": [1, 1], "dilation": [1, 1], "groups": 1}', True),
    ('{"stride": 2, "groups": 1}', '{"stride": [2, 2], "dilation": [1, 1], "groups": 1}', True),
    ('{"2": null, "3": [2, 2]}', '{"stride": [2, 2], "dilation": [1, 1], "groups": 1}', True),
    ('{"stride": 2}', '{"stride": [2, 1], "dilation": [1, 1], "groups": 1}', False),
    ("{}", '{"stride": [1, 1], "dilation": [1, 1], "groups": 2}', False),
])  # fmt: skip
def test_an_argument_is_the_same_however_a_framework_writes_it(torch: str, paddle: str, same: bool) -> None:
    """PyTorch's users leave out what Paddle's layers always say, and write one number for two."""
    here = Dialect("torch", Mapping(), candidate=False).arguments(TORCH_CONVOLUTION, torch)
    there = Dialect("paddle", Mapping(), candidate=True).arguments(PADDLE_CONVOLUTION, paddle)
    assert (here == there) is same, f"{here} {there}"
