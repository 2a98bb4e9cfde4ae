"""Help pages, and words that the shell completes."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import yaml

from anybatch.cli.completion import script
from anybatch.cli.main import COMMANDS, main
from anybatch.cli.scale import Arguments as ScaleArguments
from anybatch.config import fields
from anybatch.config.frameworks.tables import FRAMEWORKS
from anybatch.config.io import from_dict
from anybatch.presets import PRESETS


def page(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert stop.value.code == 0
    return capsys.readouterr().out


def flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w.-]*", text))


def every_option(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    return page([command, "ppo", "--help", "all"] if command in ("train", "scale") else [command, "--help"], capsys)


@pytest.mark.parametrize("command", ["train", "scale"])
def test_short_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    pages = {page(words, capsys) for words in ([command, "--help"], [command, "ppg", "--help"], [command, "ppg", "-h"])}
    (text,) = pages
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert flags(text) - {"--help"} <= flags(every_option(command, capsys))
    assert ("import.path:function for your own environment" in text) == (command == "train")
    # every section is named on the page, and has a page
    described = text.partition("with SECTION one of")[2]
    for section in (
        "env",
        "observation",
        "model",
        "rollout",
        "reward",
        "advantage",
        "policy",
        "optimizer",
        "aux",
        "log",
        "scaling",
    ):
        assert re.search(rf"\b{section}\b", described)
        assert f"--{section}." in page([command, "ppo", "--help", section], capsys)


def test_section_page_has_the_presets_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    output = page(["train", "ppg-ewma", "--help", "policy"], capsys)
    assert re.search(
        r"--policy.objective \{clip,kl\}[^(]*\(default: kl\)", " ".join(output.split())
    )  # clip is the default of ppo
    assert "--optimizer." not in output
    assert "required" in page(["train", "ppo", "--help", "env"], capsys)  # the environment of a preset is no default
    assert "--rollout.source.kind" in page(["train", "ppo", "--help", "rollout"], capsys)  # with the sections in it


def test_unknown_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "ppo", "--help", "polcy"]) == 2
    error = capsys.readouterr().err
    assert "polcy" in error and "policy" in error and error.count("\n") == 1


@pytest.mark.parametrize("command", ["train", "scale"])
def test_every_field_is_an_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"--" + name.replace("_", "-") for name in fields.names()}
    assert names <= flags(every_option(command, capsys))
    # a word of the command line that comes before is no topic
    assert flags(page([command, "ppo", "--out", "all", "--help", "all"], capsys)) >= names


@pytest.mark.parametrize("words", [["--optimizer.max-grad-norm", "none"], ["--optimizer.max_grad_norm=none"]])
def test_none_is_written_as_in_messages(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["ppo-control", *words, "--env.action-mask", "none", "--divide-batch-by", "2", "--format", "yaml"]
    assert main(["scale", *arguments]) == 0
    config = from_dict(yaml.safe_load(capsys.readouterr().out))
    assert (config.optimizer.max_grad_norm, config.env.action_mask) == (None, "none")


def test_every_framework_can_be_asked_for() -> None:
    hint = typing.get_type_hints(ScaleArguments)["framework"]
    assert set(typing.get_args(hint)) == {"anybatch", *FRAMEWORKS}


def test_names_of_other_frameworks_are_answered_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--learning-rate", "--learning_rate=1e-3"):
        assert main(["train", "ppo", option, "1e-3"]) == 2
        error = capsys.readouterr().err
        assert "is not an option of anybatch train" in error and "is optimizer.step_size" in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["list", "run", "status", "draw"])
def test_commands_of_reproduce_have_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"usage: anybatch reproduce {command}" in page(["reproduce", command, "--help"], capsys)
    assert re.search(rf"• {command} +[A-Z]", page(["reproduce", "--help"], capsys))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_no_page_that_a_wheel_does_not_have(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not re.search(r"\bdocs/|\.md\b", every_option(command, capsys))


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", ["", *COMMANDS, *(f"reproduce {x}" for x in ("list", "run", "status", "draw"))])
def test_help_fits_the_terminal(
    command: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    all_options = ["ppo", "--help", "all"] if command in ("train", "scale") else ["--help"]
    with contextlib.suppress(SystemExit):
        main([*command.split(), *all_options])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: anybatch {command}")
    assert not [line for line in text.splitlines() if len(line) > columns or "…" in line]  # nothing is cut


@pytest.mark.parametrize("command", ["--help", "reproduce list", *(f"{command} --help" for command in COMMANDS)])
def test_help_is_light(command: str) -> None:
    heavy = {"torch", "matplotlib"} if "list" in command else {"torch", "numpy", "gymnasium", "envpool", "matplotlib"}
    code = (
        f"import sys; sys.argv = ['anybatch', *{command.split()}]\n"
        "try:\n    from anybatch.cli.main import main; main()\n"
        "except SystemExit:\n    pass\n"
        f"assert not {heavy} & set(sys.modules), set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["do"], {"doctor"}),
        (["train", "ppo"], {x for x in PRESETS if x.startswith("ppo")}),
        (["train", "ppo", "--env.num"], {"--env.num-envs"}),
        (["train", "ppo", "--rollout.source.no"], {"--rollout.source.no-deterministic"}),
        (["train", "ppo", "--policy.objective", ""], {"clip", "kl"}),
        (["train", "ppo", "--env.bootstrap-truncated", ""], {"None", "True", "False"}),
        (["train", "ppo", "--out", "sub"], set()),  # left to the shell's own completion of files
        (["train", "ppo", "--micro-batch", ""], set()),
        (["scale", "ppo", "--for", "s"], {"sb3"}),
        (["eval", "runs/x", "--no-g"], {"--no-greedy"}),
        (["reproduce", "r"], {"run"}),
        (["reproduce", "run", "all", "--dry"], {"--dry-run"}),
        (["completion", ""], {"bash", "zsh"}),
    ],
)
def test_bash_completes(typed: list[str], offered: set[str], completion: str) -> None:
    words = " ".join(f"'{word}'" for word in ["anybatch", *typed])
    code = f'COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _anybatch; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{completion}\n{code}"], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == offered
    assert done.stderr == ""


@pytest.fixture(scope="module")
def completion() -> str:
    return script("bash")


def test_completion_knows_every_option(completion: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        if command != "reproduce":
            (words,) = re.findall(rf'^    {command}\) words="(-.*)" ;;', completion, re.MULTILINE)
            assert flags(every_option(command, capsys)) <= set(words.split()), command


def test_completion_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("autoload -U +X bashcompinit && bashcompinit\n")
    assert output.rstrip().endswith("complete -o default -F _anybatch anybatch")


def test_a_file_for_each_command() -> None:
    folder = Path(main.__code__.co_filename).parent
    helpers = {"__init__", "main", "configured"}
    assert {path.stem for path in folder.glob("*.py")} - helpers == set(COMMANDS)
