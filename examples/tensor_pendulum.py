"""Thousands of pendulums in PyTorch, on the CPU or a GPU, and PPO-EWMA that trains on them without NumPy.

    python examples/tensor_pendulum.py --num-envs 4096 --device cuda

The class has the interface of :class:`anybatch.envs.TensorEnv`, which Isaac Lab, ManiSkill and wrappers of MJX or Warp
have as well, or nearly. Swing-up as in Gymnasium's Pendulum-v1, with its physics and reward; episodes of 200 steps that
begin at different times.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

STEPS = 200  # of an episode
GRAVITY, LENGTH, MASS, SECONDS, MAX_SPEED, MAX_TORQUE = 10.0, 1.0, 1.0, 0.05, 8.0, 2.0


class Pendulums:
    """``num_envs`` pendulums on a device; observations are cosine and sine of the angle, and the speed over 8."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-MAX_TORQUE, MAX_TORQUE, (1,), np.float32)

    def __init__(self, num_envs: int, device: str = "cpu", final_observations: bool = True) -> None:
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.final_observations = final_observations
        self.generator = torch.Generator(self.device)
        self.angle, self.speed = torch.zeros(2, num_envs, device=self.device)
        self.time = torch.zeros(num_envs, dtype=torch.int64, device=self.device)

    def reset(self, seed: int | None = None) -> Tensor:
        """Begin an episode everywhere, at random times of it, so that not all end in the same step."""
        if seed is not None:
            self.generator.manual_seed(seed)
        self.angle, self.speed = self._starts()
        self.time = torch.randint(STEPS, self.time.shape, generator=self.generator, device=self.device)
        return self._observation()

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Torques (N, 1); finished pendulums start anew in the same step."""
        torque = action.squeeze(1).clamp(-MAX_TORQUE, MAX_TORQUE)
        angle = (self.angle + math.pi) % (2 * math.pi) - math.pi  # 0 is upright
        reward = -(angle.square() + 0.1 * self.speed.square() + 0.001 * torque.square())
        pull = 3 * GRAVITY / (2 * LENGTH) * self.angle.sin() + 3 / (MASS * LENGTH**2) * torque
        self.speed = (self.speed + pull * SECONDS).clamp(-MAX_SPEED, MAX_SPEED)
        self.angle = self.angle + self.speed * SECONDS
        self.time = self.time + 1
        info = {"final_obs": self._observation()} if self.final_observations else {}
        truncated = self.time >= STEPS
        # torch.where instead of indexing: the number of finished pendulums stays on the device
        angle, speed = self._starts()
        self.angle, self.speed = torch.where(truncated, angle, self.angle), torch.where(truncated, speed, self.speed)
        self.time = torch.where(truncated, 0, self.time)
        return self._observation(), reward, torch.zeros_like(truncated), truncated, info

    def get_state(self) -> dict[str, Tensor]:
        """Everything that the future depends on, so that a run resumes exactly."""
        names = ("angle", "speed", "time")
        return {**{name: getattr(self, name) for name in names}, "generator": self.generator.get_state()}

    def set_state(self, state: dict[str, Tensor]) -> None:
        self.angle, self.speed, self.time = (state[name].to(self.device) for name in ("angle", "speed", "time"))
        self.generator.set_state(state["generator"].cpu())

    def _starts(self) -> tuple[Tensor, Tensor]:
        angle, speed = 2 * torch.rand(2, self.num_envs, generator=self.generator, device=self.device) - 1
        return math.pi * angle, speed

    def _observation(self) -> Tensor:
        return torch.stack([self.angle.cos(), self.angle.sin(), self.speed / MAX_SPEED], dim=1)


def main() -> None:
    """Train with the number of pendulums and the device of the command line."""
    from anybatch import ppo_ewma, train

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--total-env-steps", type=int, default=10_000_000)
    parser.add_argument("--out", default="runs/tensor-pendulum")
    args = parser.parse_args()
    config = ppo_ewma(
        Pendulums,
        num_envs=args.num_envs,
        env_options={"device": args.device},
        device=args.device,
        total_env_steps=args.total_env_steps,
        **SETTINGS,
    )
    print(train(config, out=args.out, seed=1))


SETTINGS: dict[str, Any] = {
    "rollout_steps": 16,
    "minibatches": 8,
    "policy_epochs": 4,
    "value_epochs": 4,
    "discount": 0.95,
    "step_size": 1e-3,
    "entropy_coefficient": 0.0,
    "micro_batch": 16384,
    "observation.normalize": True,
}
"""Short rollouts, as is usual with so many environments; the gradient steps are of 8,192 samples."""


if __name__ == "__main__":
    main()
