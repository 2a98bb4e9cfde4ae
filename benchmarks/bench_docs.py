"""Print the newest measurements as a table for docs/performance.md, where `make printed` puts it.

make bench bench-small printed
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from bench_common import RESULTS

_MODES = {"core": "one core", "threads": "two cores, two threads", "ranks": "two cores, two workers"}


def records(path: Path) -> list[dict[str, Any]]:
    """All records of a file, the newest last; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def newest(path: Path, *, gpu: bool = False) -> dict[str, Any] | None:
    """The last record of a file, of those on a GPU or of those without; None if there is none."""
    found = [
        one for one in records(path) if str(one.get("settings", {}).get("device", "cpu")).startswith("cuda") == gpu
    ]
    return found[-1] if found else None


def speed(record: dict[str, Any]) -> str:
    """The table of `make bench`, in Markdown, with the machine below it."""
    lines = [
        "| | algorithm | environments | steps/s / limit | fraction | EWMA | MiB | where the time goes |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in record["rows"]:
        where = ", ".join(f"{name} {share:.0%}" for name, share in row["where"].items() if share >= 0.005)
        ratio = f"{row['ewma_ratio']:.2f}" if "ewma_ratio" in row else ""
        lines.append(
            f"| {_MODES.get(row['mode'], row['mode'])} | {row['algorithm']} | {row['num_envs']} | {row['rate']:,.0f} / "
            f"{row['limit']:,.0f} | {row['fraction']:.2f} | {ratio} | {row['peak_mib']:,.0f} | {where} |"
        )
    return "\n".join([*lines, "", machine(record)])


def networks(record: dict[str, Any]) -> str:
    """Rates of the network alone, in Markdown."""
    lines = ["| network | | forward/s | forward and backward/s |", "|---|---|---:|---:|"]
    for row in record["rows"]:
        if row["algorithm"] == "ppo":
            for name, rates in row["networks"].items():
                mode = _MODES.get(row["mode"], row["mode"])
                lines.append(f"| {name} | {mode} | {rates['forward']:,.0f} | {rates['both']:,.0f} |")
    return "\n".join(lines)


def small(record: dict[str, Any]) -> str:
    """The table of `make bench-small`, in Markdown, with the machine below it."""
    cells = {}
    for row in record["rows"]:
        fraction = f" ({row['fraction']:.2f})" if row["fraction"] else ""
        cells[row["env"], row["num_envs"]] = f"{row['rate']:,.0f}{fraction}"
    envs, sizes = ([*dict.fromkeys(key[i] for key in cells)] for i in (0, 1))
    lines = [f"| environments | {' | '.join(envs)} |", "|---:" * (1 + len(envs)) + "|"]
    lines += [f"| {size} | {' | '.join(cells.get((env, size), '') for env in envs)} |" for size in sizes]
    return "\n".join([*lines, "", machine(record)])


def peers(record: dict[str, Any]) -> str:
    """The newest measurement of each case of `make bench-peers`, in Markdown, with the machine below it."""
    cases = {one["case"]: one for one in records(RESULTS / "bench_peers.jsonl")}
    names = list(dict.fromkeys(name for case in cases.values() for name in case["rates"]))
    shapes = [
        f"{x['env'].removesuffix('-v1').removesuffix('-v4')} {x['num_envs']} x {x['steps']}, "
        f"{x['minibatches']} minibatches, E = {x['epochs']}; {len(x['rates']['anybatch'])} rounds at a load average of "
        f"{x['machine']['load_average']:.0f}"
        for x in cases.values()
    ]
    lines = [f"| | {' | '.join(shapes)} |", "|---" + "|---:" * len(cases) + "|"]
    for name in names:
        cells = []
        for case in cases.values():
            rates, reference = case["rates"].get(name), case["rates"]["Stable-Baselines3"]
            times = [x / y for x, y in zip(rates or (), reference, strict=bool(rates))]
            cells.append(f"{statistics.median(rates):,.0f} ({statistics.median(times):.2f})" if rates else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    facts = [x["machine"] for x in cases.values()]
    machines = {(x["cpu"], x["torch"]) for x in facts}
    assert len(machines) == 1, f"measured on several machines: {machines}"
    days = sorted({x["time"][:10] for x in facts})
    newest = machine(record).replace(days[-1], " and ".join(days)).partition(", load average")[0]
    return "\n".join([*lines, "", f"{newest}."])


def machine(record: dict[str, Any]) -> str:
    """Where it was measured, in a sentence."""
    facts = record["machine"]
    device = facts["gpu"] if record.get("settings", {}).get("device", "cpu") != "cpu" else facts["cpu"]
    return (
        f"Measured on {facts['time'][:10]}: {device}, {facts['cores']} cores ({', '.join(facts['cpu_flags'])}), "
        f"torch {facts['torch']}, load average {facts['load_average']} at the start."
    )


TABLES = {
    "bench": ("bench.jsonl", speed),
    "networks": ("bench.jsonl", networks),
    "bench-ppg": ("bench_ppg.jsonl", speed),
    "bench-small": ("bench_small.jsonl", small),
    "peers": ("bench_peers.jsonl", peers),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--gpu", action="store_true", help="the newest measurement on a GPU")
    arguments = parser.parse_args()
    file, table = TABLES[arguments.table]
    record = newest(RESULTS / file, gpu=arguments.gpu)
    if record is None:
        raise SystemExit(f"results/performance/{file} has no such measurement")
    print(table(record))


if __name__ == "__main__":
    main()
