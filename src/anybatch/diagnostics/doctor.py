"""The paper's practical advice (section 6.2) and the limits of the scaling rules, as checks of what a run logged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median

from anybatch.config.chunks import shared_trajectories
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
_TOO_FEW_ROWS, _FEWEST_ESTIMATES = 5, 32  # a noise scale is averaged over about 32
_FEW_CLIPPED, _MANY_CLIPPED, _MANY_CLIPPED_IN_EPOCHS = 0.01, 0.1, 0.2
_OSCILLATION, _SWINGS = 10.0, 3
_CAPPED, _LEAST_SAMPLE_SIZE = 0.01, 0.5
_FAR_PROXIMAL, _FAR_BEHAVIOR = 0.1, 0.5
_LITTLE_EXPLAINED, _EARLY, _HALF = 0.1, 0.2, 0.5
_LITTLE_SPREAD = 0.25
_COLLAPSED = 0.05


def examine(progress: Progress, config: TrainConfig) -> list[Finding]:
    """Check a run's log.

    Args:
        progress: columns of progress.csv, NaN where a field is empty; checks whose columns are missing are left out.
        config: the run's configuration.

    Returns:
        What was found in the last tenth of the iterations (20 at least), worst first; "ok" findings tell where the run
        stands. Fewer than 5 iterations give no warning about what they logged.
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
    clipped = _mean(progress, "clip_fraction")
    if config.policy.objective != "clip" or clipped is None:
        return
    epochs, seen = config.optimizer.policy_epochs, f"{clipped:.2%} of the ratios clipped"
    most = _MANY_CLIPPED if epochs == 1 else _MANY_CLIPPED_IN_EPOCHS
    if max(clipped, fmean(_finite(progress, "clip_fraction"))) < _FEW_CLIPPED:
        if _is_early(progress, config) or _returns_are_constant(progress) or _has_learned(progress):
            return  # there is little to limit, or nothing that a larger batch would improve
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
    if _swings(values, _OSCILLATION) >= _SWINGS:
        yield Finding(
            "advantage_std",
            "warning",
            f"the advantages' standard deviation goes up and down by a factor of {_oscillation(values):.3g}",
            "dividing by it makes step sizes as unsteady",
            f"take the moments from more iterations: raise advantage.span ({config.advantage.span:g})",
        )


def _importance(progress: Progress, config: TrainConfig) -> Iterator[Finding]:
    less = (
        "less staleness (rollout.source)"
        if config.stale
        else f"a smaller optimizer.step_size ({config.optimizer.step_size:g}) or fewer optimizer.policy_epochs"
    )
    capped, size = _mean(progress, "importance_capped"), _median(progress, "effective_sample_size")
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
    proximal, behavior = _median(progress, "kl_proximal"), _median(progress, "kl_behavior")
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
    explained, early = _explained(progress), _HALF if _has_learned(progress) else _EARLY
    if explained is None or _is_early(progress, config, early, missing=True) or _returns_are_constant(progress):
        return
    if explained < _LITTLE_EXPLAINED:
        yield Finding(
            "explained_variance",
            "warning",
            f"the value function explains {explained:.0%} of the returns' variance",
            "worse than a constant" if explained < 0 else "hardly better than a constant",
            "raise optimizer.value_epochs or value_coefficient, or check rewards and the discount",
        )


def _explained(progress: Progress) -> float | None:
    """Share of the returns' variance within iterations that the value function explains, over all recent iterations.

    1 - sum var(residual) / sum var(return), where the residual is the advantage. The mean of
    the iterations' shares would depend most on those whose returns hardly vary: a few steps of one environment, or a
    policy at the highest return.
    None if there is no estimate, or the returns vary much less than they did.
    """
    shares = progress.get("explained_variance", ())
    stds = progress.get("advantage_std", ())
    if not stds:
        return _median(progress, "explained_variance")
    residuals = [std * std for std in stds]
    returns = [x / (1 - share) if share < 1 else math.nan for x, share in zip(residuals, shares, strict=False)]
    known = [(x, y) for x, y in zip(_last(residuals), _last(returns), strict=False) if math.isfinite(y)]
    if not known:
        return None
    residual, spread = (fmean(column) for column in zip(*known, strict=True))
    whole, size = [x for x in returns if math.isfinite(x)], len(known)
    most = max(fmean(whole[i : i + size]) for i in range(0, len(whole), size))
    return 1 - residual / spread if spread > _LITTLE_SPREAD**2 * most else None


def _entropy(progress: Progress, config: TrainConfig) -> Iterator[Finding]:
    whole, recent = _finite(progress, "entropy"), _recent(progress, "entropy")
    if len(recent) < 3 or min(whole) < 0:  # a density's entropy has no floor, so nothing says when it has collapsed
        return
    if _has_learned(progress):
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
    column = [x for x in _last(_measured(progress, name)) if not math.isinf(x)]
    batch, finite = config.optimization_batch, [x for x in column if not math.isnan(x)]
    correlations = _recent(progress, "gradient_correlation")
    if not correlations and not _finite(progress, name):
        return
    kind = "noise scale of Adam's update" if name.endswith("adam") else "gradient noise scale"
    # the columns are averages already, and the newest value is nearer to the present than the median
    scale = max(median(finite), finite[-1]) if 2 * len(finite) > len(column) else math.inf
    how, remedy = "", "more minibatches or fewer environments"
    correlation = min(median(correlations), correlations[-1], key=abs) if correlations else 0.0
    if correlation > 0 and shared_trajectories(
        config.env.num_envs, config.optimizer.minibatches, config.optimizer.shuffle
    ):
        correlation = 0.0  # it can come from trajectories that continue in the next iteration
    if correlation:
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
    late = [step for step in progress.get("env_steps", ()) if step >= _EARLY * config.total_env_steps]
    estimates = min(len(_measured(progress, name)), len(late) if "env_steps" in progress else math.inf)
    yield _verdict(batch, scale, seen, remedy, early=estimates < _FEWEST_ESTIMATES)


def _measured(progress: Progress, name: str) -> Sequence[float]:
    """A column without the rows before the first estimate."""
    column = progress.get(name, ())
    rows = zip(column, progress.get("gradient_correlation", column), strict=False)
    return column[next((i for i, row in enumerate(rows) if any(map(math.isfinite, row))), len(column)) :]


def _verdict(batch: float, scale: float, seen: str, remedy: str, *, early: bool) -> Finding:
    """Comparison of a batch with the noise scale."""
    limit = f"{max(1.0, HOLDS * scale):,.0f}"
    if batch <= HOLDS * scale:
        means = f"small enough: the scaling rules hold up to a batch of {limit}"
        return Finding("noise_scale", "ok", seen, means, "")
    if early:
        return Finding(
            "noise_scale",
            "ok",
            seen,
            "too early to judge: this includes the first iterations, and the noise scale grows",
            "",
        )
    if batch < CRITICAL * scale:
        return Finding(
            "noise_scale",
            "warning",
            seen,
            "near the critical batch, where the rules begin to fail",
            f"expect the same behaviour only from batches up to {limit}: {remedy}",
        )
    return Finding(
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


def _last(column: Sequence[float]) -> Sequence[float]:
    return column[-max(_FEWEST_ROWS, round(_SHARE_OF_RUN * len(column))) :]


def _finite(progress: Progress, name: str) -> list[float]:
    return [x for x in progress.get(name, ()) if math.isfinite(x)]


def _recent(progress: Progress, name: str) -> list[float]:
    return [x for x in _last(progress.get(name, ())) if math.isfinite(x)]


def _mean(progress: Progress, name: str) -> float | None:
    values = _recent(progress, name)
    return fmean(values) if values else None


def _median(progress: Progress, name: str) -> float | None:
    values = _recent(progress, name)
    return median(values) if values else None


def _is_early(progress: Progress, config: TrainConfig, share: float = _EARLY, *, missing: bool = False) -> bool:
    """Whether less than ``share`` of the run is done; ``missing`` if the log does not say."""
    steps = progress.get("env_steps", ())
    return steps[-1] < share * config.total_env_steps if steps else missing


def _returns_are_constant(progress: Progress) -> bool:
    """Whether all recent episodes had the same return: the highest one, or no reward has been found yet."""
    returns = _recent(progress, "mean_episode_return")
    return len(returns) > 1 and max(returns) == min(returns)


def _has_learned(progress: Progress) -> bool:
    """Whether episode returns have risen from the start of the run, by more than half of their range."""
    returns, recent = _finite(progress, "mean_episode_return"), _recent(progress, "mean_episode_return")
    return bool(recent) and fmean(recent) - returns[0] > 0.5 * (max(returns) - min(returns))


def _swings(values: Sequence[float], factor: float) -> int:
    """Number of turns at which values rise and fall by ``factor`` or more: 2 for one exception among equal values."""
    swings = direction = 0
    lowest = highest = max(values[0], 1e-12)
    for value in values:
        value = max(value, 1e-12)
        lowest, highest = min(lowest, value), max(highest, value)
        if direction <= 0 and value >= factor * lowest:
            swings, direction, highest = swings + 1, 1, value
        elif direction >= 0 and value * factor <= highest:
            swings, direction, lowest = swings + 1, -1, value
    return swings


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
