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
from anybatch.reproduce.results import fill_gaps, write_rows
from anybatch.reproduce.statistics import Array
from anybatch.reproduce.tables import markdown
from anybatch.runs.progress import read_progress
from anybatch.system.atomic_files import write_text
from procgen_invariance_jobs import (
    ADJUSTED,
    ARMS,
    DEFAULT,
    GAMES,
    SEEDS,
    STEPS,
    TOTAL,
    UNADJUSTED,
    Job,
    jobs,
    whole_lines,
)

BINS, KEPT_BINS = 50, 48
"""Parts of a run, and those shown: in the last two the long episodes are missing, since the run ends before they do."""
FINAL_BINS = slice(40, KEPT_BINS)
COLORS = {DEFAULT: BLACK, ADJUSTED: style.COLORS["all"], UNADJUSTED: style.COLORS["none"]}


class Finished(NamedTuple):
    """What is kept of a run: (BINS,) each."""

    returns: Array
    """Mean return of the episodes whose middle was in that part of the run; see :func:`by_middle`."""
    episodes: Array
    logged: Array
    """mean_episode_return (last 100 episodes) at the end of the part."""
    logged_400: Array


def by_middle(job: Job, ends: Array, lengths: Array, returns: Array) -> tuple[Array, Array]:
    """Mean return and number of episodes by the part of the run that the middle of an episode was in.

    An episode of L steps in one of N environments lasts N * L environment steps of the run. Counted when it ends, as in
    mean_episode_return, it measures policies up to N * L steps old, so that a curve of 64 environments lags behind one
    of 4. ``ends`` are known to an iteration; the middle of the iteration stands for all that ended in it.
    """
    middles = ends - job.num_envs * STEPS / 2 - job.num_envs * lengths / 2
    part = np.clip(middles // (TOTAL / BINS), 0, BINS - 1).astype(int)
    count = np.bincount(part, minlength=BINS)
    with np.errstate(invalid="ignore"):
        return fill_gaps(np.bincount(part, returns, minlength=BINS) / count), count


def read_finished(job: Job, runs: Path) -> Finished:
    """Read a finished run."""
    _, ends, lengths, returns = np.loadtxt(whole_lines(runs / job.name / "episodes.csv"), delimiter=",").T
    progress = {name: np.asarray(column) for name, column in read_progress(runs / job.name / "progress.csv").items()}
    edges = np.arange(1, BINS + 1) * (TOTAL / BINS)
    rows = np.searchsorted(progress["env_steps"], edges, side="right") - 1
    logged = (progress[name][rows] for name in ("mean_episode_return", "mean_episode_return_400"))
    return Finished(*by_middle(job, ends, lengths, returns), *logged)


def write_curves(path: Path, finished: dict[Job, Finished]) -> None:
    """Write a row for each run and part; equal curves give equal bytes."""
    rows: list[list[object]] = [
        ["game", "arm", "seed", "env_steps", "episodes", "return", "mean_episode_return", "mean_episode_return_400"]
    ]
    for job, run in finished.items():
        for part in range(BINS):
            steps = round((part + 1) * TOTAL / BINS)
            values = (f"{column[part]:.4f}" for column in (run.returns, run.logged, run.logged_400))
            rows.append([job.game, job.arm, job.seed, steps, run.episodes[part], *values])
    write_rows(path, rows)


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
        pairs = [(score.final[g, arm], score.final[g, DEFAULT]) for g in GAMES if (g, arm) in score.final]
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
        panels[0].set_title("mean over games, 95% interval")
        panels[0].set_ylabel("return (1: final of 64 environments)")
        for panel, game in zip(panels[1:], GAMES, strict=True):
            panel.set_title(f"{game}, easy: mean and range of seeds")
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
    """Write curves, tables and the figure of the runs that are finished."""
    finished = {job: read_finished(job, runs) for job in jobs() if job.env_steps(runs) >= TOTAL}
    if not finished:
        print(f"no run in {runs} is finished; see status", file=sys.stderr)
        return
    results.mkdir(parents=True, exist_ok=True)
    score = scores(finished)
    write_curves(results / "curves.csv.gz", finished)
    head = f"{len(finished)} of {len(jobs())} runs are finished.\n\n"
    write_text(results / "summary.md", head + summary(score))
    draw(results / "curves.png", finished, score)
    print(head + summary(score))
