"""A server that completes as vLLM's does, with a small model on 127.0.0.1, and misbehaves as it is told."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

CUT = "cut"


class CompletionServer:
    """Answers /v1/completions and /v1/models.

    Args:
        network: a model of transformers.
        root: what the list of models says where it was loaded from.
        trouble: called with the number of the request; None for an answer, a status, text in place of JSON, or "cut".
        port: 0 for any.
        tokenizer: for prompts that are text.
        obeys: whether it follows `allowed_token_ids` and `logit_bias`.
        takes: what a prompt may be: "ids" (or text), "text", "text without echo", or "nothing": no logprobs at all.
        rows: whether log-probabilities come as llama.cpp sends them.
        most: how many log-probabilities it sends at most.
    """

    def __init__(
        self,
        network,
        root="",
        trouble=lambda number: None,
        port=0,
        obeys=True,
        tokenizer=None,
        takes="ids",
        rows=False,
        most=384,
    ):
        self.network, self.root, self.trouble, self.obeys = network, root, trouble, obeys
        self.tokenizer, self.takes, self.rows, self.most = tokenizer, takes, rows, most
        self.listed = [{"id": "tiny", "root": root, "max_model_len": 200}]  # None: there is no such page
        self.lock = threading.Lock()
        self.bodies, self.headers = [], []
        self.at_once = self.most_at_once = self.answers = 0
        self.server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self.server.daemon_threads, self.server.block_on_close = True, False
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def accepts(self, body):
        if self.takes == "nothing":
            return "logprobs" not in body
        return self.takes == "ids" or isinstance(body["prompt"], str)

    @torch.no_grad()
    def complete(self, body):
        assert (body["max_tokens"], body["temperature"]) == (1, 0)
        if isinstance(body.get("prompt"), str):
            return self.complete_text(body)
        assert body["return_tokens_as_token_ids"]
        if body.get("prompt_embeds"):
            rows = torch.load(io.BytesIO(base64.b64decode(body["prompt_embeds"])), weights_only=True)
            inputs = {"inputs_embeds": rows[None]}
        else:
            inputs = {"input_ids": torch.tensor([body["prompt"]])}
        with self.lock:
            row = self.network(**inputs).logits[0, -1].log_softmax(-1)
        count = len(row) if body["logprobs"] == -1 else body["logprobs"]
        allowed = [*body.get("allowed_token_ids", []), *map(int, body.get("logit_bias", {}))] if self.obeys else []
        said = allowed[0] if allowed else int(row.argmax())
        if self.rows:
            ids = row.topk(min(count, len(row))).indices.tolist()
            top = [{"id": i, "token": self.tokenizer.decode([i]), "logprob": float(row[i])} for i in ids]
            entry = {"id": said, "token": "?", "logprob": float(row[said]), "top_logprobs": top}
            return {"choices": [{"index": 0, "text": "", "logprobs": {"content": [entry]}}]}
        top = {f"token_id:{i}": float(row[i]) for i in row.topk(min(count, len(row))).indices.tolist()}
        logprobs = {
            "tokens": [f"token_id:{said}"],
            "token_logprobs": [float(row[said])],
            "top_logprobs": [top | {f"token_id:{said}": float(row[said])}],
        }
        return {"model": "tiny", "choices": [{"index": 0, "text": "", "logprobs": logprobs, "finish_reason": "length"}]}

    def complete_text(self, body):
        ids = self.tokenizer(body["prompt"])["input_ids"]
        with self.lock:
            rows = self.network(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        ids.append(int(rows[-1].argmax()))
        tokens = [self.tokenizer.decode([i]) for i in ids]
        values = [None, *(float(row[i]) for row, i in zip(rows, ids[1:], strict=True))]
        tops = [row.topk(min(body["logprobs"], len(row))) for row in rows]
        top = [{self.tokenizer.decode([i]): v for v, i in zip(*map(torch.Tensor.tolist, t), strict=True)} for t in tops]
        first = 0 if body.get("echo") and self.takes in ("ids", "text") else len(ids) - 1
        logprobs = {"tokens": tokens[first:], "token_logprobs": values[first:], "top_logprobs": [None, *top][first:]}
        return {"model": "tiny", "choices": [{"index": 0, "text": "", "logprobs": logprobs, "finish_reason": "length"}]}


def _handler(owner: CompletionServer):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_GET(self):
            found = owner.listed is not None
            self._send(200 if found else 404, json.dumps({"object": "list", "data": owner.listed}).encode())

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with owner.lock:
                number = len(owner.bodies)
                owner.bodies.append(body)
                owner.headers.append({name.lower(): value for name, value in self.headers.items()})
                owner.at_once += 1
                owner.most_at_once = max(owner.most_at_once, owner.at_once)
            try:
                time.sleep(0.001)
                trouble = owner.trouble(number)
                if trouble == CUT:
                    self.close_connection = True
                elif body["logprobs"] > owner.most:
                    self._send(400, b'{"error": {"message": "greater than max allowed"}}')
                elif not owner.accepts(body):
                    self._send(422, b'{"detail": "Unsupported fields in the request"}')
                elif isinstance(trouble, int):
                    self._send(trouble, b'{"error": {"message": "no"}}')
                elif trouble is not None:
                    self._send(200, trouble.encode())
                else:
                    self._send(200, json.dumps(owner.complete(body)).encode())
                    with owner.lock:
                        owner.answers += 1
            finally:
                with owner.lock:
                    owner.at_once -= 1

        def _send(self, status, body):
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                self.close_connection = True

    return Handler
