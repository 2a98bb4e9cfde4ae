"""``anybatch eval``: mean return of a trained policy."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import tyro


def main(
    run: Annotated[Path, tyro.conf.arg(metavar="RUN")],
    /,
    episodes: int = 100,
    seed: int = 0,
    num_envs: int | None = None,
    max_steps: int | None = None,
    greedy: bool = False,
    best: bool = False,
    device: str = "auto",
    trust_code: bool = False,
    quiet: bool = False,
) -> int:
    """Play complete episodes with a trained policy, and print their mean return.

    After training on a limited set of Procgen levels, unseen levels are used too.

    Args:
        run: Run folder.
        episodes: Episodes to play.
        seed: Seed of environments and actions.
        num_envs: Environments that run in parallel; by default as many as in training, but at most 64.
        max_steps: Steps after which an episode is cut and counted as unfinished.
        greedy: Take the most likely action instead of sampling.
        best: Use the policy with the best evaluation during training (eval.every) instead of the newest.
        device: cpu, cuda, cuda:N, or auto.
        trust_code: Import the Python code named in the run's config.yaml, even if the run is not yours.
        quiet: Show no progress.
    """
    from anybatch.runs.evaluation import EnvChoice, Evaluation, evaluate, load_policy, unseen_levels
    from anybatch.system.display import Display

    def play(env: EnvChoice) -> Evaluation:
        with nullcontext() if quiet else Display(episodes, "episodes") as shown:
            progress = None if shown is None else shown.update
            return evaluate(policy, env, episodes, seed, num_envs, max_steps, greedy=greedy, progress=progress)

    def show(label: str, result: Evaluation) -> None:
        print(f"{label}: {result}")
        for key in result.info:
            print(f"mean {key}: {result.mean_info(key):.4g}")

    policy = load_policy(run, best=best, device=device, trust_code=trust_code)
    unseen = unseen_levels(policy.config.env)
    label = "mean return" if unseen is None else "mean return on training levels"
    show(label, play(None))
    if unseen is not None:
        show("mean return on unseen levels", play(unseen))
    return 0
