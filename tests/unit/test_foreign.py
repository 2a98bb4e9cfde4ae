"""Hyperparameters in other frameworks' names: values, and plain words where there is no counterpart."""

from __future__ import annotations

import pytest

from anybatch.foreign import FRAMEWORKS, translate
from anybatch.presets import ppg_ewma, ppo, ppo_ewma
from anybatch.scaling import scale

SMALL, _ = scale(ppo_ewma(policy_epochs=1, value_epochs=1), 64, adam_betas=True)


@pytest.mark.parametrize(
    ("framework", "words"),
    [
        ("sb3", ["n_envs=4", "n_steps=256", "batch_size=128", "learning_rate=6.25e-05", "betas=(0.9983551"]),
        ("cleanrl", ["--num-envs 4", "--num-minibatches 8", "--vf-coef 1.0", "--learning-rate 6.25e-05"]),
        ("rllib", ["train_batch_size_per_learner=1024", "minibatch_size=128", "lr=6.25e-05", "use_kl_loss=False"]),
        ("trl", ["learning_rate=6.25e-05", "adam_beta1=0.9983551", "num_iterations=1", "epsilon=0.2"]),
    ],
)
def test_values(framework: str, words: list[str]) -> None:
    text = str(translate(SMALL, framework))
    for word in words:
        assert word in text
    assert "center_of_mass" in text  # has no counterpart, and that is said


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_is_missing_is_said_in_comments(framework: str) -> None:
    translation = translate(ppg_ewma(), framework)
    assert len(translation.missing) >= 3
    comments = [line for line in str(translation).splitlines() if line.startswith("#")]
    assert len(comments) == len(translation.missing)
    assert any("auxiliary phase" in line for line in comments)


@pytest.mark.parametrize("framework", ["sb3", "rllib", "trl"])
def test_python_is_python(framework: str) -> None:
    compile(str(translate(SMALL, framework)), framework, "exec")
    compile(str(translate(ppg_ewma(), framework)), framework, "exec")


def test_trl_s_reference_model_stands_in_for_the_ewma() -> None:
    text = str(translate(ppg_ewma(), "trl"))
    assert "sync_ref_model=True" in text
    assert "ref_model_mixup_alpha=0.111111" in text  # 1 - 8/9
    assert "sync_ref_model" not in str(translate(ppo(), "trl"))
