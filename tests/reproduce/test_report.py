"""Reports about folders of other people, and the manifest that they are made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anybatch.cli.main import main
from anybatch.config.io import to_yaml
from anybatch.errors import AnybatchError
from anybatch.presets import ppo
from anybatch.reproduce.manifest import read_manifest, without_folder
from anybatch.reproduce.report import markdown_to_html, write_report

SCRIPT = "<script>alert(1)</script>"
PNG = b"\x89PNG\r\n\x1a\n"


def manifest(**changes: Any) -> dict[str, Any]:
    return {
        "suite": "laptop",
        "about": "small tasks",
        "versions": {"python": "3.11"},
        "machine": {"system": "Linux", "architecture": "x86_64", "cores": 2, "gpu": "none"},
        "figures": {"staleness": {"runs": 2, "env_steps": 100, "seeds": [1, 2]}},
        "calls": [{"command": "anybatch", "runs trained": 2, "seconds": 1.5, "processor seconds": 2}],
        **changes,
    }


def write(folder: Path, content: Any) -> Path:
    (folder / "manifest.json").write_text(content if isinstance(content, str) else json.dumps(content))
    (folder / "staleness.md").write_text("Text.\n")
    return folder


def test_report_of_results(tmp_path: Path) -> None:
    (write(tmp_path, manifest()) / "staleness.png").write_bytes(PNG)
    page = write_report([tmp_path]).read_text()
    assert "2 runs, 100 environment steps; seeds 1, 2; <code>anybatch reproduce run staleness --suite laptop<" in page
    assert page.count("data:image/png;base64,") == 1


def test_a_figure_names_the_command_that_trained_it(tmp_path: Path) -> None:
    words = ["run all --seeds 2", "run staleness --games catch --seeds 48", "run tests"]
    calls = [{**manifest()["calls"][0], "command": f"anybatch reproduce {x}"} for x in words]
    page = write_report([write(tmp_path, manifest(calls=calls))]).read_text()
    assert "<code>anybatch reproduce run staleness --games catch --seeds 48</code>" in page


def test_html_in_any_text_is_escaped(tmp_path: Path) -> None:
    content = manifest(
        suite=SCRIPT,
        about=SCRIPT,
        versions={SCRIPT: SCRIPT},
        machine={"system": SCRIPT, "architecture": SCRIPT, "cores": None, "gpu": SCRIPT},
        calls=[{"command": SCRIPT, "runs trained": 1, "seconds": 1, "processor seconds": 1}],
    )
    (write(tmp_path, content) / "claims.md").write_text(f"- {SCRIPT}\n\n{SCRIPT}\n\n![x](x.png) [x](javascript:x)\n")
    page = write_report([tmp_path]).read_text()
    assert "<script" not in page and page.count("&lt;script&gt;") == 11
    assert "src=" not in page and "href=" not in page


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[", "Expecting value"),
        ("[" * 100_000, "is not a manifest"),
        ([], "its content must be of type dict"),
        ({}, "suite must be of type str"),
        (manifest(suite=3), "suite must be of type str"),
        (manifest(versions=[]), "versions must be of type dict"),
        (manifest(machine={}), "machine.system must be of type str"),
        (manifest(calls={}), "calls must be of type list"),
        (manifest(calls=[{"command": "x", "runs trained": 1, "seconds": "1"}]), "calls.0.seconds must be of type int"),
        (manifest(figures={"tests": {"runs": True}}), "figures.tests.runs must be of type int"),
        (manifest(figures={"staleness": {"runs": 1, "env_steps": 1, "seeds": [SCRIPT]}}), "figures.staleness.seeds.0"),
    ],
)
def test_damaged_manifests_are_refused(
    content: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AnybatchError, match=r"manifest.json is not a manifest of anybatch reproduce run") as caught:
        read_manifest(write(tmp_path, content))
    assert words in str(caught.value)
    assert main(["report", str(tmp_path)]) in (1, 2)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["manifest.json", "staleness.png", "staleness.md", "claims.md"])
def test_links_are_not_followed(name: str, tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret", tmp_path / "results"
    secret.write_bytes(PNG if name.endswith("png") else json.dumps(manifest()).encode())
    folder.mkdir()
    write(folder, manifest())
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with pytest.raises(AnybatchError, match=rf"{name} is a link or not a regular file"):
        write_report([folder])


def test_files_that_are_no_pictures_are_not_embedded(tmp_path: Path) -> None:
    (write(tmp_path, manifest()) / "staleness.png").write_text("password")
    with pytest.raises(AnybatchError, match=r"staleness.png is not a PNG picture"):
        write_report([tmp_path])


def test_report_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(ppo(f"gym:{SCRIPT}"), anybatch="0", seed=3))
    (tmp_path / "progress.csv").write_text(f"env_steps,mean_episode_return,{SCRIPT}\n10,1.5,7\n")
    page = write_report([tmp_path]).read_text()
    assert "seed 3" in page and "<script" not in page
    assert page.count("data:image/png;base64,") == 1


def test_no_path_of_the_machine_is_recorded() -> None:
    assert without_folder(["run", "all", "--out", "/somewhere/else"]) == ["run", "all", "--out", "DIR"]
    assert without_folder(["run", "--out=/x"]) == ["run", "--out=DIR"]
    assert without_folder(["run", "--out", "results/laptop"]) == ["run", "--out", "results/laptop"]


def test_markdown_as_html() -> None:
    text = "A **bold** & `code` word.\n\n- one\n\n| a | N_π |\n| --- | ---: |\n| x<y | **1** (2) |"
    shown = markdown_to_html(text)
    assert "<p>A <strong>bold</strong> &amp; <code>code</code> word.</p>" in shown and "<li>one</li>" in shown
    assert "N_π</th>" in shown and "<td>x&lt;y</td>" in shown and "<strong>1</strong> (2)</td>" in shown
    assert "---" not in shown
