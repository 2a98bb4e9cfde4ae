"""``anybatch envs``: what is installed, what is not and how to get it."""

from __future__ import annotations

import importlib.util

import pytest

from anybatch.cli.main import main
from anybatch.envs import envpool, installed, procgen
from anybatch.envs.installed import EnvFamily
from anybatch.errors import EnvError


def families() -> dict[tuple[str, str], EnvFamily]:
    return {(family.prefix, family.name): family for family in installed.catalog()}


def test_gymnasium_families_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "Box2D" else real(name))
    found = families()
    assert found["gym", "classic_control"].missing == ""
    assert "gym:CartPole-v1" in found["gym", "classic_control"].ids
    assert found["gym", "box2d"].missing == "pip install 'gymnasium[box2d]'"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "Box2D" else real(name))
    assert families()["gym", "box2d"].missing == ""
    # ids whose entry point only raises an error (they have moved elsewhere) are not offered
    assert not any(name == "gym:Ant-v2" for family in found.values() for name in family.ids)


@pytest.mark.procgen
def test_every_envpool_task_is_in_one_group() -> None:
    found = families()
    procgen_ids = found["procgen", "16 games"].ids
    assert len({name.split("-")[0] for name in procgen_ids}) == 16
    assert found["procgen", "16 games"].missing == ""
    listed = [name for family in found.values() if family.prefix == "envpool" for name in family.ids]
    assert len(listed) == len(set(listed)) == len(envpool.task_ids()) - len(procgen_ids)
    assert "envpool:Pong-v5" in found["envpool", "atari"].ids


def test_without_envpool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> None:
        raise EnvError("EnvPool is needed")

    monkeypatch.setattr(envpool, "import_envpool", missing)
    monkeypatch.setattr(procgen, "import_envpool", missing)
    assert main(["envs"]) == 0
    output = capsys.readouterr().out
    assert "procgen, 16 games: not installed: pip install '.[procgen]' in a checkout of anybatch" in output
    assert "envpool, all families: not installed: pip install '.[procgen]' in a checkout of anybatch" in output
    assert main(["envs", "coinrun", "hard"]) == 0  # its id is known all the same
    assert "procgen:coinrun-hard" in capsys.readouterr().out


def test_words_narrow_the_list_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs", "--family", "gym", "CART", "v1"]) == 0
    output = capsys.readouterr().out
    assert "gym:CartPole-v1" in output
    assert "gym:CartPole-v0" not in output
    assert "Acrobot" not in output
    assert main(["envs", "cartpoll"]) == 2
    assert "no environment's id contains cartpoll" in capsys.readouterr().err


def test_fits_a_screen_unless_all_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs"]) == 0
    assert capsys.readouterr().out.count("\n") <= 50
    assert main(["envs", "--family", "gym", "--all"]) == 0
    assert "gym:LunarLander-v3" in capsys.readouterr().out  # also what is not installed
