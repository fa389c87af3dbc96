"""Offsets as JavaScript counts them: of every answer, and of spans in a request."""

import json
import sys

import pytest

import noiser
from noiser.errors import ParameterError
from noiser.server.offsets import citation_in_utf16, code_point_spans, in_utf16, utf16_count
from web_for_tests import assert_alike, chatty

pytestmark = pytest.mark.usefixtures("unchecked_module")
citing = sys.modules["noiser.explain._cite"]  # the function has the same name

TEXTS = {
    "plain": "The fox sings.",
    "emoji": "a😀b🌧️c",
    "joined emoji": "x👩‍👩‍👧y",
    "combining": "cafe\u0301 n\u0303o",
    "CJK": "狐が歌う。𠮷野家。",
    "right to left": "שלום 😀 عالم",
    "flags": "🇫🇷 to 🇯🇵",
    "empty": "",
}
WIDE = "The 😀 fox sings. 𠮷 dog plays near the 🌧 river."


def by_hand(text, offset):
    return len(text[:offset].encode("utf-16-le")) // 2


def cut(text, start, end):
    """What JavaScript's `slice` gives."""
    return text.encode("utf-16-le")[2 * start : 2 * end].decode("utf-16-le")


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_every_offset_is_that_of_the_encoded_text(text):
    count = utf16_count(text)
    places = range(len(text) + 1)
    assert [count(place) for place in places] == [by_hand(text, place) for place in places]
    assert code_point_spans([(count(a), count(len(text))) for a in places], text, "unit") == [
        (a, len(text)) for a in places
    ]


@pytest.mark.parametrize("offset", [2, 7, -1], ids=["within", "beyond", "below"])
def test_an_offset_that_is_no_place_of_the_text_is_refused(offset):
    with pytest.raises(ParameterError, match=f"unit has the offset {offset}; expected 0 to 6"):
        code_point_spans([(0, 1), (1, offset)], "a😀b狐c", "unit")


def asked(web, path, **question):
    reply = web.client.post(f"v1/{path}", json=question)
    assert reply.status_code == 200, reply.text
    return reply.json()


def both(web, path, **question):
    """The answer with both kinds of offsets, and the second as it follows from the first."""
    points = asked(web, path, **question)
    units = asked(web, path, **question, offsets="utf16")
    return points, units


def test_the_units_of_an_attribution(web):
    question = {
        "prompt": WIDE,
        "method": "occlusion",
        "sources": ["𠮷 dog plays near the 🌧 river."],
    }
    points, units = both(web, "attribute", **question)
    text = points["text"]
    assert units["text"] == text
    assert (
        units["prompt_length"] == by_hand(text, points["prompt_length"]) > points["prompt_length"]
    )
    for one, other in zip(points["units"], units["units"], strict=True):
        assert cut(text, other["start"], other["end"]) == text[one["start"] : one["end"]]
    (source,) = units["info"]["sources"]
    assert cut(text, source["start"], source["end"]) == question["sources"][0]
    assert_alike(units["scores"], points["scores"])


def test_places_of_citations_in_the_answer_the_sources_and_the_prompt(web, monkeypatch):
    monkeypatch.setitem(citing.MEMORY, "hidden", -1e9)  # each sentence cites something
    sources = [["T😀", "  A 😀 fox. 𠮷 dog."], "Rain 🌧. More."]
    question = {"question": "Who?", "sources": sources, "answer": " It 🌧 rains. A dog 😀."}
    question |= {"unit": "sentence", "rule": True}
    points, units = both(web, "cite", **question)
    given = [sources[0][1], sources[1]]
    text = points["attribution"]["text"]
    quotes = 0
    for one, other in zip(points["sentences"], units["sentences"], strict=True):
        assert cut(points["answer"], other["start"], other["end"]) == one["text"]
        for citation in other["citations"]:
            for quote in citation["quotes"]:
                quotes += 1
                assert cut(text, quote["start"], quote["end"]) == quote["text"]
                place = quote["start_in_source"], quote["end_in_source"]
                assert cut(given[citation["number"] - 1], *place) == quote["text"]
    assert quotes
    assert units["sentences"][-1]["start"] != points["sentences"][-1]["start"]
    for one, other in zip(points["sources"], units["sources"], strict=True):
        assert cut(text, other["start"], other["end"]) == one["text"]
    for rule in units["rules"]:
        for unit in rule["units"]:
            assert cut(rule["text"], unit["start"], unit["end"]).strip() == unit["text"].strip()
    expected = in_utf16(points["attribution"])
    assert_alike(units["attribution"], expected)
    assert expected["units"] != points["attribution"]["units"]


def test_the_units_of_a_rule_and_the_edits_of_a_diff(web):
    points, units = both(web, "rule", prompt=WIDE, unit="sentence", fresh=10)
    for one, other in zip(points["units"], units["units"], strict=True):
        assert (
            cut(points["text"], other["start"], other["end"])
            == points["text"][one["start"] : one["end"]]
        )
    after = WIDE.replace("plays", "sleeps")
    _, units = both(web, "diff", before=WIDE, after=after, max_new_tokens=1)
    (edit,) = units["edits"]
    length = by_hand(edit["before"], len(edit["before"]))
    assert cut(WIDE, edit["start"], edit["start"] + length) == edit["before"]


def test_spans_of_a_request_are_counted_in_the_same_way(web):
    prompt, target = "The 😀 fox sings", " 😀 near the river"
    spans, rows = [(0, 5), (5, 15)], [(0, 2), (2, len(target))]
    expected = noiser.attribute(
        chatty("llama"), prompt, target=target, unit=spans, target_unit=rows, method="occlusion"
    )
    found = asked(
        web, "attribute", prompt=prompt, target=target, method="occlusion", offsets="utf16",
        unit=[[by_hand(prompt, place) for place in span] for span in spans],
        target_unit=[[by_hand(target, place) for place in span] for span in rows],
    )  # fmt: skip
    assert [unit["text"] for unit in found["units"]] == [unit.text for unit in expected.units]
    assert [row["text"] for row in found["targets"]] == [row.text for row in expected.targets]
    reply = web.client.post(
        "v1/attribute", json={"prompt": prompt, "target_unit": [[0, 2]], "offsets": "utf16"}
    )
    assert reply.status_code == 400
    assert "expected the target as a text" in reply.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_places_of_a_completion_s_citations(web, monkeypatch, stream):
    monkeypatch.setitem(citing.MEMORY, "hidden", -1e9)
    documents = [{"id": "a", "text": " A 😀 fox. 𠮷 dog."}, {"id": "b", "text": "🌧 More. 🌧 Rain."}]
    question = {
        "messages": [{"role": "user", "content": "Who?"}],
        "documents": documents,
        "max_tokens": 24,
        "temperature": 2,  # writes whatever characters there are
        "seed": 5,
        "offsets": "utf16",
        "stream": stream,
    }
    reply = web.client.post("v1/chat/completions", json=question)
    if stream:
        datas = [line.removeprefix("data: ") for line in reply.text.split("\n\n")]
        chunks = [json.loads(data) for data in datas if data.startswith("{")]
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        citations = [each for chunk in chunks[:-1] for each in chunk.get("citations", ())]
        assert citations == chunks[-1]["citations"]
    else:
        text = reply.json()["choices"][0]["message"]["content"]
        citations = reply.json()["citations"]
    assert citations
    quotes = 0
    for citation in citations:
        assert cut(text, citation["start"], citation["end"]) == citation["text"]
        for source in citation["sources"]:
            given = documents[source["number"] - 1]["text"]
            for quote in source["quotes"]:
                quotes += 1
                assert cut(given, quote["start"], quote["end"]) == quote["text"]
    assert quotes


def test_a_citation_worked_by_hand():
    quote = {"text": "b", "start": 2, "end": 3, "score": 1.0}
    citation = {"start": 3, "end": 5, "text": "狐𠮷", "sources": [{"number": 2, "quotes": [quote]}]}
    found = citation_in_utf16(citation, "😀😀 狐𠮷", ["no", "𠮷ab"])
    assert (found["start"], found["end"]) == (5, 8)
    assert found["sources"] == [{"number": 2, "quotes": [quote | {"start": 3, "end": 4}]}]


def test_another_count_is_refused(web):
    reply = web.client.post("v1/cite", json={"question": "", "sources": [], "offsets": "utf8"})
    assert reply.status_code == 422
    assert "offsets" in reply.json()["error"]["message"]
