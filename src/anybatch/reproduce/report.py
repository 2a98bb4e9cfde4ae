"""A self-contained HTML page about folders of results and of runs."""

from __future__ import annotations

import base64
import html
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from anybatch.errors import ConfigError
from anybatch.reproduce.manifest import NAME, machine, read_manifest, versions
from anybatch.runs.files import CONFIG, PROGRESS
from anybatch.system.atomic_files import write_text

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


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write one HTML page that needs no other file.

    Args:
        folders: folders of ``anybatch reproduce run`` (with a manifest.json), or run folders (with a config.yaml).
        out: the file; by default report.html in the first folder.

    Raises:
        ConfigError: a folder that is neither.
    """
    parts: list[str] = []
    for folder in folders:
        if (folder / NAME).exists():
            parts += _results(folder)
        elif (folder / CONFIG).exists():
            parts += _run(folder)
        else:
            raise ConfigError(
                f"{str(folder)!r} is neither a folder of `anybatch reproduce run` (no {NAME}) nor a run folder (no "
                "config.yaml)"
            )
    title = "anybatch: results"
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{title}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )
    path = out or Path(folders[0]) / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)
    return path


def _results(folder: Path) -> Iterator[str]:
    from anybatch.reproduce.registry import FIGURES

    manifest = read_manifest(folder)
    yield f"<p>{html.escape(manifest['suite'])}: {html.escape(manifest['about'])}.</p>"
    yield "<p>Made by:</p><pre>" + html.escape("\n".join(_call(call) for call in manifest["calls"])) + "</pre>"
    yield f"<p>{_facts(manifest['versions'], manifest['machine'])}</p>"
    if (folder / "claims.md").exists():
        yield "<h2>what it shows</h2>" + markdown_to_html((folder / "claims.md").read_text())
    for name, figure in FIGURES.items():
        words = folder / f"{name}.md"
        if not words.exists():
            continue
        yield f'<h2 id="{name}">{html.escape(name)} <small>({html.escape(figure.paper)})</small></h2>'
        yield f"<p>{html.escape(figure.about)}.</p>"
        pictures = sorted(path for path in folder.glob(f"{name}*.png") if _belongs(path.stem, name, FIGURES))
        yield from (_image(path) for path in pictures if "by-environment" not in path.stem)
        yield markdown_to_html(words.read_text())
        rest = [path for path in pictures if "by-environment" in path.stem]
        if rest:
            yield "<details><summary>by environment</summary>" + "".join(map(_image, rest)) + "</details>"
        if name in manifest["figures"]:
            about = manifest["figures"][name]
            seeds = ", ".join(map(str, about["seeds"])) or "none"
            yield (
                f"<p><small>{about['runs']:,} runs, {about['env_steps']:,} environment steps; seeds {seeds}; "
                f"<code>anybatch reproduce run {name} --suite {html.escape(manifest['suite'])}</code></small></p>"
            )


def _belongs(stem: str, name: str, names: Any) -> bool:
    """Whether a picture is this figure's, and not that of one whose name begins alike."""
    return stem == name or (stem.startswith(f"{name}-") and stem not in names)


def _call(call: dict[str, Any]) -> str:
    took = f"{call['seconds']:,.0f} s, of processor time {call['processor seconds']:,.0f} s"
    return f"{call['command']}    # trained {call['runs trained']:,} runs in {took}"


def _facts(found: dict[str, str], where: dict[str, Any]) -> str:
    shown = ", ".join(f"{name} {version}" for name, version in found.items())
    place = f"{where['system']} {where['architecture']}, {where['cores']} cores, GPU: {where['gpu']}"
    return html.escape(f"{shown}; {place}.")


def _run(folder: Path) -> Iterator[str]:
    """An ordinary run: its curve, its last row and its configuration."""
    from anybatch.reproduce.plots import BLUE, figure, in_millions
    from anybatch.runs.progress import read_progress
    from anybatch.runs.run import read_config

    config, seed = read_config(folder)
    progress = read_progress(folder / PROGRESS)
    yield f"<h2>run {html.escape(folder.name)}</h2>"
    yield f"<p>{html.escape(config.env.id)}, seed {seed}, {config.total_env_steps:,} environment steps.</p>"
    if progress.get("env_steps"):
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "curve.png"
            with figure(path) as axes:
                axes.plot(progress["env_steps"], progress["mean_episode_return"], color=BLUE)
                axes.set_ylabel("mean return, last 100 episodes")
                in_millions(axes)
            yield _image(path)
        last = {name: values[-1] for name, values in progress.items()}
        yield (
            "<table>"
            + "".join(f"<tr><td>{html.escape(n)}</td><td>{v:.6g}</td></tr>" for n, v in last.items())
            + "</table>"
        )
    settings = html.escape((folder / CONFIG).read_text())
    yield f"<details><summary>config.yaml</summary><pre>{settings}</pre></details>"
    yield f"<p>report made with {_facts(versions(), machine())}</p>"


def _image(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<figure><img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}"></figure>'


def markdown_to_html(text: str) -> str:
    """The little Markdown that summaries use: paragraphs, lists, tables, bold, code and $symbols$."""
    blocks = []
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        if lines and lines[0].startswith("|"):
            blocks.append(_table(lines))
        elif lines and all(line.startswith("- ") for line in lines):
            blocks.append("<ul>" + "".join(f"<li>{_inline(line[2:])}</li>" for line in lines) + "</ul>")
        else:
            blocks.append(f"<p>{_inline(' '.join(lines))}</p>")
    return "\n".join(blocks)


def _table(lines: Sequence[str]) -> str:
    rows = [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines]
    head = "".join(f"<th>{_inline(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>" for row in rows[2:])
    return f"<table><tr>{head}</tr>{body}</table>"


def _inline(text: str) -> str:
    text = html.escape(text)
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)
    text = re.sub(r"`(.+?)`", r"<code>\1</code>", text)
    return re.sub(r"\$(.+?)\$", lambda found: _symbols(found[1]), text)


_GREEK = {
    r"\alpha": "α", r"\beta": "β", r"\pi": "π", r"\theta": "θ", r"\sqrt": "√",
}  # fmt: skip


def _symbols(tex: str) -> str:
    """Simple TeX symbols as HTML."""
    for name, letter in _GREEK.items():
        tex = tex.replace(name, letter)
    tex = re.sub(r"_\{((?:[^{}]|\{[^{}]*\})*)\}", r"<sub>\1</sub>", tex)
    tex = re.sub(r"_(\w|π|θ)", r"<sub>\1</sub>", tex)
    return f"<i>{tex.replace('{', '').replace('}', '')}</i>"
