"""The questions about one prompt: `noiser attribute`, `compare`, `cite`, `rule` and `diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from noiser import types
from noiser.cli import options as o
from noiser.cli.evaluate import compare_evaluations
from noiser.cli.terminal import progress_bar, say
from noiser.progress import quicker_ways
from noiser.types import Accuracy, CitedUnit


def attribute(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from stdin.")
    ],
    asked: o.QuestionOptions = o.QUESTION,
    model: o.Model = "gemma-3-270m",
    method: o.MethodName = None,
    set_: o.MethodSettings = None,
    check: o.Check = 0,
    max_seconds: o.MaxSeconds = None,
    max_calls: o.MaxCalls = None,
    seed: o.Seed = 0,
    loading: o.Loading = o.LOADING,
    output: o.Output = o.OUTPUT,
) -> None:
    """Shows which parts of PROMPT made the model say what it says."""
    from noiser.engine import OBJECTIVES, objective_of
    from noiser.explain import attribute as run
    from noiser.methods import make_method

    if method is None:
        method = "search" if model.startswith("chat:") else "joint"
    made = make_method(method, **o.parse_parameters(set_))
    question = asked.arguments(prompt)
    if question["foil"] is not None:  # what it cannot have is said before the model is loaded
        objective = getattr(made, "objective", "prob")
        if objective in OBJECTIVES.names():  # "root" of joint is none, and has a contrast
            objective_of(objective, 1)
    lm = loading.load(model)
    quicker = quicker_ways(question["unit"], method)
    with progress_bar(f"Attributing by {method}", quicker=quicker) as progress:
        options: dict[str, Any] = {"check": check, "seed": seed, "max_seconds": max_seconds}
        options["max_calls"] = max_calls
        att = run(lm, method=made, progress=progress, **options, **question)
    output.write(att)


METHODS = "joint,noiser,occlusion"  # that `noiser compare` compares


def compare(
    prompts: Annotated[
        list[str],
        typer.Argument(
            metavar="PROMPT",
            help="The prompt; - reads it from stdin. Or several files that noiser evaluate -o "
            "wrote.",
        ),
    ],
    asked: o.QuestionOptions = o.QUESTION,
    methods: Annotated[
        str, typer.Option(help="Names with commas, such as joint,occlusion:objective=logprob.")
    ] = METHODS,
    model: o.Model = "gemma-3-270m",
    seed: o.Seed = 0,
    model_options: o.Loading = o.LOADING,  # not `loading`: saved evaluations need no model
    output: o.Output = o.OUTPUT,
) -> None:
    """Shows the attributions of several methods side by side, or differences of saved evaluations.

    Exit status 1 where a method cannot answer. Of evaluations, the first minus each other, prompt
    by prompt.
    """
    if len(prompts) > 1:
        compare_evaluations(prompts, output, others_given=(asked, methods) != (o.QUESTION, METHODS))
        return
    say(f"Loading {model} ...", err=True)
    from noiser.explain import compare as run
    from noiser.methods import make_method

    names = o.parse_names("--methods", methods)
    question = asked.arguments(prompts[0])
    for name in names:
        make_method(name)
    lm = model_options.load(model)
    quicker = quicker_ways(question["unit"], *names)
    with progress_bar("Comparing", quicker=quicker) as progress:
        found = run(lm, methods=names, seed=seed, progress=progress, **question)
    output.write(found)
    for failure in found.failures:
        say(f"noiser: error: {failure}", err=True)
    if found.failures:
        raise typer.Exit(1)


def cite(
    question: Annotated[
        str, typer.Argument(metavar="QUESTION", help="The question; - reads it from stdin.")
    ],
    more: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="More sources, as --source docs/*.txt gives them."),
    ] = None,
    source: Annotated[
        list[Path] | None,
        typer.Option(
            "--source", metavar="FILE", help="A text to answer from, or a folder; repeatable."
        ),
    ] = None,
    model: o.Model = "gemma-3-270m",
    method: Annotated[
        str | None, typer.Option(help="Hides one source at a time unless given.")
    ] = None,
    set_: o.MethodSettings = None,
    answer: Annotated[
        str | None, typer.Option(help="Cite this answer; the model's own unless given.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", help="Tokens of the longest answer.")
    ] = 128,
    unit: Annotated[
        CitedUnit, typer.Option(help="auto: sources, then sentences of those that matter.")
    ] = "auto",
    accuracy: Annotated[
        Accuracy, typer.Option(help="fast: in one pass, with a check.")
    ] = "accurate",
    rule: Annotated[
        bool, typer.Option("--rule", help="The sources that each sentence needs, as a rule.")
    ] = False,
    contrast: Annotated[
        bool | None,
        typer.Option(
            "--contrast/--no-contrast",
            help="Writes an answer without the sources, too. Without a switch: beside the "
            "model's own answer.",
        ),
    ] = None,
    check: o.Check = 0,
    max_seconds: o.MaxSeconds = None,
    seed: o.Seed = 0,
    loading: o.Loading = o.LOADING,
    output: o.Output = o.OUTPUT,
) -> None:
    """Answers QUESTION from the sources and says which of them each sentence was written from."""
    prompt = str(o.parse_prompt(question))
    sources = o.documents_of([*(source or ()), *(more or ())])  # before a model is loaded
    from noiser.explain import cite as run
    from noiser.methods import Occlusion, make_method
    from noiser.registry import present_names

    if (parameters := o.parse_parameters(set_)) and method is None:
        given = present_names(Occlusion, parameters)
        parameters = {"objective": "logprob", "removal": "hidden"} | given
    chosen = make_method(method or "occlusion", **parameters) if method or parameters else None
    options: dict[str, Any] = {"answer": answer, "max_new_tokens": max_new_tokens, "unit": unit}
    options |= {"accuracy": accuracy, "check": check, "max_seconds": max_seconds, "rule": rule}
    options["contrast"] = contrast
    lm = loading.load(model)
    with progress_bar("Citing") as progress:
        found = run(lm, prompt, sources, method=chosen, seed=seed, progress=progress, **options)
    output.write(found)


def rule(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from stdin.")
    ],
    more: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="More sources, as --source docs/*.txt gives them."),
    ] = None,
    source: Annotated[
        list[Path] | None,
        typer.Option(
            "--source",
            metavar="FILE",
            help="A text that PROMPT is a question about, or a folder; repeatable.",
        ),
    ] = None,
    model: o.Model = "gemma-3-270m",
    unit: Annotated[
        types.UnitName | None,
        typer.Option(help="Parts of the prompt; sentences, or sources where there are some."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="The answer to explain; the model's own unless given.")
    ] = None,
    foil: Annotated[str | None, typer.Option(help="When is the answer likelier than this?")] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", help="Tokens of the answer; 1, of a chat's answer 40."),
    ] = None,
    same: Annotated[
        Literal["tokens", "logprob", "text"] | None,
        typer.Option(help="When answers are the same; tokens, of more than 5 tokens logprob."),
    ] = None,
    fresh: Annotated[int, typer.Option(help="Inputs that the rule is tried on.")] = 40,
    chat: o.Chat = False,
    image: o.ImageFiles = None,
    image_unit: o.ImageUnitOption = "2x2",
    image_removal: o.ImageRemovalOption = "grey",
    seed: o.Seed = 0,
    loading: o.Loading = o.LOADING,
    output: o.Output = o.OUTPUT,
) -> None:
    """Says which parts of PROMPT its answer needs, as a rule that is tried on fresh inputs."""
    asked = o.with_images(o.parse_prompt(prompt, chat=chat or bool(image)), image)
    paths = [*(source or ()), *(more or ())]
    sources = o.documents_of(paths) if paths else None  # before a model is loaded
    from noiser.explain import rule as run

    options: dict[str, Any] = {"target": target, "foil": foil, "max_new_tokens": max_new_tokens}
    options |= {"unit": unit, "same": same, "fresh": fresh, "seed": seed, "sources": sources}
    options |= {"image_unit": o.parse_image_unit(image_unit), "image_removal": image_removal}
    lm = loading.load(model)
    with progress_bar("Looking for a rule") as progress:
        found = run(lm, asked, progress=progress, **options)
    output.write(found)


def diff(
    before: Annotated[
        Path, typer.Argument(metavar="BEFORE", help="A file with the first version of the prompt.")
    ],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="A file with the edited version.")],
    model: o.Model = "gemma-3-270m",
    target: Annotated[
        str | None, typer.Option(help="The answer to explain; the one to AFTER unless given.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", help="Tokens of the longest answer.")
    ] = 16,
    chat: o.Chat = False,
    fail_above: Annotated[
        float | None,
        typer.Option(
            help="Exit status 1 if an edit moves the log-probability by more nats than this."
        ),
    ] = None,
    seed: o.Seed = 0,
    loading: o.Loading = o.LOADING,
    output: o.Output = o.OUTPUT,
) -> None:
    """Shows which edit of a prompt changed the answer, and by how much."""
    from noiser.explain import diff as run

    one, other = (o.to_prompt(o.text_of(path), chat) for path in (before, after))
    lm = loading.load(model)
    with progress_bar("Comparing") as progress:
        found = run(
            lm,
            one,
            other,
            target=target,
            max_new_tokens=max_new_tokens,
            seed=seed,
            progress=progress,
        )
    output.write(found)
    largest = max((abs(edit.score) for edit in found.edits), default=0.0)
    if fail_above is not None and largest > fail_above:
        raise typer.Exit(1)
