"""The animated terminal of the README: drawn from what commands print, and without anything from elsewhere."""

from __future__ import annotations

import re
import sys
from xml.etree import ElementTree

from pages import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from terminal import COLUMNS, COMMANDS, IMAGE, Scene, draw

LONG = "\x1b[1;38;2;0;0;0;48;2;230;159;0mLeBron\x1b[0m plays\n  rank 1\n"


def words(svg: str) -> str:
    drawing = ElementTree.fromstring(svg)
    return " ".join(
        "".join(node.itertext()).replace("\xa0", " ") for node in drawing.iter() if node.tag.endswith("text")
    )


def test_scenes_follow_each_other_and_colours_stay():
    svg = draw([Scene("noiser methods", "one\n"), Scene("noiser attribute x", LONG)])
    assert re.findall(r"\$ noiser \w+", words(svg)) == ["$ noiser methods", "$ noiser attribute"]
    assert "LeBron" in words(svg)
    assert "fill: #000000;font-weight: bold" in svg
    assert 'fill="#e69f00"' in svg
    assert svg.count("@keyframes") == 6
    assert "0.000% { opacity: 1 } 50.000% { opacity: 0 }" in svg  # the first of two


def test_stored_image_is_small_complete_and_self_contained():
    svg = IMAGE.read_text(encoding="utf-8")
    assert len(svg) < 500_000
    shown = re.sub(r"\s+", " ", words(svg))
    for command in COMMANDS:
        assert len(f"$ {command}") <= COLUMNS
        assert f"$ {command}" in shown
    assert "basketball" in shown
    assert {*re.findall(r"https?://[^\"\s<]*", svg)} == {"http://www.w3.org/2000/svg"}
    assert "url(" not in svg.replace("url(#window)", "")
