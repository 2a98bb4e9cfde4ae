"""The single-file example trains exactly what the library trains."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch

import anybatch
from anybatch.presets import ppo_ewma
from anybatch.proximal import EwmaProximal
from anybatch.runs import checkpoint
from anybatch.runs.progress import read_progress
from anybatch.sampling import numpy_policy
from anybatch.scaling import scale
from ppo_ewma_single_file import Args, Ewma, parse, scaled, train

EXAMPLE = Path(__file__).parents[2] / "examples" / "ppo_ewma_single_file.py"
# where each of the example's modules is in the library's agent
NAMES = {"encoder": "policy.encoder.layers", "policy_head": "policy.head", "value_head": "value_head"}


def library_name(name: str) -> str:
    module, _, rest = name.partition(".")
    return f"{NAMES[module]}.{rest}"


# the second one cuts trajectories into pieces, has moments over 2 iterations and runs into the time limit
@pytest.mark.parametrize(
    ("env", "changes", "iterations"),
    [
        ("CartPole-v1", {"num_envs": 8}, 3),
        ("Acrobot-v1", {"num_envs": 3, "minibatches": 2, "span": 2.0, "center_of_mass": 3.0, "steps": 520}, 2),
    ],
)
def test_same_weights_bit_for_bit(
    tmp_path: Path, env: str, changes: dict[str, float], iterations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numpy_policy, "_MAX_MULTIPLICATIONS", 0)  # act with PyTorch, as the example does
    config = ppo_ewma(f"gym:{env}", **changes, total_env_steps=1, micro_batch=10_000, precision="fp32", device="cpu")
    config = anybatch.presets.override(config, {"total_env_steps": iterations * config.iteration_batch})
    result = anybatch.train(config, tmp_path / "run", seed=5, quiet=True)
    content, _ = checkpoint.load_newest(tmp_path / "run" / "checkpoints")

    agent, history = train(
        Args(
            env_id=env,
            seed=5,
            total_timesteps=config.total_env_steps,
            num_envs=config.env.num_envs,
            num_steps=config.rollout.steps,
            num_minibatches=config.optimizer.minibatches,
            center_of_mass=config.policy.center_of_mass,
            advantage_span=config.advantage.span,
        )
    )
    theirs = content["state"]["agent"]
    mine = {library_name(name): x for name, x in agent.state_dict().items()}
    assert mine.keys() == theirs.keys()
    for name, x in mine.items():
        assert torch.equal(x, theirs[name]), f"{name}: {(x - theirs[name]).abs().max()}"
    logged = read_progress(result.run_dir / "progress.csv")["mean_episode_return"]
    torch.testing.assert_close(torch.tensor(history), torch.tensor(logged), rtol=1e-6, atol=0, equal_nan=True)
    assert len(history) == iterations


def test_ewma_equals_the_library_s() -> None:
    """And the hand-worked case: theta_0 = 0, then 1, beta = 8/9, gives 1 / (1 + 8/9) = 9/17."""
    example, library = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    for module in (example, library):
        torch.nn.init.zeros_(module.weight)
    mine, theirs = Ewma(example, 8.0), EwmaProximal(library, 8.0)  # type: ignore[arg-type]
    for value in (1.0, -2.0, 0.5):
        for module, average in ((example, mine), (library, theirs)):
            torch.nn.init.constant_(module.weight, value)
            average.after_gradient_step()
        if value == 1.0:
            assert mine.average.weight.item() == pytest.approx(9 / 17)
        assert torch.equal(mine.average.weight, theirs.module.weight)


@pytest.mark.parametrize("c", [1.0, 8.0, 0.5])
def test_scaling_is_the_library_s(c: float) -> None:
    base = ppo_ewma("gym:CartPole-v1", num_envs=16, span=2.0)
    theirs, _ = scale(base, c)
    mine = scaled(Args(num_envs=theirs.env.num_envs, advantage_span=2.0, divide_batch_by=c))
    assert mine.learning_rate == pytest.approx(theirs.optimizer.step_size)
    assert mine.center_of_mass == pytest.approx(theirs.policy.center_of_mass)
    assert mine.advantage_span == pytest.approx(theirs.advantage.span)


def test_defaults_are_the_preset_s() -> None:
    preset, mine = ppo_ewma(), Args()
    assert mine.num_steps == preset.rollout.steps
    assert mine.num_minibatches == preset.optimizer.minibatches
    assert mine.update_epochs == preset.optimizer.policy_epochs == preset.optimizer.value_epochs
    assert (mine.learning_rate, mine.vf_coef) == (preset.optimizer.step_size, preset.optimizer.value_coefficient)
    assert (mine.gamma, mine.gae_lambda) == (preset.advantage.discount, preset.advantage.gae_lambda)
    assert (mine.clip_coef, mine.ent_coef) == (preset.policy.clip, preset.policy.entropy_coefficient)
    assert (mine.center_of_mass, mine.advantage_span) == (preset.policy.center_of_mass, preset.advantage.span)
    assert mine.max_importance_ratio == preset.policy.max_importance_ratio


def test_command_line() -> None:
    assert parse(["--env-id", "Acrobot-v1", "--divide-batch-by", "8"]) == Args(env_id="Acrobot-v1", divide_batch_by=8.0)


def test_it_needs_nothing_of_the_library_and_stays_short() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 300
    nodes = list(ast.walk(ast.parse(text)))
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    outside = {str(name).partition(".")[0] for name in modules} - sys.stdlib_module_names
    assert outside == {"gymnasium", "numpy", "torch"}
