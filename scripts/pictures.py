"""Draws the pictures of the manual with the library itself: python scripts/pictures.py [NAME ...].

Needs the built-in models, matplotlib, and Chromium by playwright. `web.png` needs `pip install 'noiser[app]'` as well.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from PIL import Image

import noiser

IMAGES = Path(__file__).parent.parent / "docs" / "images"
ANNA = "Anna, who left Germany as a child and now lives in Lisbon, speaks fluent"
LOGPROB = noiser.Occlusion(score="logprob")


def foil() -> None:
    """Why this and not that."""
    _html("foil", _ask(ANNA, foil=" German").to_html(), 760)


def twice() -> None:
    """A fact that stands twice: one unit at a time, and several."""
    sources = ["Mira keeps the lute in the attic.", "Tobias keeps the drum in the barn."]
    sources = [*sources, sources[0], "It rains in the hills."]
    prompt = " ".join(sources) + "\nQuestion: Where does Mira keep the lute?\nAnswer: Mira keeps the lute in the"
    _plot("twice", *(_ask(prompt, sources=sources, unit="source", method=method) for method in (LOGPROB, "joint")))


def chat() -> None:
    """A chat by sentences."""
    messages = [
        {"role": "system", "content": "You are the assistant of a bank. Be brief."},
        {"role": "user", "content": "The machine at the station swallowed my card. What happened to my card?"},
    ]
    lm = _model("smollm2-135m-instruct")
    att = noiser.attribute(lm, messages, unit="sentence", max_new_tokens=30, target_unit="all", method=LOGPROB)
    _html("chat", att.to_html(), 760)


def citations() -> None:
    """An answer with its sources."""
    lm, sources = (
        _model("smollm2-135m-instruct"),
        [
            ("opening hours", "The museum opens at nine and closes at six. Tickets cost eight euros."),
            ("rules", "On Mondays the museum is closed. Dogs have to wait outside."),
            ("café", "The café on the first floor sells soup and cake. It closes at five."),
        ],
    )
    found = noiser.cite(lm, "How much does a ticket cost, and where can I eat?", sources, max_new_tokens=60)
    _html("citations", found.to_html(), 860)


def figure() -> None:
    """Two methods below each other."""
    _plot(
        "figure", *(_ask("LeBron James professionally plays the sport of", method=each) for each in ("joint", LOGPROB))
    )


def neighbours() -> None:
    """Methods of three libraries."""
    methods = "joint", "captum:ShapleyValueSampling", "inseq:integrated_gradients"
    _plot("neighbours", *(_ask("The Eiffel Tower stands in the city of", method=method) for method in methods))


def through() -> None:
    """Paths through a reasoning chain."""
    prompt = "Mira has two lutes. Jonas has one drum. Mira buys one more lute. How many lutes does Mira have?"
    steps = " Mira had two lutes. She bought one more. Two and one are three. So Mira has three lutes."
    att = _ask(prompt, target=steps, unit="sentence", target_unit="sentence", method=LOGPROB)
    _html("through", att.through().to_html(targets=[-1]), 860)


def web() -> None:
    """The page after a question with a foil."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "noiser", "serve", "--port", str(port)])
    query = "?prompt=The+keys+to+the+old+cabinet&target=+are&foil=+is&unit=word"

    def click(page: Any) -> None:
        page.locator("#after").wait_for(timeout=500_000)  # with the model loaded; then once more
        page.reload()
        page.locator("#after").wait_for(timeout=500_000)
        page.locator("#answer .u").nth(1).click()
        page.locator("#chart svg").wait_for(timeout=500_000)
        page.set_viewport_size({"width": 1180, "height": 1200})
        page.evaluate("scrollTo(0, 0)")
        time.sleep(2)

    try:
        _shot("web", f"http://127.0.0.1:{port}/{query}", 1180, click)
    finally:
        server.terminate()


def methods() -> None:
    """One prompt by six methods."""
    chosen = "joint", "noiser", LOGPROB, "attn_lrp", "last_attention", "position"
    _plot("methods", *(_ask(ANNA, target=" Portuguese", method=method) for method in chosen))


def insertion() -> None:
    """Words are put back, best first: by joint, by position and at random."""
    prompt = "LeBron James, who has four children and a large house in California, professionally plays the sport of"
    game = noiser.Game(_model(), prompt, unit="word", score="prob", target=" basketball")
    scores = _ask(prompt, target=" basketball", method="joint").scores[0]
    units, rng = len(scores), torch.Generator().manual_seed(0)

    def curve(order: torch.Tensor) -> torch.Tensor:
        return game(torch.arange(units + 1)[:, None] > order.argsort())[0]

    drawn = torch.stack([curve(torch.randperm(units, generator=rng)) for _ in range(10)])
    lines = {
        "joint": ("-o", "#e69f00", curve(scores.argsort(descending=True))),
        "position (last word first)": ("--s", "#0072b2", curve(torch.arange(units).flip(0))),
        "random (mean of ten orders)": (":^", "#555555", drawn.mean(0)),
    }
    figure, axes = plt.subplots(figsize=(6.5, 2.9), layout="tight")
    for name, (style, colour, values) in lines.items():
        axes.plot(range(units + 1), values, style, ms=3.5, color=colour, label=name)
    axes.set(xlabel="words put back", ylabel="p(“ basketball”)", xlim=(0, units), ylim=(0, 0.85))
    axes.set_xticks(range(0, units, 2))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncol=3, fontsize=8.5)
    figure.savefig(IMAGES / "insertion.png", dpi=160)
    _shrink("insertion")


@cache
def _model(name: str = "gemma-3-270m") -> noiser.LanguageModel:
    return noiser.load_model(name)


def _ask(prompt: str, **question: Any) -> noiser.Attribution:
    return noiser.attribute(_model(), prompt, **{"unit": "word"} | question)


def _plot(name: str, first: noiser.Attribution, *others: noiser.Attribution) -> None:
    first.plot(*others).savefig(IMAGES / f"{name}.png", dpi=160)
    _shrink(name)


def _html(name: str, page: str, width: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(page, encoding="utf-8")
        _shot(name, path.as_uri(), width)


def _shot(name: str, address: str, width: int, before: Callable[[Any], None] | None = None) -> None:
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 100}, device_scale_factor=2)
        for _ in range(100):  # until the server listens
            try:
                page.goto(address)
                break
            except Error:
                time.sleep(1)
        if before:
            before(page)
        page.screenshot(path=IMAGES / f"{name}.png", full_page=True)
        browser.close()
    _shrink(name)


def _shrink(name: str) -> None:
    """A palette of 128 colours: a third of the bytes."""
    path = IMAGES / f"{name}.png"
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


PICTURES = foil, twice, chat, citations, figure, neighbours, through, methods, insertion, web

if __name__ == "__main__":
    for picture in PICTURES:
        if picture.__name__ in (sys.argv[1:] or [each.__name__ for each in PICTURES]):
            print(picture.__name__)
            picture()
