"""Beyond the paper: more environments than the default under three rules, and the noise scale as their limit."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.errors import ConfigError
from anybatch.reproduce.finals import final
from anybatch.reproduce.plots import BLACK, BLUE, GREEN, VERMILION
from anybatch.reproduce.results import Results
from anybatch.reproduce.statistics import band
from anybatch.reproduce.style import LABELS, NORMALIZED, legend, panels
from anybatch.reproduce.suites.suite import Cell, Figure, Suite
from anybatch.reproduce.tables import markdown
from anybatch.scaling import rescale

RULES = ("paper", "fixed-minibatch", "none")
COLORS = {"paper": BLUE, "fixed-minibatch": GREEN, "none": VERMILION}
NOISE = "noise-scale"
_COLUMN = "noise_scale_adam"


def cells(suite: Suite) -> list[Cell]:
    """Every multiple of the default under every rule, and runs at the default that estimate the noise scale."""
    found = []
    for task, config in suite.scaling_up.items():
        for rule in RULES:
            for multiple in suite.multiples:
                found.append(Cell(rule, task, multiple, larger(config, multiple, rule)))
        watched = override(config, {"log.noise_scale": True})
        found.append(Cell(NOISE, task, 1, watched, single=True))
    return found


def larger(config: TrainConfig, multiple: int, rule: str) -> TrainConfig:
    """``multiple`` times the environments, with everything else as the rule says."""
    num_envs = config.env.num_envs * multiple
    if multiple == 1:
        return config
    if rule == "none":
        return override(config, {"num_envs": num_envs})
    if rule not in ("paper", "fixed-minibatch"):
        raise ConfigError(f"rule is {rule!r}, but must be one of {', '.join(RULES)}")
    return rescale(config, num_envs=num_envs, rule=rule)[0]  # type: ignore[arg-type]


def predicted_batch(suite: Suite, results: Results, task: str) -> float:
    """The noise scale of Adam's updates in samples: the median over training and seeds, NaN without an estimate."""
    values = results[NOISE, task, 1].values
    return float(np.nanmedian(values)) if np.isfinite(values).any() else float("nan")


def draw(suite: Suite, results: Results, folder: Path) -> list[Path]:
    """Final return against the samples of a gradient step, with the predicted limit."""
    path, tasks = folder / "scaling-up.png", tuple(suite.scaling_up)
    with panels(path, len(tasks), width=3.3, height=2.5) as axes:
        for axis, task in zip(axes, tasks, strict=True):
            config = suite.scaling_up[task]
            batches = [config.optimization_batch * m for m in suite.multiples]
            for rule in RULES:
                ends = [band(final(suite, results, rule, m, (task,))[:, 0]) for m in suite.multiples]
                axis.errorbar(
                    batches,
                    [float(b.mean) for b in ends],
                    [float(b.std) for b in ends],
                    fmt="o-",
                    ms=3.5,
                    capsize=2,
                    lw=1.4,
                    color=COLORS[rule],
                    label=LABELS[rule],
                )
            limit = predicted_batch(suite, results, task)
            if np.isfinite(limit):
                axis.axvline(limit, color=BLACK, linestyle=":", lw=1.2, label="noise scale at the default")
            axis.set_xscale("log", base=2)
            axis.set_xticks(batches, [f"{config.env.num_envs * m}\n×{m}" for m in suite.multiples], fontsize=7)
            axis.set_xlabel(f"environments (the axis: $NT/{config.optimizer.minibatches}$ samples)")
            axis.set_title(suite.labels[task])
            axis.set_ylim(-0.05, 1.1)
        axes[0].set_ylabel(f"final {NORMALIZED}")
        legend(axes)
    return [path]


def summary(suite: Suite, results: Results) -> list[str]:
    """Final returns by rule and multiple, and the batch that the noise scale predicts."""
    rows, sentences = [], []
    for task, config in suite.scaling_up.items():
        for rule in RULES:
            ends = [final(suite, results, rule, m, (task,)).mean() for m in suite.multiples]
            rows.append([f"{suite.labels[task]}, {LABELS[rule]}", *(f"{x:.3f}" for x in ends)])
        limit = predicted_batch(suite, results, task)
        shown = f"{limit:,.0f} samples" if np.isfinite(limit) else "no estimate"
        sentences.append(
            f"{suite.labels[task]}: {shown}, where the default's gradient step has {config.optimization_batch:,.0f}"
        )
    return [
        "Noise scale of Adam's updates, measured at the default: " + "; ".join(sentences) + ".",
        markdown(["final return at", *(f"×{m}" for m in suite.multiples)], rows),
    ]


FIGURE = Figure(
    "scaling-up",
    "beyond the paper",
    "from the default up to 16 times the environments, three rules, and the noise scale's limit",
    cells,
    draw,
    summary,
    column="return",
)
