"""One thread, and memory that is not returned to the kernel: as training has it, and steadier."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import pytest
import torch

from anybatch.system.memory import keep_freed_memory

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _steady(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("benchmark_disable"):  # other tests of this process keep the C library's own ways
        keep_freed_memory()
