"""Servers that complete text with a small model, each in the form of a real one."""

import json
import threading
from contextlib import contextmanager

import torch

from server_processes import Handler, served_by


class Stub:
    """A server of a model and its tokenizer; `forms` say how it answers.

    `trouble` gives a status or body in place of the answer to a numbered request; `change` changes
    log-probabilities.
    """

    def __init__(self, lm, **card):
        self.network, self.tokenizer = lm.model, lm.tokenizer
        self.card = {"id": "tiny", "object": "model", "created": 0, "owned_by": "us"} | card
        self.cards = [self.card]
        self.bodies, self.keys, self.lock = [], [], threading.Lock()
        self.drafts = []  # how many tokens each answer of several has

    def trouble(self, _number):
        return None

    def change(self, value):
        return value

    def ids(self, prompt):
        return prompt if isinstance(prompt, list) else self.tokenizer(prompt)["input_ids"]

    def text(self, token):
        return self.tokenizer.decode([token])

    @torch.no_grad()
    def rows(self, ids):
        with self.lock:
            return self.network(torch.tensor([ids])).logits[0].float().log_softmax(-1)

    def top(self, row, count):
        return row.topk(min(count, len(row))).indices.tolist()

    def value(self, row, token):
        return self.change(float(row[token]))

    def post(self, path, body):
        """The answer to a request, or the status of an error."""
        assert path == "/v1/completions"
        assert body["temperature"] == 0
        if body["max_tokens"] > 1:
            return self.written(body)
        with self.lock:
            number = len(self.bodies)
            self.bodies.append(body)
        choice = self.trouble(number) or self.choice(body)
        if isinstance(choice, int) or "choices" in choice:
            return choice
        choice = {"index": 0, "text": "", "finish_reason": "length"} | choice
        return {"id": "1", "object": "text_completion", "created": 0, "choices": [choice]}

    def written(self, body):
        """A greedy answer, or the status with which a prompt of the wrong form is refused."""
        if isinstance(self.choice(body | {"logprobs": 1, "return_tokens_as_token_ids": True}), int):
            return 422
        ids = [*self.ids(body["prompt"])]
        first = len(ids)
        while len(ids) < first + body["max_tokens"] and ids[-1] != self.tokenizer.eos_token_id:
            ids.append(int(self.rows(ids)[-1].argmax()))
        self.drafts.append(len(ids) - first)
        text = self.tokenizer.decode(ids[first:], skip_special_tokens=True)
        choice = {"index": 0, "text": text, "finish_reason": "length"}
        return {"id": "1", "object": "text_completion", "created": 0, "choices": [choice]}

    def get(self, path):
        assert path == "/v1/models"
        return {"object": "list", "data": self.cards}


class Vllm(Stub):
    """Token ids, and `prompt_logprobs` of them."""

    def choice(self, body):
        if not isinstance(body["prompt"], list):
            return 400
        assert body["return_tokens_as_token_ids"]
        ids, most = body["prompt"], body["logprobs"]
        rows = self.rows(ids)
        last = {f"token_id:{i}": self.value(rows[-1], i) for i in self.top(rows[-1], most)}
        said = next(iter(last))
        columns = {"tokens": [said], "token_logprobs": [last[said]], "top_logprobs": [last]}
        given = []
        for row, token in zip(rows, ids[1:], strict=False):
            tokens = [*self.top(row, body.get("prompt_logprobs", 1)), token]
            given.append({str(i): {"logprob": self.value(row, i), "rank": 1} for i in tokens})
        more = {"prompt_logprobs": [None, *given]} if "prompt_logprobs" in body else {}
        return {"logprobs": columns, **more}


class LlamaCpp(Stub):
    """Token ids or text, the next token alone, as before `logit_bias`; it cuts texts for others."""

    def __init__(self, lm, **card):
        vocabulary = {"n_vocab": len(lm.tokenizer), "n_ctx": 200}
        super().__init__(lm, **{"owned_by": "llamacpp", "meta": vocabulary} | card)

    def choice(self, body):
        row = self.rows(self.ids(body["prompt"]))[-1]
        wanted = [int(token) for token, bias in body.get("logit_bias", {}).items() if bias >= 100]
        said = wanted[0] if wanted else int(row.argmax())
        if "\ufffd" in self.text(said):  # a part of a character, which is held back
            return {"logprobs": None}
        top = [self.named(row, token) for token in self.top(row, body["logprobs"])]
        return {"logprobs": {"content": [self.named(row, said) | {"top_logprobs": top}]}}

    def named(self, row, token):
        return {"id": token, "token": self.text(token), "logprob": self.value(row, token)}

    def piece(self, token):
        letters = self.tokenizer.convert_ids_to_tokens(token)
        if token in self.tokenizer.all_special_ids:
            return letters
        from noiser.text.tokens import byte_level_alphabet

        found = bytes(byte_level_alphabet()[letter] for letter in letters)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return [*found]

    def post(self, path, body):
        if path == "/tokenize":
            special = body.get("add_special", False)
            text = body["content"]
            if not body.get("parse_special", True):  # tokens of the model's own text, none of names
                text = text.replace("<", "< ").replace("  ", " ")
            ids = self.tokenizer(text, add_special_tokens=special)["input_ids"]
            if body.get("with_pieces"):
                return {"tokens": [{"id": token, "piece": self.piece(token)} for token in ids]}
            return {"tokens": ids}
        if path == "/detokenize":
            return {"content": self.tokenizer.decode(body["tokens"])}
        return super().post(path, body)

    def get(self, path):
        if path == "/props":
            names = {"bos_token": self.tokenizer.bos_token, "eos_token": self.tokenizer.eos_token}
            return names | {"chat_template": self.tokenizer.chat_template or ""}
        return super().get(path)


class Echo(Stub):
    """OpenAI's form: with `echo` the prompt's tokens come back with their log-probabilities."""

    takes_ids = True

    def cut(self, ids):
        """The ids into which the server cuts a text that our tokenizer cuts into these."""
        return ids

    def choice(self, body):
        if isinstance(body["prompt"], list) and not self.takes_ids:
            return 422
        ids = self.ids(body["prompt"])
        if not isinstance(body["prompt"], list):
            ids = self.cut(ids)
        rows = self.rows(ids)
        ids = [*ids, int(rows[-1].argmax())]
        values = [None, *(self.value(row, i) for row, i in zip(rows, ids[1:], strict=True))]
        tops = [None]
        for row in rows:
            tokens = self.top(row, body["logprobs"])
            tops.append({self.text(token): self.value(row, token) for token in tokens})
        first = 0 if body.get("echo") else len(ids) - 1
        columns = {
            "tokens": [self.text(token) for token in ids[first:]],
            "token_logprobs": values[first:],
            "top_logprobs": tops[first:],
        }
        return {"logprobs": columns}


class EchoOfText(Echo):
    """The same, for prompts that are text."""

    takes_ids = False


class LmStudio(EchoOfText):
    """Text alone, the generated token alone; no tokenizer, and `echo` and `logit_bias` are ignored.

    `scores` is False for the versions whose `logprobs` is null.
    """

    scores = True

    def choice(self, body):
        if isinstance(body["prompt"], list):
            return 400
        body = {name: value for name, value in body.items() if name != "echo"}
        return super().choice(body) if self.scores else {"logprobs": None}


@contextmanager
def serving(stub):
    """The address of a server of a stub, up to and including "/v1"."""

    class Server(Handler):
        def get(self):
            self.reply(stub.get(self.path))

        def post(self, body):
            stub.keys.append(self.headers["Authorization"])
            self.reply(stub.post(self.path, json.loads(body)))

        def reply(self, answer):
            status = 200
            if isinstance(answer, int):
                status, answer = answer, {"error": {"message": "no"}}
            self.answer(json.dumps(answer).encode(), status, **{"Retry-After-Ms": "1"})

    with served_by(Server) as address:
        yield f"{address}/v1"
