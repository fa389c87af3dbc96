"""A `vllm` in place of the real one: `LLM` runs a transformers model, and the workers' methods
answer as ours do.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers


class SamplingParams:
    def __init__(self, **settings):
        assert settings["temperature"] == 0.0
        self.max_tokens = settings["max_tokens"]
        self.extra_args = settings.get("extra_args")
        assert self.max_tokens == 1 or not self.extra_args


class LLM:
    """Runs each prompt by itself, as vLLM answers: in no particular order, and only what it was
    asked to keep.
    """

    def __init__(self, model, **settings):
        assert settings["enable_prompt_embeds"]
        self.settings, self.calls, self.kept = settings, [], {}
        self.network = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32
        ).eval()
        details = {
            "dtype": torch.float32,
            "max_model_len": 200,
            "quantization": None,
            "hf_config": self.network.config,
        }
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(model_config=SimpleNamespace(**details))
        )
        self.trouble = None
        self.drafts = []  # the most tokens of each answer that was written
        self.wrong_draft = 0  # a token of answers, counted from 1, in whose place another stands

    @torch.no_grad()
    def generate(self, prompts, parameters, use_tqdm):
        if parameters[0].extra_args is None:
            return self.write(prompts, parameters)
        trouble, self.trouble = self.trouble, None
        if trouble:  # some of it has run
            self.kept |= {
                settings.extra_args["noiser_row"]: torch.zeros(384) for settings in parameters[:2]
            }
            raise trouble
        self.calls.append(
            [len(prompt.get("prompt_embeds", prompt.get("prompt_token_ids"))) for prompt in prompts]
        )
        for prompt, settings in reversed(list(zip(prompts, parameters, strict=True))):
            if "prompt_embeds" in prompt:
                logits = self.network(inputs_embeds=prompt["prompt_embeds"][None]).logits
            else:
                logits = self.network(input_ids=torch.tensor([prompt["prompt_token_ids"]])).logits
            self.kept[settings.extra_args["noiser_row"]] = logits[0, -1].float()
        return []  # the rows are kept for `take_logits`

    def write(self, prompts, parameters):
        """Greedy answers, each with the end token that it may have."""
        answers = []
        for prompt, settings in zip(prompts, parameters, strict=True):
            self.drafts.append(settings.max_tokens)
            ids = torch.tensor([prompt["prompt_token_ids"]])
            written = self.network.generate(
                ids, do_sample=False, max_new_tokens=settings.max_tokens
            )[0, ids.shape[1] :].tolist()
            if self.wrong_draft:
                written[self.wrong_draft - 1] += 1
            answers.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=written)]))
        return answers

    def collective_rpc(self, method):
        assert method == "take_logits"
        rows = dict(sorted(self.kept.items()))
        self.kept = {}
        # the first worker has a part of the layers without the head
        return [([], b""), (list(rows), torch.stack(list(rows.values())).numpy().tobytes())]


def install(monkeypatch):
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SamplingParams
    monkeypatch.setitem(sys.modules, "vllm", module)


def assert_same(found, expected, atol=2e-5, *, ranks=True):
    assert [target.token_id for target in found.targets] == [
        target.token_id for target in expected.targets
    ]
    assert [unit.text for unit in found.units] == [unit.text for unit in expected.units]
    torch.testing.assert_close(found.scores, expected.scores, atol=atol, rtol=1e-3, equal_nan=True)
    for one, other in zip(found.targets, expected.targets, strict=True):
        assert not ranks or one.rank == other.rank
        assert one.probability == pytest.approx(other.probability, abs=atol)
