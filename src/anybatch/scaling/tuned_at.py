"""From the batch at which hyperparameters were tuned to the one at which they run: one reading for all commands.

The fields of a configuration say where a run takes place. ``tuned_at`` says where its hyperparameters come from.
Without it, those of the preset or file come from the batch of that preset or file, and those that the user gives are
meant for the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from anybatch.config import fields
from anybatch.config.schema import TrainConfig
from anybatch.config.validation import MOST_ENVS, check_integer
from anybatch.errors import ConfigError, shown
from anybatch.scaling.changes import Change, Value, apply_changes, show
from anybatch.scaling.options import Adjustments
from anybatch.scaling.ppo import from_ppo
from anybatch.scaling.rescaling import FIELDS, rescale, scale

BATCH, FOLLOWERS = FIELDS[:4], FIELDS[4:]
"""Fields that make up the batch, and those that depend on it."""
_FROM_PPO = "from PPO"


@dataclass(frozen=True)
class TunedAt:
    """Batch at which the hyperparameters were tuned; omitted values are those of the run."""

    num_envs: int | None = None
    """Environments, summed over all workers."""
    rollout_steps: int | None = None
    """Timesteps per rollout."""
    minibatches: int | None = None
    """Minibatches per epoch."""
    workers: int | None = None
    """Data-parallel workers, for the auxiliary phase of PPG."""

    @staticmethod
    def name_of(field: str) -> str:
        """The name here of a field of the configuration."""
        return [x.name for x in dataclasses.fields(TunedAt)][BATCH.index(field)]

    def numbers(self) -> dict[str, int]:
        """The numbers that were given, by full field name.

        Raises:
            ConfigError: one of them is not an integer from 1 to 4,194,304.
        """
        given = {name: getattr(self, self.name_of(name)) for name in BATCH}
        numbers = {
            name: check_integer(f"tuned_at.{self.name_of(name)}", number, at_least=1)
            for name, number in given.items()
            if number is not None
        }
        for name, number in numbers.items():
            if number > MOST_ENVS:
                raise ConfigError(f"tuned_at.{self.name_of(name)} is {shown(number)}, but can be at most {MOST_ENVS:,}")
        return numbers


@dataclass(frozen=True)
class Carried:
    """Hyperparameters at the batch of a run."""

    config: TrainConfig
    """The run's configuration."""
    tuned: TrainConfig
    """The configuration that it was scaled from."""
    changes: list[Change]
    """Every field that the conversion from PPO and the batch changed."""
    notes: list[str]
    """Sentences about what was assumed."""


def carry(
    base: TrainConfig,
    config: TrainConfig,
    given: Collection[str],
    tuned_at: TunedAt = TunedAt(),
    options: Adjustments | None = None,
    *,
    ppo: bool = False,
) -> Carried:
    """Scale hyperparameters to the batch of ``config``.

    Args:
        base: the preset or file.
        config: the same with the values that the user gives.
        given: full names of the fields that the user gives, also where they are the base's.
        tuned_at: the batch that all hyperparameters come from, as far as it differs from that of ``config``. If it is
            empty, those of ``base`` come from its batch, and the user's are kept as they are.
        options: which rules to apply; by default the paper's.
        ppo: the hyperparameters are those of a plain PPO, see :func:`anybatch.scaling.ppo.from_ppo`.

    Raises:
        ConfigError: the numbers do not fit each other.
    """
    source, notes, options = tuned_at.numbers(), list[str](), options or Adjustments()
    if source:
        tuned = _at(config, source)
        notes += _everything_assumed(base, tuned)
        overrides = dict[str, Value]()
    else:
        # the rules start from the base's numbers, but from the user's choice of optimiser, proximal policy and so on
        kept = {name for name in given if fields.get(config, name) is None}  # no limit: there is no number to scale
        starts = [Change(name, 0, fields.get(base, name), "", "") for name in FIELDS if name not in kept]
        tuned = apply_changes(config, starts)
        overrides = _followers(config, given)
    plain = tuned
    if ppo:
        tuned = _from_ppo(tuned, given, notes)
        config = fields.replace(config, "policy.proximal", "ewma")
        config = fields.replace(config, "policy.center_of_mass", tuned.policy.center_of_mass)
    asked = {name: fields.get(config, name) for name in BATCH if fields.get(config, name) != fields.get(tuned, name)}
    if options.rule == "fixed-minibatch" and "optimizer.minibatches" not in given:
        asked.pop("optimizer.minibatches", None)  # computed
    if not asked:
        return Carried(config, config, _converted(plain, tuned, []), notes)
    asked |= {name: fields.get(config, name) for name in BATCH if name in given}  # by the rules they could change
    if overrides:
        notes.append(_assumed("to be tuned for this batch, so not scaled", overrides))
    # a fresh base has no age to keep
    keywords = options.keywords() | {"staleness": options.staleness and (base.stale or bool(source))}
    scaled, changes = rescale(tuned, *(asked.get(name) for name in BATCH), overrides=overrides, **keywords)
    return Carried(scaled, tuned if source or ppo else base, _converted(plain, tuned, changes), notes)


def divide(
    base: TrainConfig,
    config: TrainConfig,
    given: Collection[str],
    divide_batch_by: float,
    tuned_at: TunedAt = TunedAt(),
    options: Adjustments | None = None,
    *,
    ppo: bool = False,
) -> Carried:
    """Scale all hyperparameters, the base's and the user's, to the batch that they come from divided by a number.

    Arguments as for :func:`carry`; without ``tuned_at``, the batch that they come from is that of ``base``.

    Raises:
        ConfigError: the numbers do not fit each other, or the fields of the batch name another.
    """
    source, keywords = tuned_at.numbers(), (options or Adjustments()).keywords()
    for name in BATCH[:3]:
        number = fields.get(config, name)
        kept = source and name != BATCH[0] and source.get(name, number) == number  # only environments are divided
        if name in given and not kept:
            remedy = (
                "omit divide_batch_by, and give the batch of the run by its fields"
                if name in source
                else f"to give the batch that is divided, use tuned_at.{TunedAt.name_of(name)}"
            )
            raise ConfigError(
                f"{name} {number} already sets the batch of the run, and so does divide_batch_by; {remedy}"
            )
    if keywords.pop("rule") != "paper":
        raise ConfigError("divide_batch_by needs the paper's rule; otherwise give the new batch by its fields")
    workers = config.workers if "workers" in given else None
    tuned, notes = _at(config, source), list[str]()
    if source:
        notes += _everything_assumed(base, tuned)
    elif followers := _followers(config, given):
        notes.append(_assumed(f"to be tuned with {_words(tuned)}, as the preset or file was", followers))
    plain = tuned
    if ppo:
        tuned = _from_ppo(tuned, given, notes)
    scaled, changes = scale(tuned, divide_batch_by, workers=workers, **keywords)
    return Carried(scaled, tuned, _converted(plain, tuned, changes), notes)


def _at(config: TrainConfig, numbers: Mapping[str, int]) -> TrainConfig:
    return apply_changes(config, [Change(name, 0, number, "", "") for name, number in numbers.items()])


def _followers(config: TrainConfig, given: Collection[str]) -> dict[str, Value]:
    """The user's values of fields that depend on the batch."""
    values = {name: fields.get(config, name) for name in FOLLOWERS if name in given}
    return {name: value for name, value in values.items() if value is not None}


def _from_ppo(tuned: TrainConfig, given: Collection[str], notes: list[str]) -> TrainConfig:
    if "policy.center_of_mass" in given:
        raise ConfigError("policy.center_of_mass follows from PPO's epochs and minibatches; omit it or from_ppo")
    ewma = from_ppo(tuned)
    epochs, minibatches = tuned.optimizer.policy_epochs, tuned.optimizer.minibatches
    notes.append(
        f"from PPO: policy.center_of_mass {ewma.policy.center_of_mass:.4g} limits the policy as PPO does with "
        f"{minibatches} minibatches and {epochs} policy {'epochs' if epochs > 1 else 'epoch'}, before any scaling"
    )
    return ewma


def _converted(plain: TrainConfig, ewma: TrainConfig, changes: list[Change]) -> list[Change]:
    """``changes`` of scaling ``ewma``, behind those that made it from ``plain``; one row for each field."""
    if plain == ewma:
        return changes
    name = "policy.center_of_mass"
    before, after = fields.get(plain, name), fields.get(ewma, name)
    center = Change(name, before, after, _FROM_PPO, "limits the policy as PPO did")
    for change in changes:
        if change.field == name:
            why = f"{show(after)} limits the policy as PPO did; {change.why}"
            center = Change(name, before, change.after, f"{_FROM_PPO}, {change.rule}", why)
    proximal = Change(
        "policy.proximal", plain.policy.proximal, "ewma", _FROM_PPO, "its age does not depend on the iteration batch"
    )
    return [proximal, center, *(change for change in changes if change.field != name)]


def _assumed(what: str, values: Mapping[str, Value]) -> str:
    numbers = " and ".join(f"{name} {show(value)}" for name, value in values.items())
    return (
        f"assumed {what}: {numbers}; if they were tuned at another batch, give it with --tuned-at.num-envs N, "
        "--tuned-at.rollout-steps T, --tuned-at.minibatches M"
    )


def _everything_assumed(base: TrainConfig, tuned: TrainConfig) -> list[str]:
    if all(fields.get(base, name) == fields.get(tuned, name) for name in BATCH):
        return []
    return [f"assumed to be tuned with {_words(tuned)}: all hyperparameters, including those of the preset or file"]


def _words(config: TrainConfig) -> str:
    return (
        f"{_count(config.env.num_envs, 'environment')}, {_count(config.rollout.steps, 'step')} and "
        f"{_count(config.optimizer.minibatches, 'minibatch', 'es')}"
    )


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"
