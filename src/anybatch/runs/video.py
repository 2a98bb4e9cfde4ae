"""Videos of a policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from anybatch.config.validation import check_integer
from anybatch.envs.base import VectorEnv, close_env
from anybatch.envs.factory import make
from anybatch.envs.registry import given_environments
from anybatch.errors import AnybatchError, ConfigError, EnvError, install_command
from anybatch.runs.evaluation import (
    EnvChoice,
    LoadedPolicy,
    action_generator,
    check_spaces,
    choose_actions,
    choose_env,
)
from anybatch.sampling.rollout import step_of

_SMALLEST_SIDE = 256
_FORMATS = (".mp4", ".gif")


def record(
    policy: LoadedPolicy,
    video: Path,
    *,
    env: EnvChoice = None,
    episodes: int = 1,
    seed: int = 0,
    fps: int = 15,
    max_steps: int = 3000,
    progress: Callable[[int, int], object] | None = None,
) -> int:
    """Record episodes of a policy as a video.

    Args:
        policy: policy to record.
        video: output file; .mp4 or .gif selects the format.
        env: the environment, as for :func:`anybatch.runs.evaluate`; None for that of the training.
        episodes: number of episodes.
        seed: seed of environment and actions.
        fps: frames per second.
        max_steps: maximum length of the video in environment steps.
        progress: called with the numbers of ended episodes and of frames after every step.

    Returns:
        Number of frames.

    Raises:
        ConfigError: the file ends in something else, a number is out of range, or the environment has other spaces.
        EnvError: the environment cannot render.
        AnybatchError: the extra anybatch[video] is missing.
    """
    video = Path(video).expanduser()
    if video.suffix not in _FORMATS:
        raise ConfigError(f"video is {str(video)!r}, but must end in .mp4 or .gif")
    limits = {"episodes": (episodes, 1), "seed": (seed, 0), "fps": (fps, 1), "max_steps": (max_steps, 1)}
    episodes, seed, fps, max_steps = (check_integer(name, x, at_least=least) for name, (x, least) in limits.items())
    try:
        import imageio.v2 as imageio
    except ImportError as error:
        raise AnybatchError(f"videos need imageio: {install_command('video')}") from error
    config = choose_env(policy, env)
    count = given_environments(config.id) or 1  # of an object that was passed, the others play unseen
    games = make(replace(config, num_envs=count), count, seed, rendering=True)
    try:
        check_spaces(policy, games, config.id)
        generator, memory = action_generator(policy, seed), policy.memory()
        observation = games.reset()
        frames, ended = [_frame(games, config.id)], 0
        while ended < episodes and len(frames) <= max_steps:
            step = step_of(games, choose_actions(policy, observation, generator, memory=memory))
            observation = step.observation
            memory.reset(step.done)
            ended += int(step.done[0])
            frames.append(_frame(games, config.id))
            if progress is not None:
                progress(ended, len(frames))
    finally:
        close_env(games)
    _write(video, frames, fps, imageio)
    return len(frames)


def _write(video: Path, frames: list[Any], fps: int, imageio: Any) -> None:
    video.parent.mkdir(parents=True, exist_ok=True)
    if video.suffix == ".gif":
        imageio.mimsave(video, frames, duration=1000 / fps, loop=0)
    else:
        imageio.mimsave(video, frames, fps=fps, macro_block_size=2)


def _frame(env: VectorEnv, env_id: str) -> np.ndarray:
    """The current picture, enlarged by a whole factor to at least 256 pixels a side."""
    frame = env.render()
    if frame.ndim not in (2, 3) or not frame.size:
        raise EnvError(
            f"render of {env_id} returned an array of shape {frame.shape}, but must return (height, width, 3)."
        )
    factor = max(1, -(-_SMALLEST_SIDE // min(frame.shape[:2])))
    return frame.repeat(factor, axis=0).repeat(factor, axis=1)
