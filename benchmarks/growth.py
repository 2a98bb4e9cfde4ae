"""Cost and peak memory as runs get larger, and seconds to start: one figure and one table of each.

    python benchmarks/growth.py                         # all, about half an hour on one core
    python benchmarks/growth.py --only mlp start

``mlp`` and ``impala``: an iteration of PPO-EWMA at 1 to 4,096 and 1 to 256 environments. ``phase``: an auxiliary phase
of PPG at N_pi = 32 to 2,048, on disk. ``stack``: 1 to 512 stacked runs. ``start``: from `anybatch train` to the first
environment step, and `import anybatch`. Each number comes from a process of its own with one thread. Results go to
results/performance/growth.json and growth.png, where costs are divided by the amount of data: a line that rises grows
faster than its data.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_common import RESULTS, cores, forget_peak_memory, machine_facts, peak_memory_mib
from bench_launch import measure_all
from bench_run import Spec

SIZES = {
    "mlp": [1, 4, 16, 64, 256, 1024, 4096],
    "impala": [1, 4, 16, 64, 256],
    "phase": [32, 128, 512, 2048],
    "stack": [1, 4, 16, 64, 256, 512],
}
TITLES = {
    "mlp": ("environments (MLP, CartPole)", "per environment step"),
    "impala": ("environments (IMPALA, StarPilot)", "per environment step"),
    "phase": ("iterations of a PPG phase", "per environment step of the phase"),
    "stack": ("stacked runs (Catch)", "per environment step of a run"),
}


def iteration(env: str, num_envs: int, **changes: Any) -> dict[str, float]:
    """Seconds per environment step and peak memory of PPO-EWMA's iterations, two or more of 4,096 steps in all."""
    steps = 32 if "CartPole" in env else max(4, min(32, 1024 // num_envs))
    rounds = max(2, 4096 // (num_envs * steps))
    spec = Spec(
        algorithm="ppo-ewma",
        env=env,
        num_envs=num_envs,
        steps=steps,
        minibatches=min(8, num_envs * steps),
        iterations=rounds if "CartPole" in env else 1,
        warm_up=1,
        cores=cores()[-1:],
        rate_batches=[],
        plain=False,
        changes=changes,
    )
    measured = measure_all(spec)
    return {"seconds": measured.seconds / measured.env_steps, "peak_mib": measured.peak_mib}


def phase(iterations: int) -> dict[str, float]:
    """Seconds per environment step and peak memory of one PPG run of one phase of 4 x 32 steps an iteration."""
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
    """Seconds per environment step of a run and peak memory of stacked runs."""
    from anybatch.config.io import override
    from anybatch.reproduce.stacked import run_stacked
    from anybatch.reproduce.suites.laptop import laptop

    config = override(laptop().invariance["catch"], {"num_envs": 4, "total_env_steps": 4 * 32 * 20})
    return _timed(lambda folder: run_stacked([config] * runs, list(range(runs))), config.total_env_steps * runs)


def _timed(work: Any, env_steps: int) -> dict[str, float]:
    forget_peak_memory()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        work(Path(folder))
        return {"seconds": (time.perf_counter() - began) / env_steps, "peak_mib": peak_memory_mib()}


def alone(kind: str, size: int) -> dict[str, float]:
    """Measure in a new process with one thread on one core."""
    code = f"import json, growth; print(json.dumps(growth.{kind}({size})))"
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
    """Median seconds of `import anybatch`, and from `anybatch train` to the first environment step."""
    imports, trains = [], []
    script = "import time, gymnasium\nclass E(gymnasium.Wrapper):\n"
    script += "    def __init__(self): super().__init__(gymnasium.make('CartPole-v1'))\n"
    script += "    def step(self, action):\n        print('STEP', time.time(), flush=True)\n        raise SystemExit\n"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "first_step_env.py").write_text(script)
        for number in range(rounds):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", "import anybatch"], check=True)
            imports.append(time.perf_counter() - began)
            flags = ["--env.id", "first_step_env:E", "--env.num-envs", "1", "--model.encoder", "mlp", "--quiet"]
            clock = time.time()
            command = [sys.executable, "-m", "anybatch", "train", "ppo-ewma", *flags, "--out", f"run{number}"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            first = re.search(r"STEP ([\d.]+)", done.stdout)
            if first is None:
                raise SystemExit(done.stderr[-300:])
            trains.append(float(first[1]) - clock)
    bare = [_python_alone() for _ in range(rounds)]
    return {
        "import_seconds": statistics.median(imports) - statistics.median(bare),
        "first_step_seconds": statistics.median(trains),
    }


def _python_alone() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.perf_counter() - began


def draw(results: dict[str, Any], path: Path) -> None:
    from anybatch.reproduce.plots import BLUE, VERMILION, figure

    kinds = [kind for kind in SIZES if kind in results]
    with figure(path, len(kinds), width=3.6, height=2.8) as axes:
        for panel, kind in zip(axes, kinds, strict=True):
            sizes = [int(size) for size in results[kind]]
            label, unit = TITLES[kind]
            panel.loglog(sizes, [1e6 * x["seconds"] for x in results[kind].values()], "o-", color=BLUE)
            panel.set_xlabel(label)
            panel.set_ylabel(f"microseconds {unit}", color=BLUE, fontsize=8)
            twin = panel.twinx()
            twin.loglog(sizes, [x["peak_mib"] for x in results[kind].values()], "s--", color=VERMILION)
            twin.set_ylabel("peak memory (MiB)", color=VERMILION, fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*SIZES, "start"], default=[*SIZES, "start"])
    parser.add_argument("--out", type=Path, default=RESULTS / "growth.json")
    arguments = parser.parse_args()
    results: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    results["machine"] = machine_facts()
    for kind in arguments.only:
        if kind == "start":
            results[kind] = start()
            print(kind, results[kind], flush=True)
            continue
        results[kind] = {}
        for size in SIZES[kind]:
            if kind == "mlp":
                changes = {"model.encoder": "mlp", "model.options": {"width": 64, "depth": 2}}
                measured = iteration("envpool:CartPole-v1", size, **changes)
            elif kind == "impala":
                measured = iteration("procgen:starpilot-hard", size)
            else:
                measured = alone(kind, size)
            results[kind][str(size)] = measured
            print(kind, size, {name: f"{x:.3g}" for name, x in measured.items()}, flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    draw(results, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
