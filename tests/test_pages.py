"""What the manual shows runs, as it stands there, on random models; pages.py says what cannot, and
why.
"""

import re
import shlex
import subprocess
import sys
import tomllib
from importlib.util import find_spec

import pytest
import yaml
from typer.testing import CliRunner

import noiser
import noiser.data
import noiser.model
from bench_for_tests import plan_text, save_models
from chat_for_tests import chat_model
from data_for_tests import NO_REAL, REAL
from noiser.cli import app
from noiser.integrations.common import imported
from noiser.judges import JUDGES
from noiser.methods import METHODS
from pages import NOT_RUN, ROOT, all_blocks, blocks, commands, pages, reason_not_to_run
from report_for_tests import full, write_folder
from tiny import save_tiny, tiny, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("unchecked_module")  # shapes are checked elsewhere

README = "README.md"
PROMPT = "The quick brown fox jumps over"
CONTEXT = (
    "The lazy dog sleeps. A teacher in the village plays the violin. "
    "The trains to the coast run late. The quick fox"
)


@pytest.fixture
def desk(page, tmp_path, monkeypatch):
    """A folder with what a page speaks of, and a model that answers to every name."""
    loading, load_data = noiser.model.load_model, noiser.data.load

    def load_one(
        name, data_dir=None, limit=None, *more, **options
    ):  # twenty examples take minutes, and show no more
        return load_data(name, data_dir, 1, *more, **options)

    def load(name, **options):
        if (tmp_path / name).is_dir():
            return loading(name, **options)
        chats = options or name.startswith("Qwen/") or name.endswith("instruct")
        return chat_model() if chats else tiny("llama")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(noiser, "load_model", load)
    monkeypatch.setattr(noiser.model, "load_model", load)
    monkeypatch.setattr(noiser.data, "load", load_one)
    for registry in (METHODS, JUDGES):  # what a page registers is gone after it
        entries = dict(registry._entries)
        monkeypatch.setattr(registry, "_own", entries)
        monkeypatch.setattr(registry, "_entries", entries)
    values = {
        "NOISER_CACHE": str(tmp_path / "cache"),
        "OPENAI_API_KEY": "none",
        "MY_KEY": "a key of one's own",
    }
    for name, value in (values | ({"NOISER_DATA": str(REAL)} if REAL else {})).items():
        monkeypatch.setenv(name, value)
    for name, text in (
        ("notes.txt", "Mira keeps the lute in the attic."),
        ("news.txt", "It rains."),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
    if any(command.startswith("noiser bench run") for command in runnable(page)):
        (tmp_path / "PLAN.toml").write_text(
            plan_text(save_models(tmp_path / "models"), limit=1), encoding="utf-8"
        )
    if page == "docs/coming_from.md":
        use_small_model_in_inseq(tmp_path, monkeypatch)
    return tmp_path


def use_small_model_in_inseq(folder, monkeypatch):
    if any(find_spec(name) is None for name in ("inseq", "captum", "shapiq")):
        pytest.skip(
            "Inseq, Captum or shapiq is not installed: pip install inseq==0.7.1 shapiq==1.4.1"
        )
    inseq, small = imported("inseq", "inseq"), save_tiny("gemma3", folder / "small")
    tiny_tokenizer(bos=False).save_pretrained(small)  # others need a continuation
    load = inseq.load_model

    def load_small(model, *more, **options):
        return load(str(small) if isinstance(model, str) else model, *more, **options)

    monkeypatch.setattr(inseq, "load_model", load_small)


def runnable(page):
    return [
        line
        for line in commands(page)
        if line.startswith("noiser ") and reason_not_to_run(page, line) is None
    ]


def needs_files(text):
    return (
        re.search(r"noiser\.data\.load|--data known|data show", text) is not None and REAL is None
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in pages() if page != README and blocks(page, "python")]
)
def test_python(page, desk):
    lm = tiny("llama")
    attributions = [
        noiser.attribute(lm, text, method="occlusion", unit="word")
        for text in (PROMPT, "The lazy dog")
    ]
    names = {"noiser": noiser, "lm": lm, "chat": chat_model(), "prompt": PROMPT, "context": CONTEXT}
    names["attributions"] = attributions
    write_folder(desk / "DIR", full(5))
    for number, block in enumerate(blocks(page, "python"), 1):
        if needs_files(block):
            pytest.skip(NO_REAL)
        packages = re.findall(r"^(?:from|import) (\w+)", block, re.MULTILINE)
        if page == "docs/howto/frameworks.md" and not all(map(find_spec, packages)):
            continue
        exec(compile(block, f"{page}, Python block {number}", "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in pages() if page != README and runnable(page)])
def test_commands(page, desk):
    """All of a page's, one after the other, in one folder; DIR is a finished benchmark where the
    page runs none.
    """
    if not (desk / "PLAN.toml").exists():
        write_folder(desk / "DIR", full(5))
    for command in runnable(page):
        if needs_files(command):
            pytest.skip(NO_REAL)
        result = CliRunner().invoke(app, shlex.split(command, comments=True)[1:])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, f"{command}\n{result.output}"


@pytest.mark.slow
def test_the_readme_explains_an_answer_of_the_real_model(gemma, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(noiser, "load_model", lambda name: gemma)
    names = {}
    for block in blocks(README, "python"):
        exec(block, names)
    att = names["att"]
    scores = {
        unit.text.strip(" ,"): float(score)
        for unit, score in zip(att.units, att.scores[0], strict=True)
    }
    assert att.targets[0].text == " Portuguese"
    assert (max(scores, key=scores.__getitem__), min(scores, key=scores.__getitem__)) == (
        "Lisbon",
        "Germany",
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", runnable(README))
def test_commands_of_the_readme_in_a_process_of_their_own(command, gemma):
    arguments = [sys.executable, "-m", "noiser", *shlex.split(command, comments=True)[1:]]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "Loading gemma-3-270m ...\n")
    assert " Paris" in done.stdout


def test_every_method_is_described():
    text = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    assert [name for name in METHODS.names() if f"\n## {name}\n" not in text] == []


OTHERS = [
    (page, line)
    for page in pages()
    for line in commands(page)
    if not line.startswith("noiser ") and reason_not_to_run(page, line) is None
]
PROGRAMS = ("pytest", "mkdocs", "pre-commit", "jupyter", "export", "source")


@pytest.mark.parametrize(("page", "command"), OTHERS)
def test_other_commands_name_what_is_there(page, command):
    program, *rest = shlex.split(command, comments=True)
    if program == "pip":
        there = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
        assert {*",".join(re.findall(r"\[(.+?)\]", command)).split(",")} <= {"", *there}
    else:
        started = rest[2:] if rest[:2] == ["-m", "pytest"] else rest
        place = started[0] if program in ("python", ".") else program
        assert place in PROGRAMS or (ROOT / place).is_file(), command


@pytest.mark.parametrize("page", pages())
def test_every_block_is_in_a_language_that_is_tested_and_links_lead_somewhere(page):
    """Also on the pages that are no part of the site, and to files outside it."""
    text, found = (ROOT / page).read_text(encoding="utf-8"), all_blocks(page)
    languages = {"python", "bash", "toml", "json", "text", "bibtex", "nginx", "caddy", "yaml"}
    assert {language for language, _ in found} <= languages
    assert text.count("```") == 2 * len(found)
    for language, block in found:
        {"toml": tomllib.loads, "yaml": yaml.safe_load}.get(language, str)(block)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target = link.partition("#")[0]
        if target and not re.match(r"[a-z]+:", target):
            there = (
                ROOT / "CHANGELOG.md"
                if target.endswith("changelog.md")
                else (ROOT / page).parent / target
            )
            assert there.exists(), f"{page} links to {link}"


def test_what_is_not_run_is_there():
    for where, begin in NOT_RUN:
        here = [where] if where else pages()
        texts = [
            text
            for page in here
            for text in [*commands(page), *(block for _, block in all_blocks(page))]
        ]
        assert any(text.startswith(begin) for text in texts), (where, begin)


def test_llms_txt_has_every_page_of_the_manual_once():
    listed = re.findall(
        r"^- \[.+\]\((\S+)\): \S", (ROOT / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    parts = ("docs/evidence/", "docs/reproduction/")  # of which the index alone is listed
    wanted = {page for page in pages() if page.startswith("docs/") and not page.startswith(parts)}
    assert sorted(listed) == sorted({*wanted, "docs/reproduction/index.md"})
