"""The agents of R runs as one agent, whose layers are batched products over stacked weights.

Parameters that are trained together are the rows of one matrix (R, P), so that a step of the optimiser or of the EWMA
is a single call. An observation, and whatever the networks compute of it, has a run axis in front: (R, B, ...).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from anybatch.models.agent import Agent, GaussianHead, Policy, bounded
from anybatch.models.encoder import DictEncoder
from anybatch.models.mlp import MlpEncoder
from anybatch.models.nature import STRIDE, SmallConvEncoder
from anybatch.observations import Inputs
from anybatch.reproduce.stacked.shapes import not_stackable


class Views(list[Tensor]):
    """Parameters (R, ...) that share memory with a matrix; a copy is empty, as it belongs to another matrix."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Views:
        memo[id(self)] = copied = Views()
        return copied


class Weights(nn.Module):
    """Parameters of R networks that are built alike, a row of the matrix (R, P) for each."""

    def __init__(self, parameters: Sequence[Sequence[nn.Parameter]]) -> None:
        """Copy the ``parameters`` of R networks. The weights of dense layers are kept transposed, for baddbmm."""
        super().__init__()
        stored = [[x.detach().T if x.dim() == 2 else x.detach()[None] for x in one] for one in parameters]
        self.rows = nn.Parameter(torch.stack([torch.cat([x.reshape(-1) for x in one]) for one in stored]))
        self._shapes = [x.shape for x in stored[0]]
        self._sizes = [x.numel() for x in stored[0]]
        self._indices = {id(x): index for index, x in enumerate(parameters[0])}
        self.views = Views()
        """Each parameter: (R, in, out) for a weight, (R, 1, out) for a vector. Filled by :meth:`bind`."""

    def index(self, parameter: Tensor) -> int:
        """Index in ``views`` of a parameter of the first network."""
        return self._indices[id(parameter)]

    def bind(self) -> None:
        """Split the matrix for the next forward pass, differentiably where gradients are enabled."""
        differentiable = torch.is_grad_enabled()
        if differentiable or not self.views or self.views[0].requires_grad:
            parts = (self.rows if differentiable else self.rows.detach()).split(self._sizes, dim=1)
            self.views[:] = [part.view(-1, *shape) for part, shape in zip(parts, self._shapes, strict=True)]


class StackedLinear(nn.Module):
    """A dense layer: (R, B, in) to (R, B, out)."""

    def __init__(self, layer: nn.Linear, weights: Weights) -> None:
        super().__init__()
        self._views = weights.views
        self._weight, self._bias = weights.index(layer.weight), weights.index(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self._views[self._bias], x, self._views[self._weight])


class StackedGaussianHead(nn.Module):
    """:class:`anybatch.models.agent.GaussianHead`: (R, B, F) to means and log standard deviations, (R, B, 2d)."""

    def __init__(self, head: GaussianHead, weights: Weights) -> None:
        super().__init__()
        self.mean = StackedLinear(head.mean, weights)
        self._views = weights.views
        self._bounds = head.bounds
        layer = head.log_std
        self._log_std = StackedLinear(layer, weights) if isinstance(layer, nn.Linear) else weights.index(layer)

    def forward(self, features: Tensor) -> Tensor:
        mean: Tensor = self.mean(features)
        log_std = self._log_std
        stds = self._views[log_std].expand_as(mean) if isinstance(log_std, int) else log_std(features)
        return torch.cat((mean, bounded(stds, self._bounds)), dim=-1)


class StackedMlp(nn.Module):
    """:class:`anybatch.models.mlp.MlpEncoder`: observations (R, B, ...) to features (R, B, width)."""

    low_precision = False

    def __init__(self, encoder: MlpEncoder, weights: Weights) -> None:
        super().__init__()
        self.out_features = encoder.out_features
        self._layers = [StackedLinear(x, weights) for x in encoder.layers if isinstance(x, nn.Linear)]
        self._vectors = encoder.vectors

    def forward(self, observation: Tensor) -> Tensor:
        runs, samples = observation.shape[:2]
        features = self._vectors(observation.flatten(0, 1)).view(runs, samples, -1)
        for layer in self._layers:  # not by calling the modules, which takes longer than some of what they do
            features = torch.tanh(layer.forward(features))
        return features


class StackedSmallConv(nn.Module):
    """:class:`anybatch.models.nature.SmallConvEncoder`: observations (R, B, ...) to features (R, B, width)."""

    low_precision = False

    def __init__(self, encoder: SmallConvEncoder, weights: Weights) -> None:
        super().__init__()
        self.out_features = encoder.out_features
        self._images = encoder.images
        self._views = weights.views
        bias = encoder.conv.bias
        assert bias is not None
        self._weight, self._bias = weights.index(encoder.conv.weight), weights.index(bias)
        self._dense = StackedLinear(encoder.dense, weights)

    def forward(self, observation: Tensor) -> Tensor:
        runs, samples = observation.shape[:2]
        images = self._images(observation.flatten(0, 1))
        channels = images.view(runs, samples, *images.shape[1:]).transpose(0, 1).flatten(1, 2)
        weight, bias = self._views[self._weight], self._views[self._bias]
        # a run is a group of channels
        maps = functional.conv2d(channels, weight.flatten(0, 2), bias.flatten(), STRIDE, groups=runs)
        maps = torch.relu(maps).view(samples, runs, -1).transpose(0, 1)
        return torch.tanh(self._dense.forward(maps))


class StackedPolicy(Policy):
    """The policies of R runs: observations (R, B, ...) to raw distribution parameters (R, B, P)."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        """Stack ``policies`` of equal shape.

        Raises:
            ConfigError: their layers are not those of the mlp or the small-conv encoder.
        """
        nn.Module.__init__(self)  # that of Policy would draw weights
        first = policies[0]
        self.weights = Weights([list(policy.parameters()) for policy in policies])
        self.encoder = _stacked_encoder(first.encoder, self.weights)
        stack_head = StackedGaussianHead if isinstance(first.head, GaussianHead) else StackedLinear
        self.head = stack_head(first.head, self.weights)  # type: ignore[arg-type]
        self.action_spec = first.action_spec
        self.masking = first.masking
        self.precision = "fp32"

    def features(self, observation: Inputs) -> Tensor:
        """The encoder's output (R, B, F)."""
        self.weights.bind()
        features: Tensor = self.encoder.forward(self.encoder_input(observation))
        return features


class StackedAgent(Agent):
    """The agents of R runs, with the interface of one: (R, B, ...) where an agent has (B, ...)."""

    def __init__(self, agents: Sequence[Agent]) -> None:
        """Stack ``agents`` of equal shape, copying their weights.

        Raises:
            ConfigError: their layers are not those of the mlp or the small-conv encoder.
        """
        nn.Module.__init__(self)  # that of Agent would draw weights
        first = agents[0]
        self.policy = StackedPolicy([agent.policy for agent in agents])
        self.detach = first.detach
        normalizer = first.observation_normalizer
        self.observation_normalizer = normalizer and normalizer.empty(len(agents))
        encoders = [[] if agent.value_encoder is None else [agent.value_encoder] for agent in agents]
        value = [nn.ModuleList([*encoder, agent.value_head]) for encoder, agent in zip(encoders, agents, strict=True)]
        self.value_weights = Weights([list(module.parameters()) for module in value])
        self.value_encoder = first.value_encoder and _stacked_encoder(first.value_encoder, self.value_weights)
        self.value_head = StackedLinear(first.value_head, self.value_weights)  # type: ignore[assignment]
        self.auxiliary_value = None
        if first.auxiliary_value is not None:
            heads = [agent.auxiliary_value for agent in agents]
            self.auxiliary_weights = Weights([list(head.parameters()) for head in heads if head is not None])
            self.auxiliary_value = StackedLinear(first.auxiliary_value, self.auxiliary_weights)  # type: ignore[assignment]

    def all_heads(self, observation: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Raw parameters (R, B, P), values (R, B) and auxiliary values (R, B) for PPG's auxiliary phase."""
        self.auxiliary_weights.bind()
        return super().all_heads(observation)

    def value_parameters(self) -> list[nn.Parameter]:
        """The value function's own parameters; those of a shared encoder are among the policy's."""
        return [self.value_weights.rows]

    def _value(self, observation: Inputs, features: Tensor | None) -> Tensor:
        self.value_weights.bind()
        return super()._value(observation, features)


def _stacked_encoder(encoder: nn.Module, weights: Weights) -> nn.Module:
    if isinstance(encoder, DictEncoder):
        parts = zip(encoder.keys, encoder.encoders, strict=True)
        return DictEncoder({key: _stacked_encoder(part, weights) for key, part in parts})
    if type(encoder) is SmallConvEncoder:
        return StackedSmallConv(encoder, weights)
    if type(encoder) is not MlpEncoder:
        raise not_stackable(
            f"the encoder is a {type(encoder).__name__}, but stacked runs need model.encoder mlp or small-conv"
        )
    return StackedMlp(encoder, weights)
