"""Suites, run lists, curves and what is computed from them, without training."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from anybatch.config.validation import validate
from anybatch.errors import AnybatchError, ConfigError
from anybatch.presets import ppg, ppg_ewma, ppo, ppo_ewma
from anybatch.reproduce.estimate import estimate, kept_bytes, relative_cost
from anybatch.reproduce.figures.cost import computed_increase, passes
from anybatch.reproduce.figures.ewma_grid import paper_layout
from anybatch.reproduce.figures.invariance import KL_REFERENCE, signed_root
from anybatch.reproduce.figures.scaling_up import larger
from anybatch.reproduce.figures.staleness import OBJECTIVES
from anybatch.reproduce.finals import effect, final, gap
from anybatch.reproduce.manifest import without_out
from anybatch.reproduce.registry import FIGURES, SUITES, figures_of
from anybatch.reproduce.report import markdown_to_html
from anybatch.reproduce.results import (
    Curve,
    Key,
    Results,
    filled,
    mean_between,
    mean_of_line,
    read_results,
    write_results,
)
from anybatch.reproduce.run import curve_of
from anybatch.reproduce.suites.suite import Cut, Suite, cut, work_of

PROCGEN = SUITES["procgen", "full"]()
LAPTOP = SUITES["laptop", "full"]()


@pytest.mark.parametrize("name", SUITES)
def test_every_run_is_valid(name: tuple[str, str]) -> None:
    suite = SUITES[name]()
    for figure in FIGURES.values():
        for cell in figure.cells(suite):
            validate(cell.config)
            assert cell.task in suite.ranges and cell.task in suite.labels
        keys = [(cell.variant, cell.task, cell.x) for cell in figure.cells(suite)]
        assert len(set(keys)) == len(keys), figure.name


def test_procgen_ladder_is_appendix_b() -> None:
    cells = {cell.x: cell.config for cell in FIGURES["invariance"].cells(PROCGEN) if cell.variant == "all"}
    shape = {c: (config.workers, config.env.num_envs // config.workers) for c, config in cells.items()}
    # workers from 4 to 1, then 64, 16, 4, 1 environments of the last
    assert shape == {1: (4, 64), 4: (1, 64), 16: (1, 16), 64: (1, 4), 256: (1, 1)}
    for c, config in cells.items():
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
    assert len(work_of(PROCGEN, [FIGURES["invariance"]]).jobs) == 23 * 16 * 3
    # 7 delays by 3 objectives, of which the three without delay are the same run: 19; 16 games, 4 seeds
    assert len(work_of(PROCGEN, [FIGURES["staleness"]]).jobs) == 19 * 16 * 4
    assert len(work_of(PROCGEN, [FIGURES["head-to-head"]]).jobs) == 4 * 16 * 4
    # PPG-EWMA at the default batch is in both figures: its three seeds are among the four
    both = work_of(PROCGEN, [FIGURES["invariance"], FIGURES["head-to-head"]])
    # so is PPG, which is ablation (d) at the default batch
    assert len(both.jobs) == 23 * 16 * 3 + 4 * 16 * 4 - 2 * 16 * 3
    assert both.env_steps == len(both.jobs) * 100_000_000


def test_ablations_are_the_papers() -> None:
    smallest = {cell.variant: cell.config for cell in FIGURES["invariance"].cells(PROCGEN) if cell.x == 256}
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
    reference = next(c.config for c in FIGURES["invariance"].cells(PROCGEN) if c.variant == "kl-256")
    assert reference.policy.kl_coefficient == KL_REFERENCE == 1 / 256
    assert (reference.policy.proximal, reference.env.num_envs) == ("behavior", 256)
    betas = {c.variant: c.config.optimizer.adam_betas for c in FIGURES["adam-betas"].cells(PROCGEN) if c.x == 4}
    assert betas["beta2"] == pytest.approx((0.9, 0.999**0.25))
    assert betas["both-betas"] == pytest.approx((0.9**0.25, 0.999**0.25))
    linear = next(c.config for c in FIGURES["linear-step"].cells(PROCGEN) if c.x == 64)
    assert linear.optimizer.step_size == pytest.approx(5e-4 / 64)


def test_staleness_objectives() -> None:
    for cell in FIGURES["staleness"].cells(PROCGEN):
        policy, source = cell.config.policy, cell.config.rollout.source
        assert (source.delay if source.kind == "delayed" else 0) == cell.x
        if cell.x:
            wanted = OBJECTIVES[cell.variant]
            assert (policy.proximal, policy.importance) == (wanted["proximal"], wanted["importance"])
        assert cell.config.optimizer.policy_epochs == 3 and policy.objective == "clip"


def test_grid_has_the_default_in_its_corner() -> None:
    cells = {(cell.variant, cell.x): cell.config for cell in FIGURES["ewma-grid"].cells(PROCGEN)}
    assert cells["com-1", 1].policy.center_of_mass == 8 * 256 and cells["com-1", 1].policy.kl_coefficient == 1
    assert cells["com-64", 64].policy.center_of_mass == 32 and cells["com-64", 64].policy.kl_coefficient == 64
    assert {c.total_env_steps for c in cells.values()} == {20_000_000}


def test_grid_is_laid_out_as_in_the_paper() -> None:
    # default, then KL x 4; COM / 4, then both
    shown = paper_layout(np.array([[1.0, 2.0], [3.0, 4.0]]))
    # COM grows to the right and the coefficient upwards: the default is in the bottom right corner
    np.testing.assert_array_equal(shown, [[4, 2], [3, 1]])


def test_scaling_up_rules() -> None:
    config = PROCGEN.scaling_up["heist"]
    paper, fixed, none = (larger(config, 16, rule) for rule in ("paper", "fixed-minibatch", "none"))
    assert paper.env.num_envs == fixed.env.num_envs == none.env.num_envs == 16 * config.env.num_envs
    assert paper.optimizer.step_size == pytest.approx(4 * config.optimizer.step_size)
    assert fixed.optimizer.minibatches == 16 * config.optimizer.minibatches
    assert fixed.optimizer.step_size == none.optimizer.step_size == config.optimizer.step_size
    assert none == replace(config, env=paper.env)
    with pytest.raises(ConfigError, match="rule is 'best'"):
        larger(config, 2, "best")


def test_laptop_suite_has_ppg_with_its_phase_adjusted() -> None:
    cells = [c for c in FIGURES["invariance"].cells(LAPTOP) if c.config.aux.enabled and c.variant == "all"]
    phases = {c.config.aux.policy_iterations * c.config.iteration_batch for c in cells}
    assert len(cells) == len(LAPTOP.divisors) and len(phases) == 1
    assert [c.config.aux.policy_iterations / cells[0].config.aux.policy_iterations for c in cells] == [*LAPTOP.divisors]


def test_reported_seeds_are_far_from_those_of_the_search() -> None:
    for figure in FIGURES.values():
        seeds = LAPTOP.seeds_of(figure.name)
        assert min(seeds) >= 1000 and len(set(seeds)) == len(seeds)


def test_cut() -> None:
    small = cut(PROCGEN, Cut(games=("heist", "maze"), seeds=2, steps=1_000_000))
    assert tuple(small.invariance) == ("maze", "heist") and small.seeds_of("staleness") == (1000, 2000)
    assert small.grid == "maze" and small.betas == ("heist",)
    configs = [cell.config for figure in FIGURES.values() for cell in figure.cells(small)]
    assert {c.total_env_steps for c in configs} == {1_000_000}
    assert {c.env.id for c in configs} == {"procgen:heist-hard", "procgen:maze-hard"}
    for what, words in (
        (Cut(games=("pong",)), "games is 'pong'"),
        (Cut(seeds=0), "seeds is 0"),
        (Cut(steps=0), "steps"),
    ):
        with pytest.raises(ConfigError, match=words):
            cut(PROCGEN, what)
    with pytest.raises(ConfigError, match="figure is 'fig1'"):
        figures_of("fig1")


def test_means_between_edges_by_hand() -> None:
    # 2 episodes of mean 5 by step 10, then 2 more of mean 10 by step 20, none until step 30
    steps, episodes, returns = np.array([10.0, 20.0, 30.0]), np.array([2.0, 4.0, 4.0]), np.array([10.0, 30.0, 30.0])
    edges = np.array([0.0, 10.0, 20.0, 30.0])
    np.testing.assert_allclose(mean_between(edges, steps, episodes, returns), [5, 10, 10])
    # from 5 to 15: one episode of the first pair, one of the second: (5 + 10) / 2
    np.testing.assert_allclose(mean_between(np.array([5.0, 15.0]), steps, episodes, returns), [7.5])
    nothing = mean_between(edges, steps, np.zeros(3), np.zeros(3))
    assert np.isnan(nothing).all()


def test_means_of_a_line_by_hand() -> None:
    # 0 at 0, 10 at 10, level afterwards; a NaN in between is left out
    means = mean_of_line(np.array([0.0, 10.0, 20.0]), np.array([0.0, 5.0, 10.0]), np.array([0.0, math.nan, 10.0]))
    np.testing.assert_allclose(means, [5, 10])
    assert np.isnan(mean_of_line(np.array([0.0, 1.0]), np.array([0.0]), np.array([math.nan]))).all()


def test_filled() -> None:
    nan = math.nan
    np.testing.assert_array_equal(filled(np.array([nan, 1.0, nan, nan, 2.0, nan])), [1, 1, 1, 1, 2, 2])


def test_a_diverged_run_ends_where_it_ended_and_counts_as_zero() -> None:
    config = ppo_ewma("envpool:Catch-v0", total_env_steps=40)
    columns = {
        "env_steps": np.array([10.0, 20.0]),
        "episodes": np.array([1.0, 2.0]),
        "episode_return_sum": np.array([1.0, 1.5]),
    }
    values = curve_of(columns, config, "return", 4, diverged=True)
    np.testing.assert_allclose(values, [1.0, 0.5, math.nan, math.nan])
    assert np.isnan(curve_of({}, config, "return", 4, diverged=True)).all()
    suite = replace(LAPTOP, final_points=2)
    results = Results({("all", "catch", 1): Curve((1,), 40, values[None], (True,))})
    assert final(suite, results, "all", 1, ("catch",)) == 0.0


def test_unsmoothed_columns_are_rows_as_they_are() -> None:
    columns = {"env_steps": np.arange(1.0, 1001), "advantage_std": np.arange(1.0, 1001)}
    values = curve_of(columns, ppo_ewma(), "advantage_std", 4, diverged=False)
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
    np.testing.assert_array_equal(found["all", "catch", 1].steps, [25, 50])
    with pytest.raises(AnybatchError, match="no results of linear-step on catch at 4"):
        read_results(path)["linear-step", "catch", 4]
    with pytest.raises(AnybatchError, match="reproduce run y"):
        read_results(tmp_path / "y.csv.gz")
    path.write_bytes(b"no")
    with pytest.raises(AnybatchError, match="not a table"):
        read_results(path)


def made_up(**ends: list[float]) -> tuple[Suite, Results]:
    """Catch alone, its range 0 to 1, and constant curves that end as given, named variant_divisor."""
    suite = replace(LAPTOP, ranges={"catch": (0.0, 1.0)}, divisors=(1, 4), invariance={"catch": ppo_ewma()})
    curves: dict[Key, Curve] = {}
    for name, values in ends.items():
        variant, divisor = name.replace("no_ewma", "no-ewma").rsplit("_", 1)
        array = np.repeat(np.array(values)[:, None], 8, axis=1)
        curves[variant, "catch", int(divisor)] = Curve(tuple(range(len(values))), 10, array)
    return suite, Results(curves)


def test_effect_and_gap_by_hand() -> None:
    suite, results = made_up(all_1=[0.9, 1.0], all_4=[0.8, 0.8], no_ewma_1=[1.0, 1.0], no_ewma_4=[0.5, 0.3])
    # losses of the ablation .5 and .7, of all adjustments .1 and .2: all four pairs won, variance 4/12 * 5
    size, z, _ = effect(suite, results, "no-ewma", 4, ("catch",))
    assert size == pytest.approx(0.6 - 0.15) and z == pytest.approx(2 / math.sqrt(5 / 3))
    by_task, mean, (low, high) = gap(suite, results, "all", ("catch",))
    assert by_task == pytest.approx([0.15]) and mean == pytest.approx(0.15)
    # the large batch's mean is resampled between .9 and 1
    assert (low, high) == (pytest.approx(0.1), pytest.approx(0.2))


def test_an_ablation_without_runs_at_the_default_shares_those_of_all_adjustments() -> None:
    suite, results = made_up(all_1=[0.9, 1.0], all_4=[0.9, 1.0], **{"linear-step_4": [0.5, 0.5]})
    assert effect(suite, results, "linear-step", 4, ("catch",)).size == pytest.approx(0.45)


def test_square_root_scale_keeps_the_sign() -> None:
    np.testing.assert_allclose(signed_root(np.array([-0.25, 0.0, 0.04])), [-0.5, 0, 0.2])


def test_cost_is_the_papers() -> None:
    assert passes(ppo()) == (1, 3) and passes(ppo_ewma()) == (4, 3)
    assert passes(ppg()) == (2, 14) and passes(ppg_ewma()) == (3, 14)
    assert computed_increase(ppo_ewma(), ppo()) == pytest.approx(0.30)
    assert computed_increase(ppg_ewma(), ppg()) == pytest.approx(1 / 44)


def test_estimate_by_hand() -> None:
    # 19 * 16 * 4 runs of PPO with pi_recent as proximal policy: 10 passes each, as for PPO
    total = estimate(PROCGEN, [FIGURES["staleness"]], 1000.0)
    assert total.runs == 1216 and total.env_steps == 1216 * 10**8
    assert total.gpu_hours == pytest.approx(1216 * 10**8 / 1000 / 3600)
    assert relative_cost(ppg()) == pytest.approx(4.4) and relative_cost(ppo_ewma()) == pytest.approx(1.3)
    assert total.phase_gb == 0
    # a phase: 32 * 256 * 256 observations of 64 * 64 * 3 bytes
    assert estimate(PROCGEN, [FIGURES["head-to-head"]], 1.0).phase_gb == pytest.approx(32 * 65536 * 12288 / 1e9)
    long, short = ppo(), ppo(num_envs=1)
    # 256 times the rows of the log: 100M / 256 instead of 100M / 65536
    assert (kept_bytes(short) - kept_bytes(long)) / (390625 - 1526) == pytest.approx(
        kept_bytes(short) / 407_812, rel=0.2
    )


def test_no_path_of_the_machine_is_noted() -> None:
    assert without_out(["run", "all", "--out", "/somewhere/else"]) == ["run", "all", "--out", "DIR"]
    assert without_out(["run", "--out=/x"]) == ["run", "--out=DIR"]
    assert without_out(["run", "--out", "results/laptop"]) == ["run", "--out", "results/laptop"]


def test_markdown_of_summaries_as_html() -> None:
    text = "A **bold** & `code` word.\n\n| a   |  $N_\\pi$ |\n| --- | ---: |\n| x<y | **1** (2) |"
    shown = markdown_to_html(text)
    assert "<p>A <b>bold</b> &amp; <code>code</code> word.</p>" in shown
    assert "<th><i>N<sub>π</sub></i></th>" in shown and "<td>x&lt;y</td><td><b>1</b> (2)</td>" in shown
    assert "---" not in shown
