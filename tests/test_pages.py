"""What the manual shows runs, as it stands there, on random models; pages.py says what cannot, and why."""

from __future__ import annotations

import copy
import re
import shlex
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from typer.testing import CliRunner

import noiser
import noiser.data
import noiser.model
from bench_for_tests import plan_text, save_models
from data_for_tests import NO_REAL, REAL
from noiser.cli import app
from noiser.methods import METHODS
from pages import NOT_RUN, OWN_TESTS, ROOT, all_blocks, blocks, commands, pages, reason_not_to_run
from report_for_tests import full, write_folder
from tiny import tiny, tiny_model, tiny_tokenizer
from tokenizers_for_tests import CHAT_TEMPLATE

PROMPT = "The quick brown fox jumps over"
CONTEXT = (
    "The lazy dog sleeps. A teacher in the village plays the violin. The trains to the coast run late. The quick fox"
)


@pytest.fixture
def registries():
    """What a page registers is gone after it."""
    from noiser.judges import JUDGES

    kept = [(registry, dict(registry._entries), dict(registry._newest)) for registry in (METHODS, JUDGES)]
    yield
    for registry, entries, newest in kept:
        registry._entries, registry._newest = entries, newest


@pytest.fixture
def desk(tmp_path, monkeypatch, registries):
    """A folder with what the pages speak of, and a model that answers to every name."""
    loading, load_data = noiser.model.load_model, noiser.data.load

    def load_one(name, data_dir=None, limit=None, *more, **options):  # twenty examples take minutes, and show no more
        return load_data(name, data_dir, 1, *more, **options)

    def load(name, **options):
        if (tmp_path / name).is_dir():
            return loading(name, **options)
        return chat_model() if options or name.startswith("Qwen/") else tiny("llama")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(noiser, "load_model", load)
    monkeypatch.setattr(noiser.model, "load_model", load)
    monkeypatch.setattr(noiser.data, "load", load_one)
    monkeypatch.setenv("NOISER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("MY_KEY", "a key of one's own")
    if REAL is not None:
        monkeypatch.setenv("NOISER_DATA", str(REAL))
    for name in ("plan.toml", "PLAN.toml"):
        (tmp_path / name).write_text(plan_text(save_models(tmp_path / "models"), limit=1), encoding="utf-8")
    for name, text in (("notes.txt", "Mira keeps the lute in the attic."), ("news.txt", "It rains.")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def chat_model():
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = CHAT_TEMPLATE
    return noiser.wrap(tiny_model("llama", max_position_embeddings=1024).eval(), tokenizer)


def has_here(page, language):
    found = blocks(page, language) if language == "python" else runnable(page)
    return page not in OWN_TESTS and bool(found)


def runnable(page):
    return [line for line in commands(page) if line.startswith("noiser ") and reason_not_to_run(page, line) is None]


def needs_files(text):
    return re.search(r"noiser\.data\.load|--data known|data show", text) is not None and REAL is None


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in pages() if has_here(page, "python")])
def test_python(page, desk):
    lm = tiny("llama")
    attributions = [noiser.attribute(lm, text, method="occlusion", unit="word") for text in (PROMPT, "The lazy dog")]
    names = {"noiser": noiser, "lm": lm, "chat": chat_model(), "prompt": PROMPT, "context": CONTEXT}
    names |= {"attributions": attributions}
    write_folder(desk / "DIR", full(5))
    for number, block in enumerate(blocks(page, "python"), 1):
        if needs_files(block):
            pytest.skip(NO_REAL)
        exec(compile(block, f"{page}, Python block {number}", "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in pages() if has_here(page, "bash")])
def test_commands(page, desk):
    """All of a page's, one after the other, in one folder; DIR is a finished benchmark where the page runs none."""
    if not any(command.startswith("noiser bench run") for command in runnable(page)):
        write_folder(desk / "DIR", full(5))
    for command in runnable(page):
        if needs_files(command):
            pytest.skip(NO_REAL)
        result = CliRunner().invoke(app, shlex.split(command, comments=True)[1:])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, f"{command}\n{result.output}"


def others():
    return [
        (page, line)
        for page in pages()
        for line in commands(page)
        if not line.startswith("noiser ") and reason_not_to_run(page, line) is None
    ]


@pytest.mark.parametrize(("page", "command"), others())
def test_other_commands_name_what_is_there(page, command):
    program, *rest = shlex.split(command, comments=True)
    if program == "pip":
        check_install(rest)
    elif program == "export":
        assert "=" in rest[0]
    elif program == "source":
        assert rest == [".venv/bin/activate"]
    elif program == "python" and rest[:2] == ["-m", "pytest"]:
        assert (ROOT / rest[2]).is_file(), command
    elif program == "python" and rest[0] == "-m":
        assert page in OWN_TESTS
    else:
        place = rest[0] if program in ("python", ".") else program
        assert place in ("pytest", "mkdocs", "pre-commit", "jupyter") or (ROOT / place).is_file(), command


def check_install(arguments):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for argument in (text for text in arguments[1:] if not text.startswith("-")):
        if argument.startswith("."):
            assert (ROOT / argument.split("[")[0]).is_dir()
            argument = "noiser" + argument[argument.index("[") :] if "[" in argument else "noiser"
        wanted = Requirement(argument)
        assert wanted.name != "noiser" or wanted.extras <= {*project["optional-dependencies"]}


@pytest.mark.parametrize("page", pages())
def test_every_block_is_in_a_language_that_is_tested(page):
    for block in all_blocks(page):
        assert block.language in ("python", "bash", "toml", "json", "text", "bibtex", "nginx", "caddy", "yaml"), (
            f"{page}:{block.line}"
        )
        if block.language == "toml":
            tomllib.loads(block.text)
        if block.language == "yaml":
            yaml.safe_load(block.text)
    assert (ROOT / page).read_text(encoding="utf-8").count("```") == 2 * len(all_blocks(page))


def test_what_is_not_run_is_there():
    for where, begin in NOT_RUN:
        here = [where] if where else pages()
        texts = [text for page in here for text in [*commands(page), *(block.text for block in all_blocks(page))]]
        assert any(text.startswith(begin) for text in texts), (where, begin)


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page):
    """Also on the pages that are no part of the site, and to files outside it."""
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        target = link.partition("#")[0]
        if target and not re.match(r"[a-z]+:", target):
            assert place_of(page, target).exists(), f"{page} links to {link}"


def place_of(page, target):
    return ROOT / "CHANGELOG.md" if target.endswith("changelog.md") else (ROOT / page).parent / target


def test_llms_txt_has_every_page_of_the_manual_once():
    listed = re.findall(r"^- \[.+\]\((\S+)\): \S", (ROOT / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE)
    parts = ("docs/evidence/", "docs/reproduction/")  # of which the index alone is listed
    wanted = {page for page in pages() if page.startswith("docs/") and not page.startswith(parts)}
    assert sorted(listed) == sorted({*wanted, "docs/reproduction/index.md"})
