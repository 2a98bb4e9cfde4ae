"""Optuna as it is prunes a trial that does not learn."""

from __future__ import annotations

from pathlib import Path

import pytest

from anybatch.callbacks import OptunaPruning
from anybatch.errors import ConfigError
from anybatch.presets import ppo
from anybatch.runs.checkpoint import load_newest
from anybatch.runs.progress import read_progress
from anybatch.training import resume, train
from callbacks.test_calls import Recorder

optuna = pytest.importorskip("optuna")


def test_a_trial_that_does_not_learn_is_pruned(tmp_path: Path) -> None:
    recorders = [Recorder(), Recorder()]

    def objective(trial: optuna.Trial) -> float:
        config = ppo(
            "gym:CartPole-v1",
            num_envs=8,
            steps=32,
            minibatches=4,
            step_size=trial.suggest_categorical("step_size", [1e-2, 0.0]),
            discount=0.99,
            total_env_steps=24 * 256,
            device="cpu",
            tensorboard=False,
            model={"encoder": "mlp", "options": {"width": 32, "depth": 2}},
            eval={"every": 4 * 256, "episodes": 10},
        )
        run = tmp_path / str(trial.number)
        train(config, run, 1, [OptunaPruning(trial), recorders[trial.number]], quiet=True)
        return read_progress(run / "progress.csv")["eval_return"][-1]

    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=8 * 256)
    study = optuna.create_study(direction="maximize", pruner=pruner)
    for step_size in (1e-2, 0.0):
        study.enqueue_trial({"step_size": step_size})
    study.optimize(objective, n_trials=2)
    good, bad = study.trials
    assert [good.state, bad.state] == [optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED]
    # the steps of the reports are the same in both trials: multiples of four iterations
    assert list(good.intermediate_values) == [256 * i for i in (4, 8, 12, 16, 20, 24)]
    assert list(bad.intermediate_values) == [256 * i for i in (4, 8, 12)][: len(bad.intermediate_values)]
    assert 8 * 256 <= bad.last_step <= 12 * 256 and bad.value == bad.intermediate_values[bad.last_step]
    run = load_newest(tmp_path / "1" / "checkpoints")[0]["run"]  # ended in order
    assert run["env_steps"] == bad.last_step and run["stopped"].startswith("Optuna has pruned trial 1: eval_return is ")
    assert all(recorder.calls[-1] == "end True None" for recorder in recorders)
    with pytest.raises(optuna.TrialPruned, match="Optuna has pruned trial 1: eval_return is "):
        resume(tmp_path / "1", callbacks=[OptunaPruning(optuna.trial.FixedTrial({}, number=1))], quiet=True)
    longer = [OptunaPruning(optuna.trial.FixedTrial({}, number=1))]  # whose reports are never pruned
    assert resume(tmp_path / "1", callbacks=longer, total_env_steps=13 * 256, quiet=True).stopped is None


def test_a_column_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    trial = optuna.create_study().ask()
    with pytest.raises(ConfigError, match="there is no column 'eval_return'; the columns are iteration, env_steps"):
        train(ppo("gym:CartPole-v1", num_envs=4, steps=8, minibatches=2), tmp_path / "run", 0, [OptunaPruning(trial)])
