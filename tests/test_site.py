"""The manual as a site: everything is in its place, and nothing is fetched from elsewhere."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from html import unescape

import pytest

import noiser
import noiser.errors
from pages import ROOT

if any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")):
    pytest.skip("MkDocs is not installed: pip install --group docs", allow_module_level=True)

FETCHED = r"<(?:script|img|iframe|link|source)\b[^>]*>"
HARMLESS = r"""rel=["']?(canonical|next|prev|alternate)"""  # links that a browser does not fetch


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


@pytest.mark.slow
def test_pages_fetch_nothing_from_elsewhere(site):
    for path in site.rglob("*.html"):
        for tag in re.findall(FETCHED, path.read_text(encoding="utf-8")):
            assert re.search(HARMLESS, tag) or not re.search(r"""(src|href)=["']?(https?:)?//""", tag), (path.name, tag)
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"@import|url\(['\"]?(https?:)?//", text), path.name


@pytest.mark.slow
def test_reference_shows_what_is_public(site):
    text = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").rglob("*.html"))
    for name in noiser.__all__:
        if not name.startswith("__"):
            assert re.search(rf'id="[\w.]+\.{name}"', text), name


@pytest.mark.slow
def test_every_error_has_a_page_that_says_what_to_do(site):
    index = (site / "llms.txt").read_text(encoding="utf-8")
    overview = (site / "reference/errors.html").read_text(encoding="utf-8")
    for name in (name for name in vars(noiser.errors) if name.endswith("Error")):
        page = (site / f"reference/errors/{name}.html").read_text(encoding="utf-8")
        line, *more = filter(None, inspect.getdoc(getattr(noiser.errors, name)).splitlines())
        for part in (line, *more):
            assert part.partition("`")[0].partition("'")[0] in unescape(page), (name, part)
        assert f"](reference/errors/{name}.html): {line}" in index
        assert f'href="errors/{name}.html"' in overview


@pytest.mark.slow
def test_notebooks_are_pages_with_their_outputs(site):
    page = (site / "notebooks/quickstart.html").read_text(encoding="utf-8")
    assert "noiser-att" in page
    assert (site / "notebooks/quickstart.ipynb").is_file()
