"""One run as the start of another at another batch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from anybatch.cli.main import main
from anybatch.config.io import override, read_config_file
from anybatch.config.schema import TrainConfig
from anybatch.errors import CheckpointError, ConfigError
from anybatch.grid.run_folder import train_or_resume
from anybatch.optimizers import keep_moments
from anybatch.presets import ppg_ewma, ppo, ppo_ewma
from anybatch.runs import checkpoint
from anybatch.runs.build import build
from anybatch.runs.folder import began_from, read_config
from anybatch.runs.initial import _load_optimizer, start_from
from anybatch.scaling import rescale
from anybatch.training import resume, train
from small_runs import tiny_ppo


def small(preset: Callable[..., TrainConfig] = ppo_ewma, **changes: Any) -> TrainConfig:
    config = preset(
        "gym:Pendulum-v1",
        num_envs=8,
        rollout_steps=8,
        minibatches=2,
        policy_epochs=1,
        value_epochs=1,
        total_env_steps=256,
        span=3.0,
        device="cpu",
        precision="fp32",
        tensorboard=False,
        workers=1,
        model={"encoder": "mlp", "options": {"width": 8, "depth": 1}},
        **{"observation.normalize": True},
    )
    return override(config, changes)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("large") / "run"
    train(small(), run, quiet=True)  # 4 iterations of 2 gradient steps
    return run


def state_of(run: Path) -> dict[str, Any]:
    return checkpoint.load_newest(run / "checkpoints")[0]["state"]


def first_state(run: Path) -> dict[str, Any]:
    return checkpoint.load(run / "checkpoints" / "iteration-000000000.ckpt")["state"]


def keep_first(config: TrainConfig) -> TrainConfig:
    return override(config, {"keep_checkpoints": 100})


def test_at_another_batch(large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, changes = rescale(small(), num_envs=2)  # a quarter of the batch
    train(keep_first(config), tmp_path / "run", init_from=large, changes=changes, quiet=True)
    before, after = state_of(large), first_state(tmp_path / "run")
    for name, weights in before["agent"].items():  # and with them the statistics of the observations
        assert torch.equal(after["agent"][name], weights), name
    old, new = (x["optimizers"]["joint"]["state"] for x in (before, after))
    for index, one in old.items():
        assert torch.equal(new[index]["exp_avg_sq"], 4 * one["exp_avg_sq"])
        assert one["exp_avg"].any() and not new[index]["exp_avg"].any()
        assert new[index]["step"] == one["step"] == 8
    assert before["proximal"]["terms"] == 9 and after["proximal"]["terms"] == 36  # theta_0 and 8 steps, times 4
    for name, x in before["proximal"]["module"].items():
        assert torch.equal(after["proximal"]["module"][name], x)
    for name in ("count", "mean", "squares"):
        assert after["reward_normalizer"][name] == before["reward_normalizer"][name]
    assert after["reward_normalizer"]["return"].tolist() == [0, 0]
    assert after["advantage_normalizer"] == before["advantage_normalizer"]
    text = capsys.readouterr().err
    assert "at 256 environment steps; copied: weights, statistics of observations, statistics of rewards, " in text
    assert "8 samples instead of 32: the optimiser's second moments are multiplied by 4" in text


def test_at_the_same_batch_the_optimiser_continues(large: Path, tmp_path: Path) -> None:
    train(keep_first(small()), tmp_path / "run", init_from=large, quiet=True)
    before, after = state_of(large), first_state(tmp_path / "run")
    for index, one in before["optimizers"]["joint"]["state"].items():
        for name, x in one.items():
            assert torch.equal(after["optimizers"]["joint"]["state"][index][name], x)
    assert after["proximal"]["terms"] == 9
    assert resume(tmp_path / "run", total_env_steps=320, quiet=True).env_steps == 320


def test_the_start_is_recorded(large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, config, file = tmp_path / "run", small(total_env_steps=64), tmp_path / "run" / "config.yaml"
    train(config, out, init_from=large, quiet=True)
    assert f"\ninit_from: {large}\n" in file.read_text()
    assert read_config(out) == (config, 0) and read_config_file(file) == config
    # resuming with another number of steps, which writes the file, keeps it
    resume(out, total_env_steps=128, quiet=True)
    assert began_from(out) == large
    # the run in the folder is that from this start, and from no other
    longer = override(config, {"total_env_steps": 128})
    assert train_or_resume(longer, out, 0, init_from=large, quiet=True).env_steps == 128
    with pytest.raises(
        ConfigError, match=rf"which contains a run that began from '{large}', but this run begins from sc"
    ):
        train_or_resume(longer, out, 0, quiet=True)
    train(config, tmp_path / "scratch", quiet=True)
    with pytest.raises(ConfigError, match=rf"began from scratch, but this run begins from '{large}'; choose another"):
        train_or_resume(config, tmp_path / "scratch", 0, init_from=large, quiet=True)
    # trained again, it begins from scratch unless it is told
    capsys.readouterr()
    command = ["train", str(file), "--quiet", "--out", str(tmp_path / "again")]
    assert main(command) == 0
    assert (
        f"began from {large}, but this run begins from scratch; to repeat that run, add --init-from {large}"
        in capsys.readouterr().err
    )
    assert began_from(tmp_path / "again") is None
    assert main([*command[:-1], str(tmp_path / "repeated"), "--init-from", str(large)]) == 0
    assert "begins from scratch" not in capsys.readouterr().err
    assert began_from(tmp_path / "repeated") == large


def test_the_hint_of_a_run_without_a_checkpoint_names_the_start(large: Path, tmp_path: Path) -> None:
    train(small(total_env_steps=64), tmp_path / "run", init_from=large, quiet=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "progress.csv").unlink()
    with pytest.raises(CheckpointError, match=rf"start it again: anybatch train .* --seed 0 --init-from {large}$"):
        resume(tmp_path / "run", quiet=True)


def test_a_step_size_that_follows_the_kl_divergence_continues(large: Path, tmp_path: Path) -> None:
    adaptive = small(kl_target=1e-6, step_size=3e-3)
    train(adaptive, tmp_path / "adaptive", quiet=True)
    factors = state_of(tmp_path / "adaptive")["optimizers"]["factors"]
    assert factors != [[1.0], [1.0]]
    for folder, expected, copied in ((tmp_path / "adaptive", factors, True), (large, [[1.0], [1.0]], False)):
        components = build(adaptive, 0)
        (sentence,) = start_from(folder, components)
        components.env.close()
        assert ("factor of the KL-adaptive step size" in sentence.partition("reset")[0]) is copied
        assert components.learner.optimizers.state_dict()["factors"] == expected


def test_the_bias_of_second_moments_is_corrected_as_before(large: Path) -> None:
    """8 steps at beta2 = 0.999 count as 32 of a quarter of the batch at 0.999^(1/4): 0.999^8 = 0.999^(32/4)."""
    config, _ = rescale(small(), num_envs=2, adam_betas="both")
    components = build(config, 0)
    start_from(large, components)
    components.env.close()
    states = components.learner.optimizers.optimizers["joint"].state.values()
    assert [float(one["step"]) for one in states] == pytest.approx([32.0] * len(states), rel=1e-4)


@pytest.mark.parametrize("betas", [(0.9, 0.9), (0.5, 0.999), (0.0, 0.99)])
def test_other_betas_at_the_same_batch_do_not_make_the_first_steps_longer(
    betas: tuple[float, float], tmp_path: Path
) -> None:
    """Where every gradient is 1, both moments without their bias are 1, and so is every step in units of its size."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    adam = torch.optim.Adam([weight], lr=1.0, betas=betas, eps=0.0)
    old = torch.optim.Adam([torch.nn.Parameter(weight.detach().clone())], lr=1.0, betas=(0.9, 0.999), eps=0.0)
    adam.state[weight] = {name: torch.zeros(1) for name in ("step", "exp_avg", "exp_avg_sq")}
    keep_moments(adam, adam.param_groups[0], (0.9, 0.999))  # before the first step there is no bias
    assert not any(float(x) for x in adam.state[weight].values())
    for optimizer, steps in ((old, 100), (adam, 3)):
        if optimizer is adam:
            _load_optimizer(adam, old.state_dict(), 1.0)
        for _ in range(steps):
            (parameter,) = optimizer.param_groups[0]["params"]
            before = parameter.item()
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            assert before - parameter.item() == pytest.approx(1.0, rel=1e-6)


def test_statistics_of_another_return_start_anew(large: Path) -> None:
    for discount, copied in ((small().reward.return_discount, True), (0.5, False)):
        components = build(small(**{"reward.return_discount": discount}), 0)
        (sentence,) = start_from(large, components)
        components.env.close()
        assert ("statistics of rewards" in sentence.partition("; reset:")[0]) is copied


def test_numbers_are_those_of_the_configuration(large: Path) -> None:
    components = build(small(step_size=3e-3, adam_betas=(0.5, 0.9)), 0)
    start_from(large, components)
    (group,) = components.learner.optimizers.optimizers["joint"].param_groups
    assert (group["lr"], group["betas"]) == (3e-3, (0.5, 0.9))
    components.env.close()


def test_what_the_other_run_lacks_starts_anew(large: Path, tmp_path: Path) -> None:
    train(small(ppo, **{"reward.normalize": False}), tmp_path / "plain", quiet=True)
    components = build(small(optimizer_kind="sgd"), 0)
    (sentence,) = start_from(tmp_path / "plain", components)
    components.env.close()
    assert sentence.endswith(
        "copied: weights, statistics of observations, statistics of advantages; reset: statistics of rewards, the "
        "proximal policy's average, the optimiser's averages, counters, schedules, random numbers, episodes"
    )
    # the average starts at the weights that were loaded
    proximal: Any = components.learner.proximal
    for average, weight in zip(proximal.average, components.learner.agent.policy.parameters(), strict=True):
        assert torch.equal(average, weight)


def test_the_auxiliary_phase_s_optimiser_is_taken_over(tmp_path: Path) -> None:
    phase = {"policy_iterations": 2, "aux_minibatches": 4, "aux_epochs": 1}
    train(small(ppg_ewma, **phase), tmp_path / "large", quiet=True)
    config, _ = rescale(small(ppg_ewma, **phase), num_envs=4)
    components = build(config, 0)
    start_from(tmp_path / "large", components)
    assert components.auxiliary is not None
    old = state_of(tmp_path / "large")["auxiliary"]["optimizer"]["state"]
    new = components.auxiliary.optimizer.state_dict()["state"]
    # by the rules a phase and its minibatches keep their samples, so nothing changes
    assert all(torch.equal(new[i]["exp_avg_sq"], x["exp_avg_sq"]) for i, x in old.items()) and old
    components.env.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"env.id": "gym:CartPole-v1"}, "the policy was trained with the observation space"),
        ({"model.options": {"width": 16, "depth": 1}}, r"its networks differ: .* is \(8, 3\) there and \(16, 3\) here"),
        ({"observation.normalize": False}, "observation_normalizer.count is .* there and missing here"),
        ({"aux.enabled": True, "aux.policy_iterations": 1, "aux.minibatches": 1}, "auxiliary_value"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(
    changes: dict[str, Any], words: str, large: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=words):
        train(small(**changes), tmp_path / "run", init_from=large, quiet=True)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a run folder"):
        train(small(), tmp_path / "run", init_from=tmp_path, quiet=True)


def test_on_the_command_line_its_configuration_is_the_reference(
    large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(large, source)
    out = tmp_path / "run"
    flags = ["--env.num-envs", "2", "--total-env-steps", "64", "--quiet", "--out", str(out)]
    assert main(["train", f"--init-from={source}", *flags]) == 0
    printed, messages = capsys.readouterr()
    assert "optimisation batch 32 -> 8" in printed and "started from" in messages
    config = read_config(out)[0]
    assert config == override(rescale(small(), num_envs=2)[0], {"total_env_steps": 64})
    assert config.policy.center_of_mass == 32
    # a preset of one's choice is taken as it is, with its own batch as the reference
    again = ["train", str(source / "config.yaml"), "--init-from", str(source), "--scaling.off", *flags[:-1]]
    assert main([*again, str(tmp_path / "again")]) == 0
    assert read_config(tmp_path / "again")[0].policy.center_of_mass == 8


@pytest.mark.parametrize("content", [[1, 2], 7, {"run": {}, "seed": 0, "state": {}}])
def test_a_checkpoint_of_something_else_is_one_sentence(content: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny_ppo(), run, quiet=True)
    rewritten(run, lambda _: content)
    with pytest.raises(CheckpointError, match="is not that of a run"):
        train(tiny_ppo(), tmp_path / "next", init_from=run, quiet=True)


@pytest.mark.parametrize("part", ["agent", "optimizers", "reward_normalizer"])
def test_a_part_of_another_kind_is_one_sentence(part: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny_ppo(), run, quiet=True)
    rewritten(run, lambda content: {**content, "state": {**content["state"], part: "x"}})
    with pytest.raises(CheckpointError, match=r"do not match its config\.yaml"):
        train(tiny_ppo(), tmp_path / "next", init_from=run, quiet=True)


def rewritten(run: Path, change: Callable[[Any], Any]) -> None:
    path = checkpoint.checkpoints(run / "checkpoints")[-1]
    checkpoint.write(path, change(checkpoint.load(path)))
