"""How fast training is, against what its network passes alone would take: one table in under ten minutes.

    make bench                                         # the CPU: one core, two threads, two processes
    python benchmarks/bench.py --device cuda           # a GPU
    python benchmarks/bench.py --modes core --algorithms ppo ppo-ewma

PPO, PPO-EWMA, PPG and PPG-EWMA with the IMPALA network on Procgen's StarPilot (hard): 256 steps, 8 minibatches, the
presets' epochs, and for PPG an auxiliary phase after each iteration, which costs an environment step as much as after
32. Each line is a process of its own, one after the other. The limit is that of bench_limits.py: measured in the same
process before and after. The number of environments is the largest for which everything fits into --minutes; without
EnvPool, random frames take Procgen's place. The line of JSON that is appended to results/performance/bench.jsonl says
which, and what the machine was. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from anybatch.config.io import override
from bench_common import RESULTS, append_json, cores, machine_facts
from bench_launch import Measurement, measure_all
from bench_limits import Passes, passes
from bench_run import Spec, configuration

ALGORITHMS = ("ppo", "ppo-ewma", "ppg", "ppg-ewma")
FRACTION_BAR, EWMA_BARS = 0.90, {"ppo-ewma": 1.31, "ppg-ewma": 1.04}
PLAIN_ENV, PROCGEN = "synthetic_env:procgen_like", "procgen:starpilot-hard"
_LABELS = ("environment", "inference", "optimisation", "proximal", "auxiliary", "other")
# what a measurement takes besides its iterations (imports, environments, the rates of the network), and what the whole
# takes besides its measurements (the first look at the machine, the rates of plain networks)
_EACH_SECONDS, _ONCE_SECONDS = 13.0, 20.0


def modes(names: list[str], device: str) -> dict[str, dict[str, Any]]:
    """What a line of the table may use, by name; fewer than asked for on a machine of one core."""
    if device != "cpu":
        return {device: {"threads": min(8, len(cores()))}}
    mine = cores()
    offered = {
        "core": {"cores": mine[:1], "threads": 1},
        "threads": {"cores": mine[:2], "threads": 2},
        "ranks": {"cores": mine[:2], "threads": 1, "ranks": 2},
    }
    return {name: offered[name] for name in names if name == "core" or len(mine) > 1}


def specs(arguments: argparse.Namespace, mode: dict[str, Any], sizes: dict[str, int], *, plain: bool) -> list[Spec]:
    """The measurements of a mode; ``plain``: the first one measures plain networks as well."""
    gpu = arguments.device != "cpu"
    return [
        Spec(
            algorithm=name,
            env=arguments.env,
            num_envs=arguments.num_envs or sizes[name],
            steps=arguments.steps,
            minibatches=arguments.minibatches,
            aux_batch=arguments.aux_batch or (4096 if gpu else 256),
            iterations=3 if gpu else 1,
            warm_up=1 if gpu or name.startswith("ppg") else 0,
            device=arguments.device,
            precision=arguments.precision,
            micro_batch=arguments.micro_batch or (8192 if gpu else None),
            rate_batches=arguments.rate_batches or ([256, 2048, 8192] if gpu else [64, 256]),
            plain=plain and name == arguments.algorithms[0],
            compiled=arguments.compiled,
            changes=dict(arguments.set),
            **mode,
        )
        for name in arguments.algorithms
    ]


def fitting_sizes(arguments: argparse.Namespace, wanted: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Environments for each algorithm: at most 64, halved, the most expensive first, until all fits into the time."""
    if arguments.device != "cpu" or arguments.num_envs:
        return dict.fromkeys(ALGORITHMS, 256)
    probe = measure_all(
        Spec(cores=cores()[:1], env=arguments.env, num_envs=2, steps=16, rate_batches=[64], plain=False)
    )
    rates = probe.rates()["anybatch"]
    cost = {}
    for name in arguments.algorithms:
        config = configuration(Spec(algorithm=name, env=arguments.env), 1, 256)
        trained = [config]
        if config.aux.enabled:  # the first iteration, which is not measured, has no auxiliary phase
            trained.append(override(config, {"aux.enabled": False}))
        cost[name] = sum(1 / passes(one).limit(rates["forward"], rates["both"]) for one in trained)
    factor = sum(1.0 if mode["threads"] * mode.get("ranks", 1) == 1 else 0.6 for mode in wanted.values()) / FRACTION_BAR
    fixed = _ONCE_SECONDS + arguments.rounds * _EACH_SECONDS * len(wanted) * len(arguments.algorithms)
    return fit(cost, arguments.steps, arguments.rounds * factor, 60 * arguments.minutes - fixed)


def fit(cost: dict[str, float], steps: int, times: float, seconds: float) -> dict[str, int]:
    """Environments for each algorithm, from 64 down to 4 in halves.

    Args:
        cost: seconds that an environment step takes on one core, by algorithm.
        steps: T.
        times: how often each is measured, in units of measurements on one core.
        seconds: what there is.
    """
    sizes = dict.fromkeys(cost, 64)
    while times * sum(cost[name] * steps * sizes[name] for name in cost) > seconds:
        largest = max((name for name in cost if sizes[name] > 4), key=lambda name: cost[name] * sizes[name], default="")
        if not largest:
            break
        # an algorithm and its EWMA variant are compared, so both get the same size
        family = [name for name in cost if name.removesuffix("-ewma") == largest.removesuffix("-ewma")]
        sizes |= {name: sizes[name] // 2 for name in family}
    return sizes


def row(mode: str, measured: list[Measurement], plain: dict[str, float]) -> dict[str, Any]:
    """A line of the table: medians over rounds. ``plain``: how much faster a plain network is, at least 1."""
    first = measured[0]
    config = configuration(Spec(**first.spec), 1, first.spec["steps"])
    work = passes(config)
    limits = [
        work.limit(rates["forward"] * plain["forward"], rates["both"] * plain["both"])
        for rates in (one.rates()["anybatch"] for one in measured)
    ]
    rates = [one.rate for one in measured]
    return {
        "mode": mode,
        "algorithm": first.spec["algorithm"],
        "num_envs": first.spec["num_envs"],
        "rate": statistics.median(rates),
        "limit": statistics.median(limits),
        "fraction": statistics.median(rate / limit for rate, limit in zip(rates, limits, strict=True)),
        "processor_seconds_per_step": statistics.median(one.processor_seconds / one.env_steps for one in measured),
        "peak_mib": max(one.peak_mib for one in measured),
        "passes": [work.forward, work.both],
        "where": {label: statistics.median(one.where.get(label, 0.0) for one in measured) for label in _LABELS},
        "rates": rates,
        "networks": first.rates(),
        "memory_limit": work.memory_limit(first.bandwidth) if first.bandwidth else None,
    }


def advantage_of_plain(measured: Measurement) -> dict[str, float]:
    """How many times as fast as the library's network the fastest one is."""
    rates = measured.rates()
    return {kind: max(one[kind] for one in rates.values()) / rates["anybatch"][kind] for kind in ("forward", "both")}


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Time of each EWMA variant over its algorithm's, in the same mode: as measured, and at equal network speed."""
    found = {(one["mode"], one["algorithm"]): one for one in rows}
    for one in rows:
        base = found.get((one["mode"], one["algorithm"].removesuffix("-ewma")))
        if base is not None and base is not one:
            one["ewma_ratio"] = base["rate"] / one["rate"]
            one["ewma_ratio_processor"] = one["processor_seconds_per_step"] / base["processor_seconds_per_step"]
            # the speed of the machine may have changed between the two: fractions, and limits at the same speed
            rates = base["networks"]["anybatch"]
            limits = [Passes(*row["passes"]).limit(rates["forward"], rates["both"]) for row in (base, one)]
            one["ewma_ratio_adjusted"] = (base["fraction"] / one["fraction"]) * (limits[0] / limits[1])


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    head = f"{'mode':8} {'algorithm':9} {'envs':>4} {'steps/s':>9} {'limit':>9} {'fraction':>8} {'EWMA':>6} {'peak':>9}"
    lines = [head + "  " + " ".join(f"{label[:11]:>11}" for label in _LABELS)]
    for one in rows:
        ratio = f"{one['ewma_ratio']:6.3f}" if "ewma_ratio" in one else f"{'':6}"
        lines.append(
            f"{one['mode']:8} {one['algorithm']:9} {one['num_envs']:4} {one['rate']:9,.1f} {one['limit']:9,.1f} "
            f"{one['fraction']:8.3f} {ratio} {one['peak_mib']:5,.0f} MiB  "
            + " ".join(f"{one['where'][label]:11.1%}" for label in _LABELS)
        )
    return "\n".join(lines)


def verdict(rows: list[dict[str, Any]]) -> str:
    """The bars: what is met and what is not."""
    below = [
        f"{one['algorithm']} ({one['mode']}) {one['fraction']:.3f}" for one in rows if one["fraction"] < FRACTION_BAR
    ]
    above = [
        f"{one['algorithm']} ({one['mode']}) {one['ewma_ratio']:.3f}, at equal speed of the network "
        f"{one['ewma_ratio_adjusted']:.3f}"
        for one in rows
        if one.get("ewma_ratio", 0) > EWMA_BARS.get(one["algorithm"], float("inf"))
    ]
    bars = ", ".join(f"{bar} for {name}" for name, bar in EWMA_BARS.items())
    return (
        f"fraction of the limit at least {FRACTION_BAR:.2f}: {'not ' + ', '.join(below) if below else 'yes'}\n"
        f"time by the EWMA at most {bars}: {'not ' + ', '.join(above) if above else 'yes'}"
    )


def setting(text: str) -> tuple[str, Any]:
    """A field of the configuration and its value, from ``field=value``."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE")
    return name, yaml.safe_load(value)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument(
        "--modes", nargs="+", default=["core", "threads", "ranks"], choices=["core", "threads", "ranks"]
    )
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--env", default=PROCGEN if importlib.util.find_spec("envpool") else PLAIN_ENV)
    parser.add_argument("--minutes", type=float, default=9.0, help="what all of it may take, on the CPU")
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each line; the median counts")
    parser.add_argument("--num-envs", type=int, help="instead of what fits into the time; 256 on a GPU")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--minibatches", type=int, default=8)
    parser.add_argument("--aux-batch", type=int, help="samples of an auxiliary minibatch; 256, on a GPU 4096")
    parser.add_argument("--micro-batch", type=int, help="the library's default, on a GPU 8192")
    parser.add_argument("--rate-batches", type=int, nargs="+", help="batch sizes for the pure rates")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--set", nargs="+", default=[], type=setting, metavar="FIELD=VALUE", help="more: compile=true")
    parser.add_argument("--compiled", action="store_true", help="a compiled network too may set the limit")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench.jsonl", help="where a line of JSON is appended")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    began, facts = time.monotonic(), machine_facts()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    if arguments.env == PLAIN_ENV:
        print("EnvPool is not installed: SYNTHETIC environments with Procgen's spaces, whose stepping costs nothing")
    wanted = modes(arguments.modes, arguments.device)
    sizes = fitting_sizes(arguments, wanted)
    measured: dict[tuple[str, str], list[Measurement]] = {}
    for number in range(arguments.rounds):
        for mode, allowed in wanted.items():
            for spec in specs(arguments, allowed, sizes, plain=mode == next(iter(wanted))):
                one = measure_all(spec)
                measured.setdefault((mode, spec.algorithm), []).append(one)
                print(
                    f"round {number + 1}, {mode}, {spec.algorithm}: {one.rate:,.1f} steps/s "
                    f"({time.monotonic() - began:.0f} s so far)",
                    file=sys.stderr,
                    flush=True,
                )
    rows, plain = [], {"forward": 1.0, "both": 1.0}
    for (mode, _), several in measured.items():
        if several[0].spec["plain"]:  # for the following rows as well
            plain = advantage_of_plain(several[0])
        rows.append(row(mode, several, plain))
    add_ratios(rows)
    print(table(rows))
    print(verdict(rows))
    for one in rows:
        if one["memory_limit"]:
            share = one["rate"] / one["memory_limit"]
            print(
                f"{one['algorithm']}: {share:.3f} of the {one['memory_limit']:,.0f} steps/s that "
                "the GPU's memory allows without fusion"
            )
    seconds = time.monotonic() - began
    print(f"{seconds / 60:.1f} minutes; load average {facts['load_average']} at the start")
    settings = {name: value for name, value in vars(arguments).items() if name != "out"}
    append_json(arguments.out, {"machine": facts, "settings": settings, "seconds": round(seconds), "rows": rows})


if __name__ == "__main__":
    main()
