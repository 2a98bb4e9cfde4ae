"""Rules that carry hyperparameters from one batch size to another, and the conditions under which they hold."""

from anybatch.scaling.changes import Change
from anybatch.scaling.conditions import validity, warn_about
from anybatch.scaling.findings import Finding
from anybatch.scaling.ppo import center_of_mass_of_ppo, from_ppo
from anybatch.scaling.rescaling import FIELDS, rescale, scale, table
from anybatch.scaling.single import (
    adam_beta,
    adam_eps,
    adam_step_size,
    advantage_span,
    center_of_mass,
    epoch_window,
    kl_factor,
    max_grad_norm,
    max_lag,
    policy_iterations,
    saturating_step_size,
    sgd_step_size,
)

__all__ = [
    "FIELDS",
    "Change",
    "Finding",
    "adam_beta",
    "adam_eps",
    "adam_step_size",
    "advantage_span",
    "center_of_mass",
    "center_of_mass_of_ppo",
    "epoch_window",
    "from_ppo",
    "kl_factor",
    "max_grad_norm",
    "max_lag",
    "policy_iterations",
    "rescale",
    "saturating_step_size",
    "scale",
    "sgd_step_size",
    "table",
    "validity",
    "warn_about",
]
