"""Rollout workers as Ray actors, with a stand-in for Ray in this process; tests/runs/test_resume_ray.py has Ray itself.

What a worker was asked for is done when it is waited for, in order; a worker that was killed never finishes the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anybatch.config.schema import TrainConfig
from anybatch.errors import AnybatchError, EnvError
from anybatch.observations import leaves
from anybatch.presets import ppo_ewma
from anybatch.runs.build import Components, build
from anybatch.sampling.ray import concatenate_rollouts
from anybatch.sampling.rollout import Rollout
from anybatch.system.signals import Interrupted

ENVS, STEPS = 4, 8


class RayError(Exception):
    pass


class RayActorError(RayError):
    pass


class ObjectLostError(RayError):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class Reference:
    """What a worker will return."""

    def __init__(self, actor: Actor, work: Callable[[], Any]) -> None:
        self.actor, self.work, self.value, self.error = actor, work, None, None
        self.done = False

    def run(self) -> None:
        if not self.done and not self.actor.dead:
            try:
                self.value = self.work()
            except Exception as error:
                self.error = RayTaskError(error)  # type: ignore[assignment]
            self.done = True


class Actor:
    """A worker in this process."""

    def __init__(self, worker: type, arguments: tuple[Any, ...]) -> None:
        self.worker = worker(*arguments)
        self.arguments = arguments
        self.dead = False
        self.asked: list[Reference] = []
        self.sample = SimpleNamespace(remote=self.ask)

    def ask(self, *arguments: Any) -> Reference:
        self.asked.append(Reference(self, lambda: self.worker.sample(*arguments)))
        return self.asked[-1]


class Ray:
    """The part of Ray that is used."""

    exceptions = SimpleNamespace(
        RayError=RayError, RayActorError=RayActorError, ObjectLostError=ObjectLostError, RayTaskError=RayTaskError
    )

    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.slow = False
        self.dies_at_once = False
        self.text = "the actor died\nand so on"
        self.cpus = 4.0
        self.initialized: dict[str, Any] | None = {}
        """With what Ray was started; None if it was not."""
        self.cluster = False
        """Whether one was there before."""
        self.gone = False

    def is_initialized(self) -> bool:
        return self.initialized is not None

    def init(self, **options: Any) -> None:
        if self.cluster and "num_cpus" in options:
            raise ValueError("When connecting to an existing cluster, num_cpus must not be provided.")
        self.initialized = options

    def shutdown(self) -> None:
        self.initialized = None

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.cpus}

    def put(self, value: dict[str, torch.Tensor]) -> Any:
        return {name: tensor.clone() for name, tensor in value.items()}

    def remote(self, worker: type) -> Any:
        def start(*arguments: Any) -> Actor:
            self.actors.append(Actor(worker, arguments))
            self.actors[-1].dead = self.dies_at_once
            return self.actors[-1]

        return SimpleNamespace(options=lambda num_cpus: SimpleNamespace(remote=start))

    def wait(self, references: list[Reference], timeout: float) -> tuple[list[Reference], list[Reference]]:
        (wanted,) = references
        if self.slow:
            return [], references
        if timeout:  # polling what is done must not do it
            for reference in wanted.actor.asked[: wanted.actor.asked.index(wanted) + 1]:
                reference.run()
        done = wanted.done or wanted.actor.dead
        return ([wanted], []) if done else ([], [wanted])

    def get(self, reference: Reference) -> Any:
        if reference.error:
            raise reference.error
        if not reference.done:
            raise RayActorError(self.text)
        return reference.value

    def kill(self, actor: Actor) -> None:
        if self.gone:
            raise RayError("no cluster")
        actor.dead = True


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    ray = Ray()
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


def config(ray_workers: int, max_lag: int = 1, **changes: Any) -> TrainConfig:
    return ppo_ewma(
        "gym:CartPole-v1",
        num_envs=ENVS,
        rollout_steps=STEPS,
        minibatches=2,
        device="cpu",
        precision="fp32",
        model={"encoder": "mlp", "options": {"width": 4, "depth": 1}},
        rollout={
            "source": {
                "kind": "asynchronous",
                "max_lag": max_lag,
                "deterministic": True,
                "ray_workers": ray_workers,
            }
        },
        **changes,
    )


def drift(parts: Components, iteration: int) -> None:
    """Stands for an iteration of learning."""
    with torch.no_grad():
        for weight in parts.learner.agent.parameters():
            weight.add_(0.01 * (iteration + 1))


def learn_statistics(parts: Components, rollout: Rollout) -> None:
    if rollout.observation_moments is not None:
        parts.learner.update_observation_normalizer(rollout.observation_moments)


def rollouts(parts: Components, iterations: range) -> list[Rollout]:
    taken = []
    for iteration in iterations:
        taken.append(parts.source.next(iteration))
        learn_statistics(parts, taken[-1])
        drift(parts, iteration)
    return taken


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_one_worker_gives_the_same_bits_as_a_thread(max_lag: int, normalize: bool, ray: Ray) -> None:
    found = []
    for workers in (0, 1):
        parts = build(config(workers, max_lag, **{"observation.normalize": normalize}), 7)
        found.append([rollout.state_dict() for rollout in rollouts(parts, range(6))])
        assert parts.source.drain().env_steps == 6 * ENVS * STEPS
        assert parts.source.close()
        parts.env.close()
    for a, b in zip(*found, strict=True):
        for name, value in a.items():
            assert torch.equal(value, b[name]) if isinstance(value, torch.Tensor) else value == b[name], name
    assert [state["version"] for state in found[1]] == [max(0, i - max_lag) for i in range(6)]
    assert len(ray.actors) == 1


def test_workers_share_the_environments(ray: Ray) -> None:
    parts = build(config(2), 7)
    (rollout,) = rollouts(parts, range(1))
    assert rollout.reward.shape == (ENVS, STEPS)
    assert len(leaves(rollout.observation)[0][:, 0].unique(dim=0)) == ENVS
    assert len({seed for actor in ray.actors for seed in actor.arguments[2:]}) == 4
    assert parts.env.num_envs == 1  # the learner keeps one for its spaces
    assert [actor.worker._sampler.env.num_envs for actor in ray.actors] == [2, 2]
    parts.source.close()
    assert all(actor.dead for actor in ray.actors)


def test_a_worker_that_dies_loses_only_what_it_had_not_finished(ray: Ray) -> None:
    undisturbed = build(config(2, max_lag=2), 7)
    expected = rollouts(undisturbed, range(6))
    parts = build(config(2, max_lag=2), 7)
    first, second = ray.actors[2:]
    seen = rollouts(parts, range(2))
    ray.wait([second.asked[2]], timeout=1)  # finished ahead of training, and kept
    second.dead = True
    seen += rollouts(parts, range(2, 6))
    assert [rollout.version for rollout in seen] == [0, 0, 0, 1, 2, 3]
    assert parts.source.drain().env_steps == 6 * ENVS * STEPS
    half = ENVS // 2
    for number, (a, b) in enumerate(zip(seen, expected, strict=True)):
        assert torch.equal(a.reward[:half], b.reward[:half])
        same = torch.equal(leaves(a.observation)[0][half:], leaves(b.observation)[0][half:])
        assert same == (number <= 2)
    assert seen[3].first[half:, 0].all()  # the new worker's environments begin an episode
    assert not first.dead and len(ray.actors) == 5
    replacement = ray.actors[4]
    assert not set(replacement.arguments[2:]) & set(second.arguments[2:])  # other seeds


def test_workers_that_keep_dying_end_the_run(ray: Ray) -> None:
    parts = build(config(2), 7)
    ray.actors[1].dead = True
    ray.dies_at_once = True
    with pytest.raises(EnvError, match=r"worker 1 of gym:CartPole-v1 has died 3 times.*: the actor died$"):
        parts.source.next(0)


def test_a_worker_that_dies_every_second_rollout_ends_the_run(ray: Ray, capsys: pytest.CaptureFixture[str]) -> None:
    parts = build(config(2, max_lag=0), 7)

    def sample() -> None:
        for iteration in range(20):
            ray.actors[-1].dead = iteration % 2 == 1
            parts.source.next(iteration)

    with pytest.raises(EnvError, match=r"worker 1 of gym:CartPole-v1 has died \d+ times, too often"):
        sample()
    assert "Ray worker 1 of gym:CartPole-v1 has died and is started again: the actor died" in capsys.readouterr().err


def test_a_worker_that_dies_now_and_then_is_replaced(ray: Ray) -> None:
    parts = build(config(2, max_lag=0), 7)
    for iteration in range(80):
        ray.actors[-1].dead = iteration % 12 == 11
        parts.source.next(iteration)
    assert len(ray.actors) == 2 + 6


def test_environments_that_cannot_be_made_in_a_worker_say_why(ray: Ray) -> None:
    # as Ray puts it: the reason is the last line of a traceback
    ray.text = "The actor died because of an error raised in its creation task, ...\n  File ...\nValueError: no ROM\n"
    ray.dies_at_once = True
    parts = build(config(2), 7)
    with pytest.raises(EnvError, match=r"has died 3 times.*: ValueError: no ROM$"):
        parts.source.next(0)


def test_errors_reach_the_learner_as_they_are(ray: Ray) -> None:
    parts = build(config(2), 7)
    error = ZeroDivisionError("the user's own")

    def fail(*_: Any) -> None:
        raise error

    ray.actors[1].worker.sample = fail
    with pytest.raises(ZeroDivisionError) as caught:
        parts.source.next(0)
    assert caught.value is error


def test_a_stop_request_ends_the_wait(ray: Ray) -> None:
    parts = build(config(2), 7)
    ray.slow = True
    for _ in range(2):
        parts.learner.interrupts.request()
    with pytest.raises(Interrupted):
        parts.source.next(0)


def test_sampling_begins_anew_after_a_checkpoint(ray: Ray) -> None:
    before = build(config(2, max_lag=2), 7)
    rollouts(before, range(4))
    after = build(config(2, max_lag=2), 7, env_stream=4)
    (sentence,) = after.source.load_state_dict(before.source.state_dict())
    assert "new episodes" in sentence
    assert [rollout.version for rollout in rollouts(after, range(4, 8))] == [4, 4, 4, 5]
    seeds = [seed for actor in ray.actors for seed in actor.arguments[2:]]
    assert len(set(seeds)) == 8  # neither the levels nor the actions of the start are repeated


def test_joined_rollouts_are_as_old_as_the_oldest(ray: Ray) -> None:
    parts = build(config(1, max_lag=0), 0)
    a, b = parts.source.next(5), parts.source.next(6)
    both = concatenate_rollouts([a, b])
    assert both.version == 5
    assert torch.equal(both.reward, torch.cat([a.reward, b.reward]))
    keyed = [replace(x, observation={"k": leaves(x.observation)[0]}) for x in (a, b)]
    assert torch.equal(leaves(concatenate_rollouts(keyed).observation)[0], leaves(both.observation)[0])


def test_workers_on_this_machine_share_its_cores(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ray gives each worker a CPU of its own, and would wait for ever for more than there are
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    ray.initialized = None
    parts = build(config(4), 0)
    assert ray.initialized is not None and ray.initialized["num_cpus"] == 4
    parts.source.close()
    parts.env.close()
    assert not ray.is_initialized()  # it was started here


def test_a_cluster_keeps_its_own_count_and_a_lack_of_cpus_is_said(ray: Ray, capsys: pytest.CaptureFixture[str]) -> None:
    ray.initialized, ray.cluster, ray.cpus = None, True, 3.0
    parts = build(config(4), 0)
    assert ray.initialized is not None and "num_cpus" not in ray.initialized
    assert "Ray's cluster has 3 CPUs, but rollout.source.ray_workers 4 need one each" in capsys.readouterr().err
    ray.cpus = 4.0
    parts.source.close()
    parts.env.close()
    parts = build(config(4), 0)
    assert capsys.readouterr().err == ""
    ray.gone = True  # the cluster has ended first
    parts.source.close()
    parts.env.close()
    assert not ray.is_initialized()


def test_without_ray_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(AnybatchError, match=r"pip install \'\.\[ray\]\'"):
        build(config(2), 0)
