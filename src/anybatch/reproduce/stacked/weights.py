"""The weights of R agents as a few matrices (R, P): a row for each run, so that optimiser and EWMA are single calls.

Rows are split into what is trained together: ``policy`` (encoder and head), ``value`` (value head, and its encoder if
it has one of its own) and PPG's ``auxiliary`` head. Weights of dense layers are kept transposed, (in, out), as the
batched product takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anybatch.models.agent import Agent

Views = dict[str, Tensor]
"""Parameters by name, (R, in, out) for weights and (R, 1, out) for biases, sharing memory with their block."""


@dataclass(frozen=True)
class Block:
    """Where the parameters of a group lie in a row of its matrix (R, P)."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Shape of each view without the run axis."""

    def views(self, rows: Tensor) -> Views:
        """The parameters (R, ...) in a matrix (R, P), differentiable."""
        pieces = rows.split([_size(shape) for shape in self.shapes], dim=1)
        named = zip(self.names, pieces, self.shapes, strict=True)
        return {name: piece.view(-1, *shape) for name, piece, shape in named}

    def rows(self, agents: Sequence[Agent]) -> Tensor:
        """The matrix (R, P) that holds this group's parameters of R agents."""
        return torch.stack([torch.cat([_stored(agent, name) for name in self.names]) for agent in agents])


def blocks_of(agent: Agent) -> dict[str, Block]:
    """The groups of an agent's parameters, by name; ``auxiliary`` only if it has that head."""
    names: dict[str, list[str]] = {"policy": [], "value": [], "auxiliary": []}
    for name, _ in agent.named_parameters():
        module = name.partition(".")[0]
        names[{"policy": "policy", "auxiliary_value": "auxiliary"}.get(module, "value")].append(name)
    return {
        group: Block(tuple(found), tuple(_shape(agent.get_parameter(name)) for name in found))
        for group, found in names.items()
        if found
    }


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    if parameter.dim() == 1:
        return (1, len(parameter))
    outputs, inputs = parameter.shape
    return (inputs, outputs)


def _stored(agent: Agent, name: str) -> Tensor:
    parameter = agent.get_parameter(name).detach()
    return (parameter.T if parameter.dim() == 2 else parameter).reshape(-1)


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
