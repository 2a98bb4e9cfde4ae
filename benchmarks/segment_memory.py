"""Peak memory of the auxiliary phase's data: kept in memory, and in files.

    python benchmarks/segment_memory.py [--gigabytes 1] [--passes 2]

Fills a phase of 64x64x3 observations segment by segment, then reads it in the paper's minibatches (16 an iteration,
4,096 samples at full size), each storage in a process of its own. What counts is the peak resident memory beyond that
of the same program with nothing stored; the operating system's file cache is not part of it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def measure(kind: str, gigabytes: float, passes: int, folder: Path) -> dict[str, float]:
    import gymnasium as gym
    import numpy as np
    import torch

    from anybatch.minibatches import deal
    from anybatch.phase_storage.layout import layout_of
    from anybatch.phase_storage.store import SegmentStore

    torch.set_num_threads(1)
    space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    num_envs, steps = 16, 256
    segments = max(1, round(gigabytes * 1e9 / (num_envs * steps * (64 * 64 * 3 + 64))))
    layout = layout_of(space, 15, segments=segments, num_envs=num_envs, steps=steps)
    observation = torch.randint(0, 256, (num_envs, steps, 64, 64, 3), dtype=torch.uint8)
    target = torch.zeros(num_envs, steps)
    before = peak_megabytes()
    if kind == "nothing":
        return {"megabytes": 0.0, "peak": before, "read": 0.0, "write": 0.0}
    store = SegmentStore(layout, kind, folder / "segments")
    store.open()
    start = time.perf_counter()
    while not store.full:
        store.append(observation, target)
    written = time.perf_counter()
    for cut in range(0, store.samples, 256):
        store.write_old_params(cut, torch.zeros(min(256, store.samples - cut), 15))
    generator = torch.Generator().manual_seed(0)
    reading = time.perf_counter()
    largest = 0
    for _ in range(passes):
        for share in deal(segments * num_envs, segments, generator):  # num_envs trajectories, as at full size
            # as in the auxiliary phase, a minibatch is gone before the next one is read
            largest = max(largest, store.minibatch(share, steps).observation.nbytes)
    read = time.perf_counter() - reading
    total = layout.total_bytes / 1e6
    store.discard()
    return {
        "megabytes": total,
        "minibatch": largest / 1e6,
        "peak": peak_megabytes(),
        "write": total / (written - start),
        "read": passes * total / read,
    }


def peak_megabytes() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None, help="where the files go; a temporary folder by default")
    parser.add_argument("--only", choices=["nothing", "ram", "disk"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments.gigabytes, arguments.passes, arguments.folder)))
        return
    with tempfile.TemporaryDirectory(prefix="anybatch-segments-", dir=arguments.folder) as folder:
        found = {}
        for kind in ("nothing", "ram", "disk"):
            numbers = ["--gigabytes", str(arguments.gigabytes), "--passes", str(arguments.passes)]
            command = [sys.executable, __file__, "--only", kind, "--folder", folder, *numbers]
            found[kind] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    base = found["nothing"]["peak"]
    size = found["ram"]["megabytes"]
    print(f"segments: {size:,.0f} MB; one minibatch: {found['ram']['minibatch']:,.1f} MB")
    print(f"{'storage':8} {'peak':>10} {'beyond':>10} {'of data':>8} {'write':>11} {'read':>11}")
    print(f"{'nothing':8} {base:>7,.0f} MB")
    for kind in ("ram", "disk"):
        row = found[kind]
        beyond = row["peak"] - base
        print(
            f"{kind:8} {row['peak']:>7,.0f} MB {beyond:>7,.0f} MB {beyond / size:>8.1%} "
            f"{row['write']:>6,.0f} MB/s {row['read']:>6,.0f} MB/s"
        )


if __name__ == "__main__":
    main()
