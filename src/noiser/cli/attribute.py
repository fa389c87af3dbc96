"""`noiser attribute` and `noiser compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from noiser.cli import options as o
from noiser.cli.terminal import progress_bar

if TYPE_CHECKING:
    from noiser.attribution import Attribution
    from noiser.methods import Method
    from noiser.model import LanguageModel


def attribute(
    question: o.Question,
    model: o.Model = "gemma-3-270m",
    method: o.MethodName = "noiser",
    set_: o.MethodSettings = None,
    max_forwards: Annotated[
        int | None, typer.Option(min=1, help="With --unit auto: about the most token-forwards to spend.")
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="With --unit auto: about the most seconds to spend.")
    ] = None,
    loading: o.Loading = o.LOADING,
    output: o.Output = o.OUTPUT,
) -> None:
    """Shows which parts of PROMPT made the model say what it says."""
    arguments = question.arguments() | {"max_forwards": max_forwards, "max_seconds": max_seconds}
    parameters = o.parse_parameters(set_)

    from noiser.attribution.store import dumps
    from noiser.attribution.terminal import to_text
    from noiser.files import csv_text
    from noiser.methods import make_method

    chosen = make_method(method, **parameters)
    att = _attribute(loading.load(model), chosen, arguments, "Attributing")
    plain = output.output is not None
    output.write(
        {
            "text": lambda: to_text([att], plain=plain),
            "json": lambda: dumps(att),
            "html": att.to_html,
            "csv": lambda: csv_text(att.to_dataframe()),
            "md": att.to_markdown,
        }
    )


def compare(
    question: o.Question,
    methods: Annotated[str, typer.Option(help="Names, with commas between them; see: noiser methods.")] = (
        "noiser_joint,noiser,occlusion"
    ),
    model: o.Model = "gemma-3-270m",
    loading: o.Loading = o.LOADING,
    output: o.Output = o.OUTPUT,
) -> None:
    """Shows the attributions of several methods side by side."""
    arguments = question.arguments()
    names = o.parse_names("--methods", methods)

    from noiser.attribution.display import headings
    from noiser.attribution.html import page
    from noiser.attribution.terminal import to_text
    from noiser.files import csv_text, json_text
    from noiser.methods import make_method

    chosen = [make_method(name) for name in names]
    lm = loading.load(model)
    attributions = [_attribute(lm, method, arguments, name) for name, method in zip(names, chosen, strict=True)]
    plain = output.output is not None
    output.write(
        {
            "text": lambda: to_text(attributions, plain=plain),
            "json": lambda: json_text([att.to_dict() for att in attributions]),
            "html": lambda: page(attributions),
            "csv": lambda: csv_text(
                *(
                    att.to_dataframe().assign(method=heading)
                    for att, heading in zip(attributions, headings(attributions), strict=True)
                )
            ),
            "md": lambda: "\n".join(att.to_markdown() for att in attributions),
        }
    )


def _attribute(lm: LanguageModel, method: Method, arguments: dict[str, Any], label: str) -> Attribution:
    from noiser.explain import attribute as run

    with progress_bar(label) as progress:
        return run(lm, method=method, progress=progress, **arguments)
