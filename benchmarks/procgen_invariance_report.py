"""Curves, tables and figure of procgen_invariance.py's finished runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import t

from anybatch.reproduce import style, van_elteren
from anybatch.reproduce.plots import BLACK, figure, in_millions
from anybatch.reproduce.statistics import Array
from anybatch.reproduce.tables import markdown
from anybatch.system.atomic_files import write_text
from procgen_invariance_curves import BINS, Finished, read_curves, read_finished, write_curves
from procgen_invariance_jobs import (
    ADJUSTED,
    ARMS,
    DEFAULT,
    GAMES,
    SEEDS,
    TOTAL,
    UNADJUSTED,
    Job,
    jobs,
)

KEPT_BINS = BINS - 2
"""Parts of a run that are shown: in the last two the long episodes are missing, since the run ends before they do."""
FINAL_BINS = slice(40, KEPT_BINS)
COLORS = {DEFAULT: BLACK, ADJUSTED: style.COLORS["all"], UNADJUSTED: style.COLORS["none"]}


class Comparison(NamedTuple):
    """A difference from the default arm, with a 95% interval, NaN where there are too few seeds."""

    difference: float
    low: float
    high: float

    def __str__(self) -> str:
        """The interval."""
        return "one seed" if np.isnan(self.low) else f"{self.low:+.3f} to {self.high:+.3f}"


def compare(arm: Sequence[Array], default: Sequence[Array]) -> Comparison:
    """Mean over games of mean(arm) - mean(default), with Welch's interval (Satterthwaite's degrees of freedom).

    Args:
        arm: for every game the values of its seeds.
        default: the same of the default arm.
    """
    difference = float(np.mean([a.mean() - b.mean() for a, b in zip(arm, default, strict=True)]))
    samples = [*arm, *default]
    if min(map(len, samples)) < 2:
        return Comparison(difference, np.nan, np.nan)
    variances = np.array([sample.var(ddof=1) / len(sample) for sample in samples]) / len(arm) ** 2
    if not variances.any():
        return Comparison(difference, difference, difference)
    freedom = variances.sum() ** 2 / sum(v**2 / (len(x) - 1) for v, x in zip(variances, samples, strict=True))
    half = float(t.ppf(0.975, freedom) * np.sqrt(variances.sum()))
    return Comparison(difference, difference - half, difference + half)


class Scores(NamedTuple):
    """Final returns and mean heights of the curves, by game and arm: an array over seeds."""

    final: dict[tuple[str, str], Array]
    area: dict[tuple[str, str], Array]
    scale: dict[str, tuple[float, float]]
    """For every game what counts as 0 and 1: the default arm's first part, and its final return."""


def scores(finished: dict[Job, Finished]) -> Scores:
    final: dict[tuple[str, str], Array] = {}
    area: dict[tuple[str, str], Array] = {}
    ends: dict[str, tuple[float, float]] = {}
    for game in GAMES:
        for arm in ARMS:
            curves = np.array([run.returns for job, run in finished.items() if (job.game, job.arm) == (game, arm)])
            if len(curves):
                final[game, arm] = curves[:, FINAL_BINS].mean(1)
                area[game, arm] = curves[:, :KEPT_BINS].mean(1)
                if arm == DEFAULT:
                    ends[game] = float(curves[:, 0].mean()), float(final[game, arm].mean())
    return Scores(final, area, ends)


def summary(score: Scores) -> str:
    """Tables of returns, and of differences from the default arm in units of what that arm learned."""
    returns = []
    for (game, arm), values in score.final.items():
        each = ", ".join(f"{value:.2f}" for value in values)
        row = [game, ARMS[arm], str(len(values)), f"{values.mean():.2f}", each, f"{score.area[game, arm].mean():.2f}"]
        returns.append(row)
    differences = []
    for arm in (ADJUSTED, UNADJUSTED):
        complete = [game for game in score.scale if (game, arm) in score.final]
        for name, games in [(game, [game]) for game in complete] + [("mean over games", complete)] * (
            len(complete) > 1
        ):
            row = [name, ARMS[arm]]
            for values in (score.final, score.area):
                theirs, defaults = ([unit(score, g, values[g, a]) for g in games] for a in (arm, DEFAULT))
                found = compare(theirs, defaults)
                row += [f"{found.difference:+.3f}", str(found)]
            differences.append(row)
    text = "Mean returns; final is the mean from 80% to 96% of the run.\n\n"
    text += markdown(["game", "arm", "seeds", "final", "final of each seed", "whole curve"], returns)
    text += (
        "\n\nDifferences from 64 environments, in units of what those learned (1 is their final return, 0 their return "
    )
    text += "in the first 2% of the run), with 95% intervals.\n\n"
    text += markdown(["game", "arm", "final", "interval", "whole curve", "interval"], differences)
    return f"{text}\n\n{ranks(score)}"


def unit(score: Scores, game: str, values: Array) -> Array:
    """Returns in units of what the default arm learned."""
    low, high = score.scale[game]
    return np.asarray((values - low) / (high - low))


def ranks(score: Scores) -> str:
    """The paper's test, two-sided, of the final returns against the default arm's."""
    lines = []
    for arm in (ADJUSTED, UNADJUSTED):
        games = [game for game in GAMES if {(game, arm), (game, DEFAULT)} <= score.final.keys()]
        pairs = [(score.final[game, arm], score.final[game, DEFAULT]) for game in games]
        if len(pairs) == len(GAMES) and all(len(x) == len(SEEDS) for pair in pairs for x in pair):
            z, _ = van_elteren(*(np.array(values).T for values in zip(*pairs, strict=True)))
            lines.append(f"- {ARMS[arm]}, final returns against 64 environments: van Elteren's Z = {z:+.2f}")
    return "\n".join(lines) + "\n" if lines else "Van Elteren's test needs all seeds of all games.\n"


def draw(path: Path, finished: dict[Job, Finished], score: Scores) -> None:
    """Draw a panel for the mean over games and one for each game."""
    x = (np.arange(KEPT_BINS) + 0.5) * TOTAL / BINS
    with figure(path, 1 + len(GAMES), width=3.2, height=2.8) as panels:
        for arm, color in COLORS.items():
            together = []
            for panel, game in zip(panels[1:], GAMES, strict=True):
                runs = [run for job, run in finished.items() if (job.game, job.arm) == (game, arm)]
                if not runs:
                    continue
                curves = np.array([run.returns[:KEPT_BINS] for run in runs])
                panel.plot(x, curves.mean(0), color=color)
                panel.fill_between(x, curves.min(0), curves.max(0), color=color, alpha=0.15, linewidth=0)
                if game in score.scale:
                    together.append(unit(score, game, curves))
            if len(together) == len(GAMES):
                middle, low, high = _mean_over_games(together)
                panels[0].plot(x, middle, color=color)
                panels[0].fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
            panels[0].plot([], [], color=color, label=ARMS[arm])
        style.legend(panels, columns=3)
        panels[0].set_title("mean over games")
        panels[0].set_ylabel("normalised return")
        for panel, game in zip(panels[1:], GAMES, strict=True):
            panel.set_title(game)
            panel.set_ylabel("mean episode return")
        for panel in panels:
            in_millions(panel)


def _mean_over_games(curves: Sequence[Array]) -> tuple[Array, Array, Array]:
    """Mean of (seeds, points) curves over games, and its 95% interval at every point."""
    zeros = [np.zeros((2, curve.shape[1])) for curve in curves]  # against 0, which has no variance
    points = [compare([c[:, k] for c in curves], [z[:, k] for z in zeros]) for k in range(curves[0].shape[1])]
    middle, low, high = np.array(points).T
    return middle, low, high


def collect(runs: Path, results: Path) -> None:
    """Write curves, tables and the figure of the runs that are finished, in ``results`` already or in ``runs``."""
    curves = results / "curves.csv.gz"
    stored, trained = read_curves(curves), [job for job in jobs() if job.env_steps(runs) >= TOTAL]
    if not stored and not trained:
        print(f"no run in {runs} is finished; see status", file=sys.stderr)
        return
    stored |= {job: read_finished(job, runs) for job in trained}
    write_curves(curves, {job: stored[job] for job in jobs() if job in stored})
    finished = read_curves(curves)  # the tables come from the committed digits, whenever a run was added
    score = scores(finished)
    head = f"{len(finished)} of {len(jobs())} runs are finished.\n\n"
    write_text(results / "summary.md", head + summary(score))
    draw(results / "curves.png", finished, score)
    print(head + summary(score))
