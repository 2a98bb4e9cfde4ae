"""PPOEWMA in Stable-Baselines3 itself: what it reduces to, what it averages, what it saves, what it refuses."""

from __future__ import annotations

import runpy
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("stable_baselines3", reason="needs pip install '.[sb3]'")

from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBufferSamples
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

import anybatch.integrations.sb3
import sb3_ppo_ewma
from anybatch.errors import ConfigError
from anybatch.integrations.sb3 import PPOEWMA


def model(cls: type[PPO] = PPOEWMA, env: str = "CartPole-v1", **changes: Any) -> Any:
    settings = {"n_steps": 32, "batch_size": 32, "n_epochs": 2, "seed": 3, "device": "cpu"} | changes
    return cls("MlpPolicy", make_vec_env(env, n_envs=2, seed=1), **settings)


def weights(of: Any) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in of.policy.state_dict().items()}


class Recorder(BaseCallback):
    """Advantages of each iteration, and the policy's weights after each gradient step."""

    def __init__(self) -> None:
        super().__init__()
        self.advantages: list[np.ndarray] = []
        self.steps: list[torch.Tensor] = []

    def _on_training_start(self) -> None:
        optimizer, parameters = self.model.policy.optimizer, list(self.model.policy.parameters())
        original = optimizer.step
        self.steps.append(torch.nn.utils.parameters_to_vector(parameters).detach())

        def step(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            self.steps.append(torch.nn.utils.parameters_to_vector(parameters).detach())

        optimizer.step = step

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.advantages.append(self.model.rollout_buffer.advantages.copy())


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_without_an_average_it_is_ppo(env: str) -> None:
    """Clipping around the behaviour policy, advantages as they are: Stable-Baselines3's own loss, step for step."""
    settings = {"normalize_advantage": False, "ent_coef": 0.01, "learning_rate": 3e-3}
    theirs = model(PPO, env, **settings).learn(192)
    mine = model(PPOEWMA, env, center_of_mass=None, **settings).learn(192)
    assert theirs.logger.name_to_value.keys() <= mine.logger.name_to_value.keys() | {"time/fps"}
    for name, x in weights(theirs).items():
        torch.testing.assert_close(weights(mine)[name], x, rtol=1e-5, atol=1e-6)
    other = model(PPOEWMA, env, center_of_mass=8.0, **settings).learn(192)
    assert any(not torch.allclose(x, weights(theirs)[name], atol=1e-6) for name, x in weights(other).items())


def test_hand_worked_loss_and_gradient() -> None:
    """pi = (1/2, 1/2), prox = (2/5, 3/5), two samples.

    a=0, A=1, behav=1/4: r = 5/4 is above 6/5, so the value is prox/behav * 6/5 = 8/5 * 6/5 = 1.92, without gradient.
    a=1, A=-1, behav=1/2: r = 5/6 is within the range, so the value is theta/behav * A = -1.
    Loss -(1.92 - 1)/2 = -0.46. Gradient of the logits, from the second sample: -1/2 * -1 * (0 - 1/2, 1 - 1/2).
    """
    one = model(ent_coef=0.0, vf_coef=0.0, normalize_advantage=False)
    average = one.memory.proximal.module
    with torch.no_grad():
        for policy, bias in ((one.policy, (0.0, 0.0)), (average, (np.log(0.4), np.log(0.6)))):
            policy.action_net.weight.zero_()
            policy.action_net.bias.copy_(torch.tensor(bias))
    data = RolloutBufferSamples(
        observations=torch.randn(2, 4),
        actions=torch.tensor([[0.0], [1.0]]),
        old_values=torch.zeros(2),
        old_log_prob=torch.tensor([0.25, 0.5]).log(),
        advantages=torch.tensor([1.0, -1.0]),
        returns=torch.zeros(2),
    )
    seen: dict[str, list[float]] = defaultdict(list)
    loss = one.loss(data, 0.2, seen)
    loss.backward()
    assert loss.item() == pytest.approx(-0.46, abs=1e-6)
    assert one.policy.action_net.bias.grad.tolist() == pytest.approx([-0.25, 0.25], abs=1e-6)
    assert seen["clip_fraction"] == [0.5]


def test_hand_worked_kl_loss_and_gradient() -> None:
    """pi = (1/2, 1/2), prox = (1/4, 3/4), beta = 2; a=0, A=1, behav=1/4: theta/behav = 2.

    KL[prox, pi] = 1/4 log(1/2) + 3/4 log(3/2) = 0.130812. Loss -(2 - 2 * 0.130812) = -1.738376. Gradient of the
    logits: -2 (1 - 1/2, -1/2) + 2 (pi - prox) = (-1, 1) + 2 (1/4, -1/4) = (-1/2, 1/2).
    """
    one = model(ent_coef=0.0, vf_coef=0.0, normalize_advantage=False, kl_coefficient=2.0)
    with torch.no_grad():
        for policy, bias in ((one.policy, (0.0, 0.0)), (one.memory.proximal.module, (np.log(0.25), np.log(0.75)))):
            policy.action_net.weight.zero_()
            policy.action_net.bias.copy_(torch.tensor(bias))
    data = RolloutBufferSamples(
        observations=torch.randn(1, 4),
        actions=torch.tensor([[0.0]]),
        old_values=torch.zeros(1),
        old_log_prob=torch.tensor([0.25]).log(),
        advantages=torch.tensor([1.0]),
        returns=torch.zeros(1),
    )
    loss = one.loss(data, 0.2, defaultdict(list))
    loss.backward()
    assert loss.item() == pytest.approx(-1.738376, abs=1e-5)
    assert one.policy.action_net.bias.grad.tolist() == pytest.approx([-0.5, 0.5], abs=1e-6)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_kl_penalty_trains_without_clipping(env: str) -> None:
    """A large coefficient holds the policy at the average, whose components of an action count together."""
    kl = {}
    for coefficient in (1e-9, 100.0):
        one = model(PPOEWMA, env, kl_coefficient=coefficient, learning_rate=1e-2, clip_range=1e-9).learn(256)
        assert np.isfinite(one.logger.name_to_value["train/loss"])
        kl[coefficient] = one.logger.name_to_value["train/approx_kl"]
    assert 0 < kl[100.0] < 0.5 * kl[1e-9]


def test_parameters_are_flat() -> None:
    """Stable-Baselines3 walks through names of tensors, and replaces some of them."""
    one = model(learning_rate=1e-2).learn(64)
    parameters = one.get_parameters()["memory"]
    assert all(isinstance(x, torch.Tensor) for x in parameters.values())
    assert parameters["terms"] == 1 + 2 * 2
    new = {"proximal.action_net.bias": torch.tensor([3.0, 4.0]), "advantages.mean": torch.tensor(7.0).double()}
    one.set_parameters({"memory": new}, exact_match=False)
    assert one.memory.proximal.module.action_net.bias.tolist() == [3.0, 4.0]
    assert one.memory.normalizer.moments()[0] == 7
    assert one.get_parameters()["memory"]["terms"] == 5
    with pytest.raises(RuntimeError, match=r"the saved one differ in advantages.squares, .*"):
        one.memory.load_state_dict(new)


def test_age_0_never_clips_and_is_the_importance_weighted_gradient() -> None:
    """The average of the last step alone is the policy itself: r = 1, and only theta/behav is left."""
    one = model(center_of_mass=1e-12, learning_rate=3e-3, normalize_advantage=False, ent_coef=0.0, vf_coef=0.0).learn(
        64
    )
    assert one.logger.name_to_value["train/clip_fraction"] == 0
    assert one.logger.name_to_value["train/approx_kl_behavior"] > 0
    data = next(one.rollout_buffer.get(64))
    loss = one.loss(data, 0.2, defaultdict(list))
    mine = torch.autograd.grad(loss, one.policy.action_net.weight)[0]
    _, logp, _ = one.policy.evaluate_actions(data.observations, data.actions.long().flatten())
    plain = -(torch.exp(logp - data.old_log_prob) * data.advantages).mean()
    torch.testing.assert_close(mine, torch.autograd.grad(plain, one.policy.action_net.weight)[0])


def test_average_runs_over_every_gradient_step_of_all_iterations() -> None:
    """beta = 1/2: theta_prox = sum 2^-(t-i) theta_i / sum 2^-(t-i), theta_0 included, over 2 iterations of 4 steps."""
    recorder = Recorder()
    one = model(center_of_mass=1.0, learning_rate=1e-2).learn(128, callback=recorder)
    steps = torch.stack(recorder.steps).double()
    assert len(steps) == 1 + 2 * 2 * 2
    factors = 0.5 ** torch.arange(len(steps) - 1, -1, -1, dtype=torch.float64)
    expected = (factors @ steps / factors.sum()).float()
    average = torch.nn.utils.parameters_to_vector(one.memory.proximal.module.parameters())
    torch.testing.assert_close(average, expected, rtol=1e-5, atol=1e-6)


def test_advantage_moments_are_over_iterations() -> None:
    """Span 3 is beta = (3-1)/(3+1) = 1/2: iterations weigh 1/4, 1/2 and 1."""
    recorder = Recorder()
    one = model(advantage_span=3.0).learn(192, callback=recorder)
    values = np.concatenate([x.ravel() for x in recorder.advantages]).astype(np.float64)
    factors = np.repeat([0.25, 0.5, 1.0], 64)
    mean = np.average(values, weights=factors)
    variance = np.average((values - mean) ** 2, weights=factors)
    assert one.memory.normalizer.moments() == pytest.approx((mean, variance), rel=1e-6)
    assert one.logger.name_to_value["train/advantage_std_used"] == pytest.approx(variance**0.5, rel=1e-6)


def test_minibatches_are_normalised_by_those_moments() -> None:
    """Moments (1, 4): advantages 3 and 7 become 1 and 3. At theta = behav the loss is minus their mean, -2."""
    one = model(ent_coef=0.0, vf_coef=0.0)
    one.memory.normalizer.update(1.0, 4.0, 10)
    observations, actions = torch.randn(2, 4), torch.zeros(2, 1)
    with torch.no_grad():
        _, logp, _ = one.policy.evaluate_actions(observations, actions.long().flatten())
    data = RolloutBufferSamples(
        observations, actions, torch.zeros(2), logp, advantages=torch.tensor([3.0, 7.0]), returns=torch.zeros(2)
    )
    assert one.loss(data, 0.2, defaultdict(list)).item() == pytest.approx(-2.0, rel=1e-6)


def test_a_saved_model_goes_on_identically(tmp_path: Path) -> None:
    one = model(center_of_mass=3.0, advantage_span=4.0, learning_rate=3e-3).learn(128)
    one.save(tmp_path / "model.zip")
    two = PPOEWMA.load(tmp_path / "model.zip", env=make_vec_env("CartPole-v1", n_envs=2, seed=1), device="cpu")
    alone = PPOEWMA.load(tmp_path / "model.zip", device="cpu")  # without an environment, as one loads it to act
    assert alone.predict(np.zeros(4, np.float32), deterministic=True)[0] in (0, 1)
    assert (two.center_of_mass, two.advantage_span, two.max_importance_ratio) == (3.0, 4.0, 100.0)
    one.set_env(make_vec_env("CartPole-v1", n_envs=2, seed=1))
    for each in (one, two):
        each.set_random_seed(11)
        each.learn(128, reset_num_timesteps=False)
    assert two.num_timesteps == one.num_timesteps == 256
    for mine, other in ((one.policy, two.policy), (one.memory.proximal.module, two.memory.proximal.module)):
        for name, x in mine.state_dict().items():
            assert torch.equal(x, other.state_dict()[name]), name
    assert one.memory.normalizer.moments() == two.memory.normalizer.moments()


@pytest.mark.parametrize("exact", [True, False])
def test_weights_of_ppo_start_the_average_anew(exact: bool) -> None:
    theirs, mine = model(PPO).learn(64), model(PPOEWMA, seed=4).learn(64)
    mine.set_parameters(theirs.get_parameters(), exact_match=exact)
    for name, x in mine.memory.proximal.module.state_dict().items():
        assert torch.equal(x, theirs.policy.state_dict()[name])
    assert mine.get_parameters()["memory"]["terms"] == 1
    with pytest.raises(ValueError, match="Names of parameters do not match"):
        mine.set_parameters({"policy": theirs.get_parameters()["policy"]}, exact_match=True)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        (PPO, {}, {}),
        (PPOEWMA, {"center_of_mass": None}, {"center_of_mass": 2.0}),
        (PPOEWMA, {}, {"center_of_mass": None}),
    ],
)
def test_a_model_saved_without_an_average_and_the_other_way(
    kind: type[PPO], before: dict[str, Any], after: dict[str, Any], tmp_path: Path
) -> None:
    """The average starts at the saved weights, and moments are kept where there are some."""
    saved = model(kind, **before).learn(64)
    saved.save(tmp_path / "model.zip")
    one = PPOEWMA.load(tmp_path / "model.zip", make_vec_env("CartPole-v1", n_envs=2, seed=1), device="cpu", **after)
    assert one.center_of_mass == after.get("center_of_mass", 8.0)
    if kind is PPOEWMA:
        assert one.memory.normalizer.moments() == saved.memory.normalizer.moments()
    if one.center_of_mass is not None:
        for name, x in one.memory.proximal.module.state_dict().items():
            assert torch.equal(x, saved.policy.state_dict()[name])
        assert one.get_parameters()["memory"]["terms"] == 1
    assert np.isfinite(one.learn(64).logger.name_to_value["train/loss"])


def test_state_dependent_exploration() -> None:
    one = model(PPOEWMA, "Pendulum-v1", use_sde=True, learning_rate=1e-2).learn(128)
    assert np.isfinite(one.logger.name_to_value["train/loss"])
    assert one.logger.name_to_value["train/approx_kl"] > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_kl": 0.01}, "target_kl is 0.01"),
        ({"clip_range_vf": 0.2}, "clip_range_vf"),
        ({"batch_size": 48}, "batch_size is 48, but must divide n_steps . n_envs = 64"),
        ({"center_of_mass": -1.0}, "center_of_mass is -1"),
        ({"center_of_mass": float("inf")}, "center_of_mass is inf"),
        ({"clip_range": float("inf")}, "clip_range is inf"),
        ({"advantage_span": 0.5}, "advantage_span is 0.5"),
        ({"advantage_span": 2.0, "normalize_advantage": False}, "normalize_advantage is False"),
        ({"max_importance_ratio": 0.5}, "max_importance_ratio is 0.5, but must be a number of at least 1"),
        ({"max_importance_ratio": None}, "max_importance_ratio is None, but must be a number"),
        ({"kl_coefficient": "1"}, "kl_coefficient is '1', but must be a finite number above 0"),
        ({"center_of_mass": True}, "center_of_mass is True"),
        ({"center_of_mass": 0.0}, "center_of_mass is 0, so the proximal policy would be the policy itself"),
        ({"kl_coefficient": 0.0}, "kl_coefficient is 0.0, but must be a finite number above 0"),
        ({"kl_coefficient": -1.0}, "kl_coefficient is -1"),
        ({"kl_coefficient": 1.0, "center_of_mass": None}, "set a center_of_mass"),
    ],
)
@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
def test_refuses_what_would_bias_it(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model(**changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [("target_kl", 0.01), ("clip_range_vf", lambda left: 0.1), ("batch_size", 48), ("kl_coefficient", -5.0)],
)
def test_refused_settings_are_refused_on_the_model_too(name: str, value: Any) -> None:
    one = model()
    setattr(one, name, value)
    with pytest.raises(ConfigError, match=name):
        one.learn(64)


def test_an_age_changed_on_the_model_is_refused() -> None:
    for name in ("center_of_mass", "advantage_span"):
        one = model()
        made = getattr(one, name)
        setattr(one, name, 64.0)
        with pytest.raises(ConfigError, match=f"{name} was changed from {made} to 64.0 after the model was made"):
            one.learn(64)


def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    returns = sb3_ppo_ewma.run(2048)
    assert returns.keys() == {1, 8}
    assert all(value > 0 for value in returns.values())
    assert "256 samples an iteration" in capsys.readouterr().out


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[sb3\]'"):
        runpy.run_path(anybatch.integrations.sb3.__file__)
