"""Plans of benchmarks: what is refused, what they mean, and which examples they draw."""

import dataclasses
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import noiser
from bench_for_tests import PROMPTS, plan_text, toml
from noiser.bench import Store, read_plan, work
from noiser.bench.plan import DataEntry, ModelEntry, parse_plan
from noiser.bench.resolve import check_change, draw, resolve
from noiser.bench.run import most_rows, status
from noiser.data import DATA_SETS, Example, LoadedExamples, Provenance, Recipe
from noiser.errors import PlanError
from noiser.evaluation.measuring import Item
from tiny import tiny

pytestmark = pytest.mark.usefixtures("unchecked_module")

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            'name = "occlusion"',
            'name = "oclusion"',
            "methods, 'oclusion': Unknown method 'oclusion'. Did you mean",
        ),
        (
            'name = "soft_scores"',
            'name = "soft_score"',
            "Unknown metric 'soft_score'. Did you mean 'soft_scores",
        ),
        (
            'label = "own", prompts',
            'name = "knwon", prompts',
            "expected either name, of a data set, or prompts",
        ),
        (
            "samples = 2",
            "sampels = 2",
            "Unknown hyper-parameter of noiser 'sampels'. Did you mean 'samples'",
        ),
        ("block = 2", "block = 0", "block: Input should be greater than or equal to 1"),
        (
            'data = "long"',
            'data = "longs"',
            "'localisation': Unknown label in data 'longs'. Did you mean 'long'?",
        ),
        (
            'name = "localisation"',
            'name = "answerability"',
            "metrics, 'answerability': answerability@1 needs a judge",
        ),
        ("masks = 2", 'judge = "local"', "metrics, 'soft_scores': judge would change nothing"),
        (
            "masks = 2",
            "judge_args = { timeout = 9 }",
            "judge_args are settings of a judge; expected judge as well",
        ),
        (
            'name = "localisation"',
            'name = "answerability"\njudge = "openai:m"\njudge_args = { prompt = "Say {word}" }',
            "has unknown fields: 'word'; expected {words} or {plain}",
        ),
        (
            'name = "localisation"',
            'name = "answerability"\njudge = "locl"',
            "Unknown judge 'locl'. Did you mean",
        ),
        ("max_new_tokens = 3", 'without_category = "a"', "without_category: only for data sets"),
        ('label = "long"', 'label = "own"', "two data have the label 'own'"),
        (
            'name = "localisation"',
            'name = "lds"\nlabel = "attribution"',
            "two metrics have the label 'attribution'",
        ),
        ('label = "long"', 'label = "../long"', "data.1.label: String should match pattern"),
        ("seed = 3", "seed = ", "is not valid TOML"),
    ],
)
def test_a_plan_that_means_nothing_is_refused(tmp_path, old, new, said):
    path, text = tmp_path / "plan.toml", plan_text(tmp_path)
    with pytest.raises(PlanError, match=r"Cannot read the plan .*No such file"):
        most_rows(path)
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(PlanError, match=re.escape(said)):
        most_rows(path)


def test_our_own_plans_and_packs():
    paths = [*ROOT.glob("benchmarks/plans/*.toml"), *ROOT.glob("docs/**/rows/plan.toml")]
    assert len(paths) >= 13
    for path in paths:
        methods = resolve(read_plan(path)[0], str(path))["methods"]
        assert len({str(sorted(method.items())) for method in methods.values()}) == len(methods), (
            path
        )  # no row twice
    store = Store(place := ROOT / "docs/evidence/fair/rows")
    assert store.meta["resolved"]["seed"] == store.plan.seed
    assert not any(row.error for row in store.rows())
    assert f"{store.plan.name}: " in status(place)
    page = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    plan = parse_plan(page.split("```toml\n")[1].split("```")[0], "docs/bench.md")
    assert (
        resolve(plan, "docs/bench.md")["methods"]["noiser_k_max"]["parameters"]["bounding"]
        == "k_max"
    )


def meaning(text):
    return json.loads(json.dumps(resolve(parse_plan(text, "p.toml"), "p.toml")))


def test_what_a_change_of_settings_means(tmp_path):
    """Settings of how a judge or an engine works may change, and which model or address it is may
    not.
    """
    text = plan_text(tmp_path)
    judged = (
        f'{text}[[metrics]]\nname = "answerability"\njudge = "openai:m"\njudge_args.base_url = '
        f'"http://x/v1"\n'
    )
    used = {kind: {*labels} for kind, labels in meaning(judged).items() if isinstance(labels, dict)}
    check_change(
        meaning(judged),
        meaning(f"{judged}judge_args.budget_tokens = 5\njudge_args.timeout = 9"),
        "f",
        used,
    )
    older = text.replace('name = "noiser"', 'name = "noiser@1", label = "noiser"')
    for old, new, said in (
        (judged, judged.replace("//x", "//y"), "metrics, 'answerability', judge_args was"),
        (older, text, r"methods, 'noiser', name was 'noiser@1' and is 'noiser@2'"),
    ):
        with pytest.raises(PlanError, match=said):
            check_change(meaning(old), meaning(new), "f", used)
    served = [
        ModelEntry.model_validate({"name": "vllm:m", "engine_args": {"tensor_parallel_size": n}})
        for n in (1, 8)
    ]
    assert served[1].load_options["tensor_parallel_size"] == 8
    assert served[0].meaning == served[1].meaning


@cache
def answers():
    """Six prompts with what the tiny Llama says."""
    lm, right = tiny("llama"), {}
    for prompt in (f"{a} {b}" for a in PROMPTS for b in PROMPTS):
        (target,) = noiser.attribute(lm, prompt, method="random", unit="token").targets
        if target.text.isprintable() and work.says(lm, prompt, target.text):
            right[prompt] = target.text
            if len(right) == 6:
                return right
    raise AssertionError("too few")


@pytest.fixture
def quiz():
    """A data set whose answers are those of the tiny Llama for every other prompt, and one prompt
    it cannot read.
    """
    examples = [
        Example(
            id=f"quiz-{i}",
            prompt=prompt,
            target="Zq" if i % 2 else said,
            dataset="quiz",
            category="abc"[i % 3],
        )
        for i, (prompt, said) in enumerate([*answers().items(), ("y" * 2000, "x")])
    ]
    source = Provenance(files=(), licence="ours", citation="")
    recipe = Recipe(source=source, read=lambda paths: LoadedExamples(examples, ("a note",)))
    DATA_SETS.register("quiz", lambda: recipe, summary="a quiz")
    yield examples
    del DATA_SETS._own["quiz@1"]


@pytest.fixture
def run_quiz(tmp_path, run_plan, models, quiz):
    """Runs a plan on the quiz with these settings of the data set; the folder's store."""

    def run(folder="run", progress=None, more=(), **data):
        named = {"name": "quiz", "seed": 1, "models": [{"name": f"{models}/llama"}, *more]}
        data = {"name": "quiz", "only_correct": True} | data
        run_plan(
            toml(named | {"data": [data], "methods": [{"name": "random"}]}),
            folder,
            progress=progress,
        )
        return Store(tmp_path / folder)

    return run


def test_only_examples_that_the_model_gets_right(run_quiz):
    (found,) = run_quiz("all").meta["selections"]
    assert (found["total"], found["checked"], found["right"]) == (7, 7, 3)
    assert set(found["chosen"]) == {"quiz-0", "quiz-2", "quiz-4"}
    assert (found["failed"], found["notes"]) == ({"quiz-6": "PromptError"}, ["a note"])
    for limit in (1, 2, 7):  # nested, and counted in the order of the draw
        store = run_quiz(limit=limit)
        (some,) = store.meta["selections"]
        assert some["chosen"] == found["chosen"][:limit]
        assert some["right"] == min(limit, 3) <= some["checked"]
        assert {row.example for row in store.rows()} == set(some["chosen"])


@pytest.mark.parametrize(
    ("says", "right"),
    [
        ({"with": "attic", "out": "barn"}, True),
        ({"with": "attic", "out": "attic"}, False),
        ({"with": "barn"}, False),
        ({"with": "attic", "out": "barn", "part": "barn"}, False),
    ],
)
def test_an_answer_must_change_without_what_decides_it(monkeypatch, says, right):
    """And it must stay where what is left is enough."""
    says = {"part": "attic"} | says
    monkeypatch.setattr(work, "says", lambda lm, prompt, answer: says[prompt] == answer)
    item = Item(index=0, prompt="with", gold="attic", without=("out",), enough=("part",))
    assert work._is_right(None, item) is right
    assert work._is_right(None, dataclasses.replace(item, without=(), enough=())) is (
        says["with"] == "attic"
    )


def test_a_choice_that_is_interrupted_goes_on(run_quiz, monkeypatch):
    asked, says = [], work.says

    def interrupts(done, total, job):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        work, "says", lambda lm, prompt, answer: asked.append(prompt) or says(lm, prompt, answer)
    )
    monkeypatch.setattr("noiser.bench.run.ASKED", 3)
    with pytest.raises(KeyboardInterrupt):
        run_quiz(progress=interrupts)
    assert len(asked) == 3
    assert run_quiz().meta["selections"][0]["checked"] == 7
    assert len(asked) == len(set(asked)) == 7


def test_categories(run_quiz):
    for number, (settings, expected) in enumerate([
        ({"category": ["a", "b"]}, {"quiz-0", "quiz-4"}),
        ({"without_category": "a"}, {"quiz-2", "quiz-4"}),
        ({"without_ids": ["quiz-0", "quiz-1"]}, {"quiz-2", "quiz-4"}),
    ]):  # fmt: skip
        assert {row.example for row in run_quiz(str(number), **settings).rows()} == expected
    for settings, said in (
        ({"category": "abc"}, "Unknown category of quiz 'abc'"),
        ({"without_ids": ["quiz-0", "qiuz-1"]}, "Unknown example of quiz 'qiuz-1'. Did you mean"),
        ({"max_characters": 1}, "has no example left"),
    ):
        with pytest.raises(PlanError, match=said):
            run_quiz("never", **settings)


def test_stratified_examples_come_from_all_categories_in_turn(quiz):
    entries = [
        DataEntry.model_validate({"name": "quiz", "stratified": stratified})
        for stratified in (False, True)
    ]
    plain, turns = (
        [(i.id, i.category) for i in draw(entry, 1, None).examples.values()] for entry in entries
    )
    assert [category for _, category in turns] != [category for _, category in plain]
    assert (
        {category for _, category in turns[:3]}
        == {category for _, category in turns[3:6]}
        == {"a", "b", "c"}
    )
    for category in "abc":  # within one, the order of the draw
        assert [i for i in turns if i[1] == category] == [i for i in plain if i[1] == category]


def test_a_model_may_have_fewer_examples_than_the_others(tmp_path, run_quiz, models):
    found = run_quiz(more=[{"name": f"{models}/gemma3", "limit": {"quiz": 2}}], only_correct=False)
    assert Counter(row.model for row in found.rows()) == {"llama": 7, "gemma3": 2}
    assert most_rows(tmp_path / "plan.toml") == 9
    assert ": complete" in status(tmp_path / "run")


def test_answers_that_a_data_set_does_not_have(run_quiz, quiz):
    quiz[:] = [dataclasses.replace(example, target=None) for example in quiz]
    for settings in ({"explain": "answer", "only_correct": False}, {}):
        with pytest.raises(PlanError, match="'quiz' needs answers, and examples of quiz have none"):
            run_quiz(**settings)
