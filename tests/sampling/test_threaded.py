"""The asynchronous source alone: fake rollouts, and weights that all have the value of the iteration."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import anybatch.sampling.threaded as actors
from anybatch.errors import EnvError
from anybatch.models.agent import Agent
from anybatch.sampling.published import load_weights, weights_of
from anybatch.sampling.rollout import Rollout, Sampled, Sampler
from anybatch.sampling.sources import OTHER_SIZE
from anybatch.sampling.threaded import Asynchronous
from anybatch.system.signals import Interrupted, Interrupts

CPU = torch.device("cpu")
STEPS = 3


class Weights(nn.Module):
    """Many parameters and a buffer, all of one value, so that a mixture of two versions shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(100)) for _ in range(30))
        self.register_buffer("count", torch.zeros(5))

    def set(self, value: float) -> None:
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.fill_(value)

    def value(self) -> float:
        (value,) = torch.cat([tensor.flatten() for tensor in self.state_dict().values()]).unique().tolist()
        return float(value)


class FakeSampler:
    """Counts rollouts; its whole state is the number of the next one."""

    def __init__(self, *, savable: bool = True) -> None:
        self.number = 0
        self.savable = savable
        self.episodes = self
        self.sampled = Sampled()

    def drain(self) -> Sampled:
        sampled, self.sampled = self.sampled, Sampled()
        return sampled

    def state_dict(self) -> dict[str, Any]:
        return {"env": self.number if self.savable and self.number else None}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        if state["env"] is None:
            return False
        self.number = state["env"]
        return True


class Setting:
    """A source, the weights that its learner trains, and what its sampler has seen."""

    def __init__(self, *, max_lag: int = 1, deterministic: bool = False, savable: bool = True) -> None:
        self.weights = Weights()
        self.sampler = FakeSampler(savable=savable)
        self.interrupts = Interrupts(patience=0.0)
        self.begun: list[tuple[int, float]] = []  # (rollout, weights)
        self.delay = lambda: 0.0
        self.failure: tuple[int, BaseException] | None = None
        self.source = Asynchronous(
            self.collect,
            cast(Sampler, self.sampler),
            cast(Agent, self.weights),
            max_lag=max_lag,
            deterministic=deterministic,
            interrupts=self.interrupts,
            device=CPU,
        )

    def collect(self, agent: Agent, *, version: int, interrupts: Interrupts) -> Rollout:
        number, value = self.sampler.number, cast(Weights, agent).value()
        self.begun.append((number, value))
        for _ in range(STEPS):
            interrupts.check()
            time.sleep(self.delay())
            assert cast(Weights, agent).value() == value == version
        if self.failure is not None and self.failure[0] == number:
            raise self.failure[1]
        self.sampler.number += 1
        self.sampler.sampled.add(Sampled(STEPS, [float(number)], [STEPS]))
        numbers = torch.full((1, STEPS), float(number))
        return Rollout(**dict.fromkeys(FIELDS, numbers), version=version)

    def train(self, iterations: range) -> list[tuple[int, int]]:
        """Take the rollouts of some iterations and change the weights; (rollout, version) of each."""
        seen = []
        for iteration in iterations:
            rollout = self.source.next(iteration)
            seen.append((int(rollout.reward[0, 0]), rollout.version))
            time.sleep(self.delay())
            self.weights.set(iteration + 1)
        return seen


FIELDS = ("observation", "action", "behavior_logp", "behavior_params", "reward", "value", "next_value")
FIELDS += ("first", "done", "terminated")


@pytest.fixture
def made() -> Iterator[Any]:
    """Makes settings, and sees to it that their threads end."""
    settings: list[Setting] = []

    def make(**options: Any) -> Setting:
        settings.append(Setting(**options))
        return settings[-1]

    yield make
    assert all(setting.source.close() for setting in settings)
    assert not samplers()


def samplers() -> list[threading.Thread]:
    # not those of calls that other tests abandoned, which stay
    return [thread for thread in threading.enumerate() if thread.name == "anybatch-sampler"]


def until(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("max_lag", [0, 1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_the_lag_is_bounded_whatever_takes_long(max_lag: int, deterministic: bool, seed: int, made: Any) -> None:
    setting = made(max_lag=max_lag, deterministic=deterministic)
    delays = random.Random(seed)
    setting.delay = lambda: delays.choice([0.0, 0.0, 0.001, 0.004])
    seen = setting.train(range(30))
    assert [rollout for rollout, _ in seen] == list(range(30))  # each once, in order
    ages = [iteration - version for iteration, (_, version) in enumerate(seen)]
    assert all(0 <= age <= max_lag for age in ages)
    if deterministic:
        assert ages == [min(iteration, max_lag) for iteration in range(30)]
    # what acted is what the rollout says, and began when the bound allowed it
    assert [value for _, value in setting.begun[:30]] == [version for _, version in seen]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_the_sampler_waits_for_the_learner(max_lag: int, deterministic: bool, made: Any) -> None:
    setting = made(max_lag=max_lag, deterministic=deterministic)
    for iteration in range(3):
        setting.train(range(iteration, iteration + 1))
        until(lambda: len(setting.begun) == iteration + max_lag + 1)  # noqa: B023
        time.sleep(0.02)
        assert len(setting.begun) == iteration + max_lag + 1
    assert len(setting.source._published) <= (max_lag + 1 if deterministic else 1)


def test_the_newest_weights_act_unless_told_otherwise(made: Any) -> None:
    ages = {}
    for deterministic in (False, True):
        setting = made(max_lag=3, deterministic=deterministic)
        setting.delay = lambda: 0.005 if threading.current_thread().name == "anybatch-sampler" else 0.0
        ages[deterministic] = [iteration - version for iteration, (_, version) in enumerate(setting.train(range(8)))]
    # a learner that waits for every rollout has published weights i - 1 by the time that rollout i begins
    assert all(age <= 1 for age in ages[False])
    assert ages[True] == [0, 1, 2, 3, 3, 3, 3, 3]


def test_weights_are_taken_over_whole(made: Any) -> None:
    # `collect` asserts that all of the actor's weights are of one version, at every step
    setting = made(max_lag=2)
    for iteration in range(50):
        setting.source.next(iteration)
        for tensor in setting.weights.state_dict().values():
            tensor.fill_(iteration + 1)
            time.sleep(0)  # the sampler takes weights over while these are half written


def test_errors_of_the_sampler_reach_the_learner_after_the_finished_rollouts(made: Any) -> None:
    setting = made(max_lag=3)
    error = EnvError("broken")
    setting.failure = (2, error)
    assert [rollout for rollout, _ in setting.train(range(2))] == [0, 1]
    for _ in range(2):
        with pytest.raises(EnvError) as caught:
            setting.source.next(2)
        assert caught.value is error


@pytest.mark.parametrize("error", [ZeroDivisionError("user's own"), KeyboardInterrupt()])
def test_any_error_reaches_the_learner(error: BaseException, made: Any) -> None:
    setting = made()
    setting.failure = (0, error)
    with pytest.raises(type(error)) as caught:
        setting.source.next(0)
    assert caught.value is error


def test_a_stop_request_ends_the_wait(made: Any) -> None:
    setting = made()
    setting.delay = lambda: 0.2
    threading.Timer(0.05, setting.interrupts.request).start()
    start = time.monotonic()
    with pytest.raises(Interrupted):
        setting.train(range(100))
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("moment", ["not started", "waiting", "sampling"])
def test_closing_ends_the_thread(moment: str, made: Any) -> None:
    setting = made()
    if moment != "not started":
        setting.train(range(1))
        until(lambda: len(setting.begun) == 2)
    if moment == "sampling":
        setting.delay = lambda: 0.05
        setting.train(range(1, 2))
        until(lambda: len(setting.begun) == 3)
    assert setting.source.close()
    assert setting.source.close()
    assert not samplers()


def test_an_environment_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "_JOIN_SECONDS", 0.05)
    setting = Setting()
    hangs = threading.Event()
    setting.delay = lambda: float(hangs.wait(30))
    setting.interrupts.request()
    with pytest.raises(Interrupted):
        setting.source.next(0)
    assert not setting.source.close()
    (thread,) = samplers()
    assert thread.daemon
    setting.delay = lambda: 0.0
    hangs.set()
    thread.join(20)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_going_on_from_a_checkpoint(max_lag: int, made: Any) -> None:
    whole = made(max_lag=max_lag, deterministic=True).train(range(12))
    before = made(max_lag=max_lag, deterministic=True)
    seen = before.train(range(5))
    if max_lag:
        until(lambda: len(before.begun) == 5 + max_lag)  # as far ahead as it may
    state = before.source.state_dict()
    assert len(state["waiting"]) <= max_lag
    after = made(max_lag=max_lag, deterministic=True)
    assert after.source.load_state_dict(state) == []
    after.weights.set(5)
    assert seen + after.train(range(5, 12)) == whole
    assert after.source.drain().episode_returns == [float(i) for i in range(5, 12)]


@pytest.mark.parametrize("was_deterministic", [True, False])
def test_a_larger_lag_than_that_of_the_checkpoint(was_deterministic: bool, made: Any) -> None:
    before = made(max_lag=1, deterministic=was_deterministic)
    before.train(range(5))
    until(lambda: len(before.begun) == 6)
    state = before.source.state_dict()
    after = made(max_lag=3, deterministic=True)
    assert after.source.load_state_dict(state) == []
    after.weights.set(5)
    ages = [iteration - version for iteration, (_, version) in enumerate(after.train(range(5, 14)), 5)]
    assert all(0 <= age <= 3 for age in ages) and ages[-3:] == [3, 3, 3]  # the weights in between are gone


def test_waiting_rollouts_of_another_length_are_sampled_again(made: Any) -> None:
    before = made(max_lag=2, deterministic=True)
    before.train(range(3))
    until(lambda: len(before.begun) == 5)
    state = before.source.state_dict()
    after = made(max_lag=2, deterministic=True)
    after.sampler.env = SimpleNamespace(num_envs=1)
    after.source._steps = STEPS + 1
    assert after.source.load_state_dict(state) == [OTHER_SIZE]
    after.weights.set(3)
    seen = [rollout for rollout, _ in after.train(range(3, 7))]
    assert seen[0] in (4, 5) and seen == list(range(seen[0], seen[0] + 4))  # 3, and perhaps 4, had waited


def test_buffers_that_checkpoints_leave_out_reach_the_copy() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(1), persistent=False)
            self.weight = nn.Parameter(torch.ones(1))

    agent, actor = cast(Agent, Scaled()), cast(Agent, Scaled())
    agent.scale.fill_(3)
    load_weights(actor, weights_of(agent))
    assert actor.scale == 3
    load_weights(actor, agent.state_dict())  # of an older checkpoint
    assert actor.scale == 3


def test_a_rollout_in_progress_is_sampled_again(made: Any) -> None:
    before = made(max_lag=1, deterministic=True)
    before.train(range(3))
    until(lambda: len(before.begun) == 4)
    before.delay = lambda: 0.05
    before.train(range(3, 4))
    until(lambda: len(before.begun) == 5)
    state = before.source.state_dict()  # in the middle of rollout 4, which acts with weights 3
    after = made(max_lag=1, deterministic=True)
    after.source.load_state_dict(state)
    after.weights.set(4)
    assert after.train(range(4, 6)) == [(4, 3), (5, 4)]


def test_without_a_state_sampling_begins_anew_and_says_so(made: Any) -> None:
    before = made(max_lag=2, deterministic=True, savable=False)
    before.train(range(6))
    state = before.source.state_dict()
    assert "waiting" not in state
    after = made(max_lag=2, deterministic=True, savable=False)
    (sentence,) = after.source.load_state_dict(state)
    assert "new episodes" in sentence
    assert "(up to 2)" in sentence
    after.weights.set(6)
    # rollouts 6 and 7 cannot act with weights 4 and 5, which are gone
    assert [version for _, version in after.train(range(6, 10))] == [6, 6, 6, 7]


def test_what_is_counted_belongs_to_the_rollouts_handed_out(made: Any) -> None:
    setting = made(max_lag=3)
    setting.train(range(2))
    until(lambda: len(setting.begun) == 5)
    sampled = setting.source.drain()
    assert (sampled.env_steps, sampled.episode_returns, sampled.episode_lengths) == (2 * STEPS, [0.0, 1.0], [3, 3])
    assert setting.source.drain().env_steps == 0
