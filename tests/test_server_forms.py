"""Servers in the forms of llama.cpp, LM Studio and others: the local model's scores by deletion."""

import gc
from dataclasses import replace

import pytest
import torch

import noiser
from completion_stubs import Echo, EchoOfText, LlamaCpp, LmStudio, Vllm, serving
from noiser import endpoint
from noiser.errors import ModelError, ParameterError, TargetError, UnsupportedModelError
from test_cite import SOURCES
from test_contract import CHAT, PROMPT
from tiny import chat_tokenizer, save_tiny, tiny_model

pytestmark = pytest.mark.usefixtures("no_openai_settings")
OCCLUSION = noiser.Occlusion(removal="delete", objective="logprob")
METHODS = {
    "occlusion": OCCLUSION,
    "lime": noiser.Lime(removal="delete", samples=8),
    "kernel_shap": noiser.KernelShap(removal="delete", samples=4),
    "context_cite": noiser.ContextCite(removal="delete", samples=4),
    "joint": noiser.Joint(removal="delete"),
}
FORMS = {
    "vLLM": (Vllm, "prompt_logprobs", True),
    "llama.cpp": (LlamaCpp, "logit_bias", True),
    "echo": (Echo, "echo", True),
    "echo of text": (EchoOfText, "echo", False),
    "LM Studio": (LmStudio, "top", False),
}


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


def load(address, folder, form=None, **settings):
    """The model of a server; of one that sends the most probable tokens alone, with all of them."""
    settings = {"max_retries": 0} | settings
    if form is LmStudio:
        settings = {"logprobs": 384} | settings
    return noiser.load_model(address, tokenizer=str(folder), device="cpu", **settings)


def compare(served, local, prompt=PROMPT, **options):
    options = {"method": OCCLUSION, "unit": "word"} | options
    found, expected = (
        noiser.attribute(lm, prompt, **{"unit": "token"} | options) for lm in (served, local)
    )
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-4, rtol=0, equal_nan=True)
    for one, other in zip(found.targets, expected.targets, strict=True):
        assert one.token_id == other.token_id
        assert one.probability == pytest.approx(other.probability, abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"target": " sings near", "same": "logprob"}, {"target": " sings", "foil": " dog"}, {}],
    ids=["logprob", "a foil", "tokens"],
)
def test_a_rule_is_that_of_the_local_model(form, local, folder, options):
    stub, _, _ = form
    if stub in (LmStudio, EchoOfText) and not options:
        pytest.skip("its own next token is half a character")
    options = {"unit": [(0, 4), (4, 10), (10, 19)]} | options
    with serving(stub(local)) as address, load(address, folder, stub) as served:
        found, expected = (noiser.rule(lm, PROMPT, **options) for lm in (served, local))
    assert found.tries == expected.tries == 8
    assert replace(found, model=expected.model) == expected


def way_of(lm):
    return lm.model.predict.__self__.way


@pytest.mark.parametrize(
    "options",
    [
        {"target": " sings near"},
        {"target": " sings near", "target_unit": "all"},
        {"target": " sings", "foil": " dog"},
        {"max_new_tokens": 2},
    ],
    ids=["two tokens", "a span", "a foil", "greedy"],
)
def test_deletion_gives_the_local_models_scores(form, local, folder, options):
    stub, name, takes_ids = form
    if stub is LmStudio and "max_new_tokens" in options:
        options = {"target": " fox"}  # its own next token is half a character
    with serving(stub(local)) as address, load(address, folder, stub) as served:
        assert way_of(served) == (name, takes_ids)
        compare(served, local, **options)


@pytest.mark.parametrize("stub", [Vllm, LlamaCpp, Echo])
def test_an_answer_is_written_by_one_request_and_is_the_local_models(stub, local, folder):
    """Its text has halves of characters, so it is checked, and written again from there on."""
    server = stub(local)
    with serving(server) as address, load(address, folder, stub) as served:
        compare(served, local, max_new_tokens=6)
    assert server.drafts == [6]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("stub", [LlamaCpp, EchoOfText])
def test_every_method_by_deletion_does(stub, name, local, folder):
    with serving(stub(local)) as address, load(address, folder) as served:
        compare(served, local, method=METHODS[name], target=" sings near", unit="token")


@pytest.mark.parametrize("stub", [Vllm, LlamaCpp, Echo])
def test_a_server_of_token_ids_cuts_nothing_anew(stub, local, folder):
    """Half a letter as the target, tokens as units, and a chat with special tokens."""
    half = local.tokenizer.convert_tokens_to_ids("Ã")
    with serving(stub(local)) as address, load(address, folder, logprobs=2) as served:
        compare(served, local, target=half, unit="token")
        compare(served, local, CHAT, target=" sings", unit="token")


@pytest.mark.parametrize(
    ("stub", "options"),
    [
        (LlamaCpp, {"answer": " The fox sings. It rains."}),
        (Vllm, {"answer": " The fox sings. It rains."}),
        (Vllm, {"max_new_tokens": 8}),  # an answer of its own
    ],
    ids=["llama.cpp", "vLLM", "vLLM's answer"],
)
def test_metrics_and_citations_by_deletion(stub, options, local, folder):
    options = {"method": OCCLUSION, "unit": "sentence", "contrast": False} | options
    here = noiser.wrap(local.model, local.tokenizer)
    here.accepts_embeddings = False
    here.abilities.supports_packing = False
    with serving(stub(local)) as address, load(address, folder) as served:
        found, expected = (
            noiser.cite(lm, "Who sings?", SOURCES, **options) for lm in (served, here)
        )
        assert found.answer == expected.answer
        torch.testing.assert_close(
            found.attribution.scores, expected.attribution.scores, atol=1e-4, rtol=0
        )
        evaluated = [
            noiser.evaluate(
                lm,
                [PROMPT],
                method=OCCLUSION,
                metrics="lds",
                removal="delete",
                masks=6,
                unit="token",
            ).summary()
            for lm in (served, local)
        ]
    assert str(evaluated[0]) == str(evaluated[1])


def test_a_text_that_the_server_cuts_into_other_tokens(local, folder):
    """A token that the server reads as several has the sum of their log-probabilities."""
    target = local.tokenizer.convert_tokens_to_ids("Ġdog")
    letters = local.tokenizer.convert_tokens_to_ids([*"Ġdog"])

    class Letters(EchoOfText):
        def cut(self, ids):
            return [*ids[:-1], *letters] if ids[-1] == target else ids

    options = {"method": OCCLUSION, "unit": "word"}
    with serving(Letters(local)) as address, load(address, folder) as served:
        found = noiser.attribute(served, PROMPT, target=" dog", **{"unit": "token"} | options)
    expected = noiser.attribute(
        local, PROMPT, target=tuple(letters), target_unit="all", **{"unit": "token"} | options
    )
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-4, rtol=0)


def test_a_target_within_a_token_of_the_server_is_refused(local, folder):
    letters = local.tokenizer.convert_tokens_to_ids([*"Ġdog"])

    class Words(EchoOfText):
        def cut(self, ids):
            whole = self.tokenizer.convert_tokens_to_ids("Ġdog")
            return [*ids[:-4], whole] if ids[-4:] == letters else ids

        def ids(self, prompt):  # as ours are, so that the end of the text can be told
            found = super().ids(prompt)
            whole = self.tokenizer.convert_tokens_to_ids("Ġdog")
            return [*found[:-1], *letters] if found[-1] == whole else found

    with (
        serving(Words(local)) as address,
        load(address, folder) as served,
        pytest.raises(TargetError, match=r"cuts the text elsewhere .* begins a word"),
    ):
        noiser.attribute(served, PROMPT, method=OCCLUSION, target=tuple(letters), unit="token")


def test_few_log_probabilities_give_lower_bounds_and_say_so(local, folder):
    """Without a word the target is not among those sent: the smallest of them stands for it."""
    options = {"method": OCCLUSION, "unit": "word"}
    expected = noiser.attribute(local, PROMPT, target=likely(local), **{"unit": "token"} | options)
    with (
        serving(LmStudio(local)) as address,
        load(address, folder, logprobs=4) as served,
        pytest.warns(UserWarning, match=r"were not among the 4 .* lower bounds.*logprobs="),
    ):
        found = noiser.attribute(
            served, PROMPT, target=likely(local), **{"unit": "token"} | options
        )
    assert found.targets[0].probability == pytest.approx(expected.targets[0].probability, abs=1e-5)
    short = expected.scores - found.scores
    assert short.min() > -1e-4
    assert short.max() > 0.1
    assert (short.abs() < 1e-4).any()


def likely(lm):
    """The most probable next token of the prompt that is text of its own."""
    with torch.no_grad():
        logits = lm.model(torch.tensor([lm.encode(PROMPT).token_ids])).logits[0, -1]
    texts = ((int(token), lm.tokenizer.decode([token])) for token in logits.argsort().flip(0))
    return next(token for token, text in texts if text.isascii() and text.isprintable())


def test_a_target_that_is_not_sent_is_refused_in_one_sentence(local, folder):
    with (
        serving(LmStudio(local)) as address,
        load(address, folder, logprobs=3) as served,
        pytest.raises(TargetError) as caught,
    ):
        noiser.attribute(served, PROMPT, method=OCCLUSION, target=" sings", unit="token")
    message = str(caught.value)
    assert "takes prompts as text and scores the most probable next tokens alone" in message
    assert "' sing' is not among them" in message  # the first token of the target
    assert "logprobs=, or use vLLM's or llama.cpp's server" in message


def test_half_a_character_is_refused_by_a_server_of_text(local, folder):
    half = local.tokenizer.convert_tokens_to_ids("Ã")
    with (
        serving(EchoOfText(local)) as address,
        load(address, folder) as served,
        pytest.raises(TargetError, match=r"takes prompts as text .* within a character"),
    ):
        noiser.attribute(served, PROMPT, method=OCCLUSION, target=half, unit="token")


def test_a_server_without_log_probabilities_is_refused_when_it_is_loaded(local, folder):
    stub = LmStudio(local)
    stub.scores = False
    with (
        serving(stub) as address,
        pytest.raises(ModelError, match=r"token ids: .*400.*; with text: .*logprobs is null"),
    ):
        load(address, folder)


def test_numbers_that_do_not_come_twice_are_not_taken(local, folder):
    """A server whose `logit_bias` changes what it sends scores the most probable tokens alone."""

    class Biased(LlamaCpp):
        def choice(self, body):
            found = super().choice(body)
            if body.get("logit_bias"):
                found["logprobs"]["content"][0]["logprob"] = -0.0001
            return found

    class Repeats(Vllm):
        """Has `prompt_logprobs` of the same tokens at another place."""

        def choice(self, body):
            found = super().choice(body)
            if "prompt_logprobs" in body and isinstance(body["prompt"], list):
                first, *rows = found["prompt_logprobs"]
                found["prompt_logprobs"] = [first, *reversed(rows)]
            return found

    with serving(Biased(local)) as address, load(address, folder) as served:
        assert way_of(served) == ("top", True)
    with serving(Repeats(local)) as address, load(address, folder) as served:
        assert way_of(served) == ("top", True)


def test_another_models_tokenizer_is_noticed(local, tmp_path):
    tokenizer = chat_tokenizer()
    vocabulary = tokenizer.backend_tokenizer.get_vocab()
    folder = save_tiny("llama", tmp_path / "other")
    text = (folder / "tokenizer.json").read_text()
    one, other = "Ġthe", "Ġfox"
    assert {one, other} <= vocabulary.keys()
    swapped = text.replace(f'"{one}": {vocabulary[one]}', f'"{one}": {vocabulary[other]}')
    swapped = swapped.replace(f'"{other}": {vocabulary[other]}', f'"{other}": {vocabulary[one]}')
    (folder / "tokenizer.json").write_text(swapped)
    with (
        serving(LlamaCpp(local)) as address,
        pytest.raises(ParameterError, match=r"reads token \d+ as .*and the tokenizer as"),
    ):
        load(address, folder, logprobs=384)


def test_methods_that_change_tokens_are_refused(form, local, folder):
    with (
        serving(form[0](local)) as address,
        load(address, folder, form[0]) as served,
        pytest.raises(UnsupportedModelError, match="removal='delete'"),
    ):
        noiser.attribute(served, PROMPT, method="noiser", target=" sings", unit="token")


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (PROMPT, {"target": " sings near"}),
        ("The fox sings café 🦊 near", {"target": " dog"}),
        ("The fox </s> sings", {"target": " dog"}),
        (CHAT, {"max_new_tokens": 2}),
    ],
    ids=["plain", "characters of several tokens", "a special token", "a chat"],
)
def test_the_servers_own_tokenizer_gives_the_same_units_and_scores(local, prompt, options):
    with (
        serving(LlamaCpp(local)) as address,
        noiser.load_model(address, device="cpu") as served,
    ):
        encodings = [lm.encode(prompt) for lm in (served, local)]
        for name in ("text", "token_ids", "offsets", "frozen", "regions", "contents"):
            assert getattr(encodings[0], name) == getattr(encodings[1], name)
        compare(served, local, prompt, **options)


def test_a_server_that_does_not_say_which_tokenizer_it_has(local):
    with (
        serving(LmStudio(local)) as address,
        pytest.raises(ModelError, match=r"does not say which tokenizer.*'tiny'.*tokenizer="),
    ):
        noiser.load_model(address)


def test_the_connections_are_closed(local, folder):
    with serving(LlamaCpp(local)) as address:
        served = load(address, folder)
        client = served.model.predict.__self__.client
        assert not client.is_closed()
        with served:
            compare(served, local, target=" dog", unit="token")
        assert client.is_closed()


def test_the_connections_of_a_forgotten_model_are_closed(local, folder):
    with serving(LlamaCpp(local)) as address:
        served = load(address, folder)
        client = served.model.predict.__self__.client
        del served
        gc.collect()
        assert client.is_closed()


def test_the_connections_are_closed_when_a_server_cannot_be_used(local, folder, monkeypatch):
    made = []
    monkeypatch.setattr(
        "noiser.model.http.client",
        lambda *args, **more: made.append(endpoint.client(*args, **more)) or made[-1],
    )
    with serving(LmStudio(local)) as address, pytest.raises(ModelError):
        noiser.load_model(address)
    assert [each.is_closed() for each in made] == [True]


def test_a_local_model_may_be_closed_too():
    with noiser.wrap(tiny_model("llama").eval(), chat_tokenizer()) as lm:
        assert noiser.attribute(lm, PROMPT, method="occlusion", unit="token").targets
