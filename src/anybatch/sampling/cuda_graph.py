"""Acting on a GPU: the forward pass of one batch size, recorded once as a CUDA graph and replayed.

A forward pass of a few hundred images is about sixty kernels that run faster than they can be launched one by one. On
an H200, IMPALA's forward pass of 256 images in bf16 ran at 288,000 samples a second from the graph and 189,000 without
(results/performance/h200.md). The graph shares memory with the parameters, so it always acts with the latest weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anybatch.models.agent import Agent
from anybatch.models.encoder import is_recordable
from anybatch.models.normalizer import ObservationNormalizer
from anybatch.observations import Observation, leaves, map_observation

_WARM_UP = 3  # passes before recording, during which libraries choose algorithms and allocate workspaces


def can_be_recorded(agent: Agent, device: torch.device) -> bool:
    """Whether ``agent`` runs on a GPU and all its encoders declare themselves ``recordable``.

    An encoder whose operations depend on the data, or that draws random numbers in Python, cannot be replayed.
    """
    return device.type == "cuda" and all(is_recordable(encoder) for encoder in agent.encoders)


class GraphedAgent:
    """An agent that acts from a CUDA graph; values alone are computed without it, since their batch size varies."""

    def __init__(self, agent: Agent) -> None:
        """The first call records the graph."""
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

    @property
    def observation_normalizer(self) -> ObservationNormalizer | None:
        """The agent's, which runs outside the graph."""
        return self._agent.observation_normalizer

    def value(self, observation: Observation) -> Tensor:
        """Values (B,) of any number of observations."""
        return self._agent.value(observation)

    @torch.no_grad()
    def _record(self, observation: Observation) -> None:
        self._observation = map_observation(torch.clone, observation)
        device = leaves(observation)[0].device
        with torch.cuda.device(device):
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP):
                    self._agent(self._observation)
            torch.cuda.current_stream(device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # calls of other threads, such as those of an environment, do not spoil the recording
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._outputs = self._agent(self._observation)
        self._graph = graph
