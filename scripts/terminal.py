"""Runs commands and draws the terminal that shows them as one animated SVG: `python scripts/terminal.py`."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "terminal.svg"
PROMPT = "LeBron James professionally plays the sport of"
COMMANDS = (
    f'noiser attribute "{PROMPT}"',
    f'noiser attribute "{PROMPT}" --foil " football"',
    f'noiser compare "{PROMPT}" --methods noiser,occlusion',
)
COLUMNS = 92
TYPING, PAUSE, READING = 2.0, 0.5, 4.5  # seconds of each scene: the command is typed, runs, and its output stays

CHARACTER, LINE, MARGIN = 12.2, 24.4, 18  # pixels; the first two are rich's
DARK, LIGHT = (24, 26, 32), (225, 228, 235)  # of the heat maps
THEME = TerminalTheme(DARK, LIGHT, [DARK, *[LIGHT] * 7])


class Scene(NamedTuple):
    """A command, and what it wrote, with the control sequences of its colours."""

    command: str
    output: str


def run(command: str) -> Scene:
    """Runs a `noiser` command as in a terminal of `COLUMNS` columns.

    Raises:
        CalledProcessError: the command failed.
    """
    environment = os.environ | {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "COLUMNS": str(COLUMNS)}
    arguments = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, encoding="utf-8", check=True)
    return Scene(command, done.stdout)


def draw(scenes: list[Scene]) -> str:
    """The SVG: scene after scene, for ever; the first one alone where the viewer wants no motion."""
    seconds = TYPING + PAUSE + READING
    total = seconds * len(scenes)
    lines = 2 + max(scene.output.rstrip().count("\n") for scene in scenes)
    width, height = COLUMNS * CHARACTER, lines * LINE
    groups, rules, moves = [], [], []
    for i, (command, output) in enumerate(scenes):
        typed, written = _lines(f"$ {command}", f"c{i}"), _lines(output, f"o{i}")
        rules += [typed.styles, written.styles]
        groups.append(
            f'<g class="scene s{i}">{typed.drawing}'
            f'<g class="cover t{i}"><rect width="{width}" height="{LINE}" fill="rgb{DARK}"/>'
            f'<rect width="{CHARACTER}" height="{LINE}" fill="rgb{LIGHT}"/></g>'
            f'<g class="o{i}" transform="translate(0 {LINE})">{written.drawing}</g></g>'
        )
        start, done, shown, end = (
            100 * (i * seconds + after) / total for after in (0, TYPING, TYPING + PAUSE, seconds)
        )
        last = f"{end:.3f}% {{ opacity: 0 }}" if i + 1 < len(scenes) else ""
        moves.append(
            f"@keyframes s{i} {{ 0% {{ opacity: {int(i == 0)} }} {start:.3f}% {{ opacity: 1 }} {last} }}\n"
            f"@keyframes o{i} {{ 0% {{ opacity: 0 }} {shown:.3f}% {{ opacity: 1 }} }}\n"
            f"@keyframes t{i} {{ 0%, {start:.3f}% {{ transform: translateX({2 * CHARACTER}px); "
            f"animation-timing-function: steps({len(command)}) }} "
            f"{done:.3f}%, 100% {{ transform: translateX({(2 + len(command)) * CHARACTER}px) }} }}\n"
            + "".join(f".{part}{i} {{ animation: {part}{i} {total}s step-end infinite }}\n" for part in "sot")
        )
    box = f"0 0 {width + 2 * MARGIN:.0f} {height + 2 * MARGIN:.0f}"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img">
<title>{len(scenes)} commands in a terminal, and the heat maps that they print</title>
<style>
text {{ font: 20px "Fira Code", "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space: pre }}
.scene {{ opacity: 0 }}
.s0 {{ opacity: 1 }}
.cover {{ transform: translateX({width}px) }}
{"".join(rules)}
@media (prefers-reduced-motion: no-preference) {{
{"".join(moves)}}}
</style>
<clipPath id="window"><rect width="{width}" height="{height}"/></clipPath>
<rect width="100%" height="100%" rx="8" fill="rgb{DARK}"/>
<g transform="translate({MARGIN} {MARGIN})" clip-path="url(#window)">
{"".join(groups)}
</g>
</svg>
"""


class _Lines(NamedTuple):
    styles: str
    drawing: str


def _lines(ansi: str, name: str) -> _Lines:
    """Lines of a terminal, drawn by rich, without the window that it puts around them."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor", legacy_windows=False)
    console.print(Text.from_ansi(ansi.rstrip()), soft_wrap=True)
    svg = console.export_svg(theme=THEME, code_format="{styles}\0{backgrounds}{matrix}", unique_id=name)
    styles, drawing = svg.split("\0")
    drawing = re.sub(r' (clip-path="[^"]*"|shape-rendering="crispEdges")', "", drawing)
    return _Lines(styles, re.sub(r"\n\s*", "", drawing))


if __name__ == "__main__":
    IMAGE.write_text(draw([run(command) for command in COMMANDS]), encoding="utf-8")
