"""Draws the pictures of the manual with the library itself: python scripts/pictures.py [NAME ...].

Needs the built-in models, matplotlib, and Chromium by playwright. `web.png` needs `pip install
'noiser[app]'` as well.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from PIL import Image

import noiser

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))

from pages import blocks  # noqa: E402
from server_processes import free_port, running  # noqa: E402

IMAGES = ROOT / "docs" / "images"
ANNA = "Anna, who left Germany as a child and now lives in Lisbon, speaks fluent"
LOGPROB = noiser.Occlusion(objective="logprob")
SENTENCES = {"unit": "sentence", "method": LOGPROB}
GEMMA, SMOL = "gemma-3-270m", "smollm2-135m-instruct"
LUTE = "Mira keeps the lute in the attic."
MIRA = [LUTE, "Tobias keeps the drum in the barn.", LUTE, "It rains in the hills."]
TWICE = (
    " ".join(MIRA)
    + "\nQuestion: Where does Mira keep the lute?\nAnswer: Mira keeps the lute in the"
)
BANK = [
    {"role": "system", "content": "You are the assistant of a bank. Be brief."},
    {
        "role": "user",
        "content": "The machine at the station swallowed my card. What happened to my card?",
    },
]
MUSEUM = [
    ("opening hours", "The museum opens at nine and closes at six. Tickets cost eight euros."),
    ("rules", "On Mondays the museum is closed. Dogs have to wait outside."),
    ("café", "The café on the first floor sells soup and cake. It closes at five."),
]
TICKET = "How much does a ticket cost, and where can I eat?"
LUTES = (
    "Mira has two lutes. Jonas has one drum. Mira buys one more lute. How many lutes does Mira "
    "have?"
)
STEPS = " Mira had two lutes. She bought one more. Two and one are three. So Mira has three lutes."
STEPWISE = {"target": STEPS, "target_unit": "sentence", **SENTENCES}
OTHER_LIBRARIES = "captum:ShapleyValueSampling", "inseq:integrated_gradients"
OTHERS = "attn_lrp", "last_attention", "position"


def web(name: str) -> None:
    """The page after a question, a click on a word, and a test."""
    query, port = "?prompt=Anna+was+born+in+Lisbon.+Her+mother+tongue+is", free_port()

    def click(page: Any) -> None:
        for _ in range(2):  # the second time with the model loaded
            page.reload()
            page.locator("#after").wait_for(timeout=500_000)
        page.get_by_role("button", name="Test it").click()
        page.locator("#tested .says").first.wait_for(timeout=500_000)
        page.locator("#answer .u").nth(4).click()
        page.set_viewport_size({"width": 1180, "height": 900})
        page.evaluate("scrollTo(0, 0)")

    with running([sys.executable, "-m", "noiser", "serve", "--port", str(port)], port, path=""):
        _shot(name, 1180, click, address=f"http://127.0.0.1:{port}/{query}")


def insertion(name: str) -> None:
    """Words are put back, best first: by joint, by position and at random."""
    prompt = (
        "LeBron James, who has four children and a large house in California, professionally "
        "plays the sport of"
    )
    game = noiser.Game(_model(GEMMA), prompt, unit="word", objective="prob", target=" basketball")
    scores = _ask(prompt, target=" basketball", method="joint").scores[0]
    units, rng = len(scores), torch.Generator().manual_seed(0)

    def curve(order: torch.Tensor) -> torch.Tensor:
        return game(torch.arange(units + 1)[:, None] > order.argsort())[0]

    drawn = torch.stack([curve(torch.randperm(units, generator=rng)) for _ in range(10)])
    curves = {
        "joint": curve(scores.argsort(descending=True)),
        "position (last word first)": curve(torch.arange(units).flip(0)),
        "random (mean of ten orders)": drawn.mean(0),
    }
    axes = pd.DataFrame(curves).plot(
        style=["-o", "--s", ":^"], color=["#e69f00", "#0072b2", "#555555"], ms=3.5
    )
    limits = {"xlim": (0, units), "ylim": (0, 0.85), "xticks": range(0, units, 2)}
    axes.set(xlabel="words put back", ylabel="p(“ basketball”)", **limits)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncol=3, fontsize=8.5)
    axes.figure.set(size_inches=(6.5, 2.9), layout_engine="tight")
    _save(name, partial(axes.figure.savefig, dpi=160))


_model = cache(noiser.load_model)


def _ask(prompt: Any, model: str = GEMMA, **question: Any) -> noiser.Attribution:
    return noiser.attribute(_model(model), prompt, **{"unit": "word"} | question)


def _first(page: str, name: str) -> Any:
    """What the first Python code of a page of the manual calls by that name."""
    names: dict[str, Any] = {"chat": _model(SMOL)}
    exec(blocks(f"docs/{page}.md", "python")[0], names)
    return names[name]


def _of_a_picture() -> noiser.Attribution:
    """An answer of the tests' toy about a picture; it is trained for that in two minutes."""
    from toy_images import PLACES, chat_of, draw, train

    image, _ = draw(random.Random(17), scale=8)
    chat = chat_of(PLACES[3], image)
    lm = noiser.wrap(*train())
    return noiser.attribute(lm, chat, method="occlusion", image_unit=(2, 2), max_new_tokens=1)


def _plot(name: str, prompt: str, methods: Sequence[Any], **question: Any) -> None:
    first, *others = (_ask(prompt, method=method, **question) for method in methods)
    _save(name, partial(first.plot(*others).savefig, dpi=160))


def _save(name: str, write: Callable[[Path], Any]) -> None:
    """Keeps what is drawn in a palette of 128 colours: a third of the bytes."""
    path = IMAGES / f"{name}.png"
    write(path)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


def _shot(
    name: str, width: int, ready: Callable[[Any], None], address: str = "about:blank"
) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": width, "height": 100}, device_scale_factor=2)
        page.goto(address)
        ready(page)
        _save(name, lambda path: page.screenshot(path=path, full_page=True))
        browser.close()


def _html(
    name: str, found: Callable[[], Any], width: int = 760, opened: str = "", **options: Any
) -> None:
    """A result's page; `opened` is the heading of a folded part that is shown open."""

    def show(page: Any) -> None:
        page.set_content(found().to_html(**options))
        if opened:
            page.get_by_text(opened, exact=True).click()

    _shot(name, width, show)


PICTURES: dict[str, Callable[[str], None]] = {
    "foil": partial(_html, found=lambda: _first("read", "att")),
    "edits": partial(_html, found=lambda: _first("howto/edits", "found")),
    "rules": partial(_html, found=lambda: _first("howto/rules", "found")),
    "pairs": partial(
        _html, opened="pairs that act together", found=lambda: _first("howto/pairs", "att")
    ),
    "agents": partial(_html, found=lambda: _first("howto/agents", "att")),
    "chat": partial(
        _html, found=lambda: _ask(BANK, SMOL, max_new_tokens=30, target_unit="all", **SENTENCES)
    ),
    "picture": partial(_html, found=_of_a_picture),
    "citations": partial(
        _html, width=860, found=lambda: noiser.cite(_model(SMOL), TICKET, MUSEUM, max_new_tokens=60)
    ),
    "through": partial(
        _html, width=860, targets=[-1], found=lambda: _ask(LUTES, **STEPWISE).through()
    ),
    "twice": partial(_plot, prompt=TWICE, methods=[LOGPROB, "joint"], sources=MIRA, unit="source"),
    "figure": partial(
        _plot, prompt="LeBron James professionally plays the sport of", methods=["joint", LOGPROB]
    ),
    "neighbours": partial(
        _plot, prompt="The Eiffel Tower stands in the city of", methods=["joint", *OTHER_LIBRARIES]
    ),
    "methods": partial(
        _plot, prompt=ANNA, methods=["joint", "noiser", LOGPROB, *OTHERS], target=" Portuguese"
    ),
    "insertion": insertion,
    "web": web,
}

if __name__ == "__main__":
    for chosen in sys.argv[1:] or PICTURES:
        print(chosen)
        PICTURES[chosen](chosen)
