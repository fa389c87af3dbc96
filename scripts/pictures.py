"""Asks the web page real questions in Chromium and takes the manual's pictures: `python scripts/pictures.py`.

The page is served with the built-in models, as `noiser serve` does. `docs/images/web.png` shows an answer with a
tolerance chart; `docs/images/page.webp` is an animation of a question, a unit's tolerance and an answer with citations.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).parent.parent / "docs" / "images"
WIDTH, HEIGHT = 1280, 800
SCALE = 0.75
"""Of the animation, whose pictures are smaller than the browser's window."""
MILLISECONDS = 600_000
"""How long a model may take, on a machine that is busy."""


@contextmanager
def served() -> Iterator[str]:
    """The page in a process of its own; its address."""
    command = [sys.executable, "-m", "noiser", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield re.findall(r"http://\S+", process.stdout.readline())[0]
        finally:
            process.terminate()


def done(page: Page) -> None:
    """Waits for the whole answer."""
    page.locator("#status", has_text="Done in").wait_for()
    # The seconds are those of the machine that takes the pictures, and of what else it does.
    page.evaluate("document.querySelector('#status span').textContent = 'Done.'")


def example(page: Page, name: str) -> None:
    """Asks an example."""
    page.get_by_role("link", name=name, exact=True).click()
    done(page)


def draw_tolerance(page: Page, unit: str) -> None:
    """Clicks a unit of the heat map and waits for its chart."""
    page.locator("#answer .map .u", has_text=unit).first.click()
    page.locator("#chart svg").wait_for()
    done(page)


def picture(page: Page) -> Image.Image:
    """What the window shows."""
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


def save_animation(pictures: list[Image.Image], seconds: list[float], path: Path) -> None:
    """Writes pictures that follow each other for ever."""
    size = round(WIDTH * SCALE), round(HEIGHT * SCALE)
    first, *others = (each.resize(size, Image.Resampling.LANCZOS) for each in pictures)
    durations = [round(1000 * each) for each in seconds]
    first.save(path, save_all=True, append_images=others, duration=durations, loop=0, quality=70, method=6)


def main() -> None:
    """Takes both pictures."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with served() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.set_default_timeout(MILLISECONDS)
        page.goto(address)
        done(page)
        pictures = [picture(page)]
        example(page, "Why not a foil?")
        pictures.append(picture(page))
        draw_tolerance(page, "keys")
        page.locator("#chart").scroll_into_view_if_needed()
        pictures.append(picture(page))
        page.set_viewport_size({"width": WIDTH, "height": 1200})
        page.evaluate("scrollTo(0, 0)")
        page.locator("#answer .map .u", has_text="keys").hover()
        page.wait_for_timeout(500)
        page.screenshot(path=IMAGES / "web.png")
        page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        example(page, "Citations")
        page.evaluate("scrollTo(0, 0)")
        page.locator("#answer .s").first.hover()
        pictures.append(picture(page))
        browser.close()
    save_animation(pictures, [3.0, 4.0, 4.0, 4.0], IMAGES / "page.webp")


if __name__ == "__main__":
    main()
