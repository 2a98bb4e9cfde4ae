"""Choosing and building the encoder: the network from observations to features."""

from __future__ import annotations

import importlib
import inspect
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from anybatch.config.schema import ModelConfig, Scalar
from anybatch.errors import ConfigError, user_code_error
from anybatch.models.images import image_layout
from anybatch.models.impala import ImpalaEncoder
from anybatch.models.layers import ArrayFunction, declared
from anybatch.models.mlp import MlpEncoder
from anybatch.models.nature import NatureEncoder, SmallConvEncoder
from anybatch.models.precision import as_float32, full_precision, named

_BUILT_IN: dict[str, type[nn.Module]] = {
    "impala": ImpalaEncoder,
    "nature": NatureEncoder,
    "small-conv": SmallConvEncoder,
    "mlp": MlpEncoder,
}


class DictEncoder(nn.Module):
    """One encoder for each key of a dictionary observation; features are concatenated in the order of the keys."""

    def __init__(self, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.keys = tuple(encoders)
        # A list, because a ModuleDict refuses keys such as "a.b".
        self.encoders = nn.ModuleList(encoders.values())
        self.out_features = sum(int(getattr(encoder, "out_features")) for encoder in encoders.values())  # noqa: B009
        self.low_precision = any(getattr(encoder, "low_precision", False) for encoder in encoders.values())

    @property
    def recordable(self) -> bool:
        """Whether all encoders are."""
        return all(is_recordable(encoder) for encoder in self.encoders)

    def forward(self, observation: dict[str, Tensor]) -> Tensor:
        """Features (B, F) of observations {key: (B, ...)}."""
        parts = []
        for key, encoder in zip(self.keys, self.encoders, strict=True):
            if getattr(encoder, "low_precision", False):
                parts.append(as_float32(encoder(observation[key])))
            else:
                with full_precision(observation[key]):
                    parts.append(encoder(observation[key]))
        return torch.cat(parts, dim=-1)

    def in_numpy(self) -> ArrayFunction | None:
        """:meth:`forward` on arrays; None if one of the encoders has no such function."""
        functions = [in_numpy(encoder) for encoder in self.encoders]
        available = [function for function in functions if function is not None]
        if len(available) < len(functions):
            return None
        return lambda observation: np.concatenate(
            [function(observation[key]) for key, function in zip(self.keys, available, strict=True)], axis=-1
        )


def is_recordable(encoder: nn.Module) -> bool:
    """Whether the encoder declares by `recordable` that its operations depend on shapes alone."""
    return declared(encoder, "recordable") and bool(encoder.recordable)


def in_numpy(encoder: nn.Module) -> ArrayFunction | None:
    """The encoder's forward pass on arrays, sharing its weights; None if it has no method `in_numpy`.

    Raises ConfigError if `in_numpy` is not a method that returns a function or None.
    """
    if not declared(encoder, "in_numpy"):
        return None
    make: Callable[[], ArrayFunction | None] = encoder.in_numpy  # type: ignore[assignment]
    if callable(make) and not inspect.signature(make).parameters:
        function = named(encoder, "in_numpy", make)()
        if function is None:
            return None
        if callable(function):
            return named(encoder, "the function from in_numpy", function)
    raise ConfigError(
        f"in_numpy of the encoder {type(encoder).__name__} must be a method without arguments that returns a function "
        "of observations, the forward pass on arrays."
    )


def build_encoder(config: ModelConfig, observation_space: gym.Space[Any]) -> nn.Module:
    """The encoder that `config` names: a module from observations (B, ...) to (B, out_features).

    `auto` is impala for images and stacks of them, and mlp for the rest. A Dict observation gets an encoder for each
    key (mlp for those that are not images), and each option goes to those that take it. "import.path:Class" is built as
    Class(observation_space, **options); it must have an integer `out_features`, and may set `low_precision` (default:
    whether the observations are images) to say whether bfloat16 autocast is welcome, and `recordable` (default: no) to
    say that its operations depend on shapes alone, so that a GPU may replay them from a CUDA graph when acting. A
    method `in_numpy` that returns its forward pass on arrays makes a small encoder act faster on a CPU. Both apply to
    the `forward` of the class that defines them; a subclass that overrides `forward` has to define them again.

    Raises ConfigError, naming model.encoder or the option, for a name, path or option that does not exist or does not
    fit; EnvError for an observation space that is not supported.
    """
    if ":" in config.encoder:
        return _build_custom(config.encoder, observation_space, config.options)
    if config.encoder != "auto" and config.encoder not in _BUILT_IN:
        raise ConfigError(
            f"model.encoder is {config.encoder!r}, but must be auto, {', '.join(_BUILT_IN)} or import.path:Class."
        )
    if not isinstance(observation_space, gym.spaces.Dict):
        encoder_class = _choose(config.encoder, observation_space, inside_dict=False)
        _check_options(config.options, _arguments(encoder_class))
        return encoder_class(observation_space, **config.options)
    chosen = {key: _choose(config.encoder, space, inside_dict=True) for key, space in observation_space.items()}
    if not chosen:
        raise ConfigError("model.encoder cannot be built: the observation space is an empty Dict.")
    _check_options(config.options, {name for encoder_class in chosen.values() for name in _arguments(encoder_class)})
    return DictEncoder(
        {
            key: chosen[key](space, **{k: v for k, v in config.options.items() if k in _arguments(chosen[key])})
            for key, space in observation_space.items()
        }
    )


def _choose(name: str, space: gym.Space[Any], *, inside_dict: bool) -> type[nn.Module]:
    if name == "mlp" or not (name == "auto" or inside_dict):
        return _BUILT_IN[name]
    if image_layout(space) is not None:
        return ImpalaEncoder if name == "auto" else _BUILT_IN[name]
    if isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 and len(space.shape) > 3:
        raise ConfigError(
            f"model.encoder is {name}, but uint8 observations of shape {space.shape} are neither images nor stacks of "
            "images with the stack first, such as (4, 84, 84, 3); reshape them, or flatten them by model.encoder mlp."
        )
    return MlpEncoder


def _arguments(encoder_class: type[nn.Module]) -> set[str]:
    return set(inspect.signature(encoder_class).parameters) - {"observation_space"}


def _check_options(options: Mapping[str, Scalar], allowed: set[str]) -> None:
    for name in options:
        if name not in allowed:
            known = f"it takes {', '.join(sorted(allowed))}" if allowed else "it takes none"
            raise ConfigError(f"model.options has {name!r}, which the encoder does not take; {known}.")


def _build_custom(path: str, observation_space: gym.Space[Any], options: Mapping[str, Scalar]) -> nn.Module:
    module_name, _, class_name = path.partition(":")
    if not module_name or module_name.startswith("."):
        raise ConfigError(
            f"model.encoder is {path!r}, but must be import.path:Class, with the full path of the module."
        )
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(f"model.encoder is {path!r}, but {module_name} belongs to Python's standard library.")
    try:
        encoder_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"model.encoder is {path!r}, which cannot be imported: {error}.") from error
    except BaseException as error:
        raise user_code_error(error, f"importing {module_name}, for model.encoder {path!r},") from error
    if not (isinstance(encoder_class, type) and issubclass(encoder_class, nn.Module)):
        raise ConfigError(f"model.encoder is {path!r}, which is not a subclass of torch.nn.Module.")
    parameters = list(inspect.signature(encoder_class).parameters.values())
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        _check_options(options, {parameter.name for parameter in parameters[1:]})
    try:
        inspect.signature(encoder_class).bind(observation_space, **options)
    except TypeError as error:
        raise ConfigError(
            f"model.encoder is {path!r}, which cannot be built from the observation space and model.options: {error}."
        ) from error
    try:
        encoder: nn.Module = encoder_class(observation_space, **options)
    except BaseException as error:
        raise user_code_error(error, f"building model.encoder {path!r}") from error
    features = getattr(encoder, "out_features", None)
    if not isinstance(features, int):
        try:
            encoder.out_features = operator.index(features)  # type: ignore[arg-type, assignment]  # of NumPy
        except TypeError:
            raise ConfigError(f"model.encoder is {path!r}, which lacks the integer attribute out_features.") from None
    if not hasattr(encoder, "low_precision"):
        encoder.low_precision = image_layout(observation_space) is not None  # type: ignore[assignment]
    return encoder
