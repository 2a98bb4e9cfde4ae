"""``anybatch resume``: continue an interrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from anybatch.cli.train import finish


def main(
    run: Annotated[Path, tyro.conf.arg(metavar="RUN")],
    /,
    total_env_steps: int | None = None,
    trust_code: bool = False,
    quiet: bool = False,
) -> int:
    """Continue an interrupted run from its newest checkpoint.

    Args:
        run: Run folder.
        total_env_steps: Environment steps to train for in total, instead of the number in the run's config.yaml.
        trust_code: Import the Python code named in the run's config.yaml, even if the run is not yours.
        quiet: Show no progress.
    """
    from anybatch.training import resume

    return finish(resume(run, total_env_steps=total_env_steps, trust_code=trust_code, quiet=quiet))
