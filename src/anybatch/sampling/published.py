"""Weights on their way from the learner to a copy of its networks that acts in another thread or process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from anybatch.models.agent import Agent


def weights_of(agent: Agent) -> dict[str, Any]:
    """The agent's state, with the buffers that checkpoints leave out; nothing is copied."""
    return {**agent.state_dict(), **dict(agent.named_buffers())}


def load_weights(agent: Agent, weights: Mapping[str, Any]) -> None:
    """Load :func:`weights_of` a copy of ``agent``; those of an older checkpoint may lack buffers."""
    agent.load_state_dict(weights, strict=False)  # the rest are the buffers
    with torch.no_grad():
        for name, buffer in agent.named_buffers():
            if name in weights:
                buffer.copy_(weights[name])
