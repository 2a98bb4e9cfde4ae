"""Compare micro-benchmarks with the stored baseline, in units of their references.

    python benchmarks/micro/compare.py MEASURED.json [--update] [--tolerance 1.5]

MEASURED.json is what `pytest benchmarks/micro --benchmark-enable --benchmark-json MEASURED.json` wrote. A benchmark's
figure is its shortest time over that of its reference in the same file. Exit code 1: one has become slower than the
baseline by more than the tolerance.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

BASELINE = Path(__file__).with_name("baseline.json")


def ratios(measured: dict[str, Any]) -> dict[str, float]:
    """Shortest time of each benchmark over that of its reference, by name.

    Args:
        measured: the content of pytest-benchmark's JSON file.

    Raises:
        KeyError: a reference was not measured.
    """
    shortest = {one["name"]: one["stats"]["min"] for one in measured["benchmarks"]}
    return {
        one["name"]: shortest[one["name"]] / shortest[f"test_{one['extra_info']['reference']}"]
        for one in measured["benchmarks"]
        if one["group"] != "references"
    }


def slower(found: dict[str, float], baseline: dict[str, float], tolerance: float) -> list[str]:
    """Names of what takes more than ``tolerance`` times its baseline."""
    return [name for name, ratio in found.items() if name in baseline and ratio > tolerance * baseline[name]]


def main() -> int:
    """Print a table; see above for the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--update", action="store_true", help="store what was measured as the baseline")
    parser.add_argument("--tolerance", type=float, default=1.5)
    arguments = parser.parse_args()
    found = ratios(json.loads(arguments.measured.read_text()))
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    print(f"{'in units of the reference':48} {'baseline':>10} {'now':>10} {'change':>8}")
    for name, ratio in found.items():
        before = baseline.get(name)
        change = f"{ratio / before - 1:+8.0%}" if before else f"{'new':>8}"
        print(f"{name:48} {before or float('nan'):10.3f} {ratio:10.3f} {change}")
    if arguments.update:
        rounded = {name: float(f"{ratio:.4g}") for name, ratio in sorted({**baseline, **found}.items())}
        BASELINE.write_text(json.dumps(rounded, indent=1) + "\n")
        return 0
    worse = slower(found, baseline, arguments.tolerance)
    for name in worse:
        print(f"{name} takes {found[name] / baseline[name]:.2f} times its baseline", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
