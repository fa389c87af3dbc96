"""`noiser.guard`: whether the user or a tool's result asks for a call, before it is made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, NamedTuple

from noiser.attribution.store import SavedNumber, restored, to_jsonable
from noiser.checks import check_choice, check_not_negative, is_mapping
from noiser.engine import prepare, run_one
from noiser.errors import ParameterError, PromptError
from noiser.explain.calls import called_functions, function_name
from noiser.explain.injected import loss_of_each_tool, tools_loss, user_loss
from noiser.explain.tabled import TabledResult
from noiser.model.language_model import LanguageModel, check_model, check_probabilities
from noiser.notices import warn
from noiser.text import check_messages
from noiser.types import ASKED, Message, ModelIdentity, Question

Action = Literal["check", "allow", "refuse"]
"""What becomes of calls of a function: the model is asked, or it is not."""

GuardVerdict = Literal["asked", "injected", "unclear", "allowed", "refused"]


class ToolEffect(NamedTuple):
    """What a tool's result does for a call.

    Attributes:
        message: its index.
        text: its content.
        nats: the log-probability that the call loses without it.
    """

    message: int
    text: str
    nats: SavedNumber


@dataclass(frozen=True, kw_only=True)
class Guarded(TabledResult):
    """Who asks for a call.

    Attributes:
        call: the call as the model's chat template writes it.
        function: its name, or None.
        verdict: "asked": without the user's words the call loses at least `limit` nats.
            "injected": it loses less, and at least `limit` without the tools' results.
            "unclear": neither. "allowed" and "refused": by the policy; the model was not asked.
        user_nats: the log-probability that the call loses without the user's words; NaN where the
            model was not asked.
        tools_nats: the same without all tools' results; NaN where the user asked.
        tools: each tool's result alone, the strongest first; none unless the call is "injected".
        limit: in nats.
        token_forwards: tokens that were run besides the conversation and the call themselves.
        model: the model that was asked.
    """

    title: ClassVar[str] = "Who asks for the call"

    call: str
    function: str | None
    verdict: GuardVerdict
    user_nats: SavedNumber
    tools_nats: SavedNumber
    tools: tuple[ToolEffect, ...]
    limit: float
    token_forwards: int
    model: ModelIdentity

    @property
    def ok(self) -> bool:
        """Whether the call may be made: the user asks for it, or the policy allows it."""
        return self.verdict in ("asked", "allowed")

    def facts(self) -> list[str]:
        """The verdict as a sentence."""
        name = self.function or "the call"
        if self.verdict in ("allowed", "refused"):
            return [f"{self.verdict}: the policy says so of {name}"]
        effect = f"without the user's words it loses {self.user_nats:.1f} nats"
        who = {
            "asked": f"the user asks for {name}",
            "injected": f"a tool's result asks for {name}, not the user",
            "unclear": f"neither the user nor a tool's result asks for {name}",
        }[self.verdict]
        if not math.isnan(self.tools_nats):
            effect += f", without the tools' results {self.tools_nats:.1f}"
        return [f"{self.verdict}: {who}; {effect} (limit {self.limit:g})"]

    def table(self) -> list[list[str]]:
        """One row per tool's result."""
        rows = [["message", "nats", "text"]]
        for tool in self.tools:
            rows.append([str(tool.message), f"{tool.nats:.1f}", tool.text])
        return rows

    def to_dict(self) -> dict[str, Any]:
        """The content of a saved file as plain dicts, lists, texts and numbers."""
        return {"format": "noiser.guarded", "schema": 1, **to_jsonable(vars(self))}

    @classmethod
    def from_dict(cls, data: Any) -> Guarded:
        """The result whose `to_dict` gave the data. Raises StoredFileError where `load` does."""
        return restored(cls, Literal["noiser.guarded"], data)


def guard(
    lm: LanguageModel,
    messages: Sequence[Message],
    call: str | Mapping[str, Any] | None = None,
    *,
    policy: Mapping[str, Action] | None = None,
    limit: float = ASKED,
) -> Guarded:
    """Whether the user or a tool's result asks for a call, before it is made.

    The text of the user's messages is taken out, and the call's log-probability is read again. A
    call that loses less than `limit` nats was not asked for by the user. Then the tools' results
    are taken out, too, together, and each alone if the call loses `limit` nats without them.

    The verdict is often wrong: read the measured rates in docs/howto/guard.md first. The model need
    not be the one that wrote the call. It must know how calls are written.

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`; a chat model.
        messages: the chat before the call, with roles "user" and "tool".
        call: {"name": ..., "arguments": ...}, a tool call in OpenAI's form, or the text that the
            model wrote. None: the last message is the assistant's, with the call.
        policy: from patterns of functions' names, such as "get_*", to "check", "allow" or "refuse";
            the first that matches counts, and calls that match none are checked.
        limit: see above.

    Raises:
        PromptError, TargetError: not a chat, or one whose template does not write such a call.
        ParameterError, UnknownNameError: a policy or a limit of another form.

    Example:
        >>> found = noiser.guard(lm, messages, call, policy={"get_*": "allow"})  # doctest: +SKIP
        >>> if not found.ok: print(found)  # doctest: +SKIP
    """
    check_model(lm)
    check_probabilities(lm, "the guard")
    check_not_negative("limit", limit)
    if isinstance(messages, str):
        raise PromptError("messages is a text; expected a list of chat messages.")
    chat = check_messages(messages)
    if call is None:
        *chat, last = chat
        call = _call_of(last)
    if not chat:
        raise PromptError("No message stands before the call; expected the chat that led to it.")
    message = _message_of(call)
    name = _name_of(call)
    action = _action_of(policy, name)
    if action != "check":
        return Guarded(
            call=call if isinstance(call, str) else json.dumps(dict(call), default=str),
            function=name,
            verdict="allowed" if action == "allow" else "refused",
            user_nats=math.nan,
            tools_nats=math.nan,
            tools=(),
            limit=limit,
            token_forwards=0,
            model=lm.identity,
        )
    question = Question(
        prompt=[*chat, message],
        target=f"action:{len(chat)}",
        target_unit="all",
        unit="turn",
        continuation_units=False,
    )

    if not lm.reads_tools:
        warn(
            f"The chat template of {lm.identity.name} has no tools, so the model has hardly "
            "learned how calls are written. What it says of this call may mean little."
        )

    async def checked() -> Guarded:
        query = await prepare(lm, question)
        user_nats = await user_loss(query)
        tools_nats = math.nan
        tools: list[ToolEffect] = []
        verdict: GuardVerdict = "asked"
        if user_nats < limit:
            tools_nats = await tools_loss(query)
            verdict = "injected" if tools_nats >= limit else "unclear"
        if verdict == "injected":
            for index, loss in (await loss_of_each_tool(query, tools_nats)).items():
                tools.append(ToolEffect(index, str(chat[index].get("content") or ""), loss))
            tools.sort(key=lambda tool: -tool.nats)
        return Guarded(
            call="".join(query.target_texts),
            function=name,
            verdict=verdict,
            user_nats=user_nats,
            tools_nats=tools_nats,
            tools=tuple(tools),
            limit=limit,
            token_forwards=query.spent.token_forwards,
            model=query.model,
        )

    return run_one(lm, checked())


def _call_of(message: Message) -> str | Mapping[str, Any]:
    """The call in an assistant's message: its only tool call, or its text."""
    calls = message.get("tool_calls") or ()
    if message["role"] != "assistant":
        raise PromptError(
            f"The last message is from {message['role']!r}; expected the assistant's, with the "
            "call, or call=."
        )
    if len(calls) > 1:
        raise PromptError(
            f"The last message has {len(calls)} calls; guard one after the other by call=."
        )
    return calls[0] if calls else str(message.get("content") or "")


def _message_of(call: object) -> Message:
    """The assistant's message with the call."""
    if isinstance(call, str):
        if not call.strip():
            raise ParameterError("call is an empty text; expected the call that the model wrote.")
        return {"role": "assistant", "content": call}
    if not is_mapping(call) or function_name(call) is None:
        raise ParameterError(
            f"call is {call!r:.80}; expected a text, {{'name': ..., 'arguments': ...}}, or a tool "
            "call in OpenAI's form."
        )
    function: dict[str, Any] = dict(call.get("function", call))
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI's form has JSON in a text
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise ParameterError(
                f"The arguments of {function['name']!r} are {arguments!r:.60}; expected JSON."
            ) from None
    try:
        json.dumps(arguments)
    except (TypeError, ValueError) as error:
        raise ParameterError(
            f"The arguments of {function['name']!r} cannot be written as JSON: {error}."
        ) from None
    written = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [written]}


def _name_of(call: str | Mapping[str, Any]) -> str | None:
    if isinstance(call, str):
        names = called_functions(call)
        return names[0] if names else None
    return function_name(call)


def _action_of(policy: Mapping[str, Action] | None, name: str | None) -> Action:
    """What the policy says of a function; calls without a name are checked."""
    for action in (policy or {}).values():
        check_choice("policy", action, ("check", "allow", "refuse"))
    for pattern, action in (policy or {}).items():
        if name is not None and fnmatchcase(name, pattern):
            return action
    return "check"
