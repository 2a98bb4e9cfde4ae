"""The arithmetic of the Procgen runs: which episodes count where, intervals, and what a crash leaves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from procgen_invariance_curves import BINS, Finished, by_middle, read_curves, write_curves
from procgen_invariance_jobs import ADJUSTED, DEFAULT, TOTAL, UNADJUSTED, Job, jobs, whole_lines
from procgen_invariance_report import collect, compare, scores, summary


@pytest.mark.parametrize(("arm", "iteration"), [(DEFAULT, 64 * 128), (ADJUSTED, 4 * 128)])
def test_an_episode_counts_where_its_middle_was(arm: str, iteration: int) -> None:
    # middle of the iteration that it ended in, minus N * L / 2: the same step 300,000 for both batch sizes
    job = Job("coinrun", arm, 1)
    length = 500
    end = 300_000 + iteration / 2 + job.num_envs * length / 2
    returns, episodes = by_middle(job, np.array([end]), np.array([length]), np.array([7.0]))
    assert episodes.nonzero()[0].tolist() == [int(300_000 / (TOTAL / BINS))]
    assert returns.tolist() == [7.0] * BINS  # parts without an episode repeat their neighbour


def test_returns_are_averaged_within_a_part() -> None:
    ends, returns = np.array([10_000.0, 10_000.0, TOTAL]), np.array([1.0, 4.0, 9.0])
    values, episodes = by_middle(Job("coinrun", ADJUSTED, 1), ends, np.array([2.0, 2.0, 2.0]), returns)
    assert values[0] == 2.5 and values[-1] == 9
    assert episodes.sum() == 3


def test_one_game_has_welchs_interval() -> None:
    # means 2 and 6, variances of the means 1/3 and 4/3: half-width t * sqrt(5/3) with
    # (5/3)^2 / ((1/3)^2 / 2 + (4/3)^2 / 2) = 2.9412 degrees of freedom, whose 97.5% quantile is 3.2186
    found = compare([np.array([1.0, 2.0, 3.0])], [np.array([4.0, 6.0, 8.0])])
    assert found.difference == -4
    assert found.high - found.difference == pytest.approx(3.2186 * (5 / 3) ** 0.5, rel=1e-4)
    assert found.difference - found.low == pytest.approx(found.high - found.difference)


def test_games_are_averaged_and_one_seed_has_no_interval() -> None:
    found = compare([np.array([1.0]), np.array([4.0])], [np.array([0.0]), np.array([1.0])])
    assert found.difference == 2  # of 1 and 3
    assert np.isnan(found.low) and np.isnan(found.high)


def test_equal_seeds_have_an_interval_without_width() -> None:
    found = compare([np.ones(3)], [np.ones(3)])
    assert str(found) == "+0.000 to +0.000"


def test_an_arm_whose_default_is_missing_is_not_compared() -> None:
    each = np.linspace(1.0, 3.0, BINS)
    score = scores({Job("starpilot", ADJUSTED, 1): Finished(each, each, each, each)})
    assert summary(score).endswith("Van Elteren's test needs all seeds of all games.\n")


def test_the_arms_differ_by_the_adjustments_alone() -> None:
    default, adjusted, unadjusted = (Job("starpilot", arm, 1).config()[0] for arm in (DEFAULT, ADJUSTED, UNADJUSTED))
    assert adjusted.iteration_batch == unadjusted.iteration_batch == default.iteration_batch / 16
    # c = 16: step size / sqrt(16), centre of mass and span times 16
    assert adjusted.optimizer.step_size == default.optimizer.step_size / 4
    assert (adjusted.policy.center_of_mass, adjusted.advantage.span) == (128, 16)
    assert (unadjusted.optimizer, unadjusted.policy) == (default.optimizer, default.policy)
    assert unadjusted.advantage == default.advantage


def test_every_game_and_arm_comes_before_a_second_seed() -> None:
    seeds = [job.seed for job in jobs()]
    assert seeds == sorted(seeds)
    assert len({job.name for job in jobs()}) == len(seeds) == 27


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "episodes.csv"
    assert whole_lines(path) == []
    path.write_text("1,512,20,3\n2,1024,31,4\n2,102")
    assert whole_lines(path) == ["1,512,20,3\n", "2,1024,31,4\n"]


def test_curves_of_another_machine_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs that are only in the results stay there, and give the same tables each time."""
    curves, each = tmp_path / "results" / "curves.csv.gz", np.linspace(1.0, 3.0, BINS) / 3
    stored = {job: Finished(each * job.seed, each // 1 + 9, each, each) for job in jobs() if job.seed < 3}
    write_curves(curves, stored)
    before = curves.read_bytes()
    collect(tmp_path / "no runs", tmp_path / "results")
    assert capsys.readouterr().out.startswith("18 of 27 runs are finished")
    assert curves.read_bytes() == before
    read = read_curves(curves)
    assert list(read) == list(stored)
    for job, run in stored.items():
        for name, values in run._asdict().items():
            assert getattr(read[job], name) == pytest.approx(values, abs=5e-5)
