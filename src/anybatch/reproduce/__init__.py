"""Every figure and table of the paper, and the statistics behind them."""

from anybatch.reproduce.statistics import van_elteren

__all__ = ["van_elteren"]
