"""Settings that have no effect beside others, such as ``policy.center_of_mass`` without an EWMA."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from anybatch.config import fields
from anybatch.config.schema import TrainConfig

_NEEDS: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    ("policy.objective", lambda x: x == "clip", ("policy.clip", "policy.clip_schedule")),
    ("policy.objective", lambda x: x == "kl", ("policy.kl_coefficient", "policy.kl_estimator")),
    ("policy.entropy_coefficient", lambda x: x != 0, ("policy.entropy_schedule",)),
    ("optimizer.kind", lambda x: x == "sgd", ("optimizer.sgd_momentum",)),
    ("optimizer.kind", lambda x: x == "adam", ("optimizer.adam_betas", "optimizer.adam_eps")),
    ("optimizer.kl_target", lambda x: x is not None, ("optimizer.kl_factor",)),
    ("model.recurrent", lambda x: x != "none", ("model.recurrent_width",)),
    ("aux.enabled", lambda x: x, ("aux.",)),
    ("observation.normalize", lambda x: x, ("observation.",)),
    ("reward.normalize", lambda x: x, ("reward.",)),
    ("advantage.normalize", lambda x: x, ("advantage.span",)),
    ("rollout.source.kind", lambda x: x == "asynchronous", ("rollout.source.max_lag",)),
    ("eval.every", lambda x: x is not None, ("eval.",)),
    ("log.wandb", lambda x: x, ("log.wandb_project",)),
    ("env.id", lambda x: x.startswith(("envpool:", "procgen:")), ("env.threads",)),
)
"""A field, the values with which others have an effect, and these: full names, or a section with its dot."""


def without_effect(config: TrainConfig, names: Iterable[str]) -> list[str]:
    """A sentence for each field in ``names`` that has no effect in this configuration."""
    needs = [*_NEEDS]
    if not config.policy.interpolated:
        needs.append(("policy.proximal", lambda x: x == "ewma", ("policy.center_of_mass",)))
    return [
        f"{name} has no effect, because {control} is {fields.word(fields.get(config, control))}"
        for name in names
        for control, effective, affected in needs
        if name != control
        and any(name == x or (x.endswith(".") and name.startswith(x)) for x in affected)
        and not effective(fields.get(config, control))
    ]
