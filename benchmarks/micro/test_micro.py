"""Times of the parts of an iteration, in units of a reference that runs in the same session.

    make bench-micro                      # measure, and compare with baseline.json
    make bench-micro ARGS=--update        # make what was measured the baseline

Times of one machine say nothing about another one, nor those of a busy hour about a quiet one. So every benchmark names
a reference, a fixed piece of PyTorch that is bound by the same thing, and compare.py compares ratios to it. `make test`
runs each once, untimed, so that they keep working.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from anybatch.advantages import gae
from anybatch.minibatches import Batch, shuffled
from anybatch.models.distributions import Categorical
from anybatch.objectives import decoupled_clip_loss, decoupled_kl_loss
from anybatch.policy_phase import policy_phase
from anybatch.presets import ppo_ewma
from anybatch.proximal import EwmaProximal
from anybatch.runs.build import Components, build
from anybatch.training import estimate_advantages

Benchmark = Any  # pytest-benchmark's fixture


def timed(benchmark: Benchmark, reference: str, function: Callable[[], object]) -> Any:
    """Time a function, to be compared in units of ``reference``: calls, numbers or bytes."""
    benchmark.extra_info["reference"] = reference
    return benchmark(function)


# ---------------------------------------------------------------- references


@pytest.mark.benchmark(group="references")
def test_calls(benchmark: Benchmark) -> None:
    """Bound by what a call from Python costs: 100 operations on 8 numbers."""
    x = torch.ones(8)

    def work() -> None:
        for _ in range(100):
            x.add(1.0)

    timed(benchmark, "calls", work)


@pytest.mark.benchmark(group="references")
def test_bytes(benchmark: Benchmark) -> None:
    """Bound by memory: 16 MiB copied."""
    source, to = torch.ones(1 << 22), torch.empty(1 << 22)
    timed(benchmark, "bytes", lambda: to.copy_(source))


@pytest.mark.benchmark(group="references")
def test_numbers(benchmark: Benchmark) -> None:
    """Bound by arithmetic: the exponential function of 131,072 numbers."""
    x, to = torch.zeros(1 << 17), torch.empty(1 << 17)
    timed(benchmark, "numbers", lambda: torch.exp(x, out=to))


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize("num_envs", [1, 256])
def test_gae(benchmark: Benchmark, num_envs: int) -> None:
    reward, value, next_value = torch.randn(3, num_envs, 256)
    done = torch.rand(num_envs, 256) < 0.01
    advantage, _ = timed(
        benchmark, "calls", lambda: gae(reward, value, next_value, done, done, discount=0.999, gae_lambda=0.95)
    )
    assert advantage.shape == (num_envs, 256)


@pytest.mark.parametrize(
    ("shape", "num_envs", "reference"), [((4,), 1, "calls"), ((64, 64, 3), 16, "bytes")], ids=["vectors", "images"]
)
def test_minibatches(benchmark: Benchmark, shape: tuple[int, ...], num_envs: int, reference: str) -> None:
    """An epoch of 8 minibatches."""
    batch, generator = make_batch(num_envs, 128, shape), torch.Generator().manual_seed(0)
    seen = timed(benchmark, reference, lambda: sum(len(part) for part in shuffled(batch, 8, generator)))
    assert seen == num_envs * 128


@pytest.mark.parametrize("env", ["synthetic_env:cartpole_like", "synthetic_env:procgen_like"], ids=["mlp", "impala"])
def test_ewma(benchmark: Benchmark, env: str) -> None:
    """An update of the average of all weights of an MLP, and of the IMPALA network."""
    policy = build(ppo_ewma(env, num_envs=1, device="cpu"), seed=0).learner.agent.policy
    proximal = EwmaProximal(policy)
    timed(benchmark, "calls", proximal.after_gradient_step)


@pytest.mark.parametrize("size", [32, 8192])
@pytest.mark.parametrize("objective", ["clip", "kl"])
def test_objective(benchmark: Benchmark, objective: str, size: int) -> None:
    """Forward and backward, from logits to logits."""
    torch.manual_seed(0)
    proximal, behavior = (Categorical(torch.randn(size, 15)) for _ in range(2))
    logits = torch.randn(size, 15, requires_grad=True)
    action, advantage = torch.randint(0, 15, (size,)), torch.randn(size)
    logp_proximal, logp_behavior = proximal.log_prob(action), behavior.log_prob(action)

    def work() -> Tensor:
        policy = Categorical(logits)
        logp = policy.log_prob(action)
        if objective == "clip":
            loss = decoupled_clip_loss(logp, logp_proximal, logp_behavior, advantage)
        else:
            loss = decoupled_kl_loss(logp, logp_behavior, advantage, proximal.kl(policy), kl_coefficient=1.0)
        return torch.autograd.grad(loss, logits)[0]

    assert torch.isfinite(timed(benchmark, "calls" if size == 32 else "numbers", work)).all()


# ---------------------------------------------------------------- an MLP on environments that cost nothing


@pytest.fixture
def parts(request: pytest.FixtureRequest) -> Iterator[Components]:
    config = ppo_ewma("synthetic_env:cartpole_like", num_envs=request.param, device="cpu", **{"rollout.steps": 64})
    made = build(config, seed=0)
    yield made
    made.env.close()


@pytest.mark.parametrize("parts", [1, 64], indirect=True)
def test_collect(benchmark: Benchmark, parts: Components) -> None:
    rollout = timed(benchmark, "calls", lambda: parts.source.next(0))
    assert rollout.reward.shape[1] == 64


@pytest.mark.parametrize("parts", [1, 64], indirect=True)
def test_policy_phase(benchmark: Benchmark, parts: Components) -> None:
    rollout, config = parts.source.next(0), parts.learner.config
    batch, _ = estimate_advantages(rollout, rollout.reward, config, parts.advantage_normalizer)
    seen = timed(benchmark, "calls", lambda: policy_phase(batch, parts.learner))
    assert seen["gradient_steps"] == 3 * 8


def make_batch(num_envs: int, steps: int, shape: tuple[int, ...]) -> Batch:
    """A batch whose observations have ``shape``; images where that is three-dimensional."""
    flat = (num_envs, steps)
    observation = torch.zeros(*flat, *shape, dtype=torch.uint8 if len(shape) == 3 else torch.float32)
    return Batch(
        observation=observation,
        action=torch.zeros(flat, dtype=torch.int64),
        behavior_logp=torch.zeros(flat),
        behavior_params=torch.zeros(*flat, 15),
        advantage=torch.zeros(flat),
        value_target=torch.zeros(flat),
    )
