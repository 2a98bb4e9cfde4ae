"""Tables in Markdown."""

from __future__ import annotations

import numpy as np
import pytest

from anybatch.reproduce.tables import markdown, means_by_task, p_value


def test_markdown() -> None:
    lines = markdown(["name", "x"], [["a", "1.5"], ["long name", "-10.25"]]).splitlines()
    assert lines == [
        "| name      |      x |",
        "| --------- | -----: |",
        "| a         |    1.5 |",
        "| long name | -10.25 |",
    ]
    with pytest.raises(ValueError, match="2 columns, but a row has 1"):
        markdown(["name", "x"], [["a"]])
    assert markdown(["a|b"], []).splitlines()[0] == r"| a\|b |"


def test_cells_by_hand() -> None:
    # task means 0.2 and 0.5, overall 0.35
    assert means_by_task(np.array([[0.1, 0.4], [0.3, 0.6]])) == ["0.200", "0.500", "0.350"]
    assert (p_value(0.0234), p_value(4.1e-7)) == ("0.023", "4.1e-07")
