"""How fast training is with few environments, where it is bound by Python and not by arithmetic.

    make bench-small
    python benchmarks/bench_small.py --num-envs 1 --only mlp

PPO-EWMA with the preset's 8 minibatches and 3 epochs on one core: the MLP on CartPole (256 steps; Gymnasium's and,
where it is installed, EnvPool's), and the IMPALA network on Procgen's StarPilot (hard). There fewer steps are taken
with many environments, so that the table takes minutes; the work for an environment step does not depend on them. Each
line is a process of its own; the line of JSON goes to results/performance/bench_small.jsonl.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

from bench import PLAIN_ENV, PROCGEN
from bench_common import RESULTS, append_json, cores, machine_facts
from bench_launch import measure_all
from bench_limits import passes
from bench_run import Spec, configuration

MLP_BAR = 5_000  # environment steps a second, of the MLP with one environment
_LABELS = ("environment", "inference", "optimisation", "proximal", "other")


def specs(arguments: argparse.Namespace) -> list[Spec]:
    """The measurements, a few seconds each."""
    envpool = importlib.util.find_spec("envpool") is not None
    shared: dict[str, Any] = {"algorithm": "ppo-ewma", "cores": cores()[:1], "plain": False, "warm_up": 1}
    found = []
    for num_envs in arguments.num_envs:
        size = {"num_envs": num_envs, **shared}
        if "mlp" in arguments.only:
            iterations = max(3, 60 // num_envs)
            for env in ("gym:CartPole-v1", *(["envpool:CartPole-v1"] if envpool else [])):
                found.append(Spec(env=env, iterations=iterations, rate_batches=[], **size))
        if "impala" in arguments.only:
            env = PROCGEN if envpool else PLAIN_ENV
            steps = max(8, min(256, 2048 // num_envs))
            found.append(Spec(env=env, steps=steps, iterations=2 if num_envs < 8 else 1, rate_seconds=0.3, **size))
    return sorted(found, key=lambda spec: spec.env)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[256, 64, 16, 4, 1])
    parser.add_argument("--only", nargs="+", default=["mlp", "impala"], choices=["mlp", "impala"])
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_small.jsonl")
    arguments = parser.parse_args()
    began, facts = time.monotonic(), machine_facts()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(
        f"{'environment':24} {'envs':>4} {'steps':>5} {'steps/s':>9} {'per CPU s':>9} {'fraction':>8} {'peak':>9}  "
        + " ".join(f"{label[:11]:>11}" for label in _LABELS)
    )
    rows = []
    for spec in specs(arguments):
        measured = measure_all(spec)
        fraction = None
        if spec.rate_batches:
            rates = measured.rates()["anybatch"]
            fraction = measured.rate / passes(configuration(spec, 1, spec.steps)).limit(rates["forward"], rates["both"])
        rows.append(
            {
                "env": spec.env,
                "num_envs": spec.num_envs,
                "steps": spec.steps,
                "rate": measured.rate,
                "fraction": fraction,
                "processor_seconds_per_step": measured.processor_seconds / measured.env_steps,
                "peak_mib": measured.peak_mib,
                "where": measured.where,
            }
        )
        shown = f"{fraction:8.3f}" if fraction else f"{'':8}"
        print(
            f"{spec.env:24} {spec.num_envs:4} {spec.steps:5} {measured.rate:9,.0f} "
            f"{measured.env_steps / measured.processor_seconds:9,.0f} {shown} {measured.peak_mib:5,.0f} MiB  "
            + " ".join(f"{measured.where.get(label, 0.0):11.1%}" for label in _LABELS),
            flush=True,
        )
    alone = [row["rate"] for row in rows if row["num_envs"] == 1 and "CartPole" in row["env"]]
    if alone:
        print(f"the MLP with one environment, at least {MLP_BAR:,} steps/s: {'yes' if max(alone) >= MLP_BAR else 'no'}")
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    append_json(arguments.out, {"machine": facts, "rows": rows})


if __name__ == "__main__":
    main()
