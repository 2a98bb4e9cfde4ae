"""Functions for the hooks of verl, SkyRL, prime-rl and slime, called as these call them; with verl where it is."""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from anybatch.errors import ConfigError
from anybatch.integrations.token_objectives import Mask, Truncate, token_clip_loss
from anybatch.integrations.verl import prime_rl_loss, skyrl_policy_loss, slime_importance_weights, verl_policy_loss

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def data(stale: float = 0.4) -> dict[str, Tensor]:
    """Four completions of 5, 3, 1 and 0 tokens."""
    generator = torch.Generator().manual_seed(5)
    proximal, behavior, noise = (torch.randn(4, 5, generator=generator) for _ in range(3))
    proximal = -2 + 0.3 * proximal
    mask = torch.arange(5) < torch.tensor([5, 3, 1, 0]).unsqueeze(1)
    return {
        "logp": (proximal + 0.3 * noise).requires_grad_(),
        "proximal": proximal,
        "behavior": proximal + stale * behavior,
        "advantages": torch.randn(4, 5, generator=generator),
        "mask": mask,
    }


def actor_config(**changes: Any) -> Any:
    """What verl's losses read from the configuration of its actor."""
    values = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "global_batch_info": {}, **changes}
    config = SimpleNamespace(**values)
    config.get = lambda name, default=None: 1e9 if name == "clip_ratio_c" else getattr(config, name, default)
    return config


def call_verl(x: dict[str, Tensor], mode: str, config: Any, function: Any) -> Tensor:
    weights = torch.exp(x["proximal"] - x["behavior"]).clamp(max=2.0) * x["mask"]
    loss, metrics = function(
        old_log_prob=x["proximal"],
        log_prob=x["logp"],
        advantages=x["advantages"],
        response_mask=x["mask"].float(),
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
    )
    assert all(isinstance(value, float) for value in metrics.values())
    return loss


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", [{}, {"dp_size": 2, "batch_num_tokens": 31, "global_batch_size": 7}])
def test_verl_is_verl_s_vanilla_loss_without_the_dual_clip(mode: str, batch: dict[str, Any]) -> None:
    algorithms = pytest.importorskip("verl.trainer.ppo.core_algos", reason="needs pip install verl")
    x, config = data(), actor_config(global_batch_info=batch)
    ours = call_verl(x, mode, config, verl_policy_loss(bound=Truncate(math.inf)))
    theirs = call_verl(x, mode, config, algorithms.compute_policy_loss_vanilla)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(loss, x["logp"])[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    assert gradients[0].abs().sum() > 0


def test_verl_takes_the_registered_function() -> None:
    algorithms = pytest.importorskip("verl.trainer.ppo.core_algos", reason="needs pip install verl")
    function = algorithms.register_policy_loss("decoupled")(verl_policy_loss())
    assert algorithms.get_policy_loss_fn("decoupled") is function
    parameters = inspect.signature(algorithms.compute_policy_loss_vanilla).parameters
    assert list(inspect.signature(function).parameters) == list(parameters)


def test_verl_hand_worked() -> None:
    """Tokens with theta/prox 3/2 and 1, prox/behav 2 and 1/2, A = 1, clipped at 1.28.

    2 * 1.28 + 1/2 * 1 = 3.06, over 2 tokens. One worker of two, with 10 tokens in all: 3.06 * 2 / 10. Below a cap of 2
    on theta/behav the first token's 3 becomes 2 and is not clipped more: 2/3 * min(3, 2.56) = 1.70667.
    """
    x = {
        "proximal": torch.tensor([[0.4, 0.5]]).log(),
        "logp": torch.tensor([[0.6, 0.5]]).log(),
        "behavior": torch.tensor([[0.2, 1.0]]).log(),
        "advantages": torch.ones(1, 2),
        "mask": torch.ones(1, 2, dtype=torch.bool),
    }
    free = verl_policy_loss(bound=())
    assert call_verl(x, "token-mean", actor_config(), free).item() == pytest.approx(-1.53, rel=1e-5)
    two = actor_config(global_batch_info={"dp_size": 2, "batch_num_tokens": 10})
    assert call_verl(x, "token-mean", two, free).item() == pytest.approx(-0.612, rel=1e-5)
    capped = call_verl(x, "token-mean", actor_config(), verl_policy_loss(bound=Truncate(2.0)))
    assert capped.item() == pytest.approx(-(2.56 * 2 / 3 + 0.5) / 2, rel=1e-5)
    with pytest.raises(ConfigError, match="loss_agg_mode is 'mean'"):
        call_verl(x, "mean", actor_config(), free)
    with pytest.raises(ConfigError, match="need config"):
        call_verl(x, "token-mean", None, free)
    whole = verl_policy_loss(weight="sequence_product")
    with pytest.raises(ConfigError, match=r"weight is 'sequence_product', but verl's rollout_is_weights already have"):
        call_verl(x, "token-mean", actor_config(), whole)


@pytest.mark.parametrize("make", [verl_policy_loss, skyrl_policy_loss, slime_importance_weights])
def test_options_are_checked_before_the_first_loss(make: Any) -> None:
    with pytest.raises(ConfigError, match="weight is 'tokens', but must be one of token"):
        make(weight="tokens")
    with pytest.raises(ConfigError, match=r"bound is 100\.0, but must be Truncate"):
        make(bound=100.0)


def test_skyrl_sums_what_it_has_scaled() -> None:
    """By the signature of SkyRL's ``ppo_policy_loss``: advantages are divided before, so the loss is a sum."""
    x, config = data(), SimpleNamespace(eps_clip_low=0.2, eps_clip_high=0.3)
    function = skyrl_policy_loss(bound=Mask(0.2, 4.0, of="proximal"))
    loss, metrics = function(
        x["logp"], x["proximal"], x["advantages"], config=config, loss_mask=x["mask"].float(),
        rollout_logprobs=x["behavior"],
    )  # fmt: skip
    expected = token_clip_loss(
        x["logp"], x["proximal"], x["behavior"], x["advantages"], x["mask"],
        weight="token", bound=Mask(0.2, 4.0, of="proximal"), denominator=1, clip=(0.2, 0.3),
    )  # fmt: skip
    assert torch.equal(loss, expected)
    assert 0 < metrics["clip_ratio"] < 1
    fresh, _ = function(x["logp"], x["proximal"], x["advantages"], config)
    everything = torch.ones(4, 5)
    coupled = token_clip_loss(
        x["logp"], x["proximal"], x["proximal"], x["advantages"], everything,
        weight="token", bound=(), denominator=1, clip=(0.2, 0.3),
    )  # fmt: skip
    torch.testing.assert_close(fresh, coupled)


def prime_inputs(**changes: Any) -> Any:
    """A sequence as prime-rl's ``LossInputs`` has it."""
    x = {name: value[0] for name, value in data().items()}
    names = {"trainer_logprobs": x["logp"], "inference_logprobs": x["behavior"], "ref_logprobs": x["proximal"]}
    return SimpleNamespace(**names, advantages=x["advantages"], loss_mask=x["mask"], loss_weights=None, **changes)


def test_prime_rl_has_no_proximal_policy_but_a_reference() -> None:
    for proximal in ("inference", "reference"):
        inputs = prime_inputs()
        outputs = prime_rl_loss(inputs, clip_high=0.3, max_importance_ratio=2.0, proximal=proximal)
        reference = inputs.inference_logprobs if proximal == "inference" else inputs.ref_logprobs
        expected = token_clip_loss(
            *(x.unsqueeze(0) for x in (inputs.trainer_logprobs, reference, inputs.inference_logprobs)),
            inputs.advantages.unsqueeze(0), inputs.loss_mask.unsqueeze(0),
            weight="token", bound=Truncate(2.0), denominator=1, clip=(0.2, 0.3),
        )  # fmt: skip
        torch.testing.assert_close(outputs.loss, expected)
        assert outputs.metrics["kl_proximal"] > 0
    weighted = prime_inputs()
    weighted.loss_weights = torch.full((5,), 2.0)
    torch.testing.assert_close(prime_rl_loss(weighted).loss, 2 * prime_rl_loss(prime_inputs()).loss)
    weighted.ref_logprobs = None
    for proximal, words in (("reference", "no reference log-probabilities"), ("ewma", "must be inference or")):
        with pytest.raises(ConfigError, match=words):
            prime_rl_loss(weighted, proximal=proximal)


def test_slime_hand_worked() -> None:
    """prox/behav 4, 1/4, 3 in sequences of 2 and 1 tokens: truncated at 2, and as geometric means 1 and 3."""
    train, rollout = [torch.tensor([0.8, 0.2]).log(), torch.tensor([0.9]).log()], [[0.2, 0.8], [0.3]]
    arguments: dict[str, Any] = {
        "pg_loss": torch.tensor([1.0, 10.0, 100.0], requires_grad=True),
        "train_log_probs": train,
        "rollout_log_probs": [torch.tensor(x).log() for x in rollout],
        "loss_masks": [torch.ones(2), torch.ones(1)],
        "total_lengths": [4, 3],
        "response_lengths": [2, 1],
    }
    weigh = slime_importance_weights(bound=Truncate(2.0))
    loss, masks, metrics = weigh(SimpleNamespace(), **arguments)
    assert loss.tolist() == pytest.approx([2.0, 2.5, 200.0])
    assert masks is arguments["loss_masks"]
    assert metrics["tis"].tolist() == pytest.approx([4.0, 0.25, 3.0])
    assert metrics["tis_clipfrac"].tolist() == [1.0, 0.0, 1.0]
    geometric = slime_importance_weights(weight="sequence_geometric_mean", bound=Mask(0.0, 2.0))
    loss, _, metrics = geometric(SimpleNamespace(), **arguments)
    assert loss.tolist() == pytest.approx([1.0, 10.0, 0.0])
    assert metrics["tis"].tolist() == pytest.approx([1.0, 1.0, 3.0])
    assert metrics["tis_clipfrac"].tolist() == [0.0, 0.0, 1.0]
