"""The page of gpu_round.py: Markdown from its records."""

from __future__ import annotations

from typing import Any

from bench_limits import passes
from bench_run import Spec, configuration


def page(records: dict[str, Any], settings: dict[str, Any]) -> str:
    """All results so far, and what is missing and why."""
    facts = records.get("machine", {}).get("result", {})
    device = facts.get("gpu", facts.get("cpu", "unknown machine"))
    lines = [f"# One round on {device}", ""]
    if settings["dry_run"]:
        lines += ["A dry run: tiny sizes on the CPU, and nothing is compiled. The numbers mean nothing.", ""]
    lines += [", ".join(f"{name} {value}" for name, value in facts.items()), ""]
    sections = [_training(records), _phase(records), _tests(records), _kernels(records), _missing(records)]
    return "\n".join([*lines, "\n\n".join(section for section in sections if section)]) + "\n"


def _results(records: dict[str, Any]) -> dict[str, Any]:
    return {name: one["result"] for name, one in records.items() if one["status"] == "done"}


def _training(records: dict[str, Any]) -> str:
    measured = {name: x for name, x in _results(records).items() if "rate" in x}
    if not measured:
        return ""
    lines = [
        "## Training",
        "",
        "*Fraction*: of the limit by the passes of the network alone. *Compile*: times the rate without. *First*: "
        "seconds by which the first iteration took longer than the others.",
        "",
        "| | environments | steps/s | fraction | compile | first | GPU MiB | MiB | where the time goes |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name, x in measured.items():
        without = measured.get(name.removesuffix(", compile"), x)
        gain = f"{x['rate'] / without['rate']:.2f}" if without is not x else ""
        where = ", ".join(f"{label} {share:.0%}" for label, share in x["where"].items() if share >= 0.005)
        cells = [f"{x['rate']:,.0f}", _fraction(x, measured), gain, f"{x['first_seconds']:.0f}"]
        memory = [f"{x['peak_gpu_mib']:,.0f}", f"{x['peak_mib']:,.0f}"]
        lines.append(f"| {name} | {x['spec']['num_envs']} | {' | '.join([*cells, *memory])} | {where} |")
    networks = measured.get("ppo", {}).get("networks")
    if networks and networks[0]:
        lines += ["", "| network alone | forward/s | forward and backward/s |", "|---|---:|---:|"]
        for name, x in networks[0].items():
            lines.append(f"| {name} | {x['forward']:,.0f} | {x['both']:,.0f} |")
    return "\n".join(lines)


def _fraction(result: dict[str, Any], measured: dict[str, Any]) -> str:
    """Of the limit by the fastest network that was measured, before or after; only where it is the same network."""
    networks = measured.get("ppo", {}).get("networks")
    if not networks or not networks[0] or result["spec"]["env"] != measured["ppo"]["spec"]["env"]:
        return ""
    spec = Spec(**result["spec"])
    forward, both = (max(x[kind] for when in networks for x in when.values()) for kind in ("forward", "both"))
    limit = passes(configuration(spec, 1, spec.steps)).limit(forward, both)
    return f"{result['rate'] / (spec.ranks * limit):.2f}"


def _phase(records: dict[str, Any]) -> str:
    phases = [x for x in _results(records).values() if "auxiliary_samples_per_second" in x]
    return "\n".join(
        f"## A whole phase of PPG-EWMA\n\n{x['num_envs']} environments, {x['steps']} steps, {x['iterations']} "
        f"iterations, {x['env_steps']:,} environment steps: {x['seconds']:.0f} s in all, of which sampling "
        f"{x['spent']['sampling']:.1f} s, policy phase {x['spent']['policy_phase']:.1f} s (together "
        f"{x['policy_steps_per_second']:,.0f} steps/s), auxiliary phase {x['spent']['auxiliary_phase']:.1f} s "
        f"({x['auxiliary_samples_per_second']:,.0f} samples/s through both networks). Memory of the GPU "
        f"{x['peak_gpu_mib']:,.0f} MiB."
        for x in phases
    )


def _tests(records: dict[str, Any]) -> str:
    found = [x for x in _results(records).values() if "failures" in x]
    return "\n".join(
        f"## tests/gpu\n\n{x['passed']} passed, {x['failed']} failed, {x['skipped']} skipped."
        + "".join(f"\n- {name}: {reason}" for name, reason in x["failures"].items())
        for x in found
    )


def _kernels(records: dict[str, Any]) -> str:
    lines = ["## Operations of a policy phase of PPO", "", "| | share | calls |", "|---|---:|---:|"]
    for name, share, calls in records.get("kernels", {}).get("result", {}).get("kernels", []):
        lines.append(f"| `{name.replace('|', ' ')}` | {share:.1%} | {calls:,} |")
    return "\n".join(lines) if len(lines) > 4 else ""


def _missing(records: dict[str, Any]) -> str:
    missing = [f"- {name}: {x['reason']}" for name, x in records.items() if x["status"] != "done"]
    return "\n".join(["## Not measured", "", *missing]) if missing else ""
