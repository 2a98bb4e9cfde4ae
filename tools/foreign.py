"""The test suites of other libraries, with our classes in the place of theirs (`make foreign`).

Usage:

    python tools/foreign.py                         # suites of the installed libraries
    python tools/foreign.py rsl_rl=PATH_OF_CHECKOUT # a suite by its name, with its tests from a checkout

A suite's tests come from its source distribution, which pip downloads into a temporary folder, or from a checkout; the
library is the installed one. Nothing is written into this repository. The exit code is 1 if a test fails that is not
named, with its reason, in SUITES.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

# Imported by pytest (-p) before the tests are: the names that tests and library look up are replaced.
_PLUGIN = """
import importlib
ours = getattr(importlib.import_module({ours!r}), {name!r})
for module, attribute in {places!r}:
    setattr(importlib.import_module(module), attribute, ours)
"""


@dataclass(frozen=True)
class Suite:
    """Tests of a library, and the class that is substituted."""

    package: str
    """Its name on pip."""
    ours: str
    """Module of our class."""
    name: str
    """Name of our class."""
    places: tuple[tuple[str, str], ...]
    """Modules and attributes that become our class."""
    select: tuple[str, ...] = ()
    """Arguments of pytest that select the tests which use the class."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Tests that fail, by a part of their name, and why this is meant."""


SUITES = {
    "sb3": Suite(
        "stable-baselines3",
        "anybatch.integrations.sb3",
        "PPOEWMA",
        (("stable_baselines3", "PPO"), ("stable_baselines3.ppo", "PPO"), ("stable_baselines3.ppo.ppo", "PPO")),
        ("-k", "(PPO or ppo) and not gpu"),
        {
            "test_ppo[0.2": "clip_range_vf is refused: it biases values and ties their speed to the batch",
            "test_ppo[-0.2": "clip_range_vf is refused, with another error than the test expects",
            "test_ppo_warnings": "a batch_size that does not divide the rollout is refused",
            "test_identity.py::test_discrete[env2": "chance: of 8 seeds, PPO passes with 2, PPOEWMA with 3",
            "tests/test_utils.py": "it needs ale-py, which is not installed; PPO has nothing to do with it",
        },
    ),
    "rsl_rl": Suite(
        "rsl-rl-lib",
        "anybatch.integrations.rsl_rl",
        "PPOEWMA",
        (
            ("rsl_rl.algorithms", "PPO"),
            ("rsl_rl.algorithms.ppo", "PPO"),
            ("rsl_rl.runners.on_policy_runner", "PPO"),
        ),
    ),
}


def source(suite: Suite, folder: Path) -> Path:
    """Download and unpack the source distribution of the installed version; the folder that has its tests."""
    version = importlib.metadata.version(suite.package)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--no-binary", suite.package, "--dest", str(folder), f"{suite.package}=={version}"]
    subprocess.run(command, check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (root,) = (path for path in folder.iterdir() if path.is_dir())
    return root


def run(name: str, suite: Suite, checkout: Path | None) -> bool:
    """Run a suite and report; whether every failure has a reason."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        root = checkout if checkout is not None else source(suite, folder)
        if not (root / "tests").is_dir():
            print(f"{name}: the source distribution has no tests; give a checkout: {name}=PATH")
            return True
        plugin = _PLUGIN.format(ours=suite.ours, name=suite.name, places=suite.places)
        (folder / "foreign_plugin.py").write_text(plugin)
        # only the tests are taken from there: the library is the installed one
        tests = folder / "suite"
        tests.mkdir()
        (tests / "tests").symlink_to((root / "tests").resolve())
        given = [os.path.abspath(x) for x in os.environ.get("PYTHONPATH", "").split(os.pathsep) if x]
        path = os.pathsep.join([temporary, str(tests), *given])
        command = [sys.executable, "-m", "pytest", "tests", "-q", "-p", "foreign_plugin", "-p", "no:cacheprovider"]
        command += [
            "--rootdir",
            str(tests),
            "-rfE",
            "--tb=no",
            "--continue-on-collection-errors",
            "--show-capture=no",
            *suite.select,
        ]
        result = subprocess.run(
            command, cwd=tests, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
        )
    lines = result.stdout.splitlines()
    failed = [line.split(" - ")[0].split(" ", 1)[1] for line in lines if re.match(r"(FAILED|ERROR) ", line)]
    closing = next(
        (line for line in reversed(lines) if re.search(r"\d+ (passed|failed)", line)), "pytest did not finish"
    )
    print(f"{name}: {importlib.metadata.version(suite.package)}: {closing.strip('= ')}")
    unexpected = 0
    for test in failed:
        reason = next((why for part, why in suite.reasons.items() if part in test), "")
        unexpected += not reason
        print(f"  {test}: {reason or 'NO REASON IS KNOWN'}")
    if result.returncode not in (0, 1) or not lines:
        print(result.stdout[-3000:], result.stderr[-3000:])
        return False
    return not unexpected


def main(arguments: list[str]) -> int:
    """Run the suites; returns the exit code."""
    checkouts = dict(x.split("=", 1) if "=" in x else (x, "") for x in arguments)
    unknown = checkouts.keys() - SUITES.keys()
    if unknown:
        print(f"no suite {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}", file=sys.stderr)
        return 2
    fine = True
    for name, suite in SUITES.items():
        if checkouts and name not in checkouts:
            continue
        try:
            importlib.metadata.version(suite.package)
        except importlib.metadata.PackageNotFoundError:
            print(f"{name}: {suite.package} is not installed")
            continue
        path = checkouts.get(name)
        fine &= run(name, suite, Path(path) if path else None)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
