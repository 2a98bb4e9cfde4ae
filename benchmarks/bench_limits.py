"""How fast training could be: passes of the networks for an environment step, and how fast single passes are.

A training loop cannot take less time than the passes that its algorithm asks for, so with f and b the rates of the
network's forward and of its forward-and-backward pass, in samples a second, its limit is

    1 / (forward / f + both / b)    environment steps a second.

The rates are measured in the process that is then timed, on the library's own network and on plain PyTorch ones of the
same shape (below); the fastest counts, at the batch size that suits it best. So neither a slow network nor a batch
size that does not suit the machine makes the limit easier to reach.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from anybatch.config.schema import TrainConfig
from anybatch.reproduce.figures.cost import passes as counted

# What a forward pass of the IMPALA network reads and writes for a sample, in bf16, where no operation is fused with its
# neighbour; a backward pass moves about twice as much. A residual block of e numbers a sample moves 11 e (two ReLUs and
# two convolutions 2 e each, the sum 3 e); the first stack 12,288 + 65,536 (convolution), 65,536 + 16,384 (pooling) and
# 22 x 16,384; the others 270,336 and 71,680; together 862,208 numbers of 2 bytes.
FORWARD_BYTES = 2 * 862_208


@dataclass(frozen=True)
class Passes:
    """Passes of one encoder for an environment step."""

    forward: float
    both: float
    """Forward and backward."""

    def limit(self, forward_rate: float, both_rate: float) -> float:
        """Environment steps a second, from the rates of single passes in samples a second."""
        return 1 / (self.forward / forward_rate + self.both / both_rate)

    def memory_limit(self, bandwidth: float) -> float:
        """Environment steps a second of the IMPALA network on a GPU that is bound by its memory.

        Args:
            bandwidth: bytes a second.
        """
        return bandwidth / (FORWARD_BYTES * (self.forward + 3 * self.both))


def passes(config: TrainConfig) -> Passes:
    """What the algorithm of a configuration asks for.

    As the paper counts it, and the policy once before each auxiliary phase for pi_old, which the paper leaves out.
    """
    forward, both = counted(config)
    return Passes(forward + (config.aux.enabled and config.aux.epochs > 0), both)


@dataclass(frozen=True)
class Rates:
    """Samples a second of one network, the best over batch sizes."""

    forward: float
    both: float
    forward_batch: int
    both_batch: int


def measure(
    network: Callable[[Tensor], Tensor], draw: Callable[[int], Tensor], batches: Sequence[int], seconds: float
) -> Rates:
    """Rates of a network's passes alone.

    Args:
        network: observations (B, ...) to outputs with a gradient.
        draw: makes B observations.
        batches: batch sizes to try.
        seconds: about how long to measure each pass at each batch size.
    """
    forward, both = {}, {}
    for batch in batches:
        observation = draw(batch)

        def run_forward(observation: Tensor = observation) -> None:
            with torch.no_grad():
                network(observation)

        def run_both(observation: Tensor = observation) -> None:
            network(observation).square().mean().backward()

        forward[batch] = batch / median_seconds(run_forward, seconds)
        both[batch] = batch / median_seconds(run_both, seconds)
    best_forward, best_both = max(forward, key=forward.__getitem__), max(both, key=both.__getitem__)
    return Rates(forward[best_forward], both[best_both], best_forward, best_both)


def median_seconds(function: Callable[[], None], seconds: float) -> float:
    """Median time of a call, over about ``seconds`` and at least two, after one that is not counted."""
    function()
    synchronize()
    taken: list[float] = []
    while len(taken) < 2 or sum(taken) < seconds:
        start = time.perf_counter()
        function()
        synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def memory_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy within the device's memory reads and writes."""
    source = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    to = torch.empty_like(source)
    return 2 * source.numel() / median_seconds(lambda: to.copy_(source), 0.2)


def synchronize() -> None:
    """Wait for the GPU, if there is one in use."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def best(rates: Sequence[Rates]) -> Rates:
    """The fastest forward pass and the fastest forward-and-backward pass of several networks."""
    forward, both = max(rates, key=lambda one: one.forward), max(rates, key=lambda one: one.both)
    return Rates(forward.forward, both.both, forward.forward_batch, both.both_batch)


class PlainImpala(nn.Module):
    """The IMPALA network with its policy head in plain PyTorch, as one would write it first: images to logits."""

    def __init__(self, actions: int = 15) -> None:
        super().__init__()
        self.entries = nn.ModuleList()
        self.blocks = nn.ModuleList()
        channels = 3
        for width in (16, 32, 32):
            self.entries.append(nn.Conv2d(channels, width, 3, padding=1))
            self.blocks.append(nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(4)]))
            channels = width
        self.dense = nn.Linear(32 * 8 * 8, 256)
        self.head = nn.Linear(256, actions)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 64, 64, 3) uint8 to logits (B, actions)."""
        x = images.permute(0, 3, 1, 2).to(self.dense.weight.dtype) / 255
        for entry, block in zip(self.entries, self.blocks, strict=True):
            x = functional.max_pool2d(entry(x), 3, stride=2, padding=1)
            for first, second in (block[:2], block[2:]):
                x = x + second(functional.relu(first(functional.relu(x))))
        return self.head(functional.relu(self.dense(functional.relu(x).flatten(1))))


def plain_networks(
    device: torch.device, *, low_precision: bool, compiled: bool = False
) -> dict[str, Callable[[Tensor], Tensor]]:
    """The plain network in the layouts and precisions that PyTorch offers, by name; fp32 ones only in its place."""
    layout: dict[str, Any] = {"memory_format": torch.channels_last}
    fp32 = PlainImpala().to(device).to(**layout)
    if not low_precision:
        return {"fp32 NCHW": PlainImpala().to(device), "fp32 channels_last": fp32}

    def autocast(images: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return fp32(images)

    found: dict[str, Callable[[Tensor], Tensor]] = {
        "bf16 autocast channels_last": autocast,
        "bf16 weights channels_last": PlainImpala().to(device).to(torch.bfloat16).to(**layout),
    }
    if compiled:
        found["bf16 autocast channels_last, compiled"] = torch.compile(autocast)
    return found
