"""PPO-EWMA in one file: PyTorch, NumPy and Gymnasium, nothing else.

All of the algorithm on one page, for discrete actions and vector observations. It trains the same policy as
``anybatch train ppo-ewma --env.id gym:CartPole-v1``: every random number is drawn from the same stream, in the
same order, so that at equal settings and seed the weights of the two are equal but for rounding: the library acts with
NumPy here, which is faster. Where it acts with PyTorch they are equal bit for bit
(tests/examples/test_single_file.py). Each part of a run (weights, environments, actions, minibatches) has its own
stream, see `stream`.

How to run it:

    python examples/ppo_ewma_single_file.py
    python examples/ppo_ewma_single_file.py --env-id Acrobot-v1 --num-envs 16 --total-timesteps 300000
    python examples/ppo_ewma_single_file.py --divide-batch-by 8 --num-envs 1 --update-epochs 1

With `--divide-batch-by c` the hyperparameters are those that were tuned at a batch c times as large; that holds best
with one epoch, as the rules assume.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections import deque
from dataclasses import dataclass, fields, replace

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Args:
    """Options of the command line."""

    env_id: str = "CartPole-v1"
    seed: int = 0
    total_timesteps: int = 100_000
    num_envs: int = 8
    num_steps: int = 256
    num_minibatches: int = 8
    update_epochs: int = 3
    learning_rate: float = 5e-4
    gamma: float = 0.999
    gae_lambda: float = 0.95
    clip_coef: float = 0.2
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    center_of_mass: float = 8.0
    """Age of the proximal policy in gradient steps, beta / (1 - beta)."""
    advantage_span: float = 1.0
    """Iterations that the advantages' moments come from, 2 / (1 - beta) - 1; 1 is the current one alone."""
    max_importance_ratio: float = 100.0
    divide_batch_by: float = 1.0
    """The settings above were tuned at a batch this many times as large; num_envs is the new one."""


def scaled(args: Args) -> Args:
    """Section 4's adjustments for Adam: square root for the step size, and averages over as many samples as before."""
    c = args.divide_batch_by
    return replace(
        args,
        learning_rate=args.learning_rate / math.sqrt(c),
        center_of_mass=args.center_of_mass * c,
        advantage_span=max(1.0, args.advantage_span * c),
    )


def stream(seed: int, name: str) -> int:
    """The seed of one part of the run: unrelated to those of the other parts and of other runs."""
    return int(np.random.SeedSequence([seed, *name.encode(), 0, 0]).generate_state(1)[0])


class Agent(nn.Module):
    """Tanh network with a policy head and a value head: observations (B, O) to logits (B, A) and values (B,)."""

    def __init__(self, observations: int, actions: int, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size in (observations, width):
            linear = nn.Linear(size, width)
            nn.init.orthogonal_(linear.weight, math.sqrt(2))
            nn.init.zeros_(linear.bias)
            layers += [linear, nn.Tanh()]
        self.encoder = nn.Sequential(*layers)
        self.policy_head = self.head(width, actions)
        self.value_head = self.head(width, 1)

    @staticmethod
    @torch.no_grad()
    def head(width: int, outputs: int) -> nn.Linear:
        """Dense layer whose output units start with weights of norm 0.1."""
        linear = nn.Linear(width, outputs)
        linear.weight.mul_((0.1 / linear.weight.norm(dim=1)).unsqueeze(1))
        linear.bias.zero_()
        return linear

    def logits(self, observation: Tensor) -> Tensor:
        """Logits (B, A) alone."""
        return self.policy_head(self.encoder(observation))

    def value(self, observation: Tensor) -> Tensor:
        """Values (B,) alone."""
        return self.value_head(self.encoder(observation)).squeeze(-1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Both, through the encoder once."""
        features = self.encoder(observation)
        return self.policy_head(features), self.value_head(features).squeeze(-1)


def log_prob(log_probs: Tensor, action: Tensor) -> Tensor:
    """(B,) entries of normalised log-probabilities (B, A)."""
    return log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)


class Ewma:
    """Bias-corrected moving average of the policy's weights, the proximal policy (appendix A)."""

    def __init__(self, agent: Agent, center_of_mass: float) -> None:
        self.beta = center_of_mass / (1 + center_of_mass)
        self.weight = 1.0
        self.source, self.average = agent, copy.deepcopy(agent).requires_grad_(False)

    @torch.no_grad()
    def after_gradient_step(self) -> None:
        """theta_prox <- theta / w + (1 - 1/w) theta_prox with w <- 1 + beta w."""
        self.weight = 1 + self.beta * self.weight
        for average, current in zip(self.average.parameters(), self.source.parameters(), strict=True):
            average.lerp_(current, 1 / self.weight)


class Moments:
    """Weighted mean and variance; values from before the last `add` lose `1 - decay` of their weight."""

    def __init__(self) -> None:
        self.weight = self.mean = self.squares = 0.0

    def add(self, values: Tensor, decay: float = 1.0) -> None:
        """Count values of any shape, in Welford's form, which cannot go negative."""
        count, mean, var = float(values.numel()), float(values.mean()), float(values.var(correction=0))
        old = decay * self.weight
        self.weight = old + count
        shift = mean - self.mean
        self.squares = decay * self.squares + count * var + shift * shift * old * count / self.weight
        self.mean = self.mean + shift * count / self.weight

    @property
    def var(self) -> float:
        """The variance."""
        return self.squares / self.weight


class Envs:
    """N environments that begin a new episode in the step in which one ends."""

    def __init__(self, args: Args) -> None:
        self.envs = [gym.make(args.env_id) for _ in range(args.num_envs)]
        n = args.num_envs
        seeds = np.random.SeedSequence(stream(args.seed, "env")).generate_state(n + n // 8 + 8) >> 1
        seeds = list(dict.fromkeys(seeds.tolist()))[:n]
        self.observation = np.stack([e.reset(seed=s)[0] for e, s in zip(self.envs, seeds, strict=True)])
        self.first = np.ones(n, dtype=bool)
        self.running, self.returns = np.zeros(n), deque[float](maxlen=100)

    def step(self, action: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[int, np.ndarray]]:
        """Rewards, terminated, done, and the last observation of each episode that was cut by a time limit."""
        rows, last = [], {}
        for i, (env, a) in enumerate(zip(self.envs, action.tolist(), strict=True)):
            observation, reward, terminated, truncated, _ = env.step(a)
            self.running[i] += float(reward)
            if terminated or truncated:
                self.returns.append(float(self.running[i]))
                self.running[i] = 0
                if not terminated:
                    last[i] = observation.copy()
                observation = env.reset()[0]
            rows.append((observation, reward, terminated, terminated or truncated))
        observations, rewards, terminated, done = (np.array(column) for column in zip(*rows, strict=True))
        self.observation, self.first = observations, done
        return rewards.astype(np.float32), terminated, done, last


def train(args: Args) -> tuple[Agent, list[float]]:
    """Train; returns the agent and the mean return of the last 100 episodes after each iteration."""
    args = scaled(args)
    envs, n, t_max = Envs(args), args.num_envs, args.num_steps
    torch.manual_seed(stream(args.seed, "model"))
    agent = Agent(int(np.prod(envs.observation.shape[1:])), int(envs.envs[0].action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-8, fused=True)
    proximal = Ewma(agent, args.center_of_mass)
    action_rng = torch.Generator().manual_seed(stream(args.seed, "action"))
    shuffle_rng = torch.Generator().manual_seed(stream(args.seed, "shuffle"))
    return_moments, advantage_moments = Moments(), Moments()
    discounted = torch.zeros(n, dtype=torch.float64)
    # minibatches are whole trajectories, or equal pieces of them where there are fewer environments than minibatches
    pieces = args.num_minibatches // math.gcd(n, args.num_minibatches)
    if t_max % pieces:
        raise SystemExit(f"--num-minibatches {args.num_minibatches} cannot share out {n} environments evenly")
    history: list[float] = []

    for iteration in range(math.ceil(args.total_timesteps / (n * t_max))):
        # ---- run the behaviour policy
        observations = torch.empty(n, t_max, *envs.observation.shape[1:])
        actions = torch.empty(n, t_max, dtype=torch.int64)
        behavior_logp, values, next_values, rewards = (torch.empty(n, t_max) for _ in range(4))
        first, done, terminated = (torch.empty(n, t_max, dtype=torch.bool) for _ in range(3))
        bootstraps = []
        with torch.no_grad():
            for t in range(t_max):
                observation = torch.as_tensor(envs.observation, dtype=torch.float32)
                logits, value = agent(observation)
                log_probs = torch.log_softmax(logits, -1)
                cumulative = log_probs.exp().cumsum(-1)
                level = torch.empty(n, 1).uniform_(0, 1 - 2.0**-20, generator=action_rng)
                action = (cumulative[:, :-1] <= level * cumulative[:, -1:]).sum(-1)
                observations[:, t], actions[:, t], values[:, t] = observation, action, value
                behavior_logp[:, t] = log_prob(log_probs, action)
                first[:, t] = torch.as_tensor(envs.first)
                reward, end, over, last = envs.step(action)
                rewards[:, t], terminated[:, t], done[:, t] = map(torch.as_tensor, (reward, end, over))
                if last:
                    final = torch.as_tensor(np.stack(list(last.values())), dtype=torch.float32)
                    bootstraps.append((list(last), t, agent.value(final)))
            next_values[:, :-1] = values[:, 1:]
            next_values[:, -1] = agent.value(torch.as_tensor(envs.observation, dtype=torch.float32))
            for index, t, value in bootstraps:
                next_values[index, t] = value

            # ---- rewards in units of the discounted return's standard deviation
            returns = []
            for t in range(t_max):
                discounted = torch.addcmul(rewards[:, t].double(), 0.99 * (~first[:, t]).double(), discounted)
                returns.append(discounted)
            return_moments.add(torch.stack(returns))
            scale = 1 / math.sqrt(return_moments.var + 1e-8)
            rewards = (rewards.double() * scale).clamp(-10, 10).float()

            # ---- generalised advantage estimation
            delta = rewards + args.gamma * torch.where(terminated, 0.0, next_values) - values
            carry = torch.where(done, 0.0, torch.ones_like(delta) * (args.gamma * args.gae_lambda))
            advantages, running = torch.empty(n, t_max), torch.zeros(n)
            for t in reversed(range(t_max)):
                running = torch.addcmul(delta[:, t], carry[:, t], running)
                advantages[:, t] = running
            targets = advantages + values

            # ---- advantage moments over iterations, never over a minibatch
            decay = (args.advantage_span - 1) / (args.advantage_span + 1)
            advantage_moments.add(advantages.double(), decay)
            spread = math.sqrt(advantage_moments.var) + 1e-8
            advantages = ((advantages.double() - advantage_moments.mean) / spread).float()

        # ---- optimise the decoupled objective
        everything = (observations, actions, behavior_logp, advantages, targets)
        data = [x.reshape(n * pieces, t_max // pieces, *x.shape[2:]) for x in everything]
        for _ in range(args.update_epochs):
            order = torch.randperm(n * pieces, generator=shuffle_rng)
            for chosen in order.chunk(args.num_minibatches):
                observation, action, logp_behavior, advantage, target = (x[chosen].flatten(0, 1) for x in data)
                logits, value = agent(observation)
                log_probs = torch.log_softmax(logits, -1)
                logp = log_prob(log_probs, action)
                with torch.no_grad():
                    logp_proximal = log_prob(torch.log_softmax(proximal.average.logits(observation), -1), action)
                    ratio = torch.exp(logp - logp_proximal)  # theta/prox, which is clipped
                    cap = math.log(args.max_importance_ratio)
                    logp_behavior = torch.maximum(logp_behavior, logp - cap)
                    prefix = torch.exp(logp_proximal - logp_behavior)  # prox/behav, which corrects for sampling
                weight = torch.exp(logp - logp_behavior)  # theta/behav
                clipped = torch.where(ratio > 1 + args.clip_coef, prefix * (1 + args.clip_coef), weight)
                clipped = torch.where(ratio < 1 - args.clip_coef, prefix * (1 - args.clip_coef), clipped)
                policy_loss = -torch.minimum(weight * advantage, clipped * advantage).mean()
                entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
                value_loss = args.vf_coef * (value - target).square().mean()
                optimizer.zero_grad()
                (policy_loss - args.ent_coef * entropy + value_loss).backward()
                optimizer.step()
                proximal.after_gradient_step()

        history.append(float(np.mean(envs.returns)) if envs.returns else math.nan)
        print(f"{(iteration + 1) * n * t_max:>9,} steps   mean return of the last 100 episodes {history[-1]:8.1f}")
    return agent, history


def parse(arguments: list[str] | None = None) -> Args:
    """Command line to settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Args):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    return Args(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    torch.set_num_threads(1)  # the network is too small for more
    train(parse())
