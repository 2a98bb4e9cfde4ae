"""Wall-clock time of asynchronous training against training in turns, with the limit max(sampling, learning) beside it.

    python benchmarks/async_speed.py --env envpool:Humanoid-v4 --num-envs 64 --steps 32 --width 512 --epochs 5 \\
        --out results/async-speed/humanoid.json          # sampling and learning take about as long as each other
    python benchmarks/async_speed.py --env procgen:starpilot-easy     # learning takes longer than sampling
    python benchmarks/async_speed.py --env gym:CartPole-v1 --num-envs 32 --width 256   # holds Python's lock

Training in turns takes sampling + learning per iteration; sampling beside learning cannot take less than the longer of
the two, so the comparison means something where both take about as long: choose --width and --epochs accordingly. Both
runs have the same bound on the age of their data: in turns it comes from a delay of as many iterations. One thread of
PyTorch each for the sampler and the learner, on two cores. Rounds of the two kinds take turns, so that a change in the
machine's load meets both; medians are reported. The bar is 85% of the limit. ``--out`` writes them to a JSON file, and
table.md beside it from all JSON files there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch

from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.policy_phase import policy_phase
from anybatch.presets import ppo_ewma
from anybatch.reproduce.tables import markdown
from anybatch.runs.build import Components, build
from anybatch.system.atomic_files import write_text
from anybatch.system.memory import keep_freed_memory
from anybatch.training import estimate_advantages
from bench_common import machine_facts

BAR = 0.85


def configure(arguments: argparse.Namespace, source: dict[str, Any]) -> TrainConfig:
    config = ppo_ewma(
        arguments.env,
        num_envs=arguments.num_envs,
        rollout_steps=arguments.steps,
        minibatches=arguments.minibatches,
        policy_epochs=arguments.epochs,
        value_epochs=arguments.epochs,
        threads=1,
        device="cpu",
        precision=arguments.precision,
    )
    changes: dict[str, Any] = {"rollout.source": source, "log.noise_scale": False}
    if arguments.option:
        changes["env.options"] = dict(arguments.option)
    if arguments.width:
        changes["model"] = {"encoder": "mlp", "options": {"width": arguments.width, "depth": 2}}
    return override(config, changes)


def learn(parts: Components, config: TrainConfig, iteration: int) -> tuple[float, float]:
    """One iteration as the training loop does it; seconds of waiting for the rollout, and of learning from it."""
    start = time.perf_counter()
    rollout = parts.source.next(iteration)
    sampled = time.perf_counter()
    assert 0 <= iteration - rollout.version <= max(config.rollout.source.delay, config.rollout.source.max_lag)
    assert parts.reward_normalizer is not None
    reward = parts.reward_normalizer(rollout.reward, rollout.first)
    batch, _ = estimate_advantages(rollout, reward, config, parts.advantage_normalizer)
    policy_phase(batch, parts.learner)
    parts.source.drain()
    return sampled - start, time.perf_counter() - sampled


def timed(config: TrainConfig, iterations: int, warm_up: int) -> tuple[float, list[float], list[float]]:
    """Seconds per iteration once the pipeline is full, and those of waiting and learning of each iteration."""
    parts = build(config, 0)
    try:
        for iteration in range(warm_up):
            learn(parts, config, iteration)
        start = time.perf_counter()
        pairs = [learn(parts, config, warm_up + iteration) for iteration in range(iterations)]
        total = (time.perf_counter() - start) / iterations
    finally:
        if parts.source.close():
            parts.env.close()
    return total, [wait for wait, _ in pairs], [learning for _, learning in pairs]


def measure(arguments: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    lag = arguments.max_lag
    delayed = configure(arguments, {"kind": "delayed", "delay": lag})
    asynchronous = configure(arguments, {"kind": "asynchronous", "max_lag": lag})
    rounds = []
    for number in range(arguments.repeats):
        turns, sampling, learning = timed(delayed, arguments.iterations, lag + 1)
        beside, _, _ = timed(asynchronous, arguments.iterations, lag + 1)
        sample_seconds, learn_seconds = statistics.median(sampling), statistics.median(learning)
        limit = max(sample_seconds, learn_seconds)
        rounds.append(
            {
                "in_turns": turns,
                "asynchronous": beside,
                "sampling": sample_seconds,
                "learning": learn_seconds,
                "limit": limit,
                "fraction_of_limit": limit / beside,
                "speedup": turns / beside,
            }
        )
        say(f"round {number + 1}: " + "  ".join(f"{name} {value:.3f}" for name, value in rounds[-1].items()))
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="procgen:starpilot-easy")
    parser.add_argument("--option", nargs=2, action="append", metavar=("NAME", "VALUE"), help="of the environment")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--width", type=int, default=0, help="of an MLP; 0 takes the environment's own encoder")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--max-lag", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file for the medians, and table.md beside it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    medians = measure(arguments, lambda text: print(text, flush=True))
    fraction, ratio = medians["fraction_of_limit"], medians["sampling"] / medians["learning"]
    print(f"sampling takes {ratio:.2f} times as long as learning")
    print(
        f"asynchronous: {fraction:.0%} of the limit (bar {BAR:.0%}), {medians['speedup']:.2f} times as fast as in turns"
    )
    if arguments.out:
        write(arguments, medians)
        print(write_table(arguments.out.parent))


def write(arguments: argparse.Namespace, medians: dict[str, float]) -> None:
    settings = {name: value for name, value in vars(arguments).items() if name != "out"}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine_facts(), "settings": settings, "medians": medians}
    write_text(arguments.out, json.dumps(content, indent=1) + "\n")


def write_table(folder: Path) -> str:
    """table.md, from all JSON files in the folder."""
    header = ["environment, network", "sampling", "learning", "in turns", "asynchronous", "of the limit", "speed-up"]
    rows = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        settings, medians = content["settings"], content["medians"]
        network = f"2 x {settings['width']}" if settings["width"] else "its own encoder"
        rows.append(
            [
                f"{settings['env']} x {settings['num_envs']}, {network}, E = {settings['epochs']}",
                *(f"{medians[name]:.3f} s" for name in ("sampling", "learning", "in_turns", "asynchronous")),
                f"{medians['fraction_of_limit']:.0%}",
                f"{medians['speedup']:.2f}",
            ]
        )
    table = markdown(header, rows)
    write_text(folder / "table.md", table + "\n")
    return table


if __name__ == "__main__":
    main()
