"""The forward passes of R agents at once, as batched products over their stacked weights.

What is computed is read off a template agent, layer by layer; only its weights are replaced.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anybatch.models.agent import Agent
from anybatch.models.encoder import DictEncoder
from anybatch.models.mlp import MlpEncoder
from anybatch.observations import Observation
from anybatch.reproduce.stacked.shapes import not_stackable
from anybatch.reproduce.stacked.weights import Views

Vectors = tuple[Tensor, ...]
"""Observations as the first layers take them: (R, B, F) float32, for each part of a dictionary observation."""


class StackedNetworks:
    """Policy, value function and auxiliary head of R agents that are built like ``template``.

    Raises:
        ConfigError: it has layers other than those of the mlp encoder.
    """

    def __init__(self, template: Agent, runs: int) -> None:
        self.template = template
        self._runs = runs
        self._encoder = template.policy.encoder
        _parts("policy.encoder", self._encoder)
        if not isinstance(template.policy.head, nn.Linear):
            raise not_stackable("the actions are continuous, but stacked runs need discrete ones")

    def vectors(self, observation: Observation) -> Vectors:
        """Observations (R*B, ...), run after run, as vectors (R, B, F) for each part."""
        encoder = self._encoder
        if isinstance(encoder, DictEncoder):
            assert isinstance(observation, dict)
            parts = [(part, observation[key]) for part, key in zip(encoder.encoders, encoder.keys, strict=True)]
        else:
            assert isinstance(observation, Tensor)
            parts = [(encoder, observation)]
        return tuple(self._unflatten(part.vectors(tensor)) for part, tensor in parts)  # type: ignore[operator]

    def policy(self, views: Views, vectors: Vectors) -> Tensor:
        """Raw distribution parameters (R, B, P)."""
        return self._policy_head(views, self._features(views, "policy.encoder", self._encoder, vectors))

    def value(self, views: Views, vectors: Vectors) -> Tensor:
        """Values (R, B), with the gradients that :meth:`anybatch.models.agent.Agent.value` has."""
        return self._value(views, vectors, None)

    def policy_and_value(self, views: Views, vectors: Vectors) -> tuple[Tensor, Tensor]:
        """Raw distribution parameters (R, B, P) and values (R, B); a shared encoder runs once."""
        features = self._features(views, "policy.encoder", self._encoder, vectors)
        value = self._value(views, vectors, features.detach() if self.template.detach else features)
        return self._policy_head(views, features), value

    def all_heads(self, views: Views, vectors: Vectors) -> tuple[Tensor, Tensor, Tensor]:
        """Raw parameters (R, B, P), values (R, B) and auxiliary values (R, B) for the auxiliary phase."""
        features = self._features(views, "policy.encoder", self._encoder, vectors)
        auxiliary = dense(views, "auxiliary_value", features).squeeze(-1)
        return self._policy_head(views, features), self._value(views, vectors, features), auxiliary

    def _value(self, views: Views, vectors: Vectors, features: Tensor | None) -> Tensor:
        if self.template.value_encoder is not None:
            features = self._features(views, "value_encoder", self.template.value_encoder, vectors)
        elif features is None:
            features = self._features(views, "policy.encoder", self._encoder, vectors)
            features = features.detach() if self.template.detach else features
        return dense(views, "value_head", features).squeeze(-1)

    def _policy_head(self, views: Views, features: Tensor) -> Tensor:
        return dense(views, "policy.head", features)

    def _features(self, views: Views, name: str, encoder: nn.Module, vectors: Vectors) -> Tensor:
        outputs = []
        for (part, layers), x in zip(_parts(name, encoder), vectors, strict=True):
            for i, layer in enumerate(layers):
                x = dense(views, f"{part}.layers.{i}", x) if isinstance(layer, nn.Linear) else torch.tanh(x)
            outputs.append(x)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def _unflatten(self, vectors: Tensor) -> Tensor:
        return vectors.view(self._runs, -1, vectors.shape[-1])


def dense(views: Views, name: str, x: Tensor) -> Tensor:
    """The dense layer ``name`` of R runs: (R, B, in) to (R, B, out)."""
    return torch.baddbmm(views[f"{name}.bias"], x, views[f"{name}.weight"])


def _parts(name: str, encoder: nn.Module) -> list[tuple[str, nn.Sequential]]:
    """The dense stacks of an encoder, with the name of the module that holds each."""
    if isinstance(encoder, DictEncoder):
        return [found for i, part in enumerate(encoder.encoders) for found in _parts(f"{name}.encoders.{i}", part)]
    if not isinstance(encoder, MlpEncoder):
        raise not_stackable(f"the encoder is a {type(encoder).__name__}, but stacked runs need model.encoder mlp")
    return [(name, encoder.layers)]
