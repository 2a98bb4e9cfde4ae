"""Videos of a policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anybatch.envs.factory import make
from anybatch.errors import AnybatchError, ConfigError
from anybatch.runs.evaluation import LoadedPolicy

_SMALLEST_SIDE = 256
_FORMATS = (".mp4", ".gif")


def record(
    policy: LoadedPolicy, video: Path, *, episodes: int = 1, seed: int = 0, fps: int = 15, max_steps: int = 3000
) -> int:
    """Record episodes in the policy's training environment as a video.

    Args:
        policy: policy to record.
        video: output file; .mp4 or .gif selects the format.
        episodes: number of episodes.
        seed: seed of environment and actions.
        fps: frames per second.
        max_steps: maximum length of the video in environment steps.

    Returns:
        Number of frames.

    Raises:
        ConfigError: the file ends in something else.
        EnvError: the environment cannot render.
        AnybatchError: the extra anybatch[video] is missing.
    """
    if video.suffix not in _FORMATS:
        raise ConfigError(f"video is {str(video)!r}, but must end in .mp4 or .gif")
    try:
        import imageio.v2 as imageio
    except ImportError as error:
        raise AnybatchError("videos need imageio: pip install 'anybatch[video]'") from error
    games = make(replace(policy.config.env, num_envs=1), 1, seed, rendering=True)
    try:
        generator = torch.Generator(policy.device).manual_seed(seed)
        observation = games.reset()
        frames: list[Any] = [_enlarged(games.render())]
        ended = 0
        while ended < episodes and len(frames) <= max_steps:
            step = games.step(policy.act(observation, generator))
            observation = step.observation
            ended += int(step.done[0])
            frames.append(_enlarged(games.render()))
    finally:
        games.close()
    video.parent.mkdir(parents=True, exist_ok=True)
    if video.suffix == ".gif":
        imageio.mimsave(video, frames, duration=1000 / fps, loop=0)
    else:
        imageio.mimsave(video, frames, fps=fps, macro_block_size=2)
    return len(frames)


def _enlarged(frame: np.ndarray) -> np.ndarray:
    factor = max(1, -(-_SMALLEST_SIDE // min(frame.shape[:2])))
    return frame.repeat(factor, axis=0).repeat(factor, axis=1)
