"""The arithmetic of the speed benchmarks, and one run of them from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import bench
from anybatch.config.io import override
from anybatch.presets import PRESETS
from bench import add_ratios, fit
from bench_docs import networks, speed
from bench_launch import Measurement, together
from bench_limits import Passes, PlainImpala, Rates, best, measure, passes
from bench_run import Spec, Stopwatch, configuration
from micro.compare import ratios, slower

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("preset", "forward", "both"),
    [  # the counts of section 5.3; PPG's forward ones with one more for pi_old, which the paper leaves out
        ("ppo", 1, 3),
        ("ppo-ewma", 4, 3),
        ("ppg", 3, 14),
        ("ppg-ewma", 4, 14),
    ],
)
def test_passes_of_the_presets(preset: str, forward: int, both: int) -> None:
    assert passes(PRESETS[preset]("synthetic_env:procgen_like")) == Passes(forward, both)


def test_passes_where_policy_and_value_have_their_own_epochs() -> None:
    config = override(PRESETS["ppo-ewma"]("synthetic_env:procgen_like"), {"policy_epochs": 1, "value_epochs": 9})
    # a shared network: sampling 1 + proximal policy in 1 epoch; 1 + 9 epochs, one after the other
    assert passes(config) == Passes(2, 10)


def test_limit() -> None:
    # 1/1000 + 3/500 s = 7 ms for a step
    assert Passes(1, 3).limit(1000.0, 500.0) == pytest.approx(1000 / 7)


def test_limit_by_memory() -> None:
    # PPO moves 1.72 MB * (1 + 3 * 3) = 17.2 MB for a step
    assert Passes(1, 3).memory_limit(3.35e12) == pytest.approx(3.35e12 / 17.24416e6)


def test_the_best_forward_and_backward_rates_may_come_from_different_networks() -> None:
    assert best([Rates(10, 2, 64, 64), Rates(8, 3, 64, 512)]) == Rates(10, 3, 64, 512)


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_rates_count_samples_and_take_the_best_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def network(x: torch.Tensor) -> torch.Tensor:
        clock.sleep(0.002 if len(x) == 1 else 0.004)  # 500 a second at 1, 2,000 at 8
        return x.requires_grad_()

    rates = measure(network, lambda batch: torch.ones(batch), [1, 8], seconds=0.02)
    assert (rates.forward_batch, rates.both_batch) == (8, 8)
    assert (rates.forward, rates.both) == pytest.approx((2000, 2000))


def test_plain_network_has_the_impala_network_s_parameters() -> None:
    config = PRESETS["ppo"]("synthetic_env:procgen_like", num_envs=1)
    from anybatch.runs.build import build

    policy = build(config, seed=0).learner.agent.policy
    count = sum(x.numel() for x in PlainImpala().parameters())
    assert count == sum(x.numel() for x in policy.parameters())


def test_stopwatch_counts_what_is_inside_of_something_else_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    class Work:
        def outer(self) -> None:
            clock.sleep(2.0)
            self.inner()
            clock.sleep(1.0)

        def inner(self) -> None:
            clock.sleep(5.0)

    watch, work = Stopwatch(), Work()
    watch.wrap(work, "outer", "outside")
    watch.wrap(work, "inner", "inside")
    work.outer()
    clock.sleep(4.0)
    watch.switch()
    assert watch.seconds == {"other": 4.0, "outside": 3.0, "inside": 5.0}


def test_sizes_fit_into_the_time_and_keep_pairs_together() -> None:
    cost = {"ppo": 0.01, "ppo-ewma": 0.0125, "ppg": 0.05, "ppg-ewma": 0.05}
    # at 64: 64 * 256 * 0.1225 s = 2007 s; PPG at 32: 1188 s; at 16: 778 s
    assert fit(cost, 256, 1.0, 2100) == dict.fromkeys(cost, 64)
    assert fit(cost, 256, 1.0, 800) == {"ppo": 64, "ppo-ewma": 64, "ppg": 16, "ppg-ewma": 16}
    assert fit(cost, 256, 1.0, 0.0) == dict.fromkeys(cost, 4)


def test_ewma_ratios() -> None:
    # f = 1000 and b = 500 allow PPO 1000/7 steps/s, and PPO-EWMA, with 3 more forward passes, 1000/10. The machine
    # was half as fast when the second was measured: its own limit was 50, of which it reached 0.8.
    ppo, ewma = (
        {"mode": "core", "algorithm": name, "rate": rate, "fraction": fraction, "passes": count}
        for name, rate, fraction, count in (("ppo", 100.0, 0.7, [1, 3]), ("ppo-ewma", 40.0, 0.8, [4, 3]))
    )
    ppo |= {"networks": {"anybatch": {"forward": 1000.0, "both": 500.0}}, "processor_seconds_per_step": 0.01}
    ewma |= {"networks": {"anybatch": {"forward": 500.0, "both": 250.0}}, "processor_seconds_per_step": 0.0125}
    add_ratios([ppo, ewma])
    assert "ewma_ratio" not in ppo
    assert ewma["ewma_ratio"] == pytest.approx(100 / 40)
    assert ewma["ewma_ratio_processor"] == pytest.approx(1.25)
    assert ewma["ewma_ratio_adjusted"] == pytest.approx(0.7 / 0.8 * 10 / 7)


def test_ranks_are_counted_together() -> None:
    rank = {
        "spec": {},
        "env_steps": 100,  # of all ranks
        "seconds": 2.0,
        "processor_seconds": 1.5,
        "first_seconds": 1.0,
        "peak_mib": 300,
        "peak_gpu_mib": 200,
        "where": {"optimisation": 0.5, "other": 0.5},
        "networks": [{"anybatch": {"forward": 10.0, "both": 4.0}}] * 2,
        "bandwidth": None,
    }
    both = together([rank, {**rank, "seconds": 2.5, "first_seconds": 3.0, "where": {"other": 1.0}}])
    assert (both.rate, both.processor_seconds, both.peak_mib) == (40.0, 3.0, 600)
    assert (both.first_seconds, both.peak_gpu_mib) == (3.0, 400)
    assert both.where == {"optimisation": 0.25, "other": 0.75}
    assert both.rates() == {"anybatch": {"forward": 20.0, "both": 8.0}}


def test_micro_benchmarks_are_compared_in_units_of_their_reference() -> None:
    def one(name: str, seconds: float, group: str | None, reference: str) -> dict[str, object]:
        return {"name": name, "group": group, "stats": {"min": seconds}, "extra_info": {"reference": reference}}

    measured = {
        "benchmarks": [
            one("test_calls", 0.5, "references", "calls"),
            one("test_gae[1]", 2.0, None, "calls"),
            one("test_ewma", 0.25, None, "calls"),
        ]
    }
    found = ratios(measured)
    assert found == {"test_gae[1]": 4.0, "test_ewma": 0.5}
    assert slower(found, {"test_gae[1]": 2.0, "test_ewma": 0.5, "gone": 1.0}, tolerance=1.5) == ["test_gae[1]"]


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])  # the second takes the way of a GPU: an extra iteration is watched
def test_one_measurement_with_an_auxiliary_phase(device: str) -> None:
    spec = {
        "algorithm": "ppg-ewma",
        "env": "synthetic_env:cartpole_like",
        "num_envs": 4,
        "steps": 16,
        "aux_batch": 16,
        "warm_up": 1,
        "rate_batches": [],
        "device": device,
    }
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_run.py"), json.dumps(spec)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    result = json.loads(output.splitlines()[-1])
    assert result["env_steps"] == 64  # the second iteration alone
    assert result["seconds"] > 0 and result["peak_mib"] > 50
    where = result["where"]
    assert sum(where.values()) == pytest.approx(1.0, abs=1e-3)
    # 6 epochs of 4 auxiliary minibatches beside 8 gradient steps of the policy phase
    assert all(where[label] > 0 for label in ("auxiliary", "optimisation", "proximal", "inference"))


def test_tables_go_between_their_markers_of_the_page() -> None:
    row = {
        "mode": "core",
        "algorithm": "ppo",
        "num_envs": 16,
        "rate": 1234.5,
        "limit": 1300.0,
        "fraction": 0.9496,
        "peak_mib": 900,
        "where": {"optimisation": 0.9, "proximal": 0.0, "other": 0.1},
        "networks": {"anybatch": {"forward": 3000.0, "both": 1000.0}},
    }
    facts = {
        "time": "2030-01-02T03:04:05Z",
        "cpu": "a CPU",
        "cores": 2,
        "cpu_flags": [],
        "torch": "9",
        "load_average": 0,
    }
    record = {"machine": facts, "settings": {"device": "cpu"}, "rows": [row]}
    table = speed(record)
    assert "| one core | ppo | 16 | 1,234 / 1,300 | 0.95 |  | 900 | optimisation 90%, other 10% |" in table
    assert "| anybatch | one core | 3,000 | 1,000 |" in networks(record)


def fake_measurement(spec: Spec) -> Measurement:
    """A machine of 1,000 forward and 400 forward-and-backward passes a second, of which training reaches half."""
    work = passes(configuration(spec, 1, spec.steps))
    rates = {"anybatch": {"forward": 1000.0, "both": 400.0}}
    if spec.plain:
        rates["plain"] = {"forward": 500.0, "both": 800.0}
    env_steps = spec.num_envs * spec.steps
    seconds = env_steps / (0.5 * work.limit(1000.0, 400.0))
    return Measurement(asdict(spec), env_steps, seconds, seconds, 700, {"optimisation": 1.0}, [rates, rates], None)


def test_the_whole_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "measure_all", fake_measurement)
    monkeypatch.setattr(bench, "cores", lambda: [0, 1])
    out = tmp_path / "deep" / "bench.jsonl"
    monkeypatch.setattr(sys, "argv", ["bench.py", "--env", "synthetic_env:procgen_like", "--out", str(out)])
    bench.main()
    printed = capsys.readouterr().out
    (record,) = [json.loads(line) for line in out.read_text().splitlines()]
    rows = record["rows"]
    assert [row["mode"] for row in rows] == [mode for mode in ("core", "threads", "ranks") for _ in range(4)]
    ppo, ppo_ewma, ppg, ppg_ewma = rows[:4]
    # limit with the plain network's faster passes: 1/1000 + 3/800 s = 4.75 ms; reached: 2 (1/1000 + 3/400) s = 17 ms
    assert (ppo["limit"], ppo["rate"]) == pytest.approx((1000 / 4.75, 1000 / 17))
    assert ppo["fraction"] == pytest.approx(4.75 / 17)
    # (4/1000 + 3/400) / (1/1000 + 3/400), and (4/1000 + 14/400) / (3/1000 + 14/400)
    assert (ppo_ewma["ewma_ratio"], ppg_ewma["ewma_ratio"]) == pytest.approx((11.5 / 8.5, 39 / 38))
    # A PPO and a PPO-EWMA step take 8.5 and 11.5 ms, PPG's 38 + 7 and 39 + 8, the second for the first iteration. With
    # 1 + 0.6 + 0.6 modes at 0.9 of the limit: 0.626 s * (20 n + 92 m) for n and m environments; there are 540 - 176 s.
    assert (ppo["num_envs"], ppg["num_envs"]) == (8, 4)
    assert "SYNTHETIC" in printed and "not ppo (core) 0.279" in printed and "ppo-ewma (core) 1.353" in printed
    assert "ppg-ewma (core) 1.0" not in printed.splitlines()[-2]
