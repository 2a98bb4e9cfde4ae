"""The command line under torchrun, as people start it."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import anybatch.distributed.process_group as process_group
from anybatch.errors import ConfigError
from anybatch.runs.checkpoint import load_newest
from anybatch.system.signals import Interrupts

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TRAIN = [
    *("-m", "anybatch", "train", "ppg-ewma", "--env.id", "gym:CartPole-v1", "--env.num-envs", "5", "--quiet"),
    *("--rollout.steps", "16", "--optimizer.minibatches", "2", "--total-env-steps", "4800", "--scaling.off"),
    *("--aux.policy-iterations", "4", "--aux.minibatches", "8", "--aux.epochs", "1", "--log.no-tensorboard"),
    *("--device", "cpu", "--checkpoint-seconds", "0", "--seed", "3", "--go-on", "--out"),
]


def rows(out: Path) -> list[dict[str, str]]:
    if not (out / "progress.csv").exists():
        return []
    with open(out / "progress.csv", newline="") as file:
        return list(csv.DictReader(file))


def children(pid: int) -> dict[str, int]:
    """The workers of torchrun by their rank."""
    found = {}
    for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        variables = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
        found |= {x.removeprefix(b"RANK=").decode(): int(number) for x in variables if x.startswith(b"RANK=")}
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_worker_ends_the_job_with_the_reason_and_the_same_command_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [*TORCHRUN, *TRAIN, str(out)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while len(rows(out)) < 3:
        assert job.poll() is None and time.monotonic() < deadline, job.stdout and job.stdout.read()
        time.sleep(0.05)
    os.kill(children(job.pid)["1"], signal.SIGKILL)
    killed = time.monotonic()
    said, _ = job.communicate(timeout=60)
    assert time.monotonic() - killed < 60
    assert job.returncode == 1
    assert "anybatch (worker 0): worker 1 has died or hangs" in said
    assert 3 <= len(rows(out)) < 60

    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done: 4,800 steps") == 1  # worker 0 alone speaks
    assert [int(row["env_steps"]) for row in rows(out)] == [80 * i for i in range(1, 61)]
    content, _ = load_newest(out / "checkpoints")
    assert len(content["workers"]) == 2
    assert [len(worker["reward_normalizer"]["return"]) for worker in content["workers"]] == [3, 2]
    assert not (out / "segments").exists()


@pytest.mark.slow
def test_a_program_may_train_several_times(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from anybatch.distributed.collectives import all_gather, joined_process_group, rank\n"
        "for number in range(3):\n"
        "    with joined_process_group():\n"
        "        assert all_gather((number, rank())) == [(number, 0), (number, 1)]\n"
    )
    done = subprocess.run([*TORCHRUN, str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_signals_that_torchrun_repeats_count_once() -> None:
    interrupts = Interrupts(patience=30.0, echo=20.0)
    with interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.requested and not interrupts.overdue


def test_patience_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYBATCH_WORKER_TIMEOUT", "3.5")
    assert process_group.worker_timeout() == 3.5
    for text in ("1e15", "inf"):  # more than gloo can count
        monkeypatch.setenv("ANYBATCH_WORKER_TIMEOUT", text)
        assert process_group.worker_timeout() == 7 * 24 * 3600
    for text in ("soon", "0", "-1", "nan"):
        monkeypatch.setenv("ANYBATCH_WORKER_TIMEOUT", text)
        with pytest.raises(ConfigError, match="ANYBATCH_WORKER_TIMEOUT"):
            process_group.worker_timeout()


def test_each_worker_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert [process_group.local_device(name) for name in ("auto", "cuda", "cpu")] == ["cuda:1", "cuda:1", "cpu"]
    with pytest.raises(ConfigError, match="4 workers on this machine need a GPU each"):
        process_group.local_device("cuda:0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match="2 GPUs for 4 workers"):
        process_group.local_device("auto")
    monkeypatch.delenv("RANK")
    assert process_group.local_device("cuda:0") == "cuda:0"
