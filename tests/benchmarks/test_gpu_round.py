"""The round of measurements on a GPU: from end to end in tiny sizes on the CPU, and where a part fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from anybatch.config.validation import validate
from bench_launch import Measurement
from bench_run import Spec, configuration
from gpu_round import Part, do, rounds, server
from gpu_round_page import page

ROOT = Path(__file__).resolve().parents[2]
HAS_PROC = Path("/proc/self").exists()


@pytest.mark.slow
def test_a_dry_run_measures_everything_but_compilation(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_round.py"), "--dry-run", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    parts = json.loads((tmp_path / "gpu-round.json").read_text())["parts"]
    assert {name: x.get("reason") for name, x in parts.items() if x["status"] != "done"} == {
        name: "nothing is compiled in a dry run" for name in parts if name.endswith(", compile")
    }
    assert list(parts) == [part.name for part in rounds(dry=True)]
    results = {name: x["result"] for name, x in parts.items() if x["status"] == "done"}
    assert all(x["rate"] > 0 and sum(x["where"].values()) > 0.99 for x in results.values() if "rate" in x)
    assert results["ppo-ewma, 2 processes"]["env_steps"] == 2 * 2 * 8  # iterations, environments of both, steps
    assert results["whole phase of ppg-ewma"]["spent"]["auxiliary_phase"] > 0
    assert results["tests"] == {"passed": 0, "failed": 0, "skipped": results["tests"]["skipped"], "failures": {}}
    assert results["tests"]["skipped"] > 10
    shares = [share for _, share, _ in results["kernels"]["kernels"]]
    assert shares == sorted(shares, reverse=True) and 0.2 < sum(shares) <= 1
    text = (tmp_path / "gpu-round.md").read_text()
    assert "A dry run" in text and "## A whole phase" in text and "- ppo, compile: nothing" in text


def test_the_settings_of_the_whole_round_are_valid() -> None:
    """They cannot be tried without a GPU."""
    specs = [part.argument for part in rounds(dry=False) if isinstance(part.argument, Spec)]
    assert len(specs) > 10
    for spec in specs:
        config = configuration(spec, spec.warm_up + spec.iterations, spec.steps)
        validate(config)
        validate(configuration(spec, 2, max(8, spec.minibatches)))
        if spec.algorithm == "ppg-ewma":  # one whole phase, with auxiliary minibatches as large as the paper's
            assert config.aux.policy_iterations == spec.iterations == 32
            assert 32 * config.iteration_batch / config.aux.minibatches_per_epoch == 4096


@pytest.mark.parametrize(
    ("work", "argument", "reason"),
    [
        (json.loads, "{", "JSONDecodeError: Expecting property name"),
        (os._exit, 3, "ended with code 3: no output"),
        (time.sleep, 60.0, "stopped after 2 s"),
    ],
)
def test_a_part_that_fails_is_recorded(work: Any, argument: Any, reason: str, tmp_path: Path) -> None:
    seconds = 2.0 if work is time.sleep else 60.0
    record = do(Part("a part", seconds, work, argument, ranks=2), seconds, tmp_path, server([]))
    assert record["status"] == "failed" and record["reason"].startswith(reason)
    assert record["seconds"] < 30


@pytest.mark.skipif(not HAS_PROC, reason="needs /proc")
def test_nothing_outlives_the_time_of_a_part(tmp_path: Path) -> None:
    command = f"echo at work; sleep 60 & echo $! > {tmp_path / 'pid'}; wait"
    record = do(Part("a part", 2.0, os.system, command), 2.0, tmp_path, server([]))
    assert record["reason"] == "stopped after 2 s: at work"
    status = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/status")
    latest = time.monotonic() + 30  # a killed process may live for a moment; this one would for 60 s
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < latest
        time.sleep(0.05)


def test_page() -> None:
    def measured(rate: float, **changes: Any) -> dict[str, Any]:
        networks = {"anybatch": {"forward": 8000.0, "both": 2000.0}}
        spec = asdict(Spec(algorithm="ppo", num_envs=256, device="cpu", **changes))
        one = Measurement(spec, 1, 1 / rate, 1.0, 700, {"other": 1.0}, [networks, networks], None, 31.4, 9000)
        return {"status": "done", "result": {**asdict(one), "rate": rate}}

    records = {
        "machine": {"status": "done", "result": {"gpu": "a GPU", "gpus": 1}},
        "ppo": measured(500.0),
        "ppo, compile": measured(650.0, changes={"compile": True}),
        "ppo-ewma": {"status": "failed", "reason": "OutOfMemoryError: it is full"},
        "tests": {"status": "done", "result": {"passed": 3, "failed": 1, "skipped": 0, "failures": {"test_a": "E 1"}}},
    }
    text = page(records, {"dry_run": False})
    # the limit is 1 / (1/8000 + 3/2000) = 615 steps/s
    assert "| ppo | 256 | 500 | 0.81 |  | 31 | 9,000 | 700 | other 100% |" in text
    assert "| ppo, compile | 256 | 650 | 1.06 | 1.30 | 31 |" in text
    assert "3 passed, 1 failed, 0 skipped.\n- test_a: E 1" in text
    assert text.startswith("# One round on a GPU\n") and "- ppo-ewma: OutOfMemoryError: it is full" in text
