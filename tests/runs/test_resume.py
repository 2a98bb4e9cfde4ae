"""Same seed, same bytes; and a run that was stopped, or killed, ends as one that was not."""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import anybatch.training as training
from anybatch.config.io import override
from anybatch.config.schema import TrainConfig
from anybatch.errors import CheckpointError, ConfigError, EnvError
from anybatch.grid import run_grid
from anybatch.presets import ppo, ppo_ewma
from anybatch.runs import checkpoint
from anybatch.runs.build import Components, build
from anybatch.runs.folder import read_config
from anybatch.runs.resharding import restore, state_of
from anybatch.system.signals import Interrupts
from anybatch.training import TrainResult, resume, train

TIME_COLUMNS = (
    "seconds",
    "env_steps_per_second",
    "seconds_sampling",
    "seconds_policy_phase",
    "seconds_auxiliary_phase",
)
ENVS, STEPS = 4, 16
ITERATION = ENVS * STEPS


def small(preset: Callable[..., TrainConfig] = ppo, *, iterations: int = 6, **changes: Any) -> TrainConfig:
    config = preset(
        "gym:CartPole-v1",
        num_envs=ENVS,
        steps=STEPS,
        minibatches=4,
        step_size=1e-2,
        total_env_steps=iterations * ITERATION,
        precision="fp32",
        device="cpu",
        tensorboard=False,
        model={"encoder": "mlp", "options": {"width": 8, "depth": 1}},
    )
    return override(config, changes)


NORMALIZED = {"env.id": "gym:Pendulum-v1", "observation.normalize": True}
VARIANTS: dict[str, TrainConfig] = {
    "ppo": small(),
    "ppo-ewma": small(ppo_ewma),
    "delayed": small(ppo_ewma, **{"rollout.source": {"kind": "delayed", "delay": 2}}),
    "figure-1a": small(
        proximal="recent",
        importance="proximal",
        allow_stale_coupled=True,
        **{"rollout.source": {"kind": "delayed", "delay": 1}},
    ),
    "separate-epochs": small(ppo_ewma, policy_epochs=1, value_epochs=2, architecture="dual", objective="kl"),
    "coefficients": small(clip=0.02, clip_schedule="0:1 1:0.1", entropy_coefficient=0.5, entropy_schedule="linear"),
    "span-schedule-sgd": small(span=5.0, schedule="linear", optimizer={"kind": "sgd", "sgd_momentum": 0.9}),
    "box-actions": small(**{"env.id": "gym:Pendulum-v1"}),
    "normalised, clipped, shuffled": small(**{**NORMALIZED, "max_grad_norm": 0.5, "optimizer.shuffle": "samples"}),
    "passes spread out": small(ppo_ewma, policy_epochs=3, value_epochs=3, epoch_window=4.0),
    "step size by KL": small(ppo_ewma, kl_target=1e-3, kl_factor=1.3),
    "step size by sample size": small(ppo_ewma, follow_ess=True, **{"rollout.source": {"kind": "delayed", "delay": 2}}),
    "stopped by KL": small(policy_epochs=4, value_epochs=4, kl_stop=1e-3),
    "normalised, delayed": small(ppo_ewma, **{**NORMALIZED, "rollout.source": {"kind": "delayed", "delay": 2}}),
}


class Hooked:
    """A rollout source that calls `at` with the number of the iteration before it samples."""

    def __init__(self, source: Any, at: Callable[[int], None]) -> None:
        self._source, self._at, self._iteration = source, at, 0

    def next(self, iteration: int) -> Any:
        self._iteration += 1
        self._at(self._iteration)
        return self._source.next(iteration)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


@contextlib.contextmanager
def hooked(at: Callable[[int, Interrupts], None]) -> Iterator[None]:
    """In `train` and `resume`, call `at` before each iteration samples, with its number since the start."""

    def build_hooked(*args: Any, **options: Any) -> Components:
        parts = build(*args, **options)
        return replace(parts, source=Hooked(parts.source, lambda i: at(i, parts.learner.interrupts)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "build", build_hooked)
        yield


def stopped(config: TrainConfig, out: Path, iterations: int, seed: int = 0) -> TrainResult:
    """Train, and be asked to stop during an iteration."""
    with hooked(lambda iteration, interrupts: interrupts.request() if iteration == iterations else None):
        return train(config, out, seed, quiet=True)


def rows(out: Path) -> list[dict[str, str]]:
    with open(out / "progress.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert found
    return [{name: value for name, value in row.items() if name not in TIME_COLUMNS} for row in found]


def final_state(out: Path) -> dict[str, Any]:
    content, passed_over = checkpoint.load_newest(out / "checkpoints")
    assert not passed_over
    del content["run"]["seconds"]
    return content


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        if list(a) != list(b):
            return [f"{where}: {list(a)} != {list(b)}"]
        return [found for key in a for found in differences(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return [f"{where}: {len(a)} != {len(b)} entries"]
        pairs = enumerate(zip(a, b, strict=True))
        return [found for i, (x, y) in pairs for found in differences(x, y, f"{where}[{i}]")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return [] if same else [f"{where}: tensors differ"]
    return [] if a == b else [f"{where}: {a!r} != {b!r}"]


# ---------------------------------------------------------------- determinism


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    config = small(ppo_ewma)
    for out in ("a", "b"):
        torch.manual_seed(hash(out) % 1000)  # the global generator plays no part
        result = train(config, tmp_path / out, seed=5, quiet=True)
        assert not result.interrupted
        assert result.env_steps == 6 * ITERATION
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert differences(final_state(tmp_path / "a"), final_state(tmp_path / "b")) == []
    header = (tmp_path / "a" / "progress.csv").read_text().splitlines()[0]
    assert header == (tmp_path / "b" / "progress.csv").read_text().splitlines()[0]
    assert (tmp_path / "a" / "config.yaml").read_bytes() == (tmp_path / "b" / "config.yaml").read_bytes()
    train(config, tmp_path / "c", seed=6, quiet=True)
    other = rows(tmp_path / "c")
    assert all(x != y for x, y in zip(rows(tmp_path / "a"), other, strict=True))


def test_the_seed_reaches_networks_environments_actions_and_order() -> None:
    def parts_of(seed: int) -> dict[str, torch.Tensor]:
        parts = build(small(), seed)
        first = parts.source._sampler  # type: ignore[attr-defined]
        found = {
            "network": torch.cat([p.detach().flatten() for p in parts.learner.agent.parameters()]),
            "environment": torch.from_numpy(first.env.reset().copy()),
            "actions": torch.rand(9, generator=first.generator),
            "order": torch.randperm(50, generator=parts.learner.shuffle),
        }
        parts.env.close()
        return found

    a, b, c = parts_of(1), parts_of(1), parts_of(2)
    for name in a:
        assert torch.equal(a[name], b[name]), name
        assert not torch.equal(a[name], c[name]), name


def test_progress_has_the_documented_columns(tmp_path: Path) -> None:
    train(small(iterations=3), tmp_path / "run", quiet=True)
    with open(tmp_path / "run" / "progress.csv", newline="") as file:
        found = list(csv.DictReader(file))
    documented = {"iteration", "env_steps", "seconds", "env_steps_per_second", "mean_episode_return", "clip_fraction"}
    documented |= {"kl_proximal", "kl_behavior", "entropy", "advantage_std", "explained_variance", "gradient_steps"}
    assert documented <= set(found[0])
    assert [int(row["iteration"]) for row in found] == [1, 2, 3]
    assert [int(row["env_steps"]) for row in found] == [64, 128, 192]
    assert [int(row["gradient_steps"]) for row in found] == [12, 24, 36]  # 3 epochs of 4 minibatches


def test_the_step_size_is_logged(tmp_path: Path) -> None:
    # 1e-2 times the fraction of the 4 iterations that is left before each of them
    train(small(iterations=4, schedule="linear"), tmp_path / "run", quiet=True)
    assert step_sizes(tmp_path / "run") == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])
    train(small(iterations=2), tmp_path / "constant", quiet=True)
    assert step_sizes(tmp_path / "constant") == [1e-2, 1e-2]


def step_sizes(out: Path) -> list[float]:
    return [float(row["step_size"]) for row in rows(out)]


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize("variant", VARIANTS)
def test_stopping_and_resuming_changes_nothing(variant: str, tmp_path: Path) -> None:
    config, whole, halves = VARIANTS[variant], tmp_path / "whole", tmp_path / "halves"
    train(config, whole, seed=3, quiet=True)
    total = len(rows(whole))
    half = total // 2
    first = stopped(config, halves, half, seed=3)
    assert first.interrupted
    assert len(rows(halves)) == half
    assert rows(halves) == rows(whole)[:half]
    assert differences(final_state(halves)["state"]["agent"], final_state(whole)["state"]["agent"])
    second = resume(halves, quiet=True)
    assert not second.interrupted
    assert differences(final_state(halves), final_state(whole)) == []
    assert rows(halves) == rows(whole)
    assert second.env_steps == int(rows(whole)[-1]["env_steps"])
    assert not (halves / "progress-lost.csv").exists()


def test_a_new_end_of_the_linear_schedule_is_stated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(small(iterations=2, schedule="linear"), tmp_path / "run", quiet=True)
    capsys.readouterr()
    resume(tmp_path / "run", total_env_steps=4 * ITERATION, quiet=True)
    assert "instead of 128 the step size continues at 0.005 instead of 0" in capsys.readouterr().err
    assert step_sizes(tmp_path / "run") == pytest.approx([1e-2, 5e-3, 5e-3, 2.5e-3])  # 1e-2 * (1 - 2 / 4) in the third
    train(small(iterations=2), tmp_path / "constant", quiet=True)
    resume(tmp_path / "constant", total_env_steps=4 * ITERATION, quiet=True)
    assert capsys.readouterr().err == ""


def test_resuming_after_every_iteration(tmp_path: Path) -> None:
    config = VARIANTS["delayed"]
    train(config, tmp_path / "whole", quiet=True)
    stopped(config, tmp_path / "steps", 1)
    out = tmp_path / "steps"
    with hooked(lambda _, interrupts: interrupts.request()):
        resumed = [resume(out, quiet=True).interrupted for _ in range(3)]
    assert resumed == [True, True, False]  # 4 iterations: the delay's warm-up counts as 2
    assert differences(final_state(out), final_state(tmp_path / "whole")) == []
    assert rows(out) == rows(tmp_path / "whole")


def test_rows_beyond_the_checkpoint_are_made_again(tmp_path: Path) -> None:
    config = small(ppo_ewma, checkpoint_seconds=0.0, keep_checkpoints=100)
    train(config, tmp_path / "whole", quiet=True)
    shutil.copytree(tmp_path / "whole", tmp_path / "back")
    for path in checkpoint.checkpoints(tmp_path / "back" / "checkpoints")[2:]:
        path.unlink()
    kept = final_state(tmp_path / "back")["run"]["iteration"]
    assert kept < 5
    resume(tmp_path / "back", quiet=True)
    assert rows(tmp_path / "back") == rows(tmp_path / "whole")
    assert differences(final_state(tmp_path / "back"), final_state(tmp_path / "whole")) == []
    with open(tmp_path / "back" / "progress-lost.csv", newline="") as file:
        assert [int(row["iteration"]) for row in csv.DictReader(file)] == list(range(kept + 1, 7))


def test_a_damaged_checkpoint_costs_one_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small(checkpoint_seconds=0.0, keep_checkpoints=2)
    train(config, tmp_path / "whole", quiet=True)
    stopped(config, tmp_path / "run", 4)
    *_, before, newest = checkpoint.checkpoints(tmp_path / "run" / "checkpoints")
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    resume(tmp_path / "run", quiet=True)
    assert newest.name in capsys.readouterr().err
    assert before.name != newest.name
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    assert differences(final_state(tmp_path / "run"), final_state(tmp_path / "whole")) == []


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    train(small(iterations=2), tmp_path / "run", quiet=True)
    before, progress = final_state(tmp_path / "run"), rows(tmp_path / "run")
    result = resume(tmp_path / "run", quiet=True)
    assert not result.interrupted
    assert differences(final_state(tmp_path / "run"), before) == []
    assert rows(tmp_path / "run") == progress


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_at_the_end_of_its_iteration(number: signal.Signals, tmp_path: Path) -> None:
    with hooked(lambda iteration, _: signal.raise_signal(number) if iteration == 2 else None):
        result = train(small(), tmp_path / "run", quiet=True)
    assert result.interrupted
    assert result.env_steps == 2 * ITERATION
    assert not resume(tmp_path / "run", quiet=True).interrupted


def test_a_second_signal_abandons_the_iteration(tmp_path: Path) -> None:
    def twice(iteration: int, _: Interrupts) -> None:
        if iteration == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    config = small(checkpoint_seconds=0.0)
    with hooked(twice):
        result = train(config, tmp_path / "run", quiet=True)
    assert result.interrupted
    assert result.env_steps == 2 * ITERATION
    train(config, tmp_path / "whole", quiet=True)
    resume(tmp_path / "run", quiet=True)
    assert differences(final_state(tmp_path / "run"), final_state(tmp_path / "whole")) == []


# ---------------------------------------------------------------- kill -9

KILLED = textwrap.dedent(
    """
    import os, signal, sys
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    import anybatch.training as training
    from anybatch.runs.folder import read_config

    config, seed = read_config(Path(sys.argv[1]))
    moment, count = sys.argv[3], 0

    def dies(function, at):
        def wrapped(*args, **kwargs):
            global count
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return wrapped

    if moment == "gradient step":  # in the fourth iteration: 12 steps each
        import anybatch.policy_phase
        anybatch.policy_phase.drop_gradients = dies(anybatch.policy_phase.drop_gradients, 3 * 12 + 5)
    elif moment == "checkpoint":  # the file is written, not renamed
        replace = os.replace
        fatal = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        os.replace = lambda a, b: (fatal if Path(b).name == "iteration-000000004.ckpt" else replace)(a, b)
    elif moment == "row":
        import anybatch.runs.progress
        anybatch.runs.progress.ProgressLog._append = dies(anybatch.runs.progress.ProgressLog._append, 4)
    training.train(config, sys.argv[2], seed, quiet=True)
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["gradient step", "checkpoint", "row"])
def test_kill_9_loses_nothing_but_time(moment: str, tmp_path: Path) -> None:
    config = small(ppo_ewma, checkpoint_seconds=0.0)
    train(config, tmp_path / "whole", seed=4, quiet=True)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "whole"), str(tmp_path / "run"), moment]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    saved = [path.name for path in checkpoint.checkpoints(tmp_path / "run" / "checkpoints")]
    assert saved == ["iteration-000000002.ckpt", "iteration-000000003.ckpt"]
    assert not resume(tmp_path / "run", quiet=True).interrupted
    assert differences(final_state(tmp_path / "run"), final_state(tmp_path / "whole")) == []
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


# ---------------------------------------------------------------- rollout sources


def test_delay_0_is_the_synchronous_run(tmp_path: Path) -> None:
    for name, source in (("sync", {"kind": "synchronous"}), ("delayed", {"kind": "delayed", "delay": 0})):
        train(small(ppo_ewma, **{"rollout.source": source}), tmp_path / name, seed=2, quiet=True)
    assert rows(tmp_path / "sync") == rows(tmp_path / "delayed")
    sync, delayed = (final_state(tmp_path / name)["state"] for name in ("sync", "delayed"))
    assert delayed["source"].pop("waiting") == []
    assert differences(sync, delayed) == []


def test_the_warm_up_of_a_delay_counts_as_environment_steps(tmp_path: Path) -> None:
    train(VARIANTS["delayed"], tmp_path / "run", quiet=True)
    # delay 2: the first iteration samples 3 rollouts, and every later one 1; 6 rollouts in all
    steps = [int(row["env_steps"]) for row in rows(tmp_path / "run")]
    assert steps == [3 * ITERATION, 4 * ITERATION, 5 * ITERATION, 6 * ITERATION]
    assert len(final_state(tmp_path / "run")["state"]["source"]["waiting"]) == 2


@pytest.mark.parametrize("delay", [1, 3])
def test_delayed_data_is_as_old_as_it_should_be(delay: int) -> None:
    parts = build(small(**{"rollout.source": {"kind": "delayed", "delay": delay}}), 0)
    bias = parts.learner.agent.value_head.bias
    ages = []
    with torch.no_grad():
        parts.learner.agent.value_head.weight.zero_()
        for iteration in range(delay + 4):
            bias.fill_(float(iteration))  # the value that a rollout records is the iteration that sampled it
            rollout = parts.source.next(iteration)
            recorded = rollout.value.unique()
            assert len(recorded) == 1
            ages.append(iteration - int(recorded))
            assert rollout.version == int(recorded)
    parts.env.close()
    # in the warm-up all rollouts come from the first weights
    assert ages == [*range(delay + 1), *[delay] * 3]


# ---------------------------------------------------------------- refusals


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    train(small(iterations=1), tmp_path / "run", quiet=True)
    before = (tmp_path / "run" / "progress.csv").read_bytes()
    with pytest.raises(ConfigError, match="already contains a run"):
        train(small(iterations=1), tmp_path / "run", quiet=True)
    assert (tmp_path / "run" / "progress.csv").read_bytes() == before
    (tmp_path / "run" / "config.yaml").unlink()  # its checkpoints are a run's all the same
    with pytest.raises(ConfigError, match="already contains a run"):
        train(small(iterations=1), tmp_path / "run", quiet=True)
    assert len(checkpoint.checkpoints(tmp_path / "run" / "checkpoints")) == 2


@pytest.mark.parametrize("call", [lambda out: train(small(), out), resume, lambda out: run_grid([(small(), 0)], out)])
def test_an_empty_path_is_not_the_current_folder(
    call: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is '', but must be a folder"):
        call("")
    assert not list(tmp_path.iterdir())


def test_what_is_not_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a run folder"):
        resume(tmp_path / "nowhere", quiet=True)
    with pytest.raises(ConfigError, match=r"run is 3, but must be a folder"):
        read_config(3)  # type: ignore[arg-type]
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(CheckpointError, match="damaged"):
        resume(tmp_path, quiet=True)
    for text, words in (
        ("just text", "'just text' instead of"),
        ("", "None instead of"),
        ("a: 1", "no entry anybatch"),
    ):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(CheckpointError, match=f"damaged: it (contains|has) {words}"):
            resume(tmp_path, quiet=True)


def test_a_bad_configuration_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        train(small(**{"env.num_envs": 0}), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_the_run_folder_tells_what_was_run(tmp_path: Path) -> None:
    config = small(ppo_ewma, iterations=1)
    train(config, tmp_path / "run", seed=17, quiet=True)
    assert read_config(tmp_path / "run") == (config, 17)


def test_resume_checks_the_configuration(tmp_path: Path) -> None:
    stopped(small(), tmp_path / "run", 2)
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("micro_batch: null", "micro_batch: 0"))
    with pytest.raises((ConfigError, CheckpointError), match="micro_batch"):
        resume(tmp_path / "run", quiet=True)


def test_a_checkpoint_of_another_network_is_one_sentence(tmp_path: Path) -> None:
    stopped(small(), tmp_path / "run", 2)
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("width: 8", "width: 16"))
    with pytest.raises(CheckpointError):
        resume(tmp_path / "run", quiet=True)


def test_a_run_that_died_in_its_first_iteration_can_go_on(tmp_path: Path) -> None:
    def crash(_: int, __: Interrupts) -> None:
        raise ZeroDivisionError

    with hooked(crash), pytest.raises(ZeroDivisionError):
        train(small(), tmp_path / "run", quiet=True)
    train(small(), tmp_path / "whole", quiet=True)
    assert not resume(tmp_path / "run", quiet=True).interrupted
    assert differences(final_state(tmp_path / "run"), final_state(tmp_path / "whole")) == []
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


def test_a_negative_seed_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seed"):
        train(small(iterations=1), tmp_path / "run", seed=-1, quiet=True)


def test_a_run_on_another_kind_of_device_goes_on_and_says_so() -> None:
    parts = build(small(), 0)
    state = state_of(parts.stateful)
    assert not any("another kind of device" in x for x in restore(parts.stateful, {"state": state}, 0, [4]))
    state["torch"]["cuda"] = torch.zeros(16)  # only a run on a GPU keeps this
    assert "another kind of device" in restore(parts.stateful, {"state": state}, 0, [4])[0]
    parts.env.close()


def test_what_an_environment_says_is_not_taken_for_an_edited_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(small(), tmp_path / "run", 2)

    def refuse(*_: object) -> list[str]:
        raise EnvError("its wrappers were others")

    monkeypatch.setattr(training, "restore", refuse)
    with pytest.raises(EnvError, match="its wrappers were others"):
        resume(tmp_path / "run", quiet=True)


def test_time_is_that_of_iterations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of making environments, also when a run is resumed."""
    made = training.build

    def slow(*arguments: Any, **keywords: Any) -> Components:
        components = made(*arguments, **keywords)
        time.sleep(2.0)
        return components

    monkeypatch.setattr(training, "build", slow)
    train(small(iterations=2), tmp_path / "run", quiet=True)
    resume(tmp_path / "run", total_env_steps=4 * ITERATION, quiet=True)
    with (tmp_path / "run" / "progress.csv").open() as file:
        seconds = [float(row["seconds"]) for row in csv.DictReader(file)]
    assert len(seconds) == 4 and seconds == sorted(seconds) and seconds[-1] < 2.0
