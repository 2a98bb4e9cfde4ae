"""Step sizes of the ladder suite, by rule, at the default batch and on seeds of their own.

    python benchmarks/ladder_step_sizes.py run [TASK...]     # trains what is missing
    python benchmarks/ladder_step_sizes.py table             # finished tasks, into results/ladder-step-sizes

The rule: half of the smallest step size whose area under the normalised curve, averaged over the seeds 901 to 904, is
within 0.05 of the best. Larger ones hardly learn faster, and half of it keeps away from the edge of stability, where a
large batch is worse than small ones for a reason that has nothing to do with the rules for the batch.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import numpy as np

from anybatch.reproduce.stacked import Evaluations, launch, read_result, result_path
from anybatch.reproduce.suites.ladder_tasks import TASKS, config_of
from anybatch.reproduce.tables import markdown
from anybatch.system.atomic_files import write_text
from bench_common import refuse_to_shrink
from ladder_curves import normalized_curve

STEP_SIZES = tuple(0.00025 * 2**k for k in range(9))
SEEDS = (901, 902, 903, 904)
TOLERANCE = 0.05
AT = Evaluations(points=20, episodes=4)
RESULTS = Path(__file__).parent.parent / "results" / "ladder-step-sizes"


def areas(task: str, runs: Path) -> np.ndarray | None:
    """Normalised areas (step sizes, seeds), 0 after a divergence; None if a run is missing."""
    tried = [[(config_of(TASKS[task], step), seed) for seed in SEEDS] for step in STEP_SIZES]
    paths = [[result_path(runs, *run, AT) for run in row] for row in tried]
    if not all(path.exists() for row in paths for path in row):
        return None
    values = np.empty(np.shape(paths))
    for place in np.ndindex(values.shape):
        values[place] = normalized_curve(task, read_result(paths[place[0]][place[1]]), AT.points).mean()
    return values


def table(runs: Path) -> str:
    """Mean areas by task and step size, and the step size that follows."""
    rows = []
    for name, task in TASKS.items():
        found = areas(name, runs)
        if found is not None:
            means = found.mean(1)
            cells = [f"**{x:.3f}**" if x == means.max() else f"{x:.3f}" for x in means]
            rows.append([task.label, *cells, f"{chosen(means):g}"])
    return markdown(["area at step size", *(f"{step:g}" for step in STEP_SIZES), "chosen"], rows)


def chosen(means: np.ndarray) -> float:
    """The step size that follows from the mean areas (step sizes,)."""
    return STEP_SIZES[int(np.flatnonzero(means >= means.max() - TOLERANCE)[0])] / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("tasks", nargs="*", choices=[*TASKS, []], help="by default all")
    parser.add_argument("--runs", type=Path, default=Path("runs/ladder-step-sizes"))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if args.command == "run":
        tried = [config_of(TASKS[task], step) for task in args.tasks or TASKS for step in STEP_SIZES]
        configs, seeds = zip(*((config, seed) for config in tried for seed in SEEDS), strict=True)
        launch(
            configs,
            seeds,
            args.runs,
            processes=args.processes,
            evaluations=AT,
            on_done=lambda done, total: print(f"{done} of {total} runs", flush=True),
        )
        print(table(args.runs))
    else:
        RESULTS.mkdir(parents=True, exist_ok=True)
        text = table(args.runs)
        refuse_to_shrink(RESULTS / "areas.md", len(text.splitlines()))
        write_text(RESULTS / "areas.md", text + "\n")


if __name__ == "__main__":
    main()
