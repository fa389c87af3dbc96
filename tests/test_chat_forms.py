"""Chats in the form that a template reads: texts or parts, one of several named templates,
documents as sources.
"""

import copy

import pytest

import noiser
from noiser.errors import ParameterError, PromptError, UnitError
from noiser.text import encode, place_sources
from tiny import CHAT_TEMPLATE, chat_tokenizer, tiny, tiny_tokenizer

HEAD = "{% for m in messages %}<|{{ m.role }}|>"
TAIL = "\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
EACH = (
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
)
PARTS = HEAD + EACH + TAIL
BOTH = HEAD + "{% if m.content is string %}{{ m.content }}{% else %}" + EACH + "{% endif %}" + TAIL
SELECTED = (
    HEAD
    + (  # as LLaVA's
        "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ '\\n' + "
        "part['text'] }}"
        "{% endfor %}"
    )
    + TAIL
)
FIRST = (
    HEAD
    + (  # as SmolVLM's
        "{% if m['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}" + EACH
    )
    + TAIL
)
SYSTEM = (
    HEAD
    + (  # as where the system's text is a string and a user's content a list
        "{% if m.role == 'system' %}{{ m.content }}{% else %}" + EACH + "{% endif %}"
    )
    + TAIL
)


def part(text):
    return {"type": "text", "text": text}


TEXT = [{"role": "user", "content": "Where is the fox?"}]
ONE = [{"role": "user", "content": [part("Where is the fox?")]}]
TWO = [{"role": "user", "content": [part("Look here."), part("Where is the fox?")]}]
MIXED = [{"role": "system", "content": "Be brief."}, *TWO]


def as_parts(messages):
    return [
        m if isinstance(m["content"], list) else {**m, "content": [part(m["content"])]}
        for m in messages
    ]


@pytest.mark.parametrize("messages", [TEXT, ONE, TWO], ids=["text", "one part", "two parts"])
@pytest.mark.parametrize("template", [PARTS, BOTH, SELECTED, FIRST])
def test_the_prompt_is_what_the_template_makes_of_parts(template, messages):
    tokenizer = chat_tokenizer(template)
    expected = tokenizer.apply_chat_template(
        as_parts(messages), tokenize=False, add_generation_prompt=True
    )
    encoding = encode(tokenizer, messages)
    assert encoding.text == expected
    shown = "".join(encoding.text[start:end] for start, end in encoding.regions)
    given = as_parts(messages)[0]["content"]
    assert shown == "".join(each["text"] for each in given)


def test_roles_whose_contents_have_different_forms():
    encoding = encode(chat_tokenizer(SYSTEM), MIXED)
    assert encoding.text == ("<|system|>Be brief.<|user|>Look here.Where is the fox?<|assistant|>")
    assert [index for index, _, _ in encoding.contents] == [0, 1]


def test_an_answer_that_is_begun_in_parts_goes_on():
    begun = [*TEXT, {"role": "assistant", "content": "The fox is"}]
    assert encode(chat_tokenizer(PARTS), begun).text.endswith("<|assistant|>The fox is")


def test_parts_are_a_unit_of_the_attribution():
    lm = noiser.wrap(tiny("llama").model, chat_tokenizer(BOTH))
    att = noiser.attribute(lm, TWO, method="occlusion", unit="turn", max_new_tokens=1)
    assert [unit.text for unit in att.units] == ["Look here.Where is the fox?"]
    noiser.measure(lm, att, "soft_scores")  # restored from the record


def test_sources_and_question_of_several_parts():
    lm = noiser.wrap(tiny("llama").model, chat_tokenizer(BOTH))
    placed = place_sources(TWO, ["The fox sings."])
    assert placed[0]["content"][0] == part("Look here.")
    assert placed[0]["content"][1]["text"].startswith("The fox sings.\n\nQuestion: Where")
    found = noiser.cite(lm, TWO, ["The fox sings.", "It rains."], max_new_tokens=4)
    assert [source.text for source in found.sources] == ["The fox sings.", "It rains."]


def test_several_parts_for_a_template_of_texts_are_said():
    with pytest.warns(UserWarning, match="the 2 parts of message 0 are joined by newlines"):
        encoding = encode(chat_tokenizer(), TWO)
    assert encoding.text.startswith("<|user|>Look here.\nWhere is the fox?\n")


def test_parts_cannot_be_edited():
    lm = noiser.wrap(tiny("llama").model, chat_tokenizer(BOTH))
    with pytest.raises(PromptError, match="Message 0 has 2 parts; expected one text"):
        noiser.diff(lm, TWO, TEXT)


DOCUMENTS = [{"title": "a", "text": "The fox is on the bank."}, {"title": "b", "text": "It rains."}]
TOOLS = [{"type": "function", "function": {"name": "boat", "parameters": {}}}]
RAG = "{% for d in documents %}[{{ d.title }}: {{ d.text }}]{% endfor %}" + CHAT_TEMPLATE
NAMED = {
    "default": CHAT_TEMPLATE,
    "tool_use": "{{ tools | tojson }}" + CHAT_TEMPLATE,
    "rag": RAG,
}


def model_of(template, **kwargs):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    return noiser.LanguageModel(tiny("llama").model, tokenizer, chat_template_kwargs=kwargs)


@pytest.mark.parametrize(
    ("kwargs", "begin"),
    [
        ({}, "<|user|>Where"),
        ({"documents": DOCUMENTS}, "[a: The fox is on the bank.][b: It rains.]<|user|>Where"),
        ({"tools": TOOLS}, '[{"type": "function"'),
        ({"chat_template": "rag", "documents": DOCUMENTS}, "[a: The fox"),
        ({"chat_template": "default"}, "<|user|>Where"),
        ({"documents": None, "tools": None}, "<|user|>Where"),
        ({"chat_template": "{{ 'My own: ' }}" + CHAT_TEMPLATE}, "My own: <|user|>Where"),
    ],
)
def test_the_named_template_that_reads_what_is_passed(kwargs, begin):
    assert model_of(NAMED, **kwargs).encode(TEXT).text.startswith(begin)


def test_named_templates_as_a_tokenizers_file_holds_them():
    listed = [{"name": name, "template": template} for name, template in NAMED.items()]
    assert model_of(listed, documents=DOCUMENTS).encode(TEXT).text.startswith("[a: The fox")


@pytest.mark.parametrize(
    ("template", "kwargs", "message"),
    [
        (NAMED, {"chat_template": "rga"}, "chat_template='rga'; expected one of default, tool_use"),
        (NAMED, {"chat_template": "default", "documents": DOCUMENTS}, "'documents', which noiser"),
        (NAMED, {"documents": DOCUMENTS, "tools": TOOLS}, "which the chat template 'tool_use' of"),
        (CHAT_TEMPLATE, {"documents": DOCUMENTS}, "'documents', which noiser sets itself"),
    ],
)
def test_arguments_are_not_dropped(template, kwargs, message):
    with pytest.raises(ParameterError, match=message):
        model_of(template, **kwargs).encode(TEXT)


def test_documents_of_a_template_are_sources():
    lm = model_of(RAG, documents=DOCUMENTS)
    texts = [document["text"] for document in DOCUMENTS]
    question = {"sources": texts, "method": "occlusion", "max_new_tokens": 1}
    att = noiser.attribute(lm, TEXT, unit="source", **question)
    assert [unit.text for unit in att.units] == texts
    by_word = noiser.attribute(lm, [TEXT, TEXT], unit="word", **question | {"sources": [texts] * 2})
    assert by_word[1].units[0].text == "The"
    assert noiser.measure(lm, att, "soft_scores")
    cited = noiser.cite(lm, TEXT, texts, template=None, max_new_tokens=3)
    assert [source.text for source in cited.sources] == texts
    assert cited.answer_without is None


def test_documents_that_are_not_sources_stay_as_they_are():
    att = noiser.attribute(
        model_of(RAG, documents=DOCUMENTS), TEXT, method="occlusion", max_new_tokens=1, unit="turn"
    )
    assert [unit.text for unit in att.units] == ["Where is the fox?"]


def test_documents_that_the_template_writes_otherwise_are_no_sources():
    lm = model_of(
        "{{ documents | tojson }}" + CHAT_TEMPLATE, documents=[{"text": 'A "fox" sings.'}]
    )
    with pytest.raises(UnitError, match=r"Source 1, .* is not in the prompt"):
        noiser.attribute(lm, TEXT, sources=['A "fox" sings.'], unit="token")


@pytest.mark.parametrize(
    "source", ["<s>The fox sings.", "The fox sings.</s>", "<s>\nIt </s> rains.</s>"]
)
def test_a_source_with_special_tokens_at_its_ends(source):
    lm = noiser.wrap(tiny("llama").model, tiny_tokenizer())
    found = noiser.cite(lm, "Where is the fox?", [source, "It is late."], max_new_tokens=3)
    assert found.sources[0].text == source
    assert found.scores[:, 0].isfinite().all()


def test_a_source_of_special_tokens_alone_is_one_sentence():
    lm = noiser.wrap(tiny("llama").model, tiny_tokenizer())
    with pytest.raises(UnitError, match="Source 2, '<s></s>', has no text of its own"):
        noiser.cite(lm, "Where is the fox?", ["It is late.", "<s></s>"], max_new_tokens=3)
