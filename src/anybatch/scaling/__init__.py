"""Rules that carry hyperparameters from one batch size to another, and the conditions under which they hold."""

from anybatch.scaling.changes import Change
from anybatch.scaling.conditions import validity, warn_about
from anybatch.scaling.findings import Finding
from anybatch.scaling.ppo import center_of_mass_of_ppo, from_ppo
from anybatch.scaling.rescaling import FIELDS, rescale, scale, table

__all__ = [
    "FIELDS",
    "Change",
    "Finding",
    "center_of_mass_of_ppo",
    "from_ppo",
    "rescale",
    "scale",
    "table",
    "validity",
    "warn_about",
]
