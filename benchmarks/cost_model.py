"""What the EWMA costs (section 5.3 of the paper): passes of the networks counted, and wall-clock time measured.

    python benchmarks/cost_model.py [--rounds 2] [--env procgen:starpilot-hard]

Counts, by hooks on the encoders, how many samples went forward, and forward and backward, for every environment step;
a forward-backward pass costs as much as 3 forward ones. Then trains PPO, PPO-EWMA, PPG and PPG-EWMA by turns in this
process, so that whatever else the machine does hits all four alike, and compares the medians of the rounds: wall-clock
time, and processor time, which a busy machine distorts less. A round is a whole phase: N_pi iterations and an auxiliary
phase with the paper's E_aux = 6 epochs of 16 N_pi minibatches. The work for an environment step does not depend on
N_pi, so here it is 1. The paper's counts leave out the pass that computes pi_old for the auxiliary phase.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from anybatch.config.schema import TrainConfig
from anybatch.observations import Observation, leaves
from anybatch.presets import PRESETS
from anybatch.reproduce.figures.cost import one_phase
from anybatch.runs.build import build

N_PI = 1
# forward-only and forward-backward passes of all networks for an environment step, of which networks, and the paper's
# numbers: the computed and the measured increase by the EWMA
PAPER_COUNTS = {"ppo": (1, 3), "ppo-ewma": (4, 3), "ppg": (2, 14), "ppg-ewma": (3, 14)}
PAPER_INCREASE = {"ppo": (0.30, 0.19), "ppg": (0.023, 0.03)}


@dataclass
class Counted:
    """Samples that went through encoders since the last reset."""

    passes: Counter[str] = field(default_factory=Counter)

    def watch(self, encoder: nn.Module) -> None:
        encoder.register_forward_hook(self._count)

    def _count(self, module: nn.Module, inputs: tuple[Observation, ...], output: torch.Tensor) -> None:
        kind = "forward-backward" if output.requires_grad else "forward"
        self.passes[kind] += len(leaves(inputs[0])[0])


def config_for(name: str, arguments: argparse.Namespace) -> TrainConfig:
    changes: dict[str, Any] = {
        "env.num_envs": arguments.num_envs,
        "rollout.steps": arguments.steps,
        "aux.policy_iterations": N_PI,
        "aux.minibatches": 16 * N_PI,
        "precision": arguments.precision,
        "device": arguments.device,
        "optimizer.minibatches": 8,
    }
    return PRESETS[name](arguments.env, **changes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="procgen:starpilot-hard")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    env_steps = arguments.num_envs * arguments.steps * N_PI

    runs, counts = {}, {}
    wall: dict[str, list[float]] = {name: [] for name in PRESETS}
    processor: dict[str, list[float]] = {name: [] for name in PRESETS}
    for name in PRESETS:
        runs[name] = build(config_for(name, arguments), seed=1)
        counted = Counted()
        learner = runs[name].learner
        averaged = [learner.proximal.module.encoder] if hasattr(learner.proximal, "module") else []
        for encoder in [*learner.agent.encoders, *averaged]:
            counted.watch(encoder)
        one_phase(runs[name])  # also the warm-up
        counts[name] = {kind: counted.passes[kind] / env_steps for kind in ("forward", "forward-backward")}
    for number in range(arguments.rounds):
        for name, parts in runs.items():
            began = time.perf_counter(), time.process_time()
            one_phase(parts)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            wall[name].append(time.perf_counter() - began[0])
            processor[name].append(time.process_time() - began[1])
        print(f"round {number + 1} of {arguments.rounds} done", file=sys.stderr, flush=True)
    for parts in runs.values():
        parts.env.close()

    print("passes of encoders for an environment step, the paper's in brackets")
    cost = {}
    for name, count in counts.items():
        forward, both = count["forward"], count["forward-backward"]
        cost[name] = forward + 3 * both
        paper = "{} / {}".format(*PAPER_COUNTS[name])
        print(f"  {name:9} forward {forward:6.3f}   forward-backward {both:6.3f}   [{paper}]   cost {cost[name]:6.2f}")
    print(
        f"{'increase by the EWMA':22} {'counted':>9} {'(paper)':>9} {'wall clock':>12} {'(paper)':>9} {'processor':>11}"
    )
    for name, (computed, measured) in PAPER_INCREASE.items():
        by_count = cost[f"{name}-ewma"] / cost[name] - 1
        line = f"  {name + '-ewma / ' + name:20} {by_count:>+9.1%} {computed:>+9.1%}"
        if arguments.rounds:
            by_wall, by_processor = (
                statistics.median(taken[f"{name}-ewma"]) / statistics.median(taken[name]) - 1
                for taken in (wall, processor)
            )
            line += f" {by_wall:>+12.1%} {measured:>+9.1%} {by_processor:>+11.1%}"
        print(line)
    for name, taken in wall.items():
        if taken:
            shown = ", ".join(f"{x:.2f}" for x in taken)
            print(f"  {name:9} {env_steps / statistics.median(taken):7.0f} environment steps/s   (seconds: {shown})")


if __name__ == "__main__":
    main()
