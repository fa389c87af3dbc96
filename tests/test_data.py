"""The data sets: what readers make of upstream files, and what `load` adds. The records are our
own.
"""

import hashlib
import json
import re

import pytest
from sklearn.feature_extraction.text import TfidfVectorizer

from data_for_tests import KNOWN_RECORDS, LONGRA_RECORDS, NO_REAL, REAL, as_json, register, upstream
from noiser import data
from noiser.data import Example, planted
from noiser.data.known import read_known
from noiser.data.loading import choose
from noiser.data.longra import read_longra
from noiser.data.wikibio import first_sentences, read_biographies
from noiser.data.wikitext import read_wikitext
from noiser.data.wordings import CHAINS, STEMS, WORDINGS
from noiser.errors import DataError, ParameterError, UnknownNameError
from noiser.evaluation.measuring import read_examples

FILES = {
    "known": ("known_1000.json", as_json(KNOWN_RECORDS), read_known),
    "longra": ("LongRA.json", as_json(LONGRA_RECORDS), read_longra),
    "wikitext": (
        "wikitext.txt",
        b"The old mill is \nA heron waits\n\nSnow fell on ",
        read_wikitext,
    ),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of the user's with our own files, in data sets that know their checksums."""
    register(
        monkeypatch,
        {name: (upstream(file, content), read) for name, (file, content, read) in FILES.items()},
    )
    for name, (file, content, _) in FILES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_bytes(content)
    return tmp_path


def parts(example):
    return {
        name: [example.prompt[start:end] for start, end in spans]
        for name, spans in example.spans.items()
    }


def test_known_has_every_prompt_once_and_says_so(folder):
    found = data.load("known", folder)
    assert [(e.id, e.category) for e in found] == [
        ("known-0", "P1"),
        ("known-1", "P2"),
        ("known-3", "P2"),
    ]
    assert found.notes == ("Removed 1 of 4 records: known-2 repeats the prompt of known-0.",)
    kettle = found[1]
    assert (kettle.prompt, kettle.target) == ("Grandfather's kettle sings in the key of", "C")
    assert (kettle.spans, kettle.dataset) == ({"subject": ((0, 20),)}, "known")
    assert (kettle.meta["template"], kettle.meta["prediction"]) == (
        "{} sings in the key of",
        " C, of course",
    )


def test_longra_is_repaired_and_has_spans(folder):
    found = data.load("longra", folder)
    sound = [(record["prompt"], record["target"]) for record in LONGRA_RECORDS[:2]]
    assert [(example.prompt, example.target) for example in found] == [
        *sound,
        (
            "On the long road we reached Denmark, and stopped. (My shoe was wet). There we paid "
            "with the",
            "krone",
        ),
        ("They said we walk. (The cat slept). Then he also", "walks"),
        ("Today I almost forgot my green apple at home. (A bus came.) So I have no", "apples"),
    ]
    assert [example.meta["repaired"] for example in found] == [False, False, True, True, True]
    assert [example.meta["relative"] for example in found] == [
        "Norway",
        "slowly",
        "Denmark",
        "walk",
        "apple",
    ]
    assert found.notes == ("Repaired 3 of 5 records, malformed in LongRA.json.",)
    first = {
        "antecedent": ["Norway"],
        "distractor": ["(The cat slept)."],
        "last_content_word": ["capital"],
    }
    second = {"antecedent": ["slowly"], "distractor": ["(It rained, then snowed.)"]}
    assert [parts(example) for example in found[:2]] == [first, second]
    assert [parts(example)["antecedent"] for example in found[2:]] == [
        ["Denmark"],
        ["walk"],
        ["apple"],
    ]


def test_wikitext_is_stripped(folder):
    found = data.load("wikitext", folder)
    prompts = ["The old mill is", "A heron waits", "Snow fell on"]
    assert [(e.id, e.prompt, e.target) for e in found] == [
        (f"wikitext-{i}", p, None) for i, p in enumerate(prompts)
    ]
    assert found.notes == ("Removed the whitespace at the ends of 2 of 3 lines.",)


@pytest.mark.parametrize(
    "sentences",
    [
        ["Ann Ode (b. 1953) paints.", "She lives in Bonn.", "She rows."],
        ["Ole (Bergen, c. 1560 – c. 1621) sang.", "He wrote."],
        ["Dr. A. B. Cee wept.", "He left."],
        ["One sentence only"],
    ],
)
def test_first_sentences(sentences):
    assert first_sentences(" ".join(sentences)) == sentences


def test_biographies_of_selfcheckgpt(tmp_path):
    path = tmp_path / "b.json"
    path.write_bytes(
        as_json(
            [{"wiki_bio_test_idx": 70, "wiki_bio_text": "Ann Ode paints. She rows.  She sings."}]
        )
    )
    reading = read_biographies({"dataset-generated.json": path})
    assert [(e.id, e.prompt, e.target) for e in reading.examples] == [
        ("wikibio-70", "Ann Ode paints. She rows.", None)
    ]


def test_a_limit_or_a_category_takes_some_and_says_so(folder):
    assert data.load("known", folder, 3).notes == data.load("known", folder).notes
    for found, ids, said in (
        (data.load("known", folder, 2), ["known-0", "known-1"], "Took 2 of 3 examples"),
        (
            data.load("longra", folder, category="currency"),
            ["longra-2"],
            "Took 1 of 5 examples, category currency",
        ),
    ):
        assert [example.id for example in found] == ids
        assert found.notes[-1] == f"{said}, in the order of the file."


def test_samples_keep_the_order_and_are_nested():
    everything = [
        Example(id=f"x-{number}", prompt="p", target=None, dataset="x") for number in range(40)
    ]
    small, large = choose(everything, 8, 3), choose(everything, 20, 3)
    assert [e for e in everything if e in small] == small
    assert set(small) < set(large)
    assert choose(everything, 8, 4) != small
    assert set(choose(everything[::-1], 8, 3)) == set(small)
    assert choose([e for e in everything if e in large], 8, 3) == small, (
        "what is not drawn does not matter"
    )


def test_wrong_limits_and_names(folder):
    for name, options, error, says in (
        ("known", {"limit": 0}, ParameterError, "limit is 0; expected at least 1"),
        ("known", {"seed": 1}, ParameterError, "Got seed 1 and no limit"),
        ("nown", {}, UnknownNameError, r"Unknown data set 'nown'. Did you mean 'known'\?"),
        (
            "longra",
            {"category": "curency"},
            UnknownNameError,
            r"category of longra 'curency'. Did you mean 'currency'\?",
        ),
    ):
        with pytest.raises(error, match=says):
            data.load(name, folder, **options)


def test_environment_names_the_folder_and_an_argument_goes_before_it(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("NOISER_DATA", str(folder))
    assert len(data.load("known")) == 3
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"There is no known_1000.json with .*empty or below"):
        data.load("known", tmp_path / "empty")


def test_a_data_set_is_a_sequence_that_evaluate_takes(folder):
    found = data.load("longra", folder)
    assert len(found[1:3]) == 2
    assert found[0] in found
    assert [(i.prompt, i.target, i.spans) for i in read_examples(found)] == [
        (e.prompt, e.target, e.spans) for e in found
    ]
    assert len({*found, *found}) == 5


real_files = pytest.mark.skipif(REAL is None, reason=NO_REAL)


@real_files
def test_real_known():
    found = data.load("known", REAL)
    assert len(found) == 1208
    assert found.notes == ("Removed 1 of 1209 records: known-762 repeats the prompt of known-446.",)
    assert len({example.category for example in found}) == 33
    for example in found:
        assert parts(example)["subject"] == [example.meta["subject"]]
        continued = str(example.meta["template"]).format(example.meta["subject"]) + str(
            example.meta["prediction"]
        )
        assert continued.startswith(f"{example.prompt} {example.target}")


@real_files
def test_real_longra_equals_the_rendered_templates():
    rendered = REAL / "longra_573_rendered.json"
    if not rendered.is_file():
        pytest.skip("longra_573_rendered.json is not with the other files")
    right = json.loads(rendered.read_text(encoding="utf-8"))
    found = data.load("longra", REAL)
    assert len(found) == 573
    for one, e in zip(right, found, strict=True):
        spans = {name: parts(e)[name][0] for name in ("antecedent", "distractor")}
        about = {"id": int(e.id.removeprefix("longra-")), "category": e.category}
        assert {**about, "prompt": e.prompt, "target": e.target, **spans} == one
    assert sum(bool(e.meta["repaired"]) for e in found) == 186
    capitals = [parts(e)["last_content_word"][0] for e in found if e.category == "capital-world"]
    assert capitals == ["capital"] * 116


@real_files
def test_real_wikitext_and_wikibio():
    assert len(data.load("wikitext", REAL)) == 22
    found = data.load("wikibio", REAL)
    assert len(found) == len({example.id for example in found}) == 119
    assert all(example.prompt.count("(") == example.prompt.count(")") for example in found)
    assert min(len(example.prompt) for example in found) > 90


TOLD = ("once", "twice", "conflict", "combined")


def test_planted_gold_is_what_says_the_answer_and_nothing_else_does():
    examples = data.load("planted")
    assert len({example.id for example in examples}) == len(examples)
    told = [example for example in examples if example.category in TOLD]
    assert tuple(told) == examples[: len(told)]
    digest = hashlib.sha256("".join(example.prompt for example in told).encode()).hexdigest()
    assert digest[:16] == "578e8249f3cbd073", "the same in every run"
    for example in told:
        gold, rest = parts(example)["gold"], example.prompt
        for sentence in gold:
            rest = rest.replace(sentence + " ", "")
        assert example.without[0] == rest
        assert example.target in " ".join(gold)
        assert len(gold) == {"twice": 2, "combined": 2}.get(example.category, 1)
        if example.category in ("once", "twice"):
            (question,) = re.findall(r"Question: .*", example.prompt)
            ((person, thing),) = re.findall(r"does (\w+) keep the (\w+)", question)
            assert set(gold) == {f"{person} keeps the {thing} in the {example.target}."}
            assert f"{person} keeps the {thing}" not in rest


def test_one_copy_of_a_fact_is_enough():
    example = planted.draw("twice", 3)[0]
    copy, other = parts(example)["gold"][0], parts(example)["other"][0]
    question = example.prompt.rpartition(". ")[2]
    assert example.without == (f"{other} {question}",)
    sentences = re.findall(r".+?\. ", example.prompt)
    places = [index for index, sentence in enumerate(sentences) if sentence == f"{copy} "]
    assert len(places) == 2
    assert {*example.enough} == {
        "".join([*sentences[:place], *sentences[place + 1 :], question]) for place in places
    }


ALL_WORDINGS = (*planted.DEVELOPMENT, *planted.REPORTING)
KEPT = re.compile(r"(\w+) keeps the (\w+) in the (\w+)")


def drawn(category, sentences=6):
    return [e for w in ALL_WORDINGS for e in planted.draw(category, sentences, wording=w)]


@pytest.mark.parametrize("sentences", [2, 3, 6, 12, 96])
@pytest.mark.parametrize("category", [name for name in planted.CATEGORIES if name != "combined"])
def test_planted_prompts_lack_what_they_say_they_lack_in_every_wording(category, sentences):
    examples = drawn(category, sentences)
    assert len({example.id for example in examples}) == len(examples)
    for example in examples:
        texts = parts(example)
        question = example.prompt[max(end for s in example.spans.values() for _, end in s) + 1 :]
        assert "{" not in example.prompt
        assert sum(map(len, texts.values())) == sentences == example.meta["sentences"]
        for other in (*example.without, *example.enough):
            assert other.endswith(question)
            assert len(other) < len(example.prompt)
        for sentence in texts["gold"]:  # every prompt of `without` lacks a gold sentence
            assert any(o.count(sentence) < example.prompt.count(sentence) for o in example.without)
        if category not in ("none", "irrelevant"):
            assert re.search(rf"\b{example.target}\b", " ".join(texts["gold"]))
            assert not re.search(rf"\b{example.target}\b", question)


def cosine_finds_gold(example):
    """Whether the sentence nearest to question and answer by TF-IDF is gold."""
    spans = sorted(span for places in example.spans.values() for span in places)
    said = f"{example.prompt[spans[-1][1] :]} {example.target}"
    texts = [*(example.prompt[a:b] for a, b in spans), said]
    vectors = TfidfVectorizer().fit_transform(texts).toarray()
    return spans[(vectors[:-1] @ vectors[-1]).argmax()] in example.spans["gold"]


@pytest.mark.parametrize("sentences", [3, 6, 12])
def test_shared_words_hide_the_fact_from_overlap_length_and_place(sentences):
    examples = drawn("shared", sentences)
    assert all(map(cosine_finds_gold, drawn("once", sentences)))
    assert sum(map(cosine_finds_gold, examples)) / len(examples) < max(0.15, 1 / sentences)
    for example in examples:
        texts = parts(example)
        lengths = [len(text) for text in texts["other"]]
        assert min(lengths) < len(texts["gold"][0]) < max(lengths)
    assert {example.meta["depth"] for example in examples} >= {0, 50 if sentences == 3 else 100}


def test_no_sentence_of_shared_words_contradicts_the_fact():
    for example in planted.draw("shared", 24):
        facts = [match for text in parts(example)["other"] for match in KEPT.findall(text)]
        person, thing, _ = KEPT.findall(parts(example)["gold"][0])[0]
        assert len(facts) == 23
        assert (person, thing) not in [fact[:2] for fact in facts]
        assert {fact[0] == person for fact in facts} == {True, False}


def test_both_sides_of_a_contradiction_are_marked():
    first, second = planted.draw("contradiction", 6)[:2]
    assert first.prompt == second.prompt
    assert first.target != second.target
    assert first.spans["gold"] == second.spans["other_side"]
    assert second.spans["gold"] == first.spans["other_side"]
    told, other = (
        KEPT.findall(parts(first)["gold"][0])[0],
        KEPT.findall(parts(second)["gold"][0])[0],
    )
    assert told[:2] == other[:2]
    assert (told[2], other[2]) == (first.target, second.target)
    assert len(first.spans["other"]) == 4


def test_a_question_without_an_answer_asks_something_else_of_the_same_half_of_wordings():
    for example in drawn("none"):
        assert (example.target, example.spans["gold"]) == (None, ())
        question = example.prompt.rpartition(". ")[2]
        half = planted.DEVELOPMENT if example.meta["wording"] < 5 else planted.REPORTING
        shapes = {
            re.escape(WORDINGS[w].question.format(person="P", thing="T"))
            .replace("P", r"(\w+)")
            .replace("T", r"\w+")
            for w in half
            if w != example.meta["wording"]
        }
        assert sum(bool(re.search(shape, example.prompt)) for shape in shapes) == 1, question


def test_neither_part_of_a_chain_has_question_and_answer():
    for example in drawn("two"):
        first, second = sorted(parts(example)["gold"], key=lambda text: example.target in text)
        assert example.target not in first
        assert example.target in second
        assert example.target not in " ".join(parts(example)["other"])
        chain = CHAINS[example.meta["wording"]]
        shape = re.escape(chain.question).replace(r"\{start\}", r"(\w+)")
        (start,) = re.search(shape, example.prompt).groups()
        assert start in first
        assert start not in second
        assert len(example.without) == 3


def test_documents_that_do_not_matter_stand_before_a_stem_of_their_wording():
    stems = dict(STEMS)
    assert len(STEMS) >= 30
    for example in drawn("irrelevant"):
        (stem,) = example.enough
        assert stems[stem] == example.target
        assert example.prompt.endswith(f". {stem}")
    asked = [{e.enough for e in planted.draw("irrelevant", 6, wording=w)} for w in ALL_WORDINGS]
    assert sum(map(len, asked)) == len(set().union(*asked)) == len(STEMS)


def test_a_fact_in_two_parts_must_need_both():
    example = planted.draw("combined", 3)[0]
    box, room = "Philip keeps the telescope in the red box.", "The red box is in the garden."
    other = "Jacob keeps the bottle in the library."
    question = "Question: Where does Philip keep the telescope? Answer: in the"
    assert example.prompt == f"{box} {other} {room} {question}"
    assert example.without == tuple(
        " ".join([*some, question]) for some in ([other], [other, room], [box, other])
    )


def test_planted_prompts_of_another_seed_are_others_of_the_same_kind():
    first, other = planted.draw("twice", 6), planted.draw("twice", 6, seed=1)
    assert [
        e for e in data.load("planted") if e.category == "twice" and e.meta["sentences"] == 6
    ] == first
    assert [e.meta for e in other] == [e.meta for e in first]
    assert not {e.prompt for e in other} & {e.prompt for e in first}
    with pytest.raises(UnknownNameError, match="Did you mean 'twice'"):
        planted.draw("twise", 6)
    with pytest.raises(ParameterError, match="sentences is 1; expected an integer of at least"):
        planted.draw("once", 1)
    with pytest.raises(ParameterError, match="wording is 10; expected a number from 0 to 9"):
        planted.draw("once", 3, wording=10)
    with pytest.raises(ParameterError, match="from 0 to 0 for 'combined'"):
        planted.draw("combined", 3, wording=1)
