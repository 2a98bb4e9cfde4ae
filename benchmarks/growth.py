"""Cost and peak memory as runs get larger, and seconds to start: one figure, and a table.

    python benchmarks/growth.py                         # all, some ten minutes on one core
    python benchmarks/growth.py --only mlp start        # the others keep their numbers
    python benchmarks/growth.py --draw                  # the figure and the table again

``mlp`` and ``impala``: an iteration of PPO-EWMA at 1 to 4,096 and 1 to 256 environments. ``phase``: an auxiliary phase
of PPG at N_pi = 32 to 2,048, on disk. ``stack``: 1 to 512 stacked runs. ``start``: from `anybatch train` to the first
environment step, and `import anybatch`. Each number comes from a process of its own with one thread, which is warm when
it is measured. Costs are CPU time, which other programs disturb little, divided by the amount of data: a line that
rises grows faster than its data. Peak memory is that of the process, of which an idle one has about 300 MiB. Results go
to growth.json, growth.png and table.md in results/growth.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from anybatch.reproduce.tables import markdown
from anybatch.system.atomic_files import write_text
from bench_common import ROOT, cores, forget_peak_memory, machine_facts, peak_memory_mib
from bench_launch import measure_all
from bench_run import Spec

SIZES = {
    "mlp": [1, 4, 16, 64, 256, 1024, 4096],
    "impala": [1, 4, 16, 64, 256],
    "phase": [32, 64, 128, 256, 512, 1024, 2048],
    "stack": [1, 4, 16, 64, 256, 512],
}
TITLES = {
    "mlp": ("environments (MLP, CartPole)", "per environment step"),
    "impala": ("environments (IMPALA, StarPilot)", "per environment step"),
    "phase": ("iterations of a PPG phase (CartPole)", "per environment step"),
    "stack": ("stacked runs (Catch)", "per environment step"),
}


def iteration(env: str, num_envs: int, **changes: Any) -> dict[str, float]:
    """CPU seconds per environment step and peak memory of PPO-EWMA's iterations of the same number of steps."""
    small = "CartPole" in env
    steps = 32 if small else 16
    spec = Spec(
        algorithm="ppo-ewma",
        env=env,
        num_envs=num_envs,
        steps=steps,
        minibatches=8,
        iterations=max(2, 8192 // (num_envs * steps)) if small else max(1, 16 // num_envs),
        warm_up=1 if small or num_envs < 64 else 0,  # two short iterations have come before
        cores=cores()[-1:],
        rate_batches=[],
        plain=False,
        changes=changes,
    )
    measured = measure_all(spec)
    return {"seconds": measured.processor_seconds / measured.env_steps, "peak_mib": measured.peak_mib}


def phase(iterations: int) -> dict[str, float]:
    """CPU seconds per environment step and peak memory of one PPG run of one phase of 4 x 32 steps an iteration."""
    from anybatch.presets import ppg_ewma
    from anybatch.training import train

    config = ppg_ewma(
        "envpool:CartPole-v1",
        num_envs=4,
        total_env_steps=4 * 32 * iterations,
        device="cpu",
        precision="fp32",
        **{
            "rollout.steps": 32,
            "optimizer.minibatches": 4,
            "model.encoder": "mlp",
            "aux.policy_iterations": iterations,
            "aux.minibatches": iterations,
            "aux.epochs": 2,
            "aux.storage": "disk",
            "log.tensorboard": False,
        },
    )
    return _timed(lambda folder: train(config, folder / "run", quiet=True), config.total_env_steps)


def stack(runs: int) -> dict[str, float]:
    """CPU seconds per environment step of a run and peak memory of stacked runs."""
    from anybatch.config.io import override
    from anybatch.reproduce.stacked import run_stacked
    from anybatch.reproduce.suites.laptop import laptop

    config = override(laptop().invariance["catch"], {"num_envs": 4, "total_env_steps": 4 * 32 * 20})
    return _timed(lambda folder: run_stacked([config] * runs, list(range(runs))), config.total_env_steps * runs)


def _timed(work: Any, env_steps: int) -> dict[str, float]:
    forget_peak_memory()
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        work(Path(folder))
        return {"seconds": (time.process_time() - began) / env_steps, "peak_mib": peak_memory_mib()}


def alone(kind: str, size: int) -> dict[str, float]:
    """Measure in a new process with one thread on one core, after the smallest size as a warm-up."""
    code = f"import json, growth; growth.{kind}({SIZES[kind][0]}); print(json.dumps(growth.{kind}({size})))"
    done = subprocess.run(
        [sys.executable, "-c", f"import torch; torch.set_num_threads(1); {code}"],
        cwd=Path(__file__).parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores()[-1:]),
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def start(rounds: int = 5) -> dict[str, float]:
    """Median times of `import anybatch`, and of `anybatch train` up to the first environment step."""
    script = "import os, time, gymnasium\nclass E(gymnasium.Wrapper):\n"
    script += "    def __init__(self): super().__init__(gymnasium.make('CartPole-v1'))\n"
    script += "    def step(self, action):\n        print('DONE', time.time(), time.process_time(), flush=True)\n"
    script += "        os._exit(0)\n"
    report = "import time; print('DONE', time.time(), time.process_time())"
    train = ["-m", "anybatch", "train", "ppo-ewma", "--env.id", "first_step_env:E", "--env.num-envs", "1", "--quiet"]
    found: dict[str, list[tuple[float, float]]] = {"python": [], "import": [], "first_step": []}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "first_step_env.py").write_text(script)
        for number in range(rounds):
            found["python"].append(_until_done(["-c", report], folder))
            found["import"].append(_until_done(["-c", f"import anybatch; {report}"], folder))
            found["first_step"].append(_until_done([*train, "--out", f"run{number}"], folder))
    elapsed, cpu = ({kind: statistics.median(x[i] for x in several) for kind, several in found.items()} for i in (0, 1))
    return {
        "import_seconds": elapsed["import"] - elapsed["python"],
        "import_cpu_seconds": cpu["import"] - cpu["python"],
        "first_step_seconds": elapsed["first_step"],
        "first_step_cpu_seconds": cpu["first_step"],
    }


def _until_done(arguments: list[str], folder: str) -> tuple[float, float]:
    """Seconds, and CPU seconds of the process, until Python prints DONE."""
    began = time.time()
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
    printed = re.search(r"DONE ([\d.]+) ([\d.]+)", done.stdout)
    if printed is None:
        raise SystemExit(done.stderr[-300:])
    return float(printed[1]) - began, float(printed[2])


def draw(results: dict[str, Any], path: Path) -> None:
    """Cost per environment step above, peak memory below."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    from anybatch.reproduce.plots import BLUE, VERMILION, figure

    kinds = [kind for kind in SIZES if kind in results]
    with figure(path, 2 * len(kinds), columns=len(kinds), width=3.1, height=2.5) as axes:
        for number, kind in enumerate(kinds):
            sizes, measured = [int(size) for size in results[kind]], results[kind].values()
            label, unit = TITLES[kind]
            rows = [([1e6 * x["seconds"] for x in measured], f"CPU microseconds\n{unit}", BLUE)]
            rows += [([x["peak_mib"] for x in measured], "peak memory (MiB)", VERMILION)]
            for row, (values, name, color) in enumerate(rows):
                panel = axes[row * len(kinds) + number]
                panel.loglog(sizes, values, "o-", color=color)
                middle = math.sqrt(min(values) * max(values))
                half = max(max(values) / min(values), 10) ** 0.6  # so that a few percent do not look like growth
                panel.set_ylim(middle / half, middle * half)
                panel.set_ylabel(name, fontsize=9)
                panel.set_xticks(sizes, [f"{size}" for size in sizes], fontsize=7)
                panel.minorticks_off()
                panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            panel.set_xlabel(label, fontsize=9)


def table(results: dict[str, Any]) -> str:
    """All numbers, in Markdown."""
    rows = []
    for kind in SIZES:
        for size, x in results.get(kind, {}).items():
            rows.append([TITLES[kind][0], f"{int(size):,}", f"{1e6 * x['seconds']:,.1f}", f"{x['peak_mib']:,.0f}"])
    return markdown(["", "size", "CPU microseconds per environment step", "peak memory (MiB)"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*SIZES, "start"], default=[*SIZES, "start"])
    parser.add_argument("--draw", action="store_true", help="measure nothing: draw the stored numbers again")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "growth")
    arguments = parser.parse_args()
    file = arguments.out / "growth.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for kind in [] if arguments.draw else arguments.only:
        facts = machine_facts()
        if kind == "start":
            results[kind] = start()
            print(kind, results[kind], flush=True)
        else:
            results[kind] = {str(size): measure(kind, size) for size in SIZES[kind]}
        results.setdefault("machine", {})[kind] = facts
        write_text(file, json.dumps(results, indent=1) + "\n")
    if set(SIZES) & set(results):
        draw(results, file.with_suffix(".png"))
    write_text(arguments.out / "table.md", table(results) + "\n")


def measure(kind: str, size: int) -> dict[str, float]:
    if kind == "mlp":
        changes = {"model.encoder": "mlp", "model.options": {"width": 64, "depth": 2}}
        measured = iteration("envpool:CartPole-v1", size, **changes)
    elif kind == "impala":
        measured = iteration("procgen:starpilot-hard", size)
    else:
        measured = alone(kind, size)
    print(kind, size, {name: f"{x:.3g}" for name, x in measured.items()}, flush=True)
    return measured


if __name__ == "__main__":
    main()
