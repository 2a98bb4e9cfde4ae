"""Evaluation while training: it disturbs nothing, a resumed run repeats it, and the best policy is the best row's."""

from __future__ import annotations

import math
import random
import shutil
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anybatch.callbacks import Callback, KeepBest, PeriodicEvaluation, RunContext, StopAt
from anybatch.callbacks.evaluation import value_of
from anybatch.cli.main import main
from anybatch.config.io import override
from anybatch.config.schema import EvalConfig, TrainConfig
from anybatch.errors import CheckpointError, ConfigError
from anybatch.presets import ppg_ewma, ppo, ppo_ewma
from anybatch.runs import checkpoint
from anybatch.runs.build import stream_seed
from anybatch.runs.evaluation import LoadedPolicy, evaluate, load_policy
from anybatch.runs.progress import read_progress
from anybatch.training import resume, train
from callbacks.test_calls import Does, same, stop_at
from small_runs import tiny_ppo

ITERATION = 4 * 8
EVERY, EPISODES = 50, 3


class Noisy(gymnasium.Env[np.ndarray, int]):
    """An environment that draws from the global generators; episodes of 3 steps with a reward of 1 each."""

    made: Iterator[int] = count()
    open: ClassVar[set[int]] = set()
    """Numbers of those that are not closed."""
    interrupt_at: int | None = None
    """Number of the environment that receives two signals in its second step."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.number = next(self.made)
        self.open.add(self.number)

    def close(self) -> None:
        self.open.discard(self.number)

    def observe(self) -> np.ndarray:
        return np.array([np.random.uniform(-1, 1), random.uniform(-1, 1)], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.number == type(self).interrupt_at and self.steps == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return self.observe(), 1.0, self.steps == 3, False, {}


def begin() -> None:
    """Let the next run begin as others did."""
    Noisy.made = count()
    Noisy.open.clear()
    random.seed(1)
    np.random.seed(1)


class Odd(nn.Module):
    """An encoder that draws from PyTorch's global generator and has statistics that each forward pass changes."""

    def __init__(self, observation_space: gymnasium.Space[Any]) -> None:
        super().__init__()
        self.out_features = 4
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.3))

    def forward(self, observation: Tensor) -> Tensor:
        features: Tensor = self.layers(observation.float())
        return features


SMALL = {
    "num_envs": 4,
    "rollout_steps": 8,
    "minibatches": 2,
    "total_env_steps": 6 * ITERATION,
    "precision": "fp32",
    "device": "cpu",
    "tensorboard": False,
    "step_size": 1e-2,
}
MLP = {"model": {"encoder": "mlp", "options": {"width": 8, "depth": 1}}}
AUX = {"policy_iterations": 2, "aux_epochs": 2, "aux_minibatches": 4}
VARIANTS = {
    "cartpole": ppo_ewma("gym:CartPole-v1", **SMALL, **MLP),
    "normalised": ppo("gym:Pendulum-v1", **SMALL, **MLP, **{"observation.normalize": True}),
    "ppg": ppg_ewma("gym:CartPole-v1", **SMALL, **MLP, **AUX),
    "asynchronous": ppo_ewma(
        "gym:CartPole-v1",
        **SMALL,
        **MLP,
        **{"rollout.source": {"kind": "asynchronous", "deterministic": True}},
    ),
    "global generators": ppo(Noisy, **SMALL, encoder=f"{__name__}:Odd"),
}


def evaluating(config: TrainConfig, **changes: Any) -> TrainConfig:
    return override(config, {"eval.every": EVERY, "eval.episodes": EPISODES, **changes})


def columns(run: Path, *, evaluation: bool = True) -> str:
    """progress.csv without times, and without the columns of evaluation unless they are wanted."""
    found = read_progress(run / "progress.csv")
    return str({name: x for name, x in found.items() if "second" not in name and (evaluation or "eval" not in name)})


def state(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = checkpoint.load_newest(run / "checkpoints")[0]["state"]
    return found


def same_source(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether rollouts come from equal sources; a busy machine has sampled fewer of them ahead of training."""
    if "waiting" not in a:
        return same(a, b)
    sampled = zip(a["waiting"], b["waiting"], strict=False)
    beginning = a["first"] == b["first"] and all(same(*rollouts) for rollouts in sampled)
    return beginning and (a["current"] != b["current"] or same(a["sampler"], b["sampler"]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_the_same_with_and_without(variant: str, tmp_path: Path) -> None:
    config = VARIANTS[variant]
    for name, one in (("without", config), ("with", evaluating(config))):
        begin()
        train(one, tmp_path / name, 3, quiet=True)
    states = [state(tmp_path / name) for name in ("with", "without")]
    assert same_source(*(x.pop("source") for x in states)) and same(*states)
    assert columns(tmp_path / "with", evaluation=False) == columns(tmp_path / "without")
    returns = read_progress(tmp_path / "with" / "progress.csv")["eval_return"]
    assert sum(map(math.isfinite, returns)) == 3


def test_points_and_numbers(tmp_path: Path) -> None:
    train(evaluating(ppo(Noisy, **SMALL, **MLP)), tmp_path / "run", quiet=True)
    found = read_progress(tmp_path / "run" / "progress.csv")
    # iterations end at 32, 64, 96, 128, 160, 192 steps: the first at or beyond 50, 100 and 150 are the 2nd, 4th and 5th
    evaluated = [int(i) for i, x in zip(found["iteration"], found["eval_return"], strict=True) if math.isfinite(x)]
    assert evaluated == [2, 4, 5]
    for column, number in (("eval_return", 3), ("eval_return_stderr", 0), ("eval_length", 3)):
        assert [x for x in found[column] if math.isfinite(x)] == [number] * 3
    assert "eval_unfinished" not in found
    assert all((x > 0) == (i in evaluated) for i, x in enumerate(found["seconds_evaluation"], start=1) if x > 0.001)
    # a point at which an iteration ends counts, several points in an iteration make one evaluation
    for every, expected in ((32, [1, 2, 3, 4, 5, 6]), (96, [3, 6]), (7, [1, 2, 3, 4, 5, 6]), (1000, [])):
        config = evaluating(ppo(Noisy, **SMALL, **MLP), **{"eval.every": every, "eval.episodes": 1})
        train(config, tmp_path / str(every), quiet=True)
        returns = read_progress(tmp_path / str(every) / "progress.csv")["eval_return"]
        assert [i for i, x in enumerate(returns, start=1) if math.isfinite(x)] == expected


class Policies(Callback):
    """Keeps a copy of the policy after each iteration."""

    def __init__(self) -> None:
        self.policies: dict[int, LoadedPolicy] = {}

    def after_iteration(self, run: RunContext, row: dict[str, Any]) -> None:
        self.policies[run.iteration] = run.policy()


def test_an_evaluation_is_that_of_the_function(tmp_path: Path) -> None:
    kept = Policies()
    train(evaluating(VARIANTS["normalised"], **{"eval.episodes": 4}), tmp_path / "run", 7, [kept], quiet=True)
    found = read_progress(tmp_path / "run" / "progress.csv")
    seeds = [stream_seed(7, "evaluation", 0, number) for number in (1, 2, 3)]
    assert len(set(seeds)) == 3
    for iteration, seed in zip((2, 4, 5), seeds, strict=True):
        result = evaluate(kept.policies[iteration], episodes=4, seed=seed, num_envs=4)
        assert found["eval_return"][iteration - 1] == result.mean
        assert found["eval_return_stderr"][iteration - 1] == result.standard_error > 0
        assert found["eval_length"][iteration - 1] == 200


def test_other_options_and_a_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = {"eval.max_steps": 20, "eval.options": {"max_episode_steps": 15}, "eval.num_envs": 1}
    train(evaluating(VARIANTS["normalised"], **limits), tmp_path / "run", quiet=True)
    found = read_progress(tmp_path / "run" / "progress.csv")
    assert (found["eval_length"][1], found["eval_unfinished"][1]) == (15, 0)
    train(evaluating(VARIANTS["normalised"], **{"eval.max_steps": 20}), tmp_path / "cut", quiet=True)
    found = read_progress(tmp_path / "cut" / "progress.csv")
    assert found["eval_unfinished"][1] == EPISODES and math.isnan(found["eval_return"][1])
    assert capsys.readouterr().err.count(f"eval.max_steps cut {EPISODES} of {EPISODES} episodes") == 1


@pytest.mark.parametrize(("cut", "number"), [(0, 1.0), (1, math.nan), (math.nan, 1.0)])
def test_an_evaluation_with_cut_episodes_does_not_count(cut: float, number: float) -> None:
    row = {"eval_return": 1.0, "eval_unfinished": cut, "mean_episode_return": 2.0}
    assert value_of(row, "eval_return") == pytest.approx(number, nan_ok=True)
    assert (value_of(row, "mean_episode_return"), value_of({"eval_return": 1.0}, "eval_return")) == (2.0, 1.0)


def test_what_will_not_happen_in_a_short_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = override(tiny_ppo(), {"total_env_steps": 7, "eval.every": 100})
    assert train(config, tmp_path / "run", quiet=True).env_steps == 8
    said = capsys.readouterr().err
    assert "no evaluation will run: eval.every is 100, and total_env_steps is 7" in said
    assert "total_env_steps is 7, but the first iteration ends after 8: the run has one iteration" in said
    delayed = override(tiny_ppo(), {"rollout.source.kind": "delayed", "delay": 2, "proximal": "recent"})
    assert train(delayed, tmp_path / "delayed", quiet=True).env_steps == 24  # 2 of 3 rollouts fill the buffer
    assert "total_env_steps is 16, but the first iteration ends after 24" in capsys.readouterr().err


def test_an_environment_that_cannot_be_made_is_reported_before_training(tmp_path: Path) -> None:
    options = {"eval.options": {"max_episode_step": 15}}
    with pytest.raises(ConfigError, match=r"env\.options has 'max_episode_step', but gym:Pendulum-v1 takes only"):
        train(evaluating(VARIANTS["normalised"], **options), tmp_path / "run", quiet=True)
    assert read_progress(tmp_path / "run" / "progress.csv") == {}


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_resumed_run_evaluates_as_one_that_never_stopped(at: int, tmp_path: Path) -> None:
    config, out, whole = evaluating(VARIANTS["cartpole"]), tmp_path / "run", tmp_path / "whole"
    train(config, whole, 3, quiet=True)
    train(config, out, 3, [stop_at(at)], quiet=True)
    resume(out, total_env_steps=config.total_env_steps, quiet=True)
    assert columns(out) == columns(whole)
    assert same(state(out), state(whole))
    assert same(*(checkpoint.load(run / "checkpoints/best.ckpt") for run in (out, whole)))


def test_an_evaluation_that_is_interrupted_is_repeated(tmp_path: Path) -> None:
    config, out, whole = evaluating(ppo(Noisy, **SMALL, **MLP)), tmp_path / "run", tmp_path / "whole"
    begin()
    train(config, whole, quiet=True)
    begin()
    Noisy.interrupt_at = 6  # 0 to 3 are training's, 4 is made at the start, 5 to 7 evaluate
    try:
        assert train(config, out, quiet=True).interrupted
    finally:
        Noisy.interrupt_at = None
    run = checkpoint.load_newest(out / "checkpoints")[0]["run"]
    assert run["iteration"] == 2 and run["row"] is not None  # the work of the iteration is kept
    assert read_progress(out / "progress.csv")["iteration"] == [1]
    assert not Noisy.open  # those of training, too, whose calls have ended
    resume(out, quiet=True)
    assert columns(out) == columns(whole)
    times = {name: x for name, x in run["row"].items() if "second" in name}  # measured before the evaluation
    assert times["env_steps_per_second"] == pytest.approx(ITERATION / (run["row"]["seconds"] - first_seconds(out)), 0.1)
    assert times == {name: read_progress(out / "progress.csv")[name][1] for name in times}
    assert times["seconds_sampling"] > 0


def first_seconds(out: Path) -> float:
    return read_progress(out / "progress.csv")["seconds"][0]


def test_evaluation_can_begin_and_end_with_a_resumed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = VARIANTS["cartpole"], tmp_path / "run"
    train(config, out, 3, [stop_at(2)], quiet=True)
    file = out / "config.yaml"
    file.write_text(file.read_text().replace("every: null", "every: 50"))
    resume(out, total_env_steps=4 * ITERATION, quiet=True)
    returns = read_progress(out / "progress.csv")["eval_return"]
    assert [math.isfinite(x) for x in returns] == [False, False, False, True]  # 100 is reached in the 4th
    file.write_text(file.read_text().replace("every: 50", "every: null"))
    capsys.readouterr()
    resume(out, total_env_steps=6 * ITERATION, quiet=True)
    assert (
        "columns that will be empty from now on: eval_return, eval_return_stderr, eval_length"
        in capsys.readouterr().err
    )
    train(config, tmp_path / "whole", 3, quiet=True)
    assert columns(out, evaluation=False) == columns(tmp_path / "whole")


# ---------------------------------------------------------------- best policy, stop


def test_the_best_policy_is_that_of_the_best_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, out = Policies(), tmp_path / "run"
    config = evaluating(VARIANTS["cartpole"], **{"eval.every": ITERATION, "keep_checkpoints": 1})
    train(config, out, 0, [kept], quiet=True)
    returns = read_progress(out / "progress.csv")["eval_return"]
    best = returns.index(max(returns)) + 1
    assert best < len(returns)  # else the newest policy would do as well
    policies = {iteration: dict(policy.agent.state_dict()) for iteration, policy in kept.policies.items()}
    assert same(dict(load_policy(out, best=True).agent.state_dict()), policies[best])
    assert same(dict(load_policy(out).agent.state_dict()), policies[len(returns)])
    capsys.readouterr()
    shown = []
    for flags in ([], ["--best"]):
        assert main(["eval", str(out), "--episodes", "5", *flags]) == 0
        shown.append(capsys.readouterr().out)
    for policy, line in zip((load_policy(out), load_policy(out, best=True)), shown, strict=True):
        assert line == f"mean return: {evaluate(policy, episodes=5)}\n"


def test_there_is_no_best_policy_without_evaluation(tmp_path: Path) -> None:
    train(override(VARIANTS["cartpole"], {"total_env_steps": ITERATION}), tmp_path / "run", quiet=True)
    with pytest.raises(CheckpointError, match=r"has no best policy: training keeps one if eval\.every and eval"):
        load_policy(tmp_path / "run", best=True)


class Given(Callback):
    """Numbers of the column score."""

    def __init__(self, *values: float) -> None:
        self.values = iter(values)

    def after_iteration(self, run: RunContext, row: dict[str, Any]) -> None:
        row["score"] = next(self.values)


def test_a_resumed_run_improves_on_the_best_policy_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = override(VARIANTS["cartpole"], {"total_env_steps": 2 * ITERATION}), tmp_path / "run"
    train(config, out, 0, [Given(1.0, math.nan), KeepBest("score")], quiet=True)
    path = out / "checkpoints" / "best.ckpt"
    assert checkpoint.load(path)["iteration"] == 1
    for values, best in (((0.5, 1.0), 1), ((2.0, 1.5), 5)):
        done = read_progress(out / "progress.csv")["env_steps"][-1]
        resume(out, callbacks=[Given(*values), KeepBest("score")], total_env_steps=int(done) + 64, quiet=True)
        assert checkpoint.load(path)["iteration"] == best
    path.write_bytes(path.read_bytes()[:-1])
    capsys.readouterr()
    resume(out, callbacks=[Given(-5.0), KeepBest("score")], total_env_steps=7 * ITERATION, quiet=True)
    assert "the best policy so far cannot be read" in capsys.readouterr().err
    assert checkpoint.load(path)["iteration"] == 7
    resume(out, callbacks=[Given(9.0), KeepBest("score")], total_env_steps=8 * ITERATION, quiet=True)
    # 9 says nothing about another column, whose values are fractions
    resume(out, callbacks=[Given(0.0), KeepBest("clip_fraction")], total_env_steps=9 * ITERATION, quiet=True)
    assert f"{path} contains the best policy by the column score: the next" in capsys.readouterr().err
    assert checkpoint.load(path)["column"] == "clip_fraction"
    shutil.rmtree(out / "checkpoints")
    with pytest.raises(ConfigError, match="there is no column 'skore'; the columns are iteration, env_steps"):
        train(config, tmp_path / "typo", 0, [KeepBest("skore")], quiet=True)


def test_one_callback_keeps_the_best_policy(tmp_path: Path) -> None:
    config = evaluating(VARIANTS["cartpole"])
    for callbacks in ([KeepBest("entropy")], [KeepBest("entropy"), KeepBest("clip_fraction")]):
        with pytest.raises(ConfigError, match=r"two KeepBest, .* checkpoints/best\.ckpt: give one, and set eval\.keep"):
            train(config, tmp_path / "run", 0, callbacks, quiet=True)
    assert not (tmp_path / "run").exists()
    train(override(config, {"eval.keep_best": False}), tmp_path / "run", 0, [KeepBest("entropy")], quiet=True)
    assert checkpoint.load(tmp_path / "run/checkpoints/best.ckpt")["column"] == "entropy"
    file = tmp_path / "run/config.yaml"
    file.write_text(file.read_text().replace("keep_best: false", "keep_best: true"))
    with pytest.raises(ConfigError, match="two KeepBest"):
        resume(tmp_path / "run", callbacks=[KeepBest("entropy")], quiet=True)


def test_the_same_callbacks_serve_several_runs(tmp_path: Path) -> None:
    settings = EvalConfig(every=ITERATION, episodes=1)
    periodic, best = PeriodicEvaluation(settings), KeepBest("score")
    config = override(VARIANTS["cartpole"], {"total_env_steps": 2 * ITERATION})
    for seed, values in enumerate([(7.0, 8.0), (1.0, 0.0)]):  # the second run's are below all of the first
        out = tmp_path / str(seed)
        train(config, out, seed, [Given(*values), best, periodic], quiet=True)
        assert checkpoint.load(out / "checkpoints/best.ckpt")["value"] == max(values)
        assert all(map(math.isfinite, read_progress(out / "progress.csv")["eval_return"]))


def test_training_ends_at_a_return(tmp_path: Path) -> None:
    config = evaluating(ppo(Noisy, **SMALL, **MLP), **{"eval.stop_at": 3.0})
    result = train(config, tmp_path / "run", quiet=True)
    assert (result.stopped, result.env_steps) == ("eval_return is 3, at least 3", 2 * ITERATION)
    assert train(override(config, {"eval.stop_at": 3.1}), tmp_path / "on", quiet=True).stopped is None
    tensor = Does(lambda run, row: row.update(score=torch.tensor([5.0])), 1)
    scored = train(VARIANTS["cartpole"], tmp_path / "tensor", 0, [tensor, StopAt(3, "score")], quiet=True)
    assert scored.stopped == "score is 5, at least 3"
    early = [StopAt(2.5, "mean_episode_return")]
    assert train(VARIANTS["global generators"], tmp_path / "early", 0, early, quiet=True).env_steps == ITERATION


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"eval.every": 0}, "eval.every is 0, but must be an integer of at least 1, or none"),
        ({"eval.episodes": 0}, "eval.episodes is 0, but must be an integer of at least 1"),
        ({"eval.stop_at": 5.0}, "eval.stop_at is 5, which needs evaluations: set eval.every as well"),
    ],
)
def test_bad_settings_are_one_sentence(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        train(override(VARIANTS["cartpole"], changes), tmp_path / "run", quiet=True)
    assert str(caught.value) == sentence
    assert not (tmp_path / "run").exists()
