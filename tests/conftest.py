"""One torch thread, the same seeds for every test, and the marks that skip what this machine cannot do."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, and for the processes that tests start
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp()  # for the user's key, which marks run folders; not that of this user

import random
import signal

import hypothesis
import numpy as np
import pytest
import torch

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in background jobs
multiprocessing.get_start_method()  # settles the platform's own, which TorchRL's import would make the slow 'spawn'
hypothesis.settings.register_profile("anybatch", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("anybatch")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refresh-golden", action="store_true", help="write the golden files instead of comparing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "no CUDA device"
    if importlib.util.find_spec("envpool") is None:
        missing["procgen"] = "needs pip install '.[procgen]'"
    for item in items:
        for mark, reason in missing.items():
            if mark in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def refresh_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written (`make golden`)."""
    return bool(request.config.getoption("--refresh-golden"))


@pytest.fixture(autouse=True)
def _same_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
