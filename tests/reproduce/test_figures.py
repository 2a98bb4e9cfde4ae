"""Suites, run lists, curves and numbers computed from them, without training."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from anybatch.cli.main import main
from anybatch.config.schema import TrainConfig
from anybatch.config.validation import validate
from anybatch.errors import AnybatchError, ConfigError, DivergenceError
from anybatch.grid.job import GridResult, Job, Outcome
from anybatch.presets import ppg, ppg_ewma, ppo, ppo_ewma
from anybatch.reproduce import run
from anybatch.reproduce.claims import _betas_claims
from anybatch.reproduce.estimate import estimate, kept_bytes, relative_cost
from anybatch.reproduce.figures.advantage_std import oscillation
from anybatch.reproduce.figures.cost import computed_increase, passes
from anybatch.reproduce.figures.ewma_grid import paper_layout
from anybatch.reproduce.figures.invariance import KL_REFERENCE, signed_root
from anybatch.reproduce.figures.scaling_up import scaled_up
from anybatch.reproduce.figures.staleness import OBJECTIVES
from anybatch.reproduce.finals import ablation_effect, batch_gap, final_returns
from anybatch.reproduce.registry import FIGURES, SUITES, figures_of
from anybatch.reproduce.results import (
    Curve,
    Key,
    Results,
    ResultsFolder,
    curve_points,
    fill_gaps,
    interval_means,
    mean_returns,
    read_results,
    write_results,
)
from anybatch.reproduce.run import check_tables, draw_figure
from anybatch.reproduce.style import COLORS, LABELS
from anybatch.reproduce.suites.ladder_tasks import TASKS
from anybatch.reproduce.suites.suite import Figure, Suite, cut, required_runs
from anybatch.runs.files import DIVERGED

PROCGEN = SUITES["procgen", "full"]()
LAPTOP = SUITES["laptop", "full"]()
LADDER = SUITES["ladder", "full"]()
RESULTS = Path(__file__).parents[2] / "results"


def figures_in(suite: Suite) -> list[Figure]:
    return [figure for figure in FIGURES.values() if figure.tasks(suite)]


@pytest.mark.parametrize("name", SUITES)
def test_every_run_is_valid(name: tuple[str, str]) -> None:
    suite = SUITES[name]()
    for figure in figures_in(suite):
        for group in figure.runs(suite):
            validate(group.config)
            assert group.task in suite.ranges and group.task in suite.labels
        keys = [(group.variant, group.task, group.x) for group in figure.runs(suite)]
        assert len(set(keys)) == len(keys), figure.name


def test_procgen_ladder_is_appendix_b() -> None:
    groups = {group.x: group.config for group in FIGURES["invariance"].runs(PROCGEN) if group.variant == "all"}
    shape = {c: (config.workers, config.env.num_envs // config.workers) for c, config in groups.items()}
    # workers from 4 to 1, then 64, 16, 4, 1 environments of the last
    assert shape == {1: (4, 64), 4: (1, 64), 16: (1, 16), 64: (1, 4), 256: (1, 1)}
    for c, config in groups.items():
        assert config.optimizer.step_size == pytest.approx(5e-4 / math.sqrt(c))
        assert config.policy.center_of_mass == 8 * c
        assert config.advantage.span == c
        assert config.aux.policy_iterations == 32 * c
        # the auxiliary step size follows the workers alone: 4 to 1 halves it, fewer environments leave it
        assert config.aux.step_size == pytest.approx(5e-4 if c == 1 else 2.5e-4)
        # samples of a phase are the same, and so are those of an auxiliary gradient step per worker:
        # 32 * 256 * 256 / 512 / 4 = 1024
        samples = config.aux.policy_iterations * config.iteration_batch / config.aux.minibatches_per_epoch
        assert samples / config.workers == 1024
        assert config.policy.kl_estimator == "half-squared"
        assert (config.total_env_steps, config.env.id) == (100_000_000, "procgen:bossfight-hard")


def test_procgen_runs_by_hand() -> None:
    # all adjustments and (d) at 5 batches, (a) to (c) at the 4 smaller ones, the reference: 23; 16 games, 3 seeds
    assert len(required_runs(PROCGEN, [FIGURES["invariance"]])) == 23 * 16 * 3
    # 7 delays by 3 objectives, of which the three without delay are the same run: 19; 16 games, 4 seeds
    assert len(required_runs(PROCGEN, [FIGURES["staleness"]])) == 19 * 16 * 4
    assert len(required_runs(PROCGEN, [FIGURES["head-to-head"]])) == 4 * 16 * 4
    # PPG-EWMA at the default batch is in both figures: its three seeds are among the four
    both = required_runs(PROCGEN, [FIGURES["invariance"], FIGURES["head-to-head"]])
    # so is PPG, which is ablation (d) at the default batch
    assert len(both) == 23 * 16 * 3 + 4 * 16 * 4 - 2 * 16 * 3
    assert {group.config.total_env_steps for group, _ in both} == {100_000_000}


def test_ablations_are_the_papers() -> None:
    smallest = {group.variant: group.config for group in FIGURES["invariance"].runs(PROCGEN) if group.x == 256}
    every = smallest["all"]
    changed = {
        "no-adam-step": {
            "optimizer": replace(every.optimizer, step_size=5e-4),
            "aux": replace(every.aux, step_size=5e-4),
        },
        "no-advantage-norm": {"advantage": replace(every.advantage, span=1.0)},
        "no-ewma-adjustment": {"policy": replace(every.policy, center_of_mass=8.0)},
        "no-ewma": {"policy": replace(every.policy, proximal="behavior", center_of_mass=8.0)},
    }
    for variant, fields in changed.items():
        assert smallest[variant] == replace(every, **fields), variant
    reference = next(c.config for c in FIGURES["invariance"].runs(PROCGEN) if c.variant == "kl-256")
    assert reference.policy.kl_coefficient == KL_REFERENCE == 1 / 256
    assert (reference.policy.proximal, reference.env.num_envs) == ("behavior", 256)
    betas = {c.variant: c.config.optimizer.adam_betas for c in FIGURES["adam-betas"].runs(PROCGEN) if c.x == 4}
    assert betas["beta2"] == pytest.approx((0.9, 0.999**0.25))
    assert betas["both-betas"] == pytest.approx((0.9**0.25, 0.999**0.25))
    linear = next(c.config for c in FIGURES["linear-step"].runs(PROCGEN) if c.x == 64)
    assert linear.optimizer.step_size == pytest.approx(5e-4 / 64)


def test_staleness_objectives() -> None:
    for group in FIGURES["staleness"].runs(PROCGEN):
        policy, source = group.config.policy, group.config.rollout.source
        assert (source.delay if source.kind == "delayed" else 0) == group.x
        if group.x:
            wanted = OBJECTIVES[group.variant]
            assert (policy.proximal, policy.importance) == (wanted["proximal"], wanted["importance"])
        assert group.config.optimizer.policy_epochs == 3 and policy.objective == "clip"


def test_grid_has_the_default_in_its_corner() -> None:
    groups = {(group.variant, group.x): group.config for group in FIGURES["ewma-grid"].runs(PROCGEN)}
    assert groups["com-1", 1].policy.center_of_mass == 8 * 256 and groups["com-1", 1].policy.kl_coefficient == 1
    assert groups["com-64", 64].policy.center_of_mass == 32 and groups["com-64", 64].policy.kl_coefficient == 64
    assert {c.total_env_steps for c in groups.values()} == {20_000_000}


def test_grid_is_laid_out_as_in_the_paper() -> None:
    # default, then KL x 4; COM / 4, then both
    shown = paper_layout(np.array([[1.0, 2.0], [3.0, 4.0]]))
    # COM grows to the right and the coefficient upwards: the default is in the bottom right corner
    np.testing.assert_array_equal(shown, [[4, 2], [3, 1]])


def test_scaling_up_rules() -> None:
    config = PROCGEN.scaling_up["heist"]
    paper, fixed, none = (scaled_up(config, 16, rule) for rule in ("paper", "fixed-minibatch", "none"))
    assert paper.env.num_envs == fixed.env.num_envs == none.env.num_envs == 16 * config.env.num_envs
    assert paper.optimizer.step_size == pytest.approx(4 * config.optimizer.step_size)
    assert fixed.optimizer.minibatches == 16 * config.optimizer.minibatches
    assert fixed.optimizer.step_size == none.optimizer.step_size == config.optimizer.step_size
    assert none == replace(config, env=paper.env)
    with pytest.raises(ConfigError, match="rule is 'best'"):
        scaled_up(config, 2, "best")


def test_laptop_suite_has_ppg_with_its_phase_adjusted() -> None:
    groups = [c for c in FIGURES["invariance"].runs(LAPTOP) if c.config.aux.enabled and c.variant == "all"]
    phases = {c.config.aux.policy_iterations * c.config.iteration_batch for c in groups}
    assert len(groups) == len(LAPTOP.divisors) and len(phases) == 1
    assert [c.config.aux.policy_iterations / groups[0].config.aux.policy_iterations for c in groups] == [
        *LAPTOP.divisors
    ]


def test_reported_seeds_are_far_from_those_of_the_search() -> None:
    for suite in (LAPTOP, LADDER):
        for figure in FIGURES.values():
            seeds = suite.seeds_of(figure.name)
            assert min(seeds) >= 1000 and len(set(seeds)) == len(seeds)


def test_ladder_suite_is_many_kinds_of_tasks_and_short_iterations() -> None:
    assert len({task.family for task in TASKS.values()}) == 6
    for name, config in LADDER.invariance.items():
        share = 0.005 if name == "minigrid" else 0.0025
        assert config.env.num_envs == 64 and config.iteration_batch <= share * config.total_env_steps
        # evaluations are at the same numbers of environment steps at every batch size
        assert config.total_env_steps % (LADDER.points * config.iteration_batch / 2) == 0
    quick = SUITES["ladder", "quick"]()
    groups = [(g.variant, g.x) for g in FIGURES["invariance"].runs(quick) if g.task == "catch-ppg"]
    assert sorted(x for variant, x in groups if variant == "all") == [1, 4, 16]
    assert [x for variant, x in groups if variant == "no-adam-step"] == [16]
    assert ("no-policy-iterations", 16) in groups and ("no-ewma", 1) in groups
    assert quick.evaluations is not None and "minigrid" not in quick.invariance and quick.betas == ()


def test_cut() -> None:
    small = cut(PROCGEN, ("heist", "maze"), seeds=2, steps=1_000_000)
    assert tuple(small.invariance) == ("maze", "heist") and small.seeds_of("staleness") == (1000, 2000)
    assert small.grid == "maze" and small.betas == ("heist",)
    configs = [group.config for figure in FIGURES.values() for group in figure.runs(small)]
    assert {c.total_env_steps for c in configs} == {1_000_000}
    assert {c.env.id for c in configs} == {"procgen:heist-hard", "procgen:maze-hard"}
    for what, words in (
        ({"games": ("pong",)}, "games is 'pong'"),
        ({"seeds": 0}, "seeds is 0"),
        ({"steps": 0}, "steps"),
    ):
        with pytest.raises(ConfigError, match=words):
            cut(PROCGEN, **what)


def test_means_between_edges_by_hand() -> None:
    # 2 episodes of mean 5 by step 10, then 2 more of mean 10 by step 20, none until step 30
    steps, episodes, returns = np.array([10.0, 20.0, 30.0]), np.array([2.0, 4.0, 4.0]), np.array([10.0, 30.0, 30.0])
    edges = np.array([0.0, 10.0, 20.0, 30.0])
    np.testing.assert_allclose(mean_returns(edges, steps, episodes, returns), [5, 10, 10])
    # from 5 to 15: one episode of the first pair, one of the second: (5 + 10) / 2
    np.testing.assert_allclose(mean_returns(np.array([5.0, 15.0]), steps, episodes, returns), [7.5])
    nothing = mean_returns(edges, steps, np.zeros(3), np.zeros(3))
    assert np.isnan(nothing).all()


def test_means_of_a_line_by_hand() -> None:
    # 0 at 0, 10 at 10, level afterwards; a NaN in between is left out
    means = interval_means(np.array([0.0, 10.0, 20.0]), np.array([0.0, 5.0, 10.0]), np.array([0.0, math.nan, 10.0]))
    np.testing.assert_allclose(means, [5, 10])
    assert np.isnan(interval_means(np.array([0.0, 1.0]), np.array([0.0]), np.array([math.nan]))).all()


def test_fill_gaps() -> None:
    nan = math.nan
    np.testing.assert_array_equal(fill_gaps(np.array([nan, 1.0, nan, nan, 2.0, nan])), [1, 1, 1, 1, 2, 2])


def test_a_diverged_run_ends_where_it_ended_and_counts_as_zero() -> None:
    config = ppo_ewma("envpool:Catch-v0", total_env_steps=40)
    columns = {
        "env_steps": np.array([10.0, 20.0]),
        "episodes": np.array([1.0, 2.0]),
        "episode_return_sum": np.array([1.0, 1.5]),
    }
    values = curve_points(columns, config, "return", 4, diverged=True)
    np.testing.assert_allclose(values, [1.0, 0.5, math.nan, math.nan])
    assert np.isnan(curve_points({}, config, "return", 4, diverged=True)).all()
    suite = replace(LAPTOP, final_points=2)
    results = Results({("all", "catch", 1): Curve((1,), 40, values[None], (True,))})
    assert final_returns(suite, results, "all", 1, ("catch",)) == 0.0


def test_evaluations_are_interpolated_to_their_points() -> None:
    config = ppo_ewma("envpool:Catch-v0", total_env_steps=40)
    # evaluated before training, and after iterations of 12 steps; a row without evaluation between
    columns = {
        "env_steps": np.array([0.0, 12.0, 18.0, 24.0, 36.0, 48.0]),
        "eval_return": np.array([0.0, 6.0, math.nan, 6.0, 0.0, 4.0]),
    }
    # at 10: 10/12 of 6; at 20: level; at 30: half of 6; at 40: a third of 4
    values = curve_points(columns, config, "eval_return", 4, diverged=False)
    np.testing.assert_allclose(values, [5, 6, 3, 4 / 3])
    # a run that ended after 24 steps
    ended = curve_points({k: x[:4] for k, x in columns.items()}, config, "eval_return", 4, diverged=True)
    np.testing.assert_allclose(ended, [5, 6, math.nan, math.nan])


def test_unsmoothed_columns_are_rows_as_they_are() -> None:
    columns = {"env_steps": np.arange(1.0, 1001), "advantage_std": np.arange(1.0, 1001)}
    values = curve_points(columns, ppo_ewma(), "advantage_std", 4, diverged=False)
    assert len(values) == 200 and (values[0], values[-1]) == (1, 1000) and set(values) <= set(columns["advantage_std"])


def test_tables_of_results_read_back(tmp_path: Path) -> None:
    curves: dict[Key, Curve] = {
        ("all", "catch", 1): Curve((1000, 2000), 50, np.array([[0.5, math.nan], [1.25, -2.0]]), (True, False)),
        ("all", "catch", 4): Curve((1000,), 50, np.array([[0.1, 0.2]]), (False,)),
    }
    path = tmp_path / "x.csv.gz"
    write_results(path, Results(curves))
    first = path.read_bytes()
    found = read_results(path).curves
    write_results(path, read_results(path))
    assert path.read_bytes() == first
    for key, curve in curves.items():
        np.testing.assert_array_equal(found[key].values, curve.values)
        assert replace(found[key], values=curve.values) == replace(curve, values=curve.values)
    with pytest.raises(AnybatchError, match="no results of linear-step on catch at 4"):
        read_results(path)["linear-step", "catch", 4]
    with pytest.raises(AnybatchError, match="reproduce run y"):
        read_results(tmp_path / "y.csv.gz")
    damaged = bytearray(first)
    damaged[20:40] = bytes(20)  # a crash of the machine leaves blocks of zeros
    for content in (b"no", bytes(damaged), first[:-5]):
        path.write_bytes(content)
        with pytest.raises(AnybatchError, match="not a table"):
            read_results(path)


def test_a_table_is_not_replaced_by_one_of_other_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = RESULTS / "laptop" / "invariance.csv.gz"
    for name in ("invariance", "adam-betas"):
        shutil.copy(RESULTS / "laptop" / f"{name}.csv.gz", tmp_path)
    check_tables(LAPTOP, [FIGURES["invariance"], FIGURES["adam-betas"]], ResultsFolder(tmp_path))
    command = ["reproduce", "run", "adam-betas", "--out", str(tmp_path)]
    for options, words in (
        (["--games", "catch", "--seeds", "30"], "now not asked for"),  # two more tasks are in the table
        (["--seeds", "3"], "now asked for without 17 of its 20 seeds"),
        (["--steps", "2048"], "with 40,000 environment steps, now asked for with 2,048"),
        (["--budget", "smoke"], "environment steps, now asked for with"),
    ):
        assert main([*command, *options]) == 2
        assert words in capsys.readouterr().err
    assert (tmp_path / "invariance.csv.gz").read_bytes() == stored.read_bytes()
    with pytest.raises(SystemExit):
        main(["reproduce", "draw", "adam-betas", "--out", str(tmp_path), "--seeds", "3"])


def test_tables_that_do_not_fit_together_are_one_sentence(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path)
    for name in ("invariance", "linear-step"):
        shutil.copy(RESULTS / "laptop" / f"{name}.csv.gz", tmp_path)
    table = read_results(folder.table("invariance"))
    key = next(iter(table.curves))
    write_results(folder.table("invariance"), Results({**table.curves, ("mystery", *key[1:]): table[key]}))
    with pytest.raises(AnybatchError, match=r"do not match invariance .*mystery.*run it again"):
        draw_figure(LAPTOP, FIGURES["invariance"], folder)
    fewer = {
        key: replace(x, seeds=x.seeds[1:], values=x.values[1:], diverged=x.diverged[1:])
        for key, x in table.curves.items()
    }
    write_results(folder.table("invariance"), Results({**table.curves, key: fewer[key]}))
    with pytest.raises(AnybatchError, match="has more seeds on some tasks than on others"):
        draw_figure(LAPTOP, FIGURES["tests"], folder)
    small = {key: fewer[key] if key[2] != 1 else x for key, x in table.curves.items()}
    write_results(folder.table("invariance"), Results(small))
    with pytest.raises(AnybatchError, match="run both figures with the same --seeds"):
        draw_figure(LAPTOP, FIGURES["tests"], folder)


@pytest.mark.parametrize("launcher", ["here", "local"])
def test_a_diverged_run_of_a_grid_is_a_result(
    launcher: Literal["here", "local"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = cut(SUITES["procgen", "smoke"](), ("coinrun",), seeds=1, steps=None)
    figure, folder, trained = FIGURES["linear-step"], ResultsFolder(tmp_path), []

    def diverge(config: TrainConfig, path: Path, seed: int, **_: Any) -> None:
        trained.append(path)
        path.mkdir(parents=True)
        (path / DIVERGED).touch()
        raise DivergenceError("a loss is not finite; lower optimizer.step_size")

    def diverge_in_processes(jobs: list[Job], parent: Path, **_: Any) -> GridResult:
        outcomes = [Outcome(job, parent / job.folder_name, "diverged") for job in jobs]
        for outcome in outcomes:
            with pytest.raises(DivergenceError):
                diverge(outcome.job.config, outcome.folder, outcome.job.seed)
        return GridResult(outcomes)

    monkeypatch.setattr(run, "train_or_resume", diverge)
    monkeypatch.setattr(run, "run_grid", diverge_in_processes)
    (group, seed), *_ = required_runs(suite, [figure])
    with pytest.raises(AnybatchError, match="is missing; run the figure first"):
        run.collect_curves(suite, figure, folder)
    for _ in range(2):  # the second call trains nothing
        assert run.train_all(suite, [figure], folder, launcher=launcher) == 0
    assert len(trained) == len(set(trained)) == len(required_runs(suite, [figure]))
    assert run.is_done(suite, group, seed, folder)
    assert all(curve.diverged == (True,) for curve in run.collect_curves(suite, figure, folder).curves.values())


def test_few_seeds_support_no_claim_of_no_difference() -> None:
    # 3 seeds against 3 on one task: Z is at most sqrt(27/7) = 1.96, and 3.48 are needed
    suite = replace(cut(LAPTOP, ("catch",), seeds=3, steps=None), betas=("catch",))
    values = np.ones((3, suite.points)) + np.arange(3)[:, None] / 100
    keys = [(variant, "catch", suite.divisors[-1]) for variant in ("all", "beta2", "both-betas")]
    results = Results({key: Curve((1, 2, 3), 100, values * (key[0] == "all"), (False,) * 3) for key in keys})
    judged = list(_betas_claims(suite, results))
    assert not any(claim.holds for claim in judged)
    assert all("(at most 1.96 with so few seeds)" in claim.text for claim in judged)
    assert "|Z| is 1.96 at most" in "".join(FIGURES["adam-betas"].summary(suite, results))


def test_an_advantage_without_spread_or_estimates() -> None:
    assert math.isnan(oscillation(np.zeros(0)))
    assert math.isinf(oscillation(np.array([0.0] * 52 + [5.0] * 28)))
    columns = {"env_steps": np.zeros(1), "eval_return": np.zeros(1)}  # diverged in the first iteration
    assert np.isnan(curve_points(columns, LADDER.invariance["cartpole"], "advantage_std", 5, diverged=True)).all()


def made_up(**ends: list[float]) -> tuple[Suite, Results]:
    """Catch alone, its range 0 to 1, and constant curves that end as given, named variant_divisor."""
    suite = replace(LAPTOP, ranges={"catch": (0.0, 1.0)}, divisors=(1, 4), invariance={"catch": ppo_ewma()})
    curves: dict[Key, Curve] = {}
    for name, values in ends.items():
        variant, divisor = name.replace("no_ewma", "no-ewma").rsplit("_", 1)
        array = np.repeat(np.array(values)[:, None], 8, axis=1)
        curves[variant, "catch", int(divisor)] = Curve(tuple(range(len(values))), 10, array, (False,) * len(values))
    return suite, Results(curves)


def test_effect_and_gap_by_hand() -> None:
    suite, results = made_up(all_1=[0.9, 1.0], all_4=[0.8, 0.8], no_ewma_1=[1.0, 1.0], no_ewma_4=[0.5, 0.3])
    # losses of the ablation .5 and .7, of all adjustments .1 and .2: all four pairs won, variance 4/12 * 5
    size, z, _ = ablation_effect(suite, results, "no-ewma", 4, ("catch",))
    assert size == pytest.approx(0.6 - 0.15) and z == pytest.approx(2 / math.sqrt(5 / 3))
    by_task, mean, (low, high) = batch_gap(suite, results, "all", ("catch",))
    assert by_task == pytest.approx([0.15]) and mean == pytest.approx(0.15)
    # the large batch's mean is resampled between .9 and 1
    assert (low, high) == (pytest.approx(0.1), pytest.approx(0.2))


def test_an_ablation_without_runs_at_the_default_shares_those_of_all_adjustments() -> None:
    suite, results = made_up(all_1=[0.9, 1.0], all_4=[0.9, 1.0], **{"linear-step_4": [0.5, 0.5]})
    assert ablation_effect(suite, results, "linear-step", 4, ("catch",)).size == pytest.approx(0.45)


def test_square_root_scale_keeps_the_sign() -> None:
    np.testing.assert_allclose(signed_root(np.array([-0.25, 0.0, 0.04])), [-0.5, 0, 0.2])


def test_cost_is_the_papers() -> None:
    assert passes(ppo()) == (1, 3) and passes(ppo_ewma()) == (4, 3)
    assert passes(ppo(proximal="recent")) == (4, 3)  # a frozen copy is evaluated in each epoch, as an average is
    assert passes(ppg()) == (2, 14) and passes(ppg_ewma()) == (3, 14)
    assert computed_increase(ppo_ewma(), ppo()) == pytest.approx(0.30)
    assert computed_increase(ppg_ewma(), ppg()) == pytest.approx(1 / 44)


def test_estimate_by_hand() -> None:
    # 19 * 16 * 4 runs of PPO; 13 of 19 have pi_recent as proximal policy, which costs as much as an EWMA (below)
    total = estimate(PROCGEN, [FIGURES["staleness"]], 1000.0)
    assert total.runs == 1216 and total.env_steps == 1216 * 10**8
    assert total.gpu_hours == pytest.approx((6 + 13 * 42.325 / 33.778) * 64 * 10**8 / 1000 / 3600, rel=1e-4)
    # microseconds: environment 7.246, acting 3.472, three passes 23.059 in minibatches of 8,192: PPO takes 33.778;
    # the EWMA's three forward passes take 8.547 more
    assert relative_cost(ppo_ewma()) == pytest.approx(42.325 / 33.778, rel=1e-4)
    # PPG acts with two networks, learns with one pass of each, and has 12 auxiliary passes in minibatches of 4,096,
    # 32.264 ms each by interpolation: 7.246 + 6.944 + 15.373 + 94.523
    assert relative_cost(ppg()) == pytest.approx(124.086 / 33.778, rel=1e-4)
    # one environment: a step of acting takes as long as with 256, and a pass over 32 samples as long as over 256, which
    # is 256 / 45,800 s: 7.246 + 888.889 + 3 * 174.672
    assert relative_cost(ppo(num_envs=1)) == pytest.approx(1420.151 / 33.778, rel=1e-4)
    assert total.phase_gb == 0
    # a phase: 32 * 256 * 256 observations of 64 * 64 * 3 bytes
    assert estimate(PROCGEN, [FIGURES["head-to-head"]], 1.0).phase_gb == pytest.approx(32 * 65536 * 12288 / 1e9)
    long, short = ppo(), ppo(num_envs=1)
    # 256 times the rows of the log: 100M / 256 instead of 100M / 65536
    assert (kept_bytes(short) - kept_bytes(long)) / (390625 - 1526) == pytest.approx(
        kept_bytes(short) / 407_812, rel=0.2
    )


def test_numbers_of_the_paper_name_figures() -> None:
    assert [figure.name for figure in figures_of("figure2")] == ["invariance"]
    assert [figure.name for figure in figures_of("Figure 16")] == ["invariance", "linear-step"]
    assert figures_of("table-5")[-1].name == "tests"
    # the paper has figures 1 to 18; its tables 1 to 4 are hyperparameters
    aliases = [alias for figure in FIGURES.values() for alias in figure.aliases]
    assert sorted(aliases) == sorted([*(f"figure{number}" for number in range(1, 19)), "table5"])
    for name in ("figure19", "table1", "fig1"):
        with pytest.raises(ConfigError, match=f"figure is '{name}'.*figure1 to figure18, table5"):
            figures_of(name)


def test_batch_sizes_are_numbers_of_environments() -> None:
    assert [LAPTOP.batch_label(c) for c in LAPTOP.divisors] == [
        "64 environments",
        "16 environments",
        "4 environments",
        "1 environment",
    ]
    mixed = replace(LAPTOP, invariance={"a": ppo_ewma(num_envs=64), "b": ppo_ewma(num_envs=32)})
    assert mixed.batch_label(4) == "1/4 of the environments"


def test_every_variant_has_a_label_and_one_colour() -> None:
    for suite in (LAPTOP, LADDER, PROCGEN):
        variants = {group.variant for figure in figures_in(suite) for group in figure.runs(suite)}
        assert {v for v in variants if not v.startswith("com-")} - {"noise-scale"} <= set(LABELS)
    assert set(COLORS) <= set(LABELS)


def test_results_of_the_default_batch_are_shared_only_there() -> None:
    _, results = made_up(all_1=[0.9], all_4=[0.8])
    assert results.source("no-ewma", "catch", 1) == "all"
    with pytest.raises(AnybatchError, match="no results of no-ewma on catch at 4"):
        results[results.source("no-ewma", "catch", 4), "catch", 4]
