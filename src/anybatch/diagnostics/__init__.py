"""Statistics of the policy update, the gradient noise scale, and the doctor that reads a run's log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anybatch._lazy import lazy_attributes

if TYPE_CHECKING:
    from anybatch.diagnostics.doctor import LiveDoctor, examine
    from anybatch.diagnostics.noise_scale import NoiseScale, signal_and_noise
    from anybatch.diagnostics.statistics import clip_fraction, effective_sample_size, policy_statistics

__all__ = [
    "LiveDoctor",
    "NoiseScale",
    "clip_fraction",
    "effective_sample_size",
    "examine",
    "policy_statistics",
    "signal_and_noise",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "LiveDoctor": "doctor",
        "NoiseScale": "noise_scale",
        "clip_fraction": "statistics",
        "effective_sample_size": "statistics",
        "examine": "doctor",
        "policy_statistics": "statistics",
        "signal_and_noise": "noise_scale",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
