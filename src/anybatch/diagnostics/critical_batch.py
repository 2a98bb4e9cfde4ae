"""Check of a run's batch against its gradient noise scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from anybatch.config.chunks import shared_trajectories
from anybatch.config.schema import TrainConfig
from anybatch.diagnostics.columns import EARLY, Progress, finite_values, last_rows, recent_values
from anybatch.scaling.findings import Finding

HOLDS, CRITICAL = 0.25, 1.0
"""Share of the noise scale up to which a batch counts as small, and from which on it is critical.

Adam's denominator is proportional to ``sqrt(1 + B_noise/B)`` (appendix C), the square root rule takes it to be
``sqrt(B_noise/B)``: at B = B_noise/4 that is 12% off, at B = B_noise 41%.
"""

_FEWEST_ESTIMATES = 32  # a noise scale is averaged over about 32


def compare_with_noise_scale(progress: Progress, config: TrainConfig) -> Iterator[Finding]:
    """Compare the optimisation batch with the noise scale that the run measured; nothing without an estimate."""
    name = "noise_scale_adam" if config.optimizer.kind == "adam" else "noise_scale"
    column = [x for x in last_rows(_measured(progress, name)) if not math.isinf(x)]
    batch, finite = config.optimization_batch, [x for x in column if not math.isnan(x)]
    correlations = recent_values(progress, "gradient_correlation")
    if not any(correlations) and not finite_values(progress, name):  # no estimate, or all gradients were 0
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
        # the mean over a window misses this where weights move within it; see NoiseScale
        from_pairs = batch * (1 - abs(correlation)) / abs(correlation)
        if batch > HOLDS * from_pairs and from_pairs < scale:
            scale = from_pairs
            how = f" (successive gradients correlate by {correlation:.2f})"
            if correlation < 0:
                remedy = (
                    f"{remedy}; or lower optimizer.step_size ({config.optimizer.step_size:g}), because steps overshoot"
                )
    if math.isinf(scale):
        yield Finding(
            "noise_scale",
            "ok",
            f"the gradient noise scale is too large to measure, well above the optimisation batch of {batch:,.0f}",
            "the scaling rules hold here and for somewhat larger batches",
            "",
        )
        return
    observed = f"optimisation batch {batch:,.0f}, {kind} {scale:,.0f} samples{how}"
    late = [step for step in progress.get("env_steps", ()) if step >= EARLY * config.total_env_steps]
    estimates = min(len(_measured(progress, name)), len(late) if "env_steps" in progress else math.inf)
    yield _verdict(batch, scale, observed, remedy, early=estimates < _FEWEST_ESTIMATES)


def _measured(progress: Progress, name: str) -> Sequence[float]:
    """A column without the rows before the first estimate."""
    column = progress.get(name, ())
    rows = zip(column, progress.get("gradient_correlation", column), strict=False)
    return column[next((i for i, row in enumerate(rows) if any(map(math.isfinite, row))), len(column)) :]


def _verdict(batch: float, scale: float, observed: str, remedy: str, *, early: bool) -> Finding:
    """Comparison of a batch with the noise scale."""
    limit = f"{max(1.0, HOLDS * scale):,.0f}"
    if batch <= HOLDS * scale:
        means = f"small enough: the scaling rules hold up to a batch of {limit}"
        return Finding("noise_scale", "ok", observed, means, "")
    if early:
        return Finding(
            "noise_scale",
            "ok",
            observed,
            "too early to judge: this includes the first iterations, and the noise scale grows",
            "",
        )
    if batch < CRITICAL * scale:
        return Finding(
            "noise_scale",
            "warning",
            observed,
            "near the critical batch, where the rules begin to fail",
            f"expect the same behaviour only from batches up to {limit}: {remedy}",
        )
    return Finding(
        "noise_scale",
        "error",
        observed,
        "past the critical batch: the scaling rules do not hold, and samples are wasted on an unnecessarily precise "
        "gradient",
        f"tune at an optimisation batch of {limit} or less: {remedy}",
    )
