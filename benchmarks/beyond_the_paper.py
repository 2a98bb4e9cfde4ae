"""Rules beyond the paper on the batch ladder: several epochs, clipped gradients, step sizes by KL, the critical batch.

    python benchmarks/beyond_the_paper.py run QUEUE...    # train what is missing; kept in runs/, and can be continued
    python benchmarks/beyond_the_paper.py draw            # tables and figure from results/beyond-the-paper/*.csv.gz

Tasks, networks and the batch of 64 environments are those of the ladder suite, and runs a quarter as long. Policies are
evaluated at 20 points of a run, without lag. A batch is compared with the tuned one by the mean of the normalised
return over the curve after its first tenth (``area``), and by the KL divergence from the proximal policy in the
iterations that end at these points.

Runs of one shape are trained together, as a stack (:mod:`anybatch.reproduce.stacked`). Nothing is chosen by these
runs: step sizes are the ladder's, divided by the square root of the number of epochs.

Queues: ``epochs`` (3 epochs, 1/16 of the batch; ``epochs_4``, ``epochs_64``, ``epochs_10``, ``epochs_lander``: 1/4,
1/64, 10 epochs, LunarLander for all its steps), ``momentum`` (Adam's betas), ``coupled`` (plain PPO), ``gradients``
(maximum norm, Adam's epsilon), ``adaptive`` (step size by KL), ``stopping`` (epochs stopped by KL, runs of the ordinary
trainer), ``critical`` (larger batches).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import numpy as np
import torch

from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.errors import ScalingWarning
from anybatch.reproduce.plots import figure
from anybatch.reproduce.results import write_rows
from anybatch.reproduce.stacked import Evaluations, RunResult, launch
from anybatch.reproduce.statistics import mean_difference
from anybatch.reproduce.suites.ladder_tasks import ENV_STEPS, TASKS, config_of
from anybatch.reproduce.tables import markdown
from anybatch.scaling import center_of_mass_of_ppo, scale
from anybatch.system.atomic_files import write_text
from ladder_curves import normalized_curve

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "beyond-the-paper"
AT = Evaluations(points=20, episodes=8)
SEEDS = range(4100, 4108)
FIELDS = ("queue", "task", "setting", "variant", "c", "seed", "area", "final", "kl_proximal")


@dataclass(frozen=True)
class Job:
    """A configuration of one table, for several seeds."""

    queue: str
    task: str
    setting: str
    """What the batches have in common, such as "kl, 3 epochs"."""
    variant: str
    c: int | float
    config: TrainConfig
    seeds: Sequence[int]


def of_task(task: str, factor: float = 1.0) -> TrainConfig:
    """A task of the ladder, a quarter as long, with its step size times ``factor``."""
    config = config_of(TASKS[task], TASKS[task].step_size * factor)
    return override(config, {"total_env_steps": config.total_env_steps // 4})


def several_epochs(task: str, objective: str, epochs: int, proximal: str = "ewma") -> TrainConfig:
    """A task of the ladder in the style of PPO, with the average that limits the policy as PPO does."""
    config = of_task(task, epochs**-0.5)
    return override(
        config,
        {
            "objective": objective,
            "policy_epochs": epochs,
            "value_epochs": epochs,
            "proximal": proximal,
            "center_of_mass": center_of_mass_of_ppo(epochs, config.optimizer.minibatches),
        },
    )


def scaled(config: TrainConfig, c: float, **rules: Any) -> TrainConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScalingWarning)
        return config if c == 1 else scale(config, c, **rules)[0]


TASKS_HERE = ("catch", "acrobot", "cartpole", "pendulum")
NOISE_SCALES = {"acrobot": 490.0, "cartpole": 1435.0, "catch": 4880.0}
"""Noise scale of Adam's update in samples, median over the run at the tuned batch."""
STACK: dict[str, Any] = {"evaluations": AT, "statistics": True, "rows": 2}
SINGLE: dict[str, Any] = {"launcher": "single", "rows": None}
"""Stacked runs make equal numbers of passes, and so do not stop them."""


def on_ladder(
    queue: str, task: str, setting: str, config: TrainConfig, divisors: Sequence[float], rule: str
) -> Iterator[Job]:
    """The tuned batch, and others with each of the two values of a rule; equal configurations once."""
    named: dict[str, dict[str, Any]] = {
        "epochs": {"at-once": "at-once", "spread": "spread"},
        "adaptive_step": {"left": False, "followed": True},
    }
    values, tried = named.get(rule, {"none": "none", "sqrt": "sqrt"}), list[TrainConfig]()
    for c, (name, value) in itertools.product(divisors, values.items()):
        changed = scaled(config, c, **{rule: value})
        if changed not in tried:  # a rule changes nothing at the tuned batch, some rules nothing at any
            tried.append(changed)
            yield Job(queue, task, setting, name, c, changed, SEEDS)


def epochs(count: int = 3, divisors: Sequence[float] = (1, 16), tasks: Sequence[str] = TASKS_HERE) -> Iterator[Job]:
    """Passes over a sample at once, and spread out."""
    for task, objective in itertools.product(tasks, ("kl", "clip")):
        config = several_epochs(task, objective, count)
        yield from on_ladder("epochs", task, f"{objective}, {count} epochs", config, divisors, "epochs")


def epochs_4() -> Iterator[Job]:
    return epochs(divisors=(4,))


def epochs_64() -> Iterator[Job]:
    return epochs(divisors=(64,), tasks=TASKS_HERE[:2])


def epochs_10() -> Iterator[Job]:
    return epochs(10, tasks=TASKS_HERE[:2])


def epochs_lander() -> Iterator[Job]:
    """A harder task, for as many environment steps as the ladder has, and with one epoch too."""
    one = several_epochs("lunar-lander", "kl", 1)
    single = (Job("epochs", "lunar-lander", "kl, 1 epoch", "at-once", c, scaled(one, c), SEEDS) for c in (1, 16))
    for job in (*single, *epochs(tasks=("lunar-lander",))):
        yield replace(job, config=override(job.config, {"total_env_steps": ENV_STEPS}))


def momentum() -> Iterator[Job]:
    """Adam's betas kept or raised to the power 1/c, with one epoch and with three."""
    for task, count in itertools.product(TASKS_HERE[:2], (1, 3)):
        config, setting = several_epochs(task, "kl", count), f"kl, {count} {'epoch' if count == 1 else 'epochs'}"
        yield Job("momentum", task, setting, "tuned", 1, config, SEEDS)
        for how, both in itertools.product(("at-once", "spread")[:count], (False, True)):
            variant, rules = f"{how}, betas {'both' if both else 'kept'}", {"epochs": how, "adam_betas": both}
            yield Job("momentum", task, setting, variant, 16, scaled(config, 16, **rules), SEEDS)


def coupled() -> Iterator[Job]:
    """Plain PPO: the behaviour policy limits the policy."""
    for task in TASKS_HERE:
        config = several_epochs(task, "clip", 3, "behavior")
        yield from on_ladder("coupled", task, "PPO, 3 epochs", config, (1, 16), "epochs")


def gradients() -> Iterator[Job]:
    """One epoch; a maximum norm and an epsilon that matter."""
    for (name, value), task in itertools.product((("max_grad_norm", 0.1), ("adam_eps", 1e-2)), TASKS_HERE):
        config = override(of_task(task), {name: value})
        yield from on_ladder("gradients", task, f"{name} {value:g}", config, (1, 16), name)


def adaptive() -> Iterator[Job]:
    """A step size that follows the KL divergence, from a tenth of the ladder's: it has to be found at every batch."""
    for task in TASKS_HERE[:2]:
        config = override(of_task(task, 0.1), {"kl_target": 0.005, "kl_factor": 1.5})
        yield from on_ladder("adaptive", task, "kl_target 0.005", config, (1, 16), "adaptive_step")


def stopping() -> Iterator[Job]:
    """4 epochs that a KL divergence stops, from the policy before the iteration and from the EWMA.

    The step size is 8 times as large as for other queues, so that most iterations of the tuned batch are stopped.
    """
    for task, proximal in itertools.product(TASKS_HERE[:2], ("behavior", "ewma")):
        config = several_epochs(task, "clip", 4, proximal)
        changes = {"optimizer.step_size": 8 * config.optimizer.step_size, "kl_stop": 0.003}
        evaluation = {"eval.every": config.total_env_steps // AT.points, "eval.episodes": AT.episodes}
        setting = "PPO, kl_stop 0.003" if proximal == "behavior" else "clip, kl_stop 0.003"
        stopped = override(config, changes | evaluation)
        yield from on_ladder("stopping", task, setting, stopped, (1, 16), "adaptive_step")


def critical() -> Iterator[Job]:
    """Batches of 1,024 and 4,096 samples a step: the square root rule, the saturating one, and no rule."""
    for task, noise_scale in NOISE_SCALES.items():
        config = of_task(task)
        for c in (1, 1 / 4, 1 / 16):
            of_rule: dict[str, dict[str, Any]] = {
                "sqrt": {},
                "saturating": {"noise_scale": noise_scale},
                "none": {"adam_step": "none"},
            }
            for name, rules in of_rule.items():
                if c != 1 or name == "sqrt":
                    yield Job("critical", task, "larger batches", name, c, scaled(config, c, **rules), SEEDS)


TOGETHER = (epochs, epochs_4, epochs_64, epochs_10)
"""Queues that share a table."""
QUEUES = {f.__name__: f for f in (*TOGETHER, epochs_lander, momentum, gradients, coupled, adaptive, stopping, critical)}


def run(queues: Iterable[str], runs: Path) -> None:
    """Train what is missing, shape by shape, and write the scores of each queue when it is complete."""
    torch.set_num_threads(1)
    for queue in queues:
        start, found = time.process_time(), list[dict[str, Any]]()
        for (task, setting), group in itertools.groupby(QUEUES[queue](), lambda job: (job.task, job.setting)):
            planned = [(job, seed) for job in group for seed in job.seeds]
            configs, seeds = [job.config for job, _ in planned], [seed for _, seed in planned]
            how = SINGLE if configs[0].optimizer.kl_stop is not None else STACK
            results = launch(configs, seeds, runs, **how)
            found += [row(job, result) for (job, _), result in zip(planned, results, strict=True)]
            seconds = time.process_time() - start
            print(f"{queue}: {task}, {setting}; {seconds:.0f} s of processor time", flush=True)
        write(queue, found)


def row(job: Job, result: RunResult) -> dict[str, Any]:
    return {**vars(job), "seed": result.seed, **score(job.task, result)}


def score(task: str, result: RunResult) -> dict[str, Any]:
    values = normalized_curve(task, result, AT.points)
    kl = result.columns.get("kl_proximal", np.array([np.nan]))
    first = AT.points // 10
    return {
        "area": values[first:].mean(),
        "final": values[-AT.points // 10 :].mean(),
        "kl_proximal": np.nanmean(kl) if np.isfinite(kl).any() else np.nan,
        "curve": values,
    }


def write(queue: str, found: Sequence[dict[str, Any]]) -> None:
    """Scores of a queue, and its curves."""
    rows: list[list[object]] = [[*FIELDS, *(f"at_{i + 1}" for i in range(AT.points))]]
    for row in found:
        cells = [f"{row[name]:.6g}" if isinstance(row[name], float) else row[name] for name in FIELDS]
        rows.append([*cells, *(f"{x:.5g}" for x in row["curve"])])
    write_rows(RESULTS / f"{queue}.csv.gz", rows)


def read(queue: str) -> list[dict[str, Any]]:
    """The scores of a queue, without its curves; none if it has not been trained."""
    path = RESULTS / f"{queue}.csv.gz"
    if not path.exists():
        return []
    with gzip.open(path, "rt", newline="") as file:
        lines = list(csv.DictReader(file))
    texts = ("queue", "task", "setting", "variant")
    return [{name: line[name] if name in texts else float(line[name]) for name in FIELDS} for line in lines]


def compared(found: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every batch and variant against the tuned batch of its task and setting."""

    def values(name: str, *of: Any) -> np.ndarray:
        keys = ("task", "setting", "variant", "c")
        rows = [row for row in found if all(row[key] == x for key, x in zip(keys, of, strict=True))]
        return np.array([[row[name]] for row in rows])

    tuned = {(row["task"], row["setting"]): row["variant"] for row in found if row["c"] == 1}
    for task, setting, variant, c in dict.fromkeys(
        (row["task"], row["setting"], row["variant"], row["c"]) for row in found if row["c"] != 1
    ):
        start = (task, setting, tuned[task, setting], 1)
        line = {"task": task, "setting": setting, "variant": variant, "c": c}
        for name in ("area", "final"):
            line[f"tuned {name}"] = values(name, *start).mean()
            line[name] = mean_difference(values(name, task, setting, variant, c), values(name, *start))
        kls = [values("kl_proximal", *of).mean() for of in (start, (task, setting, variant, c))]
        yield {**line, "kl": kls}


def table_of(found: Sequence[dict[str, Any]]) -> str:
    rows = []
    for line in compared(found):
        area, final = (f"{line[name].size:+.3f} ± {line[name].error:.3f}" for name in ("area", "final"))
        before, after = line["kl"]
        kl = f"{before:.4f}" if np.isfinite(before) else "", f"{after:.4f} (x {after / before:.2f})"
        batch = f"1/{line['c']:g}" if line["c"] > 1 else f"x {1 / line['c']:g}"
        numbers = [f"{line['tuned area']:.3f}", area, final, *kl]
        rows.append([TASKS[line["task"]].label, line["setting"], batch, line["variant"], *numbers])
    head = ["task", "setting", "batch", "rule", "tuned area", "area less tuned", "final less tuned", "tuned KL", "KL"]
    return markdown(head, rows)


def summary_of(found: Sequence[dict[str, Any]]) -> str:
    """Means over tasks: how far from the tuned batch, and in which direction."""
    lines, rows = list(compared(found)), []
    for setting, c, variant in dict.fromkeys((x["setting"], x["c"], x["variant"]) for x in lines):
        chosen = [x for x in lines if (x["setting"], x["c"], x["variant"]) == (setting, c, variant)]
        sizes, errors = (np.array([getattr(x["area"], name) for x in chosen]) for name in ("size", "error"))
        ratios = np.array([after / before for before, after in (x["kl"] for x in chosen)])
        rows.append(
            [
                *(setting, f"1/{c:g}" if c > 1 else f"x {1 / c:g}", variant, str(len(chosen))),
                f"{sizes.mean():+.3f} ± {np.sqrt((errors**2).sum()) / len(errors):.3f}",
                f"{np.abs(sizes).mean():.3f}",
                f"{np.exp(np.log(ratios).mean()):.2f}",
            ]
        )
    head = ["setting", "batch", "rule", "tasks", "area less tuned", "absolute, mean over tasks", "KL / tuned KL"]
    return markdown(head, rows)


def draw() -> None:
    """Tables of all queues that were trained, and the figure of the epochs."""
    found = {queue: read(queue) for queue in QUEUES}
    together = [queue.__name__ for queue in TOGETHER]
    epochs_found = [row for queue in together for row in found[queue]]
    parts = {"epochs": epochs_found, **{queue: x for queue, x in found.items() if queue not in together}}
    for name, part in parts.items():
        if part:
            write_text(RESULTS / f"{name}.md", f"{summary_of(part)}\n\n{table_of(part)}\n")
            write_text(RESULTS / f"{name}-summary.md", f"{summary_of(part)}\n")
            print(f"{name}\n{summary_of(part)}\n")
    if epochs_found:
        draw_figure(RESULTS / "epochs.png", list(compared(epochs_found + found["epochs_lander"])))


def draw_figure(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """The gap of every task and setting, and the distance from the proximal policy, at once and spread out."""
    spread = [(x["task"], x["setting"], x["c"]) for x in lines if x["variant"] == "spread"]
    lines = [x for x in lines if (x["task"], x["setting"], x["c"]) in spread]  # one epoch has nothing to spread
    names = [f"{TASKS[task].label}, {setting}, 1/{c:g}" for task, setting, c in spread]
    with figure(path, 2, width=4.2, height=0.6 + 0.2 * len(names)) as axes:
        for variant, color, label in (
            ("at-once", "tab:orange", "passes at once"),
            ("spread", "tab:blue", "spread out"),
        ):
            chosen = [x for x in lines if x["variant"] == variant]
            places = np.arange(len(chosen)) + (0.15 if variant == "spread" else -0.15)
            sizes, errors = ([getattr(x["area"], name) for x in chosen] for name in ("size", "error"))
            axes[0].errorbar(sizes, places, xerr=errors, fmt="o", ms=4, lw=1, color=color, label=label)
            axes[1].plot([x["kl"][1] / x["kl"][0] for x in chosen], places, "o", ms=4, color=color)
        for axis, level in zip(axes, (0, 1), strict=True):
            axis.axvline(level, color="0.6", lw=0.8, zorder=0)
            axis.set_yticks(range(len(names)), names if level == 0 else [], fontsize=7)
            axis.invert_yaxis()
        axes[0].set_xlabel("area less that of the tuned batch", fontsize=8)
        axes[1].set_xlabel("KL from the proximal policy / that of the tuned batch", fontsize=8)
        axes[0].legend(fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "draw"))
    parser.add_argument("queues", nargs="*", choices=[*QUEUES, []])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "beyond-the-paper")
    arguments = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    if arguments.command == "run":
        run(arguments.queues, arguments.runs)
    draw()


if __name__ == "__main__":
    main()
