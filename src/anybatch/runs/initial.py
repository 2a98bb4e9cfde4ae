"""The state of one run as the start of another, which may have another batch.

Taken over is what was learned: the weights, the statistics that the networks' inputs and targets are normalised with,
the moments of the advantages, Adam's averages of the gradients, and the average of the weights that is the proximal
policy. Counters, schedules, random numbers, episodes and the data of a policy phase start anew.

A gradient step of c times fewer samples has a gradient with c times the variance, so Adam's second moments are
multiplied by c. Its first moments, which average some ten gradients, start at 0 if the batch is another. If its betas
are others, the moments without their bias stay, and a step counts as c steps. The proximal policy's average continues:
it has the age in environment steps that the scaling rules keep.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from anybatch.config.schema import TrainConfig
from anybatch.distributed.collectives import on_main
from anybatch.distributed.state import State
from anybatch.errors import CheckpointError
from anybatch.models.agent import Agent
from anybatch.optimizers import keep_moments
from anybatch.proximal import EwmaProximal, ProximalPolicy
from anybatch.runs import checkpoint
from anybatch.runs.build import Components
from anybatch.runs.edited import other_distributions
from anybatch.runs.folder import content_of_run, read_config
from anybatch.runs.saved_spaces import difference, restore_spaces


def start_from(folder: Path, components: Components) -> list[str]:
    """Load what a run has learned into the freshly built components of another.

    Args:
        folder: the run folder that the state comes from.
        components: changed in place.

    Returns:
        Sentences about what was taken over, and what was not.

    Raises:
        CheckpointError: it is not a run folder, has no intact checkpoint, or is of other spaces or networks.
    """
    source, content, passed_over = on_main(lambda: _read(folder))
    with checkpoint.must_fit(folder):
        taken_over = _take_over(folder, source, content, components)
    return [*(f"{sentence}; started from the previous checkpoint" for sentence in passed_over), *taken_over]


def _take_over(folder: Path, source: TrainConfig, content: State, components: Components) -> list[str]:
    state, config, learner = content["state"], components.learner.config, components.learner
    _check_spaces(state, components, folder)
    _load_networks(state["agent"], learner.agent, folder)
    samples = source.optimization_batch / config.optimization_batch
    steps = samples * config.optimizer.policy_epochs / source.optimizer.policy_epochs
    taken_over = {"weights": True}
    if learner.agent.observation_normalizer is not None:
        taken_over["statistics of observations"] = True
    taken_over |= _load_statistics(state, components, source)
    taken_over |= _load_proximal(state.get("proximal", {}), learner.proximal, steps)
    averages = _load_optimizers(state, components, source, samples)
    taken_over["the optimiser's averages"] = averages
    if config.optimizer.kl_target is not None:
        both = source.optimizer.kl_target is not None
        found = learner.optimizers.take_factors(state["optimizers"] if both else {})
        taken_over["the factor of the KL-adaptive step size"] = found
    taken_over |= dict.fromkeys(("counters", "schedules", "random numbers", "episodes"), False)
    taken, anew = (", ".join(name for name, x in taken_over.items() if x == kind) for kind in (True, False))
    sentences = [
        f"started from {str(folder)!r} at {content['run']['env_steps']:,} environment steps; copied: {taken}; "
        f"reset: {anew}"
    ]
    sentences += other_distributions(source, config)
    if averages and not math.isclose(samples, 1):
        second = f"second moments are multiplied by {samples:.6g}, as the variance of a gradient is, and its "
        sentences.append(
            f"a gradient step has {config.optimization_batch:,g} samples instead of {source.optimization_batch:,g}: "
            f"the optimiser's {second if config.optimizer.kind == 'adam' else ''}first moments start at 0"
        )
    return sentences


def _read(folder: Path) -> tuple[TrainConfig, dict[str, Any], list[str]]:
    config, _ = read_config(folder)
    return config, *content_of_run(folder)


def _check_spaces(state: State, components: Components, folder: Path) -> None:
    if "spaces" in state:
        env_id = components.learner.config.env.id
        if sentence := difference(restore_spaces(state["spaces"]), components.env.native_spaces, env_id):
            raise CheckpointError(f"{str(folder)!r} cannot be used as the start: {sentence}")


def _load_networks(saved: State, agent: Agent, folder: Path) -> None:
    present = agent.state_dict()
    shapes = [{name: tuple(x.shape) for name, x in weights.items()} for weights in (saved, present)]
    if shapes[0] != shapes[1]:
        names = [name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name)]
        there, here = (group.get(names[0], "missing") for group in shapes)
        raise CheckpointError(
            f"{str(folder)!r} cannot be used as the start, because its networks differ: {names[0]} is {there} there "
            f"and {here} here; model, observation.normalize and aux.enabled must be those of its config.yaml"
        )
    agent.load_state_dict(saved)


def _load_statistics(state: State, components: Components, source: TrainConfig) -> dict[str, bool]:
    """Load the moments of rewards and advantages; returns whether each that there is now was found."""
    taken_over = {}
    for name, words in (("reward_normalizer", "rewards"), ("advantage_normalizer", "advantages")):
        part, saved = getattr(components, name), state.get(name)
        if part is None:
            continue
        if (
            name == "reward_normalizer"
            and source.reward.return_discount != components.learner.config.reward.return_discount
        ):
            saved = None  # the variance of another return
        taken_over[f"statistics of {words}"] = saved is not None
        if saved is not None:  # but not the returns of the episodes that ran
            returns = {key: x for key, x in part.state_dict().items() if key == "return"}
            part.load_state_dict({**saved, **returns})
    return taken_over


def _load_proximal(saved: State, proximal: ProximalPolicy, steps: float) -> dict[str, bool]:
    """Load the average, in which ``steps`` gradient steps now count as one before; returns whether it was found."""
    proximal.reset()
    if not isinstance(proximal, EwmaProximal):
        return {}
    if "terms" in saved:
        proximal.load_state_dict({**saved, "terms": max(1, round(saved["terms"] * steps))})
    return {"the proximal policy's average": "terms" in saved}


def _load_optimizers(state: State, components: Components, source: TrainConfig, samples: float) -> bool:
    """Load the optimisers' averages, if they are of the same kind; returns whether they are."""
    config, optimizers, saved = components.learner.config, components.learner.optimizers, state["optimizers"]
    if source.optimizer.kind != config.optimizer.kind or not optimizers.optimizers.keys() <= saved.keys():
        return False
    for name, optimizer in optimizers.optimizers.items():
        _load_optimizer(optimizer, _at_batch(saved[name], samples), samples)
    if components.auxiliary is not None and "auxiliary" in state:
        c = _auxiliary_batch(source) / _auxiliary_batch(config)
        _load_optimizer(components.auxiliary.optimizer, _at_batch(state["auxiliary"]["optimizer"], c), c)
    return True


def _at_batch(saved: State, c: float) -> State:
    """The state of an optimiser for gradient steps of c times fewer samples."""
    if math.isclose(c, 1):
        return saved

    def scaled(name: str, value: Any) -> Any:
        if name == "exp_avg_sq":
            return value * c
        return torch.zeros_like(value) if name in ("exp_avg", "momentum_buffer") and value is not None else value

    states = {key: {name: scaled(name, x) for name, x in one.items()} for key, one in saved["state"].items()}
    return {**saved, "state": states}


def _load_optimizer(optimizer: Optimizer, saved: State, c: float) -> None:
    """Load averages, but keep the step size and the other numbers of the configuration; a step now counts as ``c``."""
    numbers = [{key: x for key, x in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, values in zip(optimizer.param_groups, numbers, strict=True):
        before = group.get("betas")
        group |= values
        keep_moments(optimizer, group, before, c)


def _auxiliary_batch(config: TrainConfig) -> float:
    return config.iteration_batch * config.aux.policy_iterations / config.aux.minibatches_per_epoch
