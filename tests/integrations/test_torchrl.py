"""TorchRL's losses with a target actor are our decoupled objectives, and its target actor can be our average."""

from __future__ import annotations

import copy
import math
import runpy
import sys

import pytest
import torch

pytest.importorskip("torchrl", reason="needs pip install '.[torchrl]'")

from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.objectives import ClipPPOLoss, KLPENPPOLoss, SoftUpdate

import anybatch.integrations.torchrl
import torchrl_ppo_ewma
from anybatch.errors import ConfigError
from anybatch.integrations.torchrl import EwmaUpdate
from anybatch.models.distributions import Categorical
from anybatch.objectives import decoupled_clip_loss, decoupled_kl_loss
from anybatch.proximal import EwmaProximal

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")

B = 200


def stale_data(behavior: nn.Module) -> TensorDict:
    """Samples of an older policy, with advantages of both signs."""
    observation = torch.randn(B, 4)
    with torch.no_grad():
        logits = behavior(observation)
    action = torch.distributions.Categorical(logits=logits).sample()
    logp = torch.log_softmax(logits, -1).gather(-1, action.unsqueeze(-1)).squeeze(-1)
    rest = {"advantage": torch.randn(B, 1), "value_target": torch.randn(B, 1), "logits": logits}
    return TensorDict({"observation": observation, "action": action, "action_log_prob": logp, **rest}, [B])


def three_policies(scale: float) -> tuple[nn.Sequential, nn.Sequential, nn.Sequential]:
    """theta, prox and behav: three networks, some way apart."""
    theta = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    others = [copy.deepcopy(theta) for _ in range(2)]
    with torch.no_grad():
        for other in others:
            for x in other.parameters():
                x += scale * torch.randn_like(x)
    return theta, others[0], others[1]


def torchrl_loss(cls: type, theta: nn.Sequential, prox: nn.Sequential, **options: object) -> nn.Module:
    actor, _ = torchrl_ppo_ewma.networks(4, 3)
    actor.module[0].module = theta
    module = cls(actor, None, delay_actor=True, critic_coeff=None, entropy_bonus=False, **options)
    # the target parameters of the network, in its order
    targets = {name: x for name, x in module.named_buffers() if name.startswith("target_actor_network_params")}
    assert len(targets) == len(list(prox.parameters()))
    for name, x in targets.items():
        x.data.copy_(prox.get_parameter(".".join(name.split(".")[-2:])))
    return module


def gradients(loss: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, parameters))


@pytest.mark.parametrize("scale", [0.05, 0.5])
@pytest.mark.parametrize("cap", [1.3, 100.0])
@pytest.mark.parametrize("clip", [0.1, 0.2])
def test_clip_loss_is_ours(scale: float, cap: float, clip: float) -> None:
    theta, prox, behavior = three_policies(scale)
    data = stale_data(behavior)
    module = torchrl_loss(ClipPPOLoss, theta, prox, clip_epsilon=clip, max_importance_ratio=cap)
    theirs = module(data)

    policy, proximal = Categorical(theta(data["observation"])), Categorical(prox(data["observation"]).detach())
    action, advantage = data["action"], data["advantage"].squeeze(-1)
    logp, logp_proximal = policy.log_prob(action), proximal.log_prob(action)
    mine = decoupled_clip_loss(
        logp, logp_proximal, data["action_log_prob"], advantage, clip=clip, max_importance_ratio=cap
    )
    torch.testing.assert_close(mine, theirs["loss_objective"], rtol=1e-5, atol=1e-6)
    parameters = list(module.actor_network_params.values(True, True))
    named = {tuple(x.shape): x for x in parameters}
    assert len(named) == len(parameters) == 4
    theirs_by_shape = dict(zip(named, gradients(theirs["loss_objective"], list(named.values())), strict=True))
    for x, gradient in zip(theta.parameters(), gradients(mine, list(theta.parameters())), strict=True):
        torch.testing.assert_close(gradient, theirs_by_shape[tuple(x.shape)], rtol=1e-4, atol=1e-6)
    assert float(theirs["clip_fraction"]) > 0
    # both of the two policies matter here: PPO's coupled loss, for one, is another number
    coupled = decoupled_clip_loss(logp, data["action_log_prob"], data["action_log_prob"], advantage, clip=clip)
    assert not math.isclose(coupled.item(), mine.item(), abs_tol=1e-4)


def test_kl_loss_is_ours() -> None:
    theta, prox, behavior = three_policies(0.3)
    data = stale_data(behavior)
    module = torchrl_loss(KLPENPPOLoss, theta, prox, beta=0.7, max_importance_ratio=100.0)
    theirs = module(data)["loss_objective"]
    policy, proximal = Categorical(theta(data["observation"])), Categorical(prox(data["observation"]).detach())
    mine = decoupled_kl_loss(
        policy.log_prob(data["action"]),
        data["action_log_prob"],
        data["advantage"].squeeze(-1),
        proximal.kl(policy),
        kl_coefficient=0.7,
    )
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def follow(update: type, age: float, steps: int) -> tuple[list[float], list[float]]:
    """A weight that goes 0, 1, 2, ...: the target parameter by TorchRL's updater, and by EwmaProximal."""
    theta, prox, _ = three_policies(0.0)
    module = torchrl_loss(ClipPPOLoss, theta, prox)
    source = nn.Linear(1, 1, bias=False)
    parameters = list(module.actor_network_params.values(True, True))
    for x in (*parameters, source.weight):
        x.data.zero_()
    updater = update(module, center_of_mass=age) if update is EwmaUpdate else update(module, eps=age / (1 + age))
    ours, seen, expected = EwmaProximal(source, age), [], []
    for step in range(1, steps + 1):
        for x in (*parameters, source.weight):
            x.data.fill_(float(step))
        updater.step()
        ours.after_gradient_step()
        target = next(iter(module.target_actor_network_params.values(True, True)))
        seen.append(float(target.flatten()[0]))
        expected.append(float(ours.module.weight))
    return seen, expected


def test_ewma_update_is_the_bias_corrected_average_and_soft_update_is_not() -> None:
    """theta_0 = 0, one step to 1, beta = 8/9: 9/17, where SoftUpdate gives 1/9."""
    seen, expected = follow(EwmaUpdate, 8.0, 12)
    assert seen == expected
    assert seen[0] == pytest.approx(9 / 17)
    soft, _ = follow(SoftUpdate, 8.0, 12)
    assert soft[0] == pytest.approx(1 / 9)


def test_ewma_update_saves_resets_and_refuses() -> None:
    theta, prox, _ = three_policies(0.3)
    module = torchrl_loss(ClipPPOLoss, theta, prox)
    updater = EwmaUpdate(module, 3.0)  # which starts at the present weights, whatever the target was
    target = next(iter(module.target_actor_network_params.values(True, True)))
    source = next(iter(module.actor_network_params.values(True, True)))
    assert torch.equal(target, source)
    updater.step()
    again = EwmaUpdate(module, 3.0)
    again.load_state_dict(updater.state_dict())
    assert again.terms == updater.terms == 2
    source.data.add_(1.0)
    again.reset()
    assert again.terms == 1
    assert torch.equal(target, source)
    for age in (-1.0, 0.0):  # of 0, the proximal policy would be the policy
        with pytest.raises(ConfigError, match=f"center_of_mass is {age}, but must be a finite number above 0"):
            EwmaUpdate(module, age)


def test_bf16_targets_are_copies_of_an_fp32_average() -> None:
    """Weights go from their start to 1, 2, ..., 250, which bf16 can count."""
    theta, prox, _ = three_policies(0.3)
    module, age, steps = torchrl_loss(ClipPPOLoss, theta.bfloat16(), prox.bfloat16()), 128.0, 250
    updater = EwmaUpdate(module, age)
    sources, targets = (
        list(x.values(True, True)) for x in (module.actor_network_params, module.target_actor_network_params)
    )
    start = [x.detach().float() for x in sources]
    for step in range(1, steps + 1):
        for x in sources:
            x.data.fill_(float(step))
        updater.step()
    powers = [(age / (1 + age)) ** (steps - step) for step in range(steps + 1)]
    rest = sum(step * power for step, power in enumerate(powers))
    for average, target, first in zip(updater.average, targets, start, strict=True):
        assert average.dtype == torch.float32
        assert target.dtype == torch.bfloat16
        assert torch.equal(target, average.bfloat16())
        torch.testing.assert_close(average, (powers[0] * first + rest) / sum(powers), rtol=1e-5, atol=1e-5)
    again = EwmaUpdate(module, age)
    again.load_state_dict(updater.state_dict())
    assert all(map(torch.equal, again.average, updater.average))
    again.load_state_dict({**{k: x for k, x in updater.state_dict().items() if k != "average"}})  # of fp32 targets
    assert all(torch.equal(x, target.float()) for x, target in zip(again.average, targets, strict=True))
    before = [x.clone() for x in updater.average]
    module.float()  # now the targets hold the averages themselves
    updater.step()
    weight = 1 / (1 + age) / (1 - (age / (1 + age)) ** (steps + 2))
    for average, target, previous in zip(updater.average, targets, before, strict=True):
        assert average is target
        torch.testing.assert_close(average, previous + weight * (steps - previous))


def test_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = torchrl_ppo_ewma.run(6, num_envs=4, steps=128, minibatches=4)
    assert lengths[-1] > lengths[0]
    assert capsys.readouterr().out.count("iteration") == 6


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchrl.objectives", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[torchrl\]'"):
        runpy.run_path(anybatch.integrations.torchrl.__file__)
