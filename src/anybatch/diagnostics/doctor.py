"""The paper's practical advice (section 6.2) and the limits of the scaling rules, as checks of what a run logged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median

from anybatch.config.schema import TrainConfig
from anybatch.scaling.conditions import OLD_SHARE_OF_RUN
from anybatch.scaling.findings import Finding
from anybatch.scaling.rules import proximal_age

Progress = Mapping[str, Sequence[float]]
"""Columns of progress.csv by name, oldest row first."""

HOLDS, CRITICAL = 0.25, 1.0
"""Share of the noise scale up to which a batch counts as small, and from which on it is critical.

Adam's denominator is proportional to ``sqrt(1 + B_noise/B)`` (appendix C), the square root rule takes it to be
``sqrt(B_noise/B)``: at B = B_noise/4 that is 12% off, at B = B_noise 41%.
"""

_FEWEST_ROWS, _SHARE_OF_RUN = 20, 0.1
_FEW_CLIPPED, _MANY_CLIPPED, _MANY_CLIPPED_IN_EPOCHS = 0.01, 0.1, 0.2
_OSCILLATION = 10.0
_CAPPED, _LEAST_SAMPLE_SIZE = 0.01, 0.5
_FAR_PROXIMAL, _FAR_BEHAVIOR = 0.1, 0.5
_LITTLE_EXPLAINED, _EARLY = 0.1, 0.2
_COLLAPSED = 0.05


def examine(progress: Progress, config: TrainConfig) -> list[Finding]:
    """Check a run's log.

    Args:
        progress: columns of progress.csv, NaN where a field is empty; checks whose columns are missing are left out.
        config: the run's configuration.

    Returns:
        What was found in the last tenth of the iterations (20 at least), worst first; "ok" findings tell where the run
        stands.
    """
    found = [finding for check in _CHECKS for finding in check(progress, config)]
    return sorted(found, key=lambda finding: ("error", "warning", "ok").index(finding.severity))


class LiveDoctor:
    """Looks at a run while it trains, and warns of each kind of finding once, and once more if it becomes an error."""

    def __init__(self, config: TrainConfig, *, every: int = 25, memory: int = 50) -> None:
        """Examine the last ``memory`` iterations, and the first, after ``every`` that many."""
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
            if len(column) > self._memory:
                del column[1]  # the first row stays, to compare with
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
    clipped = _mean(progress, "clip_fraction")
    if config.policy.objective != "clip" or clipped is None:
        return
    epochs, seen = config.optimizer.policy_epochs, f"{clipped:.2%} of the ratios clipped"
    most = _MANY_CLIPPED if epochs == 1 else _MANY_CLIPPED_IN_EPOCHS
    if clipped < _FEW_CLIPPED:
        com = f"{config.policy.center_of_mass:g}"
        raise_it = f"raise policy.center_of_mass ({com})" if _ewma(config) else "PPO-EWMA with a high centre of mass"
        yield Finding(
            "clip_fraction_low",
            "warning",
            seen,
            "below 1% clipping does not limit the policy at all",
            f"take a larger iteration batch (rollout.steps and optimizer.minibatches times the same), or {raise_it}",
        )
    elif clipped > most:
        yield Finding(
            "clip_fraction_high",
            "warning",
            seen,
            f"more than {most:.0%} with {epochs} policy epoch{'s' * (epochs > 1)} often means too large a step size",
            f"lower optimizer.step_size ({config.optimizer.step_size:g})",
        )


def _advantage_std(progress: Progress, config: TrainConfig) -> Iterator[Finding]:
    values = _recent(progress, "advantage_std_used")
    if not config.advantage.normalize or len(values) < 3:
        return
    factor = _oscillation(values)
    if factor >= _OSCILLATION:
        yield Finding(
            "advantage_std",
            "warning",
            f"the advantages' standard deviation goes up and down by a factor of {factor:.3g}",
            "dividing by it makes step sizes as unsteady",
            f"take the moments from more iterations: raise advantage.span ({config.advantage.span:g})",
        )


def _importance(progress: Progress, config: TrainConfig) -> Iterator[Finding]:
    less = (
        "less staleness (rollout.source)"
        if config.stale
        else f"a smaller optimizer.step_size ({config.optimizer.step_size:g}) or fewer optimizer.policy_epochs"
    )
    capped, size = _mean(progress, "importance_capped"), _mean(progress, "effective_sample_size")
    if capped is not None and capped > _CAPPED:
        yield Finding(
            "importance_capped",
            "warning",
            f"{capped:.1%} of the importance weights at the cap of {config.policy.max_importance_ratio:g}",
            "the data come from a policy that is too different",
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
    proximal, behavior = _mean(progress, "kl_proximal"), _mean(progress, "kl_behavior")
    if proximal is not None and proximal > _FAR_PROXIMAL:
        yield Finding(
            "kl_proximal",
            "warning",
            f"exact KL[proximal, policy] {proximal:.3g} nats",
            "the policy runs away from the one that should hold it back",
            f"lower optimizer.step_size ({config.optimizer.step_size:g})"
            + (f" or policy.center_of_mass ({config.policy.center_of_mass:g})" if _ewma(config) else ""),
        )
    if behavior is not None and behavior > _FAR_BEHAVIOR:
        yield Finding(
            "kl_behavior",
            "warning",
            f"exact KL[behavior, policy] {behavior:.3g} nats",
            "the data are far off-policy",
            "use fewer policy epochs, a smaller iteration batch, or a less stale source",
        )


def _age(progress: Progress, config: TrainConfig) -> Iterator[Finding]:
    if not _ewma(config):
        iterations = 1
        if config.policy.proximal == "behavior" and config.stale:
            iterations += config.rollout.source.delay or config.rollout.source.max_lag
        seen = f"the proximal policy is up to {iterations * config.iteration_batch:,} environment steps old"
        kind = "weights that sampled" if config.policy.proximal == "behavior" else "weights before the iteration"
        yield Finding("proximal_age", "ok", seen, f"it is the {kind}, so its age changes with the iteration batch", "")
        return
    age, total = proximal_age(config), config.total_env_steps
    seen = f"the proximal policy is {age:,.0f} environment steps old on average"
    if age > OLD_SHARE_OF_RUN * total:
        yield Finding(
            "proximal_age",
            "warning",
            seen,
            f"that is {age / total:.0%} of a run of {total:,}, so it holds the policy back near its start",
            f"lower policy.center_of_mass ({config.policy.center_of_mass:g})",
        )
    else:
        yield Finding("proximal_age", "ok", seen, "keep this number when the batch changes", "")


def _value(progress: Progress, config: TrainConfig) -> Iterator[Finding]:
    explained, steps = _mean(progress, "explained_variance"), progress.get("env_steps", ())
    if explained is None or not steps or steps[-1] < _EARLY * config.total_env_steps:
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
    whole = [x for x in progress.get("entropy", ()) if math.isfinite(x)]
    recent = _recent(progress, "entropy")
    if len(recent) < 3 or min(whole) < 0:  # a density's entropy has no floor, so nothing says when it has collapsed
        return
    first, now = whole[0], fmean(recent)
    if first > 0 and now < _COLLAPSED * first:
        yield Finding(
            "entropy",
            "warning",
            f"entropy {now:.3g}, at the start {first:.3g}",
            "the policy has stopped exploring; that is right only if it plays well already",
            f"raise policy.entropy_coefficient ({config.policy.entropy_coefficient:g}) or lower the step size",
        )


def _noise_scale(progress: Progress, config: TrainConfig) -> Iterator[Finding]:
    name = "noise_scale_adam" if config.optimizer.kind == "adam" else "noise_scale"
    column = [x for x in _last(progress.get(name, ())) if not math.isinf(x)]
    batch, finite = config.optimization_batch, [x for x in column if not math.isnan(x)]
    correlations = _recent(progress, "gradient_correlation")
    if not correlations and all(map(math.isnan, progress.get(name, ()))):
        return
    kind = "noise scale of Adam's update" if name.endswith("adam") else "gradient noise scale"
    scale = median(finite) if 2 * len(finite) > len(column) else math.inf
    how, remedy = "", "more minibatches or fewer environments"
    if correlations and (correlation := median(correlations)):
        # what the mean over a window misses where weights move within it; see NoiseScale
        from_pairs = batch * (1 - abs(correlation)) / abs(correlation)
        if batch > HOLDS * from_pairs and from_pairs < scale:
            scale = from_pairs
            how = f" (successive gradients correlate by {correlation:.2f})"
            if correlation < 0:
                remedy = f"{remedy}; or lower optimizer.step_size ({config.optimizer.step_size:g}), steps overshoot"
    if math.isinf(scale):
        yield Finding(
            "noise_scale",
            "ok",
            f"the gradient noise scale is too large to measure, well above the optimisation batch of {batch:,.0f}",
            "the scaling rules hold here and for somewhat larger batches",
            "",
        )
        return
    seen = f"optimisation batch {batch:,.0f}, {kind} {scale:,.0f} samples{how}"
    limit = f"{max(1.0, HOLDS * scale):,.0f}"
    if batch <= HOLDS * scale:
        yield Finding("noise_scale", "ok", seen, f"small enough: the scaling rules hold up to a batch of {limit}", "")
    elif batch < CRITICAL * scale:
        yield Finding(
            "noise_scale",
            "warning",
            seen,
            "near the critical batch, where the rules begin to fail",
            f"expect the same behaviour only from batches up to {limit}: {remedy}",
        )
    else:
        yield Finding(
            "noise_scale",
            "error",
            seen,
            "past the critical batch: the scaling rules do not hold, and samples are wasted on a precise gradient",
            f"tune at an optimisation batch of {limit} or less: {remedy}",
        )


_CHECKS: tuple[Callable[[Progress, TrainConfig], Iterator[Finding]], ...] = (
    _clipping,
    _advantage_std,
    _importance,
    _distances,
    _age,
    _value,
    _entropy,
    _noise_scale,
)
_COLUMNS = (
    "env_steps",
    "clip_fraction",
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


def _last(column: Sequence[float]) -> Sequence[float]:
    return column[-max(_FEWEST_ROWS, round(_SHARE_OF_RUN * len(column))) :]


def _recent(progress: Progress, name: str) -> list[float]:
    return [x for x in _last(progress.get(name, ())) if math.isfinite(x)]


def _mean(progress: Progress, name: str) -> float | None:
    values = _recent(progress, name)
    return fmean(values) if values else None


def _oscillation(values: Sequence[float]) -> float:
    """By what factor values go both up and down, in either order: a trend in one direction gives 1."""
    rise = fall = 1.0
    lowest = highest = max(values[0], 1e-12)
    for value in values:
        value = max(value, 1e-12)
        lowest, highest = min(lowest, value), max(highest, value)
        rise, fall = max(rise, value / lowest), max(fall, highest / value)
    return min(rise, fall)


def _ewma(config: TrainConfig) -> bool:
    return config.policy.proximal == "ewma"
