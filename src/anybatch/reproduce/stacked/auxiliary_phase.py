"""PPG's auxiliary phase for those of R stacked runs that have it at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from anybatch.config.chunks import auxiliary_time_chunks
from anybatch.config.schema import AuxiliaryConfig, OptimizerConfig, TrainConfig
from anybatch.objectives import auxiliary_loss
from anybatch.reproduce.stacked.minibatches import StackedBatch, dealt
from anybatch.reproduce.stacked.networks import StackedNetworks, Vectors
from anybatch.reproduce.stacked.optimizers import StackedAdam, gradients_of_runs
from anybatch.reproduce.stacked.policy_phase import StackedLearner

_GROUPS = ("policy", "value", "auxiliary")


class StackedAuxiliaryPhase:
    """:class:`anybatch.auxiliary_phase.AuxiliaryPhase` for some of R runs, which share its length and minibatches."""

    def __init__(
        self,
        learner: StackedLearner,
        configs: Sequence[TrainConfig],
        runs: Tensor,
        generators: Sequence[torch.Generator],
    ) -> None:
        """Start with an empty phase.

        Args:
            learner: of all R runs.
            configs: of the S runs here.
            runs: (S,) their places among the R.
            generators: of the minibatch orders, one for each of the S runs.
        """
        self._learner = learner
        self._runs = runs
        self._generators = generators
        self._config = configs[0].aux
        self._networks = StackedNetworks(learner.networks.template, len(runs))
        self._weights = {name: learner.weights[name][runs] for name in _GROUPS}
        numbers = [_optimizer_config(config.aux, config.optimizer) for config in configs]
        self._optimizer = StackedAdam(list(self._weights.values()), numbers)
        self._clone_coefficient = torch.tensor([[config.aux.clone_coefficient] for config in configs])
        self._data: list[tuple[Vectors, Tensor]] = []

    def after_iteration(self, batch: StackedBatch) -> None:
        """Keep the observations and value targets of an iteration (R, N, T, ...)."""
        chosen = [tensor[self._runs].flatten(1, 2) for tensor in (*batch.vectors, batch.value_target)]
        self._data.append((tuple(chosen[:-1]), chosen[-1]))

    def run_if_due(self, progress: float, num_envs: int, steps: int) -> dict[str, Tensor]:
        """Run the auxiliary phase if its data is complete.

        Args:
            progress: share of the runs' environment steps that is done, 0 to 1.
            num_envs: N.
            steps: T.

        Returns:
            Statistics (R,) by column name, NaN for runs that are not among the S; empty if it was not due.
        """
        config = self._config
        if len(self._data) < config.policy_iterations:
            return {}
        vectors = tuple(torch.cat(parts, dim=1) for parts in zip(*(x for x, _ in self._data), strict=True))
        target = torch.cat([x for _, x in self._data], dim=1)
        self._data.clear()
        for name, rows in self._weights.items():
            rows.copy_(self._learner.weights[name][self._runs])
        self._optimizer.set_progress(progress)
        seen = self._train(vectors, target, num_envs, steps)
        for name, rows in self._weights.items():
            self._learner.weights[name][self._runs] = rows
        self._learner.proximal.reset(self._runs)
        return {name: self._of_all_runs(value) for name, value in seen.items()}

    def _of_all_runs(self, value: Tensor) -> Tensor:
        everywhere = torch.full((self._learner.runs,), torch.nan)
        everywhere[self._runs] = value
        return everywhere

    def _train(self, vectors: Vectors, target: Tensor, num_envs: int, steps: int) -> dict[str, Tensor]:
        config, runs = self._config, len(self._runs)
        with torch.no_grad():
            old_params = self._networks.policy(self._learner.views({"policy": self._weights["policy"]}), vectors)
        chunks = auxiliary_time_chunks(config.policy_iterations, num_envs, steps, config.minibatches_per_epoch)
        pieces, length = config.policy_iterations * num_envs * chunks, steps // chunks
        weights = {name: rows.detach().requires_grad_() for name, rows in self._weights.items()}
        sums: dict[str, Tensor] = {}
        for _ in range(config.epochs):
            for index in dealt(pieces, config.minibatches_per_epoch, self._generators):

                def take(tensor: Tensor, index: Tensor = index) -> Tensor:
                    rows = tensor.reshape(runs * pieces, length, *tensor.shape[2:])
                    return rows[index.flatten()].view(runs, -1, *tensor.shape[2:])

                sample = (tuple(take(part) for part in vectors), take(target), take(old_params))
                loss, seen = self._loss(weights, *sample)
                self._optimizer.step(gradients_of_runs(loss, list(weights.values()), runs))
                for name, value in seen.items():
                    sums[name] = sums[name] + value if name in sums else value
        gradient_steps = config.epochs * config.minibatches_per_epoch
        return {name: total / gradient_steps for name, total in sums.items()}

    def _loss(
        self, weights: Mapping[str, Tensor], vectors: Vectors, target: Tensor, old_params: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        params, value, auxiliary_value = self._networks.all_heads(self._learner.views(weights), vectors)
        distribution = self._learner.action_spec.distribution
        kl = distribution(old_params).kl(distribution(params))
        loss = auxiliary_loss(value, auxiliary_value, target, kl, clone_coefficient=self._clone_coefficient)
        if not self._learner.statistics:
            return loss, {}
        with torch.no_grad():
            errors = {"aux_value_loss": value, "aux_auxiliary_value_loss": auxiliary_value}
            seen = {name: 0.5 * (x - target).square().mean(1) for name, x in errors.items()}
            return loss, {**seen, "aux_clone_kl": kl.mean(1)}


def auxiliary_phases(
    learner: StackedLearner, configs: Sequence[TrainConfig], generators: Sequence[torch.Generator]
) -> list[StackedAuxiliaryPhase]:
    """The auxiliary phases of R runs, one for all runs that have it at the same time; none without PPG."""
    together: dict[tuple[int, int, int], list[int]] = {}
    for run, config in enumerate(configs):
        aux = config.aux
        if aux.enabled and aux.epochs:
            together.setdefault((aux.policy_iterations, aux.epochs, aux.minibatches_per_epoch), []).append(run)
    return [
        StackedAuxiliaryPhase(learner, [configs[r] for r in runs], torch.tensor(runs), [generators[r] for r in runs])
        for runs in together.values()
    ]


def _optimizer_config(aux: AuxiliaryConfig, policy: OptimizerConfig) -> OptimizerConfig:
    return replace(OptimizerConfig(), step_size=aux.step_size, schedule=policy.schedule)
