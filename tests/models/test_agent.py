"""Agents: architectures, gradient flow, copies, precision."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from anybatch.config.schema import GaussianConfig, ModelConfig
from anybatch.errors import ConfigError
from anybatch.models.agent import Agent, build_agent
from anybatch.models.precision import resolve_device, resolve_precision
from anybatch.observations import Sequences, leaves, map_observation

IMAGE = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
VECTOR = gym.spaces.Box(-1, 1, (5,))
ACTIONS = gym.spaces.Discrete(15)
CPU = torch.device("cpu")


def vector_agent(architecture: str, *, seed: int = 0, auxiliary_head: bool = True) -> Agent:
    config = ModelConfig(architecture=architecture)  # type: ignore[arg-type]
    return build_agent(config, VECTOR, ACTIONS, auxiliary_head=auxiliary_head, seed=seed)


def gradient_norm(module: torch.nn.Module) -> float:
    return sum(float(p.grad.abs().sum()) for p in module.parameters() if p.grad is not None)


def observations(count: int = 4) -> torch.Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(0))


def test_shared_impala_has_the_published_number_of_parameters() -> None:
    # Stack 3->16: 3*9*16+16 = 448, and four 16->16 of 16*9*16+16 = 2320: 9728.
    # Stack 16->32: 16*9*32+32 = 4640, and four of 32*9*32+32 = 9248: 41632. Stack 32->32: five of 9248: 46240.
    # 64 halves three times to 8: dense 8*8*32*256+256 = 524544. Heads 256*15+15 = 3855 and 257. Sum 626256.
    agent = build_agent(ModelConfig(), IMAGE, ACTIONS)
    assert sum(p.numel() for p in agent.parameters()) == 626_256
    dual = build_agent(ModelConfig(architecture="dual"), IMAGE, ACTIONS, auxiliary_head=True)
    assert sum(p.numel() for p in dual.parameters()) == 626_256 + 622_144 + 257


@pytest.mark.parametrize("architecture", ["shared", "dual", "detach"])
def test_outputs_and_head_initialisation(architecture: str) -> None:
    agent = vector_agent(architecture)
    params, value = agent(observations())
    assert (params.shape, value.shape) == ((4, 15), (4,))
    assert params.dtype == value.dtype == torch.float32
    torch.testing.assert_close(agent.value(observations()), value)
    torch.testing.assert_close(agent.policy(observations()), params)
    all_params, all_value, auxiliary = agent.all_heads(observations())
    torch.testing.assert_close((all_params, all_value), (params, value))
    assert auxiliary.shape == (4,)
    for head in (agent.policy.head, agent.value_head, agent.auxiliary_value):
        assert head is not None
        torch.testing.assert_close(head.weight.norm(dim=1), torch.full((head.weight.shape[0],), 0.1))
        assert (head.bias == 0).all()


def test_value_gradient_reaches_the_policy_encoder_only_when_shared() -> None:
    for architecture, expected in (("shared", True), ("dual", False), ("detach", False)):
        for compute in (lambda a: a(observations())[1], lambda a: a.value(observations())):
            agent = vector_agent(architecture)
            compute(agent).square().sum().backward()
            assert (gradient_norm(agent.policy.encoder) > 0) is expected
            assert gradient_norm(agent.value_head) > 0
            trained = {id(p) for p in agent.value_parameters()}
            assert trained == {id(p) for p in agent.parameters() if p.grad is not None}


def test_auxiliary_phase_gradients() -> None:
    # The auxiliary value always trains the policy's encoder; the value does except under dual, so under detach too.
    for architecture, expected in (("shared", True), ("dual", False), ("detach", True)):
        agent = vector_agent(architecture)
        agent.all_heads(observations())[1].square().sum().backward()
        assert (gradient_norm(agent.policy.encoder) > 0) is expected
        agent.zero_grad()
        agent.all_heads(observations())[2].square().sum().backward()
        assert gradient_norm(agent.policy.encoder) > 0
        assert gradient_norm(agent.value_head) == 0


def test_parameter_groups() -> None:
    for architecture in ("shared", "dual", "detach"):
        agent = vector_agent(architecture)
        policy, value = ({id(p) for p in g} for g in (agent.policy_parameters(), agent.value_parameters()))
        assert bool(policy & value) is (architecture == "shared")
        auxiliary = {id(p) for p in agent.auxiliary_value.parameters()}  # type: ignore[union-attr]
        assert policy | value | auxiliary == {id(p) for p in agent.parameters()}
        assert not auxiliary & (policy | value)


def test_all_heads_needs_the_auxiliary_head() -> None:
    with pytest.raises(ConfigError, match="auxiliary"):
        vector_agent("shared", auxiliary_head=False).all_heads(observations())


def test_a_copy_of_the_policy_is_independent() -> None:
    agent = vector_agent("shared")
    copied = copy.deepcopy(agent.policy)
    before = copied(observations())
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(1.0)
    torch.testing.assert_close(copied(observations()), before, rtol=0, atol=0)
    assert not torch.equal(agent.policy(observations()), before)


def test_seed_decides_the_weights_and_global_randomness_is_untouched() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    one, same, other = vector_agent("dual", seed=1), vector_agent("dual", seed=1), vector_agent("dual", seed=2)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.policy.head.weight, other.policy.head.weight)  # type: ignore[arg-type]
    assert one.value_encoder is not None
    own = zip(one.policy.encoder.parameters(), one.value_encoder.parameters(), strict=True)
    assert not all(torch.equal(a, b) for a, b in own)


def test_state_dict_keys_are_stable() -> None:
    # Checkpoints hold these names: a change here must be deliberate, and needs a conversion.
    agent = build_agent(ModelConfig(), VECTOR, gym.spaces.Box(-1, 1, (2,)), auxiliary_head=True)
    encoder = [f"policy.encoder.layers.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")]
    heads = [f"{head}.{kind}" for head in ("value_head", "auxiliary_value") for kind in ("weight", "bias")]
    policy_head = ["policy.head.log_std", "policy.head.mean.weight", "policy.head.mean.bias"]
    assert list(agent.state_dict()) == encoder + policy_head + heads
    keys = list(build_agent(ModelConfig(architecture="dual"), IMAGE, ACTIONS).state_dict())
    assert {"policy.encoder.stacks.0.conv.weight", "policy.encoder.stacks.2.blocks.1.second.bias"} <= set(keys)
    assert {"policy.encoder.dense.weight", "policy.head.weight", "value_encoder.dense.bias"} <= set(keys)
    assert len(keys) == 2 * 32 + 4  # 15 convolutions and a dense layer, with biases, twice; two heads


def test_gaussian_policy() -> None:
    agent = build_agent(ModelConfig(), VECTOR, gym.spaces.Box(-2, 2, (2, 3)))
    distribution = agent.policy.distribution(observations())
    assert distribution.params.shape == (4, 12)
    action = distribution.sample(torch.Generator().manual_seed(0))
    assert action.shape == (4, 2, 3)
    assert action.dtype == torch.float32
    assert agent.action_spec.to_env(action).shape == (4, 2, 3)
    distribution.log_prob(action).sum().backward()
    assert agent.policy.head.log_std.grad.abs().sum() > 0  # type: ignore[union-attr, operator]


def test_orthogonal_gains() -> None:
    config = ModelConfig(options={"width": 8, "gain": 2.0}, policy_gain=0.01, value_gain=1.0)
    agent = build_agent(config, VECTOR, gym.spaces.Box(-2, 2, (3,)))
    weights = [agent.policy.encoder.layers[2].weight, agent.policy.head.mean.weight, agent.value_head.weight]  # type: ignore[index, union-attr]
    for weight, gain in zip(weights, (2.0, 0.01, 1.0), strict=True):
        product = weight @ weight.T  # type: ignore[operator]
        torch.testing.assert_close(product, gain**2 * torch.eye(len(product)), rtol=1e-4, atol=1e-5 * gain**2)
    discrete = build_agent(config, VECTOR, ACTIONS).policy.head.weight
    torch.testing.assert_close(discrete.T @ discrete, 0.01**2 * torch.eye(8), rtol=1e-4, atol=1e-8)  # type: ignore[operator]


@pytest.mark.parametrize("std", ["parameter", "network"])
def test_standard_deviations_start_where_they_should_and_stay_bounded(std: str) -> None:
    gaussian = GaussianConfig(std=std, log_std=-1.0, log_std_bounds=(-3.0, 0.0))  # type: ignore[arg-type]
    agent = build_agent(ModelConfig(gaussian=gaussian), VECTOR, gym.spaces.Box(-2, 2, (3,)))
    params = agent.policy(torch.zeros(1, 5))
    torch.testing.assert_close(params[:, 3:], torch.full((1, 3), -1.0))
    other = agent.policy(torch.ones(1, 5))[:, 3:]
    assert torch.equal(other, params[:, 3:]) == (std == "parameter")
    log_std = agent.policy.head.log_std
    with torch.no_grad():
        (log_std.bias if std == "network" else log_std).add_(3.0)  # type: ignore[operator, union-attr]
    high = agent.policy(torch.zeros(1, 5))[:, 3:]
    assert -0.2 < float(high.min()) <= float(high.max()) < 0
    high.sum().backward()  # the gradient leads back
    assert float((log_std.bias if std == "network" else log_std).grad.abs().min()) > 0.01  # type: ignore[union-attr]


@pytest.mark.parametrize("architecture", ["shared", "dual"])
def test_bf16_stays_close_to_fp32(architecture: str) -> None:
    images = torch.randint(0, 256, (4, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    outputs = []
    for precision in ("fp32", "bf16"):
        config = ModelConfig(architecture=architecture)  # type: ignore[arg-type]
        agent = build_agent(config, IMAGE, ACTIONS, precision=precision, seed=3)  # type: ignore[arg-type]
        params, value = agent(images)
        assert params.dtype == value.dtype == torch.float32
        params.sum().backward()
        assert all(p.dtype == torch.float32 for p in agent.parameters())
        assert agent.policy.encoder.dense.weight.grad.dtype == torch.float32  # type: ignore[union-attr]
        outputs.append((params, value))
    (params, value), (low_params, low_value) = outputs
    assert not torch.equal(params, low_params)  # bfloat16 was really used
    assert (params - low_params).norm() < 0.03 * params.norm()
    assert (value - low_value).norm() < 0.05 * value.norm()


def test_mlp_ignores_bf16() -> None:
    exact = build_agent(ModelConfig(), VECTOR, ACTIONS, precision="fp32")(observations())
    asked = build_agent(ModelConfig(), VECTOR, ACTIONS, precision="bf16")(observations())
    torch.testing.assert_close(asked, exact, rtol=0, atol=0)


@pytest.mark.parametrize(("space", "precision"), [(VECTOR, "fp32"), (IMAGE, "fp32"), (IMAGE, "bf16")])
@pytest.mark.parametrize("architecture", ["shared", "detach"])
def test_stacked_agents_under_vmap_equal_a_loop(space: gym.spaces.Box, precision: str, architecture: str) -> None:
    config = ModelConfig(architecture=architecture)  # type: ignore[arg-type]
    agents = [build_agent(config, space, ACTIONS, precision=precision, seed=s) for s in (0, 1)]  # type: ignore[arg-type]
    parameters, buffers = torch.func.stack_module_state(agents)  # type: ignore[arg-type]
    assert not buffers
    batch = torch.randint(0, 255, (2, 3, *space.shape), generator=torch.Generator().manual_seed(0)).to(
        torch.uint8 if space is IMAGE else torch.float32
    )
    if space is VECTOR:
        batch = batch / 100

    def loss(weights: dict[str, torch.Tensor], observation: torch.Tensor) -> torch.Tensor:
        params, value = torch.func.functional_call(agents[0], weights, (observation,))
        return params.square().sum() + value.square().sum()

    together = torch.func.vmap(torch.func.grad(loss))(parameters, batch)
    for index, agent in enumerate(agents):
        params, value = agent(batch[index])
        (params.square().sum() + value.square().sum()).backward()
        for name, parameter in agent.named_parameters():
            close = torch.linalg.vector_norm(together[name][index] - parameter.grad)
            allowed = (0.05 if precision == "bf16" else 1e-4) * torch.linalg.vector_norm(parameter.grad)
            assert close <= allowed + 1e-6, name


def test_dictionary_observations() -> None:
    space = gym.spaces.Dict({"camera.rgb": IMAGE, "speed": VECTOR, "gear": gym.spaces.Discrete(3)})
    observation = {
        "camera.rgb": torch.zeros(2, 64, 64, 3, dtype=torch.uint8),
        "speed": torch.zeros(2, 5),
        "gear": torch.tensor([0, 2]),
    }
    agent = build_agent(ModelConfig(options={"width": 2}), space, ACTIONS, precision="bf16")
    params, value = agent(observation)
    assert (params.shape, params.dtype, value.shape) == ((2, 15), torch.float32, (2,))
    assert agent.policy.encoder.out_features == 256 + 2 + 2
    assert leaves(observation)[0] is observation["camera.rgb"]
    halves = map_observation(lambda x: x[:1], observation)
    torch.testing.assert_close(agent(halves)[0], params[:1], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"architecture": "both"}, r"model\.architecture is 'both', but must be one of shared, dual, detach"),
        ({"recurrent": "rnn"}, r"model\.recurrent is 'rnn', but must be one of none, gru, lstm"),
        ({"gaussian": GaussianConfig(std="netwrok")}, r"model\.gaussian\.std is 'netwrok'"),  # type: ignore[arg-type]
        ({"recurrent": "gru", "recurrent_width": 2.5}, r"^model\.recurrent_width is 2\.5, but must be an integer"),
    ],
)
def test_choices_are_checked(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build_agent(ModelConfig(**wrong), VECTOR, ACTIONS)
    with pytest.raises(ConfigError, match="precision is 'fp16', but must be one of fp32, bf16"):
        build_agent(ModelConfig(), VECTOR, ACTIONS, precision="fp16")  # type: ignore[arg-type]


class Wider(torch.nn.Identity):
    """An encoder that announces more features than it returns."""

    out_features = 16

    def __init__(self, observation_space: gym.Space[Any]) -> None:
        super().__init__()


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_an_encoder_with_other_features_than_it_says_is_named(recurrent: Any) -> None:
    agent = build_agent(ModelConfig(encoder=f"{__name__}:Wider", recurrent=recurrent), VECTOR, ACTIONS)
    x = observations(4)
    inputs = x if recurrent == "none" else Sequences(x, torch.zeros(4).bool(), torch.zeros(4, agent.state_size), 2)
    with pytest.raises(
        ConfigError, match=r"Wider has out_features 16, but its forward returned .*\(4, 5\) instead of \(B, 16\)"
    ):
        agent(inputs)


def test_devices_and_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with pytest.raises(ConfigError, match="no CUDA GPU"):
        resolve_device("cuda")
    with pytest.raises(ConfigError, match="must be cpu, cuda"):
        resolve_device("tpu9")
    with pytest.raises(ConfigError, match="must be cpu, cuda"):
        resolve_device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    assert resolve_device("auto") == torch.device("cuda")
    with pytest.raises(ConfigError, match="cuda:0 to cuda:1"):
        resolve_device("cuda:2")
    assert resolve_precision("fp32", CPU) == "fp32"
    assert resolve_precision("bf16", CPU) == "bf16"
    for has_it, expected in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr("anybatch.models.precision._cpu_has_bf16", lambda has_it=has_it: has_it)
        assert resolve_precision("auto", CPU) == expected
    with pytest.raises(ConfigError, match="precision is 'fp16'"):
        resolve_precision("fp16", CPU)
