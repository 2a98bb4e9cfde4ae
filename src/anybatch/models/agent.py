"""The policy and value networks, sharing an encoder or not."""

from __future__ import annotations

import math
from typing import Any, Literal

import gymnasium as gym
import torch
from torch import Tensor, nn

from anybatch.config import fields
from anybatch.config.schema import GaussianConfig, ModelConfig, ObservationConfig
from anybatch.config.validation import check_choice
from anybatch.distributed.random_state import seeding
from anybatch.errors import ConfigError
from anybatch.models.actions import ActionSpec
from anybatch.models.distributions import Distribution
from anybatch.models.encoder import build_encoder
from anybatch.models.layers import head
from anybatch.models.masks import Masking
from anybatch.models.normalizer import EnvObservation, ObservationNormalizer
from anybatch.models.precision import encode
from anybatch.models.recurrent import RecurrentEncoder
from anybatch.observations import Inputs, Sequences


class GaussianHead(nn.Module):
    """Means and log standard deviations of a Gaussian policy: features (B, F) to (B, 2d).

    Log standard deviations are parameters, or an output of a second layer; both start at the same number.
    """

    def __init__(
        self, in_features: int, dimensions: int, config: GaussianConfig | None = None, gain: float | None = None
    ) -> None:
        super().__init__()
        config = config or GaussianConfig()
        self.bounds = config.log_std_bounds
        start = unbounded(config.log_std, self.bounds)
        self.mean = head(in_features, dimensions, gain)
        self.log_std: nn.Linear | nn.Parameter
        if config.std == "network":
            self.log_std = head(in_features, dimensions, gain)
            nn.init.constant_(self.log_std.bias, start)
        else:
            self.log_std = nn.Parameter(torch.full((dimensions,), start))

    def forward(self, features: Tensor) -> Tensor:
        """Means, then log standard deviations, (B, 2d)."""
        mean: Tensor = self.mean(features)
        log_std = self.log_std(features) if isinstance(self.log_std, nn.Module) else self.log_std.expand_as(mean)
        return torch.cat((mean, bounded(log_std, self.bounds)), dim=-1)


def bounded(log_std: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    """Bound smoothly by tanh, with slope 1 in the middle; clamping would leave no gradient that leads back."""
    if bounds is None:
        return log_std
    middle, half = (bounds[1] + bounds[0]) / 2, (bounds[1] - bounds[0]) / 2
    return middle + half * ((log_std - middle) / half).tanh()


def unbounded(log_std: float, bounds: tuple[float, float] | None) -> float:
    """The number for which :func:`bounded` gives ``log_std``."""
    if bounds is None:
        return log_std
    middle, half = (bounds[1] + bounds[0]) / 2, (bounds[1] - bounds[0]) / 2
    return middle + half * math.atanh((log_std - middle) / half)


class Policy(nn.Module):
    """An encoder and a float32 head: observations (B, ...) to raw distribution parameters (B, P).

    It contains all its parameters, so copy.deepcopy of it gives the copy for the proximal EWMA (the paper needs one of
    the policy network alone).
    """

    def __init__(
        self,
        encoder: nn.Module,
        action_spec: ActionSpec,
        precision: Literal["fp32", "bf16"] = "fp32",
        *,
        gaussian: GaussianConfig | None = None,
        gain: float | None = None,
        masking: Masking | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.masking = masking
        self.action_spec = action_spec
        self.precision: Literal["fp32", "bf16"] = precision
        features = int(getattr(encoder, "out_features"))  # noqa: B009
        self.head: nn.Module = (
            GaussianHead(features, action_spec.num_params // 2, gaussian, gain)
            if action_spec.continuous
            else head(features, action_spec.num_params, gain)
        )

    def encoder_input(self, observation: Inputs) -> Inputs:
        """The observation without its mask, if it has one: what encoders take."""
        return observation if self.masking is None else self.masking.rest(observation)

    def features(self, observation: Inputs) -> Tensor:
        """The encoder's output (B, F), float32."""
        return encode(self.encoder, self.encoder_input(observation), self.precision)

    def outputs(self, features: Tensor, observation: Inputs) -> Tensor:
        """Raw distribution parameters (B, P) of features (B, F), with the mask in the observation applied."""
        params: Tensor = self.head(features)
        return params if self.masking is None else self.masking.apply(params, observation)

    def forward(self, observation: Inputs) -> Tensor:
        """Raw distribution parameters (B, P), float32."""
        return self.outputs(self.features(observation), observation)

    def step(self, inputs: Sequences) -> tuple[Tensor, Tensor]:
        """:meth:`forward` of a recurrent policy, and its state after the last step of each piece, (K, S)."""
        rest = self.encoder_input(inputs)
        assert isinstance(self.encoder, RecurrentEncoder) and isinstance(rest, Sequences)
        features, state = self.encoder.unroll(rest)
        return self.outputs(features, inputs), state

    def distribution(self, observation: Inputs) -> Distribution:
        """The action distribution for each observation."""
        return self.action_spec.distribution(self(observation))


class Agent(nn.Module):
    """Policy and value function; see :func:`build_agent` for the architectures.

    With `auxiliary_head` there is a second value head on the policy's encoder, `auxiliary_value`, which PPG trains in
    the auxiliary phase only. With `observation_normalizer` the networks take observations that it has normalised: its
    statistics are part of the agent's state, but sampling normalises once and training uses the result.
    """

    def __init__(
        self,
        policy: Policy,
        value_encoder: nn.Module | None,
        *,
        detach: bool = False,
        auxiliary_head: bool = False,
        value_gain: float | None = None,
        observation_normalizer: ObservationNormalizer | None = None,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.value_encoder = value_encoder
        self.detach = detach
        policy_features = int(getattr(policy.encoder, "out_features"))  # noqa: B009
        value_features = int(getattr(value_encoder or policy.encoder, "out_features"))  # noqa: B009
        self.value_head = head(value_features, 1, value_gain)
        self.auxiliary_value = head(policy_features, 1, value_gain) if auxiliary_head else None
        self.observation_normalizer = observation_normalizer

    @property
    def action_spec(self) -> ActionSpec:
        """The action space of the policy's outputs."""
        return self.policy.action_spec

    def normalize(self, observation: EnvObservation) -> EnvObservation:
        """Observations (B, ...) of the environment as the networks take them."""
        normalizer = self.observation_normalizer
        return observation if normalizer is None else normalizer.normalize(observation)

    @property
    def encoders(self) -> list[nn.Module]:
        """The policy's encoder, then the value function's if that is a separate one."""
        return [self.policy.encoder, *([] if self.value_encoder is None else [self.value_encoder])]

    @property
    def state_size(self) -> int:
        """Numbers S of the state of all recurrent networks; 0 if there are none."""
        return sum(encoder.state_size for encoder in self.encoders if isinstance(encoder, RecurrentEncoder))

    def step(self, inputs: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`forward` of recurrent networks, and their state after the last step of each piece, (K, S)."""
        rest = self.policy.encoder_input(inputs)
        assert isinstance(self.policy.encoder, RecurrentEncoder) and isinstance(rest, Sequences)
        features, state = self.policy.encoder.unroll(rest)
        params = self.policy.outputs(features, inputs)
        if self.value_encoder is None:
            return params, self.value_head(features).squeeze(-1), state
        assert isinstance(self.value_encoder, RecurrentEncoder)
        value_features, value_state = self.value_encoder.unroll(rest)
        return params, self.value_head(value_features).squeeze(-1), torch.cat((state, value_state), dim=-1)

    def forward(self, observation: Inputs) -> tuple[Tensor, Tensor]:
        """Raw distribution parameters (B, P) and values (B,), float32; a shared encoder runs once.

        Under `detach` the gradient of the values stops at the encoder.
        """
        features = self.policy.features(observation)
        params = self.policy.outputs(features, observation)
        return params, self._value(observation, features.detach() if self.detach else features)

    def value(self, observation: Inputs) -> Tensor:
        """Values (B,) alone, with the same gradients as in :meth:`forward`."""
        if self.value_encoder is not None:
            return self._value(observation, None)
        if self.detach:
            with torch.no_grad():
                features = self.policy.features(observation)
        else:
            features = self.policy.features(observation)
        return self._value(observation, features)

    def all_heads(self, observation: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Raw parameters (B, P), values (B,) and auxiliary values (B,) for PPG's auxiliary phase.

        Here the values' gradient reaches the encoder under `detach` as well. Raises ConfigError if the agent was built
        without an auxiliary head.
        """
        if self.auxiliary_value is None:
            raise ConfigError("The auxiliary phase needs an agent with an auxiliary value head (aux.enabled true).")
        features = self.policy.features(observation)
        return (
            self.policy.outputs(features, observation),
            self._value(observation, features),
            self.auxiliary_value(features).squeeze(-1),
        )

    def policy_parameters(self) -> list[nn.Parameter]:
        """Parameters trained by the policy objective: encoder and policy head."""
        return list(self.policy.parameters())

    def value_parameters(self) -> list[nn.Parameter]:
        """Parameters trained by the value loss in the policy phase.

        dual: the value encoder and head; detach: the head; both are disjoint from :meth:`policy_parameters`. shared:
        the head and the shared encoder, which is also among the policy's. The auxiliary head is in neither.
        """
        if self.value_encoder is not None:
            return [*self.value_encoder.parameters(), *self.value_head.parameters()]
        if self.detach:
            return list(self.value_head.parameters())
        return [*self.policy.encoder.parameters(), *self.value_head.parameters()]

    def _value(self, observation: Inputs, features: Tensor | None) -> Tensor:
        """Values (B,), from the value encoder if there is one, else from `features` (B, F)."""
        if self.value_encoder is not None or features is None:
            assert self.value_encoder is not None
            features = encode(self.value_encoder, self.policy.encoder_input(observation), self.policy.precision)
        value: Tensor = self.value_head(features)
        return value.squeeze(-1)


def build_agent(
    config: ModelConfig,
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    *,
    observation: ObservationConfig | None = None,
    precision: Literal["fp32", "bf16"] = "fp32",
    auxiliary_head: bool = False,
    seed: int = 0,
) -> Agent:
    """The networks that `config` describes, on the CPU; equal arguments give equal weights.

    `shared`: one encoder with a policy and a value head. `dual`: an encoder for each. `detach`: as shared, but in the
    policy phase the value's gradient stops at the encoder. `observation` says whether observations are normalised, by
    default not. An :class:`anybatch.config.masks.ActionMask` among the observations masks the policy. `precision` is
    what :func:`resolve_precision` gave. The global random state stays as it was.

    Raises ConfigError for an encoder, choice or option that does not fit, EnvError for a space that is not supported.
    """
    for name in ("architecture", "recurrent", "gaussian.std"):
        check_choice(f"model.{name}", fields.get(config, name), fields.types()[f"model.{name}"])
    check_choice("precision", precision, Literal["fp32", "bf16"])
    action_spec = ActionSpec(action_space, squash=config.gaussian.squash)
    normalize = observation is not None and observation.normalize
    normalizer = ObservationNormalizer(observation_space, observation.clip) if observation and normalize else None
    masking = Masking.of(observation_space)
    encoder_space = observation_space if masking is None else masking.encoder_space(observation_space)
    with seeding, torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also reseed every GPU. Weights are drawn on the CPU for any device.
        torch.default_generator.manual_seed(seed)
        encoder = _encoder(config, encoder_space, precision)
        policy = Policy(
            encoder, action_spec, precision, gaussian=config.gaussian, gain=config.policy_gain, masking=masking
        )
        dual = config.architecture == "dual"
        value_encoder = _encoder(config, encoder_space, precision, behind=encoder) if dual else None
        return Agent(
            policy,
            value_encoder,
            detach=config.architecture == "detach",
            auxiliary_head=auxiliary_head,
            value_gain=config.value_gain,
            observation_normalizer=normalizer,
        )


def _encoder(
    config: ModelConfig,
    space: gym.Space[Any],
    precision: Literal["fp32", "bf16"],
    *,
    behind: nn.Module | None = None,
) -> nn.Module:
    """The encoder, with its recurrent layer; its state is ``behind`` that of another one."""
    encoder = build_encoder(config, space)
    if config.recurrent == "none":
        return encoder
    offset = behind.state_size if isinstance(behind, RecurrentEncoder) else 0
    return RecurrentEncoder(encoder, config.recurrent, config.recurrent_width, precision=precision, offset=offset)
