"""``anybatch eval``: mean return of a trained policy."""

from __future__ import annotations

from pathlib import Path


def main(run: Path, /, episodes: int = 100, seed: int = 0, greedy: bool = False, device: str = "auto") -> int:
    """Play complete episodes with a trained policy; Procgen runs on a limited set of levels also play unseen ones.

    Args:
        run: Run folder.
        episodes: Episodes to play.
        seed: Seed of environments and actions.
        greedy: Take the most likely action instead of sampling.
        device: cpu, cuda, cuda:N, or auto.
    """
    from anybatch.runs.evaluation import evaluate, load_policy, unseen_levels

    policy = load_policy(run, device=device)
    unseen = unseen_levels(policy.config.env)
    label = "mean return" if unseen is None else "mean return on training levels"
    print(f"{label}: {evaluate(policy, None, episodes, seed, greedy=greedy)}")
    if unseen is not None:
        print(f"mean return on unseen levels: {evaluate(policy, unseen, episodes, seed, greedy=greedy)}")
    return 0
