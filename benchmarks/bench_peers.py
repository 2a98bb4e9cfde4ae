"""Environment steps per CPU second of plain PPO beside other libraries, at equal settings on one core.

    make bench-peers                                                   # CartPole: three shapes of a batch
    python benchmarks/bench_peers.py --cases cheetah-64 cheetah-1      # needs gymnasium[mujoco]
    python benchmarks/bench_peers.py --cleanrl CHECKOUT                # CleanRL's ppo.py as well

The contenders take turns, each in a process of its own with one thread, and a round gives one ratio for each; the
median over the rounds counts. Rates are environment steps per second of CPU time, which other programs on the machine
disturb little. They cover sampling and optimisation after a first iteration, so neither imports, nor making the
environments and the run folder, nor compiling. All train two networks of two layers of 64 with tanh, on the same
Gymnasium environment in one process, but for the contenders on EnvPool. Compiled gradient steps come from a cache on
disk, as they do in every run but the first; the seconds to fill it and to read it are measured once.

TorchRL has no script without Hydra: its collector, its GAE and its loss run in the plain loop of its tutorial. SB3 and
TorchRL also clip the gradient norm as anybatch does here; CleanRL clips the value loss too. CleanRL is timed by the
difference of two lengths. Its script for continuous actions was written for Gymnasium 0.29: a copy runs in which
TransformObservation gets the argument ``observation_space`` that Gymnasium 1 requires.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench_common import RESULTS, append_json, cores, machine_facts


@dataclass(frozen=True)
class Case:
    """A batch shape: N environments, T steps, M minibatches, E epochs; ``iterations`` are measured."""

    env: str
    num_envs: int
    steps: int
    minibatches: int
    epochs: int
    iterations: int

    @property
    def env_steps(self) -> int:
        return self.num_envs * self.steps * self.iterations


CASES = {
    "cartpole-8": Case("CartPole-v1", 8, 128, 4, 4, 60),
    "cartpole-1": Case("CartPole-v1", 1, 512, 8, 10, 50),
    "cartpole-64": Case("CartPole-v1", 64, 32, 8, 1, 60),
    "cheetah-64": Case("HalfCheetah-v4", 64, 32, 32, 10, 8),
    "cheetah-1": Case("HalfCheetah-v4", 1, 2048, 32, 10, 8),
}


def anybatch(case: Case, family: str = "gym", *, compiled: bool = False) -> float:
    from anybatch.callbacks import Callback
    from anybatch.config.io import override
    from anybatch.presets import ppo, ppo_mujoco
    from anybatch.training import train

    class Clock(Callback):
        """The times at the end of each iteration."""

        def __init__(self) -> None:
            self.wall, self.cpu = [], []

        def start(self, run: Any) -> None:
            self.wall.append(time.monotonic())

        def after_iteration(self, run: Any, row: dict[str, Any]) -> None:
            self.wall.append(time.monotonic())
            self.cpu.append(time.process_time())

    shared: dict[str, Any] = {
        "num_envs": case.num_envs,
        "rollout.steps": case.steps,
        "minibatches": case.minibatches,
        "policy_epochs": case.epochs,
        "value_epochs": case.epochs,
        "device": "cpu",
        "precision": "fp32",
        "compile": compiled,
        "optimizer.shuffle": "samples",
        "optimizer.max_grad_norm": 0.5,
        "log.tensorboard": False,
    }
    small = {"model.encoder": "mlp", "model.architecture": "dual", "model.options": {"width": 64, "depth": 2}}
    cheetah = case.env.startswith("HalfCheetah")
    make = ppo_mujoco if cheetah else ppo
    config = make(f"{family}:{case.env}", **shared, **({} if cheetah else small))
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        total = case.env_steps + config.iteration_batch  # the first iteration is the warm-up
        train(override(config, {"total_env_steps": total}), Path(folder) / "run", seed=1, callbacks=[clock], quiet=True)
    times = [after - before for before, after in pairwise(clock.wall)]
    print(f"FIRST {times[0] - statistics.median(times[1:]):.3g}")
    return case.env_steps / (clock.cpu[-1] - clock.cpu[0])


def sb3(case: Case) -> float:
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    env: Any = make_vec_env(case.env, case.num_envs, seed=1)
    if case.env.startswith("HalfCheetah"):
        env = VecNormalize(env)
    model = PPO(
        "MlpPolicy",
        env,
        n_steps=case.steps,
        batch_size=case.num_envs * case.steps // case.minibatches,
        n_epochs=case.epochs,
        device="cpu",
        seed=1,
    )
    model.learn(case.num_envs * case.steps)
    began = time.process_time()
    model.learn(case.env_steps)
    return case.env_steps / (time.process_time() - began)


def _torchrl_modules(case: Case) -> tuple[Any, Any, Any]:
    """Environments, actor and critic; HalfCheetah has the normalisers and the Gaussian of the others."""
    from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule, TensorDictSequential
    from torch import nn
    from torch.distributions import Independent, Normal
    from torchrl.envs import Compose, DoubleToFloat, GymEnv, SerialEnv, TransformedEnv, VecNormV2
    from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator

    class DiagonalGaussian(Independent):
        def __init__(self, loc: Any, scale: Any) -> None:
            super().__init__(Normal(loc, scale), 1)

    env: Any = SerialEnv(case.num_envs, lambda: GymEnv(case.env))
    if cheetah := case.env.startswith("HalfCheetah"):
        env = TransformedEnv(env, Compose(DoubleToFloat(), VecNormV2(in_keys=["observation", "reward"])))
    inputs = env.observation_spec["observation"].shape[-1]

    def network(outputs: int) -> nn.Sequential:
        layers = (nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
        return nn.Sequential(*layers)

    keys = ["loc", "scale"] if cheetah else ["logits"]
    if cheetah:
        mean = TensorDictModule(network(6), ["observation"], ["loc"])
        policy = TensorDictSequential(mean, TensorDictModule(AddStateIndependentNormalScale(6), ["loc"], keys))
    else:
        policy = TensorDictModule(network(2), ["observation"], keys)
    actor = ProbabilisticActor(
        policy,
        in_keys=keys,
        distribution_class=DiagonalGaussian if cheetah else OneHotCategorical,
        return_log_prob=True,
        spec=env.action_spec,
    )
    return env, actor, ValueOperator(network(1), ["observation"])


def torchrl(case: Case) -> float:
    import torch
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    env, actor, critic = _torchrl_modules(case)
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.0, critic_coeff=0.5, normalize_advantage=True)
    estimate = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-4)
    batch = case.num_envs * case.steps
    data = ReplayBuffer(
        storage=LazyTensorStorage(batch), sampler=SamplerWithoutReplacement(), batch_size=batch // case.minibatches
    )
    collector = Collector(env, actor, frames_per_batch=batch, total_frames=case.env_steps + batch)
    began = 0.0
    for number, rollout in enumerate(collector):
        if number == 1:  # the first iteration is the warm-up
            began = time.process_time()
        with torch.no_grad():
            estimate(rollout)
        data.extend(rollout.reshape(-1))
        for _ in range(case.epochs):
            for minibatch in data:
                losses = loss(minibatch)
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                torch.nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
    rate = case.env_steps / (time.process_time() - began)
    collector.shutdown()
    return rate


def cleanrl(case: Case, checkout: Path) -> float:
    """From the CPU time of two lengths, so that imports do not count."""
    seconds = [_cleanrl_seconds(case, checkout, lengths) for lengths in (1, 2)]
    return case.env_steps / (seconds[1] - seconds[0])


def _cleanrl_seconds(case: Case, checkout: Path, lengths: int) -> float:
    name = "ppo.py" if case.env.startswith("CartPole") else "ppo_continuous_action.py"
    source = (checkout / "cleanrl" / name).read_text()
    clipping = "TransformObservation(env, lambda obs: np.clip(obs, -10, 10))"
    source = source.replace(clipping, f"{clipping[:-1]}, env.observation_space)")
    flags = {
        "env-id": case.env,
        "num-envs": case.num_envs,
        "num-steps": case.steps,
        "num-minibatches": case.minibatches,
        "update-epochs": case.epochs,
        "total-timesteps": case.env_steps * lengths,
    }
    command = [sys.executable, name, "--no-cuda"]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:  # it logs into its working directory
        (Path(folder) / name).write_text(source)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-300:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


CONTENDERS: dict[str, tuple[Callable[[Case], float], str]] = {
    "anybatch": (anybatch, "gymnasium"),
    "anybatch, compile": (partial(anybatch, compiled=True), "gymnasium"),
    "anybatch, compile, EnvPool": (partial(anybatch, family="envpool", compiled=True), "envpool"),
    "Stable-Baselines3": (sb3, "stable_baselines3"),
    "TorchRL": (torchrl, "torchrl"),
}
"""Each with the package that it needs."""


@dataclass(frozen=True)
class Measured:
    """Environment steps per CPU second, and seconds that the first iteration took longer than the others."""

    rate: float
    first: float | None


def measure(name: str, case: str, checkout: Path | None, cache: str) -> Measured | None:
    """Train in a new process on one core; None if it failed, with the reason on stderr."""
    command = [sys.executable, __file__, "--alone", name, "--cases", case]
    command += ["--cleanrl", str(checkout.resolve())] if checkout else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
    with tempfile.TemporaryDirectory() as folder:  # MuJoCo logs into the working directory
        done = subprocess.run(
            command,
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores()[-1:]),
        )
    rates = re.findall(r"^RATE ([\d.e+]+)$", done.stdout, re.MULTILINE)
    if not rates:
        print(f"{name}, {case}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}", file=sys.stderr)
        return None
    first = re.findall(r"^FIRST (\S+)$", done.stdout, re.MULTILINE)
    return Measured(float(rates[0]), float(first[0]) if first else None)


def compare(label: str, names: list[str], rounds: int, checkout: Path | None) -> dict[str, Any]:
    """Measure a case, all contenders in turn, and print the result."""
    results: dict[str, list[Measured]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as cache:
        cold = {name: measure(name, label, checkout, cache) for name in names if "compile" in name}
        for number in range(rounds):
            for name in names if number % 2 == 0 else names[::-1]:
                result = measure(name, label, checkout, cache)
                results[name] += [result] if result else []
    rates = {name: [x.rate for x in values] for name, values in results.items() if len(values) == rounds}
    print(f"\n{label}: {CASES[label]}")
    for name, values in rates.items():
        versus = [theirs / reference for theirs, reference in zip(values, rates[REFERENCE], strict=True)]
        print(
            f"  {name:27} {statistics.median(values):9,.0f} steps/CPU s, "
            f"{statistics.median(versus):5.2f} times {REFERENCE} ({min(versus):.2f} to {max(versus):.2f})",
            flush=True,
        )
    # the second compiled contender may find the programs of the first, whose networks have the same shapes
    warm = [x.first for name in cold for x in results[name] if x.first]
    seconds = {"cold": next((x.first for x in cold.values() if x), None), "warm": statistics.median(warm or [math.nan])}
    print(f"  seconds to compile: {seconds['cold']} at first, {seconds['warm']:.3g} from the cache")
    return {"rates": rates, "compile_seconds": seconds}


REFERENCE = "Stable-Baselines3"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[name for name in CASES if "cartpole" in name])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, help="beside Stable-Baselines3; default: all")
    parser.add_argument("--cleanrl", type=Path, metavar="CHECKOUT", help="folder of a checkout of CleanRL")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_peers.jsonl")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        case = CASES[arguments.cases[0]]
        run = CONTENDERS[arguments.alone][0] if arguments.alone in CONTENDERS else None
        print(f"RATE {run(case) if run else cleanrl(case, arguments.cleanrl):.6g}")
        return
    wanted = {REFERENCE, *(arguments.contenders or CONTENDERS)}
    names = [name for name, (_, package) in CONTENDERS.items() if name in wanted and importlib.util.find_spec(package)]
    names += ["CleanRL"] if arguments.cleanrl else []
    facts = machine_facts()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for label in arguments.cases:
        result = compare(label, names, arguments.rounds, arguments.cleanrl)
        append_json(arguments.out, {"machine": facts, "case": label, **asdict(CASES[label]), **result})


if __name__ == "__main__":
    main()
