"""`anybatch scale --for X` prints names that X takes: its output is run against the real libraries."""

from __future__ import annotations

import shlex
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.integrations.token_objectives import Truncate
from anybatch.presets import ppg_ewma, ppo, ppo_ewma
from anybatch.scaling import scale
from anybatch.scaling.frameworks import translate

SMALL, _ = scale(ppo_ewma("gym:CartPole-v1", num_envs=16, steps=64), 8, adam_betas=True)
# The fields of Args in CleanRL's ppo.py, from its repository (there is no package of it for current PyTorch).
CLEANRL = {
    *("exp-name", "seed", "torch-deterministic", "cuda", "track", "wandb-project-name", "wandb-entity"),
    *("capture-video", "env-id", "total-timesteps", "learning-rate", "num-envs", "num-steps", "anneal-lr", "gamma"),
    *("gae-lambda", "num-minibatches", "update-epochs", "norm-adv", "clip-coef", "clip-vloss", "ent-coef", "vf-coef"),
    *("max-grad-norm", "target-kl"),
}


@pytest.mark.parametrize(
    ("config", "kind"),
    [(SMALL, "PPOEWMA"), (ppo("gym:CartPole-v1", num_envs=2), "PPO"), (ppg_ewma(num_envs=2), "PPOEWMA")],
)
def test_stable_baselines3(config: TrainConfig, kind: str) -> None:
    pytest.importorskip("stable_baselines3", reason="needs pip install '.[sb3]'")
    names: dict[str, Any] = {"ENV_ID": "CartPole-v1", "POLICY": "MlpPolicy"}
    exec(str(translate(override(config, {"total_env_steps": 1}), "sb3")), names)  # learns for one iteration
    model, optimizer = names["model"], names["model"].policy.optimizer.param_groups[0]
    assert type(model).__name__ == kind
    assert (model.n_envs, model.n_steps) == (config.env.num_envs, config.rollout.steps)
    assert model.n_envs * model.n_steps / model.batch_size == config.optimizer.minibatches
    assert optimizer["lr"] == pytest.approx(config.optimizer.step_size, rel=1e-5)
    assert optimizer["betas"] == pytest.approx(config.optimizer.adam_betas, rel=1e-6)
    assert optimizer["eps"] == config.optimizer.adam_eps
    if kind == "PPOEWMA":
        assert model.center_of_mass == pytest.approx(config.policy.center_of_mass)
        assert model.advantage_span == pytest.approx(config.advantage.span)
        assert model.kl_coefficient == (1.0 if config.policy.objective == "kl" else None)


@pytest.mark.parametrize("config", [SMALL, ppg_ewma(num_envs=2), ppo(num_envs=2, optimizer_kind="sgd")])
def test_torchrl(config: TrainConfig) -> None:
    pytest.importorskip("torchrl", reason="needs pip install '.[torchrl]'")
    from torchrl.envs import GymEnv

    import torchrl_ppo_ewma

    actor, critic = torchrl_ppo_ewma.networks(4, 2)
    names: dict[str, Any] = {"MAKE_ENV": lambda: GymEnv("CartPole-v1", categorical_action_encoding=True)}
    exec(str(translate(config, "torchrl")), names | {"actor": actor, "critic": critic}, names)
    loss, group = names["loss_module"], names["optimizer"].param_groups[0]
    assert names["env"].num_workers == config.env.num_envs
    assert names["buffer"].batch_size == config.iteration_batch / config.optimizer.minibatches
    assert group["lr"] == pytest.approx(config.optimizer.step_size, rel=1e-5)
    assert loss.delay_actor is (config.policy.proximal == "ewma")
    if config.policy.proximal == "ewma":
        assert names["average"].beta == pytest.approx(1 - 1 / (1 + config.policy.center_of_mass))
    if config.policy.objective == "kl":
        assert (float(loss.beta), loss.increment, loss.decrement) == (config.policy.kl_coefficient, 1, 1)
    names["collector"].shutdown()


@pytest.mark.parametrize(("config", "kind"), [(SMALL, "PPOEWMA"), (ppo(num_envs=2), "PPO"), (ppg_ewma(), "PPOEWMA")])
def test_rsl_rl(config: TrainConfig, kind: str) -> None:
    pytest.importorskip("rsl_rl", reason="needs pip install '.[rsl-rl]'")
    from rsl_rl.env import VecEnv
    from rsl_rl.runners import OnPolicyRunner
    from tensordict import TensorDict

    class Still(VecEnv):
        num_envs, num_actions, max_episode_length, device, cfg = 2, 3, 10, "cpu", {}

        def get_observations(self) -> TensorDict:
            return TensorDict({"policy": torch.zeros(2, 4)}, batch_size=[2])

        def step(self, actions: torch.Tensor) -> Any:
            raise NotImplementedError

    names: dict[str, Any] = {}
    exec(str(translate(config, "rsl_rl")), names)
    model = {"class_name": "MLPModel", "hidden_dims": [8]}
    actor = {**model, "distribution_cfg": {"class_name": "GaussianDistribution"}}
    groups = {"actor": ["policy"], "critic": ["policy"]}
    runner = names["runner"] | {"algorithm": names["algorithm"], "save_interval": 1, "obs_groups": groups}
    algorithm = OnPolicyRunner(Still(), {**runner, "actor": actor, "critic": model}).alg
    assert type(algorithm).__name__ == kind
    assert algorithm.storage.num_transitions_per_env == config.rollout.steps
    assert algorithm.num_mini_batches == config.optimizer.minibatches
    assert algorithm.optimizer.param_groups[0]["lr"] == pytest.approx(config.optimizer.step_size, rel=1e-5)
    if kind == "PPOEWMA":
        assert algorithm.proximal.beta == pytest.approx(1 - 1 / (1 + config.policy.center_of_mass))
        assert algorithm.normalizer.span == pytest.approx(config.advantage.span)


@pytest.mark.parametrize("config", [SMALL, ppg_ewma()])
def test_trl(config: TrainConfig, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="needs pip install '.[trl]'")
    rest = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "gradient_accumulation_steps": 2}
    rest |= {"per_device_train_batch_size": 8, "report_to": "none"}
    names: dict[str, Any] = {"GRPOConfig": lambda **x: trl.GRPOConfig(**rest, **x), "GRADIENT_ACCUMULATION_STEPS": 2}
    made = eval(str(translate(config, "trl")), names)
    assert made.learning_rate == pytest.approx(config.optimizer.step_size, rel=1e-5)
    assert made.adam_beta1 == pytest.approx(config.optimizer.adam_betas[0], rel=1e-6)
    assert made.steps_per_generation == 2 * config.optimizer.minibatches
    assert made.num_iterations == config.optimizer.policy_epochs
    assert made.entropy_coef == config.policy.entropy_coefficient == 0.01
    if config.policy.objective == "kl":
        assert made.ref_model_mixup_alpha == pytest.approx(1 / 9, rel=1e-5)


def test_our_trainers_for_trl_get_all_that_they_require() -> None:
    pytest.importorskip("trl", reason="needs pip install '.[trl]'")
    from anybatch.integrations import trl as trainers

    parameters = signature(trainers.DecoupledAsyncGRPOTrainer.__init__).parameters.values()
    required = {x.name for x in parameters if x.kind is x.KEYWORD_ONLY and x.default is x.empty}
    assert required == {"weight", "bound"}
    asynchronous = override(SMALL, {"rollout.source": {"kind": "asynchronous", "max_lag": 2}})
    for config, name in ((SMALL, "DecoupledGRPOTrainer"), (asynchronous, "DecoupledAsyncGRPOTrainer")):
        (sentence,) = [x for x in translate(config, "trl").missing if x.startswith("policy.center_of_mass")]
        passed = eval(f"dict({sentence.partition('pass ')[2].partition(' to ')[0]})", {"Truncate": Truncate})
        assert passed == {"center_of_mass": 64.0, "weight": "token", "bound": Truncate(100.0)}
        assert f"anybatch.integrations.trl.{name} " in sentence and hasattr(trainers, name)


@pytest.mark.parametrize("config", [SMALL, ppo(), ppg_ewma()])
def test_cleanrl(config: TrainConfig) -> None:
    command = str(translate(config, "cleanrl")).splitlines()[0]
    flags = [word.removeprefix("--").removeprefix("no-") for word in shlex.split(command) if word.startswith("--")]
    assert set(flags) <= CLEANRL
    assert len(flags) == len(set(flags)) >= 14
