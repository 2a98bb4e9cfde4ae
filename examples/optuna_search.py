"""Search for a number of environments, a step size and a centre of mass with Optuna.

It ends bad trials early by their evaluations.

    pip install '.[optuna]'
    python examples/optuna_search.py --trials 30

Evaluations come at the same numbers of environment steps in every trial, and their number of episodes is fixed, so
trials with different batch sizes can be compared as well.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import optuna

from anybatch import evaluate, load_policy, ppo_ewma, train
from anybatch.callbacks import OptunaPruning


def objective(trial: optuna.Trial, env_steps: int, out: Path) -> float:
    """Mean return after training with the trial's numbers; raises TrialPruned if Optuna ends it before."""
    config = ppo_ewma(
        "gym:CartPole-v1",
        num_envs=trial.suggest_categorical("num_envs", [4, 16]),
        rollout_steps=32,
        minibatches=4,
        discount=0.99,
        step_size=trial.suggest_float("step_size", 1e-4, 3e-2, log=True),
        center_of_mass=trial.suggest_float("center_of_mass", 1.0, 32.0, log=True),
        total_env_steps=env_steps,
        tensorboard=False,
        eval={"every": env_steps // 10, "episodes": 10},
    )
    run = out / f"trial-{trial.number}"
    train(config, run, seed=trial.number, callbacks=[OptunaPruning(trial)], quiet=True)
    return evaluate(load_policy(run, best=True), episodes=50).mean


def search(trials: int, env_steps: int, out: Path) -> optuna.Study:
    """Run the trials one after another."""
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=env_steps // 5)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0), pruner=pruner)
    study.optimize(lambda trial: objective(trial, env_steps, out), n_trials=trials)
    return study


def main() -> None:
    """Parse the options, search, and print the best trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--env-steps", type=int, default=30_000, help="of each trial")
    parser.add_argument("--out", type=Path, default=Path("runs/search"))
    options = parser.parse_args()
    study = search(options.trials, options.env_steps, options.out)
    pruned = len(study.get_trials(states=[optuna.trial.TrialState.PRUNED]))
    print(f"{pruned} of {options.trials} trials were pruned")
    print(f"best: trial {study.best_trial.number} with return {study.best_value:.1f}, {study.best_params}")


if __name__ == "__main__":
    main()
