"""The command line: exit codes, and one sentence for what is wrong."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from anybatch.cli.configured import parse
from anybatch.cli.main import main
from anybatch.cli.train import Arguments, _new_folder, finish
from anybatch.errors import ConfigError
from anybatch.presets import ppo
from anybatch.runs.checkpoint import checkpoints, load_newest
from anybatch.runs.folder import read_config
from anybatch.runs.progress import read_progress
from anybatch.training import TrainResult, resume

CARTPOLE = [
    *("--env.id", "gym:CartPole-v1", "--env.num-envs", "4", "--rollout.steps", "16", "--optimizer.minibatches", "4"),
    *("--total-env-steps", "256", "--quiet"),
]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--env.num-envs", "0"], ["env.num_envs is 0", "at least 1"]),
        (["--env.id", "procgen:starpilt-hard"], ["procgen:starpilt-hard", "did you mean", "starpilot"]),
        (["--env.id", "nonsense"], ["env.id is 'nonsense'", "gym:ID"]),
        (["--optimizer.minibatches", "7"], ["optimizer.minibatches 7", "multiple of 7"]),
        (["--policy.center-of-mass", "-1"], ["policy.center_of_mass is -1", "at least 0"]),
        (["--policy.proximal", "ewma", "--policy.clip", "inf"], ["policy.proximal is ewma", "policy.clip inf"]),
        (["--optimizer.policy-epochs", "0"], ["optimizer.policy_epochs is 0"]),
        (["--advantage.discount", "-0.5"], ["advantage.discount is -0.5"]),
        (["--model.encoder", "resnet"], ["model.encoder is 'resnet'", "impala"]),
        (["--device", "cuda:77"], ["device is 'cuda:77'"]),
    ],
)
@pytest.mark.procgen
def test_bad_value_is_one_sentence(
    flags: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = [] if "--env.id" in flags else ["--env.id", "procgen:starpilot-hard"]
    assert main(["train", "ppo", *env, *flags, "--out", str(tmp_path / "run")]) == 2
    output = capsys.readouterr().err.strip()
    assert output.startswith("anybatch: ")
    assert "\n" not in output
    for word in words:
        assert word in output
    assert not (tmp_path / "run").exists()  # nothing is left behind


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--env.options", "a", "1", "--env.options", "b", "2"],
            "--env.options is given 2 times, but must be given once",
        ),
        (["--env.info-keys", "a", "--env.info_keys", "b"], "--env.info-keys is given 2 times"),
        (["--cuda", "1"], "the cuda of CleanRL is device"),
    ],
)
def test_flags_that_would_replace_each_other(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words}" if "given" in words else words):
        parse("train", ["ppo", *flags], Arguments, "")


def test_options_are_truth_values_in_any_case_and_a_seed_is_ours() -> None:
    words = ["a", "true", "b", "False", "c", "1e3", "d", "truest"]
    _, _, parsed = parse("train", ["ppo", "--seed", "1", "--seed", "2", "--env.options", *words], Arguments, "")
    assert parsed.config.env.options == {"a": True, "b": False, "c": 1000.0, "d": "truest"}
    assert parsed.seed == 2  # of other flags the last one counts
    for words, value in ((["false"], False), (["True"], True), (["none"], None)):
        _, _, parsed = parse("train", ["ppo", "--env.bootstrap-truncated", *words], Arguments, "")
        assert parsed.config.env.bootstrap_truncated is value


@pytest.mark.parametrize("command", ["fly", "train", "train ppoo", "resume /nowhere", "eval /nowhere"])
def test_bad_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_train_eval_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    assert main(["train", "ppo-ewma", *CARTPOLE, "--out", run]) == 0
    assert main(["train", "ppo-ewma", *CARTPOLE, "--out", run]) == 2
    assert "already contains a run" in capsys.readouterr().err
    assert main(["eval", run, "--episodes", "5"]) == 0
    assert "(5 episodes)" in capsys.readouterr().out
    assert main(["resume", run, "--total-env-steps", "512", "--quiet"]) == 0
    assert "512" in capsys.readouterr().out
    assert main(["resume", run, "--total-env-steps", "100"]) == 2
    assert "total_env_steps is 100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "before"),
    [
        (["train", "ppo", *CARTPOLE, "--out", ""], "--out"),
        (["train", "ppo", *CARTPOLE, "--out="], "--out="),
        (["train", "--init-from", "", *CARTPOLE], "--init-from"),
        (["doctor", ""], "doctor"),
    ],
)
def test_an_empty_word_is_not_the_current_folder(
    command: list[str], before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    expected = f"anybatch: the word after {before} is empty, perhaps because a variable is not set\n"
    assert capsys.readouterr().err == expected
    assert not list(tmp_path.iterdir())


def test_default_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = ppo("gym:CartPole-v1")
    names = [_new_folder("ppo", config, 0).name for _ in range(3)]  # of runs that start together
    assert names == ["ppo-CartPole-v1-seed0", "ppo-CartPole-v1-seed0-2", "ppo-CartPole-v1-seed0-3"]
    assert main(["train", "ppo", *CARTPOLE]) == 0
    assert (tmp_path / "runs" / "ppo-CartPole-v1-seed0-4" / "config.yaml").is_file()
    assert main(["train", "ppo", *CARTPOLE, "--env.id", "gym:None-v0"]) == 2
    assert len(list((tmp_path / "runs").iterdir())) == 4  # a run that cannot begin leaves none


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", [["--help"], ["scale", "--help"], ["reproduce", "list"]])
def test_a_reader_that_closes_the_output(command: list[str], unbuffered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run([sys.executable, "-m", "anybatch", *command], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (run.returncode, run.stderr) == (1, b"")


def test_another_broken_pipe_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(arguments: list[str]) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("anybatch.cli.scale.main", broken)
    assert main(["scale"]) == 1
    assert capsys.readouterr().err == "anybatch: [Errno 32] Broken pipe\n"


def test_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    short = [
        "--env.id",
        "gym:CartPole-v1",
        "--env.num-envs",
        "2",
        "--rollout.steps",
        "16",
        "--optimizer.minibatches",
        "2",
    ]
    assert main(["train", "ppo", *short, "--total-env-steps", "32", "--out=~/run", "--quiet"]) == 0
    assert main(["doctor", "~/run"]) == 0
    assert read_progress(Path("~/run/progress.csv"))["iteration"] == [1]
    assert (tmp_path / "run" / "config.yaml").is_file()
    assert resume("~/run", total_env_steps=64, quiet=True).env_steps == 64


@pytest.mark.parametrize(
    ("preset", "example"),
    [("ppo", "gym:CartPole-v1"), ("ppo-ewma-mujoco", "HalfCheetah-v4"), ("ppo-atari", "Breakout-v5")],
)
def test_a_preset_needs_an_environment(preset: str, example: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", preset, "--env.num-envs", "8"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"anybatch: anybatch train {preset} needs an environment: --env.id, for example ")
    assert example in error and error.count("\n") == 1


def test_config_of_a_run_trains_again(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["train", "ppo-ewma", *CARTPOLE, "--seed", "3", "--out", str(first)]) == 0
    assert main(["train", str(first / "config.yaml"), "--out", str(second), "--quiet"]) == 0
    assert (first / "config.yaml").read_bytes() == (second / "config.yaml").read_bytes()
    assert read_config(second)[1] == 3
    # as the start of another run it is not repeated
    third = tmp_path / "third"
    assert main(["train", "--init-from", str(first), "--out", str(third), "--quiet"]) == 0
    assert read_config(third)[1] == 0


def test_integers_in_other_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scale = ["scale", "ppo-ewma", "--divide-batch-by", "2", "--format", "yaml", "--total-env-steps"]
    for word, number in (("1e6", 1_000_000), ("1_000", 1000)):
        assert main([*scale, word]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["total_env_steps"] == number
    with pytest.raises(SystemExit):
        main([*scale, "1.5"])


def test_a_home_folder_after_an_equals_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(["train", "ppo-ewma", *CARTPOLE, "--go-on", "--out=~/run"]) == 0
    assert (tmp_path / "run" / "config.yaml").exists() and not (tmp_path / "~").exists()


def test_suites_of_this_machine_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "run", "invariance", "--budget", "smoke", "--launcher", "print"]) == 2
    assert "launcher is print, but the suite laptop trains on this machine" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_with_a_checkpoint(number: signal.Signals, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = [*CARTPOLE[:-3], "--total-env-steps", "100000000", "--quiet", "--out", str(run)]
    command = [sys.executable, "-m", "anybatch", "train", "ppo", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    progress = run / "progress.csv"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (progress.exists() and progress.read_text().count("\n") > 2):
        time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "anybatch resume" in output
    done = read_progress(progress)["env_steps"][-1]
    content, _ = load_newest(run / "checkpoints")
    assert content["run"]["env_steps"] == done  # nothing that was logged is lost


def test_import_is_fast_and_light() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import anybatch; took = time.perf_counter() - start; "
        "assert not {'torch', 'envpool', 'matplotlib'} & set(sys.modules); assert took < 1, took"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", ["train", "resume", "eval", "watch"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert "usage: anybatch" in capsys.readouterr().out


def test_words_that_are_nearly_right(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, hint in (
        (["trian"], "did you mean train?"),
        (["train", "ppo_ewma"], "did you mean ppo-ewma?"),
        (["train", "PPO"], "did you mean ppo?"),
        (["train", "--env.id", "gym:CartPole-v1", "ppo"], "needs PRESET as its first word"),
    ):
        assert main(arguments) == 2
        assert hint in capsys.readouterr().err


def test_a_warning_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", "ppo-ewma", *CARTPOLE, "--checkpoint-seconds", "0", "--out", str(run)]) == 0
    newest = checkpoints(run / "checkpoints")[-1]
    newest.write_bytes(newest.read_bytes()[:-4])
    capsys.readouterr()
    assert main(["eval", str(run), "--episodes", "1", "--quiet"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ") and line.endswith("using the previous checkpoint")


def test_a_report_in_a_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["train", "ppo-ewma", *CARTPOLE, "--out", str(run)]) == 0
    assert main(["report", str(run), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").is_file()


def test_a_run_folder_in_place_of_its_file_is_recognised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("env: {id: 'gym:CartPole-v1'}")
    assert main(["train", str(tmp_path)]) == 2
    assert f"did you mean {tmp_path / 'config.yaml'}?" in capsys.readouterr().err
    assert main(["grid"]) == 2
    assert "anybatch grid needs a file" in capsys.readouterr().err


def test_without_an_end_of_an_episode_there_is_no_mean(capsys: pytest.CaptureFixture[str]) -> None:
    assert finish(TrainResult(Path("run"), 8, math.nan, interrupted=False)) == 0
    assert capsys.readouterr().out.startswith("done: 8 steps; no episode ended\n")
