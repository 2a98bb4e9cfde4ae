"""Optimisers of policy and value."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from anybatch.config.schema import OptimizerConfig
from anybatch.errors import ConfigError
from anybatch.optimizers import make_optimizer


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_narrower_than_fp32_are_refused(kind: str, dtype: torch.dtype) -> None:
    """Their Adam would keep its averages in them: with beta_2 = .999 the second one never moves in bf16."""
    config = OptimizerConfig(kind=kind)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"a parameter of the network is {dtype}, but must be float32"):
        make_optimizer([Parameter(torch.zeros(2)), Parameter(torch.zeros(2, dtype=dtype))], config)
    for allowed in (torch.float32, torch.float64):
        make_optimizer([Parameter(torch.zeros(2, dtype=allowed))], config)
