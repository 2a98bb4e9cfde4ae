"""PPO-EWMA from TorchRL's own parts: environment, collector, GAE and decoupled loss, and our moving average.

With a target actor (`delay_actor=True`) TorchRL's `ClipPPOLoss` is the decoupled objective;
tests/integrations/test_torchrl.py checks value and gradient against `anybatch.objectives`. Two things are added:
`anybatch.integrations.torchrl.EwmaUpdate`, the bias-corrected average that the target actor has to be, and
`anybatch.normalize.AdvantageNormalizer`, moments over iterations in place of `normalize_advantage`, which takes those
of each minibatch.

How to run it (half a minute):

    pip install '.[torchrl]'
    python examples/torchrl_ppo_ewma.py
"""

from __future__ import annotations

import argparse

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import ExplorationType, GymEnv, SerialEnv, StepCounter, TransformedEnv, set_exploration_type
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from anybatch.distributed import moments
from anybatch.integrations.torchrl import EwmaUpdate
from anybatch.normalize import AdvantageNormalizer


def networks(observations: int, actions: int) -> tuple[ProbabilisticActor, ValueOperator]:
    """Tanh networks of two layers for policy and value, each its own."""

    def network(outputs: int) -> nn.Sequential:
        layers = nn.Linear(observations, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
        nn.init.orthogonal_(layers[-1].weight, 0.01)
        return nn.Sequential(*layers)

    actor = ProbabilisticActor(
        TensorDictModule(network(actions), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    return actor, ValueOperator(network(1), in_keys=["observation"])


def decoupled_loss(actor: ProbabilisticActor, critic: ValueOperator) -> ClipPPOLoss:
    """The decoupled objective, whose target actor is the proximal policy."""
    return ClipPPOLoss(
        actor,
        critic,
        delay_actor=True,
        max_importance_ratio=100.0,
        clip_epsilon=0.2,
        entropy_coeff=0.01,
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=False,
    )


def run(iterations: int, num_envs: int = 8, steps: int = 128, minibatches: int = 4, seed: int = 0) -> list[float]:
    """Train on CartPole; mean length of the episodes that ended in each iteration."""
    torch.manual_seed(seed)
    env = SerialEnv(
        num_envs, lambda: TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), StepCounter())
    )
    env.set_seed(seed)
    actor, critic = networks(4, 2)
    loss_module = decoupled_loss(actor, critic)
    average = EwmaUpdate(loss_module, center_of_mass=8.0)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    normalizer = AdvantageNormalizer(span=1.0)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    lengths, state = [], env.reset()
    for iteration in range(iterations):
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            data = env.rollout(steps, actor, auto_reset=False, tensordict=state, break_when_any_done=False)
            state = env.maybe_reset(env.step_mdp(data[:, -1]))  # episodes continue in the next iteration
            gae(data)
            normalizer.update(*moments(data["advantage"]))
            data["advantage"] = normalizer(data["advantage"])
        flat = data.reshape(-1)
        for _ in range(4):
            for chosen in torch.randperm(len(flat)).chunk(minibatches):
                losses = loss_module(flat[chosen])
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                optimizer.step()
                optimizer.zero_grad()
                average.step()
        ended = data["next", "step_count"][data["next", "done"]]
        lengths.append(float(ended.float().mean()) if len(ended) else float("nan"))
        print(f"iteration {iteration}: {len(ended)} episodes of {lengths[-1]:.1f} steps on average")
    env.close()
    return lengths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=30)
    torch.set_num_threads(1)  # the networks are too small for more
    run(parser.parse_args().iterations)
