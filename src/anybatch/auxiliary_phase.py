"""The auxiliary phase of Phasic Policy Gradient: distil the value function into the policy's network.

After every N_pi iterations the policy is frozen as ``pi_old`` and E_aux epochs over all data of the phase minimise
:func:`anybatch.objectives.auxiliary_loss`. The value targets are those of the phase's own iterations; later data is
sampled, and given targets, by the new networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from anybatch.config.chunks import auxiliary_time_chunks
from anybatch.config.schema import OptimizerConfig
from anybatch.distributed.collectives import (
    all_gather,
    any_worker,
    check_interrupt_if_single_worker,
    mean_gradients_,
    mean_over_workers,
)
from anybatch.distributed.state import Slot, State, of_rank
from anybatch.errors import DivergenceError
from anybatch.gradients import AddGradients, Losses
from anybatch.minibatches import Batch, Generators, RunGenerators, deal, equal_cuts
from anybatch.objectives import auxiliary_loss
from anybatch.observations import map_observation
from anybatch.optimizers import StepSizes, drop_gradients, make_optimizer
from anybatch.phase_storage.prefetch import read_ahead
from anybatch.phase_storage.store import AuxiliaryMinibatch, SegmentStore
from anybatch.policy_phase import Learner, finite_weights

_COLUMNS = ("aux_value_loss", "aux_auxiliary_value_loss", "aux_clone_kl")


class AuxiliaryPhase:
    """Collects the data of a policy phase, then trains on it.

    Its optimiser is a second Adam, over all parameters, which lives as long as the run; its step size follows the run's
    schedule, which depends on the environment steps alone.
    """

    def __init__(
        self,
        learner: Learner,
        store: SegmentStore,
        shuffle: Generators,
        make: Callable[[list[Parameter], OptimizerConfig], Optimizer] = make_optimizer,
    ) -> None:
        """Start with an empty phase.

        Args:
            learner: networks and optimisers of the policy phase; its agent needs an auxiliary value head.
            store: keeps the phase's data.
            shuffle: CPU generator of the minibatch order, used for nothing else; one for each of R stacked runs.
            make: builds the optimiser; replaced where stacked runs have different step sizes.

        Raises:
            ConfigError: the data cannot be divided equally among the minibatches.
        """
        config = learner.config
        self._config = config.aux
        self._learner = learner
        self.store = store
        self._shuffle = shuffle
        self._parameters = list(learner.agent.parameters())
        adam = OptimizerConfig(step_size=config.aux.step_size, schedule=config.optimizer.schedule)
        self.optimizer = make(self._parameters, adam)
        self._step_sizes = StepSizes(self.optimizer, adam)
        layout = store.layout
        self._chunks = auxiliary_time_chunks(
            layout.segments, layout.num_envs, layout.steps, config.aux.minibatches_per_epoch
        )
        self._worker_weight = layout.num_envs / learner.config.env.num_envs  # this worker's fraction of a minibatch
        self._steps = 0  # gradient steps done in this auxiliary phase
        self._has_old_params = False
        self._epoch_start: Tensor | None = None  # the generator before the order of the running epoch was drawn
        runs = (len(shuffle),) if isinstance(shuffle, RunGenerators) else ()
        self._sums = torch.zeros(len(_COLUMNS), *runs, dtype=torch.float64)
        self._finished: dict[str, Any] = {}
        self._total_steps = 0

    @property
    def due(self) -> bool:
        """Whether the policy phase is complete, so that :meth:`gradient_steps` trains."""
        return self.store.full

    @property
    def steps(self) -> int:
        """Gradient steps of an auxiliary phase."""
        return self._config.epochs * self._config.minibatches_per_epoch

    @property
    def steps_done(self) -> int:
        """Number of them done in this phase."""
        return self._steps

    def after_iteration(self, batch: Batch) -> None:
        """Keep an iteration's observations and value targets; called after every policy phase iteration.

        Args:
            batch: (N, T, ...) data.
        """
        self.store.append(batch.observation, batch.value_target)

    def gradient_steps(self, progress: float) -> Iterator[None]:
        """Run the auxiliary phase, if it is due.

        It yields after every gradient step. The state is complete then, and after :meth:`load_state_dict` the phase
        continues from there.

        Args:
            progress: fraction of the run's environment steps that is done, 0 to 1.

        Raises:
            DivergenceError: the loss is not finite, in every run.
        """
        if not self.due:
            return
        self._step_sizes.set_progress(progress)
        if not self._has_old_params:
            self._compute_old_params()
            any_worker(False)  # waits: workers take different times, and NCCL has little patience
        drop_gradients(self._parameters)  # nothing of the policy phase may enter the first step
        add_gradients = self._learner.gradients(_losses, self._parameters)
        per_epoch = self._config.minibatches_per_epoch
        while self._steps < self.steps:
            self._epoch_start = self._shuffle.get_state()
            chunks = self.store.layout.segments * self.store.layout.num_envs * self._chunks
            order = deal(chunks, per_epoch, self._shuffle)
            for minibatch in self._minibatches(order[self._steps % per_epoch :]):
                self._gradient_step(minibatch, add_gradients)
                self._steps += 1
                yield
        self._end()

    def statistics(self) -> dict[str, Any]:
        """Columns for the log, by name: floats, or lists of R floats.

        Averages over the auxiliary phase that has ended since the last call, NaN if none has; and the number of
        auxiliary gradient steps of the whole run.
        """
        finished, self._finished = self._finished, {}
        return {**dict.fromkeys(_COLUMNS, math.nan), **finished, "aux_gradient_steps": self._total_steps}

    def _compute_old_params(self) -> None:
        """Evaluate the policy as it is before the first auxiliary step, for every sample."""
        learner = self._learner
        with torch.no_grad():
            for samples in equal_cuts(self.store.samples, learner.micro_batch):
                check_interrupt_if_single_worker(learner.interrupts)
                observation = map_observation(self._to_device, self.store.observation(samples))
                self.store.write_old_params(samples.start, learner.agent.policy(observation))
        self._has_old_params = True

    def _minibatches(self, order: Sequence[Tensor]) -> Iterator[AuxiliaryMinibatch]:
        length = self.store.layout.steps // self._chunks
        if self._device.type != "cuda":  # where reading would take the cores, and memory, that computing needs
            return (self.store.minibatch(chunks, length) for chunks in order)
        return read_ahead(lambda chunks: self.store.minibatch(chunks, length).pin_memory(), order)

    def _gradient_step(self, minibatch: AuxiliaryMinibatch, add_gradients: AddGradients[AuxiliaryMinibatch]) -> None:
        for part in minibatch.micro_batches(self._learner.micro_batch):  # bounds memory; the gradients add up
            check_interrupt_if_single_worker(self._learner.interrupts)
            weight = len(part) / len(minibatch)
            terms = add_gradients(part.to(self._device), weight, None).terms["of_columns"]
            if not bool(torch.isfinite(terms).all(0).any()):
                raise DivergenceError("the loss of the auxiliary phase is not finite; lower aux.step_size")
            self._sums += terms.double().cpu() * weight
        mean_gradients_(self._parameters, self._worker_weight, self._learner.interrupts)
        self.optimizer.step()
        drop_gradients(self._parameters)  # and nothing of this step may enter the next, or the policy phase
        self._total_steps += 1

    def _check_weights(self) -> None:
        """The last step can break weights although every loss, computed before its step, was finite."""
        agent = self._learner.agent
        if not bool(finite_weights(agent, run_axis=isinstance(self._shuffle, RunGenerators)).any()):
            raise DivergenceError("weights are not finite after a step of the auxiliary phase; lower aux.step_size")

    def _end(self) -> None:
        self._check_weights()
        averages = dict(zip(_COLUMNS, (self._sums / self._steps).tolist(), strict=True))
        self._finished = mean_over_workers(averages, self._worker_weight)
        self._begin_policy_phase()

    def _begin_policy_phase(self) -> None:
        """Empty the store, and re-initialise the proximal policy, for theta has moved far (appendix A)."""
        self._learner.proximal.reset()
        self.store.clear()
        self._steps, self._has_old_params, self._epoch_start = 0, False, None
        self._sums = torch.zeros_like(self._sums)

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)

    worker_keys: frozenset[str] = frozenset(
        {"shuffle", "steps", "has_old_params", "sums", "finished", "total_steps", "segments"}
    )

    def state_dict(self) -> State:
        """State of the phase; its optimiser is the same on all workers."""
        if self._steps:  # no checkpoint of weights that cannot be trained on
            self._check_weights()
        # in the middle of an epoch, its order is drawn again and what is done of it left out
        in_epoch = self._epoch_start is not None and self._steps % self._config.minibatches_per_epoch
        return {
            "optimizer": self.optimizer.state_dict(),
            "shuffle": self._epoch_start if in_epoch else self._shuffle.get_state(),
            "steps": self._steps,
            "has_old_params": self._has_old_params,
            "sums": self._sums.clone(),
            "finished": dict(self._finished),
            "total_steps": self._total_steps,
            "segments": self.store.state_dict(old_params=self._has_old_params),
        }

    def load_state_dict(self, state: State) -> list[str]:
        """Restore :meth:`state_dict`, after the proximal policy.

        Returns:
            A sentence if the phase's data is no longer there: a new policy phase begins instead.
        """
        self.optimizer.load_state_dict(state["optimizer"])
        self._shuffle.set_state(state["shuffle"])
        self._steps, self._has_old_params = state["steps"], state["has_old_params"]
        self._sums, self._finished = state["sums"].clone(), dict(state["finished"])
        self._total_steps = state["total_steps"]
        kept = self.store.load_state_dict(state["segments"])
        # a checkpoint has a full store exactly if steps were done, unless aux.policy_iterations was edited
        kept = kept and self.store.full == (self._steps > 0)
        if all(all_gather(kept)):  # a phase is of all workers or of none
            return []
        self.store.clear()
        if self._steps:
            self._begin_policy_phase()
        self._has_old_params = False
        return ["the data of the unfinished policy phase is not available, so a new policy phase begins"]

    def merge(self, workers: Sequence[State]) -> State:
        """State over the environments of all workers."""
        shuffles, segments = ([worker[name] for worker in workers] for name in ("shuffle", "segments"))
        shares = torch.tensor([one["layout"]["num_envs"] if "layout" in one else 1.0 for one in segments])
        sums = torch.einsum("w,w...->...", shares.double() / shares.sum(), torch.stack([x["sums"] for x in workers]))
        return {**workers[0], "sums": sums, "shuffle": shuffles, "segments": self.store.merge(segments)}

    def split(self, merged: State, slot: Slot) -> State:
        """State of one worker."""
        shuffle = of_rank(merged["shuffle"], slot.rank, self._shuffle.get_state())
        return {**merged, "shuffle": shuffle, "segments": self.store.split(merged["segments"], slot)}


def _losses(minibatch: AuxiliaryMinibatch, learner: Learner) -> Losses:
    """The joint loss, and its terms in the order of the columns, (3,), or (3, R) for R runs."""
    params, value, auxiliary_value = learner.agent.all_heads(minibatch.observation)
    distribution = learner.action_spec.distribution
    kl = distribution(minibatch.old_params).kl(distribution(params))
    target, clone_coefficient = minibatch.value_target, learner.config.aux.clone_coefficient
    loss = auxiliary_loss(value, auxiliary_value, target, kl, clone_coefficient=clone_coefficient)
    with torch.no_grad():
        errors = [0.5 * (x - target).square().mean(-1) for x in (value, auxiliary_value)]
        return loss, {"of_columns": torch.stack([*errors, kl.mean(-1)])}, []
