"""A self-contained HTML page about results folders and run folders.

The folders may come from somebody else. All text is escaped, links in them are not followed, and nothing is loaded
from elsewhere.
"""

from __future__ import annotations

import base64
import re
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from anybatch.errors import AnybatchError, ConfigError
from anybatch.reproduce.manifest import NAME, machine, read_manifest, read_regular_file, versions
from anybatch.reproduce.registry import FIGURES
from anybatch.reproduce.tables import markdown
from anybatch.runs.files import CONFIG, PROGRESS
from anybatch.system.atomic_files import write_text

_TITLE = "anybatch: results"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem; }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0; display: block; overflow-x: auto; }
td, th { border-bottom: 1px solid #ddd; padding: .2rem .6rem; text-align: right; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
img { max-width: 100%; } code, pre { background: #f4f4f4; padding: .1rem .3rem; }
pre { overflow-x: auto; padding: .6rem; }
figure { margin: 1rem 0; } details { margin: .5rem 0; }
"""
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write one HTML page that needs no other file.

    Args:
        folders: folders of ``anybatch reproduce run`` (with a manifest.json), or run folders (with a config.yaml).
        out: the file; by default report.html in the first folder.

    Raises:
        ConfigError: a folder is neither.
        AnybatchError: a file in a folder is damaged, or a link.
    """
    folders = [folder.expanduser() for folder in folders]
    body: list[str] = []
    for folder in folders:
        if (folder / NAME).exists():
            body += _results_section(folder)
        elif (folder / CONFIG).exists():
            body += _run_section(folder)
        else:
            raise ConfigError(
                f"{str(folder)!r} is neither a folder of `anybatch reproduce run` (no {NAME}) nor a run folder (no "
                f"{CONFIG})"
            )
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_TITLE}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{_TITLE}</h1>\n" + "\n".join(body) + "\n</body></html>\n"
    )
    path = (out or folders[0]).expanduser()
    path = path / "report.html" if path.is_dir() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)
    return path


def _results_section(folder: Path) -> Iterator[str]:
    """Claims, figures and tables of a results folder."""
    manifest = read_manifest(folder)
    yield f"<p>{escape(manifest['suite'])}: {escape(manifest['about'])}.</p>"
    yield f"<p>Commands:</p><pre>{escape(chr(10).join(_command(call) for call in manifest['calls']))}</pre>"
    yield f"<p>{_environment(manifest['versions'], manifest['machine'])}</p>"
    if (folder / "claims.md").exists():
        yield f"<h2>Claims</h2>{_markdown_file(folder / 'claims.md')}"
    for name, figure in FIGURES.items():
        summary = folder / f"{name}.md"
        if not summary.exists():
            continue
        yield f'<h2 id="{name}">{escape(name)} <small>({escape(figure.paper)})</small></h2>'
        yield f"<p>{escape(figure.about)}.</p>"
        pictures = sorted(folder.glob(f"{name}*.png"))
        yield from (_image(path) for path in pictures if "by-environment" not in path.stem)
        yield _markdown_file(summary)
        if by_environment := [path for path in pictures if "by-environment" in path.stem]:
            yield "<details><summary>by environment</summary>"
            yield from (_image(path) for path in by_environment)
            yield "</details>"
        if name in manifest["figures"]:
            made = manifest["figures"][name]
            seeds = ", ".join(map(str, made["seeds"])) or "none"
            calls = [x["command"] for x in manifest["calls"] if re.search(rf" run ({name}|all)( |$)", x["command"])]
            command = calls[-1] if calls else f"anybatch reproduce run {name} --suite {manifest['suite']}"
            yield (
                f"<p><small>{made['runs']:,} runs, {made['env_steps']:,} environment steps; seeds {escape(seeds)}; "
                f"<code>{escape(command)}</code></small></p>"
            )


def _command(call: dict[str, Any]) -> str:
    took = f"{call['seconds']:,.0f} s, processor time {call['processor seconds']:,.0f} s"
    return f"{call['command']}    # trained {call['runs trained']:,} runs in {took}"


def _environment(packages: dict[str, str], where: dict[str, Any]) -> str:
    shown = ", ".join(f"{name} {version}" for name, version in packages.items())
    place = f"{where['system']} {where['architecture']}, {where['cores']} cores, GPU: {where['gpu']}"
    return escape(f"{shown}; {place}.")


def _run_section(folder: Path) -> Iterator[str]:
    """Learning curve, last row and configuration of a run."""
    from anybatch.reproduce.plots import BLUE, figure, in_millions
    from anybatch.runs.folder import read_config
    from anybatch.runs.progress import read_progress

    settings = read_regular_file(folder / CONFIG).decode(errors="replace")
    read_regular_file(folder / PROGRESS)
    config, seed = read_config(folder)
    progress = read_progress(folder / PROGRESS)
    yield f"<h2>run {escape(folder.name)}</h2>"
    yield f"<p>{escape(str(config.env.id))}, seed {seed}, {config.total_env_steps:,} environment steps.</p>"
    if progress.get("env_steps") and "mean_episode_return" in progress:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "curve.png"
            with figure(path, width=5.0, height=3.2) as (axes,):
                axes.plot(progress["env_steps"], progress["mean_episode_return"], color=BLUE)
                axes.set_ylabel("mean return, last 100 episodes")
                in_millions(axes)
            yield _image(path)
    rows = [[name, f"{values[-1]:.6g}"] for name, values in progress.items() if values]
    yield markdown_to_html(markdown(["column", "last row"], rows))
    yield f"<details><summary>config.yaml</summary><pre>{escape(settings)}</pre></details>"
    yield f"<p>Report made with {_environment(versions(), machine())}</p>"


def _image(path: Path) -> str:
    data = read_regular_file(path)
    if not data.startswith(_PNG_SIGNATURE):
        raise AnybatchError(f"{path} is not a PNG picture")
    content = base64.b64encode(data).decode()
    return f'<figure><img alt="{escape(path.stem)}" src="data:image/png;base64,{content}"></figure>'


def _markdown_file(path: Path) -> str:
    return markdown_to_html(read_regular_file(path).decode(errors="replace"))


def markdown_to_html(text: str) -> str:
    """Render Markdown; HTML, links and pictures in it appear as text."""
    renderer = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["image", "link", "autolink"])
    return str(renderer.render(text))
