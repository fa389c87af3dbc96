"""The commands: what they print, where, and with what exit status."""

import io
import json
import re
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from unittest.mock import Mock

import pandas as pd
import pytest
from typer.testing import CliRunner

import noiser
import noiser.model
from noiser import progress
from noiser.cli import app, terminal
from noiser.cli.options import parse_parameters, parse_prompt
from noiser.errors import NoiserError
from noiser.methods import METHODS
from noiser.metrics import METRICS
from tiny import tiny

PROMPT = "The quick brown fox jumps"
LOADING = "Loading gemma-3-270m ...\n"
SOURCE = str(Path(__file__))
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture
def noiser_command(monkeypatch):
    """Runs a command on a tiny model; `asked` is what `load_model` got."""
    asked: dict[str, object] = {}

    def load(name, **options):
        asked.update(name=name, **options)
        return tiny("llama")

    monkeypatch.setattr(noiser.model, "load_model", load)

    def run(*arguments, **options):
        result = CliRunner().invoke(app, list(arguments), **options)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        result.asked = asked
        return result

    return run


def test_help_and_version(noiser_command):
    for arguments in (["--help"], ["attribute", "-h"]):
        assert "Usage: noiser" in noiser_command(*arguments).stdout
    assert noiser_command("--version").stdout == f"noiser {noiser.__version__}\n"


def test_methods_and_metrics_are_listed_with_defaults_and_settings(noiser_command):
    families = [f"{family.prefix}:NAME" for family in METHODS.families.values()]
    for command, names in (("methods", METHODS.names() + families), ("metrics", METRICS.names())):
        lines = noiser_command(command).stdout.splitlines()
        heads = [at for at, line in enumerate(lines) if not line.startswith(" ")]
        said = {lines[at]: [line.strip() for line in lines[at + 1 : at + 3]] for at in heads}
        assert [*said] == names
        if command == "methods":
            assert said["noiser"][0] == METHODS.get("noiser").summary
            assert "samples=10, steps=10, bounding=k_min, objective=prob" in said["noiser"][1]
            assert "bounding=relative" in said["noiser_relative"][1]
    assert said["lds"] == [METRICS.get("lds").summary, "settings: draws, masks, removal"]
    assert said["answerability"][1] == "settings: judge, normalization"


WHERE, ANSWER = "Where is the lute?", "In the attic."
TEXTS = [("notes.txt", "The lute is in the attic."), ("news.txt", "It rains.")]
CITE = [
    "cite",
    WHERE,
    "--source",
    "notes.txt",
    "--source",
    "news.txt",
    "--answer",
    ANSWER,
    "--unit",
    "source",
]
TWO = [PROMPT, "The lazy dog sleeps"]
QUICK = ["--method=occlusion", "--metrics=soft_scores", "--metric-set=masks=2"]
SOFT = {"masks": 2, "normalization": "positive", "seed": 5}
COMMANDS = {
    "attribute": (
        ["--method=noiser", "--seed=3", "--set=samples=4", "--unit=word", "--max-new-tokens=2"],
        lambda lm: noiser.attribute(
            lm, PROMPT, method=noiser.Noiser(samples=4), seed=3, unit="word", max_new_tokens=2
        ),
    ),
    "attribute a contrast": (
        ["--method", "occlusion", "--target", " fox", "--foil", " dog"],
        lambda lm: noiser.attribute(lm, PROMPT, method="occlusion", target=" fox", foil=" dog"),
    ),
    "compare": (
        ["--methods", "noiser, noiser_relative", "--target", " fox"],
        lambda lm: noiser.compare(lm, PROMPT, ["noiser", "noiser_relative"], target=" fox"),
    ),
    "cite": (CITE, lambda lm: noiser.cite(lm, WHERE, TEXTS, answer=ANSWER, unit="source")),
    "evaluate": (
        ["The lazy dog sleeps", *QUICK, "--metric-set=normalization=positive", "--seed=5"],
        lambda lm: noiser.evaluate(lm, TWO, "occlusion", "soft_scores", **SOFT),
    ),
}


@pytest.fixture
def sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in TEXTS:
        Path(name).write_text(f"{text}\n", encoding="utf-8-sig")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_shows_what_the_library_returns(noiser_command, sources, capsys, name):
    arguments, call = COMMANDS[name]
    command = arguments if arguments[0] == name else [name.split()[0], PROMPT, *arguments]
    expected = call(tiny("llama"))
    print(expected)
    assert noiser_command(*command).stdout == capsys.readouterr().out.lstrip("\n")
    result = noiser_command(*command, "--format", "json")
    records = expected.to_dict()
    assert (json.loads(result.stdout), result.stderr) == (json.loads(json.dumps(records)), LOADING)
    assert "<html" in noiser_command(*command, "--format", "html").stdout
    table = expected.rows if name == "evaluate" else expected.to_dataframe()
    read = pd.read_csv(io.StringIO(noiser_command(*command, "--format", "csv").stdout))
    assert len(read) == len(table)
    numeric = table.select_dtypes("number")
    pd.testing.assert_frame_equal(read[numeric.columns], numeric, check_dtype=False, atol=1e-6)


def test_saved_evaluations_are_compared(noiser_command, tmp_path):
    prompts = [f"{PROMPT} {word}" for word in ("over", "and", "near", "with", "by", "to")]
    files = [tmp_path / f"{name}.json" for name in ("occlusion", "random")]
    quick = ["--metrics", "erasure"]
    for file in files:
        noiser_command("evaluate", *prompts, *quick, "--method", file.stem, "-o", str(file))
    loaded = {str(file): noiser.Evaluation.load(file) for file in files}
    expected = noiser.evaluation.differences(loaded).to_dict("records")
    result = noiser_command("compare", *map(str, files), "--format", "json")
    data = json.loads(result.stdout)
    assert result.stderr == ""  # no model is loaded
    assert [*data["evaluations"]] == [*loaded]
    assert [gap["value"] for gap in data["differences"]] == [gap["value"] for gap in expected]
    assert f"{files[0]} minus each other" in noiser_command("compare", *map(str, files)).stdout
    both = tmp_path / "both.json"
    against = ["--method", "occlusion", "--against", "random", "-o", str(both)]
    noiser_command("evaluate", *prompts, *quick, *against)
    data = json.loads(
        noiser_command("compare", *map(str, (both, files[0])), "--format=json").stdout
    )
    assert [*data["evaluations"]] == [f"{both}: occlusion", f"{both}: random", str(files[0])]
    wrong = noiser_command("compare", *map(str, files), "--methods", "random")
    assert "Leave out all options but" in wrong.stderr
    assert "is given twice" in noiser_command("compare", str(files[0]), str(files[0])).stderr
    noiser_command("attribute", PROMPT, "--method", "random", "-o", str(both))
    assert "'noiser.evaluation'" in noiser_command("compare", str(both), str(files[0])).stderr


def test_hidden_sources_and_checks(noiser_command, sources):
    assert "<html" in noiser_command(*CITE, "--set", "removal=zero", "--format", "html").stdout
    words = lambda *command: " ".join(noiser_command(*command).stdout.split())
    attribute = ["attribute", PROMPT, "--method", "random", "--check"]
    assert "8 removals" in words(*attribute, "8")
    assert "20 removals" in words(*attribute, "auto", "--unit", "word")  # all halves of five
    assert "too few for the scores to be checked" in words(
        *CITE, "--accuracy", "fast", "--check", "8"
    )
    assert "neither a number of inputs nor auto" in noiser_command(*attribute, "x").stderr


@pytest.mark.parametrize(
    ("options", "is_written"),
    [
        ([], True),
        (["--no-contrast"], False),
        (["--answer", " it"], False),
        (["--answer", " it", "--contrast"], True),
    ],
)
def test_an_answer_without_the_sources_is_written_where_it_is_asked_for(
    noiser_command, sources, options, is_written
):
    command = ["cite", WHERE, "--source", "notes.txt", "--unit", "source", "--max-new-tokens", "4"]
    data = json.loads(noiser_command(*command, *options, "--format", "json").stdout)
    assert (data["answer_without"] is not None) == is_written


def test_evaluate_reads_stdin(noiser_command):
    record = json.dumps({"prompt": PROMPT, "target": " fox"})
    typed = f"\n{PROMPT}\u2028and\x85on\r\n-\n{record}\n{PROMPT}\n"  # a dash of stdin is a prompt
    quick = ["--metrics", "erasure", "--method", "occlusion", "--format", "json"]
    lines = noiser_command("evaluate", "-", "--limit", "3", *quick, input=typed)
    *rows, last = json.loads(lines.stdout)["rows"]
    assert ([row["prompt"] for row in rows], last["target"]) == (
        [f"{PROMPT}\u2028and\x85on", "-"],
        " fox",
    )


def test_evaluate_compares_methods(noiser_command):
    prompts = [f"{PROMPT} {word}" for word in ("over", "and", "near", "with", "by", "to")]
    quick = ["--metrics", "erasure", "--method", "occlusion", "--against", "random, position"]
    data = json.loads(noiser_command("evaluate", *prompts, "--format", "json", *quick).stdout)
    assert list(data["evaluations"]) == ["occlusion", "random", "position"]
    for gap in data["differences"]:
        sides = ("occlusion", gap["other"])
        one, other = (
            [row[gap["number"]] for row in data["evaluations"][name]["rows"]] for name in sides
        )
        assert gap["value"] == pytest.approx(fmean(one) - fmean(other))
    assert (
        "occlusion minus each other method"
        in noiser_command("evaluate", *prompts[:2], *quick).stdout
    )
    page = noiser_command("evaluate", *prompts[:2], "--format", "html", *quick).stdout
    assert (page.count("<table"), page.count("</html>")) == (4, 1)


@pytest.mark.parametrize(
    ("name", "options", "form"),
    [
        ("out", [], "text"),
        ("out.json", [], "json"),
        ("out.HTML", [], "html"),
        ("out.md", ["--format=html"], "html"),
    ],
)
def test_output_goes_to_the_file_alone(noiser_command, tmp_path, name, options, form):
    arguments = ["attribute", PROMPT, "--method", "occlusion"]
    result = noiser_command(*arguments, *options, "-o", str(tmp_path / name))
    assert (result.stdout, result.stderr) == ("", f"{LOADING}Wrote {tmp_path / name}\n")
    assert (tmp_path / name).read_text(encoding="utf-8") == noiser_command(
        *arguments, "--format", form
    ).stdout
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_prompt_from_stdin(noiser_command):
    command = ["--method", "occlusion", "--format", "json"]
    typed = noiser_command("attribute", "-", *command, input=f"{PROMPT}\n")
    assert typed.stdout == noiser_command("attribute", PROMPT, *command).stdout
    assert (
        "stdin is not UTF-8 at byte 3."
        in noiser_command("attribute", "-", *command, input=b"caf\xe9").stderr
    )


def test_versions_from_files_or_stdin_lack_their_last_newline(noiser_command, tmp_path):
    (tmp_path / "after.txt").write_bytes(b"The quick fox plays\r\n")
    found = noiser_command(
        "diff", "-", str(tmp_path / "after.txt"), "--format", "json", input="The lazy fox plays\n"
    )
    data = json.loads(found.stdout)
    answer = noiser.diff(tiny("llama"), "The lazy fox plays", "The quick fox plays").answer
    assert (data["texts"], data["answer"]) == ([["The", 0, " fox plays"]], answer)


def test_options_reach_the_model(noiser_command):
    options = [
        "--model",
        "m",
        "--dtype",
        "bfloat16",
        "--device",
        "cpu",
        "--revision",
        "v2",
        "--trust-remote-code",
    ]
    template = [
        "--chat-template-arg",
        "enable_thinking=false",
        "--chat-template-arg",
        "style=brief",
    ]
    asked = noiser_command("attribute", PROMPT, "--method", "random", *options, *template).asked
    loading = {
        "dtype": "bfloat16",
        "device": "cpu",
        "device_map": None,
        "revision": "v2",
        "trust_remote_code": True,
    }
    assert (
        asked
        == {"name": "m", "chat_template_kwargs": {"enable_thinking": False, "style": "brief"}}
        | loading
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["attribute", ""], "prompt"),
        (
            ["attribute", PROMPT, "--max-new-tokens", "0"],
            "max_new_tokens is 0; expected an integer of at least 1",
        ),
        (
            ["attribute", PROMPT, "--method=noiser", "--set=sample=3"],
            "noiser 'sample'. Did you mean 'samples'",
        ),
        (["attribute", PROMPT, "--set", "samples=1", "--set", "samples=2"], "twice"),
        (["attribute", PROMPT, "--chat"], "chat"),
        (["attribute", PROMPT, "-o", "not/there/a.json"], "does not exist"),
        (
            ["attribute", PROMPT, "-o", "a.pdf"],
            "got a.pdf, expected a name that ends in .txt, .json, .html",
        ),
        (["compare", PROMPT, "--methods", "occlusion,random,occlusion"], "got 'occlusion' twice"),
        (["cite", PROMPT, "--source", sys.executable], "is not UTF-8 at byte"),
        (["diff", PROMPT, PROMPT], "expected one, or - for stdin"),
        (["evaluate"], "either PROMPTs or --data"),
        (["evaluate", PROMPT, "--metric-set", "maks=2"], "Did you mean 'masks'?"),
        (
            ["evaluate", PROMPT, "--metrics", "answerability", "--judge", "openai"],
            "got no model; expected a name",
        ),
        (
            ["evaluate", PROMPT, "--metrics=answerability", "--judge=local", "--judge-set=stile=x"],
            "does not accept stile",
        ),
        (["attribute", PROMPT, "--method", "noiser_relative", "--foil", " dog"], "foil"),
        (["compare", PROMPT, "--methods", "occlusion:objective=none"], "objective"),
        (["bench", "status", "not/there"], "not/there"),
    ],
)
def test_errors_are_one_line_on_stderr(noiser_command, arguments, says):
    result = noiser_command(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    said = result.stderr.removeprefix(LOADING)
    assert re.fullmatch(f"noiser: error: .*{re.escape(says)}.*\n", said, re.IGNORECASE)
    assert result.asked == {} or says in (
        "prompt",
        "chat",
        "does not accept stile",
    )  # else said before loading


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["attribute", "The", "sky", "is"], "Put quotes around a text of several words"),
        (["compare", PROMPT, "--methods", "noiser", "occlusion"], "commas between names"),
        (["attribute", PROMPT, "--unit", "words"], "Did you mean 'word'?"),
        (
            ["attribute", PROMPT, "--unit", "source"],
            "is not one of",
        ),  # there is no option for sources
        (
            ["attribute", SOURCE, "--method", "random"],
            f"the name of a file; its text is read by: - < {SOURCE}",
        ),
        (
            ["evaluate", SOURCE, "--method", "random", "--metrics", "erasure"],
            "the name of a file; its text is read by",
        ),
    ],
)
def test_hints(noiser_command, arguments, hint):
    assert hint in " ".join(noiser_command(*arguments).stderr.replace("│", " ").split())


def test_debug_shows_the_traceback(noiser_command):
    assert (
        "Traceback" in noiser_command("attribute", PROMPT, "--method", "nosier", "--debug").stderr
    )


HOSTILE = "\x1b]0;owned\x07\x9b2J\u202etxt\r"
SHOWN = "⟨U+001B⟩]0;owned⟨U+0007⟩⟨U+009B⟩2J⟨U+202E⟩txt⟨U+000D⟩"


def test_warnings_and_errors_have_no_control_characters(noiser_command, monkeypatch):
    def load(*_, **__):
        warnings.simplefilter("always")
        warnings.warn(HOSTILE, stacklevel=1)
        raise NoiserError(HOSTILE)

    monkeypatch.setattr(noiser.model, "load_model", load)
    result = noiser_command("attribute", PROMPT)
    assert result.stderr == f"{LOADING}noiser: warning: {SHOWN}\nnoiser: error: {SHOWN}\n"


@pytest.mark.parametrize(("tty", "expected"), [(True, "⟨U+009B⟩2J"), (False, "\x9b2J")])
def test_only_a_terminal_gets_results_without_control_characters(
    monkeypatch, capsys, tty, expected
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: tty)
    terminal.write("\x9b2J", None, "json")
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (BrokenPipeError(32, ""), 1)]
)
def test_an_interrupt_and_a_closed_pipe_are_quiet(noiser_command, monkeypatch, error, status):
    monkeypatch.setattr(noiser.model, "load_model", Mock(side_effect=error))
    result = noiser_command("attribute", PROMPT)
    assert (result.exit_code, result.stdout, result.stderr) == (status, "", LOADING)


def test_parameter_values():
    values = {"20": 20, "0.5": 0.5, "true": True, "null": None, "[1, 5]": [1, 5]}
    values |= {text: text for text in ("k_max", "NaN", "", "a=b")}
    for typed, value in values.items():
        (parsed,) = parse_parameters([f"key={typed}"]).values()
        assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(
    "typed", ["Hi", "[1]", "{}", "[{", json.dumps(MESSAGES), json.dumps({"messages": MESSAGES})]
)
def test_chat_prompts(typed):
    prompt = MESSAGES if "role" in typed else [{"role": "user", "content": typed}]
    assert (parse_prompt(typed, chat=True), parse_prompt(typed, chat=False)) == (prompt, typed)


def test_long_work_is_announced_once_also_in_a_pipe(monkeypatch, capsys):
    times = iter([0.0, 4.0, 10.0, 20.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(times)))
    with terminal.progress_bar("Attributing") as update:
        for done in (1, 2, 3):
            update(done, 100)
    assert capsys.readouterr().err.count("About 9 min 48 s left") == 1


@pytest.mark.parametrize(("patience", "shows"), [(60.0, False), (0.0, True)])
def test_a_bar_only_for_what_takes_long_and_closed_after_an_error(monkeypatch, patience, shows):
    stderr = io.StringIO()
    stderr.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    with suppress(NoiserError), terminal.progress_bar("[/b] \x1b]0;owned\x07", patience) as update:
        update(1, 2)
        update(2, 4)
        raise NoiserError
    text = stderr.getvalue()
    assert ("[/b] ⟨U+001B⟩]0;owned⟨U+0007⟩" in text) == shows
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h"), "the cursor is shown again"


@pytest.mark.parametrize(
    "given",
    [
        ["--source", "notes.txt", "news.txt"],  # as a shell writes --source *.txt
        ["--source", "texts"],
        ["notes.txt", "--source", "news.txt"],
    ],
    ids=["glob", "folder", "mixed"],
)
def test_sources_may_be_several_files_or_a_folder(noiser_command, sources, given):
    Path("texts").mkdir()
    for name, text in TEXTS:
        Path("texts", name).write_text(text, encoding="utf-8")
    asked = ["cite", WHERE, *given, "--answer", ANSWER, "--unit", "source", "--format", "json"]
    titles = [source["title"] for source in json.loads(noiser_command(*asked).stdout)["sources"]]
    assert sorted(titles) == ["news.txt", "notes.txt"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--source", "no.txt"], "no.txt"),
        ([], "There is no source"),
        (["--source", "empty"], "has no text file"),
    ],
)
def test_sources_are_read_before_a_model_is_loaded(noiser_command, sources, given, message):
    Path("empty").mkdir()
    result = noiser_command("cite", WHERE, *given, "-m", "no/such/model")
    assert message in result.stderr
    assert "no/such/model" not in result.stderr.replace("Loading no/such/model ...", "")
