"""Help by groups, and what the shell completes."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
import tyro

from anybatch.cli.completion import script
from anybatch.cli.help import help_page
from anybatch.cli.main import argument_classes, main
from anybatch.cli.options import field_help, groups, options
from anybatch.presets import PRESETS


@dataclass(frozen=True)
class Inner:
    """About the inner ones."""

    deep_value: float = 0.5
    """How deep."""
    how: Literal["x", "y"] = "x"
    """Which way,
    in two lines."""


@dataclass(frozen=True)
class Outer:
    """An example."""

    where: tyro.conf.Positional[str]
    """Taken by its place."""
    flat: Annotated[Inner, tyro.conf.arg(name="")]
    inner: Inner = field(default_factory=lambda: Inner(deep_value=2.0))
    loud: bool = False
    """Be loud."""
    renamed: Annotated[int, tyro.conf.arg(name="for")] = 3
    """Has another name."""


def test_options_are_read_from_the_dataclass() -> None:
    found = {option.flag: option for option in options(Outer)}
    assert list(found) == ["--deep-value", "--how", "--inner.deep-value", "--inner.how", "--loud", "--for"]
    assert found["--inner.deep-value"].default == 2.0
    assert found["--inner.deep-value"].group == "inner"
    assert found["--how"].choices == ("x", "y")
    assert found["--how"].help == "Which way, in two lines."
    assert found["--loud"].flags == ("--loud", "--no-loud")
    assert groups(Outer) == {"inner": "About the inner ones."}
    assert set(field_help(Outer)) == {"where", "loud", "renamed"}


@pytest.mark.parametrize("command", ["train", "scale"])
def test_short_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([command, "--help"], [command, "ppg", "--help"], [command, "ppg", "-h"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80


def test_group_page_has_the_presets_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "ppg-ewma", "--help", "policy"])
    output = capsys.readouterr().out
    assert "--policy.objective {clip,kl} [kl]" in output  # clip is the default of ppo
    assert "--policy.proximal {behavior,recent,ewma} [ewma]" in output
    assert "--optimizer." not in output
    with pytest.raises(SystemExit):
        main(["train", "ppo", "--help", "rollout"])
    assert "--rollout.source.kind" in capsys.readouterr().out  # a group holds the groups below it


def test_unknown_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "ppo", "--help", "polcy"]) == 2
    error = capsys.readouterr().err
    assert "polcy" in error and "policy" in error and error.count("\n") == 1


def test_all_options_are_tyros_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert help_page("train", ["--out", "all", "--help", "all"], Outer, None) is None
    with pytest.raises(SystemExit) as stop:
        main(["train", "ppo", "--out", "all", "--help", "all"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.count("--policy.") > 8


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["do"], {"doctor"}),
        (["train", "ppo"], {"ppo", "ppo-ewma"}),
        (["train", "ppo", "--env.num"], {"--env.num-envs"}),
        (["train", "ppo", "--policy.objective", ""], {"clip", "kl"}),
        (["train", "ppo", "--out", "sub"], set()),  # left to the shell's own completion of files
        (["scale", "ppo", "--for", "s"], {"sb3"}),
        (["eval", "runs/x", "--no-g"], {"--no-greedy"}),
        (["completion", ""], {"bash", "zsh"}),
    ],
)
def test_bash_completes(typed: list[str], offered: set[str]) -> None:
    words = " ".join(f"'{word}'" for word in ["anybatch", *typed])
    code = f'COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _anybatch; printf "%s\\n" "${{COMPREPLY[@]}}"'
    source = script("bash", argument_classes(), tuple(PRESETS))
    done = subprocess.run(["bash", "-c", f"{source}\n{code}"], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == offered
    assert done.stderr == ""


def test_completion_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("autoload -U +X bashcompinit && bashcompinit\n")
    assert output.rstrip().endswith("complete -o default -F _anybatch anybatch")
