"""The paper's practical advice (section 6.2) and the limits of the scaling rules, as checks of a run's log."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from anybatch.config.schema import TrainConfig
from anybatch.diagnostics.columns import (
    EARLY,
    Progress,
    explained_share,
    finite_values,
    has_learned,
    is_early,
    mean,
    oscillation,
    recent_mean,
    recent_median,
    recent_values,
    returns_are_constant,
    swings,
)
from anybatch.diagnostics.critical_batch import compare_with_noise_scale
from anybatch.scaling.conditions import OLD_SHARE_OF_RUN
from anybatch.scaling.findings import Finding
from anybatch.scaling.rules import has_center_of_mass, proximal_age

_TOO_FEW_ROWS = 5
_FEW_CLIPPED, _MANY_CLIPPED, _MANY_CLIPPED_IN_EPOCHS = 0.01, 0.1, 0.2
_OSCILLATION, _SWINGS = 10.0, 3
_CAPPED, _LEAST_SAMPLE_SIZE = 0.01, 0.5
_FAR_PROXIMAL, _FAR_BEHAVIOR = 0.1, 0.5
_LITTLE_EXPLAINED, _HALF = 0.1, 0.5
_COLLAPSED = 0.05


def examine(progress: Progress, config: TrainConfig) -> list[Finding]:
    """Check a run's log.

    Args:
        progress: columns of progress.csv, NaN where a field is empty; checks whose columns are missing are left out.
        config: the run's configuration.

    Returns:
        Findings about the last tenth of the iterations (20 at least), worst first; "ok" findings describe the state of
        the run. With fewer than 5 iterations there are no warnings about logged values.
    """
    rows = max((len(column) for column in progress.values()), default=0)
    checks = _CHECKS if rows >= _TOO_FEW_ROWS else (_age,)
    found = [finding for check in checks for finding in check(progress, config)]
    return sorted(found, key=lambda finding: ("error", "warning", "ok").index(finding.severity))


class LiveDoctor:
    """Looks at a run while it trains, and warns of each kind of finding once, and once more if it becomes an error."""

    def __init__(self, config: TrainConfig, *, every: int = 25, memory: int = 50) -> None:
        """Examine the run every ``every`` iterations: the last ``memory`` in full, earlier ones ever more thinly."""
        self._config = config
        self._every = every
        self._memory = memory
        self._columns: dict[str, list[float]] = {}
        self._rows = 0
        self._told: set[tuple[str, str]] = set()

    def look(self, row: Mapping[str, float]) -> list[Finding]:
        """Take an iteration's row; returns warnings that were not given before."""
        self._rows += 1
        for name in _COLUMNS:
            column = self._columns.setdefault(name, [])
            column.append(float(row.get(name, math.nan)))
            if len(column) > 2 * self._memory:
                column[: self._memory] = column[: self._memory : 2]  # the first row stays, to compare with
        if self._rows % self._every:
            return []
        new = [
            finding
            for finding in examine(self._columns, self._config)
            if finding.severity != "ok"
            and not {(finding.check, finding.severity), (finding.check, "error")} & self._told
        ]
        self._told |= {(finding.check, finding.severity) for finding in new}
        return new


def _clipping(progress: Progress, config: TrainConfig) -> Iterator[Finding]:
    clipped = recent_mean(progress, "clip_fraction")
    if config.policy.objective != "clip" or math.isinf(config.policy.clip) or clipped is None:
        return
    epochs, observed = config.optimizer.policy_epochs, f"{clipped:.2%} of the ratios clipped"
    most = _MANY_CLIPPED if epochs == 1 else _MANY_CLIPPED_IN_EPOCHS
    if max(clipped, mean(finite_values(progress, "clip_fraction"))) < _FEW_CLIPPED:
        if is_early(progress, config) or returns_are_constant(progress) or has_learned(progress):
            return  # there is little to limit, or nothing that a larger batch would improve
        com = f"{config.policy.center_of_mass:g}"
        raise_it = (
            f"raise policy.center_of_mass ({com})"
            if has_center_of_mass(config.policy)
            else "use PPO-EWMA with a high centre of mass"
        )
        yield Finding(
            "clip_fraction_low",
            "warning",
            observed,
            "below 1%, clipping hardly limits the policy",
            "take a larger iteration batch (multiply rollout.steps and optimizer.minibatches by the same factor), or "
            f"{raise_it}",
        )
    elif clipped > most:
        yield Finding(
            "clip_fraction_high",
            "warning",
            observed,
            f"more than {most:.0%} with {epochs} policy epoch{'s' * (epochs > 1)} often means too large a step size",
            f"lower optimizer.step_size ({config.optimizer.step_size:g})",
        )


def _advantage_std(progress: Progress, config: TrainConfig) -> Iterator[Finding]:
    values = recent_values(progress, "advantage_std_used")
    if not config.advantage.normalize or len(values) < 3:
        return
    if swings(values, _OSCILLATION) >= _SWINGS:
        yield Finding(
            "advantage_std",
            "warning",
            f"the advantages' standard deviation goes up and down by a factor of {oscillation(values):.3g}",
            "dividing by it makes the step sizes equally unsteady",
            f"average the moments over more iterations: raise advantage.span ({config.advantage.span:g})",
        )


def _importance(progress: Progress, config: TrainConfig) -> Iterator[Finding]:
    less = (
        "less staleness (rollout.source)"
        if config.stale
        else f"a smaller optimizer.step_size ({config.optimizer.step_size:g}) or fewer optimizer.policy_epochs"
    )
    capped, size = recent_mean(progress, "importance_capped"), recent_median(progress, "effective_sample_size")
    if capped is not None and capped > _CAPPED:
        yield Finding(
            "importance_capped",
            "warning",
            f"{capped:.1%} of the importance weights at the cap of {config.policy.max_importance_ratio:g}",
            "the data comes from a policy that differs too much",
            f"use {less}",
        )
    if size is not None and size < _LEAST_SAMPLE_SIZE:
        yield Finding(
            "effective_sample_size",
            "warning",
            f"effective sample size {size:.0%} of the samples",
            "a few importance weights make up most of the gradient",
            f"use {less}",
        )


def _distances(progress: Progress, config: TrainConfig) -> Iterator[Finding]:
    proximal, behavior = recent_median(progress, "kl_proximal"), recent_median(progress, "kl_behavior")
    if proximal is not None and proximal > _FAR_PROXIMAL:
        yield Finding(
            "kl_proximal",
            "warning",
            f"{'estimated' if config.policy.interpolated else 'exact'} KL[proximal, policy] {proximal:.3g} nats",
            "the policy moves away from the proximal policy that should limit it",
            f"lower optimizer.step_size ({config.optimizer.step_size:g})"
            + (
                f" or policy.center_of_mass ({config.policy.center_of_mass:g})"
                if has_center_of_mass(config.policy)
                else ""
            ),
        )
    if behavior is not None and behavior > _FAR_BEHAVIOR:
        yield Finding(
            "kl_behavior",
            "warning",
            f"exact KL[behavior, policy] {behavior:.3g} nats",
            "the data is far off-policy",
            "use fewer policy epochs, a smaller iteration batch, or a less stale source",
        )


def _age(progress: Progress, config: TrainConfig) -> Iterator[Finding]:
    if not has_center_of_mass(config.policy):
        iterations = 1
        if config.policy.proximal == "behavior" and config.stale:
            iterations += config.rollout.source.delay or config.rollout.source.max_lag
        observed = f"the proximal policy is up to {iterations * config.iteration_batch:,} environment steps old"
        kind = "behaviour policy" if config.policy.proximal == "behavior" else "policy before the iteration"
        yield Finding(
            "proximal_age", "ok", observed, f"it is the {kind}, so its age changes with the iteration batch", ""
        )
        return
    age, total = proximal_age(config), config.total_env_steps
    observed = f"the proximal policy is {age:,.0f} environment steps old on average"
    if age > OLD_SHARE_OF_RUN * total:
        yield Finding(
            "proximal_age",
            "warning",
            observed,
            f"that is {age / total:.0%} of a run of {total:,}, so it holds the policy back near its start",
            f"lower policy.center_of_mass ({config.policy.center_of_mass:g})",
        )
    else:
        yield Finding("proximal_age", "ok", observed, "keep this constant when the batch changes", "")


def _value(progress: Progress, config: TrainConfig) -> Iterator[Finding]:
    explained, early = explained_share(progress), _HALF if has_learned(progress) else EARLY
    if explained is None or is_early(progress, config, early, missing=True) or returns_are_constant(progress):
        return
    if explained < _LITTLE_EXPLAINED:
        yield Finding(
            "explained_variance",
            "warning",
            f"the value function explains {explained:.0%} of the returns' variance",
            "worse than a constant" if explained < 0 else "hardly better than a constant",
            "raise optimizer.value_epochs or value_coefficient, or check rewards and the discount",
        )


def _entropy(progress: Progress, config: TrainConfig) -> Iterator[Finding]:
    whole, recent = finite_values(progress, "entropy"), recent_values(progress, "entropy")
    if len(recent) < 3 or min(whole) < 0:  # a density's entropy has no floor, so nothing says when it has collapsed
        return
    if has_learned(progress):
        return
    first, now = whole[0], mean(recent)
    if first > 0 and now < _COLLAPSED * first:
        yield Finding(
            "entropy",
            "warning",
            f"entropy {now:.3g}, {first:.3g} at the start",
            "the policy has stopped exploring, which is fine only if it already performs well",
            f"raise policy.entropy_coefficient ({config.policy.entropy_coefficient:g}) or lower the step size",
        )


_CHECKS: tuple[Callable[[Progress, TrainConfig], Iterator[Finding]], ...] = (
    _clipping,
    _advantage_std,
    _importance,
    _distances,
    _age,
    _value,
    _entropy,
    compare_with_noise_scale,
)
_COLUMNS = (
    "env_steps",
    "mean_episode_return",
    "clip_fraction",
    "advantage_std",
    "advantage_std_used",
    "importance_capped",
    "effective_sample_size",
    "kl_proximal",
    "kl_behavior",
    "explained_variance",
    "entropy",
    "noise_scale",
    "noise_scale_adam",
    "gradient_correlation",
)
