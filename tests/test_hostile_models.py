"""Folders of models that were made to do harm, callbacks that raise, and many callers at once."""

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import noiser
from noiser.errors import ModelError, NoiserError, PromptError
from test_contract import state_of
from tiny import save_tiny, tiny_model, tiny_tokenizer

CHAT = [{"role": "user", "content": "The fox sings"}]
PROMPT = "The quick fox sings"

TEMPLATES = {
    "a long loop": ("{% for i in range(1000000000) %}x{% endfor %}", "Range too big"),
    "Python's insides": ("{{ messages.__class__.__mro__ }}", "unsafe"),
    "no end of calls": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "half a block": ("{% for %}", "Expected an expression"),
    "its own error": ("{{ raise_exception('no <b>chats</b>') }}", "no <b>chats</b>"),
    "too much text": ("{% for i in range(9999) %}" + "x" * 999 + "{% endfor %}", "characters"),
    "another text": ("{{ 9 ** 9 }}", "rewrites message 0"),
}


@pytest.mark.parametrize(("template", "says"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_hostile_template_is_one_sentence(tmp_path, template, says):
    folder = save_tiny("llama", tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    lm = noiser.load_model(folder, device="cpu")
    with pytest.raises(PromptError, match=says):
        noiser.attribute(lm, CHAT, method="occlusion")
    assert noiser.attribute(lm, PROMPT, method="random").units  # a text needs no template


def rewrite_tokenizer(folder, change):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    change(tokenizer)
    path.write_text(json.dumps(tokenizer))


def with_endless_search(folder):
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    split["pattern"] = {"Regex": "(a+)+$"}
    rewrite_tokenizer(folder, lambda found: found.update(pre_tokenizer=split))


def with_huge_ids(folder):
    def change(found):
        vocabulary = found["model"]["vocab"]
        found["model"]["vocab"] = {name: 10**9 + i for i, name in enumerate(vocabulary)}

    rewrite_tokenizer(folder, change)


TOKENIZERS = {
    "a search without end": (with_endless_search, "cannot split this text"),
    "ids beyond the table": (with_huge_ids, "rows of the embedding table"),
    "nothing": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "damaged"),
    "noise": (lambda folder: (folder / "tokenizer.json").write_text("\0" * 1000), "damaged"),
    "deep": (lambda folder: (folder / "tokenizer.json").write_text("[" * 100_000), "damaged"),
}


@pytest.mark.parametrize(("harm", "says"), TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_hostile_tokenizer_is_one_sentence(tmp_path, harm, says):
    folder = save_tiny("llama", tmp_path)
    harm(folder)
    with pytest.raises(NoiserError, match=says):
        noiser.attribute(noiser.load_model(folder, device="cpu"), "a" * 40 + "b", method="random")


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickled_weights_run_no_code(tmp_path):
    folder = save_tiny("llama", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Evil(tmp_path / "owned")}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="Weights only load failed"):
        noiser.load_model(folder, device="cpu")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_of_a_folder_is_not_run(tmp_path, name):
    folder = save_tiny("llama", tmp_path / "model")
    path = folder / name
    of_code = {"auto_map": {"AutoConfig": "evil.C", "AutoTokenizer": ["evil.T", None]}}
    of_code |= {"model_type": "unheard", "tokenizer_class": "Unheard"}
    path.write_text(json.dumps(json.loads(path.read_text()) | of_code))
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'owned')!r})\n")
    with pytest.raises(ModelError, match="trust_remote_code=True"):
        noiser.load_model(folder, device="cpu")
    assert not (tmp_path / "owned").exists()


# ---- callbacks that raise ------------------------------------------------------------------------


class Surprise(BaseException):
    """Not an Exception."""


@pytest.fixture
def lm():
    """A caller's model, in training mode."""
    made = noiser.wrap(tiny_model("llama"), tiny_tokenizer())
    made.context([3])
    return made


def raising(error):
    def call(*_):
        raise error

    return call


CALLBACKS = {
    "progress": lambda call: {"progress": call, "method": "occlusion"},
    "progress of gradients": lambda call: {"progress": call, "method": "integrated_gradients"},
    "the number to explain": lambda call: {"of": call, "method": "occlusion"},
    "noise": lambda call: {"method": _Method(call)},
}


class _Method:
    """A method of the caller's."""

    def __init__(self, call):
        self.call = call

    def __call__(self, query, generator):
        return self.call(query, generator)


@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), Surprise("mine")], ids=repr)
@pytest.mark.parametrize("options", CALLBACKS.values(), ids=CALLBACKS)
def test_what_a_callback_raises_reaches_the_caller_and_the_model_is_as_it_was(lm, options, error):
    before = state_of(lm)
    with pytest.raises((type(error), NoiserError)):
        noiser.attribute(lm, PROMPT, **options(raising(error)))
    assert state_of(lm) == before
    assert noiser.attribute(lm, PROMPT, method="occlusion").scores.isfinite().any()


# ---- threads and asyncio -------------------------------------------------------------------------

METHODS = ["occlusion", "integrated_gradients", "last_attention", "attn_lrp", "noiser", "joint"]


def scores_of(lm, method):
    return noiser.attribute(lm, PROMPT, method=method, unit="token").scores


@pytest.mark.parametrize("through", ["threads", "asyncio"])
def test_callers_at_the_same_moment_get_what_they_get_alone(lm, through):
    alone = [scores_of(lm, method) for method in METHODS]
    before = state_of(lm)
    jobs = METHODS * 2
    if through == "threads":
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda method: scores_of(lm, method), jobs))
    else:

        async def together():
            return await asyncio.gather(
                *(asyncio.to_thread(scores_of, lm, method) for method in jobs)
            )

        found = asyncio.run(together())
    for one, other in zip(found, alone * 2, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4, equal_nan=True)
    assert state_of(lm) == before
