"""What the ranks of the tests do; a module of its own, for they import it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anybatch import auxiliary_phase, policy_phase, training
from anybatch.callbacks import Callback, RunContext
from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.distributed.collectives import (
    all_gather,
    any_worker,
    check_equal,
    envs_per_worker,
    is_main,
    joined_process_group,
    mean_gradients_,
    mean_over_workers,
    moments_of,
    on_main,
    rank,
    world_size,
)
from anybatch.distributed.state import _tensors
from anybatch.errors import ConfigError
from anybatch.minibatches import Batch, Minibatch, deal, shuffled
from anybatch.observations import map_observation
from anybatch.phase_storage.store import AuxiliaryMinibatch
from anybatch.presets import ppg_ewma, ppo_ewma
from anybatch.runs.build import Components, build
from anybatch.runs.resharding import state_of
from anybatch.sampling.ray import concatenate_rollouts
from anybatch.sampling.rollout import Rollout, Sampled
from anybatch.system.signals import Interrupted, Interrupts
from anybatch.training import train

STEPS, MINIBATCHES = 12, 2


def small(preset: str = "ppo-ewma", *, envs: int = 4, iterations: int = 6, **changes: Any) -> TrainConfig:
    make = {"ppo-ewma": ppo_ewma, "ppg-ewma": ppg_ewma}[preset]
    config = make(
        "gym:CartPole-v1",
        num_envs=envs,
        steps=STEPS,
        minibatches=MINIBATCHES,
        total_env_steps=iterations * envs * STEPS,
        precision="fp32",
        device="cpu",
        tensorboard=False,
        model={"encoder": "mlp", "options": {"width": 8, "depth": 1}},
    )
    if preset == "ppg-ewma":
        config = override(config, {"aux": {"policy_iterations": 2, "epochs": 2, "minibatches": 4}})
    return override(config, changes)


class BatchNormEncoder(nn.Module):
    """Its statistics are those of this worker's samples."""

    def __init__(self, space: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(space.shape[0], 8), nn.BatchNorm1d(8), nn.ReLU())
        self.out_features = 8

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def exchange() -> dict[str, Any]:
    """Every small exchange once; rank r has r + 1 samples."""
    with joined_process_group():
        number = rank()
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor([1.0, 10.0]) * (number + 1)
        unused, skipped, frozen = (nn.Parameter(torch.zeros(3)) for _ in range(3))
        frozen.requires_grad_(False)
        if number == 1:  # the others left the layer out
            skipped.grad = torch.tensor([3.0, 6.0, 9.0])
        total = sum(range(1, world_size() + 1))
        mean_gradients_([unused, skipped, frozen, parameter], (number + 1) / total)
        assert skipped.grad is not None and frozen.grad is None
        found: dict[str, Any] = {"gradient": parameter.grad.tolist(), "unused": unused.grad}
        found["skipped"] = skipped.grad.tolist()
        values = torch.arange(number + 1, dtype=torch.float32) + 100 * number
        found["moments"] = [[float(x) for x in triple] for triple in moments_of(values, -values)]
        found["statistics"] = mean_over_workers(
            {"count": 7, "mean": float(number), "max_seen": float(number), "gone": float("nan")}, number + 1
        )
        found["any"] = [any_worker(False), any_worker(number == 1)]
        found["all_gather"] = all_gather({"rank": number})
        found["main"] = on_main(lambda: is_main() and f"from {number}")
        try:
            on_main(_complain)
        except ConfigError as error:
            found["error"] = str(error)
        check_equal({"same": [torch.ones(3)], "empty": []}, "at first")
        try:
            check_equal({"same": [torch.ones(3)], "odd": [torch.tensor([1.0 + (number == 1) * 1e-7])]}, "then")
        except RuntimeError as error:
            found["mismatch"] = str(error)
        interrupts = Interrupts(patience=0.0)
        if number == 1:
            interrupts.request()
        parameter.grad = torch.ones(2)
        try:
            mean_gradients_([parameter], None, interrupts)
        except Interrupted:
            found["stopped"] = True
        return found


def _complain() -> None:
    raise ConfigError("no")


class Recorded:
    """A source that keeps a copy of what it hands out."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.rollouts: list[dict[str, Any]] = []

    def next(self, iteration: int) -> Rollout:
        rollout: Rollout = self._source.next(iteration)
        state = rollout.state_dict()
        self.rollouts.append({name: x.clone() if isinstance(x, Tensor) else x for name, x in state.items()})
        return rollout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class Replayed:
    """A source that hands out the rollouts of several workers as those of one."""

    def __init__(self, source: Any, workers: list[list[dict[str, Any]]]) -> None:
        self._source = source
        self._waiting = [
            concatenate_rollouts([Rollout.from_state_dict(one, torch.device("cpu")) for one in parts])
            for parts in zip(*workers, strict=True)
        ]

    def next(self, iteration: int) -> Rollout:
        return self._waiting[iteration]

    def drain(self) -> Sampled:
        return Sampled(env_steps=self._waiting[0].reward.numel())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def recorded(config: TrainConfig, out: str) -> dict[str, Any]:
    """Train; what this rank sampled, its random numbers at the start, and what it has learned."""
    made: list[Components] = []

    def build_recorded(*args: Any, **options: Any) -> Components:
        parts = build(*args, **options)
        made.append(replace(parts, source=Recorded(parts.source)))
        return made[0]

    training.build = build_recorded
    with joined_process_group():
        start = _generators(build(config, 3))
        train(config, out, 3, quiet=True)
        return {"rollouts": made[0].source.rollouts, "start": start, "learned": learned(made[0])}


def _generators(parts: Components) -> dict[str, Tensor]:
    """The states of the generators that deal minibatches out."""
    parts.env.close()
    found = {"shuffle": parts.learner.shuffle.get_state()}
    if parts.auxiliary:
        found["auxiliary"] = parts.auxiliary._shuffle.get_state()
    return found


def learned(parts: Components) -> dict[str, Tensor]:
    """Everything that training has computed, as tensors by name."""
    state = state_of(parts.stateful)
    found = {f"agent.{name}": x for name, x in state["agent"].items()}
    found |= {f"ewma.{number}": x for number, x in enumerate(_tensors(state["proximal"]))}
    for name in ("reward_normalizer", "advantage_normalizer"):
        found |= {f"{name}.{key}": x for key, x in state[name].items() if key != "return"}
    for name, optimizer in (*parts.learner.optimizers.optimizers.items(), *_auxiliary_optimizer(parts)):
        for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
            found |= {f"{name}.{index}.{key}": x for key, x in optimizer.state[parameter].items()}
    return {name: x.detach().clone() for name, x in found.items()}


def _auxiliary_optimizer(parts: Components) -> list[tuple[str, Any]]:
    return [("aux", parts.auxiliary.optimizer)] if parts.auxiliary else []


def replay_as_one(config: TrainConfig, out: str, ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Train alone on what several ranks have sampled, on the minibatches that they have dealt out together."""
    parts_of = envs_per_worker(config.env.num_envs, len(ranks))
    starts = [sum(parts_of[:number]) for number in range(len(ranks))]
    dealers = {name: [torch.Generator() for _ in ranks] for name in ranks[0]["start"]}
    for name, generators in dealers.items():
        for generator, found in zip(generators, ranks, strict=True):
            generator.set_state(found["start"][name])
    made: list[Components] = []

    def build_replayed(*args: Any, **options: Any) -> Components:
        parts = build(*args, **options)
        made.append(replace(parts, source=Replayed(parts.source, [found["rollouts"] for found in ranks])))
        if parts.auxiliary:
            _join_pieces(parts.auxiliary.store, parts_of, starts)
        return made[0]

    def shuffled_together(batch: Batch, minibatches: int, _: torch.Generator, of: str) -> Iterator[Minibatch]:
        assert of == "trajectories"
        apart = [
            shuffled(_slice(batch, start, count), minibatches, generator)
            for start, count, generator in zip(starts, parts_of, dealers["shuffle"], strict=True)
        ]
        for pieces in zip(*apart, strict=True):
            yield _joined(pieces)

    def deal_together(_: int, minibatches: int, __: torch.Generator) -> list[tuple[Tensor, ...]]:
        segments, steps = config.aux.policy_iterations, config.rollout.steps
        apart = []
        for count, generator in zip(parts_of, dealers["auxiliary"], strict=True):
            chunks = auxiliary_phase.auxiliary_time_chunks(segments, count, steps, minibatches)
            apart.append(deal(segments * count * chunks, minibatches, generator))
        return list(zip(*apart, strict=True))

    kept = training.build, policy_phase.shuffled, auxiliary_phase.deal
    training.build, policy_phase.shuffled, auxiliary_phase.deal = build_replayed, shuffled_together, deal_together
    try:
        train(config, out, 3, quiet=True)
    finally:
        training.build, policy_phase.shuffled, auxiliary_phase.deal = kept
    return learned(made[0])


def _slice(batch: Batch, start: int, count: int) -> Batch:
    fields = {
        name: map_observation(lambda x: x[start : start + count], getattr(batch, name))
        for name in Batch.__dataclass_fields__
        if getattr(batch, name) is not None
    }
    return Batch(**fields)


def _joined(minibatches: tuple[Any, ...]) -> Any:
    names = minibatches[0].__dataclass_fields__
    columns = {name: [getattr(one, name) for one in minibatches] for name in names}
    tensors = {name: torch.cat(column) for name, column in columns.items() if isinstance(column[0], Tensor)}
    return replace(minibatches[0], **tensors)


def _join_pieces(store: Any, parts_of: list[int], starts: list[int]) -> None:
    """Let a store of all environments read the pieces that ranks have dealt out of theirs."""
    read, segments, steps, total = store.minibatch, store.layout.segments, store.layout.steps, store.layout.num_envs

    def minibatch(pieces: tuple[Tensor, ...], _: int) -> AuxiliaryMinibatch:
        found = []
        for mine, count, start in zip(pieces, parts_of, starts, strict=True):
            chunks = auxiliary_phase.auxiliary_time_chunks(segments, count, steps, 4)
            trajectory, chunk = mine // chunks, mine % chunks
            segment, env = trajectory // count, trajectory % count
            found.append(read((segment * total + start + env) * chunks + chunk, steps // chunks))
        joined: AuxiliaryMinibatch = _joined(tuple(found))
        return joined

    store.minibatch = minibatch


class Hook(Callback):
    """Takes its time at the second iteration, and then ends the run or fails."""

    def __init__(self, kind: str, seconds: float) -> None:
        self.kind, self.seconds = kind, seconds

    def after_iteration(self, run: RunContext, row: dict[str, Any]) -> None:
        row["rank"] = rank()
        if run.iteration == 2:
            time.sleep(self.seconds)
            if self.kind == "fail":
                raise ZeroDivisionError("no luck")
            run.stop("enough")


def train_hooked(config: TrainConfig, out: str, kind: str, seconds: float) -> tuple[str | None, int, bool]:
    """Train with a callback that only worker 0 has been given."""
    with joined_process_group():
        callbacks = [Hook(kind, seconds)] if is_main() else []
        result = train(config, out, 3, callbacks, quiet=True)
    return result.stopped, result.env_steps, result.interrupted


def train_rank(config: TrainConfig, out: str, trouble: tuple[str, int, int] | None = None) -> dict[str, Any]:
    """Train, or continue the run that is there; `trouble` says what happens on which rank before which iteration."""
    if trouble is not None:
        training.build = _troubled(*trouble)
    with joined_process_group():
        number = rank()
        start = time.monotonic()
        there = on_main(lambda: (Path(out) / "config.yaml").exists())
        result = training.resume(out, quiet=True) if there else train(config, out, 3, quiet=True)
    return {
        "rank": number,
        "interrupted": result.interrupted,
        "env_steps": result.env_steps,
        "return": result.mean_episode_return,
        "seconds": time.monotonic() - start,
    }


def _troubled(kind: str, where: int, when: int) -> Any:
    class Troubled:
        def __init__(self, source: Any, interrupts: Interrupts) -> None:
            self._source, self._interrupts = source, interrupts

        def next(self, iteration: int) -> Rollout:
            if iteration == when and rank() == where:
                if kind == "term":
                    os.kill(os.getpid(), signal.SIGTERM)
                elif kind == "overdue":
                    self._interrupts.request()
                    self._interrupts.request()
                    raise Interrupted
                else:
                    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
            rollout: Rollout = self._source.next(iteration)
            return rollout

        def __getattr__(self, name: str) -> Any:
            return getattr(self._source, name)

    def build_troubled(*args: Any, **options: Any) -> Components:
        parts = build(*args, **options)
        return replace(parts, source=Troubled(parts.source, parts.learner.interrupts))

    return build_troubled


def differing_weights(config: TrainConfig, out: str) -> None:
    """One rank's weights are wrong by the last bit from the second iteration on."""

    def build_spoiled(*args: Any, **options: Any) -> Components:
        parts = build(*args, **options)
        if rank() == 1:
            with torch.no_grad():
                first = next(parts.learner.agent.parameters())
                first.view(-1)[0] = torch.nextafter(first.view(-1)[0], torch.tensor(9.0))
        return parts

    training.build = build_spoiled
    train(config, out, 3, quiet=True)
