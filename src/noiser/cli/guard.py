"""`noiser guard`: whether the user or a tool's result asks for a call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from noiser.cli import options as o
from noiser.errors import ParameterError, PromptError
from noiser.files import json_messages
from noiser.types import ASKED


def guard(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A chat in JSON whose last message is the assistant's, with the call; or a "
            "request in OpenAI's form. - reads stdin.",
        ),
    ],
    model: o.Model = "gemma-3-270m",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=ACTION",
            help="allow, refuse or check calls of functions, as in get_*=allow; repeatable.",
        ),
    ] = None,
    limit: Annotated[
        float, typer.Option(help="The user asks for a call that loses so many nats without them.")
    ] = ASKED,
    loading: o.Loading = o.LOADING,
    output: o.Output = o.OUTPUT,
) -> None:
    """Says whether the user or a tool's result asks for the call at the end of a chat.

    Exit status 1 where the call is not to be made: neither asked for by the user nor allowed. Read
    docs/howto/guard.md for how often that is right.
    """
    messages = json_messages(o.text_of(file))
    if messages is None:
        raise PromptError(f"{file} is no chat; expected a JSON list of messages.")
    actions = _parse_policy(policy or ())
    from noiser.explain import guard as run

    found = run(loading.load(model), messages, policy=actions, limit=limit)
    output.write(found)
    if not found.ok:
        raise typer.Exit(1)


def _parse_policy(pairs: Sequence[str]) -> dict[str, Any]:
    """From patterns of functions' names to actions, of texts such as "get_*=allow"."""
    policy: dict[str, Any] = {}
    for pair in pairs:
        pattern, equals, action = pair.partition("=")
        if not equals or not pattern:
            raise ParameterError(
                f"--policy: got {pair!r}, expected a function and what becomes of its calls, such "
                "as --policy 'get_*=allow'."
            )
        policy[pattern] = action
    return policy
