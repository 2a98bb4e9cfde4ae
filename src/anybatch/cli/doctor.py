"""``anybatch doctor``: diagnosis of a run from its log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from anybatch.config.validation import validate
from anybatch.scaling.conditions import validity


def main(run: Annotated[Path, tyro.conf.arg(metavar="RUN")], /) -> int:
    """Diagnose a run from its log, and check the conditions of batch size-invariance.

    Args:
        run: Run folder; the run may still be in progress.
    """
    from anybatch.diagnostics.doctor import examine
    from anybatch.runs.files import PROGRESS
    from anybatch.runs.folder import read_config
    from anybatch.runs.progress import read_progress

    config = validate(read_config(run)[0])
    progress = read_progress(run / PROGRESS)
    findings = examine(progress, config)
    print(f"{len(progress.get('iteration', []))} iterations; findings from the last tenth (at least 20 iterations):")
    print("\n".join(map(str, findings)) or "none yet")
    checked = {finding.check for finding in findings}
    if conditions := [str(finding) for finding in validity(config) if finding.check not in checked]:
        print("conditions of batch size-invariance that are not met:")
        print("\n".join(conditions))
    return 0
