"""Acting on a GPU: the forward pass of one batch size, recorded once as a CUDA graph and replayed.

A forward pass of a few hundred images is some sixty kernels that take less time than it takes to launch them. Weights
are read from where they lie, so a replay acts with what the optimiser has made of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anybatch.models.agent import Agent
from anybatch.models.encoder import is_recordable
from anybatch.observations import Observation, leaves, map_observation

_WARM_UP = 3  # passes before recording, in which libraries choose their algorithms and allocate workspaces


def can_be_recorded(agent: Agent, device: torch.device) -> bool:
    """Whether a recording computes what ``agent`` does: on a GPU, with encoders that say so by ``recordable``.

    An encoder that looks at its data, or draws random numbers in Python, must run afresh each time.
    """
    return device.type == "cuda" and all(is_recordable(encoder) for encoder in agent.encoders)


class GraphedAgent:
    """An agent that acts from a recording; values alone are computed as ever, since their batch size varies."""

    def __init__(self, agent: Agent) -> None:
        """Record with the first observation."""
        self._agent = agent
        self._graph: torch.cuda.CUDAGraph | None = None
        self._observation: Observation = torch.empty(0)
        self._outputs: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))

    def __call__(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Raw distribution parameters (B, P) and values (B,) without gradient; B is that of the first call."""
        if self._graph is None:
            self._record(observation)
        else:
            for static, new in zip(leaves(self._observation), leaves(observation), strict=True):
                static.copy_(new)
        assert self._graph is not None
        self._graph.replay()
        params, value = self._outputs
        return params.clone(), value.clone()  # the next replay overwrites them

    def value(self, observation: Observation) -> Tensor:
        """Values (B,) of any number of observations."""
        return self._agent.value(observation)

    @torch.no_grad()
    def _record(self, observation: Observation) -> None:
        self._observation = map_observation(torch.clone, observation)
        device = leaves(observation)[0].device
        with torch.cuda.device(device):
            aside = torch.cuda.Stream(device)
            aside.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(aside):
                for _ in range(_WARM_UP):
                    self._agent(self._observation)
            torch.cuda.current_stream(device).wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=aside):
                self._outputs = self._agent(self._observation)
        self._graph = graph
