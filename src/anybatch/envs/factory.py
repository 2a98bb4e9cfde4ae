"""Making N copies of the environment with a given id."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from anybatch.config.masks import info_key
from anybatch.config.schema import EnvConfig
from anybatch.envs.base import EpisodeInfo, VectorEnv, derive_seeds
from anybatch.envs.contract import CheckedEnv, user_code
from anybatch.envs.gymnasium import GymnasiumLoop
from anybatch.envs.gymnasium_vector import GymnasiumVector
from anybatch.envs.registry import (
    FORMS,
    GivenEnvironment,
    check_not_standard,
    find_environment,
    given_environments,
    hides_tensor_env,
    is_tensor_env,
    words_for_hidden,
)
from anybatch.envs.timeout import TimedEnv
from anybatch.errors import ConfigError, EnvError, user_code_error
from anybatch.system.signals import ignoring_sigint

_GYM_OPTIONS = ("max_episode_steps", "vectorization")
_PACKAGES = {"ALE": "ale_py"}  # modules that register a namespace when they are imported


def make(config: EnvConfig, num_envs: int, seed: int | Sequence[int], *, rendering: bool = False) -> VectorEnv:
    """Make `num_envs` copies of the environment that `config` names (`config.num_envs` is the total over all workers).

    seed: different seeds give unrelated environments, the same seed gives the same ones. R seeds give R times the
        `num_envs / R` environments that each seed alone would.
    rendering: prepare for `render()`.
    Raises ConfigError for an id or an option that does not exist, and EnvError for an environment that cannot be made.
    """
    if num_envs < 1:
        raise ConfigError(f"env.num_envs is {num_envs}, but must be at least 1.")
    run_seeds = seed if isinstance(seed, Sequence) else [seed]
    env_seeds = [env_seed for one in run_seeds for env_seed in derive_seeds(one, num_envs // len(run_seeds))]
    env = _make(config, env_seeds, rendering)
    if len(run_seeds) > 1 and getattr(env, "takes_one_seed", False):
        env.close()
        raise EnvError(
            f"{config.id} is a vector environment that takes a single seed, so its environments cannot be split "
            "among several runs: start the runs as processes."
        )
    if config.info_keys:
        if not hasattr(env, "episode_info"):
            env.close()
            raise ConfigError(
                f"env.info_keys is {config.info_keys}, but {config.id} is a tensor environment, whose info is not read."
            )
        env.episode_info = EpisodeInfo(config.info_keys, num_envs, config.id)
    if config.frame_stack > 1:
        env = _stacking(env, config)
    return env if config.step_timeout is None else TimedEnv(env, config.step_timeout, config.id)


def _stacking(env: VectorEnv, config: EnvConfig) -> VectorEnv:
    from anybatch.envs.frames import FrameStack

    try:
        if hasattr(env, "step_tensors"):
            raise ConfigError(
                f"env.frame_stack is {config.frame_stack}, but {config.id} is a tensor environment: stack its images "
                "there"
            )
        return FrameStack(env, config.frame_stack, config.id, config.action_mask)
    except ConfigError:
        env.close()
        raise


def _make(config: EnvConfig, seeds: Sequence[int], rendering: bool) -> VectorEnv:
    family, colon, name = config.id.partition(":")
    if not colon or not name:
        raise ConfigError(f"env.id is {config.id!r}, but must be {FORMS}{_suggest_family(config.id)}")
    no_mask = family == "procgen" and config.action_mask not in ("auto", "none")
    if no_mask or (family == "envpool" and info_key(config.action_mask) is not None):
        where = "no masks" if no_mask else "no masks in info"
        raise ConfigError(f"env.action_mask is {config.action_mask!r}, but {config.id} has {where}: set it to auto")
    if family == "procgen":
        from anybatch.envs.procgen import make_procgen

        return make_procgen(
            name,
            seeds,
            env_id=config.id,
            options=config.options,
            threads=config.threads,
            rendering=rendering,
        )
    if family == "envpool":
        return _make_envpool(name, config, seeds, rendering)
    if family == "gym":
        return _make_gym(name, config, seeds, rendering)
    return _make_callable(find_environment(config.id), config, seeds, rendering)


def spaces(config: EnvConfig) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    """(observation space, action space) of a single environment, as `make` would return them."""
    env = make(config, given_environments(config.id) or 1, 0)
    try:
        return env.observation_space, env.action_space
    finally:
        env.close()


def native_spaces(config: EnvConfig) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    """(observation space, action space) of a single environment, as it is without conversion."""
    env = make(config, given_environments(config.id) or 1, 0)
    try:
        return env.native_spaces
    finally:
        env.close()


def _suggest_family(name: str) -> str:
    """A hint for an id without a family, or for one whose family is missing."""
    from anybatch.envs.procgen import GAMES

    games = difflib.get_close_matches(name.partition("-")[0].lower(), GAMES, n=1, cutoff=0.8)
    return _did_you_mean([f"procgen:{game}-hard" for game in games] or _gym_suggestions(name))


def _did_you_mean(suggestions: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(repr(name) for name in suggestions)}?" if suggestions else "."


def _gym_suggestions(name: str) -> list[str]:
    """Ids that may have been meant by `name`."""
    if name in gymnasium.registry:
        return [f"gym:{name}"]
    pattern = re.compile(rf"{re.escape(name)}-v(\d+)")
    versions = [int(match[1]) for match in map(pattern.fullmatch, gymnasium.registry) if match]
    if versions:
        return [f"gym:{name}-v{max(versions)}"]
    namespace, _, task = name.rpartition("/")
    suggestions = [_pool_id(task)] if task in _envpool_ids() else []
    if namespace in _PACKAGES:
        return [f"gym:{_PACKAGES[namespace]}:{name}", *suggestions]
    close = difflib.get_close_matches(name, list(gymnasium.registry), n=3, cutoff=0.6)
    return [*suggestions, *(f"gym:{one}" for one in close)]


def _pool_id(task: str) -> str:
    """Our id of an EnvPool task."""
    from anybatch.envs.procgen import name_of

    return f"procgen:{name_of(task)}" if name_of(task) else f"envpool:{task}"


def _envpool_ids() -> list[str]:
    try:
        from anybatch.envs.envpool import task_ids

        return task_ids()
    except EnvError:  # EnvPool is an extra
        return []


def _make_envpool(name: str, config: EnvConfig, seeds: Sequence[int], rendering: bool) -> VectorEnv:
    from anybatch.envs.envpool import EnvPoolVectorEnv, check_options, make_spec
    from anybatch.envs.procgen import name_of, require_qt

    env_id = f"envpool:{name}"
    is_procgen = bool(name_of(name))
    if is_procgen:
        require_qt()
    options = check_options(config.options, make_spec(name, env_id), env_id, reserved=frozenset())
    return EnvPoolVectorEnv(
        name,
        seeds,
        env_id=env_id,
        options=options,
        threads=config.threads,
        rendering=rendering,
        bootstrap_truncated=not is_procgen,
        action_mask=config.action_mask,
    )


def _make_gym(name: str, config: EnvConfig, seeds: Sequence[int], rendering: bool) -> VectorEnv:
    env_id: str = config.id
    options: Mapping[str, Any] = config.options
    creator = _find_gym(name, env_id)
    if creator is not None:
        _check_names(options, creator, env_id, _GYM_OPTIONS)
    kwargs = {key: value for key, value in options.items() if key != "vectorization"}
    if rendering and "rgb_array" in _render_modes(creator):
        kwargs["render_mode"] = "rgb_array"

    def make_env() -> gymnasium.Env[Any, Any]:
        try:
            # anybatch checks what it needs itself, at every step.
            env = gymnasium.make(name, disable_env_checker=True, **kwargs)
        except (gymnasium.error.Error, ImportError, TypeError, ValueError, KeyError, AssertionError) as error:
            raise EnvError(f"Gymnasium cannot make {env_id}: {error}") from error
        except BaseException as error:
            raise user_code_error(error, f"making {env_id}") from error
        return _no_tensors(env, env_id)

    return _vectorize(make_env, config, seeds)


def _find_gym(name: str, env_id: str) -> Any:
    """The class or function behind ID or MODULE:ID; the module, imported first, registers the environment."""
    module, _, registered = name.rpartition(":")
    if module:
        check_not_standard(module, env_id)
        try:
            importlib.import_module(module)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"env.id is {env_id!r}, read as gym:MODULE:ID, but {error}.") from error
        except BaseException as error:
            raise user_code_error(error, f"importing {module}, for env.id {env_id!r},") from error
    try:
        spec = gymnasium.spec(registered)
        return load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    except (ImportError, AttributeError, gymnasium.error.DeprecatedEnv) as error:
        raise EnvError(f"Gymnasium cannot make {env_id}: {error}") from error
    except gymnasium.error.Error as error:  # unknown, or without a version
        suggestions = _gym_suggestions(registered)
        hint = _did_you_mean(suggestions)
        if not (suggestions or module):
            hint = "; if a package registers it when it is imported, write gym:PACKAGE:ID."
        raise ConfigError(f"env.id is {env_id!r}, but Gymnasium has no environment {registered!r}{hint}") from error


def _render_modes(creator: Any) -> list[str]:
    return list(getattr(creator, "metadata", {}).get("render_modes", []))


def _vectorize(make_env: Callable[[], gymnasium.Env[Any, Any]], config: EnvConfig, seeds: Sequence[int]) -> VectorEnv:
    env_id, vectorization = config.id, config.options.get("vectorization", "sync")
    if vectorization == "sync":
        return GymnasiumLoop(make_env, seeds, env_id=env_id, action_mask=config.action_mask)
    if vectorization == "async":
        with ignoring_sigint():
            processes = _start_processes(make_env, len(seeds), env_id)
        return GymnasiumVector(
            processes, seeds, env_id=env_id, copies_final_observation=True, action_mask=config.action_mask
        )
    raise ConfigError(
        f"env.options.vectorization is {vectorization!r}, but must be sync (one process) or async (one process "
        "for each environment)."
    )


def _start_processes(make_env: Callable[[], gymnasium.Env[Any, Any]], count: int, env_id: str) -> AsyncVectorEnv:
    here = os.getpid()

    def maker(index: int) -> Callable[[], CheckedEnv]:
        return lambda: CheckedEnv(make_env(), env_id, index, here)

    makers = [maker(index) for index in range(count)]
    try:
        return AsyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    except (EOFError, ConnectionError) as error:
        raise EnvError(f"A process of {env_id} died while it created its environment.") from error
    except RuntimeError as error:
        if isinstance(error, EnvError) or "space" not in str(error):
            raise
        raise EnvError(f"The copies of {env_id} must all have the same spaces: {error}") from error


def _make_callable(function: Callable[..., Any], config: EnvConfig, seeds: Sequence[int], rendering: bool) -> VectorEnv:
    env_id: str = config.id
    options: Mapping[str, Any] = config.options
    parameters = _parameters(function)
    is_vector = "num_envs" in parameters
    _check_names(options, function, env_id, () if is_vector else ("vectorization",))
    kwargs = {key: value for key, value in options.items() if is_vector or key != "vectorization"}
    if rendering and "render_mode" in parameters:
        kwargs.setdefault("render_mode", "rgb_array")
    make_env = functools.partial(function, **kwargs)
    _check_arguments(make_env, parameters, env_id)
    if not is_vector:
        return _vectorize(functools.partial(_make_single, make_env, env_id), config, seeds)
    with user_code(f"making {env_id}"):
        env = make_env(num_envs=len(seeds))
    given = isinstance(function, GivenEnvironment)
    if is_tensor_env(env):
        _check_number(env, len(seeds), env_id, given=given)
        return _tensor_env(env, config, seeds[0], owned=not given)
    if hides_tensor_env(env):
        raise EnvError(f"{env_id} returned {words_for_hidden(env)}.")
    if not isinstance(env, gymnasium.vector.VectorEnv):
        raise EnvError(
            f"{env_id} takes num_envs, but returned a {type(env).__name__} instead of a gymnasium.vector.VectorEnv."
        )
    _check_number(env, len(seeds), env_id)
    return GymnasiumVector(env, seeds, env_id=env_id, action_mask=config.action_mask)


def _tensor_env(env: Any, config: EnvConfig, seed: int, *, owned: bool) -> VectorEnv:
    if config.step_timeout is not None:
        raise ConfigError(
            f"env.step_timeout is {config.step_timeout}, but {config.id} is a tensor environment, whose steps "
            "return before they are done; set it to none"
        )
    if info_key(config.action_mask) is not None:
        raise ConfigError(
            f"env.action_mask is {config.action_mask}, but {config.id} is a tensor environment, in whose info masks "
            "are not read; make the mask an entry of the observation"
        )
    from anybatch.envs.tensor import TensorVectorEnv

    return TensorVectorEnv(env, seed, env_id=config.id, action_mask=config.action_mask, owned=owned)


def _check_number(env: Any, number: int, env_id: str, *, given: bool = False) -> None:
    """Raise an error if a vector environment has another number of environments than it was asked for."""
    if env.num_envs == number:
        return
    if given:
        raise ConfigError(
            f"env.num_envs is {number} for this process, but {env_id} has {env.num_envs} environments: set "
            f"env.num_envs {env.num_envs}, or pass a function that creates it"
        )
    if hasattr(env, "close"):
        env.close()
    raise EnvError(f"{env_id} was asked for {number} environments, but returned {env.num_envs}.")


def _make_single(make_env: Callable[[], Any], env_id: str) -> gymnasium.Env[Any, Any]:
    with user_code(f"making {env_id}"):
        env = make_env()
    _no_tensors(env, env_id)
    if not isinstance(env, gymnasium.Env):
        raise EnvError(f"{env_id} returned a {type(env).__name__} instead of a gymnasium.Env.")
    return env


def _no_tensors(env: Any, env_id: str) -> Any:
    """The environment, unless it is one of tensors, of which a function makes any number in one call."""
    if is_tensor_env(env) or hides_tensor_env(env):
        raise EnvError(
            f"{env_id} is a tensor environment, which has many instances: pass a function with the argument num_envs "
            "that returns it, without wrappers"
        )
    return env


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return {"options": inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)}


def _check_arguments(
    make_env: functools.partial[Any], parameters: Mapping[str, inspect.Parameter], env_id: str
) -> None:
    """Raise ConfigError for a required argument that the options do not give."""
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for name, parameter in parameters.items():
        required = parameter.default is inspect.Parameter.empty and parameter.kind not in variable
        if required and name != "num_envs" and name not in make_env.keywords:
            raise ConfigError(f"{env_id} needs the argument {name!r}: give it in env.options.")


def _check_names(options: Mapping[str, Any], function: Callable[..., Any], env_id: str, more: tuple[str, ...]) -> None:
    """Raise ConfigError for an option that `function` does not take and that is not among `more`."""
    parameters = _parameters(function)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    ours = {"render_mode", "num_envs"}
    allowed = sorted({name for name in parameters if name not in ours} | set(more))
    for name in options:
        if name not in allowed:
            takes = f"takes only {', '.join(allowed)}" if allowed else "takes no options"
            raise ConfigError(f"env.options has {name!r}, but {env_id} {takes}.")
