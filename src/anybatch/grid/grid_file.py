"""Grid files: a base configuration, fields to set and to vary, and seeds, as YAML.

```yaml
base: ppo-ewma                 # a preset, or the path of a config.yaml relative to this file
set: {env.id: "gym:CartPole-v1", total_env_steps: 100000}
variants:                      # changes to the base, or another base
  ours: {}
  coupled: {base: ppo}
vary:                          # all combinations, for every variant
  divide_batch_by: [1, 4]      # by the scaling rules; any other name is a field of the configuration
  optimizer.step_size: [2.5e-4, 5e-4]
seeds: [0, 1, 2]               # or 3, which means the same
tuned_at: {num_envs: 256}      # optional: the batch that the numbers come from
```

Numbers are used as they are written, like those of a preset in Python. With ``tuned_at`` they are scaled from that
batch to the one that ``set``, ``variants`` and ``vary`` name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from anybatch.config import fields
from anybatch.config.io import override, read_config_file, read_yaml
from anybatch.config.schema import TrainConfig
from anybatch.errors import ConfigError, shown
from anybatch.grid.job import Job
from anybatch.runs.trust import code_named, require_trust
from anybatch.scaling import Finding, scale, validity
from anybatch.scaling.ppo import follow_epochs
from anybatch.scaling.tuned_at import BATCH, FOLLOWERS, TunedAt, carry, divide

_DIVISOR = "divide_batch_by"
_KEYS = ("base", "set", "variants", "vary", "seeds", "tuned_at")


def read_grid(path: Path, presets: Mapping[str, Callable[..., TrainConfig]], *, trust_code: bool = False) -> list[Job]:
    """Read the jobs of a grid file, whose ``base`` can name one of the presets.

    ``trust_code`` accepts environments and encoders that are import paths.

    Raises:
        ConfigError: the file cannot be read, names code that is not trusted, or an entry is invalid; the message
            names file and entry.
    """
    grid = _mapping(read_yaml(path.expanduser()), str(path))
    for key in grid:
        if key not in _KEYS:
            raise ConfigError(f"{path} has {shown(key)}, but a grid file takes only {', '.join(_KEYS)}")
    common = _mapping(grid.get("set") or {}, f"{path}: set")
    variants = _mapping(grid.get("variants") or {"": {}}, f"{path}: variants")
    vary = _mapping(grid.get("vary") or {}, f"{path}: vary")
    tuned_at = _tuned_at(grid.get("tuned_at") or {}, path)
    for name, values in vary.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{path}: vary: {name} is {shown(values)}, but must be a list of values")
    _check_vary(vary, path)
    jobs = []
    for name, changes in variants.items():
        own = dict(_mapping(changes or {}, f"{path}: variants: {name}"))
        name_of_base = own.pop("base", grid.get("base"))
        base, base_file = _base(name_of_base, path, presets)
        for values in itertools.product(*vary.values()):
            varied = dict(zip(vary, values, strict=True))
            label = " ".join([*filter(None, [str(name)]), *(f"{key}={value}" for key, value in varied.items())])
            try:
                config, findings = _override_and_scale(
                    base, _merged(common, own, varied), tuned_at, presets.get(name_of_base)
                )
            except ConfigError as error:
                raise ConfigError(f"{path}: {label or 'set'}: {error}") from error
            _require_trust(config, base, path, base_file, trust_code=trust_code)
            jobs += [Job(config, seed, label, findings) for seed in _seeds(grid.get("seeds", [0]), path)]
    return jobs


def _check_vary(vary: Mapping[str, Any], path: Path) -> None:
    """Raise a ConfigError if two entries of ``vary`` set one field."""
    seen: dict[str, str] = {}
    for name, values in vary.items():
        try:
            named = set().union(*(_merged({name: value}) for value in values))
        except ConfigError:
            continue  # reported with the run that it belongs to
        for field in named:
            if field in seen:
                raise ConfigError(f"{path}: vary: {seen[field]} and {name} both set {field}")
            seen[field] = name


def _merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """The union of layers with full names of fields, so that a later layer wins however it spells a field."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name in layer:
            if not isinstance(name, str):
                raise ConfigError(f"{shown(name)} is not a field of the configuration; names must be text")
        own = {name: x for name, x in layer.items() if name == _DIVISOR}
        merged |= fields.flat({name: x for name, x in layer.items() if name not in own}) | own
    return merged


def check_environment(path: Path, presets: Mapping[str, Any]) -> None:
    """Raise a ConfigError if a grid file has a preset as its base and names no environment."""
    grid = read_yaml(path.expanduser())
    varied = [{name: value} for name, values in (grid.get("vary") or {}).items() for value in values]
    for variant in (grid.get("variants") or {"": {}}).values():
        entries = [grid.get("set") or {}, variant or {}, *varied]
        base = (variant or {}).get("base", grid.get("base"))
        if base in presets and "env.id" not in _fields_named(entries):
            raise ConfigError(f"{path}: env.id is missing: set an environment, for example {{env.id: gym:CartPole-v1}}")


def assumption(path: Path) -> str:
    """A sentence about a grid file that has other batches and hyperparameters than its base without ``tuned_at``."""
    grid = read_yaml(path.expanduser())
    if grid.get("tuned_at"):
        return ""
    variants = [x or {} for x in (grid.get("variants") or {}).values()]
    varied = [{name: value} for name, values in (grid.get("vary") or {}).items() for value in values]
    given = _fields_named([grid.get("set") or {}, *variants, *varied])
    batch, followers = given & set(BATCH), sorted(given & set(FOLLOWERS))
    if not (batch and followers):
        return ""
    return (
        f"{path}: assumed to be tuned for the batches in the file, so not scaled: {', '.join(followers)}; if they "
        "were tuned at another batch, give it with tuned_at: {num_envs: N}"
    )


def _fields_named(entries: Iterable[Mapping[str, Any]]) -> set[str]:
    """Full names of the fields in entries for ``set``, ``variants`` or ``vary``."""
    others = ("base", _DIVISOR)
    return set().union(*(fields.flat({k: x for k, x in entry.items() if k not in others}) for entry in entries))


def _override_and_scale(
    base: TrainConfig, changes: dict[str, Any], tuned_at: TunedAt, preset: Callable[..., TrainConfig] | None
) -> tuple[TrainConfig, tuple[Finding, ...]]:
    divide_batch_by = changes.pop(_DIVISOR, 1)
    if type(divide_batch_by) not in (int, float):
        raise ConfigError(f"divide_batch_by is {shown(divide_batch_by)}, but must be a number above 0")
    config = override(base, changes)
    given = fields.flat(changes).keys()
    if preset is not None:
        base, config = follow_epochs(preset, base, config, given)
    if not tuned_at.numbers():
        scaled, tuned = config if divide_batch_by == 1 else scale(config, divide_batch_by)[0], config
    else:
        common = base, config, given
        carried = carry(*common, tuned_at) if divide_batch_by == 1 else divide(*common, divide_batch_by, tuned_at)
        scaled, tuned = carried.config, carried.tuned
    return scaled, () if scaled == tuned else tuple(validity(scaled, tuned))


def _tuned_at(values: Any, path: Path) -> TunedAt:
    try:
        tuned_at = TunedAt(**_mapping(values, f"{path}: tuned_at"))
        tuned_at.numbers()
        return tuned_at
    except (TypeError, ConfigError) as error:
        raise ConfigError(
            f"{path}: tuned_at is {shown(values)}, but must contain positive numbers of num_envs, rollout_steps, "
            "minibatches or workers"
        ) from error


def _require_trust(config: TrainConfig, base: TrainConfig, path: Path, base_file: Path, *, trust_code: bool) -> None:
    """Check that the user trusts the code that a run names: that of its base by the base's file, else the grid's."""
    of_base, of_run = code_named(base), code_named(config)
    same = {name for name, value in of_run.items() if of_base.get(name) == value}
    require_trust(base, base_file, trust_code=trust_code, given=of_base.keys() - same)
    require_trust(config, path, trust_code=trust_code, given=same)


def _base(name: Any, path: Path, presets: Mapping[str, Callable[..., TrainConfig]]) -> tuple[TrainConfig, Path]:
    """The configuration that runs start from, and its file; that of the grid for a preset, which names no code."""
    if isinstance(name, str) and name in presets:
        return presets[name](), path
    if not isinstance(name, str) or Path(name).suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"{path}: base is {shown(name)}, but must be one of {', '.join(presets)}, or the path of a config.yaml"
        )
    file = path.expanduser().parent / Path(name).expanduser()
    return read_config_file(file), file


def _seeds(value: Any, path: Path) -> list[int]:
    seeds = list(range(value)) if type(value) is int else value
    if not isinstance(seeds, list) or not seeds or not all(type(x) is int and x >= 0 for x in seeds):
        raise ConfigError(f"{path}: seeds is {shown(value)}, but must be a number of seeds, or a list of them")
    return seeds


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must contain names and values, not {shown(value)}")
    return value
