"""The runs of procgen_invariance.py: what is trained, and how far each is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from anybatch.config.schema import TrainConfig
from anybatch.presets import ppo_ewma
from anybatch.runs.progress import read_progress
from anybatch.scaling import Change, scale

GAMES = ("starpilot", "coinrun", "fruitbot")
SEEDS = (1, 2, 3)
NUM_ENVS, FEWER = 64, 4
STEPS, MINIBATCHES, STEP_SIZE = 128, 8, 5e-4
TOTAL = 122 * NUM_ENVS * STEPS
"""999,424 environment steps: an iteration of 64 environments is 0.8% of a run, one of 4 is 0.05%."""
DEFAULT, ADJUSTED, UNADJUSTED = "64", "4-adjusted", "4-unadjusted"
ARMS = {
    DEFAULT: "64 environments",
    ADJUSTED: "4 environments, all adjustments",
    UNADJUSTED: "4 environments, no adjustments",
}


@dataclass(frozen=True)
class Job:
    """One training run."""

    game: str
    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.game}-{self.arm}-seed{self.seed}"

    @property
    def num_envs(self) -> int:
        return NUM_ENVS if self.arm == DEFAULT else FEWER

    def config(self) -> tuple[TrainConfig, list[Change]]:
        config = ppo_ewma(
            f"procgen:{self.game}-easy",
            num_envs=NUM_ENVS,
            steps=STEPS,
            minibatches=MINIBATCHES,
            policy_epochs=1,
            value_epochs=1,
            step_size=STEP_SIZE,
            total_env_steps=TOTAL,
            **{
                "model.encoder": "impala",
                "model.options": {"channels": 16, "blocks": 1},
                "env.threads": 1,
                "workers": 1,
                "log.tensorboard": False,
                "log.noise_scale": False,
            },
        )
        c = NUM_ENVS / FEWER
        if self.arm == ADJUSTED:
            return scale(config, c)
        if self.arm == UNADJUSTED:
            return scale(config, c, adam_step="none", ewma=False, advantage_norm=False)
        return config, []

    def env_steps(self, runs: Path) -> int:
        """Environment steps done."""
        progress = runs / self.name / "progress.csv"
        return int(max(read_progress(progress).get("env_steps", []), default=0)) if progress.exists() else 0


def jobs() -> list[Job]:
    """All runs, first seed of everything first, so that what is finished early can be compared."""
    return [Job(game, arm, seed) for seed in SEEDS for game in GAMES for arm in ARMS]


def whole_lines(path: Path) -> list[str]:
    """The lines of a run's episodes.csv, without a last one that a crash cut short."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n") and line.count(",") == 3]
