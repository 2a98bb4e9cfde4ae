"""PPOEWMA under rsl_rl's own runner: what it reduces to, what it averages, what it saves, its options."""

from __future__ import annotations

import copy
import inspect
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("rsl_rl", reason="needs pip install '.[rsl-rl]'")

from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict

import anybatch.integrations.rsl_rl
from anybatch.errors import ConfigError, ScalingWarning
from anybatch.integrations.rsl_rl import PPOEWMA

NAME = "anybatch.integrations.rsl_rl:PPOEWMA"
FIXED: dict[str, Any] = {"schedule": "fixed", "learning_rate": 3e-3, "entropy_coef": 0.0}
MIXED = {"use_mixed_precision": True}
NOVELTY = {
    "rnd_cfg": {
        **{"num_outputs": 2, "predictor_hidden_dims": [4], "target_hidden_dims": [4], "weight": 0.1},
        **{"state_normalization": True, "reward_normalization": True},
    }
}


class Point(VecEnv):
    """Points in the plane that an action pushes; the reward is minus the squared distance from the origin."""

    def __init__(self, num_envs: int = 8) -> None:
        self.num_envs, self.num_actions, self.max_episode_length, self.device, self.cfg = num_envs, 2, 16, "cpu", {}
        self.episode_length_buf = torch.arange(num_envs) % self.max_episode_length
        self.generator = torch.Generator().manual_seed(1)
        self.place = self.start(num_envs)
        self.unwrapped, self.step_dt = self, 1.0

    def start(self, count: int) -> Tensor:
        return torch.randn(count, 2, generator=self.generator)

    def get_observations(self) -> TensorDict:
        return TensorDict({"policy": self.place.clone()}, batch_size=[self.num_envs])

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Tensor]]:
        self.place = (self.place + 0.3 * actions).clamp(-3, 3)
        reward = -self.place.square().sum(1)
        self.episode_length_buf = self.episode_length_buf + 1
        done = self.episode_length_buf >= self.max_episode_length
        self.episode_length_buf = torch.where(done, 0, self.episode_length_buf)
        self.place = torch.where(done.unsqueeze(1), self.start(self.num_envs), self.place)
        return self.get_observations(), reward, done.long(), {"time_outs": done}


def mirrored(env: Any, obs: TensorDict | None, actions: Tensor | None) -> tuple[TensorDict | None, Tensor | None]:
    """Everything twice, the second time with the plane turned by half."""
    both = None if obs is None else TensorDict({"policy": torch.cat([obs["policy"], -obs["policy"]])}, [2 * len(obs)])
    return both, None if actions is None else torch.cat([actions, -actions])


SYMMETRY = {
    "symmetry_cfg": {
        **{"data_augmentation_func": mirrored, "use_data_augmentation": True},
        **{"use_mirror_loss": True, "mirror_loss_coeff": 0.1},
    }
}


def runner(
    name: str = NAME, recurrent: bool = False, normalization: bool = False, seed: int = 0, **algorithm: Any
) -> OnPolicyRunner:
    kind = "RNNModel" if recurrent else "MLPModel"
    network: dict[str, Any] = {"class_name": kind, "hidden_dims": [16], "obs_normalization": normalization}
    network |= {"rnn_type": "gru", "rnn_hidden_dim": 8, "rnn_num_layers": 1} if recurrent else {}
    config = {
        "num_steps_per_env": 8,
        "save_interval": 100,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"], "rnd_state": ["policy"]},
        "algorithm": {
            "class_name": name,
            "num_learning_epochs": 2,
            "num_mini_batches": 2,
            "rnd_cfg": None,
            **algorithm,
        },
        "actor": {**network, "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 0.5}},
        "critic": network,
    }
    torch.manual_seed(seed)
    return OnPolicyRunner(Point(), copy.deepcopy(config), log_dir=None, device="cpu")


def weights(of: OnPolicyRunner) -> dict[str, Tensor]:
    models = {"actor": of.alg.actor, "critic": of.alg.critic, **({"rnd": of.alg.rnd} if of.alg.rnd else {})}
    return {f"{name}.{key}": x.clone() for name, model in models.items() for key, x in model.state_dict().items()}


def recorded(of: OnPolicyRunner) -> list[Tensor]:
    """The actor's weights at the start, and after each gradient step that follows."""
    parameters = list(of.alg.actor.parameters())
    steps, step = [torch.nn.utils.parameters_to_vector(parameters).detach().clone()], of.alg.optimizer.step

    def record(*args: Any, **keywords: Any) -> None:
        step(*args, **keywords)
        steps.append(torch.nn.utils.parameters_to_vector(parameters).detach().clone())

    of.alg.optimizer.step = record
    return steps


@pytest.mark.filterwarnings("ignore::anybatch.errors.ScalingWarning")
@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize(
    "changes", [{}, {"schedule": "adaptive", "use_clipped_value_loss": True}, MIXED, NOVELTY, SYMMETRY]
)
def test_without_an_average_it_is_rsl_rl_s_ppo(recurrent: bool, changes: dict[str, Any]) -> None:
    """Clipping around the behaviour policy, each minibatch normalised: the same weights after three iterations."""
    if not changes.keys() <= inspect.signature(anybatch.integrations.rsl_rl.PPO).parameters.keys():
        pytest.skip("an option of rsl_rl from 5.5")
    if recurrent and changes == SYMMETRY:
        with pytest.raises(ValueError, match="not supported for recurrent"):  # by rsl_rl
            runner(NAME, recurrent, **changes)
        return
    options = {**FIXED, "use_clipped_value_loss": False, "normalize_advantage_per_mini_batch": True, **changes}
    options["normalization"] = True
    theirs = runner("PPO", recurrent, **options)
    mine = runner(NAME, recurrent, center_of_mass=None, **options)
    for each in (theirs, mine):
        torch.manual_seed(5)
        each.learn(3)
    assert mine.alg.learning_rate == theirs.alg.learning_rate
    for name, x in weights(theirs).items():  # the statistics of observations among them
        torch.testing.assert_close(weights(mine)[name], x, rtol=1e-5, atol=1e-6)
    other = runner(NAME, recurrent, **options)
    torch.manual_seed(5)
    other.learn(3)
    assert any(not torch.allclose(x, weights(theirs)[name], atol=1e-6) for name, x in weights(other).items())


def test_hand_worked_loss_and_gradient() -> None:
    """Unit Gaussians, one action of the first axis; theta's mean 0, the average's 1, A = 2.

    a = 1: log theta/prox = -(1 - 0)/2 + 0 = -1/2, r = e^-1/2 = 0.607 is below 0.8, but A > 0 keeps it: with
    log behav = log theta - 1, theta/behav = e, loss -2 e. Its gradient by the mean: -2 e (a - 0) = -2 e.
    """
    alg = runner(**FIXED).alg
    for actor, mean in ((alg.actor, 0.0), (alg.proximal.module, 1.0)):
        with torch.no_grad():
            for x in actor.mlp.parameters():
                x.zero_()
            actor.mlp[-1].bias[0] = mean
            actor.distribution.std_param.fill_(1.0)
    observations = TensorDict({"policy": torch.zeros(1, 2)}, [1])
    alg.actor(observations, stochastic_output=True)
    action = torch.tensor([[1.0, 0.0]])
    batch = alg.storage.Batch(
        observations=observations,
        actions=action,
        advantages=torch.tensor([[2.0]]),
        old_actions_log_prob=alg.actor.get_output_log_prob(action).detach().unsqueeze(1) - 1,
    )
    seen: Any = {name: [] for name in ("surrogate", "entropy", "kl_proximal", "clip_fraction")}
    loss = alg._policy_loss(batch, 1, seen)
    loss.backward()
    e = 2.718281828
    assert loss.item() == pytest.approx(-2 * e, rel=1e-5)
    assert alg.actor.mlp[-1].bias.grad[0].item() == pytest.approx(-2 * e, rel=1e-5)
    assert seen["clip_fraction"][0].item() == 1
    assert seen["kl_proximal"][0].item() == pytest.approx(0.5, rel=1e-5)  # means 1 apart


def test_average_runs_over_every_gradient_step_of_all_iterations() -> None:
    """beta = 1/2: theta_prox = sum 2^-(t-i) theta_i / sum 2^-(t-i), theta_0 included, over 3 iterations of 4 steps."""
    one = runner(center_of_mass=1.0, **FIXED)
    steps = recorded(one)
    one.learn(3)
    thetas = torch.stack(steps).double()
    assert len(thetas) == 1 + 3 * 2 * 2
    factors = 0.5 ** torch.arange(len(thetas) - 1, -1, -1, dtype=torch.float64)
    average = torch.nn.utils.parameters_to_vector(one.alg.proximal.module.parameters())
    torch.testing.assert_close(average, (factors @ thetas / factors.sum()).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recurrent", [False, True])
def test_age_0_never_clips(recurrent: bool) -> None:
    """The average of the last step alone is the policy itself, with the observation statistics of the rollout."""
    one = runner(recurrent=recurrent, normalization=True, center_of_mass=1e-12, **FIXED)
    losses, update = [], one.alg.update

    def record() -> dict[str, float]:
        losses.append(update())
        return losses[-1]

    one.alg.update = record
    one.learn(3)
    assert all(loss["clip_fraction"] == 0 and abs(loss["kl_proximal"]) < 1e-6 for loss in losses)
    assert losses[0].keys() == {"surrogate", "value", "entropy", "kl_proximal", "clip_fraction"}


def test_advantage_moments_are_over_iterations() -> None:
    """Span 3 is beta = (3-1)/(3+1) = 1/2: iterations weigh 1/4, 1/2 and 1; as rsl_rl leaves its storage, normalised."""
    one = runner(advantage_span=3.0, **FIXED)
    raw, compute = [], one.alg.compute_returns

    def record(obs: Any) -> None:
        compute(obs)
        raw.append((one.alg.storage.returns - one.alg.storage.values).double().flatten())
        used = one.alg.storage.advantages.double().flatten()
        mean, variance = one.alg.normalizer.moments()
        torch.testing.assert_close(used * variance**0.5 + mean, raw[-1], rtol=1e-5, atol=1e-5)

    one.alg.compute_returns = record
    one.learn(3)
    factors = torch.tensor([0.25, 0.5, 1.0]).double().repeat_interleave(64)
    values = torch.cat(raw)
    mean = (factors * values).sum() / factors.sum()
    variance = (factors * (values - mean).square()).sum() / factors.sum()
    assert one.alg.normalizer.moments() == pytest.approx((mean.item(), variance.item()), rel=1e-6)


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_saved_run_goes_on_identically(tmp_path: Path, recurrent: bool) -> None:
    options = {"center_of_mass": 3.0, "advantage_span": 4.0, **FIXED}
    one, two = runner(recurrent=recurrent, **options), runner(recurrent=recurrent, seed=9, **options)
    one.learn(2)
    one.save(str(tmp_path / "model.pt"))
    two.load(str(tmp_path / "model.pt"))
    one.env = Point()
    for each in (one, two):
        if recurrent:  # a checkpoint has no hidden states
            each.alg.actor.reset(hidden_state=torch.zeros(1, 8, 8))
            each.alg.critic.reset(hidden_state=torch.zeros(1, 8, 8))
        torch.manual_seed(7)
        each.learn(2)
    for name, x in weights(one).items():
        assert torch.equal(weights(two)[name], x), name
    for name, x in one.alg.proximal.module.state_dict().items():
        assert torch.equal(two.alg.proximal.module.state_dict()[name], x), name
    assert one.alg.normalizer.moments() == two.alg.normalizer.moments()


def test_weights_of_ppo_start_the_average(tmp_path: Path) -> None:
    theirs, mine = runner("PPO", **FIXED), runner(seed=4, **FIXED)
    theirs.learn(1)
    mine.learn(1)
    theirs.save(str(tmp_path / "ppo.pt"))
    mine.save(str(tmp_path / "ewma.pt"))
    for name, only_actor in (("ppo.pt", None), ("ewma.pt", {"actor": True})):
        mine.learn(1)
        mine.load(str(tmp_path / name), only_actor)
        for key, x in mine.alg.proximal.module.state_dict().items():
            assert torch.equal(x, mine.alg.actor.state_dict()[key])
        assert mine.alg.normalizer.moments()[1] == 0
    runner("PPO", **FIXED).load(str(tmp_path / "ewma.pt"))  # and PPO takes ours


def test_symmetry_evaluates_the_average_on_mirrored_samples() -> None:
    """An age near 0 never clips: the average is the policy on mirrored samples, too, whatever behaved there."""
    for age in (1e-12, 8.0):
        one = runner(center_of_mass=age, **SYMMETRY, **FIXED)
        rows, proximal = [], one.alg._proximal
        one.alg._proximal = lambda batch, n, f=proximal, r=rows: r.append((len(batch.observations), n)) or f(batch, n)
        losses, update = [], one.alg.update
        one.alg.update = lambda u=update, seen=losses: seen.append(u()) or seen[-1]
        one.learn(2)
        assert set(rows) == {(64, 32)}
        assert losses[-1]["symmetry"] > 0
        assert (losses[-1]["clip_fraction"] == 0) is (age < 1)


def test_adaptive_step_sizes_follow_the_kl_from_the_average() -> None:
    """At an age near 0 that KL is 0, and 0 is no reason to change; with an old average the target is soon exceeded."""
    still = runner(center_of_mass=1e-12, schedule="adaptive", learning_rate=1e-3, desired_kl=1e-3)
    still.learn(2)
    assert still.alg.learning_rate == pytest.approx(1e-3, rel=1e-6)
    slowed = runner(center_of_mass=1000.0, schedule="adaptive", learning_rate=1e-2, desired_kl=1e-6)
    slowed.learn(2)
    assert slowed.alg.learning_rate < 1e-3
    assert slowed.alg.optimizer.param_groups[0]["lr"] == slowed.alg.learning_rate


@pytest.mark.parametrize("recurrent", [False, True])
def test_learns(recurrent: bool) -> None:
    one = runner(recurrent=recurrent, schedule="fixed", learning_rate=3e-3, gamma=0.9)
    rewards, step = [], one.env.step

    def record(actions: Tensor) -> Any:
        result = step(actions)
        rewards.append(result[1].mean().item())
        return result

    one.env.step = record
    one.learn(60)
    first, last = (sum(x) / len(x) for x in (rewards[:64], rewards[-64:]))
    assert last > 0.5 * first


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"center_of_mass": -1.0}, "center_of_mass is -1.0"),
        ({"center_of_mass": float("inf")}, "center_of_mass is inf"),
        ({"advantage_span": 0.5}, "advantage_span is 0.5"),
        ({"advantage_span": 2.0, "normalize_advantage_per_mini_batch": True}, "leaves it unused"),
        ({"max_importance_ratio": 0.5}, "max_importance_ratio is 0.5, but must be a number of at least 1"),
        ({"center_of_mass": 0.0}, "center_of_mass is 0, so the proximal policy would be the policy itself"),
    ],
)
def test_refusals(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        runner(**changes)


@pytest.mark.parametrize("name", ["use_clipped_value_loss", "normalize_advantage_per_mini_batch"])
def test_what_depends_on_the_batch_is_warned_of(name: str) -> None:
    with pytest.warns(ScalingWarning, match=name):
        runner(**{name: True})


def test_it_is_a_ppo() -> None:
    assert issubclass(PPOEWMA, anybatch.integrations.rsl_rl.PPO)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rsl_rl.algorithms", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[rsl-rl\]'"):
        runpy.run_path(anybatch.integrations.rsl_rl.__file__)
