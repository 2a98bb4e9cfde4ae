"""Calls of a Gymnasium environment's `reset` and `step` that explain a wrong number of results."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from anybatch.errors import EnvError, UserCodeError, shown, user_code_error
from anybatch.system.processes import end_with_parent

_NORMALIZERS = {"NormalizeObservation": "observation.normalize", "NormalizeReward": "reward.normalize"}
_UNPACKING = "values to unpack"  # in Python's message if a wrapper around the environment expects another number


def call_reset(reset: Callable[..., Any], env_id: str, **arguments: Any) -> tuple[Any, Any]:
    """Reset; returns (observation, info). Raises EnvError if the result is anything else."""
    try:
        result = reset(**arguments)
    except (ValueError, AttributeError) as error:
        of_wrapper = _UNPACKING in str(error) or str(error).endswith("has no attribute 'items'")
        if not (of_wrapper and _is_gymnasium_s(error)):
            raise user_code_error(error, f"reset of {env_id}") from error
        raise EnvError(_reset_sentence(env_id, f"something else ({error})")) from error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error) or not _is_gymnasium_s(error):
            raise user_code_error(error, f"reset of {env_id}") from error
        raise EnvError(f"{env_id} must have reset(*, seed=None, options=None), but: {error}.") from error
    except BaseException as error:
        raise user_code_error(error, f"reset of {env_id}") from error
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        return result
    what = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__} alone"
    raise EnvError(_reset_sentence(env_id, what))


def call_step(step: Callable[[Any], Any], action: Any, env_id: str) -> tuple[Any, Any, Any, Any, Any]:
    """Step; returns its five results. Raises EnvError if there are not five."""
    try:
        result = step(action)
    except ValueError as error:
        if _UNPACKING not in str(error) or not _is_gymnasium_s(error):
            raise user_code_error(error, f"step of {env_id}") from error
        raise EnvError(_step_sentence(env_id, f"something else ({error})")) from error
    except BaseException as error:
        raise user_code_error(error, f"step of {env_id}") from error
    if isinstance(result, tuple) and len(result) == 5:
        return result
    what = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
    raise EnvError(_step_sentence(env_id, what))


def call_render(render: Callable[[], Any], env_id: str) -> Any:
    """Render; returns the result. Raises EnvError if a package that draws is missing."""
    with user_code(f"render of {env_id}"):
        try:
            return render()
        except gymnasium.error.DependencyNotInstalled as error:  # pygame, for Gymnasium's own environments
            raise EnvError(f"{env_id} cannot be rendered: {error}") from error


def spaces_of(
    env: Any, env_id: str, prefixes: Sequence[str] = ("",)
) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    """Observation and action space of an environment: the first attributes that exist, with a prefix to their names.

    Raises EnvError if one is missing.
    """
    found: list[gymnasium.Space[Any]] = []
    for name in ("observation_space", "action_space"):
        with user_code(f"{name} of {env_id}"):
            spaces = [getattr(env, prefix + name, None) for prefix in prefixes]
        found += [space for space in spaces if space is not None][:1]
        if all(space is None for space in spaces):
            raise EnvError(f"{env_id} has no {prefixes[0]}{name}: set it in the constructor.")
    return found[0], found[1]


def _is_gymnasium_s(error: BaseException) -> bool:
    """Whether a call in this module or in Gymnasium raised an error, and not the environment's own code."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    module = "" if frame is None else frame.tb_frame.f_globals.get("__name__", "")
    return module == __name__ or module.split(".")[0] == "gymnasium"


def warn_about_normalizers(env: Any, env_id: str) -> None:
    """Warn once if a wrapper around an environment, or around a vector of them, normalises by running statistics."""
    layers = list(_layers(env))
    copies = getattr(layers[-1], "envs", None) if isinstance(layers[-1], gymnasium.vector.VectorEnv) else None
    if isinstance(copies, list | tuple) and copies:
        layers += _layers(copies[0])
    for layer in layers:
        names = {kind.__name__ for kind in type(layer).__mro__}
        for name, field in _NORMALIZERS.items():
            if name in names:
                warnings.warn(
                    f"{env_id} is wrapped in {name}, whose statistics are lost when the run is resumed or evaluated, "
                    f"and depend on the number of environments; remove it and set {field} true",
                    stacklevel=2,
                )


def _layers(env: Any) -> Iterator[Any]:
    """An environment with wrappers, from the outside to the inside."""
    while isinstance(env, gymnasium.Wrapper | gymnasium.vector.VectorWrapper):
        yield env
        env = env.env
    yield env


def step_one(env: gymnasium.Env[Any, Any], action: Any, env_id: str) -> tuple[Any, Any, bool, bool, Any]:
    """Step a single environment; returns its five results. Raises EnvError for flags that are not true or false."""
    result = call_step(env.step, action, env_id)
    observation, reward, terminated, truncated, info = result
    if type(info) is not dict and not isinstance(info, Mapping):
        raise EnvError(_step_sentence(env_id, f"{shown(info)} as info instead of a dictionary"))
    if type(terminated) is bool and type(truncated) is bool:
        return result
    flags = _flag(terminated, "terminated", env_id), _flag(truncated, "truncated", env_id)
    return observation, reward, *flags, info


def _flag(value: Any, name: str, env_id: str) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        array = np.asarray(value)
        if array.size == 1 and array.dtype.kind in "bui" and int(array.item()) in (0, 1):
            return bool(array.item())
    raise EnvError(f"step of {env_id} must return true or false as {name}, but returned {shown(value)}.")


@contextlib.contextmanager
def user_code(what: str) -> Iterator[None]:
    """Name the call in the error if user code raises anything but an interrupt, ``sys.exit()`` included."""
    try:
        yield
    except BaseException as error:
        raised = user_code_error(error, what)
        if raised is error:
            raise
        raise raised from error


def _reset_sentence(env_id: str, what: str) -> str:
    return f"reset of {env_id} must return (observation, info), with a dictionary as info, but returned {what}."


def _step_sentence(env_id: str, what: str) -> str:
    return (
        f"step of {env_id} must return (observation, reward, terminated, truncated, info), but returned {what}; "
        "environments for the API of gym before 0.26 return four values."
    )


class CheckedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment in a process of Gymnasium's AsyncVectorEnv.

    That keeps the last observation of an episode by reference while it resets the environment, which may overwrite it;
    this wrapper returns a copy.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], env_id: str, index: int, training_process: int) -> None:
        super().__init__(env)
        self._env_id = env_id
        self._index = index
        self._steps = 0
        spaces_of(env, env_id)
        if os.getpid() == training_process:  # AsyncVectorEnv makes one there for its spaces
            warn_about_normalizers(env, env_id)
        else:
            end_with_parent()

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:  # Gymnasium's check_env requires this name
        return call_reset(self.env.reset, self._env_id, **kwargs)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self._steps += 1
        try:
            observation, reward, terminated, truncated, info = step_one(self.env, action, self._env_id)
        except UserCodeError as error:
            error.locate(f"environment {self._index}, step {self._steps}")
            raise
        if terminated or truncated:
            observation = copy.deepcopy(observation)
        return observation, reward, terminated, truncated, info

    def render(self) -> Any:
        return call_render(self.env.render, self._env_id)
