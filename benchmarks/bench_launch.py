"""Start measurements in processes of their own, several at once where they are ranks of one training run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench_common import ROOT
from bench_run import Spec

_CHILD = Path(__file__).with_name("bench_run.py")


@dataclass(frozen=True)
class Measurement:
    """What the processes of one measurement reported, together."""

    spec: dict[str, Any]
    env_steps: int
    seconds: float
    processor_seconds: float
    peak_mib: float
    where: dict[str, float]
    """Shares of the time by label."""
    networks: list[dict[str, dict[str, float]]]
    """Rates of single networks before and after, summed over the ranks, which measure them side by side."""
    bandwidth: float | None
    """Of a GPU's memory, in bytes a second."""
    first_seconds: float = 0.0
    """How much longer the first iteration of the process took than those that were measured."""
    peak_gpu_mib: float = 0.0

    @property
    def rate(self) -> float:
        """Environment steps a second."""
        return self.env_steps / self.seconds

    def rates(self) -> dict[str, dict[str, float]]:
        """The rates of the networks, the mean of before and after."""
        before, after = self.networks
        return {
            name: {kind: (rates[kind] + after[name][kind]) / 2 for kind in ("forward", "both")}
            for name, rates in before.items()
        }


def measure_all(spec: Spec) -> Measurement:
    """Measure a training run, in as many processes as it has ranks.

    Raises:
        RuntimeError: a process failed; what it said is shown.
    """
    with tempfile.TemporaryDirectory() as folder:
        spec = replace(spec, folder=folder)
        variables = torchrun_variables(spec.ranks)
        children = [
            _start(spec, {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(spec.ranks)
        ]
        try:
            outputs = [child.communicate() for child in children]
        finally:
            for child in children:
                child.kill()
    for child, (_, errors) in zip(children, outputs, strict=True):
        if child.returncode:
            raise RuntimeError(f"measuring {spec.algorithm} failed:\n{errors}")
    return together([json.loads(output.splitlines()[-1]) for output, _ in outputs])


def together(results: list[dict[str, Any]]) -> Measurement:
    """One measurement from what each rank reported."""
    first = results[0]
    labels = {label for result in results for label in result["where"]}
    networks = [
        {
            name: {
                kind: sum(result["networks"][when][name][kind] for result in results) for kind in ("forward", "both")
            }
            for name in first["networks"][when]
        }
        for when in (0, 1)
    ]
    return Measurement(
        spec=first["spec"],
        env_steps=first["env_steps"],
        seconds=max(result["seconds"] for result in results),
        processor_seconds=sum(result["processor_seconds"] for result in results),
        peak_mib=sum(result["peak_mib"] for result in results),
        where={label: sum(result["where"].get(label, 0.0) for result in results) / len(results) for label in labels},
        networks=networks,
        bandwidth=first["bandwidth"],
        first_seconds=max(result["first_seconds"] for result in results),
        peak_gpu_mib=sum(result["peak_gpu_mib"] for result in results),
    )


def torchrun_variables(ranks: int) -> dict[str, str]:
    """Environment variables of all ranks, but for their number."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = str(ranks)
    return {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _start(spec: Spec, variables: dict[str, str]) -> subprocess.Popen[str]:
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]  # also where the package is not installed
    environment = {
        **os.environ,
        **variables,
        "OMP_NUM_THREADS": str(spec.threads),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    command = [sys.executable, str(_CHILD), json.dumps(asdict(spec))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
