"""``anybatch resume``: continue an interrupted run."""

from __future__ import annotations

from pathlib import Path

from anybatch.cli.train import finish


def main(run: Path, /, total_env_steps: int | None = None, quiet: bool = False) -> int:
    """Continue an interrupted run from its newest checkpoint.

    Args:
        run: Run folder.
        total_env_steps: Environment steps to train for in total, instead of the number in the run's config.yaml.
        quiet: Show no progress.
    """
    from anybatch.training import resume

    return finish(resume(run, total_env_steps=total_env_steps, quiet=quiet))
