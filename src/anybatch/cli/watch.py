"""``anybatch watch``: video of a trained policy."""

from __future__ import annotations

from pathlib import Path


def main(run: Path, /, video: Path = Path("anybatch.mp4"), episodes: int = 1, seed: int = 0, fps: int = 15) -> int:
    """Write a video of a trained policy.

    Args:
        run: Run folder.
        video: File to write, .mp4 or .gif.
        episodes: Episodes to play.
        seed: Seed of environment and actions.
        fps: Frames per second.
    """
    from anybatch.runs.evaluation import load_policy
    from anybatch.runs.video import record

    frames = record(load_policy(run, device="cpu"), video, episodes=episodes, seed=seed, fps=fps)
    print(f"wrote {frames} frames to {video}")
    return 0
