"""Proximal policies: the policy that an update stays close to, which limits how fast the policy moves (section 2).

All three kinds evaluate a minibatch and are notified of every gradient step.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Sequence
from itertools import chain, starmap, zip_longest
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from anybatch.config.validation import check_number
from anybatch.errors import ConfigError
from anybatch.minibatches import Minibatch
from anybatch.models.distributions import Distribution

Number = TypeVar("Number", float, Tensor, float | Tensor)


class ProximalPolicy(Protocol):
    """Interface of a proximal policy."""

    @property
    def module(self) -> nn.Module | None:
        """A network with weights of its own, if it has one."""

    def before_iteration(self) -> None:
        """Prepare for the first gradient step of an iteration."""

    def params(self, minibatch: Minibatch) -> Tensor:
        """Compute its raw distribution parameters (B, P) for a minibatch, without gradient."""

    def log_prob(self, minibatch: Minibatch, proximal: Distribution) -> Tensor:
        """Compute log pi_prox(a|s), (B,), where ``proximal`` has the parameters that :meth:`params` returned."""

    def after_gradient_step(self) -> None:
        """Follow a gradient step of the policy."""

    def reset(self) -> None:
        """Forget the past, at the start of each policy phase of PPG."""

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""


class BehaviorProximal:
    """pi_prox = pi_behav, the coupled objectives of PPO: its outputs were recorded when the actions were sampled."""

    module: nn.Module | None = None
    """None: it has no network."""

    def before_iteration(self) -> None:
        pass

    def params(self, minibatch: Minibatch) -> Tensor:
        """Return the recorded parameters (B, P)."""
        return minibatch.behavior_params

    def log_prob(self, minibatch: Minibatch, proximal: Distribution) -> Tensor:
        """Return the recorded value, so that the coupled ratio is the textbook one to the last bit."""
        return minibatch.behavior_logp

    def after_gradient_step(self) -> None:
        pass

    def reset(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class _FrozenCopy:
    """Base of proximal policies that are a network with weights of their own."""

    module: nn.Module

    def params(self, minibatch: Minibatch) -> Tensor:
        """Compute the copy's raw distribution parameters (B, P)."""
        with torch.no_grad():
            params: Tensor = self.module(minibatch.inputs)
        return params

    def log_prob(self, minibatch: Minibatch, proximal: Distribution) -> Tensor:
        """Compute log pi_prox(a|s), (B,)."""
        return proximal.log_prob(minibatch.action)


class RecentProximal(_FrozenCopy):
    """pi_prox = pi_recent, "the policy immediately preceding the current iteration" (section 5.1)."""

    def __init__(self, module: nn.Module) -> None:
        """``module``: the policy network, observation -> (B, P); a frozen copy is kept."""
        self._source = module
        self.module = _frozen(module)

    def before_iteration(self) -> None:
        """Copy the current policy, with the buffers that checkpoints leave out."""
        present = _tensors(self._source)
        with torch.no_grad():
            for name, copied in _tensors(self.module).items():
                copied.copy_(present[name])

    def after_gradient_step(self) -> None:
        """Keep the copy: it stays until the next iteration."""

    def reset(self) -> None:
        """Copy the current policy."""
        self.before_iteration()

    def state_dict(self) -> dict[str, Any]:
        """Empty: every iteration starts with a fresh copy."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the restored policy."""
        self.before_iteration()


class EwmaProximal(_FrozenCopy):
    """pi_prox = the exponentially-weighted moving average of the policy's weights (section 4 and appendix A).

    ``theta_prox = (theta_t + beta theta_{t-1} + ... + beta^t theta_0) / (1 + beta + ... + beta^t)`` over the values of
    theta after each gradient step, theta_0 the initial one. Updated after every gradient step of the *policy*, not
    touched by the boundaries between iterations, and re-initialised after an auxiliary phase.

    bf16 and fp16 parameters are averaged in fp32, since a step of the average, ``(theta_t - theta_prox)/w``, is lost
    where it is below 2^-9 of the average, half of bf16's spacing. On a straight line ``theta_t = t delta`` the lag
    ``(theta_t - theta_prox)/delta`` is the mean age of the n = t + 1 terms, ``beta/(1-beta) - n beta^n / (1-beta^n)``,
    which tends to the centre of mass.
    """

    def __init__(self, module: nn.Module, center_of_mass: float | Tensor = 8.0) -> None:
        """Start the average at theta_0 = the present weights of ``module``.

        Args:
            module: the policy network, observation -> (B, P), with the dtypes and on the device that it is trained
                with; value networks need no average (footnote of 5.3).
            center_of_mass: average age of a term in gradient steps, beta/(1-beta), at least 0; float64 (R,) for R
                stacked runs, whose parameters have a leading run axis.

        Raises:
            ConfigError: a centre of mass is not a finite number of at least 0.
        """
        centers = center_of_mass.flatten().tolist() if isinstance(center_of_mass, Tensor) else [center_of_mass]
        for center in centers:
            check_number("center_of_mass", center, of="gradient steps", at_least=0)
        self.beta = decay_of(center_of_mass)
        """Decay rate of the average."""
        self.module = _frozen(module)
        """The network for forward passes, with the dtypes of the policy; without gradient."""
        self._names = [name for name, x in self.module.named_parameters() if x.is_floating_point() or x.is_complex()]
        copies = [self.module.get_parameter(name) for name in self._names]
        self.average: list[Tensor] = full_precision(copies)
        """The average of each parameter, tied ones once: the parameter of ``module`` itself, or, where that is bf16 or
        fp16, an fp32 tensor from which it is copied."""
        self._narrow = [(x, average) for x, average in zip(copies, self.average, strict=True) if x is not average]
        self._dtypes = [x.dtype for x in self.average]
        self._source_dtypes = {name: x.dtype for name, x in _tensors(module).items()}
        self._terms = 1  # theta_0
        self._source = module
        self._follow_source()

    def before_iteration(self) -> None:
        """Keep the average: it continues from iteration to iteration."""

    @torch.no_grad()
    def after_gradient_step(self) -> None:
        """theta_prox <- EWMA_beta(theta); buffers are copied, which an average of counters or flags would spoil.

        Parameters of the policy may have been replaced by others of the same names, shapes, dtypes and devices.

        Raises:
            ValueError: the policy's parameters have changed in one of these.
        """
        self._terms += 1
        # appendix A: theta_prox <- theta/w + (1 - 1/w) theta_prox, with w = 1 + beta + ... + beta^(terms-1)
        self._move(1 / sum_of_powers(self.beta, self._terms))

    def _move(self, weight: float | Tensor) -> None:
        if self._narrow or not self._is_current():
            self._follow_source()
        try:
            accumulate_(self.average, self._current, weight, self._narrow)
        except RuntimeError:
            self._follow_source()  # names the parameter if the policy was moved or cast in place
            raise
        for average, current in self._copied:
            average.copy_(current)

    def reset(self) -> None:
        """Re-initialise: theta_prox <- theta, w <- 1."""
        self._terms = 0
        self.after_gradient_step()

    def state_dict(self) -> dict[str, Any]:
        """The averaged weights, in fp32 where ``module`` has them narrower, and the number of terms."""
        state = self.module.state_dict()
        state.update(self._full_precision_by_name())
        return {"module": state, "terms": self._terms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.module.load_state_dict(state["module"])
        for name, average in self._full_precision_by_name().items():
            average.copy_(state["module"][name])
        self._terms = state["terms"]

    def _full_precision_by_name(self) -> dict[str, Tensor]:
        """The averages that are not parameters of ``module``, by its names for them; a tied one has several."""
        averages = {id(x): average for x, average in self._narrow}
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: averages[id(x)] for name, x in named if id(x) in averages}

    def _is_current(self) -> bool:
        """Whether the policy has the same tensors as before, and the averages their dtypes, in about a microsecond."""
        contents = chain.from_iterable([owner.values() for owner in self._owners])
        same = all(starmap(operator.is_, zip_longest(contents, self._contents)))
        return same and [x.dtype for x in self.average[:1]] == self._dtypes[:1]  # module.half() casts all, in place

    def _follow_source(self) -> None:
        """Look up the policy's present tensors."""
        ours, theirs = _tensors(self.module), _tensors(self._source)
        if ours.keys() != theirs.keys():
            changed = ", ".join(sorted(ours.keys() ^ theirs.keys()))
            raise ValueError(
                f"{changed} of the policy was added or removed after its average was created: create a new EwmaProximal"
            )
        averages = dict(zip(self._names, self.average, strict=True))
        for name, x in theirs.items():
            average = averages.get(name, ours[name])
            now, then = (x.shape, x.dtype, x.device), (average.shape, self._source_dtypes[name], average.device)
            if now != then:
                raise ValueError(
                    f"{name} of the policy is {_described(*now)}, but its average was created for {_described(*then)}: "
                    "create EwmaProximal when the network has its final shapes, dtypes and device"
                )
        if [x.dtype for x in self.average] != self._dtypes:
            raise ValueError("EwmaProximal.module was cast to another dtype, in which its average would lose precision")
        self._current: list[Tensor] = [theirs[name] for name in self._names]
        self._copied = [(x, theirs[name]) for name, x in ours.items() if name not in averages]
        owners = [x for m in self._source.modules() for x in (m._parameters, m._buffers, m._modules)]
        self._owners = [owner for owner in owners if owner]
        self._contents: list[object] = [x for owner in self._owners for x in owner.values()]


def _frozen(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module).requires_grad_(False)
    except RuntimeError as error:  # of tensors that are results, not parameters
        raise ConfigError(
            f"the policy network, with model.encoder in it, cannot be copied for the proximal policy: {error}; use "
            "torch.nn.utils.parametrizations.weight_norm instead of torch.nn.utils.weight_norm"
        ) from error


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _described(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"{tuple(shape)}, {dtype} on {device}"


def full_precision(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors themselves, with fp32 copies in place of bf16, fp16 and narrower ones, for running averages."""
    narrow = [x.is_floating_point() and x.element_size() < 4 for x in tensors]
    return [x.detach().float() if low else x for x, low in zip(tensors, narrow, strict=True)]


def accumulate_(
    average: list[Tensor],
    current: list[Tensor],
    weight: float | Tensor,
    narrow: Sequence[tuple[Tensor, Tensor]] = (),
) -> None:
    """``average += weight (current - average)``, in the precision of the average; call it under ``torch.no_grad``.

    Args:
        average: from :func:`full_precision`; changed in place.
        current: the newest values, of the same shapes.
        weight: of the newest values, (R,) for R runs.
        narrow: tensors narrower than fp32, each with its average, of which it becomes a copy.
    """
    if isinstance(weight, Tensor) or narrow:
        for x, new in zip(average, current, strict=True):
            part = weight.to(x).view(-1, *[1] * (x.dim() - 1)) if isinstance(weight, Tensor) else weight
            x.lerp_(new.to(x.dtype), part)  # one by one, so that a single parameter at a time is widened
    else:
        torch._foreach_lerp_(average, current, weight)
    for x, of in narrow:
        x.copy_(of)


def decay_of(center_of_mass: Number) -> Number:
    """Beta of an EWMA whose centre of mass is beta/(1-beta)."""
    return center_of_mass / (1 + center_of_mass)


def sum_of_powers(beta: Number, terms: int) -> Number:
    """``1 + beta + ... + beta^(terms-1)``, the weight w of appendix A, for 0 <= beta < 1 and terms >= 1."""
    if isinstance(beta, Tensor):
        return torch.where(beta < 1, torch.expm1(terms * beta.log()) / (beta - 1), float(terms))
    if beta == 0:
        return 1.0
    if beta == 1:  # a centre of mass beyond 2^53, where beta/(1-beta) has rounded
        return float(terms)
    return math.expm1(terms * math.log(beta)) / (beta - 1)
