"""The token objectives beside the loss functions of verl and AReaL, where these packages are installed.

Values agree to 1e-6 and gradients to 1e-5. Where they differ on purpose: verl's dual clip (switched off here) is our
cap on theta/behav; tokens that verl rejects are missing from its denominator, and stay in ours and AReaL's; AReaL's
sequence-level weight is the geometric mean alone; AReaL counts a completion as often as it has tokens (``aggregate``
is ``token``), verl's GSPO once (``sequence``).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from anybatch.integrations.token_objectives import Mask, Truncate, count, token_clip_loss

LENGTHS = torch.tensor([6, 3, 1, 4])


@pytest.fixture(scope="module")
def areal() -> Any:
    return pytest.importorskip("areal.utils.functional.functional", reason="needs pip install areal")


@pytest.fixture(scope="module")
def verl() -> Any:
    return pytest.importorskip("verl.trainer.ppo.core_algos", reason="needs pip install verl")


def data(stale: float = 0.5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    noise = [torch.randn(4, 6, generator=generator) for _ in range(4)]
    proximal, mask = -2 + 0.3 * noise[0], torch.arange(6) < LENGTHS.unsqueeze(1)
    x = {"logp": proximal + 0.3 * noise[1], "logp_proximal": proximal, "logp_behavior": proximal + stale * noise[2]}
    x = {name: torch.where(mask, value, -1.0) for name, value in x.items()}
    return x | {"advantage": noise[3], "mask": mask}


def flat(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tokens that count, one after the other."""
    return {name: value[x["mask"]] for name, value in x.items()}


def agree(ours: Tensor, theirs: Tensor, logp: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(loss, logp)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    assert gradients[0].abs().sum() > 0


def rejection(areal: Any, **settings: Any) -> Any:
    return SimpleNamespace(**{"metric": "ratio", "level": "token", "agg": "mean", "lower": None, **settings})


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({"action": "clamp", "upper": 1.3}, Truncate(1.3, of="proximal")),
        ({"action": "mask", "lower": 0.7, "upper": 1.4}, Mask(0.7, 1.4, of="proximal")),
    ],
)
def test_areal_token_weights(areal: Any, packed: bool, settings: dict[str, Any], bound: Any) -> None:
    x = data()
    x = flat(x) if packed else x
    logp = x["logp"].requires_grad_()
    ids = torch.arange(4).repeat_interleave(LENGTHS) if packed else None
    ours = token_clip_loss(
        **x, weight="token", bound=bound, clip=(0.2, 0.28), sequence_ids=ids, denominator=count(x["mask"], "token", ids)
    )
    theirs, _ = areal.ppo_actor_loss_fn(
        logp, x["logp_proximal"], x["logp_behavior"], x["advantage"], 0.2, x["mask"],
        eps_clip_higher=0.28, rejection_sampling=rejection(areal, **settings),
    )  # fmt: skip
    agree(ours, theirs, logp)


@pytest.mark.parametrize("agg", ["mean", "sum"])
@pytest.mark.parametrize("packed", [False, True])
def test_areal_sequence_ratios_and_rejected_completions(areal: Any, packed: bool, agg: str) -> None:
    """GSPO with weights that are geometric means, without the completions whose mean, or product, is out of range."""
    x = data()
    x["advantage"] = x["advantage"][:, :1].expand(4, 6).clone()
    level: Any = {"mean": "sequence_geometric_mean", "sum": "sequence_product"}[agg]
    bound = Mask(0.6, 1.5, of="proximal", level=level)
    boundaries = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)]) if packed else None
    ids = torch.arange(4).repeat_interleave(LENGTHS) if packed else None
    x = flat(x) if packed else x
    logp, mine = x["logp"].requires_grad_(), dict(x)
    if not packed:
        mine["advantage"] = x["advantage"][:, 0]
    geometric: Any = "sequence_geometric_mean"
    ours = token_clip_loss(
        **mine, weight=geometric, ratio=geometric, bound=bound, aggregate="token", sequence_ids=ids,
        denominator=count(x["mask"], "token", ids),
    )  # fmt: skip
    settings = rejection(areal, level="sequence", agg=agg, action="mask", lower=0.6, upper=1.5)
    theirs, _ = areal.ppo_actor_loss_fn(
        logp, x["logp_proximal"], x["logp_behavior"], x["advantage"], 0.2, x["mask"],
        rejection_sampling=settings, importance_sampling_level="sequence", cu_seqlens=boundaries,
    )  # fmt: skip
    agree(ours, theirs, logp)


def test_areal_without_rejection_sampling_leaves_out_the_weights(areal: Any) -> None:
    """Its default: no prox/behav at all, the gradient of figure 1(a); ours with the proximal policy as behaviour."""
    x = data()
    logp = x["logp"].requires_grad_()
    theirs, _ = areal.ppo_actor_loss_fn(logp, x["logp_proximal"], x["logp_behavior"], x["advantage"], 0.2, x["mask"])
    options: dict[str, Any] = {"weight": "token", "bound": (), "denominator": count(x["mask"], "token")}
    agree(token_clip_loss(**{**x, "logp_behavior": x["logp_proximal"]}, **options), theirs, logp)
    assert abs(token_clip_loss(**x, **options).item() - theirs.item()) > 1e-3


def actor(**changes: Any) -> Any:
    config = SimpleNamespace(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, global_batch_info={}, **changes)
    config.get = lambda name, default=None: 1e9 if name == "clip_ratio_c" else default
    return config


@pytest.mark.parametrize(("level", "weight"), [("token", "token"), ("sequence", "sequence_product")])
@pytest.mark.parametrize(
    ("mode", "aggregate", "denominator"),
    [
        ("token-mean", "token", 14),
        ("seq-mean-token-mean", "sequence", 4),
        ("seq-mean-token-sum", "token", 4),
        ("seq-mean-token-sum-norm", "token", 24),
    ],
)
def test_verl_vanilla_loss_with_rollout_correction(
    verl: Any, level: str, weight: Any, mode: str, aggregate: Any, denominator: int
) -> None:
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
    x = data(0.3)
    logp, mask = x["logp"].requires_grad_(), x["mask"].float()
    log_ratio = x["logp_proximal"] - x["logp_behavior"]
    weights, _ = helper.compute_rollout_correction_weights(log_ratio, mask, level, rollout_is_threshold=1.2)
    theirs, _ = verl.compute_policy_loss_vanilla(
        x["logp_proximal"], logp, x["advantage"], mask, mode, actor(), rollout_is_weights=weights
    )
    ours = token_clip_loss(
        **x, weight=weight, ratio="token", bound=Truncate(1.2, of="proximal"), aggregate=aggregate,
        denominator=denominator, clip=(0.2, 0.28),
    )  # fmt: skip
    agree(ours, theirs, logp)


def test_verl_rejected_tokens(verl: Any) -> None:
    """verl removes them from the mask, and so from the denominator."""
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
    x = data()
    logp, mask = x["logp"].requires_grad_(), x["mask"].float()
    log_ratio = x["logp_proximal"] - x["logp_behavior"]
    kept, _ = helper.compute_rollout_rejection_mask(log_ratio, mask, "token_k1", "0.7_1.4")
    weights, _ = helper.compute_rollout_correction_weights(log_ratio, mask, "token", rollout_is_threshold=100.0)
    theirs, _ = verl.compute_policy_loss_vanilla(
        x["logp_proximal"], logp, x["advantage"], kept, "token-mean", actor(), rollout_is_weights=weights
    )
    assert 0 < kept.sum() < mask.sum()
    bound = Mask(1 / 1.4, 1 / 0.7, of="proximal")  # its k1 is log behav/prox
    ours = token_clip_loss(**x, weight="token", bound=bound, denominator=kept.sum(), clip=(0.2, 0.28))
    agree(ours, theirs, logp)


def test_verl_gspo(verl: Any) -> None:
    config = pytest.importorskip("verl.workers.config")
    x = data()
    settings: Any = object.__new__(config.ActorConfig)
    for name, value in {"clip_ratio": 0.2, "clip_ratio_low": 0.01, "clip_ratio_high": 0.02}.items():
        object.__setattr__(settings, name, value)
    object.__setattr__(settings, "global_batch_info", {})
    x["advantage"] = x["advantage"][:, 0]
    logp, mask = x["logp"].requires_grad_(), x["mask"].float()
    theirs, _ = verl.compute_policy_loss_gspo(
        x["logp_proximal"], logp, x["advantage"].unsqueeze(1).expand(4, 6), mask, config=settings
    )
    ours = token_clip_loss(
        **{**x, "logp_behavior": x["logp_proximal"]}, weight="sequence_geometric_mean", bound=(), denominator=4,
        clip=(0.01, 0.02),
    )  # fmt: skip
    agree(ours, theirs, logp)
