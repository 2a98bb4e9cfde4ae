"""Evaluation of R stacked policies during training, in environments of their own.

A mean over the episodes that training itself ends lags behind the policy: an episode counts when it ends, and in N
environments an episode of L steps takes N * L environment steps, so that curves of different batch sizes lag by
different amounts. Here the policies of the moment play whole episodes at given numbers of environment steps.
"""

from __future__ import annotations

import numpy as np
import torch

from anybatch.envs.base import VectorEnv
from anybatch.minibatches import RunGenerators
from anybatch.models.agent import Agent
from anybatch.observations import map_observation
from anybatch.reproduce.evaluations import Evaluations

_BLOCK = 64
"""Steps whose random numbers are drawn at once."""


class Evaluator:
    """E copies of the environment for each of R policies.

    An evaluation is the mean return of the first episode of every copy, so that short episodes do not count more often
    than long ones. Actions are sampled as in training, observations are normalised by the statistics of the moment, and
    neither these nor any random number of training changes.
    """

    def __init__(self, env: VectorEnv, agent: Agent, generators: RunGenerators) -> None:
        """Evaluate a :class:`~anybatch.reproduce.stacked.networks.StackedAgent` of R runs.

        Args:
            env: R*E environments, run after run, whose episodes all end.
            agent: the policies.
            generators: of the actions, one for each run.
        """
        self._env = env
        self._agent = agent
        self._generators = generators
        self._shape = len(generators), env.num_envs // len(generators)

    @torch.no_grad()
    def __call__(self) -> np.ndarray:
        """Mean returns (R,) of the policies as they are now."""
        agent, spec, shape = self._agent, self._agent.action_spec, self._shape
        normalizer = agent.observation_normalizer
        returns = np.zeros(self._env.num_envs)
        running = np.ones(self._env.num_envs, dtype=bool)
        raw = self._env.reset()
        while running.any():
            noise = spec.noise((shape[0], _BLOCK, shape[1]), self._generators)
            for t in range(_BLOCK):
                observation = map_observation(lambda x: x.reshape(*shape, *x.shape[1:]), raw)
                if normalizer is not None:
                    observation = normalizer.normalize(observation)
                params = agent.policy(map_observation(torch.from_numpy, observation))
                action = spec.distribution(params).transform(noise[:, t])
                # of a diverged run it may be NaN, which environments refuse
                native = torch.nan_to_num(action) if spec.continuous else action
                step = self._env.step(spec.to_env(native.flatten(0, 1)))
                raw = step.observation
                reward, done = step.counted
                returns[running] += reward[running]
                running &= ~done
                if not running.any():
                    break
        return np.asarray(returns.reshape(shape).mean(1))


def due(evaluations: Evaluations, total: int, before: int, now: int) -> bool:
    """Whether training passed a point of evaluation between two numbers of environment steps, of ``total``.

    An evaluation is done when an iteration has ended, so up to one iteration after its point.
    """
    return now * evaluations.points // total > before * evaluations.points // total
