"""Completions as tensors of tokens: padded (B, T), or packed one after the other into one axis (T,) with sequence ids.

The losses of :mod:`anybatch.integrations.token_objectives` are written once in terms of these few operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from anybatch.errors import ConfigError
from anybatch.objectives import check_alike, check_mask, known_true

Level: TypeAlias = Literal["token", "sequence_product", "sequence_geometric_mean"]
"""One sample is a token, or a completion with the product or the geometric mean of its tokens' weights."""
Aggregate: TypeAlias = Literal["token", "sequence"]
"""Terms of the sum are those of the tokens, or means over the tokens of each completion."""


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of a batch that count, and the completions that they belong to."""

    mask: Tensor
    """(B, T) or (T,) bool, tokens that count."""
    sequence_ids: Tensor | None
    """(T,) number of each token's completion; None for (B, T), where rows are completions."""

    def zeroed(self, x: Tensor) -> Tensor:
        """Tokens that do not count replaced by 0 before any arithmetic, so that their values reach no gradient.

        Args:
            x: (B, T) or (T,), one number for each token.

        Returns:
            The same shape, in fp32.
        """
        return torch.where(self.mask, x.float(), 0.0)

    def sums(self, per_token: Tensor) -> Tensor:
        """Sums over the tokens of each completion.

        Args:
            per_token: (B, T) or (T,), 0 where no token counts.

        Returns:
            (B, 1), or (T,) for packed tokens, each with the sum of its completion.
        """
        if self.sequence_ids is None:
            return per_token.sum(1, keepdim=True)
        return torch.zeros_like(per_token).index_add(0, self.sequence_ids, per_token)[self.sequence_ids]

    def lengths(self) -> Tensor:
        """Tokens that count in each completion, at least 1; fp32, of the shape of :meth:`sums`."""
        return self.sums(self.mask.float()).clamp(min=1)

    def at_level(self, per_token: Tensor, level: Level) -> Tensor:
        """Logarithms of ratios as they are, or their sums or means over each completion.

        Args:
            per_token: (B, T) or (T,), 0 where no token counts.
            level: whether a token or a completion is one sample.

        Returns:
            (B, T) or (T,) at level ``token``; otherwise the shape of :meth:`sums`.
        """
        if level == "token":
            return per_token
        total = self.sums(per_token)
        return total if level == "sequence_product" else total / self.lengths()

    def total(self, terms: Tensor, kept: Tensor, aggregate: Aggregate) -> Tensor:
        """Sum over the tokens that count, or over completions of the mean over their tokens.

        Args:
            terms: one for each token, or for each completion, of which every token then has a copy.
            kept: bool, of a shape that broadcasts to the tokens: terms that are not 0.
            aggregate: the terms of the sum.

        Returns:
            Scalar.
        """
        values = torch.where(self.mask & kept, terms.expand_as(self.mask), 0.0)
        return (values if aggregate == "token" else values / self.lengths()).sum()

    def units(self, level: Level) -> Tensor:
        """The samples that count: tokens, or completions with at least one token that does.

        Args:
            level: whether a token or a completion is one sample.

        Returns:
            bool, (B, T) or (T,) at level ``token``; otherwise the shape of :meth:`sums`.
        """
        return self.mask if level == "token" else self.sums(self.mask.float()) > 0

    def count(self, level: Level) -> Tensor:
        """Number of samples that count.

        Args:
            level: whether a token or a completion is one sample.

        Returns:
            Scalar int64.
        """
        if level == "token" or self.sequence_ids is None:
            return self.units(level).sum()
        tokens = torch.zeros_like(self.mask, dtype=torch.int64).index_add(0, self.sequence_ids, self.mask.long())
        return (tokens > 0).sum()

    def advantage(self, advantage: Tensor, level: Level) -> Tensor:
        """Check advantages, and bring them into a shape that broadcasts to the tokens.

        Args:
            advantage: (B,) one for each completion, or (B, T) where ``level`` is ``token``; (T,) for packed tokens.
            level: whether a token or a completion is one sample.

        Returns:
            (B, 1), (B, T) or (T,), fp32.

        Raises:
            ConfigError: another shape.
            TypeError: no tensor, or not floating-point.
        """
        check_alike(advantage=advantage)
        if self.sequence_ids is None and advantage.shape == self.mask.shape[:1]:
            return advantage.float().unsqueeze(1)
        if advantage.shape == self.mask.shape and (level == "token" or self.sequence_ids is not None):
            return self.zeroed(advantage)
        allowed = "(B,) or (B, T)" if level == "token" else "(B,), one for each completion"
        if self.sequence_ids is not None:
            allowed = "(T,), one for each packed token"
        shapes = f"{tuple(advantage.shape)} for a mask of {tuple(self.mask.shape)}"
        raise ConfigError(f"advantage has shape {shapes}, but must be {allowed}")


def token_batch(mask: Tensor, sequence_ids: Tensor | None = None, **tokens: Tensor) -> TokenBatch:
    """Check the arguments that have one number for each token, and make the mask a bool one.

    Args:
        mask: (B, T) or, with ``sequence_ids``, (T,); bool or 0 and 1.
        sequence_ids: (T,) integers from 0 to T-1, the completion of each packed token; None for (B, T).
        **tokens: other arguments by name, which must have the shape of the mask.

    Returns:
        The batch.

    Raises:
        TypeError: an argument is no tensor, or of the wrong dtype.
        ValueError: shapes differ, or are not (B, T) or (T,); a mask holds something else than 0 and 1.
    """
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask is a {type(mask).__name__}, but must be a tensor: torch.as_tensor(mask)")
    if sequence_ids is None and mask.dim() != 2:
        also = ", or (T,) with sequence_ids" if mask.dim() == 1 else ""
        raise ValueError(f"mask has shape {tuple(mask.shape)}, but must be (B, T), the tokens of B completions{also}")
    if sequence_ids is not None:
        _check_sequence_ids(sequence_ids, mask)
    counts = mask
    if mask.dtype != torch.bool:
        counts = mask != 0
        if known_true(counts & (mask != 1)):  # such as weights of tokens, which would all become 1
            raise ValueError("mask contains values other than 0 and 1 (1 for the tokens that count)")
    if tokens:
        check_alike(**tokens)
        check_mask("mask", counts, next(iter(tokens.values())))
    return TokenBatch(counts, sequence_ids)


def _check_sequence_ids(sequence_ids: Tensor, mask: Tensor) -> None:
    if not isinstance(sequence_ids, Tensor) or sequence_ids.dtype not in (torch.int32, torch.int64):
        kind = sequence_ids.dtype if isinstance(sequence_ids, Tensor) else type(sequence_ids).__name__
        raise TypeError(f"sequence_ids is of {kind}, but must be a tensor of int64 or int32")
    if mask.dim() != 1 or sequence_ids.shape != mask.shape:
        raise ValueError(
            f"sequence_ids has shape {tuple(sequence_ids.shape)} and the mask {tuple(mask.shape)}, but both must be "
            "(T,), packed tokens"
        )
    if known_true((sequence_ids < 0) | (sequence_ids >= len(sequence_ids))):
        raise ValueError("sequence_ids must be numbers from 0 to T-1, the completions of T packed tokens")
