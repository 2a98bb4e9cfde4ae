"""A stack of R runs is R single runs: environments, weights, actions, minibatches, and every number to rounding."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anybatch.config.schema import OptimizerConfig, TrainConfig
from anybatch.errors import CheckpointError, ConfigError, DivergenceError, Interrupted
from anybatch.presets import ppg_ewma, ppo_ewma
from anybatch.reproduce.stacked import Evaluations, launch, launcher, read_result, result_path, run_stacked, shape_key
from anybatch.reproduce.stacked.evaluation import due
from anybatch.reproduce.stacked.launcher import stacks
from anybatch.reproduce.stacked.optimizers import StackedAdam
from anybatch.runs.progress import read_progress
from anybatch.training import TrainResult, train

SMALL: dict[str, Any] = {
    "num_envs": 4,
    "rollout.steps": 16,
    "optimizer.minibatches": 4,
    "optimizer.policy_epochs": 1,
    "optimizer.value_epochs": 1,
    "total_env_steps": 5 * 4 * 16,
    "step_size": 5e-3,
    "env.threads": 1,
    "model.encoder": "mlp",
    "model.options": {"width": 32, "depth": 2},
    "model.architecture": "dual",
    "advantage.discount": 0.99,
    "device": "cpu",
    "log.tensorboard": False,
    "log.noise_scale": False,
}


def small(env: str = "CartPole-v1", *, preset: Any = ppo_ewma, **changes: Any) -> TrainConfig:
    config: TrainConfig = preset(env if ":" in env else f"envpool:{env}", **{**SMALL, **changes})
    return config


STALE = {"rollout.source.kind": "delayed", "rollout.source.delay": 2, "policy.allow_stale_coupled": True}
STALE |= {"policy_epochs": 3, "value_epochs": 3}
SPREAD = {"policy_epochs": 3, "value_epochs": 3, "epoch_window": 4.0}
SHORT = {"env.options": {"max_episode_steps": 9}, "model.architecture": "shared", "optimizer.schedule": "linear"} | {
    "policy.clip_schedule": "0:1 1:0.1",
    "policy.entropy_schedule": "linear",
}
ONE = {"num_envs": 1, "total_env_steps": 96, "env.options": {"max_episode_steps": 20}, "objective": "kl"}
PPG = {"preset": ppg_ewma, "aux.policy_iterations": 2, "aux.epochs": 2, "aux.minibatches": 4, "value_epochs": 2}
MUJOCO = {"observation.normalize": True, "max_grad_norm": 0.1, "optimizer.shuffle": "samples", "policy_gain": 0.1}
SQUASHED = {"gaussian.squash": True, "gaussian.std": "network", "gaussian.log_std_bounds": (-3.0, 1.0)}
CUT = {"env.options": {"max_episode_steps": 9}}
HOT = {"model.encoder": "small-conv", "model.options": {"channels": 4, "width": 16, "depth": 1, "categories": 11}}
CONV = {"model.encoder": "small-conv", "model.options": {"channels": 4, "width": 16}}
STACKS = {
    "kl": [
        small(objective="kl"),
        small(objective="kl", step_size=2e-2, center_of_mass=2.0, span=4.0),
        small(objective="kl", kl_coefficient=0.1, entropy_coefficient=0.0, adam_betas=(0.5, 0.9)),
    ],
    "kl, recent": [small(objective="kl", proximal="recent"), small(objective="kl", proximal="recent", clip=0.1)],
    "kl, behavior": [small(objective="kl", proximal="behavior"), small(objective="kl", proximal="behavior")],
    "kl, all proximal policies": [small(objective="kl", proximal=kind) for kind in ("recent", "behavior", "ewma")],
    "ppg, all proximal policies": [small(**PPG, proximal=kind) for kind in ("recent", "behavior", "ewma")],
    "published kl estimator": [
        small(objective="kl", kl_estimator="half-squared"),
        small(objective="kl", kl_estimator="half-squared", kl_coefficient=3.0),
    ],
    "clip, stale, three epochs": [small("Catch-v0", **STALE), small("Catch-v0", **STALE, clip=0.1)],
    "clip, stale, coupled": [small("Catch-v0", **STALE, proximal="behavior")] * 2,
    "clip, stale, proximal importance": [
        small("Catch-v0", **STALE, proximal="recent", importance="proximal"),
        small("Catch-v0", **STALE, proximal="recent", importance="proximal", max_importance_ratio=1.001),
    ],
    "kl, passes spread out": [
        small("Catch-v0", objective="kl", **SPREAD),
        small("Catch-v0", objective="kl", **SPREAD, step_size=1e-3),
    ],
    "clip, separate passes spread out, stale": [small(**{**STALE, **SPREAD, "value_epochs": 2})] * 2,
    "kl, step size by KL": [
        small(objective="kl", kl_target=1e-3),
        small(objective="kl", kl_target=1e-3),  # equal numbers, but a step size for each
        small(objective="kl", kl_target=1e-3, step_size=2e-2),
    ],
    "clip, stale, interpolated": [
        small("Catch-v0", **STALE, proximal="behavior", interpolated=True, follow_ess=True),
        small("Catch-v0", **STALE, proximal="behavior", interpolated=True, follow_ess=True, center_of_mass=2.0),
    ],
    "clip, stale, second moment": [small("Catch-v0", **STALE, proximal="recent", second_moment=1e-4)] * 2,
    "one environment, dictionary": [
        small("MiniGrid-DoorKey-5x5-v0", **ONE),
        small("MiniGrid-DoorKey-5x5-v0", **ONE, step_size=1e-3),
    ],
    "truncation, shared, linear": [small("Acrobot-v1", **SHORT), small("Acrobot-v1", **SHORT, step_size=1e-2)],
    "truncation without bootstrap": [small("Acrobot-v1", **SHORT, bootstrap_truncated=False)] * 2,
    "ppg": [small(**PPG), small(**PPG, clone_coefficient=0.3), small(**PPG, **{"aux.step_size": 1e-3})],
    "ppg detach": [small(**PPG, **{"model.architecture": "detach"})] * 2,
    "continuous": [small("Pendulum-v1"), small("Pendulum-v1", step_size=1e-3)],
    "continuous, ppg, truncation": [small("Pendulum-v1", **PPG, **CUT), small("Pendulum-v1", **PPG, **CUT, clip=0.1)],
    "continuous, normalised, clipped, shuffled": [
        small("Pendulum-v1", **MUJOCO, **CUT),
        small("Pendulum-v1", **MUJOCO, **CUT, step_size=1e-3),
        small("Pendulum-v1", **MUJOCO, **CUT, clip=0.1),
    ],
    "squashed, state-dependent, stale": [
        small("Pendulum-v1", **MUJOCO, **SQUASHED, **STALE, entropy_coefficient=0.0),
        small("Pendulum-v1", **MUJOCO, **SQUASHED, **STALE),
    ],
    "normalised, discrete": [
        small("gym:CartPole-v1", **{"observation.normalize": True}),
        small("gym:CartPole-v1", step_size=1e-3, **{"observation.normalize": True}),
    ],
    "small convolution": [small("Catch-v0", **CONV), small("Catch-v0", **CONV, step_size=1e-3)],
    "categories": [small("MiniGrid-DoorKey-5x5-v0", **ONE, **HOT)] * 2,
    "gymnasium": [small("gym:CartPole-v1"), small("gym:CartPole-v1", step_size=1e-3)],
}
NOT_IN_STACKS = {"clip", "entropy_coefficient", "env_steps_per_second", "policy_loss", "step_size"}


@pytest.mark.procgen
@pytest.mark.parametrize("name", STACKS)
def test_a_stack_is_single_runs(name: str, tmp_path: Path) -> None:
    configs = STACKS[name]
    seeds = [11 * i + 3 for i in range(len(configs))]
    for i, result in enumerate(run_stacked(configs, seeds, rows=None, statistics=True)):
        train(configs[i], tmp_path / str(i), seed=seeds[i], quiet=True)
        single = read_progress(tmp_path / str(i) / "progress.csv")
        missing = single.keys() - result.columns.keys() - NOT_IN_STACKS
        assert not {column for column in missing if not column.startswith("seconds")}
        assert len(result.columns["iteration"]) == len(single["iteration"]) > 1
        for column in single.keys() & result.columns.keys():
            # an explained variance is a difference from 1, and large where targets hardly vary
            tolerance = {"rtol": 1e-2, "atol": 1e-3} if column == "explained_variance" else {"rtol": 1e-4, "atol": 2e-6}
            np.testing.assert_allclose(result.columns[column], single[column], err_msg=column, **tolerance)
        assert (result.config, result.seed, result.diverged) == (configs[i], seeds[i], False)


@pytest.mark.procgen
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_a_diverging_run_ends_alone(env: str, tmp_path: Path) -> None:
    good, bad = small(env), small(env, step_size=1e30)
    alone, together = run_stacked([good], [1], rows=None)[0], run_stacked([bad, good], [2, 1], rows=None)
    assert together[0].diverged and not together[1].diverged
    for name, values in alone.columns.items():
        np.testing.assert_allclose(together[1].columns[name], values, rtol=1e-4, atol=2e-6, err_msg=name)
    with pytest.raises(DivergenceError):
        train(bad, tmp_path / "run", seed=2, quiet=True)
    single = read_progress(tmp_path / "run" / "progress.csv")
    np.testing.assert_array_equal(together[0].columns.get("iteration", np.zeros(0)), single.get("iteration", []))


@pytest.mark.procgen
@pytest.mark.parametrize("name", ["kl", "continuous, normalised, clipped, shuffled"])
def test_evaluations_leave_training_as_it_is(name: str) -> None:
    configs, seeds = STACKS[name], [1, 2, 3]
    without = run_stacked(configs, seeds, rows=None)
    evaluated = run_stacked(configs, seeds, rows=None, evaluations=Evaluations(points=3, episodes=5))
    for a, b in zip(without, evaluated, strict=True):
        for column, values in a.columns.items():  # before training there is a row more
            np.testing.assert_array_equal(b.columns[column][1:], values, err_msg=column)
        # 5 iterations of 64 steps; points at 320/3, 640/3 and 320, so after 128, 256 and 320 steps
        assert b.columns["env_steps"][np.isfinite(b.columns["eval_return"])].tolist() == [0, 128, 256, 320]
    # a policy with weights and seed of its own in each run
    assert len({result.columns["eval_return"][0] for result in evaluated}) == 3


@pytest.mark.procgen
def test_an_evaluation_is_the_mean_of_first_episodes() -> None:
    """Every episode of Acrobot is cut after 9 steps of reward -1, long before a random policy gets up."""
    config = small("Acrobot-v1", **CUT)
    (result,) = run_stacked([config], [1], evaluations=Evaluations(points=2, episodes=3))
    assert result.columns["eval_return"][np.isfinite(result.columns["eval_return"])].tolist() == [-9, -9, -9]


def test_evaluations_at_equal_steps() -> None:
    at = Evaluations(points=4, episodes=1)
    # points at 25, 50, 75 and 100 of 100 steps; iterations of 30
    assert [due(at, 100, a, a + 30) for a in (0, 30, 60, 90)] == [True, True, True, True]
    assert [due(at, 100, a, a + 10) for a in range(0, 100, 10)] == [False, False, True, False, True] * 2
    with pytest.raises(ConfigError, match=r"evaluations\.episodes is 0"):
        Evaluations(points=1, episodes=0)


@pytest.mark.procgen
def test_rows_are_thinned_evenly_and_end_with_the_last() -> None:
    config = small(total_env_steps=7 * 64)
    every, some = run_stacked([config], [1], rows=None)[0].columns, run_stacked([config], [1], rows=3)[0].columns
    assert some["iteration"].tolist() == [3, 6, 7]
    for name, values in some.items():
        np.testing.assert_array_equal(values, every[name][[2, 5, 6]], err_msg=name)
    assert every["episode_return_sum"][-1] == pytest.approx(every["episodes"][-1] * every["mean_episode_return"][-1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer.kind": "sgd"}, "optimizer.kind is sgd"),
        ({"model.architecture": "shared", "value_epochs": 2}, "architecture is shared"),
        ({"eval.every": 32}, "eval.every is 32"),
        ({**STALE, "second_moment": 0.1, "micro_batch": 4}, "policy.second_moment is 0.1 with .* samples a minibatch"),
        ({"env.info_keys": ("elapsed_step",)}, "env.info_keys is "),
    ],
)
def test_what_cannot_be_stacked_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"{words}.*use launcher single"):
        run_stacked([small(**changes)], [0])


@pytest.mark.parametrize(("name", "value"), [("rows", 0), ("rows", -1), ("processes", 0), ("processes", 1.5)])
def test_numbers_of_a_launch_are_checked(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is {value}, but must be an integer of at least 1"):
        launch([], [], tmp_path, **{name: value})


@pytest.mark.procgen
def test_networks_that_cannot_be_stacked_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"encoder is .*use launcher single"):
        run_stacked([small("StarpilotHard-v0", **{"model.encoder": "auto", "model.options": {}})], [0])


def test_shapes_and_stacks() -> None:
    base = small()
    same = [small(step_size=1.0, clip=0.1, center_of_mass=3.0, span=2.0, proximal="recent"), small(device="auto")]
    assert {shape_key(config) for config in same} == {shape_key(base)}
    other = [small(num_envs=8), small(objective="kl"), small(**STALE), small("Catch-v0"), small(discount=0.9)]
    other += [small(importance="proximal")]
    assert len({shape_key(config) for config in [base, *other]}) == 7
    with pytest.raises(ConfigError, match="differ in more than numbers"):
        run_stacked([base, other[0]], [0, 1])
    runs = [(base, seed) for seed in range(5)] + [(other[0], 0)]
    assert [len(stack) for stack in stacks(runs, max_runs=3)] == [3, 2, 1]
    assert [len(stack) for stack in stacks(runs, max_samples=130)] == [2, 2, 1, 1]
    assert sorted(id(run) for stack in stacks(runs, max_runs=3) for run in stack) == sorted(id(run) for run in runs)


def test_adam_takes_each_runs_numbers() -> None:
    configs = [OptimizerConfig(step_size=s, adam_betas=b) for s, b in ((1.0, (0.9, 0.999)), (0.1, (0.5, 0.8)))]
    configs = [configs[0], configs[0], configs[1]]
    start, gradients = torch.randn(3, 5), torch.randn(4, 3, 5)
    matrix = torch.nn.Parameter(start.clone())
    stacked = StackedAdam([matrix], configs)
    for gradient in gradients:
        matrix.grad = gradient
        stacked.step()
    for run, config in enumerate(configs):
        parameter = torch.nn.Parameter(start[run].clone())
        single = torch.optim.Adam([parameter], lr=config.step_size, betas=config.adam_betas)
        for gradient in gradients:
            parameter.grad = gradient[run]
            single.step()
        torch.testing.assert_close(matrix[run], parameter)


@pytest.mark.procgen
def test_launch_trains_what_is_missing(tmp_path: Path) -> None:
    configs, seeds = [small(), small(), small(num_envs=8), small()], [1, 2, 1, 1]
    seen: list[tuple[int, int]] = []
    first = launch(configs[:2], seeds[:2], tmp_path, rows=2, on_done=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 2), (2, 2)]
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    seen.clear()
    results = launch(configs, seeds, tmp_path, rows=2, on_done=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 3), (3, 3)]
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    assert [(r.config, r.seed) for r in results] == list(zip(configs, seeds, strict=True))
    assert results[0].columns.keys() == first[0].columns.keys() == results[3].columns.keys()
    (direct,) = run_stacked(configs[:1], seeds[:1], rows=2)
    for name, values in direct.columns.items():
        np.testing.assert_allclose(results[0].columns[name], values, rtol=1e-4, atol=2e-6, err_msg=name)


@pytest.mark.procgen
def test_both_launchers_give_the_same_rows(tmp_path: Path) -> None:
    configs, seeds = [small(), small(step_size=1e-3)], [1, 2]
    stacked = launch(configs, seeds, tmp_path / "stacked", rows=2)
    single = launch(configs, seeds, tmp_path / "single", rows=2, launcher="single")
    for a, b in zip(stacked, single, strict=True):
        for name in ("iteration", "env_steps", "episodes", "mean_episode_return", "advantage_std", "gradient_steps"):
            np.testing.assert_allclose(a.columns[name], b.columns[name], rtol=1e-4, err_msg=name)


def test_a_single_run_that_is_stopped_leaves_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(config: TrainConfig, out: Path, **_: Any) -> TrainResult:
        return TrainResult(out, 16, math.nan, interrupted=True)

    monkeypatch.setattr(launcher, "train", stopped)
    with pytest.raises(Interrupted):
        launch([small()], [1], tmp_path, launcher="single")
    assert not list(tmp_path.iterdir())


@pytest.mark.procgen
def test_results_with_other_evaluations_are_other_results(tmp_path: Path) -> None:
    configs, at = [small()], Evaluations(points=2, episodes=1)
    launch(configs, [1], tmp_path)
    (result,) = launch(configs, [1], tmp_path, evaluations=at)
    assert len(list(tmp_path.iterdir())) == 2 and np.isfinite(result.columns["eval_return"]).sum() == 3
    with pytest.raises(ConfigError, match="evaluations need launcher vectorized"):
        launch(configs, [1], tmp_path, evaluations=at, launcher="single")


@pytest.mark.procgen
@pytest.mark.slow
def test_launch_in_two_processes(tmp_path: Path) -> None:
    configs = [small(), small(num_envs=8)]
    assert [result.config for result in launch(configs, [1, 2], tmp_path, processes=2)] == configs


def test_results_are_named_by_what_they_are(tmp_path: Path) -> None:
    base = small()
    assert result_path(tmp_path, base, 1) == result_path(tmp_path, replace(base, device="auto", micro_batch=1), 1)
    masked = [small(**STALE, second_moment=0.1, micro_batch=size) for size in (4, 8)]
    assert result_path(tmp_path, masked[0], 1) != result_path(tmp_path, masked[1], 1)  # the mask is of a micro-batch
    assert len({result_path(tmp_path, c, s) for c, s in ((base, 1), (base, 2), (small(clip=0.1), 1))}) == 3
    (tmp_path / "x.csv.gz").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="is not the result of a run"):
        read_result(tmp_path / "x.csv.gz")


def test_finished_runs_are_found_by_later_versions() -> None:
    """A field that changes nothing about a stacked run must not change its name: it would be trained again."""
    config = ppo_ewma("envpool:Catch-v0", num_envs=4, total_env_steps=10_000)
    assert result_path(Path("runs"), config, 3).name == "47fc69a6482fb750fb4f.csv.gz"
