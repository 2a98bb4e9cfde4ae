"""What only a GPU can show; skipped without one."""

from __future__ import annotations

import copy
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from anybatch.config.io import override
from anybatch.config.schema import ModelConfig, TrainConfig
from anybatch.models.agent import Agent, build_agent
from anybatch.models.precision import prepare_device
from anybatch.policy_phase import policy_phase
from anybatch.presets import ppg_ewma, ppo_ewma
from anybatch.runs.build import build
from anybatch.sampling.cuda_graph import GraphedAgent, can_be_recorded
from anybatch.training import estimate_advantages, resume, train
from tensor_pendulum import SETTINGS, Pendulums

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
IMAGES = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
CARTPOLE = {
    "env.id": "gym:CartPole-v1",
    "env.num_envs": 8,
    "rollout.steps": 32,
    "device": "cuda",
    "total_env_steps": 8 * 32 * 4,
    "log.tensorboard": False,
}


def agent(architecture: str = "shared", precision: str = "bf16") -> Agent:
    config = ModelConfig(architecture=architecture)  # type: ignore[arg-type]
    return build_agent(config, IMAGES, gym.spaces.Discrete(15), precision=precision, seed=0).to(GPU)  # type: ignore[arg-type]


def images(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, 64, 64, 3), dtype=torch.uint8, device=GPU)


def config(preset: object = ppo_ewma, **changes: object) -> TrainConfig:
    return override(preset(), {**CARTPOLE, **changes})  # type: ignore[operator]


@pytest.mark.parametrize("architecture", ["shared", "dual", "detach"])
def test_a_recording_acts_as_the_agent_does_and_with_its_newest_weights(architecture: str) -> None:
    prepare_device(GPU)
    live = agent(architecture)
    assert can_be_recorded(live, GPU)
    graphed = GraphedAgent(live)
    with torch.no_grad():
        for _ in range(3):
            x = images(32)
            for ours, theirs in zip(graphed(x), live(x), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
            for parameter in live.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))


def test_an_encoder_that_does_not_say_so_is_not_recorded() -> None:
    live = agent()
    live.policy.encoder.recordable = False  # type: ignore[assignment]
    assert not can_be_recorded(live, GPU)
    assert not can_be_recorded(agent(), torch.device("cpu"))


def test_fp32_is_fp32_and_not_tf32() -> None:
    prepare_device(GPU)
    gpu = agent(precision="fp32")
    cpu = copy.deepcopy(gpu).cpu()
    x = images(16)
    with torch.no_grad():
        params, value = gpu(x)
        expected_params, expected_value = cpu(x.cpu())
    # TF32 has 10 bits of mantissa: it would be off by 1e-3
    torch.testing.assert_close(params.cpu(), expected_params, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(value.cpu(), expected_value, rtol=1e-4, atol=2e-5)


def test_bf16_ratios_are_near_one_on_the_data_that_was_sampled() -> None:
    live = agent()
    x = images(256)
    with torch.no_grad():
        whole = live.action_spec.distribution(live(x)[0])
        action = whole.sample()
        pieces = torch.cat([live.policy(piece) for piece in x.split(64)])
    log_ratio = live.action_spec.distribution(pieces).log_prob(action) - whole.log_prob(action)
    assert log_ratio.abs().max() < 0.02


@pytest.mark.parametrize("preset", [ppo_ewma, ppg_ewma])
def test_the_same_seed_gives_the_same_bytes(preset: object, tmp_path: Path) -> None:
    extra = {"aux.policy_iterations": 2, "aux.minibatches": 8} if preset is ppg_ewma else {}
    logs = []
    for name in "ab":
        result = train(config(preset, **extra), tmp_path / name, seed=3, quiet=True)
        rows = (result.run_dir / "progress.csv").read_text().splitlines()
        timed = [i for i, column in enumerate(rows[0].split(",")) if "second" in column]
        logs.append([[x for i, x in enumerate(row.split(",")) if i not in timed] for row in rows])
    assert logs[0] == logs[1] and len(logs[0]) == 5


def test_images_train_to_the_same_bytes_with_cudnn(tmp_path: Path) -> None:
    weights = []
    for _ in "ab":
        prepare_device(GPU)
        live = agent("dual")
        optimizer = torch.optim.Adam(live.parameters(), fused=True)
        torch.manual_seed(0)
        for _ in range(3):
            params, value = live(images(64))
            (params.square().mean() + value.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append([x.detach().clone() for x in live.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("age", [8.0, 32.0])  # the second has a window of the noise scale open at the checkpoint
def test_a_run_goes_on_where_it_stopped(age: float, tmp_path: Path) -> None:
    changes = {"policy.center_of_mass": age}
    whole = train(config(**changes), tmp_path / "whole", seed=5, quiet=True)
    train(config(total_env_steps=8 * 32 * 2, **changes), tmp_path / "half", seed=5, quiet=True)
    resumed = resume(tmp_path / "half", total_env_steps=8 * 32 * 4, quiet=True)
    assert resumed.env_steps == whole.env_steps
    assert resumed.mean_episode_return == whole.mean_episode_return


def test_compiled_encoders_learn_the_same(tmp_path: Path) -> None:
    plain, compiled = (build(config(compile=flag), seed=1) for flag in (False, True))
    x = torch.randn(32, 4, device=GPU)
    for ours, theirs in zip(compiled.learner.agent(x), plain.learner.agent(x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for parts in (plain, compiled):
        parts.env.close()


def test_compiled_gradient_steps_learn_the_same(tmp_path: Path) -> None:
    weights = []
    for flag in (False, True):
        parts = build(config(compile=flag), seed=1)
        rollout = parts.source.next(0)
        batch, _ = estimate_advantages(rollout, rollout.reward, parts.learner.config, parts.advantage_normalizer)
        policy_phase(batch, parts.learner)
        weights.append([x.detach().clone() for x in parts.learner.agent.parameters()])
        parts.env.close()
    for plain, compiled in zip(*weights, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-3, atol=1e-4)


def test_micro_batches_fill_a_gpu() -> None:
    parts = build(config(), seed=1)
    assert parts.learner.micro_batch == 2048
    parts.env.close()


def pendulums(**changes: object) -> TrainConfig:
    base = {"env.num_envs": 4096, "device": "cuda", "log.tensorboard": False, "total_env_steps": 4 * 4096 * 16}
    return override(ppo_ewma(Pendulums, **SETTINGS, env_options={"device": "cuda"}), {**base, **changes})


def test_environments_of_tensors_stay_on_the_gpu_and_no_step_waits_for_it() -> None:
    parts = build(pendulums(), seed=1)
    parts.source.next(0)  # resets, and records the CUDA graph
    env, waits = parts.env, []
    step_tensors = env.step_tensors  # type: ignore[attr-defined]

    def strict(action: torch.Tensor) -> object:
        torch.cuda.set_sync_debug_mode("error")  # until the rollout is complete, which reads numbers
        waits.append(action.device.type)
        steps = step_tensors(action)
        if len(waits) == parts.learner.config.rollout.steps:
            torch.cuda.set_sync_debug_mode("default")
        return steps

    env.step_tensors = strict  # type: ignore[attr-defined]
    try:
        rollout = parts.source.next(0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        parts.env.close()
    assert waits == ["cuda"] * 16
    assert all(x.is_cuda for x in vars(rollout).values() if isinstance(x, torch.Tensor))


def test_environments_of_tensors_train_and_resume_on_the_gpu(tmp_path: Path) -> None:
    whole = train(pendulums(), tmp_path / "whole", seed=5, quiet=True)
    train(pendulums(total_env_steps=2 * 4096 * 16), tmp_path / "half", seed=5, quiet=True)
    resumed = resume(tmp_path / "half", total_env_steps=4 * 4096 * 16, quiet=True)
    assert resumed.mean_episode_return == whole.mean_episode_return
