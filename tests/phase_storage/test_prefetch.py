"""Reading ahead changes when things are read, and nothing else."""

from __future__ import annotations

import threading

import pytest

from anybatch.phase_storage.prefetch import read_ahead


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_the_same_results_in_the_same_order(count: int) -> None:
    assert list(read_ahead(lambda i: i * i, range(count))) == [i * i for i in range(count)]


def test_the_next_item_is_read_while_the_present_one_is_used_and_no_further() -> None:
    read: list[int] = []
    second_read = threading.Event()

    def note(i: int) -> int:
        read.append(i)
        if i == 1:
            second_read.set()
        return i

    results = read_ahead(note, range(10))
    assert next(results) == 0
    assert second_read.wait(5)
    results.close()  # type: ignore[attr-defined]
    assert read == [0, 1]


def test_what_reading_raises_comes_where_the_result_would_have() -> None:
    results = read_ahead(lambda i: 1 // (2 - i), range(5))  # 1 // 0 at the third item
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_leaving_early_ends_the_thread() -> None:
    before = threading.active_count()
    results = read_ahead(lambda i: i, range(100))
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
