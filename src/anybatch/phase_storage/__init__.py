"""Storage for the data of a policy phase of PPG, in memory or on disk."""

from anybatch.phase_storage.layout import SegmentLayout, layout_of
from anybatch.phase_storage.store import AuxiliaryMinibatch, SegmentStore

__all__ = ["AuxiliaryMinibatch", "SegmentLayout", "SegmentStore", "layout_of"]
