"""The paper's suite: 16 Procgen games on hard, 100M steps, and the batch ladder of appendix B."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.envs.procgen import NORMALIZATION
from anybatch.presets import PAPER, ppo, ppo_ewma
from anybatch.reproduce.suites.suite import Suite, change, cut, shortened

_NAMES = (
    "CoinRun", "StarPilot", "CaveFlyer", "Dodgeball", "FruitBot", "Chaser", "Miner", "Jumper",
    "Leaper", "Maze", "BigFish", "Heist", "Climber", "Plunder", "Ninja", "BossFight",
)  # fmt: skip
GAMES: dict[str, str] = {name.lower(): name for name in _NAMES}
"""Names in figures, in the order of figure 3."""

SCALING_UP_GAMES = ("coinrun", "starpilot", "bigfish", "heist")

_LOGS: dict[str, Any] = {
    "log.tensorboard": False,  # at one environment a run has 390,000 iterations
    "log.noise_scale": False,
}


def procgen() -> Suite:
    """The paper's runs.

    The delays of figure 1 and the grid of appendix G are not in the paper's text and were chosen to cover its claims.
    """
    algorithms = {name: _configs(PAPER[name], GAMES) for name in PAPER}
    return Suite(
        name="procgen",
        about="16 Procgen games on hard, 100M environment steps, IMPALA networks: the paper's runs",
        labels=GAMES,
        ranges=NORMALIZATION,
        invariance=algorithms["ppg-ewma"],
        staleness=_configs(PAPER["ppo"], GAMES, proximal="recent"),
        algorithms=algorithms,
        betas=("heist",),
        grid="starpilot",
        scaling_up=_configs(PAPER["ppo-ewma"], SCALING_UP_GAMES, policy_epochs=1, value_epochs=1),
        divisors=(1, 4, 16, 64, 256),
        delays=(0, 1, 2, 4, 8, 16, 32),
        grid_factors=(1, 2, 4, 8, 16, 32, 64),
        grid_steps=20_000_000,
        multiples=(1, 2, 4, 8, 16),
        seeds={"default": 3, "staleness": 4, "head-to-head": 4, "ewma-grid": 2},
        points=100,
        final_points=4,  # 4M of 100M steps
        stacked=False,
    )


def procgen_smoke() -> Suite:
    """Two games, a small batch, a tiny network and few steps, to check that everything runs."""
    suite = cut(procgen(), ("coinrun", "starpilot"), seeds=1, steps=512)
    suite = change(
        suite,
        {
            "num_envs": 16,
            "rollout.steps": 16,
            "model.encoder": "mlp",
            "model.options": {"width": 16, "depth": 1},
            "aux.policy_iterations": 1,
            "aux.minibatches": 4,
            "aux.epochs": 1,
            "device": "cpu",
        },
    )
    return shortened(replace(suite, scaling_up={"starpilot": suite.scaling_up["starpilot"]}))


def _configs(preset: Callable[..., TrainConfig], games: Iterable[str], **changes: Any) -> dict[str, TrainConfig]:
    configs = {game: preset(f"procgen:{game}-hard", **_LOGS, **changes) for game in games}
    if preset in (ppo, ppo_ewma):
        return configs
    # as in the authors' code
    return {game: override(config, {"kl_estimator": "half-squared"}) for game, config in configs.items()}
