"""Networks and action distributions."""

from __future__ import annotations

from anybatch.models.actions import ActionSpec
from anybatch.models.agent import Agent, Policy, build_agent
from anybatch.models.distributions import Bernoulli, Categorical, DiagonalGaussian, Distribution, MultiCategorical
from anybatch.models.encoder import build_encoder
from anybatch.models.impala import ImpalaEncoder
from anybatch.models.mlp import MlpEncoder
from anybatch.models.nature import NatureEncoder, SmallConvEncoder
from anybatch.models.precision import resolve_device, resolve_precision
from anybatch.models.recurrent import RecurrentEncoder

__all__ = [
    "ActionSpec",
    "Agent",
    "Bernoulli",
    "Categorical",
    "DiagonalGaussian",
    "Distribution",
    "ImpalaEncoder",
    "MlpEncoder",
    "MultiCategorical",
    "NatureEncoder",
    "Policy",
    "RecurrentEncoder",
    "SmallConvEncoder",
    "build_agent",
    "build_encoder",
    "resolve_device",
    "resolve_precision",
]
