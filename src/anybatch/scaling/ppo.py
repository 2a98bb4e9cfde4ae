"""From plain PPO to PPO-EWMA: the centre of mass with which the EWMA limits the policy as PPO did."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from anybatch.config import fields
from anybatch.config.schema import TrainConfig
from anybatch.config.validation import check_integer
from anybatch.errors import ConfigError


def center_of_mass_of_ppo(epochs: int, minibatches: int) -> float:
    """Centre of mass, in gradient steps, of the EWMA that is as far from the policy as PPO's proximal policy.

    PPO's proximal policy is the policy before the iteration. At its K = epochs * minibatches gradient steps it is 0 to
    K - 1 steps old. While the gradient is mostly noise, weights move as in a random walk, and their mean squared
    distance grows with every step: over an iteration it is (K - 1)/2 steps' worth. The distance from an EWMA with
    centre of mass C is that of its steps weighted by beta^age, beta = C/(1 + C), whose squares sum to
    ``beta^2 / (1 - beta^2) = C^2 / (1 + 2C)``. Both are equal for ``C = (K - 1 + sqrt(K^2 - 1)) / 2``, which is between
    K - 1, the age that PPO's proximal policy reaches, and K - 1/2. The paper (appendix B) equates the greatest ages and
    takes K.

    The mean KL divergence from the proximal policy, which is quadratic in the distance, is then the same, and so is the
    speed at which a limit on it stops the policy. The centre of mass for equal mean ages, (K - 1)/2, would limit it
    about twice as tightly.

    Args:
        epochs: passes over an iteration's data for the policy.
        minibatches: gradient steps of each.

    Raises:
        ConfigError: one of them is not an integer of at least 1.
    """
    steps = check_integer("epochs", epochs, at_least=1) * check_integer("minibatches", minibatches, at_least=1)
    return (steps - 1 + math.sqrt(steps**2 - 1)) / 2


def from_ppo(config: TrainConfig) -> TrainConfig:
    """PPO-EWMA in place of a plain PPO: the proximal policy becomes the EWMA of :func:`center_of_mass_of_ppo`.

    Everything else stays, so call it with the hyperparameters at the batch where they were tuned, and scale afterwards.

    Raises:
        ConfigError: an iteration has one gradient step, in which PPO does not limit the policy, or the configuration
            is not a plain PPO.
    """
    if config.policy.proximal != "behavior":
        raise ConfigError(
            f"from_ppo: policy.proximal is {config.policy.proximal}, so this is not a plain PPO and has its own limit; "
            "omit from_ppo"
        )
    if config.optimizer.policy_epochs * config.optimizer.minibatches == 1:
        raise ConfigError(
            "from_ppo: with one minibatch and one policy epoch PPO does not limit the policy, so no EWMA limits it as "
            "PPO did; omit from_ppo and choose policy.center_of_mass yourself"
        )
    numbers = {name: fields.get(config, name) for name in ("optimizer.policy_epochs", "optimizer.minibatches")}
    center = center_of_mass_of_ppo(*(check_integer(name, x, at_least=1) for name, x in numbers.items()))
    return fields.replace(fields.replace(config, "policy.proximal", "ewma"), "policy.center_of_mass", center)


def follow_epochs(
    preset: Callable[..., TrainConfig], base: TrainConfig, config: TrainConfig, given: Collection[str]
) -> tuple[TrainConfig, TrainConfig]:
    """A preset and a configuration made from it, both with the centre of mass of the preset at ``config``'s epochs.

    Where ``given``, the names of the fields that were set, has the centre of mass or no epochs, both are returned as
    they are. The presets that follow a PPO compute it by :func:`from_ppo`; the others have it fixed.
    """
    if "optimizer.policy_epochs" not in given or "policy.center_of_mass" in given:
        return base, config
    center = preset(policy_epochs=config.optimizer.policy_epochs).policy.center_of_mass
    base, config = (fields.replace(x, "policy.center_of_mass", center) for x in (base, config))
    return base, config
