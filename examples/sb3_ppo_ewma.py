"""PPO-EWMA inside Stable-Baselines3: its policies, environments, callbacks, files; our objective.

`PPOEWMA` replaces `PPO`. The second call trains at an eighth of the batch, with the three adjustments (step size,
centre of mass, advantage span) that keep the learning curve about where it was (`anybatch scale ppo-ewma
--divide-batch-by 8 --for sb3` prints them for your numbers), saves in the middle and continues from the file, which has
the moving average and the advantage moments.

How to run it (half a minute):

    pip install '.[sb3]'
    python examples/sb3_ppo_ewma.py
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from anybatch.integrations.sb3 import PPOEWMA


class Ages(BaseCallback):
    """How far the policy has moved from the proximal policy and from the one that sampled, by iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.kl: list[tuple[float, float]] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        self._keep()

    def _on_training_end(self) -> None:
        self._keep()

    def _keep(self) -> None:
        seen = self.logger.name_to_value
        if "train/approx_kl" in seen:
            self.kl.append((seen["train/approx_kl"], seen["train/approx_kl_behavior"]))


def build(divide_batch_by: int, seed: int = 0) -> PPOEWMA:
    """A model for CartPole whose hyperparameters were tuned at 16 environments, for fewer of them.

    Args:
        divide_batch_by: c; 16/c environments.
        seed: of everything.
    """
    c = divide_batch_by
    return PPOEWMA(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=16 // c, seed=seed),
        n_steps=128,
        batch_size=512 // c,  # the optimisation batch, divided like the iteration batch
        n_epochs=4,
        learning_rate=2e-3 / math.sqrt(c),  # Adam
        center_of_mass=8.0 * c,  # the proximal policy stays as old in environment steps
        advantage_span=1.0 * c,  # advantages are normalised over as many samples
        seed=seed,
        device="cpu",
    )


def run(timesteps: int) -> dict[int, float]:
    """Train at both batches, the second one with a break; mean returns by c."""
    returns = {}
    for c in (1, 8):
        model, ages = build(c), Ages()
        model.learn(timesteps // 2, callback=ages)
        with tempfile.TemporaryDirectory() as folder:
            model.save(Path(folder) / "model")
            model = PPOEWMA.load(Path(folder) / "model", env=model.get_env(), device="cpu")
        model.learn(timesteps - timesteps // 2, callback=ages, reset_num_timesteps=False)
        mean, _ = evaluate_policy(model, make_vec_env("CartPole-v1", seed=100), n_eval_episodes=10)
        returns[c] = float(mean)
        proximal, behavior = (sum(x) / len(ages.kl) for x in zip(*ages.kl, strict=True))
        print(
            f"batch / {c}: {model.n_envs * model.n_steps} samples an iteration, mean return {mean:.1f}, "
            f"KL from the proximal policy {proximal:.4f}, from the behaviour policy {behavior:.4f}"
        )
    return returns


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timesteps", type=int, default=40_000)
    torch.set_num_threads(1)  # the network is too small for more
    run(parser.parse_args().timesteps)
