"""Everything that is to be measured on a GPU, in at most ten minutes: one JSON file and one page.

    python benchmarks/gpu_round.py                                # all parts, the most important ones first
    python benchmarks/gpu_round.py --parts "ppo-ewma, compile" tests
    python benchmarks/gpu_round.py --dry-run                      # tiny sizes on the CPU, in some seconds

Each part has its own time limit and runs in processes of its own, so that whatever goes wrong in one is recorded and
the next one runs. The results are written after each part. A part whose turn comes when less than --least seconds are
left is skipped, and named on the page: run it with --parts and another --out. Nothing is downloaded; where Procgen
cannot be made, random frames take its place; the page names the environment. gpu-round.log has what all parts print.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_common import RESULTS, ROOT
from bench_launch import together, torchrun_variables
from bench_run import Spec

_PATHS = [str(ROOT / folder) for folder in ("src", "benchmarks", "examples", "tests")]
_PRELOADED = ["torch", "pytest", "bench_run", "bench_limits", "anybatch.presets", "anybatch.training"]


@dataclass(frozen=True)
class Part:
    """One measurement; ``work(argument)`` gives a result for JSON, in a process for each rank."""

    name: str
    seconds: float
    """Time limit."""
    work: Callable[[Any], dict[str, Any]]
    argument: Any
    ranks: int = 1


def training(spec: Spec) -> dict[str, Any]:
    """Measure one training run, or one rank of it."""
    from anybatch.distributed.process_group import joined_process_group
    from bench_run import run

    with tempfile.TemporaryDirectory() as temporary, joined_process_group():
        return run(spec, Path(spec.folder or temporary))


def whole_phase(spec: Spec) -> dict[str, Any]:
    """Train for one phase of PPG of ``spec.iterations`` iterations, with 4,096 samples in an auxiliary minibatch."""
    import torch

    from anybatch.runs.progress import read_progress
    from anybatch.training import train
    from bench_run import configuration

    torch.set_num_threads(spec.threads)
    config = configuration(spec, spec.iterations, spec.steps)
    with tempfile.TemporaryDirectory() as folder:
        train(configuration(spec, 1, spec.steps), Path(folder) / "warm-up", seed=1, quiet=True)
        began = time.perf_counter()
        result = train(config, Path(folder) / "run", seed=1, quiet=True)
        seconds = time.perf_counter() - began
        columns = read_progress(result.run_dir / "progress.csv")
    spent = {name: sum(columns[f"seconds_{name}"]) for name in ("sampling", "policy_phase", "auxiliary_phase")}
    return {
        "num_envs": spec.num_envs,
        "steps": spec.steps,
        "iterations": spec.iterations,
        "env_steps": config.total_env_steps,
        "seconds": seconds,
        "spent": spent,
        "policy_steps_per_second": config.total_env_steps / (spent["sampling"] + spent["policy_phase"]),
        "auxiliary_samples_per_second": config.aux.epochs * config.total_env_steps / spent["auxiliary_phase"],
        "peak_gpu_mib": torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_initialized() else 0,
    }


def kernels(spec: Spec) -> dict[str, Any]:
    """The operations that take the most of a policy phase: share of the time, and calls, by name."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    from anybatch.policy_phase import policy_phase
    from anybatch.runs.build import build
    from anybatch.training import estimate_advantages
    from bench_limits import synchronize
    from bench_run import configuration

    torch.set_num_threads(spec.threads)
    parts = build(configuration(spec, 1, spec.steps), seed=1)
    rollout = parts.source.next(0)
    batch, _ = estimate_advantages(rollout, rollout.reward, parts.learner.config, parts.advantage_normalizer)
    policy_phase(batch, parts.learner)
    gpu = torch.cuda.is_initialized()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as profiler:
        policy_phase(batch, parts.learner)
        synchronize()
    parts.env.close()
    column = "self_device_time_total" if gpu else "self_cpu_time_total"
    # a kernel of the GPU is an event of its own, and counts in that of the operation that launched it, too
    operations = [x for x in profiler.key_averages() if x.device_type == DeviceType.CPU and not x.is_user_annotation]
    spent = sorted(((getattr(x, column), x.key, x.count) for x in operations), reverse=True)
    total = sum(seconds for seconds, _, _ in spent)
    return {"kernels": [[name[:100], seconds / total, count] for seconds, name, count in spent[:15]]}


def gpu_tests(folder: str) -> dict[str, Any]:
    """Outcomes of the tests in ``folder``, and what the failed ones said."""
    import pytest

    class Outcomes:
        def __init__(self) -> None:
            self.counts = {"passed": 0, "failed": 0, "skipped": 0}
            self.failures: dict[str, str] = {}

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                self.counts[report.outcome] += 1
            if report.failed:
                self.failures[report.nodeid] = last_line(str(report.longrepr))

    os.chdir(ROOT)
    outcomes = Outcomes()
    options = ["-v", "--import-mode=importlib", "-p", "no:cacheprovider", "-o", "addopts=", "--durations=10"]
    code = pytest.main([*options, folder], plugins=[outcomes])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {code!r}")
    return {**outcomes.counts, "failures": outcomes.failures}


def machine(device: str) -> dict[str, Any]:
    """Facts about the machine, and about its GPUs."""
    import torch

    from bench_common import machine_facts

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise RuntimeError("PyTorch finds no CUDA device here")
    facts = machine_facts()
    if torch.cuda.is_available():
        facts["gpus"] = torch.cuda.device_count()
        facts["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    facts["environment"] = procgen()
    return facts


@functools.cache
def procgen() -> str:
    """StarPilot, or random frames of its size where Procgen cannot be made: no EnvPool, or no Qt."""
    from anybatch.config.schema import EnvConfig
    from anybatch.envs.factory import make
    from anybatch.errors import AnybatchError

    try:
        make(EnvConfig(id="procgen:starpilot-hard"), 1, 0).close()
    except AnybatchError:
        return "synthetic_env:procgen_like"
    return "procgen:starpilot-hard"


def rounds(dry: bool) -> list[Part]:
    """All parts, the most important ones first."""
    from tensor_pendulum import SETTINGS

    device = "cpu:0" if dry else "cuda"  # with an index, a CPU is measured in the way of a GPU
    shared: dict[str, Any] = {"device": device, "threads": 8, "warm_up": 1, "rate_batches": [], "plain": False}
    if dry:
        shared |= {"env": "synthetic_env:cartpole_like", "steps": 8, "minibatches": 2, "threads": 1}
    else:
        shared |= {"env": procgen(), "steps": 256, "minibatches": 8, "micro_batch": 8192, "aux_batch": 4096}

    def spec(algorithm: str = "ppo-ewma", num_envs: int = 256, *, compiled: bool = False, **more: Any) -> Spec:
        settings = {**shared, "algorithm": algorithm, "num_envs": 2 if dry else num_envs, "iterations": 3, **more}
        return Spec(**{**settings, "changes": {**more.get("changes", {}), "compile": compiled}})

    images = {"env": "synthetic_env:procgen_like", "rate_seconds": 0.0} if dry else {}
    rates = {"rate_batches": [2] if dry else [256, 2048, 8192], "plain": not dry, **images}
    several = {"iterations": 2 if dry else 8}
    phase = spec("ppg-ewma", 64, iterations=2 if dry else 32, aux_batch=4 if dry else 4096 // 32)
    phase.changes["aux.policy_iterations"] = phase.iterations
    settings = {x: y for x, y in SETTINGS.items() if x not in ("rollout_steps", "minibatches", "micro_batch")}
    tensors: dict[str, Any] = {
        **several,
        "env": "tensor_pendulum:Pendulums",
        "steps": 8 if dry else 16,
        "micro_batch": SETTINGS["micro_batch"],
        "changes": {**settings, "env.options": {"device": device}},
    }
    two = spec(**several, ranks=2, threads=1 if dry else 4, device="cpu" if dry else "cuda")
    return [
        Part("machine", 180, machine, device),
        Part("ppo", 90, training, spec("ppo", **rates)),
        Part("ppo-ewma", 60, training, spec()),
        Part("ppo-ewma, compile", 150, training, spec(compiled=True)),
        Part("whole phase of ppg-ewma", 150, whole_phase, phase),
        Part("ppo-ewma, 16 environments", 50, training, spec(num_envs=16, **several)),
        Part("ppo-ewma, 1 environment", 50, training, spec(num_envs=1, **several)),
        Part("4,096 environments of tensors", 50, training, spec(num_envs=4096, **tensors)),
        Part("ppo-ewma, 2 processes", 70, training, two, ranks=2),
        Part("kernels", 50, kernels, spec("ppo", changes={"optimizer.policy_epochs": 1, "optimizer.value_epochs": 1})),
        Part("tests", 180, gpu_tests, "tests/gpu"),
        Part("ppo-ewma, 16 environments, compile", 120, training, spec(num_envs=16, compiled=True, **several)),
        Part("ppo, compile", 120, training, spec("ppo", compiled=True)),
        Part("4,096 environments of tensors, compile", 90, training, spec(num_envs=4096, compiled=True, **tensors)),
        Part("ppo, passes of 2,048 samples", 50, training, spec("ppo", micro_batch=None if dry else 2048)),
        Part("ppo-ewma, 1 environment, compile", 120, training, spec(num_envs=1, compiled=True, **several)),
    ]


def server(modules: list[str]) -> Any:
    """Context of processes that are forked from one that has imported ``modules``, and has not touched the GPU."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(modules)
    return context


def child(part: Part, variables: dict[str, str], file: Path) -> None:
    """Do a part, or a rank of it, and write its result or why there is none to ``file``."""
    os.setsid()  # a process group of its own, so that nothing of it outlives its time
    with file.with_suffix(".log").open("w") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(variables)
    try:
        outcome = {"result": part.work(part.argument)}
    except BaseException as error:
        traceback.print_exc()
        outcome = {"reason": f"{type(error).__name__}: {last_line(str(error))}"}
    file.write_text(json.dumps(outcome))


def do(part: Part, seconds: float, out: Path, context: Any) -> dict[str, Any]:
    """The record of a part that may take ``seconds``; what it printed is added to ``out / "gpu-round.log"``."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return _do(part, seconds, Path(folder), context)
        finally:
            with (out / "gpu-round.log").open("a") as log:
                for file in sorted(Path(folder).glob("*.log")):
                    log.write(f"== {part.name}, {file.stem}\n{file.read_text(errors='replace')}\n")


def _do(part: Part, seconds: float, folder: Path, context: Any) -> dict[str, Any]:
    began = time.monotonic()
    variables = {**torchrun_variables(part.ranks), "OMP_NUM_THREADS": str(getattr(part.argument, "threads", 1))}
    stem = "".join(x if x.isalnum() else "-" for x in part.name)
    files = [folder / f"{stem}-{rank}.json" for rank in range(part.ranks)]
    processes = []
    try:
        for rank, file in enumerate(files):
            of_rank = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(context.Process(target=child, args=(part, of_rank, file)))
            processes[-1].start()
        for process in processes:
            process.join(max(0.0, began + seconds - time.monotonic()))
        stopped = any(process.is_alive() for process in processes)
    finally:
        for process in processes:
            kill(process)
    return {"seconds": round(time.monotonic() - began, 1), **outcome(files, processes, seconds if stopped else None)}


def kill(process: Any) -> None:
    """End a process and everything that it has started."""
    if process.pid is None:
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def outcome(files: Sequence[Path], processes: Sequence[Any], limit: float | None) -> dict[str, Any]:
    """The result of a part, or why it has none; ``limit``: it was stopped after these seconds."""
    results, reason = [], ""
    for file, process in zip(files, processes, strict=True):
        said = json.loads(file.read_text()) if file.exists() else {}
        log = file.with_suffix(".log")
        if "result" in said:
            results.append(said["result"])
        else:
            ended = f"ended with code {process.exitcode}" if limit is None else f"stopped after {limit:.0f} s"
            died = f"{ended}: {last_line(log.read_text() if log.exists() else '')}"
            reason = reason or said.get("reason", died)
    if reason:
        return {"status": "failed", "reason": reason}
    if "networks" not in results[0]:
        return {"status": "done", "result": results[0]}
    measured = together(results)
    return {"status": "done", "result": {**asdict(measured), "rate": measured.rate}}


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def write(records: dict[str, Any], settings: dict[str, Any], out: Path) -> None:
    from anybatch.system.atomic_files import write_text
    from gpu_round_page import page

    write_text(out / "gpu-round.json", json.dumps({"settings": settings, "parts": records}, indent=1) + "\n")
    write_text(out / "gpu-round.md", page(records, settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.5, help="when no part runs any more")
    parser.add_argument("--least", type=float, default=20.0, help="seconds that have to be left for a part to begin")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="instead of all; the facts are always included")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, and nothing is compiled")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu-round", help="folder of the JSON file and the page")
    arguments = parser.parse_args()
    began, deadline = time.monotonic(), time.monotonic() + 60 * arguments.minutes
    sys.path[:0] = _PATHS
    os.environ["PYTHONPATH"] = os.pathsep.join([*_PATHS, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if arguments.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests/gpu would take minutes
    parts = rounds(arguments.dry_run)
    names = [part.name for part in parts]
    if unknown := sorted(set(arguments.parts or ()) - set(names)):
        parser.error(f"no part is called {', '.join(map(repr, unknown))}; the parts are {'; '.join(names)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "gpu-round.log").unlink(missing_ok=True)
    context = server(_PRELOADED + ["torch._dynamo"] * arguments.dry_run)
    settings = {"dry_run": arguments.dry_run, "minutes": arguments.minutes}
    records: dict[str, Any] = {}
    for part in parts:
        if arguments.parts and part.name not in ("machine", *arguments.parts):
            continue
        left, gpus = deadline - time.monotonic(), records.get("machine", {}).get("result", {}).get("gpus", 0)
        limit = left if arguments.dry_run else min(part.seconds, left)
        if left < (0 if arguments.dry_run else arguments.least):
            records[part.name] = {"status": "skipped", "reason": "no time was left"}
        elif arguments.dry_run and part.name.endswith(", compile"):
            records[part.name] = {"status": "skipped", "reason": "nothing is compiled in a dry run"}
        elif part.ranks > 1 and not arguments.dry_run and gpus < part.ranks:
            records[part.name] = {"status": "skipped", "reason": f"it needs {part.ranks} GPUs, and there is {gpus}"}
        else:
            records[part.name] = do(part, limit, arguments.out, context)
            if part.name == "machine" and "fork" in records[part.name].get("reason", ""):
                # an import has touched the GPU: processes that import everything themselves are slower, but safe
                context = multiprocessing.get_context("spawn")
                records[part.name] = do(part, limit, arguments.out, context)
        write(records, settings, arguments.out)
        one = records[part.name]
        print(f"{time.monotonic() - began:5.0f} s  {part.name}: {one['status']} {one.get('reason', '')}", flush=True)
    print((arguments.out / "gpu-round.md").read_text())


if __name__ == "__main__":
    main()
