"""One measurement in a process of its own: trains as `anybatch train` does, and prints one line of JSON.

    python benchmarks/bench_run.py '{"algorithm": "ppo", "num_envs": 8}'

bench.py and bench_small.py start this; the fields and their defaults are those of Spec. A short run comes first, so
that nothing is measured that happens once a process. What is timed is anybatch.training.train itself, with its logs and
checkpoints; where its time goes is found by wrapping the functions between which it alternates.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench_common import forget_peak_memory, peak_memory_mib, pin


@dataclass(frozen=True)
class Spec:
    """What to measure."""

    algorithm: str = "ppo"
    env: str = "procgen:starpilot-hard"
    num_envs: int = 16
    """N over all ranks together."""
    steps: int = 256
    minibatches: int = 8
    aux_batch: int = 256
    """Samples of an auxiliary minibatch over all ranks; the paper's is 4,096."""
    iterations: int = 1
    """Measured; for PPG each with an auxiliary phase, N_pi being 1."""
    warm_up: int = 0
    """Iterations before; PPG needs one, whose auxiliary phase is then measured."""
    cores: list[int] | None = None
    threads: int = 1
    ranks: int = 1
    """Data-parallel processes, each of which gets this Spec and the environment variables that `torchrun` sets."""
    folder: str = ""
    """For the runs, the same for all ranks; empty takes a temporary one."""
    device: str = "cpu"
    precision: str = "auto"
    micro_batch: int | None = None
    rate_batches: list[int] = field(default_factory=lambda: [64, 256])
    """Batch sizes at which the network alone is measured; none leaves the limit out."""
    rate_seconds: float = 0.5
    plain: bool = True
    """Measure plain PyTorch networks too."""
    compiled: bool = False
    """Among them one under torch.compile."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Further settings of the configuration, by field name."""


class Stopwatch:
    """Divides time among labels; what runs inside of something else is counted there alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.synchronize: Callable[[], None] | None = None
        """Called at every change of label, so that what a GPU still has to do is counted where it was asked for."""
        self._labels = ["other"]
        self._since = time.perf_counter()

    def switch(self) -> None:
        """Count the time since the last change."""
        if self.synchronize:
            self.synchronize()
        now = time.perf_counter()
        self.seconds[self._labels[-1]] += now - self._since
        self._since = now

    def wrap(self, owner: Any, name: str, label: str) -> None:
        """Count the calls of a method or function of ``owner`` under ``label``."""
        function = getattr(owner, name)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            self.switch()
            self._labels.append(label)
            try:
                return function(*arguments, **keywords)
            finally:
                self.switch()
                self._labels.pop()

        setattr(owner, name, timed)


def configuration(spec: Spec, iterations: int, steps: int) -> Any:
    """The preset, with phases of one iteration so that an auxiliary phase is measured in proportion."""
    from anybatch.presets import PRESETS

    samples = spec.num_envs * steps
    changes: dict[str, Any] = {
        "num_envs": spec.num_envs,
        "rollout.steps": steps,
        "total_env_steps": iterations * samples,
        "optimizer.minibatches": spec.minibatches,
        "aux.policy_iterations": 1,
        "aux.minibatches": max(1, samples // spec.aux_batch),
        "device": spec.device,
        "precision": spec.precision,
        **({"micro_batch": spec.micro_batch} if spec.micro_batch else {}),
        **spec.changes,
    }
    return PRESETS[spec.algorithm](spec.env, **changes)


@dataclass(frozen=True)
class Timed:
    """Of the measured iterations of a training run."""

    seconds: float
    processor_seconds: float
    where: dict[str, float]
    """Shares of the time by label."""
    first_seconds: float
    """How much longer the very first iteration took than the mean of the measured ones."""


def run(spec: Spec, folder: Path) -> dict[str, Any]:
    """Measure, with runs in ``folder``; call once in a process."""
    import torch

    from anybatch.distributed.collectives import wait_for_all
    from anybatch.system.memory import keep_freed_memory

    torch.set_num_threads(spec.threads)
    keep_freed_memory()
    config = configuration(spec, spec.warm_up + spec.iterations, spec.steps)
    # compiled programs are for one size of a minibatch, and come from a cache on disk the second time
    steps = spec.steps if config.compile else max(8, spec.minibatches)
    first = _train(spec, configuration(spec, 2, steps), folder / "first")
    wait_for_all()  # ranks measure side by side what they can do side by side
    before = _rates(spec, config)
    forget_peak_memory()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    timed = _train(spec, config, folder / "measured")
    peak = peak_memory_mib()
    peak_gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
    wait_for_all()
    after = _rates(spec, config)
    return {
        "spec": asdict(spec),
        "env_steps": spec.iterations * config.iteration_batch,
        "seconds": timed.seconds,
        "processor_seconds": timed.processor_seconds,
        "first_seconds": round(first.first_seconds, 2),
        "peak_mib": round(peak),
        "peak_gpu_mib": round(peak_gpu / 2**20),
        "where": {label: round(share, 4) for label, share in timed.where.items()},
        "networks": [before, after],
        "bandwidth": _bandwidth(config),
    }


def _train(spec: Spec, config: Any, out: Path) -> Timed:
    from anybatch import training
    from anybatch.runs.run import Run
    from bench_limits import synchronize

    watch, marks = Stopwatch(), []
    on_gpu = config.device != "cpu"
    extra = 1 if on_gpu else 0  # stopping the GPU for the stopwatch costs time: another iteration is watched there
    if extra:
        from anybatch.config.io import override

        config = override(config, {"total_env_steps": config.total_env_steps + config.iteration_batch})

    def mark() -> None:
        synchronize()
        watch.switch()
        marks.append((time.perf_counter(), time.process_time(), dict(watch.seconds)))
        if extra and len(marks) == 1 + spec.warm_up + spec.iterations:
            watch.synchronize = synchronize

    originals = {
        name: getattr(training, name) for name in ("build", "policy_phase", "_auxiliary_phase", "training_loop")
    }
    end_iteration = Run.end_iteration

    def build(*arguments: Any, **keywords: Any) -> Any:
        parts = originals["build"](*arguments, **keywords)
        watch.wrap(parts.env, "step_tensors" if hasattr(parts.env, "step_tensors") else "step", "environment")
        watch.wrap(parts.source, "next", "inference")
        if config.policy.proximal != "behavior" and not config.compile:  # there it is part of the gradient step
            watch.wrap(parts.learner.proximal, "params", "proximal")
        return parts

    def loop(*arguments: Any) -> None:
        mark()
        originals["training_loop"](*arguments)

    def end(self: Run, *arguments: Any) -> None:
        end_iteration(self, *arguments)
        mark()

    watch.wrap(training, "policy_phase", "optimisation")
    watch.wrap(training, "_auxiliary_phase", "auxiliary")
    training.build, training.training_loop, Run.end_iteration = build, loop, end
    try:
        training.train(config, out, seed=1, quiet=True)
    finally:
        for name, function in originals.items():
            setattr(training, name, function)
        Run.end_iteration = end_iteration
    first = min(spec.warm_up, len(marks) - 2)
    last = len(marks) - 1 - extra
    start, stop = marks[first], marks[last]
    divided = (marks[last], marks[-1]) if extra else (start, stop)
    where = {label: x - divided[0][2].get(label, 0.0) for label, x in divided[1][2].items()}
    total = sum(where.values())
    seconds = stop[0] - start[0]
    return Timed(
        seconds=seconds,
        processor_seconds=stop[1] - start[1],
        where={label: x / total for label, x in where.items()},
        first_seconds=marks[1][0] - marks[0][0] - seconds / (last - first),
    )


def _rates(spec: Spec, config: Any) -> dict[str, Any]:
    """Rates of the policy network alone, the library's and plain ones, in samples a second by name."""
    if not spec.rate_batches:
        return {}
    import torch

    from anybatch.config.schema import EnvConfig
    from anybatch.envs.factory import spaces
    from anybatch.models.agent import build_agent
    from anybatch.models.precision import resolve_device, resolve_precision
    from bench_limits import measure, plain_networks

    device = resolve_device(config.device)
    precision = resolve_precision(config.precision, device)
    observation, action = spaces(EnvConfig(id=spec.env))
    networks: dict[str, Any] = {
        "anybatch": build_agent(config.model, observation, action, precision=precision).to(device).policy
    }
    if spec.plain and observation.shape == (64, 64, 3):
        networks |= plain_networks(device, low_precision=precision == "bf16", compiled=spec.compiled)

    def draw(batch: int) -> torch.Tensor:
        return torch.randint(0, 256, (batch, *observation.shape), dtype=torch.uint8).to(device)

    return {
        name: asdict(measure(network, draw, spec.rate_batches, spec.rate_seconds)) for name, network in networks.items()
    }


def _bandwidth(config: Any) -> float | None:
    """Of a GPU's memory, in bytes a second."""
    from anybatch.models.precision import resolve_device
    from bench_limits import memory_bandwidth

    device = resolve_device(config.device)
    return memory_bandwidth(device) if device.type == "cuda" else None


def main() -> None:
    """Read a Spec from the command line and print the result as the last line."""
    spec = Spec(**json.loads(sys.argv[1] if len(sys.argv) > 1 else "{}"))
    if spec.cores is not None:
        here = spec.cores if spec.ranks == 1 else [spec.cores[int(os.environ["RANK"]) % len(spec.cores)]]
        pin(here)
    os.environ.setdefault("OMP_NUM_THREADS", str(spec.threads))  # before torch is imported
    from anybatch.distributed.process_group import joined_process_group

    with tempfile.TemporaryDirectory() as temporary, joined_process_group():
        print(json.dumps(run(spec, Path(spec.folder or temporary))), flush=True)


if __name__ == "__main__":
    main()
