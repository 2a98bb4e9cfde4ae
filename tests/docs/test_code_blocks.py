"""Every code block of README and docs runs, in the order of its page, in an empty folder.

Training, evaluation and videos are cut short by the fixture `shortened`, and `anybatch reproduce` only says what it
would do; the commands and the code are the page's own, word for word. What a block is, its fence says:

- ``python`` is executed. A block with ``title="name.py"`` is saved under that name instead.
- ``bash`` holds commands, ``console`` commands after ``$`` and what they print, which is compared.
- ``text``, ``yaml``, ... are not run, nor is a block after the line ``<!-- not run: reason -->``.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
import shlex
import sys
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import tyro

from anybatch import grid, training
from anybatch.cli import report
from anybatch.cli.main import main
from anybatch.cli.reproduce import DrawArguments
from anybatch.config.schema import TrainConfig
from anybatch.grid import run_folder, runner
from anybatch.runs import evaluation
from anybatch.runs import video as watch
from anybatch.runs.folder import read_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(path for path in (ROOT / "docs").glob("*.md")),
]
RUN, NOT_RUN = ("python", "bash", "console"), ("text", "yaml", "bibtex", "toml")
FENCE = re.compile(r"^( *)```([\w-]*)(.*)$")
NOT_RUN_MARK = re.compile(r"^ *<!-- not run: \S.* -->$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    line: int
    language: str
    title: str
    code: str
    marked: bool
    """Stands after a line that says why it is not run."""


def blocks(text: str) -> list[Block]:
    lines, found, index = text.splitlines(), [], 0
    while index < len(lines):
        opening = FENCE.match(lines[index])
        index += 1
        if opening is None:
            continue
        start, before = index, lines[index - 2] if index > 1 else ""
        while lines[index].strip() != "```":  # an unclosed fence ends in an IndexError, as it should
            index += 1
        code = "\n".join(line.removeprefix(opening[1]) for line in lines[start:index])
        title = re.search(r'title="([^"]+)"', opening[3])
        marked = NOT_RUN_MARK.match(before) is not None
        found.append(Block(start + 1, opening[2], title[1] if title else "", code, marked))
        index += 1
    return found


def short(config: TrainConfig) -> TrainConfig:
    """The same training with a tiny batch and a small network for pictures, for two iterations."""
    envs, steps, minibatches = min(config.env.num_envs, 4), min(config.rollout.steps, 16), 2
    pictures = config.env.id.startswith("procgen:") and config.model.encoder == "auto"
    return replace(
        config,
        total_env_steps=2 * envs * steps,
        env=replace(config.env, num_envs=envs),
        model=replace(config.model, encoder="nature") if pictures else config.model,
        rollout=replace(config.rollout, steps=steps, source=replace(config.rollout.source, ray_workers=0)),
        optimizer=replace(config.optimizer, minibatches=minibatches),
        aux=replace(config.aux, policy_iterations=1, minibatches=1, epochs=1),
        eval=replace(config.eval, every=config.eval.every and envs * steps, episodes=2),
    )


@pytest.fixture
def shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training lasts two small iterations, evaluation two episodes of 20 steps, videos 20 frames; without Ray."""
    train, resume, evaluate, record = training.train, training.resume, evaluation.evaluate, watch.record
    make = evaluation.make

    def longer(run_dir, *, total_env_steps=None, **keywords):
        if total_env_steps is not None:
            total_env_steps = read_config(Path(run_dir))[0].total_env_steps + 64
        return resume(run_dir, total_env_steps=total_env_steps, **keywords)

    monkeypatch.setattr(training, "train", lambda config, *rest, **keywords: train(short(config), *rest, **keywords))
    monkeypatch.setattr(training, "resume", longer)

    def fewer(policy, env=None, episodes=100, seed=0, *rest, **keywords):
        return evaluate(policy, env, 2, seed, *rest, **keywords)

    def cut_short(config, num_envs, seed):
        env, steps = make(config, num_envs, seed), itertools.count(1)
        step = env.step

        def step_or_cut(action):
            result = step(action)
            return result if next(steps) % 20 else replace(result, truncated=~result.terminated)

        env.step = step_or_cut
        return env

    monkeypatch.setattr(evaluation, "make", cut_short)
    run_grid = runner.run_grid  # of several long runs: prints the commands
    for module in (runner, grid):
        monkeypatch.setattr(
            module, "run_grid", lambda jobs, out, **keywords: run_grid(jobs, out, **{**keywords, "launcher": "print"})
        )
    monkeypatch.setattr(run_folder, "train_or_resume", lambda config, out, seed, **keywords: longer(out, quiet=True))
    monkeypatch.setattr(evaluation, "evaluate", fewer)
    monkeypatch.setattr(watch, "record", lambda *rest, **keywords: record(*rest, **{**keywords, "max_steps": 20}))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_fence_says_what_it_is(page: Path) -> None:
    for block in blocks(page.read_text()):
        place = f"{page.name}:{block.line}"
        assert block.language in RUN + NOT_RUN, f"{place}: {block.language!r} is none of {', '.join(RUN + NOT_RUN)}"
    fenceless = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    indented = re.search(r"^(?![-*\d ]).+\n\n {4}(.+)", fenceless, re.MULTILINE)
    assert indented is None, f"{page.name}: put the indented block {indented and indented[1]!r} into a fence"


@pytest.mark.procgen
@pytest.mark.usefixtures("shortened")
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.syspath_prepend(str(tmp_path))
    before, namespace = set(sys.modules), {"__name__": "__page__"}
    try:
        for block in blocks(page.read_text()):
            if block.title:
                Path(block.title).write_text(block.code + "\n")
            elif block.marked or block.language not in RUN:
                continue
            elif block.language == "python":
                source = "\n" * (block.line - 1) + block.code  # so that an error names the page's line
                exec(compile(source, str(page), "exec"), namespace)
            else:
                for command, printed in commands(block):
                    run(command, f"{page.name}:{block.line}", capsys, printed)
    finally:
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
                del sys.modules[name]  # another page may have a file of the same name


def commands(block: Block) -> list[tuple[str, str | None]]:
    """(command, what it prints) in order; None where the block does not say."""
    lines = block.code.replace("\\\n", " ").splitlines()
    if block.language == "bash":
        return [(line, None) for line in lines if line.strip() and not line.lstrip().startswith("#")]
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return [(command, "\n".join(printed)) for command, printed in found]


def run(command: str, place: str, capsys: pytest.CaptureFixture[str], printed: str | None) -> None:
    """Run what is anybatch's; check of other programs that what they are asked for exists."""
    command = re.sub(r"^source <\((.*)\)$", r"\1", command.strip())
    command, _, target = (part.strip() for part in command.partition(" > "))
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    program = Path(words[0]).name
    if program == "torchrun":  # one worker here; tests/distributed has several
        words = words[next(i for i, word in enumerate(words) if word == "anybatch") :]
        program = words[0]
    if words[:3] == ["anybatch", "reproduce", "run"]:
        words += [] if "--dry-run" in words else ["--dry-run"]
    if words[:3] == ["anybatch", "reproduce", "draw"]:  # of what was not trained here: its options only
        tyro.cli(DrawArguments, args=words[3:])
    elif words[:2] == ["anybatch", "report"]:
        tyro.cli(functools.wraps(report.main)(lambda *paths, **options: 0), args=words[2:])
    elif program == "anybatch":
        capsys.readouterr()
        try:
            code = main(words[1:])
        except SystemExit as stop:
            code = int(stop.code or 0)
        output = capsys.readouterr()
        unfinished = 130 if words[1] == "grid" else 0  # its runs are only listed, see `shortened`
        assert code in (0, unfinished), f"{place}: {command} ended with {code}: {output.err}"
        if target:
            Path(target.split(" ")[0]).write_text(output.out)
        if printed:
            assert output.out.rstrip() == printed.rstrip(), f"{place}: {command} prints something else; `make printed`"
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for word in words[2:]:
            name = re.fullmatch(r"(?:anybatch|\.)(?:\[([\w,-]+)\])?|-e|-c|constraints\.txt|pre-commit", word)
            assert name, f"{place}: {command} installs something unknown"
            assert set((name[1] or "").split(",")) <= {"", *extras}, f"{place}: {command} names an unknown extra"
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(targets), f"{place}: {command}: no such target"
    elif program == "python" and words[1] == "-m":
        assert importlib.util.find_spec(words[2]) is not None, f"{place}: {command}: no such module"
    elif program == "python":
        assert (ROOT / words[1]).is_file(), f"{place}: {command}: no such file"
    else:
        assert program in ("tensorboard", "pre-commit", "git", "cd"), f"{place}: {command}: unknown to this test"


def test_blocks_are_found_as_they_stand() -> None:
    text = 'a\n```python title="x.py"\nb = 1\n```\n<!-- not run: no such host -->\n  ```bash\n  c \\\n    d\n  ```\n'
    first, second = blocks(text)
    assert (first.line, first.title, first.code, first.marked) == (3, "x.py", "b = 1", False)
    assert (second.language, second.code, second.marked) == ("bash", "c \\\n  d", True)
    assert commands(second) == [("c    d", None)]
    console = Block(1, "console", "", "$ a\nb\n$ c", False)
    assert commands(console) == [("a", "b"), ("c", "")]


def test_wrong_commands_are_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("anybatch fly", "make demos", "pip install 'anybatch[video,plots]'", "python x.py", "rm -r x"):
        with pytest.raises(AssertionError):
            run(command, "here", capsys, None)
    with pytest.raises(AssertionError, match="prints something else"):
        run("anybatch --version", "here", capsys, "anybatch 0.0.0")
