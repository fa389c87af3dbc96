"""`noiser attribute` and `noiser compare`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from noiser.cli import options as o
from noiser.cli.parsing import check_writable, parse_parameters, parse_prompt
from noiser.cli.progress import progress_bar
from noiser.errors import ParameterError

if TYPE_CHECKING:
    from noiser.attribution import Attribution
    from noiser.methods import Method
    from noiser.model import LanguageModel

__all__ = ["attribute", "compare"]


@o.loads_a_model
def attribute(
    prompt: o.PromptText,
    model: o.Model = "gemma-3-270m",
    method: o.MethodName = "noiser",
    set_: o.MethodSettings = None,
    target: o.TargetText = None,
    target_id: o.TargetId = None,
    max_new_tokens: o.MaxNewTokens = None,
    foil: o.Foil = None,
    foil_id: o.FoilId = None,
    unit: o.AnyUnitName = "token",
    max_forwards: Annotated[
        int | None, typer.Option(min=1, help="With --unit auto: about the most token-forwards to spend.")
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="With --unit auto: about the most seconds to spend.")
    ] = None,
    chat: o.Chat = False,
    seed: o.Seed = 0,
    loading: o.Loading = o.DEFAULT_LOADING,
    format_: o.Format = "text",
    output: o.Output = None,
    debug: o.Debug = False,
) -> None:
    """Shows which parts of PROMPT made the model say what it says."""
    check_writable(output)
    asked = _question(prompt, (target, target_id), max_new_tokens, (foil, foil_id), chat=chat)
    asked |= {"unit": unit, "seed": seed, "max_forwards": max_forwards, "max_seconds": max_seconds}
    parameters = parse_parameters(set_ or ())

    from noiser.attribution.store import dumps
    from noiser.attribution.terminal import to_text
    from noiser.methods import make_method

    chosen = make_method(method, **parameters)
    lm = loading.load(model)
    att = _attribute(lm, chosen, asked, "Attributing")
    plain = output is not None
    forms = {"text": lambda: to_text(att, plain=plain) + "\n", "json": lambda: dumps(att), "html": att.to_html}
    o.write(forms[format_](), output, format_)


@o.loads_a_model
def compare(
    prompt: o.PromptText,
    methods: Annotated[str, typer.Option(help="Names, with commas between them; see: noiser methods.")] = (
        "noiser,occlusion,integrated_gradients"
    ),
    model: o.Model = "gemma-3-270m",
    target: o.TargetText = None,
    target_id: o.TargetId = None,
    max_new_tokens: o.MaxNewTokens = None,
    foil: o.Foil = None,
    foil_id: o.FoilId = None,
    unit: o.AnyUnitName = "token",
    chat: o.Chat = False,
    seed: o.Seed = 0,
    loading: o.Loading = o.DEFAULT_LOADING,
    format_: o.Format = "text",
    output: o.Output = None,
    debug: o.Debug = False,
) -> None:
    """Shows the attributions of several methods side by side."""
    check_writable(output)
    asked = _question(prompt, (target, target_id), max_new_tokens, (foil, foil_id), chat=chat)
    asked |= {"unit": unit, "seed": seed}
    names = [name.strip() for name in methods.split(",") if name.strip()]
    if not names:
        raise ParameterError(f"--methods: got {methods!r}, expected names with commas between them.")

    from noiser.attribution.html import compare_html
    from noiser.attribution.terminal import compare_text
    from noiser.methods import make_method

    chosen = [make_method(name) for name in names]
    lm = loading.load(model)
    found = [_attribute(lm, method, asked, name) for name, method in zip(names, chosen, strict=True)]
    if format_ == "json":
        text = json.dumps([att.to_dict() for att in found], ensure_ascii=False, indent=1)
    else:
        text = compare_html(found) if format_ == "html" else compare_text(found, plain=output is not None)
    o.write(text.rstrip("\n") + "\n", output, format_)


def _question(
    prompt: str,
    targets: tuple[str | None, int | None],
    max_new_tokens: int | None,
    foils: tuple[str | None, int | None],
    *,
    chat: bool,
) -> dict[str, Any]:
    target, foil = _text_or_id("target", *targets), _text_or_id("foil", *foils)
    if target is not None and max_new_tokens is not None:
        raise ParameterError("The target and --max-new-tokens: got both, expected one. The target says its own length.")
    return {
        "prompt": parse_prompt(prompt, chat=chat),
        "target": target,
        "foil": foil,
        "max_new_tokens": max_new_tokens or 1,
    }


def _text_or_id(name: str, text: str | None, token: int | None) -> str | int | None:
    if text is not None and token is not None:
        raise ParameterError(f"--{name} and --{name}-id: got both, expected one.")
    return token if text is None else text


def _attribute(lm: LanguageModel, method: Method, asked: dict[str, Any], label: str) -> Attribution:
    from noiser.methods import attribute as run

    with progress_bar(label) as progress:
        return run(lm, method=method, progress=progress, **asked)
