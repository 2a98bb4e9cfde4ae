"""The EWMA that limits the policy as PPO did."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from anybatch.cli.main import main
from anybatch.config.schema import TrainConfig
from anybatch.errors import ConfigError
from anybatch.grid.grid_file import read_grid
from anybatch.presets import PRESETS, ppo, ppo_ewma, ppo_ewma_atari, ppo_ewma_control
from anybatch.proximal import EwmaProximal
from anybatch.scaling import center_of_mass_of_ppo, from_ppo


def test_hand_worked() -> None:
    assert center_of_mass_of_ppo(1, 1) == 0  # both proximal policies are the current one
    # K = 2: (1 + sqrt(3)) / 2; K = 8: (7 + sqrt(63)) / 2
    assert center_of_mass_of_ppo(2, 1) == pytest.approx(1.3660254)
    assert center_of_mass_of_ppo(1, 8) == pytest.approx(7.4686270)
    assert center_of_mass_of_ppo(2, 4) == center_of_mass_of_ppo(1, 8)
    for wrong in (0, 2.5, float("nan"), "4"):
        with pytest.raises(ConfigError, match=f"minibatches is .*{wrong}.*, but must be an integer of at least 1"):
            center_of_mass_of_ppo(1, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [4, 16])
def test_a_random_walk_is_as_far_from_the_average_as_from_the_start_of_its_iterations(steps: int) -> None:
    walkers, iterations = 4000, 40 if steps == 4 else 12
    theta = torch.nn.Linear(walkers, 1, bias=False)
    torch.nn.init.zeros_(theta.weight)
    ewma = EwmaProximal(theta, center_of_mass_of_ppo(1, steps))
    generator, squares = torch.Generator().manual_seed(0), torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for iteration in range(iterations):
            start = theta.weight.clone()
            for _ in range(steps):
                if iteration >= iterations // 2:  # the average has forgotten the beginning
                    for i, proximal in enumerate((start, ewma.average[0])):
                        squares[i] += (theta.weight - proximal).square().double().sum()
                theta.weight += torch.randn(1, walkers, generator=generator)
                ewma.after_gradient_step()
    count = steps * (iterations - iterations // 2) * walkers
    assert squares[0] / count == pytest.approx((steps - 1) / 2, rel=0.02)
    assert squares[1] / count == pytest.approx((steps - 1) / 2, rel=0.02)


def test_everything_else_stays() -> None:
    config = ppo("gym:CartPole-v1", minibatches=4)
    ewma = from_ppo(config)
    assert ewma == ppo("gym:CartPole-v1", minibatches=4, proximal="ewma", center_of_mass=center_of_mass_of_ppo(3, 4))


def test_one_gradient_step_has_no_limit_to_keep() -> None:
    with pytest.raises(ConfigError, match="one minibatch and one policy epoch PPO does not limit the policy"):
        from_ppo(ppo(policy_epochs=1, value_epochs=1, minibatches=1))


@pytest.mark.parametrize("preset", [ppo_ewma_control, ppo_ewma_atari])
def test_presets_have_the_limit_of_the_gradient_steps_that_are_set(preset: Callable[..., TrainConfig]) -> None:
    assert preset().policy.center_of_mass == center_of_mass_of_ppo(4, 4)
    once = preset(policy_epochs=1, value_epochs=1)
    assert once.policy.center_of_mass == center_of_mass_of_ppo(1, 4)
    assert preset(minibatches=8).policy.center_of_mass == center_of_mass_of_ppo(4, 8)
    assert preset(minibatches=8, center_of_mass=3.0).policy.center_of_mass == 3.0
    single = preset(policy_epochs=1, value_epochs=1, minibatches=1)  # PPO has no limit then: that of the preset
    assert single.policy.center_of_mass == center_of_mass_of_ppo(4, 4)
    assert preset(proximal="behavior", policy_epochs=1, minibatches=1).policy.proximal == "behavior"
    with pytest.raises(ConfigError, match=r"optimizer\.policy_epochs is 0"):
        preset(policy_epochs=0)


def test_command_lines_and_grids_have_the_limit_of_the_epochs_that_are_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = ["--optimizer.policy-epochs", "1", "--optimizer.value-epochs", "1"]
    for flags, tuned in (
        (once, center_of_mass_of_ppo(1, 4)),
        ([], center_of_mass_of_ppo(4, 4)),
        ([*once, "--policy.center-of-mass", "3"], 3.0),
    ):
        assert main(["scale", "ppo-ewma-control", "--divide-batch-by", "2", "--format", "json", *flags]) == 0
        assert json.loads(capsys.readouterr().out)["config"]["policy"]["center_of_mass"] == pytest.approx(2 * tuned)
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        "base: ppo-ewma-control\nset: {env.id: gym:CartPole-v1, optimizer.policy_epochs: 1, optimizer.value_epochs: 1}"
    )
    (job,) = read_grid(grid, PRESETS)
    assert job.config == ppo_ewma_control("gym:CartPole-v1", policy_epochs=1, value_epochs=1)


def test_a_policy_with_a_limit_of_its_own_is_no_plain_ppo() -> None:
    with pytest.raises(ConfigError, match=r"policy\.proximal is ewma, so this is not a plain PPO"):
        from_ppo(ppo_ewma())
