"""Chat endpoints with planted logic, which answer in the forms that vendors document."""

import json
import random
import threading
from contextlib import suppress

from server_processes import Handler, served_by


class Planted:
    """An endpoint whose answer follows from which sentences a prompt has.

    Args:
        logic: from the texts of the messages, joined by newlines, to the answer: a text; a list of
            (function, arguments) that it calls; or an int, the status of an error.
        noise: the share of requests that get another answer, drawn from `seed` and the text, so
            that the order in which requests of several texts arrive changes nothing.
        trouble: from the number of the request to a `Fault`, or None.
        seconds: how long each answer takes.
    """

    path = "/v1/chat/completions"

    def __init__(self, logic, *, noise=0.0, seed=0, trouble=lambda number: None, seconds=0.0):
        self.logic, self.noise, self.trouble, self.seconds = logic, noise, trouble, seconds
        self.seed, self.draws = seed, {}
        self.lock, self.closing = threading.Lock(), threading.Event()
        self.bodies, self.headers = [], []
        self.at_once = self.most_at_once = 0
        self.serving = served_by(_handler(self))

    def __enter__(self):
        self.url = self.serving.__enter__() + self.path.removesuffix("/chat/completions")
        return self

    def __exit__(self, *_):
        self.closing.set()
        self.serving.__exit__(None, None, None)

    def prompt(self, body):
        texts = []
        for message in body["messages"]:
            content = message.get("content") or ""
            if isinstance(content, list):
                content = "\n".join(part["text"] for part in content)
            texts.append(content)
        return "\n".join(texts)

    def draw(self, text):
        """A number in [0, 1), of a sequence that belongs to the text."""
        with self.lock:
            return self.draws.setdefault(text, random.Random(f"{self.seed}/{text}")).random()

    def refusal(self, body):
        """The status and the error of a request that is refused, or None."""

    def reply(self, body):
        """The status and the body of the answer to a request."""
        refused = self.refusal(body)
        if refused:
            return refused
        text = self.prompt(body)
        answer = self.logic(text)
        if self.noise and self.draw(text) < self.noise:
            answer = f"other {self.draw(text)}"
        if isinstance(answer, int):
            return answer, self.error("a request that fails")
        if answer == "FILTERED":
            return self.filtered(body)
        return 200, self.completion(body, answer)

    def filtered(self, body):
        """The answer that a filter took away."""
        found = self.completion(body, "")
        found["choices"][0] |= {"finish_reason": "content_filter"}
        return 200, found

    def error(self, text, **fields):
        return {"error": {"message": text, "type": "invalid_request_error", **fields}}

    def completion(self, body, answer):
        message = {"role": "assistant", "content": answer, "refusal": None}
        finish = "stop"
        if isinstance(answer, list):
            calls = []
            for number, (name, arguments) in enumerate(answer):
                function = {"name": name, "arguments": json.dumps(arguments)}
                calls.append({"id": f"call_{number}", "type": "function", "function": function})
            message = {"role": "assistant", "content": None, "tool_calls": calls}
            finish = "tool_calls"
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "planted-2026-11",
            "system_fingerprint": "fp_1",
            "choices": [
                {"index": 0, "message": message, "logprobs": self.logprobs(body, answer)}
                | {"finish_reason": finish}
            ],
            "usage": {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12},
        }

    def logprobs(self, body, answer):
        return None


class OpenAI(Planted):
    """As platform.openai.com documents it; `reasons` for models that take no temperature."""

    def __init__(self, logic, *, reasons=False, alternatives=None, **options):
        super().__init__(logic, **options)
        self.reasons, self.alternatives = reasons, alternatives

    def refusal(self, body):
        if not self.reasons:
            return None
        if "max_tokens" in body:
            text = (
                "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
                "'max_completion_tokens' instead."
            )
            return 400, self.error(text, param="max_tokens", code="unsupported_parameter")
        if body.get("logprobs"):
            text = "You are not allowed to request logprobs from this model"
            return 403, self.error(text, param=None, code=None)
        if body.get("temperature", 1) != 1:
            text = (
                "Unsupported value: 'temperature' does not support 0 with this model. Only the "
                "default (1) value is supported."
            )
            return 400, self.error(text, param="temperature", code="unsupported_value")
        return None

    def logprobs(self, body, answer):
        if not body.get("logprobs") or self.alternatives is None:
            return None
        top = self.alternatives(self.prompt(body))
        said = {"token": top[0][0], "logprob": top[0][1], "bytes": None}
        listed = [{"token": token, "logprob": value, "bytes": None} for token, value in top]
        return {"content": [said | {"top_logprobs": listed}], "refusal": None}


class Azure(OpenAI):
    """As learn.microsoft.com documents Azure's: a prompt that is filtered is an error."""

    def filtered(self, body):
        text = "The response was filtered due to the prompt triggering the content policy."
        inner = {"code": "ResponsibleAIPolicyViolation"}
        error = self.error(text, param="prompt", code="content_filter", innererror=inner)
        return 400, error


class Refusing(OpenAI):
    """OpenAI's, whose model refuses: a text of its own, without content."""

    def filtered(self, body):
        found = self.completion(body, None)
        found["choices"][0]["message"]["refusal"] = "I'm sorry, I can't help with that."
        return 200, found


class Anthropic(Planted):
    """As docs.anthropic.com documents its OpenAI-compatible address.

    Most fields are ignored; `logprobs`, `refusal` and `system_fingerprint` are always empty; system
    messages are joined at the beginning; temperatures end at 1; empty texts are refused. Overload
    has a status of its own, 529. A refusal ends with "refusal".
    """

    def filtered(self, body):
        found = self.completion(body, "")
        found["choices"][0] |= {"finish_reason": "refusal"}
        return 200, found

    def refusal(self, body):
        for message in body["messages"]:
            if not message.get("content"):
                text = "messages: text content blocks must be non-empty"
                return 400, self.error(text)
        return None

    def completion(self, body, answer):
        found = super().completion(body, answer)
        del found["system_fingerprint"]
        found["choices"][0]["message"].pop("refusal", None)
        return found


class Gemini(Planted):
    """As ai.google.dev documents its OpenAI-compatible address: another path, and fewer fields.

    An answer that is filtered has no content, errors stand in a list, and unknown fields are
    refused. A model that `thinks` counts that in the total and in `max_tokens` alone.
    """

    path = "/v1beta/openai/chat/completions"

    def __init__(self, logic, *, thinks=0, **options):
        super().__init__(logic, **options)
        self.thinks = thinks

    def refusal(self, body):
        for name in ("logprobs", "top_logprobs", "seed"):
            if name in body:
                text = f'Invalid JSON payload received. Unknown name "{name}": Cannot find field.'
                return 400, self.error(text)
        return None

    def error(self, text, **fields):
        return [{"error": {"code": 400, "message": text, "status": "INVALID_ARGUMENT"}}]

    def filtered(self, body):
        found = self.completion(body, "")
        found["choices"][0] |= {"message": {"role": "assistant"}, "finish_reason": "content_filter"}
        return 200, found

    def completion(self, body, answer):
        found = super().completion(body, answer)
        choice = found["choices"][0]
        del found["system_fingerprint"], choice["logprobs"]
        choice["message"].pop("refusal", None)
        found["usage"]["total_tokens"] += self.thinks
        if self.thinks >= body.get("max_tokens", 10**6):
            choice |= {"message": {"role": "assistant"}, "finish_reason": "length"}
        return found


class Ollama(Planted):
    """As Ollama's documentation has it."""

    def completion(self, body, answer):
        found = super().completion(body, answer)
        found["system_fingerprint"] = "fp_ollama"
        found["choices"][0]["message"].pop("refusal", None)
        del found["choices"][0]["logprobs"]
        return found


class Fault:
    """A response in place of an answer: a status, with headers; or a reply that is cut."""

    def __init__(self, status=200, *, cut=False, seconds=0.0, **headers):
        self.status, self.cut, self.seconds, self.headers = status, cut, seconds, headers


def _handler(owner):
    class Chat(Handler):
        protocol_version = "HTTP/1.1"

        def get(self):
            models = {"object": "list", "data": [{"id": "planted", "object": "model"}]}
            self.answer(json.dumps(models).encode())

        def stream(self, body):
            """The answer word by word, as server-sent events."""
            head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "planted"}
            lines = []
            for piece in owner.logic(owner.prompt(body)).split(" "):
                choice = {"index": 0, "delta": {"content": f"{piece} "}, "finish_reason": None}
                lines.append(f"data: {json.dumps(head | {'choices': [choice]})}\n\n")
            content = "".join([*lines, "data: [DONE]\n\n"]).encode()
            self.answer(content, kind="text/event-stream")

        def post(self, body):
            body = json.loads(body)
            if body.get("stream"):
                self.stream(body)
                return
            with owner.lock:
                number = len(owner.bodies)
                owner.bodies.append(body)
                owner.headers.append({name.lower(): value for name, value in self.headers.items()})
                owner.at_once += 1
                owner.most_at_once = max(owner.most_at_once, owner.at_once)
            fault = owner.trouble(number)
            owner.closing.wait(owner.seconds + (fault.seconds if fault else 0))
            status, found = owner.reply(body)
            headers = {}
            if self.path != owner.path:
                status, found = 404, owner.error(f"no such page: {self.path}")
            elif fault and fault.status != 200:
                status, found, headers = fault.status, owner.error("wait"), fault.headers
            content = json.dumps(found).encode()
            with owner.lock:
                owner.at_once -= 1
            if fault and fault.cut:
                headers = {"Content-Length": str(len(content))}
                content = content[: len(content) // 2]
            with suppress(OSError):  # the client has hung up
                self.answer(content, status, **headers)
            self.close_connection = bool(fault and fault.cut)

    return Chat
