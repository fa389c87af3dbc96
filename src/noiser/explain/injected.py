"""Whether the user's words, or a tool's result, ask for an action."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import cast

from noiser.engine import Predict, Query, remover
from noiser.methods import Scores
from noiser.tensors import floats
from noiser.types import ASKED, Span


async def user_loss(query: Query) -> float:
    """The nats that the targets lose when the text of all user's messages is taken out."""
    messages = roles_of(query)
    users = [message for message, role in messages.items() if role == "user"]
    (loss,) = await message_losses(query, [users])
    return loss


def tool_messages(query: Query) -> list[int]:
    """The indices of the messages with tools' results, in their order."""
    return [message for message, role in roles_of(query).items() if role == "tool"]


def roles_of(query: Query) -> dict[int, str]:
    """The role of each message that has text in the rendered chat, by its index."""
    messages = cast("Sequence[Mapping[str, str]]", query.prompt)
    roles: dict[int, str] = {}
    for message, _, _ in query.encoding.contents:
        if message >= 0:  # documents of the template have an index below 0
            roles[message] = messages[message]["role"]
    return roles


async def tools_loss(query: Query) -> float:
    """The nats that the targets lose without all tools' results; 0 where there are none."""
    tools = tool_messages(query)
    if not tools:
        return 0.0
    (loss,) = await message_losses(query, [tools])
    return loss


async def loss_of_each_tool(query: Query, together: float) -> dict[int, float]:
    """The nats that the targets lose without each tool's result, by its message.

    `together` is the loss without all of them, which is that of the only one.
    """
    tools = tool_messages(query)
    if len(tools) == 1:
        return {tools[0]: together}
    losses = await message_losses(query, [[tool] for tool in tools])
    return dict(zip(tools, losses, strict=True))


async def message_losses(query: Query, groups: Sequence[Collection[int]]) -> list[float]:
    """For each group of messages, the nats that the targets lose when its text is taken out."""
    remove = remover(query, "delete")
    read = query.objective("logprob")
    changes = [remove.perturbation(positions_of(query, messages), None) for messages in groups]
    answers = await Predict(query, changes, read)
    whole = query.read_clean(read).sum()
    return [float(whole - answer[:, 0].sum()) for answer in answers]


def positions_of(query: Query, messages: Collection[int]) -> list[int]:
    """The positions of the tokens of some messages' text, without those of the template."""
    encoding = query.encoding
    places = [(start, end) for message, start, end in encoding.contents if message in messages]
    positions: list[int] = []
    for position, (start, _) in enumerate(encoding.offsets[: query.prompt_tokens]):
        is_inside = any(first <= start < end for first, end in places)
        if is_inside and not encoding.frozen[position]:
            positions.append(position)
    return positions


async def injected_messages(query: Query, units: Sequence[Span], scores: Scores) -> list[int]:
    """Indices of tools' messages that speak for the only target, which the user did not ask for.

    A message speaks for it with more than two standard errors, and at least half of the strongest
    message's score. Only where there is one, the user's words are taken out: the target was not
    asked for if it loses less than `ASKED` nats.
    """
    if len(scores.scores) != 1:
        return []
    roles = roles_of(query)
    if "user" not in roles.values():
        return []
    tools = _scores_of(query, units, scores, tool_messages(query))
    strongest = max((score for score, _ in tools.values()), default=0.0)
    half_of_strongest = strongest / 2
    speaking: list[int] = []
    for message, (score, stderr) in tools.items():
        is_significant = score > 2 * stderr
        if score >= half_of_strongest and is_significant:
            speaking.append(message)
    if not speaking or await user_loss(query) >= ASKED:
        return []
    return speaking


def _scores_of(
    query: Query, units: Sequence[Span], scores: Scores, messages: Sequence[int]
) -> dict[int, tuple[float, float]]:
    """For each message, the sum of its units' scores, and its standard error."""
    row = scores.scores[0].nan_to_num()
    errors = [0.0] * len(units)
    if scores.stderr is not None:
        errors = floats(scores.stderr[0].nan_to_num())
    found: dict[int, tuple[float, float]] = {}
    for message in messages:
        places = [(start, end) for index, start, end in query.encoding.contents if index == message]
        inside = [column for column, unit in enumerate(units) if _begins_in(unit, places)]
        if inside:
            score = float(row[inside].sum())
            stderr = math.hypot(*(errors[column] for column in inside))
            found[message] = (score, stderr)
    return found


def _begins_in(unit: Span, places: Sequence[tuple[int, int]]) -> bool:
    """Whether a unit begins in one of the places."""
    return any(start <= unit.start < end for start, end in places)
