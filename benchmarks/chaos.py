"""Attacks that runs must survive: kills, signals, full disks, two processes, mutated files, odd environments.

    python benchmarks/chaos.py --minutes 10 --out results/reliability

Draws one trial after another at random until the time is up. A trial is lost if it ends in a traceback of anybatch, in
a wrong exit code or a hang, if a process is left behind, or if the run, once resumed to its end, has other rows than
one that nobody disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from anybatch.config.io import override, to_yaml
from anybatch.presets import ppg_ewma, ppo_ewma
from anybatch.runs import checkpoint
from bench_common import machine_facts

LIMIT = 240.0  # seconds for a command, also on a busy machine; a hang lasts longer
TIMES = ("seconds", "env_steps_per_second", "seconds_sampling", "seconds_policy_phase", "seconds_auxiliary_phase")
SETTINGS = {
    "env.id": "gym:CartPole-v1",
    "env.num_envs": 4,
    "rollout.steps": 64,
    "optimizer.minibatches": 4,
    "total_env_steps": 8192,
    "model.encoder": "mlp",
    "model.options": {"width": 16, "depth": 1},
    "device": "cpu",
    "precision": "fp32",
    "checkpoint_seconds": 0.2,
}
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
ASYNCHRONOUS = {"kind": "asynchronous", "deterministic": True}
VARIANTS = {
    "PPO-EWMA": override(ppo_ewma(), SETTINGS),
    "PPG-EWMA on disk": override(
        ppg_ewma(),
        {**SETTINGS, "aux.storage": "disk", "aux.policy_iterations": 8, "aux.minibatches": 4, "aux.epochs": 2},
    ),
    "asynchronous": override(ppo_ewma(), {**SETTINGS, "rollout.source": ASYNCHRONOUS}),
}
ENVS = """
import os, signal, sys, time
import gymnasium

class Odd(gymnasium.Wrapper):
    def __init__(self, what):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.what, self.steps = what, 0

    def step(self, action):
        self.steps += 1
        if self.steps == 150:
            if self.what == "exit": sys.exit(0)
            if self.what == "raise": raise ZeroDivisionError("of the environment")
            if self.what == "kill": os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "hang": time.sleep(600)
            if self.what == "swallow":
                while True:
                    try: time.sleep(1)
                    except BaseException: pass
        return super().step(action)
"""


@dataclass
class Tally:
    tried: int = 0
    lost: int = 0
    why: list[str] = field(default_factory=list)


class Lost(Exception):
    """A trial has failed."""


def start(folder: Path, *arguments: str, limit: int | None = None) -> subprocess.Popen[bytes]:
    def restrict() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    with open(folder / "output.txt", "ab") as output:
        command = [sys.executable, "-m", "anybatch", *arguments]
        return subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=ONE_THREAD, preexec_fn=restrict)


def ended(process: subprocess.Popen[bytes], folder: Path, *codes: int, may_trace: bool = False) -> int:
    try:
        code = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise Lost(f"hangs: {process.args[3:6]}") from None
    text = (folder / "output.txt").read_text(errors="replace")
    if "Traceback" in text and not may_trace:
        raise Lost(text[text.rindex("Traceback") :].strip().splitlines()[-1])
    if codes and code not in codes:
        raise Lost(f"exit code {code}: {(text.strip().splitlines() or ['no output'])[-1]}")
    return code


def rows(run: Path) -> list[dict[str, str]]:
    with open(run / "progress.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file)]


def train(variant: str) -> list[str]:
    path = ROOT / f"{variant}.yaml"
    path.write_text(to_yaml(VARIANTS[variant]))
    return ["train", str(path), "--out", "run", "--quiet"]


def finish(folder: Path, variant: str) -> None:
    """Resume to the end, or train again if there is no checkpoint, and compare with the reference."""
    run = folder / "run"
    again = checkpoint.checkpoints(run / "checkpoints") if run.is_dir() else []
    ended(start(folder, *(["resume", "run", "--quiet"] if again else train(variant))), folder, 0)
    if rows(run) != rows(references(variant)):
        raise Lost("other rows than an undisturbed run")
    if leftover := list(run.rglob(".*.tmp")):
        raise Lost(f"left behind: {leftover[0].name}")


def references(variant: str) -> Path:
    folder = ROOT / f"reference {variant}"
    if not folder.exists():
        folder.mkdir()
        ended(start(folder, *train(variant)), folder, 0)
    return folder / "run"


def killed(folder: Path, variant: str) -> None:
    references(variant)
    process = start(folder, *train(variant))
    for _ in range(RANDOM.randint(1, 2)):
        time.sleep(RANDOM.uniform(1, 8))
        process.kill()
        process.wait()
        if checkpoint.checkpoints(folder / "run" / "checkpoints"):
            process = start(folder, "resume", "run", "--quiet")
    process.kill()
    process.wait()
    finish(folder, variant)


def signalled(folder: Path, variant: str) -> None:
    references(variant)
    process = start(folder, *train(variant))
    time.sleep(RANDOM.uniform(0.2, 8))
    sent = time.monotonic()
    process.send_signal(RANDOM.choice([signal.SIGINT, signal.SIGTERM]))
    ended(process, folder, 0, 130)
    if time.monotonic() - sent > 20:
        raise Lost("a signal took more than 20 seconds")
    finish(folder, variant)


def full_disk(folder: Path, variant: str) -> None:
    references(variant)
    ended(start(folder, *train(variant), limit=RANDOM.randint(100, 60_000)), folder, 0, 1, 2)
    finish(folder, variant)


def two_processes(folder: Path, variant: str) -> None:
    references(variant)
    first = start(folder, *train(variant))
    deadline = time.monotonic() + LIMIT
    while not (folder / "run" / "progress.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    second = start(folder, *RANDOM.choice([["resume", "run", "--quiet"], train(variant)]))
    ended(second, folder, 2, 0)  # 0: the first one had ended, and resuming a finished run does nothing
    ended(first, folder, 0)
    finish(folder, variant)


NONSENSE: list[Any] = [None, -1, 0, 2**31, 10**30, 1e308, float("nan"), "x", "", [], {}, [[]] * 3, True, "../..", "é"]


def mutated_config(folder: Path, variant: str) -> None:
    shutil.copytree(references(variant), folder / "run")
    path = folder / "run" / "config.yaml"
    if RANDOM.random() < 0.3:
        data = bytearray(path.read_bytes())
        for _ in range(RANDOM.randint(1, 5)):
            data[RANDOM.randrange(len(data))] = RANDOM.randrange(256)
        path.write_bytes(bytes(data))
    else:
        values = yaml.safe_load(path.read_text())
        section = RANDOM.choice([values, *(x for x in values.values() if isinstance(x, dict) and x)])
        section[RANDOM.choice(list(section))] = RANDOM.choice(NONSENSE)
        path.write_text(yaml.safe_dump(values))
    command = RANDOM.choice([["doctor", "run"], ["eval", "run", "--episodes", "2"], ["resume", "run", "--quiet"]])
    process = start(folder, *command)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    if process.poll() is None:  # more steps to train, perhaps
        process.terminate()
    ended(process, folder, 0, 1, 2, 130)


def mutated_checkpoint(folder: Path, variant: str) -> None:
    shutil.copytree(references(variant), folder / "run")
    path = checkpoint.checkpoints(folder / "run" / "checkpoints")[-1]
    if RANDOM.random() < 0.5:
        data = bytearray(path.read_bytes())
        data[RANDOM.randrange(len(data))] ^= 1 << RANDOM.randrange(8)
        path.write_bytes(bytes(data[: RANDOM.choice([len(data), RANDOM.randrange(len(data))])]))
    else:
        content = checkpoint.load(path)
        entry: Any = content
        for _ in range(RANDOM.randint(0, 3)):
            inner = [x for x in entry.values() if isinstance(x, dict) and x]
            entry = RANDOM.choice(inner) if inner else entry
        entry[RANDOM.choice(list(entry))] = RANDOM.choice([None, -1, "x", [], {}, torch.zeros(3), float("nan")])
        checkpoint.save(path.parent, int(path.stem.split("-")[1]), content, 2)
    command = [["eval", "run", "--episodes", "2"], ["resume", "run", "--total-env-steps", "9000", "--quiet"]]
    ended(start(folder, *RANDOM.choice(command)), folder, 0, 1, 2)


def odd_environment(folder: Path, variant: str) -> None:
    (folder / "odd_env.py").write_text(ENVS)
    what = RANDOM.choice(["exit", "raise", "hang", "swallow", "kill"])
    processes = what == "kill" or RANDOM.random() < 0.5
    flags = ["--env.id", "odd_env:Odd", "--env.options", "what", what]
    flags += ["vectorization", "async"] if processes else []
    limited = what in ("hang", "swallow") and RANDOM.random() < 0.5
    flags += ["--env.step-timeout", "3"] if limited else []
    process = start(folder, *train(variant), *flags)
    if what in ("hang", "swallow") and not limited:
        deadline = time.monotonic() + LIMIT
        while not checkpoint.checkpoints(folder / "run" / "checkpoints") and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(4)
        process.terminate()
    ended(process, folder, 1, 130, may_trace=True)
    if left := alive_with(str(folder)):
        raise Lost(f"{what}: {len(left)} processes are left behind")


def orphans(folder: Path, variant: str) -> None:
    """Kill a grid, or torchrun, and look for processes of it 10 seconds later."""
    if RANDOM.random() < 0.5:
        grid = {"base": "ppo-ewma", "set": {"env.id": "gym:CartPole-v1", "total_env_steps": 10**8}, "seeds": 2}
        (folder / "grid.yaml").write_text(yaml.safe_dump(grid))
        process = start(folder, "grid", "grid.yaml", "--out", str(folder / "grid"), "--processes", "2")
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "anybatch"]
        flags = [*train("PPO-EWMA"), "--total-env-steps", "100000000", "--out", str(folder / "run")]
        with open(folder / "output.txt", "ab") as output:
            process = subprocess.Popen([*command, *flags], cwd=folder, stdout=output, stderr=output, env=ONE_THREAD)
    time.sleep(RANDOM.uniform(6, 20))
    process.kill()
    process.wait()
    time.sleep(10)
    if left := alive_with(str(folder)):
        for number in left:
            os.kill(number, signal.SIGKILL)
        raise Lost(f"{len(left)} processes live on")


def alive_with(text: str) -> list[int]:
    """Processes whose command line or working directory has a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            where = os.readlink(path / "cwd")
            if int(path.name) != os.getpid() and (text in where or text in (path / "cmdline").read_text()):
                found.append(int(path.name))
    return found


TRIALS: dict[str, Callable[[Path, str], None]] = {
    "kill -9 at random, then resume": killed,
    "SIGINT or SIGTERM at random, then resume": signalled,
    "disk full at random, then resume": full_disk,
    "two processes on one folder": two_processes,
    "config.yaml mutated": mutated_config,
    "checkpoint mutated": mutated_checkpoint,
    "misbehaving environment": odd_environment,
    "grid or torchrun killed": orphans,
}


def main() -> None:
    global ROOT, RANDOM
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/reliability"))
    parser.add_argument("--keep", type=Path, metavar="DIR", help="move the folders of lost trials there")
    arguments = parser.parse_args()
    RANDOM = random.Random(arguments.seed)
    tallies = {name: Tally() for name in TRIALS}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        ROOT = Path(root)
        number = 0
        while time.monotonic() - began < 60 * arguments.minutes:
            number += 1
            name = list(TRIALS)[(number - 1) % len(TRIALS)]
            variant, folder = RANDOM.choice(list(VARIANTS)), ROOT / f"trial {number}"
            folder.mkdir()
            tallies[name].tried += 1
            try:
                TRIALS[name](folder, variant)
            except Lost as reason:
                tallies[name].lost += 1
                tallies[name].why.append(f"{variant}: {reason}")
                print(f"LOST {name} ({variant}): {reason}", flush=True)
                if arguments.keep:
                    shutil.copytree(folder, arguments.keep / folder.name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
    lines = ["| trial | tried | lost |", "|---|---:|---:|"]
    lines += [f"| {name} | {tally.tried} | {tally.lost} |" for name, tally in tallies.items()]
    reasons = [f"- {name}: {why}" for name, tally in tallies.items() for why in tally.why]
    facts = machine_facts()
    machine = f"{facts['cores']} cores of an {facts['cpu']}, Python {facts['python']}, torch {facts['torch']}"
    head = f"# Runs under attack\n\n`make chaos`: {arguments.minutes:g} minutes, seed {arguments.seed}, {machine}.\n"
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = "\n".join([head, *lines, *(["", "Lost:", "", *reasons] if reasons else [])]) + "\n"
    (arguments.out / "README.md").write_text(text)
    print(text)
    sys.exit(1 if reasons else 0)


ROOT = Path()
RANDOM = random.Random()

if __name__ == "__main__":
    main()
