"""Grid files, and the names of run folders."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from anybatch.cli import grid as grid_command
from anybatch.cli.main import main
from anybatch.config.io import to_yaml
from anybatch.errors import ConfigError
from anybatch.grid.grid_file import assumption, check_environment, read_grid
from anybatch.grid.job import Job
from anybatch.presets import PRESETS, ppo, ppo_ewma
from anybatch.scaling import rescale

GRID = """
base: ppo-ewma
set: {env.id: "gym:CartPole-v1", policy_epochs: 1, value_epochs: 1}
variants:
  ours: {}
  coupled: {base: ppo, env.num_envs: 64}
vary:
  divide_batch_by: [1, 4]
  optimizer.schedule: [constant, linear]
seeds: [5, 7]
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_variants_times_values_times_seeds(tmp_path: Path) -> None:
    jobs = read_grid(write(tmp_path / "grid.yaml", GRID), PRESETS)
    assert len(jobs) == 2 * 2 * 2 * 2
    assert len({job.folder_name for job in jobs}) == len(jobs)
    assert [job.seed for job in jobs[:4]] == [5, 7, 5, 7]
    assert jobs[0].name == "ours divide_batch_by=1 optimizer.schedule=constant"
    plain = ppo_ewma("gym:CartPole-v1", policy_epochs=1, value_epochs=1)
    assert jobs[0].config == plain
    assert jobs[2].config == replace(plain, optimizer=replace(plain.optimizer, schedule="linear"))
    # by the scaling rules: a quarter of the environments, half the step size, four times the centre of mass
    scaled = jobs[4].config
    assert (scaled.env.num_envs, scaled.optimizer.step_size, scaled.policy.center_of_mass) == (64, 2.5e-4, 32)
    assert jobs[8].config == ppo("gym:CartPole-v1", policy_epochs=1, value_epochs=1, num_envs=64)
    # plain PPO cannot keep the age of its proximal policy; nothing is found where nothing is scaled
    assert [[finding.check for finding in jobs[i].findings] for i in (0, 4, 8, 12)] == [[], [], [], ["proximal"]]


def test_vary_wins_however_fields_are_spelled(tmp_path: Path) -> None:
    text = """
    base: ppo
    set: {num_envs: 8, clip: 0.1, env.id: "gym:CartPole-v1"}
    variants: {x: {env: {num_envs: 4}, policy.clip: 0.2}}
    vary: {num_envs: [16, 32], clip: [0.3]}
    """
    jobs = read_grid(write(tmp_path / "grid.yaml", text), PRESETS)
    assert [(job.config.env.num_envs, job.config.policy.clip) for job in jobs] == [(16, 0.3), (32, 0.3)]
    twice = "base: ppo\nvary: {clip: [0.3], policy: [{clip: 0.1}]}"
    with pytest.raises(ConfigError, match=r"vary: clip and policy both set policy\.clip"):
        read_grid(write(tmp_path / "twice.yaml", twice), PRESETS)


def test_a_config_beside_the_file_and_a_number_of_seeds(tmp_path: Path) -> None:
    config = ppo("gym:Pendulum-v1", num_envs=8)
    write(tmp_path / "config.yaml", to_yaml(config, anybatch="0", seed=3))
    jobs = read_grid(write(tmp_path / "grid.yaml", "base: config.yaml\nseeds: 3\n"), PRESETS)
    assert jobs == [Job(config, seed) for seed in (0, 1, 2)]


def test_home_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "config.yaml", to_yaml(ppo("gym:Pendulum-v1"), anybatch="0", seed=3))
    for name, base in (("a", "~/config.yaml"), ("b", "config.yaml")):
        write(tmp_path / f"{name}.yaml", f"base: {base}\n")
        assert main(["grid", f"~/{name}.yaml", "--launcher", "print", "--out", str(tmp_path / name)]) == 0


def test_command_prints_each_finding_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    grid = write(tmp_path / "grid.yaml", GRID)
    assert main(["grid", str(grid), "--launcher", "print", "--out=~/grid"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("anybatch train") == 16
    assert printed.err.count("warning: policy.proximal behavior") == 1
    assert (tmp_path / "grid" / "grid.csv").is_file()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base: ppoo", "base is 'ppoo', but must be one of ppo, ppo-ewma"),
        ('base: ppo\nvary: {divide_batch_by: [1, "4"]}', "divide_batch_by is '4', but must be a number above 0"),
        ("base: ppo\nseed: 3", "'seed', but a grid file takes only base, set, variants, vary, seeds, tuned_at"),
        ("base: ppo\nset: {num_env: 3}", "did you mean num_envs"),
        ("base: ppo\nvary: {num_envs: 3}", "vary: num_envs is 3, but must be a list"),
        ("base: ppo\nseeds: [-1]", "seeds is"),
        ("base: ppo\nseeds: [true, 1]", "seeds is [True, 1]"),
        ("base: ppo\nset: {clip: 0.1, 1: 2}", "set: 1 is not a field of the configuration; names must be text"),
        ("base: ppo\nvary: {1: [2]}", "1=2: 1 is not a field of the configuration"),
        ("base: ppo\nvariants: {a: {null: 2}}", "a: None is not a field of the configuration"),
        ("base: ppo\nset: [1]", "set must contain names and values"),
        ("base: [", "is not YAML"),
        ("base: [ppo]", "base is ['ppo'], but must be one of"),
        ("base: there.yaml", "there.yaml cannot be read"),
        ("base: ppo\nvary: {divide_batch_by: [3]}", "divide_batch_by=3"),
        ("base: ppo\ntuned_at: {envs: 3}", "tuned_at is {'envs': 3}, but must contain positive numbers of num_envs"),
    ],
)
def test_errors_name_the_file(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"grid.yaml|there.yaml") as caught:
        read_grid(write(tmp_path / "grid.yaml", text), PRESETS)
    assert words in str(caught.value)


def test_the_command_asks_for_an_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write(tmp_path / "grid.yaml", "base: ppo\nvariants: {a: {}, b: {env.id: gym:CartPole-v1}}\n"))
    section = str(write(tmp_path / "section.yaml", "base: ppo\nset: {env: {num_envs: 8}}\n"))
    for without in (file, section):
        assert main(["grid", without, "--launcher", "print"]) == 2
        assert "env.id is missing: set an environment" in capsys.readouterr().err
    short = "base: ppo\nset: {id: gym:CartPole-v1}\n"
    for number, text in enumerate(["base: ppo\nset: {env: {id: gym:CartPole-v1}}\n", short, GRID]):
        file = str(write(tmp_path / f"{number}.yaml", text))
        assert main(["grid", file, "--launcher", "print", "--out", str(tmp_path / str(number))]) == 0


def test_folder_names_depend_on_configuration_and_seed() -> None:
    job = Job(ppo("gym:CartPole-v1", num_envs=8), 1)
    assert job.folder_name.startswith("CartPole-v1-seed1-")
    assert Job(job.config, 1, "a name").folder_name == job.folder_name  # the name is only a label
    others = [Job(job.config, 2), Job(ppo("gym:CartPole-v1", num_envs=8, clip=0.1), 1)]
    assert len({job.folder_name, *(other.folder_name for other in others)}) == 3


def test_folder_names_depend_on_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(ppo("gym:CartPole-v1"), 1)
    before = job.folder_name
    monkeypatch.setattr("anybatch.grid.job.__version__", "99.0")
    assert job.folder_name != before


def test_a_variant_name_may_be_a_number(tmp_path: Path) -> None:
    jobs = read_grid(write(tmp_path / "grid.yaml", "base: ppo\nvariants: {1: {}, 2: {clip: 0.1}}\n"), PRESETS)
    assert [job.name for job in jobs] == ["1", "2"]


def test_numbers_are_scaled_from_where_they_were_tuned(tmp_path: Path) -> None:
    text = "base: ppo-ewma\nset: {step_size: 3e-4}\nvary: {num_envs: [256, 16]}\n"
    plain = read_grid(write(tmp_path / "plain.yaml", text), PRESETS)
    assert [job.config.optimizer.step_size for job in plain] == [3e-4, 3e-4]
    assert "not scaled: optimizer.step_size; if they were tuned at another batch" in assumption(tmp_path / "plain.yaml")
    jobs = read_grid(write(tmp_path / "grid.yaml", f"{text}tuned_at: {{num_envs: 256}}\n"), PRESETS)
    assert jobs[0].config == plain[0].config
    assert jobs[1].config == rescale(plain[0].config, num_envs=16)[0]  # 3e-4 / sqrt(16)
    assert jobs[1].config.optimizer.step_size == pytest.approx(7.5e-5)
    assert assumption(tmp_path / "grid.yaml") == ""
    sections = "base: ppo-ewma\nset: {env: {num_envs: 32}, divide_batch_by: 4}\ntuned_at: {num_envs: 64}\n"
    with pytest.raises(ConfigError, match=r"env.num_envs 32 already sets the batch of the run"):
        read_grid(write(tmp_path / "sections.yaml", sections), PRESETS)
    nested = "base: ppo-ewma\nset: {env: {num_envs: 16}, optimizer: {step_size: 3e-4}}\n"
    assert "not scaled: optimizer.step_size" in assumption(write(tmp_path / "nested.yaml", nested))
    in_vary = "base: ppo-ewma\nset: {step_size: 3e-4}\nvary: {env: [{num_envs: 16}, {num_envs: 32}]}\n"
    assert "not scaled: optimizer.step_size" in assumption(write(tmp_path / "vary.yaml", in_vary))
    divided = "base: ppo-ewma\nset: {step_size: 3e-4, divide_batch_by: 16}\ntuned_at: {num_envs: 256}\n"
    assert read_grid(write(tmp_path / "divided.yaml", divided), PRESETS)[0].config == jobs[1].config


def test_the_example_of_the_help_page_is_a_grid(tmp_path: Path) -> None:
    example = re.search(r"Example: (.*)", grid_command.main.__doc__ or "")
    assert example is not None
    path = write(tmp_path / "grid.yaml", example[1])
    assert [job.config.policy.clip for job in read_grid(path, PRESETS)] == [0.1, 0.2]
    check_environment(path, PRESETS)
