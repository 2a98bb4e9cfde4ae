"""Resuming after config.yaml, the version or the threads have changed, and from files that are no checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from anybatch.cli.main import main
from anybatch.config.io import override, read_yaml
from anybatch.errors import CheckpointError, ConfigError
from anybatch.runs import checkpoint
from anybatch.runs.build import build
from anybatch.runs.edited import other_distributions
from anybatch.runs.evaluation import load_policy
from anybatch.runs.folder import read_config
from anybatch.training import resume, train
from small_runs import tiny_ppo


@pytest.fixture
def run(tmp_path: Path) -> Path:
    train(tiny_ppo(), tmp_path / "run", quiet=True)
    return tmp_path / "run"


def edit(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = read_yaml(run / "config.yaml")
    change(values)
    (run / "config.yaml").write_text(yaml.safe_dump(values))


def rewrite(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Replace the newest checkpoint by one of other content, with its digest."""
    path = checkpoint.checkpoints(run / "checkpoints")[-1]
    content = checkpoint.load(path)
    changed = change(content)
    for other in checkpoint.checkpoints(run / "checkpoints"):
        other.unlink()
    checkpoint.save(run / "checkpoints", 2, content if changed is None else changed, 1)


@pytest.mark.parametrize(
    ("section", "name", "value", "sentence"),
    [
        (None, "seed", 7, "seed was 0 and is now 7"),
        ("optimizer", "adam_eps", 0.1, "optimizer.adam_eps was 1e-08 and is now 0.1"),
        ("env", "id", "gym:CartPole-v0", "env.id was 'gym:CartPole-v1' and is now 'gym:CartPole-v0'"),
        (None, "total_env_steps", 24, "total_env_steps was 16 and is now 24"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*out of date")
def test_edits_are_named(
    section: str | None, name: str, value: Any, sentence: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(run, lambda values: (values[section] if section else values).update({name: value}))
    resume(run, quiet=True)
    assert f"config.yaml was edited after the checkpoint: {sentence}\n" in capsys.readouterr().err


def test_another_distribution_of_the_same_weights_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(run, lambda values: values["model"]["gaussian"].update(squash=True))
    resume(run, quiet=True)
    assert "model.gaussian.squash is True instead of False: the same weights now give a" in capsys.readouterr().err
    clips = [override(tiny_ppo(), {"observation.normalize": True, "observation.clip": x}) for x in (10.0, 3.0)]
    (sentence,) = other_distributions(*clips)
    assert sentence == "observation.clip is 3.0 instead of 10.0: the same weights now see other observations"
    assert not other_distributions(*(override(config, {"observation.normalize": False}) for config in clips))


def test_another_distribution_is_said_where_a_policy_is_loaded(run: Path) -> None:
    edit(run, lambda values: values["model"]["gaussian"].update(squash=True))
    with pytest.warns(UserWarning, match=r"model\.gaussian\.squash is True instead of False"):
        load_policy(run)


def test_what_was_switched_on_starts_anew_or_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for section, name in (("log", "noise_scale"), ("advantage", "normalize")):
        edit(run, lambda values, section=section, name=name: values[section].update({name: False}))
    resume(run, total_env_steps=24, quiet=True)
    edit(run, lambda values: values["log"].update(noise_scale=True))
    resume(run, total_env_steps=32, quiet=True)
    assert "the gradient noise scale is measured from here on" in capsys.readouterr().err
    edit(run, lambda values: values["advantage"].update(normalize=True))
    with pytest.raises(CheckpointError, match="has no state of advantage normalizer, which was switched on"):
        resume(run, total_env_steps=40, quiet=True)


def test_without_a_change_nothing_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume(run, total_env_steps=24, quiet=True)
    resume(run, quiet=True)
    assert not capsys.readouterr().err


def test_edited_numbers_of_the_optimiser_take_effect(run: Path) -> None:
    before = checkpoint.load_newest(run / "checkpoints")[0]["state"]["optimizers"]["joint"]["state"][0]
    edit(run, lambda values: values["optimizer"].update(adam_eps=0.1, adam_betas=[0.5, 0.6]))
    parts = build(read_config(run)[0], 0)
    parts.learner.optimizers.load_state_dict(checkpoint.load_newest(run / "checkpoints")[0]["state"]["optimizers"])
    after = parts.learner.optimizers.state_dict()["joint"]["state"][0]
    parts.env.close()
    steps = float(before["step"])
    unbiased = before["exp_avg_sq"] / (1 - 0.999**steps)
    torch.testing.assert_close(after["exp_avg_sq"] / (1 - 0.6**steps), unbiased)
    resume(run, total_env_steps=24, quiet=True)
    state = checkpoint.load_newest(run / "checkpoints")[0]["state"]["optimizers"]["joint"]
    assert (state["param_groups"][0]["eps"], tuple(state["param_groups"][0]["betas"])) == (0.1, (0.5, 0.6))


def test_another_version_and_other_threads_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(run, lambda content: content.update(version="0.0.1", threads=77))
    resume(run, quiet=True)
    error = capsys.readouterr().err
    assert "was written by anybatch 0.0.1" in error
    assert f"with 77 threads, but PyTorch now has {torch.get_num_threads()}" in error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda values: values["optimizer"].update(kind="sgd"), "optimizer.kind was adam"),
        (lambda values: values["optimizer"].update(value_epochs=2), "do not match its config.yaml"),
        (lambda values: values["model"]["options"].update(width=8), "do not match its config.yaml"),
        (lambda values: values.update(seed=-1), "seed is -1"),
        (lambda values: values["env"].update(num_envs=4), "set env.num_envs back to 2"),
    ],
)
def test_edits_that_do_not_fit_are_one_sentence(
    change: Callable[[dict[str, Any]], None], words: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(run, change)
    assert main(["resume", str(run), "--total-env-steps", "24"]) == 2
    *messages, sentence = capsys.readouterr().err.strip().splitlines()
    assert sentence.startswith("anybatch: ") and words in sentence
    assert all(message.startswith("config.yaml was edited") for message in messages)


@pytest.mark.parametrize(
    "content",
    [
        {},
        [1, 2],
        7,
        {"run": 3, "seed": 0, "state": {}},
        {"run": {"iteration": 1}, "seed": 0, "state": {}},
        {"run": "complete", "seed": 0, "state": {}},
        {"run": "complete", "seed": 0, "state": {"agent": 5}},
        {"run": "complete", "seed": 0, "state": 5},
        {"run": "complete", "seed": 0, "state": {"agent": {"x": torch.ones(1)}}},
    ],
)
def test_a_checkpoint_of_something_else(content: Any, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(old: dict[str, Any]) -> Any:
        if isinstance(content, dict) and content.get("run") == "complete":
            return content | {"run": old["run"]}
        return content

    rewrite(run, change)
    for command in (["resume", str(run), "--total-env-steps", "24"], ["eval", str(run), "--episodes", "1"]):
        assert main(command) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("value", [None, -1, "x", math.nan, [], {}])
def test_every_entry_of_another_kind(value: Any, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = checkpoint.checkpoints(run / "checkpoints")[-1:]
    whole = path.read_bytes()
    config = (run / "config.yaml").read_bytes()
    for name in checkpoint.load(path)["run"]:
        rewrite(run, lambda content, name=name: content["run"].update({name: value}))  # type: ignore[misc]
        code = main(["resume", str(run), "--total-env-steps", "24", "--quiet"])
        errors = capsys.readouterr().err
        assert (code, errors.count("\n")) == (2, 1) or code == 0, (name, errors)
        assert load_policy(run)  # the networks are fine
        for other in checkpoint.checkpoints(run / "checkpoints"):
            other.unlink()
        path.write_bytes(whole)
        (run / "config.yaml").write_bytes(config)


def test_a_run_without_a_checkpoint_says_how_to_start_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in checkpoint.checkpoints(run / "checkpoints"):
        path.unlink()
    (run / "progress.csv").unlink()
    assert main(["resume", str(run)]) == 2
    error = capsys.readouterr().err
    assert "stopped before its first one" in error
    command = error.partition("anybatch train ")[2].split()
    assert main(["train", *command, "--quiet"]) == 0  # and the command works


def test_checkpoints_of_before_have_no_recent_batches(run: Path) -> None:
    rewrite(run, lambda content: {**content, "state": {x: y for x, y in content["state"].items() if x != "recent"}})
    assert resume(run, total_env_steps=24, quiet=True).env_steps == 24


def test_a_numpy_integer_is_one(run: Path) -> None:
    assert resume(run, total_env_steps=np.int64(24), quiet=True).env_steps == 24  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="total_env_steps is True"):
        resume(run, total_env_steps=True, quiet=True)


@pytest.mark.parametrize(("section", "name", "value"), [("advantage", "discount", 7.0), ("env", "id", "gym:None-v0")])
def test_rows_stay_where_a_run_cannot_be_resumed(section: str, name: str, value: Any, run: Path) -> None:
    checkpoint.checkpoints(run / "checkpoints")[-1].unlink()  # as if the run had been killed after its last row
    before = (run / "progress.csv").read_bytes()
    edit(run, lambda values: values[section].update({name: value}))
    with pytest.raises(ConfigError):
        resume(run, quiet=True)
    assert (run / "progress.csv").read_bytes() == before and not (run / "progress-lost.csv").exists()


@pytest.mark.parametrize("quiet", [True, False])
def test_a_progress_of_something_else(quiet: bool, run: Path) -> None:
    (run / "progress.csv").write_text("a,b\n1,2\n")
    with pytest.raises(CheckpointError, match="has no column 'iteration', so it is not the progress of a run"):
        resume(run, total_env_steps=24, quiet=quiet)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rollout.steps", str(2**31)], ["rollout.steps 2,147,483,648", "GB"]),
        (["--env.num-envs", str(2**22), "--rollout.steps", str(2**20)], ["env.num_envs 4,194,304", "GB"]),
        (["--env.num-envs", str(2**31)], ["env.num_envs is 2147483648", "4,194,304"]),
        (["--model.encoder", "mlp", "--model.options", "width", str(2**31)], ["model.options", "memory"]),
    ],
)
def test_sizes_beyond_memory(flags: list[str], words: list[str], tmp_path: Path, capsys: Any) -> None:
    base = ["--env.id", "gym:CartPole-v1", "--env.num-envs", "2", "--rollout.steps", "4", "--scaling.off"]
    command = ["train", "ppo", *base, "--optimizer.minibatches", "2", *flags, "--out", str(tmp_path / "run")]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words), error
