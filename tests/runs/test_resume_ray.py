"""Rollout workers as Ray actors, in a Ray instance on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from anybatch.config.io import to_yaml
from anybatch.config.schema import TrainConfig
from anybatch.errors import EnvError, UserCodeError
from anybatch.observations import leaves
from anybatch.runs.build import build
from anybatch.runs.checkpoint import checkpoints
from anybatch.sampling.ray import RayActors
from anybatch.system.signals import Interrupted
from anybatch.training import resume, train
from runs.test_resume import ENVS, ITERATION, STEPS, differences, final_state, rows, stopped
from runs.test_resume_async import INTERRUPTED, asynchronous, learned, walk

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    tests = Path(__file__).parent.parent
    path = os.pathsep.join([str(tests), str(tests.parent)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("RAY_worker_niceness", "0")  # on a busy machine Ray's workers would not get a turn
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


def with_ray(config: TrainConfig, workers: int) -> TrainConfig:
    source = replace(config.rollout.source, ray_workers=workers)
    return replace(config, rollout=replace(config.rollout, source=source))


@pytest.mark.parametrize("lag", [0, 2])
def test_one_worker_is_the_deterministic_schedule(lag: int, tmp_path: Path) -> None:
    config = asynchronous(lag)
    train(config, tmp_path / "thread", seed=4, quiet=True)
    train(with_ray(config, 1), tmp_path / "ray", seed=4, quiet=True)
    assert rows(tmp_path / "thread") == rows(tmp_path / "ray")
    assert differences(learned(tmp_path / "thread"), learned(tmp_path / "ray")) == []


def test_workers_share_the_environments(tmp_path: Path) -> None:
    config = with_ray(asynchronous(1), 2)
    for out in ("a", "b"):
        train(config, tmp_path / out, quiet=True)
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert [int(row["env_steps"]) for row in rows(tmp_path / "a")] == [ITERATION * i for i in range(1, 7)]
    assert [int(row["staleness_iterations"]) for row in rows(tmp_path / "a")] == [0, 1, 1, 1, 1, 1]
    made = build(config, 0)
    rollout = made.source.next(0)
    made.source.close()
    made.env.close()
    assert rollout.reward.shape == (ENVS, STEPS)
    first = leaves(rollout.observation)[0][:, 0]
    assert len(first.unique(dim=0)) == ENVS  # no two environments are the same


def test_a_worker_that_is_killed_is_replaced() -> None:
    made = build(with_ray(asynchronous(2), 2), 0)
    source = made.source
    assert isinstance(source, RayActors)
    seen = [source.next(iteration) for iteration in range(3)]
    pids = ray.get([worker.__ray_call__.remote(lambda _: os.getpid()) for worker in source._workers])
    os.kill(pids[1], signal.SIGKILL)
    seen += [source.next(iteration) for iteration in range(3, 9)]
    again = ray.get([worker.__ray_call__.remote(lambda _: os.getpid()) for worker in source._workers])
    assert again[0] == pids[0] and again[1] != pids[1]
    assert [rollout.version for rollout in seen] == [0, 0, 0, 1, 2, 3, 4, 5, 6]
    # the other worker's environments go on; those of the new one begin an episode, once
    half = ENVS // 2
    restarts = [bool(rollout.first[half:, 0].all()) for rollout in seen]
    assert restarts[0] and sum(restarts) >= 2
    assert source.drain().env_steps == 9 * ITERATION  # nothing twice, nothing lost
    source.close()
    made.env.close()


def test_workers_that_keep_dying_end_the_run(tmp_path: Path) -> None:
    config = with_ray(walk({"kind": "asynchronous"}, trouble="die", at=5), 2)
    with pytest.raises(EnvError, match=r"has died 3 times"):
        train(config, tmp_path / "run", quiet=True)


def test_errors_of_a_worker_reach_the_learner(tmp_path: Path) -> None:
    for trouble, error in (("raise", UserCodeError), ("nan", EnvError)):
        with pytest.raises(error):
            train(with_ray(walk({"kind": "asynchronous"}, trouble=trouble, at=40), 2), tmp_path / trouble, quiet=True)
        assert len(rows(tmp_path / trouble)) == 2


def test_stop_and_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = with_ray(asynchronous(1), 2)
    assert stopped(config, tmp_path / "run", 3).interrupted
    assert not resume(tmp_path / "run", quiet=True).interrupted
    assert "new episodes" in capsys.readouterr().err
    assert [int(row["staleness_iterations"]) for row in rows(tmp_path / "run")] == [0, 1, 1, 0, 1, 1]


def test_a_stop_request_ends_the_wait() -> None:
    made = build(with_ray(walk({"kind": "asynchronous"}, trouble="hang", at=3), 2), 0)
    for _ in range(2):
        made.learner.interrupts.request()
    start = time.monotonic()
    with pytest.raises(Interrupted):
        made.source.next(0)
    made.source.close()
    made.env.close()
    assert time.monotonic() - start < 30


def test_ctrl_c_ends_the_program_and_its_workers_within_seconds(tmp_path: Path) -> None:
    config = with_ray(walk({"kind": "asynchronous"}, iterations=10**6, checkpoint_seconds=0.0), 2)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "config.yaml"), str(tmp_path / "run")]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        end = time.monotonic() + 180
        while len(checkpoints(tmp_path / "run" / "checkpoints")) < 2 and time.monotonic() < end:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the workers as well
        start = time.monotonic()
        _, said = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert time.monotonic() - start < 45  # most of it is Ray's own end
    assert final_state(tmp_path / "run")["run"]["iteration"] > 0
