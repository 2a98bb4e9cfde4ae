"""Callbacks: what they may do, in which order they are called, and that a resumed run repeats nothing of it."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anybatch.callbacks import Callback, RunContext
from anybatch.cli.main import main
from anybatch.config.schema import TrainConfig
from anybatch.errors import ConfigError, UserCodeError
from anybatch.presets import ppo
from anybatch.runs import checkpoint
from anybatch.runs.evaluation import load_policy
from anybatch.runs.progress import read_progress
from anybatch.training import resume, train

ITERATION = 4 * 8


def small(iterations: int = 6, **changes: Any) -> TrainConfig:
    return ppo(
        "gym:CartPole-v1",
        num_envs=4,
        steps=8,
        minibatches=2,
        total_env_steps=iterations * ITERATION,
        precision="fp32",
        device="cpu",
        tensorboard=False,
        model={"encoder": "mlp", "options": {"width": 8, "depth": 1}},
        **changes,
    )


class Recorder(Callback):
    """Remembers the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, run: RunContext) -> None:
        self.calls.append(f"start {run.iteration} {run.resumed}")

    def after_iteration(self, run: RunContext, row: dict[str, Any]) -> None:
        assert row["iteration"] == run.iteration and row["env_steps"] == run.env_steps
        self.calls.append(f"row {run.iteration}")

    def checkpoint(self, run: RunContext, path: Path) -> None:
        assert path.is_file()
        self.calls.append(f"checkpoint {path.stem[-1]}")

    def end(self, run: RunContext) -> None:
        self.calls.append(f"end {run.finished} {run.error}")


class Total(Callback):
    """The sum over all iterations of a column, as a column of its own; its state is a tensor and plain data."""

    def __init__(self, column: str = "entropy", name: str = "total") -> None:
        self.column, self.name = column, name
        self.sum, self.seen = torch.zeros(1, dtype=torch.float64), [0]

    def after_iteration(self, run: RunContext, row: dict[str, Any]) -> None:
        self.sum += row[self.column]
        self.seen[0] += 1
        row[self.name] = self.sum.clone()

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum, self.seen = state["sum"].clone(), list(state["seen"])


class Does(Callback):
    """Calls a function after an iteration."""

    def __init__(self, function: Callable[[RunContext, dict[str, Any]], object], at: int = 2) -> None:
        self.function, self.at = function, at

    def after_iteration(self, run: RunContext, row: dict[str, Any]) -> None:
        if run.iteration == self.at:
            self.function(run, row)


def stop_at(iteration: int, reason: str = "enough") -> Does:
    return Does(lambda run, row: run.stop(reason), iteration)


def content(run: Path) -> dict[str, Any]:
    return checkpoint.load_newest(run / "checkpoints")[0]


def csv_text(run: Path) -> str:
    """progress.csv without the columns of times."""
    columns = read_progress(run / "progress.csv")
    return str({name: x for name, x in columns.items() if "second" not in name})


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(torch.equal(a, b)) if isinstance(a, torch.Tensor) else bool(a == b or (a != a and b != b))


# ---------------------------------------------------------------- calls


def test_the_order_of_calls(tmp_path: Path) -> None:
    recorder = Recorder()
    train(small(3, checkpoint_seconds=0.0), tmp_path / "run", 0, [recorder], quiet=True)
    rows = [f"{what} {number}" for number in (1, 2, 3) for what in ("row", "checkpoint")]
    assert recorder.calls == ["start 0 False", "checkpoint 0", *rows, "checkpoint 3", "end True None"]
    again = Recorder()
    resume(tmp_path / "run", callbacks=[again], total_env_steps=4 * ITERATION, quiet=True)
    assert again.calls == ["start 3 True", "row 4", "checkpoint 4", "checkpoint 4", "end True None"]


def test_columns_are_written_and_those_of_others_stay(tmp_path: Path) -> None:
    values = {"a": 1, "b": np.float32(0.5), "c": torch.tensor(2), "d": None, "e": math.nan, "f": True}
    train(small(2), tmp_path / "run", 0, [Does(lambda run, row: row.update(values))], quiet=True)
    columns = read_progress(tmp_path / "run" / "progress.csv")
    assert [columns[name][1] for name in "abcf"] == [1, 0.5, 2, 1]
    assert math.isnan(columns["d"][1]) and math.isnan(columns["e"][1]) and math.isnan(columns["a"][0])


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda run, row: row.update(env_steps=0), "has changed the column env_steps"),
        (lambda run, row: row.pop("entropy"), "has changed the column entropy"),
        (lambda run, row: row.update(x="5"), "gives '5' for the column x, which is not a number"),
        (lambda run, row: row.update(x=torch.zeros(2)), r"gives tensor\(.*\) for the column x, which is not a number"),
        (lambda run, row: row.update({"a\nb": 1}), r"has added the column 'a\\nb'"),
    ],
)
def test_bad_columns_are_one_sentence(act: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"the callback Does {sentence}"):
        train(small(2), tmp_path / "run", 0, [Does(act)], quiet=True)


def test_what_is_no_callback_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    for wrong, words in ((Recorder, "the class Recorder"), (print, "<built-in function print>")):
        with pytest.raises(ConfigError, match=f"callbacks contains {words}, but must contain objects"):
            train(small(), tmp_path / "run", 0, [wrong], quiet=True)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"callbacks is <.*Recorder.*>, but must be a list of callbacks"):
        train(small(), tmp_path / "run", 0, Recorder(), quiet=True)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_callbacks_of_a_generator_are_called(tmp_path: Path) -> None:
    recorders = [Recorder(), Recorder()]
    train(small(1), tmp_path / "run", 0, (x for x in recorders[:1]), quiet=True)  # type: ignore[arg-type]
    resume(tmp_path / "run", callbacks=reversed(recorders[1:]), total_env_steps=64, quiet=True)  # type: ignore[arg-type]
    assert [recorder.calls[-1] for recorder in recorders] == ["end True None"] * 2


# ---------------------------------------------------------------- stop


def test_a_stop_ends_the_run_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder, out = Recorder(), tmp_path / "run"
    result = train(small(), out, 0, [stop_at(2), recorder], quiet=True)
    assert (result.stopped, result.interrupted, result.env_steps) == ("enough", False, 2 * ITERATION)
    assert recorder.calls[-3:] == ["row 2", "checkpoint 2", "end True None"]
    assert content(out)["run"]["stopped"] == "enough" and content(out)["run"]["iteration"] == 2
    assert main(["resume", str(out), "--quiet"]) == 0  # it is done
    assert "ended after 64 steps: enough; mean return" in capsys.readouterr().out
    assert resume(out, quiet=True).stopped == "enough"
    longer = resume(out, total_env_steps=6 * ITERATION, quiet=True)
    assert (longer.stopped, longer.env_steps) == (None, 6 * ITERATION)
    train(small(), tmp_path / "whole", quiet=True)
    assert csv_text(out) == csv_text(tmp_path / "whole")


def test_a_stop_before_the_first_iteration(tmp_path: Path) -> None:
    class Never(Callback):
        def start(self, run: RunContext) -> None:
            assert not run.finished
            run.stop("first reason")
            run.stop("second reason")
            assert run.finished

    result = train(small(), tmp_path / "run", 0, [Never()], quiet=True)
    assert (result.stopped, result.env_steps) == ("first reason", 0)


# ---------------------------------------------------------------- errors


def boom(run: RunContext, row: dict[str, Any]) -> None:
    raise ZeroDivisionError("no luck")


def test_a_callback_that_raises_is_named_and_the_checkpoint_stays(tmp_path: Path) -> None:
    recorder, out = Recorder(), tmp_path / "run"
    with pytest.raises(UserCodeError, match="after_iteration of the callback Does raised ZeroDivisionError: no luck"):
        train(small(checkpoint_seconds=0.0), out, 0, [recorder, Does(boom, 3)], quiet=True)
    assert content(out)["run"]["iteration"] == 2
    assert recorder.calls[-1].startswith("end False after_iteration of the callback Does raised")
    resume(out, quiet=True)
    train(small(), tmp_path / "whole", quiet=True)
    assert csv_text(out) == csv_text(tmp_path / "whole")


def test_errors_in_start_checkpoint_and_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for method in ("start", "checkpoint", "end", "state_dict"):

        def fail(self: Callback, *_: Any) -> Any:
            raise SystemExit(3)

        broken = type("Broken", (Callback,), {method: fail})
        with pytest.raises(UserCodeError, match=rf"^{method} of the callback Broken raised SystemExit: 3"):
            train(small(1), tmp_path / method, 0, [broken()], quiet=True)
    worse = type("Worse", (Callback,), {"after_iteration": boom_method, "end": boom_method})
    with pytest.raises(UserCodeError, match=r"^after_iteration of the callback Worse"):
        train(small(1), tmp_path / "worse", 0, [worse()], quiet=True)
    assert "after UserCodeError: end of the callback Worse raised ZeroDivisionError" in capsys.readouterr().err


def boom_method(self: Callback, *_: Any) -> None:
    raise ZeroDivisionError


# ---------------------------------------------------------------- state


def test_a_callback_with_state_resumes_bitwise(tmp_path: Path) -> None:
    out, whole = tmp_path / "run", tmp_path / "whole"
    train(small(), whole, 1, [Total(), Total("clip_fraction", "clipped")], quiet=True)
    train(small(), out, 1, [Total(), Total("clip_fraction", "clipped"), stop_at(3)], quiet=True)
    resumed = [Total(), Total("clip_fraction", "clipped")]
    resume(out, callbacks=resumed, total_env_steps=6 * ITERATION, quiet=True)
    assert csv_text(out) == csv_text(whole)
    assert resumed[0].seen == [6]
    assert same({**content(out)["run"], "seconds": 0}, {**content(whole)["run"], "seconds": 0})
    columns = read_progress(whole / "progress.csv")
    assert columns["total"][-1] == pytest.approx(sum(columns["entropy"]), rel=1e-12)
    assert content(out)["run"]["callbacks"].keys() == {"Total", "Total 2"}


def test_a_callback_that_is_gone_or_new_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(small(3), tmp_path / "run", 0, [Total(), stop_at(2)], quiet=True)
    resume(tmp_path / "run", quiet=True, total_env_steps=3 * ITERATION)
    err = capsys.readouterr().err
    assert "the checkpoint has the state of a callback Total, which was not passed this time" in err
    assert "progress.csv has columns that will be empty from now on: total" in err
    resume(tmp_path / "run", callbacks=[Total(), Recorder()], quiet=True, total_env_steps=4 * ITERATION)
    err = capsys.readouterr().err
    assert "the callback Total starts from scratch: the checkpoint does not contain its state" in err
    assert "Recorder" not in err and "progress.csv" not in err
    assert [math.isnan(x) for x in read_progress(tmp_path / "run" / "progress.csv")["total"]] == [
        False,
        False,
        True,
        False,
    ]


def test_a_new_callback_may_make_its_state_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Late(Callback):
        def start(self, run: RunContext) -> None:
            self.seen = 0

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

    train(small(1), tmp_path / "run", quiet=True)
    resume(tmp_path / "run", callbacks=[Late()], total_env_steps=2 * ITERATION, quiet=True)
    assert "the callback Late starts from scratch" in capsys.readouterr().err
    assert content(tmp_path / "run")["run"]["callbacks"] == {"Late": {"seen": 0}}


class Named(dict[str, int]):
    pass


class Marked(torch.Tensor):
    pass


def test_state_of_every_allowed_type_is_loaded_again(tmp_path: Path) -> None:
    state = {
        "dictionaries": [{"a": {1: 2.5}}, OrderedDict(a=1), Counter("aab")],
        "tensors": (torch.ones(2), torch.nn.Parameter(torch.zeros(1))),
        "plain": [None, True, 2**63 - 1, 1 - 2**63, 0.5, "text"],
    }
    given = type("Given", (Callback,), {"state_dict": lambda self: state})
    train(small(1), tmp_path / "run", 0, [given()], quiet=True)
    assert same(content(tmp_path / "run")["run"]["callbacks"]["Given"], state)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"x": defaultdict(int)}, "state_dict() of the callback Odd, x is a collections.defaultdict, but must be"),
        ({"x": Named(a=1)}, f"state_dict() of the callback Odd, x is a {__name__}.Named, but must be"),
        ({"x": torch.ones(1).as_subclass(Marked)}, f"state_dict() of the callback Odd, x is a {__name__}.Marked"),
        ({"x": 2**63}, "state_dict() of the callback Odd, x is 9223372036854775808, but integers must have at most"),
        ({"x": np.float64(1)}, "state_dict() of the callback Odd, x is a numpy.float64"),
        ({"x": [{"y": {1}}]}, "state_dict() of the callback Odd, x, y is a set"),
        ({2.5: 1}, "state_dict() of the callback Odd has the key 2.5"),
        ([], "state_dict() of the callback Odd is a list, but must be a dictionary"),
    ],
)
def test_state_that_could_not_be_loaded_again_is_refused(state: Any, words: str, tmp_path: Path) -> None:
    odd = type("Odd", (Callback,), {"state_dict": lambda self: state})
    with pytest.raises(ConfigError) as caught:
        train(small(1), tmp_path / "run", 0, [odd()], quiet=True)
    assert str(caught.value).startswith(words)


# ---------------------------------------------------------------- policy


def test_the_policy_is_a_copy(tmp_path: Path) -> None:
    kept: list[Any] = []

    class Acting(Callback):
        def after_iteration(self, run: RunContext, row: dict[str, Any]) -> None:
            policy = run.policy()
            kept.append(policy)
            policy.act(policy.observation_space.sample(), torch.Generator().manual_seed(1))
            with torch.no_grad():
                for parameter in kept[0].agent.parameters():
                    parameter.zero_()

    train(small(3), tmp_path / "run", 0, [Acting()], quiet=True)
    train(small(3), tmp_path / "plain", quiet=True)
    assert csv_text(tmp_path / "run") == csv_text(tmp_path / "plain")
    loaded = load_policy(tmp_path / "run").agent.state_dict()
    assert same(dict(kept[-1].agent.state_dict()), dict(loaded))
    assert all(bool((x == 0).all()) for x in kept[0].agent.state_dict().values())
