"""Recurrent networks: a GRU or an LSTM behind any encoder, with a state that is reset where episodes begin."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from anybatch.config.validation import check_integer
from anybatch.models.precision import encode, full_precision
from anybatch.observations import Sequences


class RecurrentEncoder(nn.Module):
    """An encoder and a recurrent layer on its features: :class:`~anybatch.observations.Sequences` to (B, width).

    Weights start orthogonal, biases at 0. The layer is float32, and computes a step of all pieces at a time, since
    episodes end at different steps. Gradients flow through the steps of a piece, and end at its beginning.
    """

    low_precision = False
    """The encoder inside decides for itself."""

    def __init__(
        self,
        encoder: nn.Module,
        kind: Literal["gru", "lstm"],
        width: int | None = None,
        *,
        precision: Literal["fp32", "bf16"] = "fp32",
        offset: int = 0,
    ) -> None:
        """Put a layer of ``width`` units, by default as many as the encoder has features, behind ``encoder``.

        ``offset`` is the place of its state among those of all networks.
        """
        super().__init__()
        self.encoder = encoder
        self.precision: Literal["fp32", "bf16"] = precision
        features = int(getattr(encoder, "out_features"))  # noqa: B009
        self.out_features = features if width is None else check_integer("model.recurrent_width", width, at_least=1)
        self.cell = (nn.GRUCell if kind == "gru" else nn.LSTMCell)(features, self.out_features)
        for name, parameter in self.cell.named_parameters():
            if name.startswith("bias"):
                nn.init.zeros_(parameter)
            else:
                for gate in parameter.chunk(3 if kind == "gru" else 4):
                    nn.init.orthogonal_(gate)
        self.state_size = self.out_features * (1 if kind == "gru" else 2)
        """Numbers of its state: those of a GRU are its output, those of an LSTM the output and the cell."""
        self.offset = offset

    def forward(self, inputs: Sequences) -> Tensor:
        """Features (B, width)."""
        return self.unroll(inputs)[0]

    def unroll(self, inputs: Sequences) -> tuple[Tensor, Tensor]:
        """Features (B, width), and the state (K, S) after the last step of each piece."""
        features = encode(self.encoder, inputs.observation, self.precision)
        state = inputs.state[:, self.offset : self.offset + self.state_size].view(-1, inputs.steps, self.state_size)[
            :, 0
        ]
        keep = (~inputs.first).view(-1, inputs.steps, 1).unbind(1)
        outputs = []
        with full_precision(features):
            for x, kept in zip(features.view(-1, inputs.steps, features.shape[-1]).unbind(1), keep, strict=True):
                state = self._step(x, state * kept)
                outputs.append(state[:, : self.out_features])
        return torch.stack(outputs, dim=1).flatten(0, 1), state

    def _step(self, features: Tensor, state: Tensor) -> Tensor:
        if isinstance(self.cell, nn.GRUCell):
            output: Tensor = self.cell(features, state)
            return output
        return torch.cat(self.cell(features, state.chunk(2, dim=-1)), dim=-1)
