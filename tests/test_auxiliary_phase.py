"""The auxiliary phase: its loss by hand, its bookkeeping, and the known faults of other implementations."""

from __future__ import annotations

import copy
import errno
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anybatch.auxiliary_phase import AuxiliaryPhase
from anybatch.config.chunks import auxiliary_time_chunks
from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.config.validation import validate
from anybatch.errors import ConfigError, DivergenceError
from anybatch.minibatches import Batch
from anybatch.models.distributions import Categorical
from anybatch.objectives import auxiliary_loss
from anybatch.phase_storage.store import AuxiliaryMinibatch
from anybatch.policy_phase import policy_phase
from anybatch.presets import ppg, ppg_ewma
from anybatch.runs.build import Components, build
from anybatch.runs.run import Run
from anybatch.training import estimate_advantages, train
from small_runs import small_ppg

N_PI, EPOCHS, MINIBATCHES, ENVS, STEPS = 2, 3, 8, 4, 8


def small(preset: Callable[..., TrainConfig] = ppg_ewma, **changes: Any) -> TrainConfig:
    sizes = {"envs": ENVS, "steps": STEPS, "iterations": 4 * N_PI, "phase": N_PI, "epochs": EPOCHS}
    return validate(small_ppg(preset, **sizes, **changes))


def iterate(parts: Components) -> Batch:
    """One iteration as the training loop does it."""
    config = parts.learner.config
    rollout = parts.source.next(0)
    batch, _ = estimate_advantages(rollout, rollout.reward, config, parts.advantage_normalizer)
    policy_phase(batch, parts.learner)
    assert parts.auxiliary is not None
    parts.auxiliary.after_iteration(batch)
    return batch


@pytest.fixture
def make_due() -> Iterator[Callable[..., tuple[Components, AuxiliaryPhase, list[Batch]]]]:
    """Builds a run that stands before its first auxiliary phase, and gives the batches of its policy phase."""
    built: list[Components] = []

    def make(config: TrainConfig | None = None) -> tuple[Components, AuxiliaryPhase, list[Batch]]:
        parts = build(config or small(), 1)
        built.append(parts)
        assert parts.auxiliary is not None
        batches = []
        for _ in range(parts.learner.config.aux.policy_iterations):
            assert not parts.auxiliary.due
            batches.append(iterate(parts))
        assert parts.auxiliary.due
        return parts, parts.auxiliary, batches

    yield make
    for parts in built:
        parts.env.close()


MakeDue = Callable[..., tuple[Components, AuxiliaryPhase, list[Batch]]]


def run(auxiliary: AuxiliaryPhase, progress: float = 0.0) -> int:
    return sum(1 for _ in auxiliary.gradient_steps(progress))


def weights(module: torch.nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def moved(before: list[Tensor], module: torch.nn.Module) -> list[bool]:
    return [not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)]


# ---------------------------------------------------------------- the loss


def test_loss_by_hand() -> None:
    # KL[(1/2, 1/2), (3/4, 1/4)] = 1/2 ln(2/3) + 1/2 ln 2 = 1/2 ln(4/3); KL of equal ones is 0
    old = Categorical(torch.tensor([[0.0, 0.0], [1.0, -1.0]]))
    new = Categorical(torch.tensor([[math.log(3.0), 0.0], [1.0, -1.0]], requires_grad=True))
    kl = old.kl(new)
    assert kl.tolist() == pytest.approx([0.5 * math.log(4 / 3), 0.0])
    value = torch.tensor([1.0, 2.0], requires_grad=True)
    auxiliary_value = torch.tensor([0.0, 5.0], requires_grad=True)
    target = torch.tensor([3.0, 1.0])
    # sample 1: 1/2 (3^2) + 1/2 (2^2) = 6.5; sample 2: 1/2 (4^2) + 1/2 (1^2) = 8.5; their mean is 7.5
    loss = auxiliary_loss(value, auxiliary_value, target, kl, clone_coefficient=10.0)
    assert float(loss.detach()) == pytest.approx(7.5 + 10 * 0.25 * math.log(4 / 3))
    loss.backward()
    assert value.grad is not None
    assert auxiliary_value.grad is not None
    assert value.grad.tolist() == [-1.0, 0.5]  # (v - target)/2
    assert auxiliary_value.grad.tolist() == [-1.5, 2.0]


def test_the_kl_is_from_the_old_policy_to_the_new_one() -> None:
    # KL[old, new] is finite where KL[new, old] would be large: old is nearly certain, new is not
    old, new = Categorical(torch.tensor([[20.0, 0.0]])), Categorical(torch.tensor([[0.0, 0.0]]))
    zero = torch.zeros(1)
    assert float(auxiliary_loss(zero, zero, zero, old.kl(new))) == pytest.approx(math.log(2), abs=1e-5)
    assert float(new.kl(old)) == pytest.approx(9.307, abs=1e-3)


def test_the_first_step_of_a_phase_by_hand(make_due: MakeDue) -> None:
    """A plain computation of the first minibatch's gradient, with nothing of the phase's own code but the order."""
    parts, auxiliary, batches = make_due(small(**{"aux.minibatches": 1, "aux.epochs": 1, "aux.clone_coefficient": 0.5}))
    agent = copy.deepcopy(parts.learner.agent)
    observation = torch.cat([batch.observation.flatten(0, 1) for batch in batches])  # type: ignore[union-attr]
    target = torch.cat([batch.value_target.flatten() for batch in batches])
    params, value, auxiliary_value = agent.all_heads(observation)
    old = Categorical(params.detach())
    errors = ((value - target) ** 2).mean() / 2 + ((auxiliary_value - target) ** 2).mean() / 2
    (errors + 0.5 * old.kl(Categorical(params)).mean()).backward()
    with torch.no_grad():  # Adam's first step: step_size * g / (|g| + eps)
        for parameter in agent.parameters():
            assert parameter.grad is not None
            parameter -= 1e-2 * parameter.grad / (parameter.grad.abs() + 1e-8)
    assert run(auxiliary) == 1
    for expected, found in zip(agent.parameters(), parts.learner.agent.parameters(), strict=True):
        # where the gradient is rounding alone, so is its direction: the policy head's, whose KL is at its minimum
        sure = expected.grad.abs() > 1e-6  # type: ignore[union-attr]
        assert torch.allclose(expected[sure], found[sure], atol=1e-5)


# ---------------------------------------------------------------- bookkeeping


def test_steps_samples_and_old_params(make_due: MakeDue, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, auxiliary, batches = make_due(small(**{"micro_batch": 5}))
    observation = torch.cat([batch.observation.flatten(0, 1) for batch in batches])  # type: ignore[union-attr]
    with torch.no_grad():
        old = parts.learner.agent.policy(observation)
    target = torch.cat([batch.value_target.flatten() for batch in batches])
    seen: list[AuxiliaryMinibatch] = []
    step = auxiliary._gradient_step

    def recorded(minibatch: AuxiliaryMinibatch, add_gradients: Any) -> None:
        seen.append(minibatch)
        step(minibatch, add_gradients)

    monkeypatch.setattr(auxiliary, "_gradient_step", recorded)
    before = weights(parts.learner.agent)
    assert run(auxiliary) == EPOCHS * MINIBATCHES
    assert all(moved(before, parts.learner.agent))
    assert {len(minibatch) for minibatch in seen} == {N_PI * ENVS * STEPS // MINIBATCHES}
    counts: Counter[int] = Counter()
    mixed = 0
    for epoch in range(EPOCHS):
        for minibatch in seen[epoch * MINIBATCHES : (epoch + 1) * MINIBATCHES]:
            rows = [
                int((observation == row).all(-1).nonzero()[0])  # observations of CartPole are all different
                for row in minibatch.observation  # type: ignore[union-attr]
            ]
            counts.update(rows)
            mixed += len({row // (ENVS * STEPS) for row in rows}) > 1
            # the old policy is the one before the phase, in the last epoch as in the first
            assert torch.allclose(minibatch.old_params, old[rows], atol=1e-6)
            assert torch.equal(minibatch.value_target, target[rows])
        assert set(counts.values()) == {epoch + 1}
        assert len(counts) == N_PI * ENVS * STEPS
    first, second = (torch.cat([m.value_target for m in seen[e * MINIBATCHES : (e + 1) * MINIBATCHES]]) for e in (0, 1))
    assert not torch.equal(first, second)  # a new order every epoch
    assert mixed == 0  # 8 trajectories in 8 minibatches: each is one of them


def test_minibatches_mix_segments_and_environments(make_due: MakeDue, monkeypatch: pytest.MonkeyPatch) -> None:
    _, auxiliary, batches = make_due(small(**{"aux.minibatches": 2}))
    target = torch.cat([batch.value_target.flatten() for batch in batches])
    seen: list[set[int]] = []
    step = auxiliary._gradient_step

    def recorded(minibatch: AuxiliaryMinibatch, add_gradients: Any) -> None:
        rows = [int((target == value).nonzero()[0]) for value in minibatch.value_target]
        seen.append({row // STEPS for row in rows})
        step(minibatch, add_gradients)

    monkeypatch.setattr(auxiliary, "_gradient_step", recorded)
    run(auxiliary)
    assert all(len(trajectories) == 4 for trajectories in seen)  # whole ones, of 8
    assert any({t // ENVS for t in trajectories} == {0, 1} for trajectories in seen)


def test_minibatches_below_one_trajectory(make_due: MakeDue, monkeypatch: pytest.MonkeyPatch) -> None:
    _, auxiliary, batches = make_due(small(**{"aux.minibatches": 32}))
    target = torch.cat([batch.value_target.flatten() for batch in batches])
    rows: list[list[int]] = []
    step = auxiliary._gradient_step

    def recorded(minibatch: AuxiliaryMinibatch, add_gradients: Any) -> None:
        rows.append([int((target == value).nonzero()[0]) for value in minibatch.value_target])
        step(minibatch, add_gradients)

    monkeypatch.setattr(auxiliary, "_gradient_step", recorded)
    assert run(auxiliary) == EPOCHS * 32
    assert all(len(piece) == 2 and piece[1] == piece[0] + 1 and piece[0] % 2 == 0 for piece in rows)
    assert sorted(row for piece in rows[:32] for row in piece) == list(range(64))


def test_micro_batches_do_not_change_the_gradient(make_due: MakeDue) -> None:
    found = []
    for micro_batch in (256, 3):
        parts = build(small(), 1)
        for _ in range(N_PI):
            iterate(parts)  # identical policy phases: those minibatches are split only afterwards
        assert parts.auxiliary is not None
        parts.auxiliary._learner = replace(parts.learner, config=replace(parts.learner.config, micro_batch=micro_batch))
        run(parts.auxiliary)
        parts.env.close()
        found.append(weights(parts.learner.agent))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, atol=2e-3)  # Adam magnifies rounding where a gradient is nearly 0


def test_statistics_are_in_every_row_and_fresh_after_a_phase(make_due: MakeDue) -> None:
    _, auxiliary, _ = make_due()
    names = ["aux_value_loss", "aux_auxiliary_value_loss", "aux_clone_kl", "aux_gradient_steps"]
    before = auxiliary.statistics()
    assert list(before) == names
    assert all(math.isnan(before[name]) for name in names[:3])
    assert before["aux_gradient_steps"] == 0
    run(auxiliary)
    after = auxiliary.statistics()
    assert all(after[name] >= 0 for name in names)
    assert after["aux_gradient_steps"] == EPOCHS * MINIBATCHES
    again = auxiliary.statistics()
    assert math.isnan(again["aux_value_loss"])
    assert again["aux_gradient_steps"] == EPOCHS * MINIBATCHES


def test_a_loss_that_is_not_finite_ends_the_run(make_due: MakeDue) -> None:
    parts, auxiliary, _ = make_due()
    before = weights(parts.learner.agent)
    auxiliary.store._arrays["value_target"].write(0, torch.full((N_PI * ENVS * STEPS,), math.inf))
    with pytest.raises(DivergenceError, match="auxiliary phase"):
        run(auxiliary)
    assert not any(moved(before, parts.learner.agent))


def test_weights_that_overflow_in_a_step_end_the_run(make_due: MakeDue) -> None:
    _, auxiliary, _ = make_due(small(**{"aux.step_size": 1e39}))  # the loss before the step is finite
    steps = auxiliary.gradient_steps(0.0)
    next(steps)
    for call in (auxiliary.state_dict, lambda: list(steps)):  # no checkpoint of these weights, and no end of the phase
        with pytest.raises(DivergenceError, match=r"not finite.*lower aux\.step_size"):
            call()


@pytest.mark.parametrize("architecture", ["shared", "dual", "detach"])
def test_the_value_function_and_the_encoder_learn(architecture: str, make_due: MakeDue) -> None:
    parts, auxiliary, _ = make_due(small(**{"architecture": architecture, "aux.epochs": 40}))
    first: list[Tensor] = []
    for i, _ in enumerate(auxiliary.gradient_steps(0.0)):
        if i == MINIBATCHES - 1:
            first.append(auxiliary._sums / (i + 1))
    last = auxiliary.statistics()
    assert last["aux_value_loss"] < float(first[0][0])
    assert last["aux_auxiliary_value_loss"] < float(first[0][1])
    assert last["aux_clone_kl"] < 0.05
    assert parts.learner.agent.auxiliary_value is not None


def test_detach_trains_the_encoder_by_values_in_the_auxiliary_phase_only(make_due: MakeDue) -> None:
    config = small(ppg, architecture="detach", entropy_coefficient=0.0, **{"aux.clone_coefficient": 0.0})
    parts, auxiliary, batches = make_due(config)
    agent = parts.learner.agent
    observation = batches[0].observation.flatten(0, 1)  # type: ignore[union-attr]
    _, value = agent(observation)
    value.sum().backward()
    assert all(parameter.grad is None for parameter in agent.policy.parameters())
    before, head = weights(agent.policy.encoder), weights(agent.policy.head)
    run(auxiliary)
    assert all(moved(before, agent.policy.encoder))
    assert not any(moved(head, agent.policy.head))  # no clone loss: the policy head has no gradient at all


# ---------------------------------------------------------------- the known faults


def test_no_gradient_leaks_from_or_into_the_policy_phase(make_due: MakeDue) -> None:
    found = []
    for leak in (0.0, 1e6):
        parts, auxiliary, _ = make_due()
        agent = parts.learner.agent
        assert all(parameter.grad is None for parameter in agent.parameters())
        for parameter in agent.parameters():
            parameter.grad = torch.full_like(parameter, leak)
        next(steps := auxiliary.gradient_steps(0.0))
        found.append(weights(agent))
        for _ in steps:
            pass
        assert all(parameter.grad is None for parameter in agent.parameters())
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_the_schedule_does_not_restart_with_a_phase(make_due: MakeDue) -> None:
    _, auxiliary, _ = make_due(small(schedule="linear"))
    run(auxiliary, progress=0.25)
    assert [group["lr"] for group in auxiliary.optimizer.param_groups] == [1e-2 * 0.75]
    _, constant, _ = make_due()
    run(constant, progress=0.25)
    assert [group["lr"] for group in constant.optimizer.param_groups] == [1e-2]


def test_the_steps_sizes_of_a_run_fall_without_a_jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    gradient_steps = AuxiliaryPhase.gradient_steps

    def recorded(self: AuxiliaryPhase, progress: float) -> Iterator[None]:
        yield from gradient_steps(self, progress)
        policy = self._learner.optimizers.optimizers["joint"].param_groups[0]["lr"]
        seen.extend([policy, self.optimizer.param_groups[0]["lr"]])

    monkeypatch.setattr(AuxiliaryPhase, "gradient_steps", recorded)
    train(small(schedule="linear"), tmp_path / "run", quiet=True)
    # at the end of iterations 2, 4, 6 and 8 of 8; the policy's was set at the start of that iteration
    assert seen == pytest.approx([1e-2 * x for x in (7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0)])


def test_the_auxiliary_phase_has_an_optimiser_of_its_own_that_stays(make_due: MakeDue) -> None:
    parts, auxiliary, _ = make_due()
    policy = parts.learner.optimizers.optimizers["joint"]
    untouched = copy.deepcopy(policy.state_dict())
    own = auxiliary.optimizer
    assert own is not policy
    assert not own.state  # the policy phase has not touched it
    run(auxiliary)
    after = policy.state_dict()
    for number, state in untouched["state"].items():
        for name, value in state.items():
            assert torch.equal(after["state"][number][name], value)
    steps = EPOCHS * MINIBATCHES
    assert {float(state["step"]) for state in own.state.values()} == {steps}
    assert len(own.state) == len(list(parts.learner.agent.parameters()))
    for _ in range(N_PI):
        iterate(parts)
    run(auxiliary)
    assert auxiliary.optimizer is own
    assert {float(state["step"]) for state in own.state.values()} == {2 * steps}  # its moments live on


def test_targets_are_those_of_the_phase_and_nothing_older(make_due: MakeDue) -> None:
    parts, auxiliary, _ = make_due()
    run(auxiliary)
    assert auxiliary.store.count == 0
    assert not auxiliary.due
    batches = [iterate(parts) for _ in range(N_PI)]
    kept = auxiliary.store.minibatch(torch.arange(N_PI * ENVS), STEPS)
    assert torch.equal(kept.value_target, torch.cat([batch.value_target.flatten() for batch in batches]))
    assert auxiliary.due


def test_the_rollout_after_a_phase_is_valued_by_the_new_value_function(make_due: MakeDue) -> None:
    parts, auxiliary, _ = make_due()
    old = copy.deepcopy(parts.learner.agent)
    run(auxiliary)
    rollout = parts.source.next(0)
    with torch.no_grad():
        new = parts.learner.agent.value(rollout.observation.flatten(0, 1))  # type: ignore[union-attr]
        stale = old.value(rollout.observation.flatten(0, 1))  # type: ignore[union-attr]
    assert torch.allclose(rollout.value.flatten(), new, atol=1e-5)
    assert not torch.allclose(rollout.value.flatten(), stale, atol=1e-3)


def test_the_ewma_starts_again_after_every_phase(make_due: MakeDue, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, auxiliary, _ = make_due()
    proximal = parts.learner.proximal
    resets: list[int] = []
    reset = proximal.reset
    monkeypatch.setattr(proximal, "reset", lambda: (resets.append(1), reset()))
    average, policy = proximal.module, parts.learner.agent.policy  # type: ignore[attr-defined]
    assert any(moved(weights(average), policy))  # before: an average over the policy phase
    for steps, _ in enumerate(auxiliary.gradient_steps(0.0), start=1):
        assert len(resets) == 0, steps
    assert len(resets) == 1
    assert not any(moved(weights(average), policy))  # after: theta itself, and w = 1
    assert proximal._terms == 1  # type: ignore[attr-defined]
    start = weights(policy)
    proximal.after_gradient_step()
    assert not any(moved(start, average))
    for _ in range(2):
        for _ in range(N_PI):
            iterate(parts)
        run(auxiliary)
    assert len(resets) == 3


# ---------------------------------------------------------------- reductions and configuration


def rows(folder: Path) -> list[list[str]]:
    lines = (folder / "progress.csv").read_text().splitlines()
    header = lines[0].split(",")
    keep = [i for i, name in enumerate(header) if not name.startswith(("seconds", "env_steps_per_second", "aux_"))]
    return [[line.split(",")[i] for i in keep] for line in lines]


def test_without_epochs_it_is_ppo_with_the_same_networks(tmp_path: Path) -> None:
    train(small(**{"aux.epochs": 0}), tmp_path / "none", quiet=True)
    train(small(**{"aux.enabled": False}), tmp_path / "ppo", quiet=True)
    assert rows(tmp_path / "none") == rows(tmp_path / "ppo")
    train(small(), tmp_path / "ppg", quiet=True)
    assert rows(tmp_path / "ppg")[: N_PI + 1] == rows(tmp_path / "ppo")[: N_PI + 1]  # until the first phase
    assert rows(tmp_path / "ppg")[N_PI + 1] != rows(tmp_path / "ppo")[N_PI + 1]


def test_no_phase_follows_the_last_iteration(tmp_path: Path) -> None:
    train(small(), tmp_path / "run", quiet=True)
    lines = (tmp_path / "run" / "progress.csv").read_text().splitlines()
    column = lines[0].split(",").index("aux_gradient_steps")
    counted = [int(line.split(",")[column]) for line in lines[1:]]
    phase = EPOCHS * MINIBATCHES
    assert counted == [0, 0, phase, phase, 2 * phase, 2 * phase, 3 * phase, 3 * phase]


def test_the_order_of_the_policy_phase_does_not_depend_on_the_auxiliary_phase(make_due: MakeDue) -> None:
    parts, auxiliary, _ = make_due()
    before = parts.learner.shuffle.get_state()
    run(auxiliary)
    assert torch.equal(parts.learner.shuffle.get_state(), before)


@pytest.mark.parametrize(
    ("minibatches", "chunks"),
    [(512, 1), (8192, 1), (16384, 2), (8192 * 256, 256), (1, 1), (96, 3)],
)
def test_chunks_at_the_papers_scale(minibatches: int, chunks: int) -> None:
    steps = 256 if chunks != 3 else 255
    assert auxiliary_time_chunks(32, 256, steps, minibatches) == chunks


def test_minibatches_that_cannot_be_shared_out() -> None:
    with pytest.raises(ConfigError) as refused:
        small(**{"aux.minibatches": 3})
    sentence = str(refused.value)
    for part in ("aux.minibatches 3", "8 trajectories", "8 steps", "multiple of 3"):
        assert part in sentence
    assert "\n" not in sentence
    small(**{"aux.minibatches": 3, "aux.enabled": False})
    small(**{"aux.minibatches": 3, "aux.epochs": 0})


def test_the_progress_of_a_phase_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(Run, "show_status", lambda self, text: shown.append(text))
    train(small(total_env_steps=(N_PI + 1) * ENVS * STEPS), tmp_path / "run", quiet=True)
    phase = EPOCHS * MINIBATCHES
    assert shown == [
        "auxiliary phase: outputs of the old policy",
        *(f"auxiliary phase: gradient step {i} of {phase}" for i in range(1, phase + 1)),
    ]


def test_what_is_needed_is_said_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(small(**{"aux.storage": "disk"}), tmp_path / "run", quiet=True)
    said = capsys.readouterr().err
    assert f"the auxiliary phase stores 1.8 kB of observations: on disk in {tmp_path / 'run' / 'segments'}" in said
    assert not (tmp_path / "run" / "segments").exists()
    train(small(total_env_steps=(N_PI - 1) * ENVS * STEPS), tmp_path / "short", quiet=True)
    assert "no auxiliary phase will run: the first would start after 64 environment steps" in capsys.readouterr().err


def test_a_run_that_finds_no_room_at_its_start_can_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    config, out = small(**{"aux.storage": "disk"}), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full, raising=False)
        with pytest.raises(ConfigError, match=r"set aux\.storage ram"):
            train(config, out, quiet=True)
    train(override(config, {"aux.storage": "ram"}), out, quiet=True)
    with pytest.raises(ConfigError, match="already contains a run"):
        train(config, out, quiet=True)


def test_a_run_that_fits_nowhere_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import anybatch.phase_storage.store as segments

    monkeypatch.setattr(segments, "free_memory", lambda: 1000)
    monkeypatch.setattr(segments, "free_disk", lambda _: 1000)
    with pytest.raises(ConfigError, match=r"aux\.storage is auto"):
        train(small(), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
