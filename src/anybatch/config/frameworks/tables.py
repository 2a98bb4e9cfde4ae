"""The tables by the framework's name, and the field that another framework's argument means."""

from __future__ import annotations

import functools

from anybatch.config.frameworks import cleanrl, rllib, rsl_rl, sb3, torchrl, trl
from anybatch.config.frameworks.common import EPOCHS

FRAMEWORKS = {
    "sb3": sb3.TABLE,
    "cleanrl": cleanrl.TABLE,
    "rllib": rllib.TABLE,
    "trl": trl.TABLE,
    "torchrl": torchrl.TABLE,
    "rsl_rl": rsl_rl.TABLE,
}
"""Tables by the name that ``anybatch scale --for`` takes."""


def explain(name: str) -> str:
    """Field that is meant by an argument of another framework, as a clause; empty if no table has the name."""
    meanings = _meanings().get(name.replace("-", "_").strip("_"), {})
    return "; ".join(f"the {name} of {', '.join(titles)} is {meaning}" for meaning, titles in meanings.items())


@functools.cache
def _meanings() -> dict[str, dict[str, list[str]]]:
    """For each name its meanings, and for each meaning the frameworks."""
    found: dict[str, dict[str, list[str]]] = {}
    for framework in FRAMEWORKS.values():
        for row in sum(framework.calls.values(), framework.known):
            for name in row.names.split() if row.meaning or row.field else ():
                meaning = row.meaning.format(name=name) or row.field.replace("policy_epochs", EPOCHS)
                found.setdefault(name.strip("_"), {}).setdefault(meaning, []).append(framework.title)
    return found
