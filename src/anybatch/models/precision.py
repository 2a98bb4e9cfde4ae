"""The device of the tensors, and the precision of the encoders.

Only convolutional encoders run in bfloat16, under autocast. Their output is cast to float32, and everything after it
(heads, log-probabilities, values, losses), every parameter and every optimiser state are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anybatch.errors import ConfigError, shown, user_code_error
from anybatch.observations import Inputs, Sequences, leaves


def resolve_device(name: str = "auto") -> torch.device:
    """The device called `name`: cpu, cuda, cuda:N, or auto for CUDA if there is a GPU, else the CPU.

    Raises ConfigError if the name is something else, or the machine lacks that device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}, but must be cpu, cuda, cuda:N or auto.")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise ConfigError(f"device is {name!r}, but PyTorch finds no CUDA GPU here; use cpu or auto.")
        if (device.index or 0) >= count:
            raise ConfigError(f"device is {name!r}, but only cuda:0 to cuda:{count - 1} exist here.")
    return device


def prepare_device(device: torch.device) -> None:
    """Set cuDNN, for the whole process, to compute fp32 convolutions in fp32 instead of TF32, and deterministically.

    On an H200, determinism cost nothing measurable.
    """
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)  # streams and CUDA graphs use the current device
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True


def resolve_precision(name: str, device: torch.device) -> Literal["fp32", "bf16"]:
    """The encoders' precision: `name` itself if fp32 or bf16; auto takes bf16 if `device` supports it natively.

    Native means a CUDA GPU with bfloat16 units, or a CPU with AMX or AVX512-BF16. Elsewhere bf16 works
    but is slow. Raises ConfigError for any other name.
    """
    if name == "fp32":
        return "fp32"
    if name == "bf16":
        return "bf16"
    if name != "auto":
        raise ConfigError(f"precision is {name!r}, but must be auto, fp32 or bf16.")
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if _cpu_has_bf16() else "fp32"


def encode(encoder: nn.Module, observation: Inputs, precision: Literal["fp32", "bf16"]) -> Tensor:
    """Features (B, F) in float32; under autocast where `precision` is bf16 and the encoder has `low_precision` set.

    Raises UserCodeError if an encoder of the user fails, and ConfigError if its features are not (B, out_features).
    """
    if precision == "fp32" or not getattr(encoder, "low_precision", False):
        return as_float32(_features(encoder, observation))
    # Without the cache of cast weights: each weight is used once here, and functional weights must not be mixed up.
    device = observation.device if isinstance(observation, Sequences) else leaves(observation)[0].device
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        features = _features(encoder, observation)
    return as_float32(features)


def _features(encoder: nn.Module, observation: Inputs) -> Tensor:
    features: Tensor = named(encoder, "forward", encoder)(observation)
    expected = encoder.out_features
    if torch.jit.is_tracing():  # a trace would warn about the comparison
        return features
    if not isinstance(features, Tensor) or features.shape[-1] != expected:
        got = f"shape {tuple(features.shape)}" if isinstance(features, Tensor) else shown(features)
        raise ConfigError(
            f"the encoder {type(encoder).__name__} has out_features {expected}, but its forward returned {got} instead "
            f"of (B, {expected})"
        )
    return features


def named(encoder: nn.Module, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, a method of the encoder, with UserCodeError for what it raises if the encoder is the user's."""
    if type(encoder).__module__.partition(".")[0] == "anybatch":
        return call

    def guarded(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except BaseException as error:
            raise user_code_error(error, f"{method} of the encoder {type(encoder).__name__}") from error

    return guarded


def full_precision(tensor: Tensor) -> AbstractContextManager[object]:
    """Context that disables autocast on `tensor`'s device."""
    return torch.autocast(tensor.device.type, enabled=False)


def as_float32(features: Tensor) -> Tensor:
    """`features` in float32, the same tensor if they are already."""
    return features if features.dtype == torch.float32 else features.float()


def _cpu_has_bf16() -> bool:
    # Not all supported versions of PyTorch have a public query; without these functions the answer is no.
    has_onednn: Callable[[], bool] = torch.backends.mkldnn.is_available
    queries: list[Callable[[], bool] | None] = [
        getattr(torch.cpu, "_is_amx_tile_supported", None),
        getattr(torch.cpu, "_is_avx512_bf16_supported", None),
    ]
    return has_onednn() and any(query is not None and query() for query in queries)
