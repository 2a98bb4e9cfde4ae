"""Batch size invariance on Procgen: 64 environments against 4, with all adjustments and with none.

    nice -n 19 python benchmarks/procgen_invariance.py run        # continues where it stopped; hours of two cores
    python benchmarks/procgen_invariance.py status
    python benchmarks/procgen_invariance.py collect               # finished runs into results/procgen-invariance

PPO-EWMA with one epoch and a narrow IMPALA network; three games in easy mode. ``run`` trains two runs at once, each in
a process with one thread, the first seed of everything first. It may be killed at any moment: every run continues from
its last checkpoint. Ctrl-C and SIGTERM stop it after the current iterations. Runs whose curves are in the results are
not trained again, so that several machines, one after another, can train them; to start anew, remove curves.csv.gz.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from anybatch.grid.run_folder import train_or_resume
from anybatch.runs.progress import read_progress
from anybatch.runs.run import Run
from anybatch.sampling import Sampled
from anybatch.system.atomic_files import write_text
from procgen_invariance_curves import read_curves
from procgen_invariance_jobs import TOTAL, Job, jobs, whole_lines

ROOT = Path(__file__).parent.parent
TRIES = 3
"""Times that a run is started before it counts as failed."""


def train_one(job: Job, runs: Path) -> int:
    """Train a run, or continue it; returns the exit code."""
    folder = runs / job.name
    record_episodes(folder / "episodes.csv")
    config, changes = job.config()
    result = train_or_resume(config, folder, job.seed, quiet=True, changes=changes)
    return 130 if result.interrupted else 0


def record_episodes(path: Path) -> None:
    """Have runs write each ended episode to ``path``: iteration, environment steps at its end, length and return."""
    record = Run.record
    trimmed = False

    def record_and_write(run: Run, statistics: Mapping[str, Any], sampled: Sampled) -> None:
        nonlocal trimmed
        if not trimmed:
            write_text(path, "".join(line for line in whole_lines(path) if int(line.split(",")[0]) <= run.iteration))
            trimmed = True
        ends = run.iteration + 1, run.env_steps + sampled.env_steps
        with path.open("a") as file:
            for length, value in zip(sampled.episode_lengths, sampled.episode_returns, strict=True):
                file.write(f"{ends[0]},{ends[1]},{length},{value:g}\n")
        record(run, statistics, sampled)

    Run.record = record_and_write  # type: ignore[method-assign]


def run_all(workers: int, runs: Path, stored: Collection[Job]) -> int:
    """Run every job that is neither finished nor ``stored``, ``workers`` at a time; returns the exit code."""
    runs.mkdir(parents=True, exist_ok=True)
    lock = (runs / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"another process is training the runs in {runs}; see status", file=sys.stderr)
        return 2
    stopping = told = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    waiting = deque((job, 1) for job in jobs() if job not in stored and job.env_steps(runs) < TOTAL)
    running: dict[subprocess.Popen[bytes], tuple[Job, int]] = {}
    failed = False
    while running or (waiting and not stopping):
        while waiting and len(running) < workers and not stopping:
            job, attempt = waiting.popleft()
            running[_start(job, runs, lock.fileno())] = job, attempt
        time.sleep(1)
        if stopping and not told:
            told = True
            for process in running:
                process.terminate()  # once: a second signal would abandon the iteration that it is in
        for process in [process for process in running if process.poll() is not None]:
            job, attempt = running.pop(process)
            note(f"{job.name} ended with {process.returncode}")
            if process.returncode and not stopping:
                failed = failed or attempt == TRIES
                waiting.extend([(job, attempt + 1)] if attempt < TRIES else [])
    return 130 if stopping else int(failed)


def _start(job: Job, runs: Path, lock: int) -> subprocess.Popen[bytes]:
    """Start a run in a process of its own, which holds the lock too: it may outlive this one."""
    note(f"{job.name} from {job.env_steps(runs):,} environment steps")
    command = [sys.executable, __file__, "one", "--runs", str(runs), "--job", job.name]
    with (runs / f"{job.name}.log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, pass_fds=[lock], process_group=0)


def note(text: str) -> None:
    """Print a line with the time."""
    print(time.strftime("%F %T"), text, flush=True)


def status(runs: Path, stored: Collection[Job]) -> None:
    """Print how far each run is, its last returns, and its rate while it ran."""
    total = 0
    for job in jobs():
        if job in stored:
            total += TOTAL
            print(f"{job.name:32} 100%  its curve is in the results")
            continue
        steps = job.env_steps(runs)
        total += steps
        if steps:
            progress = read_progress(runs / job.name / "progress.csv")
            seconds, value = progress["seconds"][-1], progress["mean_episode_return_400"][-1]
            age = time.time() - (runs / job.name / "progress.csv").stat().st_mtime
            print(
                f"{job.name:32} {steps / TOTAL:4.0%}  return {value:6.2f}  {steps / seconds:5.0f} steps/s  "
                + ("finished" if steps >= TOTAL else f"last row {age:.0f} s ago")
            )
    everything = TOTAL * len(jobs())
    print(f"{total:,} of {everything:,} environment steps ({total / everything:.1%})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "command", choices=("run", "status", "collect", "one"), help="one: train the run named by --job"
    )
    parser.add_argument("--workers", type=int, default=2, help="runs trained at a time")
    parser.add_argument("--job", choices=[job.name for job in jobs()])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "procgen-invariance", help="run folders")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "results" / "procgen-invariance", help="what is committed"
    )
    arguments = parser.parse_args()
    if arguments.command == "one":
        return train_one(next(job for job in jobs() if job.name == arguments.job), arguments.runs)
    stored = read_curves(arguments.results / "curves.csv.gz")
    if arguments.command == "run":
        return run_all(arguments.workers, arguments.runs, stored)
    if arguments.command == "status":
        status(arguments.runs, stored)
    else:
        from procgen_invariance_report import collect  # needs Matplotlib

        collect(arguments.runs, arguments.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
