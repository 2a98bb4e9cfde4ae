"""``anybatch watch``: video of a trained policy."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import tyro


def main(
    run: Annotated[Path, tyro.conf.arg(metavar="RUN")],
    /,
    video: Path = Path("anybatch.mp4"),
    episodes: int = 1,
    seed: int = 0,
    fps: int = 15,
    max_steps: int = 3000,
    best: bool = False,
    trust_code: bool = False,
    quiet: bool = False,
) -> int:
    """Write a video of a trained policy.

    Args:
        run: Run folder.
        video: File to write, .mp4 or .gif.
        episodes: Episodes to play.
        seed: Seed of environment and actions.
        fps: Frames per second.
        max_steps: Maximum length of the video in steps.
        best: Use the policy with the best evaluation during training (eval.every) instead of the newest.
        trust_code: Import the Python code named in the run's config.yaml, even if the run is not yours.
        quiet: Show no progress.
    """
    from anybatch.runs.evaluation import load_policy
    from anybatch.runs.video import record
    from anybatch.system.display import Display

    policy = load_policy(run, best=best, device="cpu", trust_code=trust_code)
    with nullcontext() if quiet else Display(episodes, "episodes") as shown:
        ended = 0

        def progress(episodes: int, frames: int) -> None:
            nonlocal ended
            ended = episodes
            if shown is not None:
                shown.update(episodes, f"{frames:,} frames")

        frames = record(policy, video, episodes=episodes, seed=seed, fps=fps, max_steps=max_steps, progress=progress)
    print(f"wrote {frames} frames to {video}")
    if ended < episodes:
        print(f"stopped after {ended} of {episodes} episodes, because the video is limited to --max-steps {max_steps}")
    return 0
