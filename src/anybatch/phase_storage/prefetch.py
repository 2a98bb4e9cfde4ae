"""Reading ahead, so that a GPU need not wait for data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def read_ahead(read: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """Yield the results of ``map(read, items)`` in order, with a thread reading one item ahead.

    Two results are in memory at a time. An exception of ``read`` is raised in place of its result.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as reader:
        waiting = None
        for item in items:
            following = reader.submit(read, item)
            if waiting is not None:
                yield waiting.result()
            waiting = following
        if waiting is not None:
            yield waiting.result()
