"""The command line around batch sizes: train adjusts and tells, scale prints, doctor examines."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from anybatch.cli.main import main
from anybatch.config.io import from_dict, override, to_yaml
from anybatch.config.schema import TrainConfig
from anybatch.presets import ppg_ewma, ppo_ewma
from anybatch.scaling import rescale, scale

CARTPOLE = ["--env.id", "gym:CartPole-v1", "--total-env-steps", "128", "--quiet"]
TINY = [
    *("--env.id", "gym:CartPole-v1", "--env.num-envs", "2", "--rollout.steps", "8", "--total-env-steps", "480"),
    *("--optimizer.minibatches", "1", "--optimizer.policy-epochs", "1", "--optimizer.value-epochs", "1"),
]
SMALL = ["--env.num-envs", "2", "--rollout.steps", "32"]


def config_of(run: Path) -> tuple[TrainConfig, dict[str, Any]]:
    values = yaml.safe_load((run / "config.yaml").read_text())
    extra = {key: values.pop(key) for key in ("anybatch", "seed")}
    return from_dict(values), extra


# ---------------------------------------------------------------- train


def test_a_changed_batch_is_followed_by_everything_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    flags = [*CARTPOLE, "--env.num-envs=16", "--rollout.steps", "32", "--aux.epochs", "0"]
    assert main(["train", "ppg-ewma", *flags, "--out", str(run)]) == 0
    config, _ = config_of(run)
    expected, changes = rescale(ppg_ewma(), num_envs=16, rollout_steps=32)
    for section in ("optimizer", "policy", "advantage", "workers"):
        assert getattr(config, section) == getattr(expected, section)
    assert config.aux.minibatches_per_epoch == expected.aux.minibatches
    printed = capsys.readouterr().out
    assert "iteration batch 65,536 -> 512 samples, optimisation batch 8,192 -> 64" in printed
    assert "--scaling.off" in printed
    for change in changes:
        assert change.field in printed
    assert (run / "scaling.txt").read_text() in printed
    stored = json.loads((run / "scaling.json").read_text())
    assert [row["field"] for row in stored] == [change.field for change in changes]


def test_a_run_s_configuration_is_never_scaled_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["train", "ppo-ewma", *CARTPOLE, *SMALL, "--out", str(first)]) == 0
    capsys.readouterr()
    assert main(["train", str(first / "config.yaml"), "--quiet", "--out", str(second)]) == 0
    assert config_of(first) == config_of(second)
    # nothing is left of an attempt that never began
    (tmp_path / "tried").mkdir()
    for name in ("scaling.txt", "scaling.json"):
        (tmp_path / "tried" / name).write_text("of another configuration")
    assert main(["train", str(first / "config.yaml"), "--quiet", "--out", str(tmp_path / "tried")]) == 0
    assert not list((tmp_path / "tried").glob("scaling.*"))
    assert "iteration batch" not in capsys.readouterr().out
    assert not (second / "scaling.txt").exists()
    # and the run's own batch is the reference of the next change
    third = tmp_path / "third"
    assert main(["train", str(first / "config.yaml"), "--quiet", "--env.num-envs", "4", "--out", str(third)]) == 0
    assert config_of(third)[0] == rescale(config_of(first)[0], num_envs=4)[0]


def test_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", "ppo-ewma", *CARTPOLE, *SMALL, "--scaling.off", "--out", str(run)]) == 0
    config, _ = config_of(run)
    assert config.optimizer.step_size == 5e-4
    assert config.policy.center_of_mass == 8
    assert not (run / "scaling.txt").exists()
    assert "optimisation batch" not in capsys.readouterr().out


@pytest.mark.parametrize("flag", [["--optimizer.step-size", "5e-4"], ["--optimizer.step_size=5e-4"]])
def test_a_value_given_by_hand_wins_even_if_it_is_the_preset_s(
    flag: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    flags = [*CARTPOLE, *SMALL, *flag, "--policy.center-of-mass", "3", "--out", str(run)]
    assert main(["train", "ppo-ewma", *flags]) == 0
    config, _ = config_of(run)
    assert config.optimizer.step_size == 5e-4
    assert config.policy.center_of_mass == 3
    assert config.advantage.span == 1024
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("policy.center_of_mass")]
    assert "by hand" in line
    assert "8 " in line


def test_rules_can_be_chosen(tmp_path: Path) -> None:
    run = tmp_path / "run"
    rules = ["--scaling.adam-step", "linear", "--scaling.no-ewma", "--scaling.adam-betas", "beta2"]
    assert main(["train", "ppo-ewma", *CARTPOLE, *SMALL, *rules, "--out", str(run)]) == 0
    config, _ = config_of(run)
    assert config.optimizer.step_size == pytest.approx(5e-4 / 1024)
    assert config.policy.center_of_mass == 8
    assert config.optimizer.adam_betas == pytest.approx((0.9, 0.999 ** (1 / 1024)))


TUNED = ["--tuned-at.num-envs", "64", "--optimizer.step-size", "3e-4"]


def test_numbers_tuned_elsewhere_are_scaled_from_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", "ppo-ewma", *CARTPOLE, *SMALL, *TUNED, "--out", str(run)]) == 0
    config, _ = config_of(run)
    # 64 -> 2 environments at 32 steps: 3e-4 / sqrt(32), and 8 and 1 times 32
    assert config.optimizer.step_size == pytest.approx(3e-4 / 32**0.5)
    assert (config.policy.center_of_mass, config.advantage.span) == (256, 32)
    tuned = override(ppo_ewma(), {"env.num_envs": 64, "rollout.steps": 32, "step_size": 3e-4})
    assert config.optimizer == rescale(tuned, num_envs=2)[0].optimizer
    text = capsys.readouterr().out
    assert "iteration batch 2,048 -> 64 samples" in text
    assert "assumed to be tuned with 64 environments, 32 steps and 8 minibatches: all hyperparameters" in text
    assert "--scaling.off" not in text  # which would contradict it
    assert main(["train", "ppo-ewma", *CARTPOLE, *SMALL, *TUNED, "--scaling.off", "--out", str(tmp_path / "b")]) == 2
    assert capsys.readouterr().err.startswith("anybatch: --tuned-at")


def test_scale_prints_the_table_of_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, flags in enumerate([TUNED, ["--optimizer.step-size", "3e-4"], []]):
        out = ["--out", str(tmp_path / str(number)), "--quiet"]
        assert main(["train", "ppo-ewma", *CARTPOLE, *SMALL, *flags, *out]) == 0
        trained = re.split("to train without these|done: ", capsys.readouterr().out)[0]
        assert printed(["ppo-ewma", *CARTPOLE[:-1], *SMALL, *flags], capsys) == trained
        assert ("assumed to be tuned for this batch, so not scaled: optimizer.step_size 0.0003" in trained) == (
            number == 1
        )


def test_without_another_batch_nothing_is_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "base.yaml"
    file.write_text(to_yaml(override(ppo_ewma(), {"num_envs": 2, "rollout.steps": 32})))
    flags = [*CARTPOLE, "--optimizer.step-size", "3e-4", "--out", str(tmp_path / "run")]
    assert main(["train", str(file), *flags]) == 0
    assert "assumed" not in capsys.readouterr().out


def test_from_ppo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    flags = ["--optimizer.minibatches", "4", "--optimizer.policy-epochs", "2", "--optimizer.value-epochs", "2"]
    assert main(["train", "ppo", *CARTPOLE, *SMALL, *TUNED, *flags, "--from-ppo", "--out", str(run)]) == 0
    config, _ = config_of(run)
    assert config.policy.proximal == "ewma"
    # 8 gradient steps an iteration: (7 + sqrt(63)) / 2 = 7.4686, at 64 environments; 32 times that at 2
    assert config.policy.center_of_mass == pytest.approx(32 * 7.468627, rel=1e-6)
    assert "from PPO: policy.center_of_mass 7.469 limits the policy" in capsys.readouterr().out
    assert [row["field"] for row in json.loads((run / "scaling.json").read_text())][:2] == [
        "policy.proximal",
        "policy.center_of_mass",
    ]
    text = printed(["ppo", "--from-ppo"], capsys)
    assert "behavior  ewma" in text and "nothing changes" not in text
    assert main(["scale", "ppo", "--from-ppo", "--policy.center-of-mass", "3"]) == 2
    assert "omit it or from_ppo" in capsys.readouterr().err


def test_several_epochs_are_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "ppo", *CARTPOLE, *SMALL, "--out", str(tmp_path / "a")]) == 0
    printed, error = capsys.readouterr()
    assert "ScalingWarning" not in error
    assert printed.count("warning: 3 policy epochs") == 1
    assert "--optimizer.policy-epochs 1 --optimizer.value-epochs 1" in printed
    assert "warning: policy.proximal behavior" in printed
    one = ["--optimizer.policy-epochs", "1", "--optimizer.value-epochs", "1"]
    assert main(["train", "ppo-ewma", *CARTPOLE, *SMALL, *one, "--out", str(tmp_path / "b")]) == 0
    assert "policy epochs" not in capsys.readouterr().out


def test_a_batch_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["train", "ppo", *CARTPOLE, "--env.num-envs", "1", "--rollout.steps", "4", "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert not captured.out
    assert not out.exists()


# ---------------------------------------------------------------- scale


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["scale", *arguments]) == 0
    return capsys.readouterr().out


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(["ppg-ewma", "--divide-batch-by", "256", "--scaling.adam-betas", "both"], capsys)
    for word in ("3.125e-05", "2048", "x 256", "8192", "0.9995885, 0.9999961"):
        assert word in text
    assert "warning" not in text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(printed(["ppg-ewma", "--divide-batch-by", "64", "--format", "json"], capsys))
    config, changes = scale(ppg_ewma(), 64)
    assert from_dict(content["config"]) == config
    assert content["changes"][0] == {
        "field": "env.num_envs",
        "before": 256,
        "after": 4,
        "rule": "as asked",
        "why": "",
    }
    assert len(content["changes"]) == len(changes)
    assert content["findings"] == []


def test_infinite_numbers_are_text_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(["ppo", "--divide-batch-by", "64", "--reward.bound", "inf", "--format", "json"], capsys)
    assert from_dict(json.loads(text, parse_constant=pytest.fail)["config"]).reward.bound == math.inf


def test_yaml_can_be_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(["ppo-ewma", "--divide-batch-by", "128", "--format", "yaml"], capsys)
    file = tmp_path / "small.yaml"
    file.write_text(text)
    assert main(["train", str(file), *CARTPOLE, "--total-env-steps", "512", "--out", str(tmp_path / "run")]) == 0
    assert config_of(tmp_path / "run")[0].optimizer.step_size == pytest.approx(5e-4 / 128**0.5)


def test_where_hyperparameters_were_tuned_can_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    tuned = ["--tuned-at.num-envs", "8", "--rollout.steps", "128", "--optimizer.minibatches", "4"]
    text = printed(["ppo", *tuned, "--optimizer.step-size", "2.5e-4", "--divide-batch-by", "4"], capsys)
    assert "iteration batch 1,024 -> 256 samples" in text
    assert "0.000125" in text
    text = printed(["ppo-ewma", "--optimizer.step-size", "3e-4", "--divide-batch-by", "4"], capsys)
    assert "0.0003  0.00015  / sqrt(4)" in text
    assert "assumed to be tuned with 256 environments, 256 steps and 8 minibatches, as the preset or file was" in text


def test_a_new_batch(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(["ppg-ewma", "--env.num-envs", "64", "--rollout.steps", "1024"], capsys)
    assert "optimizer.step_size" not in text
    text = printed(["ppo-ewma", "--env.num-envs", "512", "--scaling.rule", "fixed-minibatch"], capsys)
    assert "fixed minibatch" in text


@pytest.mark.parametrize("framework", ["sb3", "cleanrl", "rllib", "trl", "rsl_rl"])
def test_other_frameworks(framework: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(["ppo-ewma", "--divide-batch-by", "64", "--for", framework], capsys)
    assert "6.25e-05" in text
    assert ("# advantage.span" in text) == (framework not in ("sb3", "rsl_rl"))  # PPOEWMA has it
    assert "# warning: 3 policy epochs" in text


@pytest.mark.parametrize("framework", ["sb3", "cleanrl", "rllib", "trl", "rsl_rl"])
def test_other_frameworks_as_data(framework: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["ppo-ewma", "--divide-batch-by", "64", "--for", framework, "--format"]
    content = json.loads(printed([*arguments, "json"], capsys))
    name = "learning-rate" if framework == "cleanrl" else "lr" if framework == "rllib" else "learning_rate"
    assert content["arguments"][name] == 6.25e-05
    assert any("advantage" in sentence for sentence in content["no_counterpart"]) == (
        framework not in ("sb3", "rsl_rl")
    )
    assert "policy_epochs" in [finding["check"] for finding in content["findings"]]
    text = printed([*arguments, "yaml"], capsys)
    assert yaml.safe_load(text) == content["arguments"]
    assert text.startswith("# ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["anybatch scale needs PRESET"]),
        (["ppg-ewma"], ["--divide-batch-by", "--env.num-envs"]),
        (["ppg-ewma", "--divide-batch-by", "3"], ["not a whole number", "85"]),
        (["ppg-ewma", "--divide-batch-by", "4", "--env.num-envs", "2"], ["use tuned_at.num_envs"]),
        (["ppg-ewma", "--divide-batch-by", "4", "--rollout.steps", "2"], ["use tuned_at.rollout_steps"]),
        (["ppg-ewma", "--tuned-at.num-envs", "0"], ["tuned_at.num_envs is 0"]),
        (["ppg-ewma", "--divide-batch-by", "4", "--scaling.rule", "fixed-minibatch"], ["the paper's rule;"]),
        (["ppq", "--divide-batch-by", "4"], ["preset is 'ppq'"]),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for word in words:
        assert word in error


# ---------------------------------------------------------------- doctor


def test_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", "ppo-ewma", *TINY, "--quiet", "--out", str(run)]) == 0
    capsys.readouterr()
    assert main(["doctor", str(run)]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("30 iterations")
    lines.remove("conditions of batch size-invariance that are not met:")  # 8 steps are shorter than GAE's horizon
    assert "GAE looks" in lines[-1]
    assert len(lines) == len(set(lines))
    assert all(line.startswith(("ok: ", "warning: ", "error: ")) for line in lines)
    assert any("proximal policy is 65,536 environment steps old" in line for line in lines)


def test_live_warnings_are_silent_when_quiet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "ppo-ewma", *TINY, "--quiet", "--out", str(tmp_path / "quiet")]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main(["train", "ppo-ewma", *TINY, "--out", str(tmp_path / "loud")]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert lines
    assert len(set(lines)) == len(lines)


def test_doctor_without_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "/nowhere"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_options_are_pairs_over_those_of_the_preset_or_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pong = ["--env.id", "envpool:Pong-v5", "--divide-batch-by", "2", "--format", "yaml"]
    assert main(["scale", "ppo-atari", *pong, "--env.options", "episodic_life", "False", "noop_max", "5"]) == 0
    options = yaml.safe_load(capsys.readouterr().out)["env"]["options"]
    assert options == {"episodic_life": False, "reward_clip": True, "noop_max": 5}
    file = tmp_path / "file.yaml"
    file.write_text(
        to_yaml(override(ppo_ewma(), {"env.options": {"num_levels": 500}, "model.options": {"channels": 8}}))
    )
    assert (
        main(["scale", str(file), "--divide-batch-by", "2", "--format", "yaml", "--env.options", "num_levels", "200"])
        == 0
    )
    scaled = yaml.safe_load(capsys.readouterr().out)
    assert (scaled["env"]["options"], scaled["model"]["options"]) == ({"num_levels": 200}, {"channels": 8})
    assert main(["scale", str(file), "--divide-batch-by", "2", "--env.options.num-levels", "200"]) == 2
    assert "give pairs as --env.options NAME VALUE" in capsys.readouterr().err
