"""The commands: what they print, where, and with what exit status."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

import noiser
import noiser.model
from noiser.cli import app, terminal
from noiser.cli.options import parse_parameters, parse_prompt
from noiser.errors import NoiserError, ParameterError, PromptError
from noiser.methods import METHODS
from noiser.metrics import METRICS
from noiser.types import AutoUnit, UnitName
from tiny import tiny

PROMPT = "The quick brown fox jumps"
SOURCE = Path(__file__)
FULL = ("--help", "cite -h", "metrics") if Path("/dev/full").exists() else ()
HEAVY = {"torch", "transformers", "pandas", "numpy", "sklearn", "matplotlib", "noiser.model", "noiser.methods"}


@pytest.fixture
def noiser_command(monkeypatch):
    """Runs a command on a tiny model; `asked` is what `load_model` got."""
    asked: dict[str, object] = {}

    def load(name, **options):
        asked.update(name=name, **options)
        return tiny("llama")

    monkeypatch.setattr(noiser.model, "load_model", load)

    def run(*arguments: str, **options):
        result = CliRunner(charset=options.pop("charset", "utf-8")).invoke(app, list(arguments), **options)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        result.asked = asked
        return result

    return run


# ---- help, version, lists --------------------------------------------------------------------------------------------


def test_importing_the_commands_is_light():
    code = "import sys, noiser.cli; print(*sys.modules)"
    started = time.perf_counter()
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    print(f"importing noiser.cli in a fresh process: {time.perf_counter() - started:.2f} s")
    assert set(ran.stdout.split()) & HEAVY == set()


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["attribute", "--help"]])
def test_help(noiser_command, arguments):
    result = noiser_command(*arguments)
    assert result.exit_code == 0
    assert "Usage: noiser" in result.stdout
    assert "attribute" in result.stdout


def test_version(noiser_command):
    assert noiser_command("--version").stdout == f"noiser {noiser.__version__}\n"


def test_runs_as_a_module():
    ran = subprocess.run([sys.executable, "-m", "noiser", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"noiser {noiser.__version__}\n"


def test_methods_lists_every_method_with_its_defaults(noiser_command):
    lines = noiser_command("methods").stdout.splitlines()
    families = [f"{family.prefix}:NAME" for family in METHODS.families()]
    assert [line for line in lines if not line.startswith(" ")] == METHODS.names() + families
    at = lines.index("noiser")
    assert lines[at + 1].strip() == METHODS.get("noiser").summary
    assert "samples=10, steps=10, bounding=k_min, score=prob" in lines[at + 2]
    assert "bounding=relative" in lines[lines.index("noiser_relative") + 2]


def test_metrics_lists_every_metric_with_its_settings(noiser_command):
    lines = noiser_command("metrics").stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == METRICS.names()
    at = lines.index("lds")
    assert lines[at + 1].strip() == METRICS.get("lds").summary
    assert lines[at + 2].strip() == "settings: draws, masks, removal"
    assert lines[lines.index("answerability") + 2].strip().endswith("judge")


def test_models_says_what_is_there(noiser_command, monkeypatch, tmp_path):
    monkeypatch.setenv("NOISER_CACHE", str(tmp_path))
    text = noiser_command("models").stdout
    for model in noiser.model.gguf.BUILT_IN.values():
        assert model.name in text
        assert model.licence in text
        assert model.install in text if model.folder() is None else "converted on first use" in text
    assert list(tmp_path.rglob("*.safetensors")) == []


# ---- attribute -------------------------------------------------------------------------------------------------------


def test_json_is_the_saved_attribution(noiser_command, tmp_path):
    result = noiser_command(
        "attribute", PROMPT, "--format", "json", "--seed", "3", "--set", "samples=4", "--unit", "word"
    )
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    (tmp_path / "a.json").write_text(result.stdout, encoding="utf-8")
    att = noiser.Attribution.load(tmp_path / "a.json")
    expected = noiser.attribute(tiny("llama"), PROMPT, method=noiser.Noiser(samples=4), seed=3, unit="word")
    assert att.scores.tolist() == expected.scores.tolist()
    assert att.units == expected.units


def test_text_is_what_print_shows(noiser_command, capsys):
    result = noiser_command("attribute", PROMPT)
    print(noiser.attribute(tiny("llama"), PROMPT))
    assert result.stdout == capsys.readouterr().out


@pytest.mark.parametrize("format_", ["text", "json", "html", "csv", "md"])
def test_output_goes_to_the_file_alone(noiser_command, tmp_path, format_):
    shown = noiser_command("attribute", PROMPT, "--format", format_).stdout
    result = noiser_command("attribute", PROMPT, "--format", format_, "-o", str(tmp_path / "out"))
    assert (result.stdout, result.stderr) == ("", "")
    assert (tmp_path / "out").read_text(encoding="utf-8") == shown
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("ending", "form"),
    [("json", "json"), ("HTML", "html"), ("csv", "csv"), ("txt", "text"), ("md", "md"), ("json", "text")],
)
def test_the_form_is_what_the_output_ends_in_unless_given(noiser_command, tmp_path, ending, form):
    given = ["--format", form] if ending == "json" and form == "text" else []
    noiser_command("attribute", PROMPT, *given, "-o", str(tmp_path / f"out.{ending}"))
    shown = noiser_command("attribute", PROMPT, "--format", form).stdout
    assert (tmp_path / f"out.{ending}").read_text(encoding="utf-8") == shown


def test_csv_has_every_score(noiser_command):
    quick = ["--format", "csv", "--max-new-tokens", "2"]
    shown = noiser_command("attribute", "=1 + two", "--method", "occlusion", *quick)
    att = noiser.attribute(tiny("llama"), "=1 + two", method="occlusion", max_new_tokens=2)
    lines = [*csv.DictReader(io.StringIO(shown.stdout))]
    assert [float(line["score"] or "nan") for line in lines] == pytest.approx(
        att.scores.flatten().tolist(), nan_ok=True
    )
    assert lines[0]["unit"].startswith("'="), "no text is a formula"
    compared = noiser_command("compare", PROMPT, "--methods", "occlusion,position", *quick)
    methods = [line["method"] for line in csv.DictReader(io.StringIO(compared.stdout))]
    assert sorted(set(methods)) == ["occlusion@1", "position@1"]
    assert len(methods) == 2 * methods.count("position@1")


@pytest.mark.parametrize("command", [["attribute", PROMPT], ["compare", PROMPT, "--methods", "noiser,occlusion"]])
def test_a_file_has_plain_text_whatever_stdout_is(noiser_command, tmp_path, monkeypatch, command):
    plain = noiser_command(*command).stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" in noiser_command(*command, charset="ascii").stdout
    noiser_command(*command, "-o", str(tmp_path / "out"), charset="ascii")
    assert (tmp_path / "out").read_text(encoding="utf-8") == plain
    assert "→" in plain


@pytest.mark.parametrize("format_", ["json", "html", "text"])
def test_a_stdout_that_is_not_utf_8(noiser_command, format_):
    arguments = ["attribute", "The naïve 👋 fox", "--method", "occlusion", "--format", format_]
    expected = noiser_command(*arguments).stdout_bytes
    found = noiser_command(*arguments, charset="ascii")
    assert found.exit_code == 0
    if format_ == "text":
        assert b"na\\xefve" in found.stdout_bytes
    else:
        assert found.stdout_bytes == expected
        assert "👋".encode() in expected


@pytest.mark.skipif(os.name == "nt", reason="Windows has no /dev/fd")
def test_output_to_a_pipe(noiser_command):
    shown = noiser_command("attribute", PROMPT).stdout
    reader, writer = os.pipe()
    result = noiser_command("attribute", PROMPT, "-o", f"/dev/fd/{writer}")
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        assert (result.exit_code, pipe.read()) == (0, shown), result.stderr


def test_two_methods_of_one_class_have_their_own_names(noiser_command):
    first, second = json.loads(
        noiser_command("compare", PROMPT, "--methods", "noiser,noiser_relative", "--format", "json").stdout
    )
    assert (first["method"], second["method"]) == ("noiser@2", "noiser_relative@1")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_stdin_that_is_no_text_is_refused(noiser_command, monkeypatch, errors):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 is"), "utf-8", errors))
    with pytest.raises(PromptError, match=r"not text, such as .*; expected UTF-8\. Convert it first"):
        parse_prompt("-", chat=False)
    refused = noiser_command("attribute", "-", input=b"caf\xe9 is")
    assert (refused.exit_code, refused.stdout) == (2, "")


def test_a_byte_order_mark_on_stdin_is_no_part_of_the_prompt(monkeypatch):
    for chat, prompt in ((False, "[]"), (True, MESSAGES)):
        typed = b"\xef\xbb\xbf" + (json.dumps(prompt) if chat else prompt).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), "utf-8"))
        assert parse_prompt("-", chat=chat) == prompt


def test_prompt_from_stdin(noiser_command):
    typed = noiser_command("attribute", "-", "--format", "json", input=f"{PROMPT}\n")
    assert typed.stdout == noiser_command("attribute", PROMPT, "--format", "json").stdout


def test_options_reach_the_model(noiser_command):
    options = ["--model", "m", "--dtype", "bfloat16", "--device", "cpu", "--revision", "v2", "--trust-remote-code"]
    template = ["--chat-template-arg", "enable_thinking=false", "--chat-template-arg", "style=brief"]
    asked = noiser_command("attribute", PROMPT, *options, *template).asked
    assert asked == {
        "name": "m",
        "dtype": "bfloat16",
        "device": "cpu",
        "device_map": None,
        "revision": "v2",
        "trust_remote_code": True,
        "chat_template_kwargs": {"enable_thinking": False, "style": "brief"},
    }


def test_options_reach_the_question(noiser_command):
    result = noiser_command(
        "attribute", PROMPT, "--max-new-tokens", "3", "--format", "json", "--method", "noiser_relative"
    )
    att = json.loads(result.stdout)
    assert len(att["targets"]) == 3
    assert att["parameters"]["bounding"] == "relative"
    result = noiser_command("attribute", PROMPT, "--target", " fox", "--foil", " dog", "--format", "json")
    att = json.loads(result.stdout)
    assert att["foil"] is not None


def test_units_are_those_of_the_library_without_sources(noiser_command):
    names = [*({*get_args(UnitName)} - {"source"}), *get_args(AutoUnit)]
    for command, method, units in (
        ("attribute", "--method", names),
        ("compare", "--methods", names),
        ("evaluate", "--method", names),
    ):
        for unit in units:
            refused = noiser_command(command, PROMPT, "--unit", unit, method, "nosier")
            assert refused.stderr.startswith("noiser: error: Unknown method"), (command, unit)
        assert "'source' is not one of 'token'" in noiser_command(command, PROMPT, "--unit", "source").stderr
    found = noiser_command("attribute", PROMPT, "--unit", "turn", "--method", "occlusion", "--format", "json")
    assert [unit["text"] for unit in json.loads(found.stdout)["units"]] == [PROMPT]


@pytest.mark.parametrize("command", ["attribute", "compare"])
def test_target_and_foil_by_token_id(noiser_command, command):
    ids = ["--target-id", "7", "--foil-id", "9"]
    more = ["--methods", "occlusion"] if command == "compare" else ["--method", "occlusion"]
    found = json.loads(noiser_command(command, PROMPT, *ids, *more, "--format", "json").stdout)
    att = found[0] if command == "compare" else found
    assert (att["targets"][0]["token_id"], att["foil"]["token_id"]) == (7, 9)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["attribute", ""], "more than whitespace"),
        (["attribute", PROMPT, "--method", "nosier"], "Did you mean 'noiser'?"),
        (["attribute", PROMPT, "--set", "samples=0"], "samples is 0"),
        (["attribute", PROMPT, "--set", "sample=3"], "argument 'sample'. Expected some of samples, steps, bounding,"),
        (["attribute", PROMPT, "--set", "samples"], "expected key=value"),
        (["attribute", PROMPT, "--set", "noise=[[1,2],[3,4]]"], "the noise has shape [2, 2]; expected"),
        (["attribute", PROMPT, "--seed", "99999999999999999999"], "seed is 99999999999999999999; expected"),
        (["attribute", PROMPT, "--set", "samples=1", "--set", "samples=2"], "twice"),
        (["attribute", PROMPT, "--target", "a", "--max-new-tokens", "2"], "got both, expected one"),
        (["attribute", PROMPT, "--target", "a", "--target-id", "2"], "--target-id: got both, expected one"),
        (["attribute", PROMPT, "--foil", "a", "--foil-id", "2"], "--foil-id: got both, expected one"),
        (["attribute", PROMPT, "--target-id", "0", "--max-new-tokens", "2"], "got both, expected one"),
        (["attribute", PROMPT, "--target-id", "99999999"], "99999999"),
        (["attribute", PROMPT, "-o", "not/there/a.json"], "does not exist"),
        (["attribute", PROMPT, "-o", "/"], "expected a file"),
        (
            ["attribute", PROMPT, "-o", "a.pdf"],
            "got a.pdf, expected a name that ends in .txt, .json, .html, .csv,",
        ),
        (["attribute", PROMPT, "--chat"], "chat"),
        (
            ["compare", PROMPT, "--methods", "occlusion,random,occlusion"],
            "got 'occlusion' twice, expected each name once",
        ),
        (["cite", PROMPT, "--source", "not/there.txt"], "--source: cannot read not/there.txt: No such file"),
        (["cite", PROMPT, "--source", str(SOURCE), "--answer", "a", "--max-new-tokens", "2"], "got both, expected one"),
        (["bench", "run", "plan.toml", "-o", str(SOURCE)], "is a file; expected a folder"),
        (["evaluate", PROMPT, "--metrics", "top_k,top_k"], "--metrics: got 'top_k' twice"),
        (["evaluate", PROMPT, "--unit", "spans"], "expected --data with it"),
        (["evaluate", PROMPT, "--judge", "local"], "expected --draws or --masks or --normalization for this metric"),
        (["evaluate", PROMPT, "--metrics", "answerability"], "answerability needs a judge; expected --judge local,"),
    ],
)
def test_errors_are_one_message_on_stderr(noiser_command, arguments, says, unchecked):
    result = noiser_command(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("noiser: error: ")
    assert says.lower() in result.stderr.lower()
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_folder_in_which_no_file_can_be_made_is_refused_before_the_work(noiser_command, monkeypatch, tmp_path):
    def refuse(**options):
        raise PermissionError(errno.EACCES, "Permission denied", str(options["dir"]))

    monkeypatch.setattr("noiser.cli.options.TemporaryFile", refuse)
    monkeypatch.setattr("noiser.model.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    result = noiser_command("attribute", PROMPT, "-o", str(tmp_path / "a.json"))
    assert result.exit_code == 2
    assert f"--output: no file can be made in {tmp_path}: Permission denied." in result.stderr


def test_debug_shows_the_traceback(noiser_command):
    result = noiser_command("attribute", PROMPT, "--method", "nosier", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "Did you mean 'noiser'?" in result.stderr


@pytest.mark.parametrize("arguments", [["attribute"], ["atribute", PROMPT], ["attribute", PROMPT, "--format", "pdf"]])
def test_wrong_usage(noiser_command, arguments):
    result = noiser_command(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""


HOSTILE = "\x1b]0;owned\x07\x9b2J\u202etxt\r"
SHOWN = "⟨U+001B⟩]0;owned⟨U+0007⟩⟨U+009B⟩2J⟨U+202E⟩txt⟨U+000D⟩"


def test_nothing_from_elsewhere_makes_a_terminal_obey(noiser_command, monkeypatch):
    import warnings

    def load(*_, **__):
        warnings.simplefilter("always")
        warnings.warn(HOSTILE, stacklevel=1)
        raise NoiserError(HOSTILE)

    monkeypatch.setattr(noiser.model, "load_model", load)
    result = noiser_command("attribute", PROMPT)
    assert result.stderr == f"noiser: warning: {SHOWN}\nnoiser: error: {SHOWN}\n"


def test_control_characters_of_a_plan_do_not_reach_the_terminal(noiser_command, monkeypatch):
    from noiser.bench import status

    monkeypatch.setattr(status, "status", lambda folder: HOSTILE)
    assert noiser_command("bench", "status", "DIR").stdout == f"{SHOWN}\n"


def test_a_terminal_gets_results_that_it_can_print_and_a_pipe_gets_them_as_they_are(monkeypatch):
    for terminal_or_pipe, expected in ((True, "⟨U+009B⟩2J"), (False, "\x9b2J")):
        stdout = io.TextIOWrapper(io.BytesIO(), "utf-8")
        stdout.isatty = lambda answer=terminal_or_pipe: answer
        monkeypatch.setattr(sys, "stdout", stdout)
        terminal.write("\x9b2J", None, "md")
        assert stdout.buffer.getvalue().decode() == expected


def test_interrupt_is_quiet(noiser_command, monkeypatch):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(noiser.model, "load_model", interrupt)
    result = noiser_command("attribute", PROMPT)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "")


def test_a_defect_keeps_its_traceback(noiser_command, monkeypatch):
    def fail(*args, **options):
        raise ZeroDivisionError

    monkeypatch.setattr(noiser.model, "load_model", fail)
    with pytest.raises(ZeroDivisionError):
        noiser_command("attribute", PROMPT)


def test_warnings_are_lines_on_stderr(noiser_command, monkeypatch):
    import warnings

    def warn(*args, **options):
        warnings.simplefilter("always")
        warnings.warn("the milk is sour", stacklevel=1)
        return tiny("llama")

    monkeypatch.setattr(noiser.model, "load_model", warn)
    result = noiser_command("attribute", PROMPT)
    assert result.exit_code == 0
    assert result.stderr == "noiser: warning: the milk is sour\n"


def test_closed_pipe_is_quiet():
    code = """
import typer
from noiser.cli.options import command
app = typer.Typer()

@app.command()
@command
def talk() -> None:
    for number in range(100_000):
        print(number)

app()
"""
    reader, writer = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    os.read(reader, 10)
    os.close(reader)
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (141, "")


@pytest.mark.skipif(os.name == "nt", reason="the command lines are for sh")
@pytest.mark.parametrize(
    ("typed", "status", "says"),
    [
        (
            "methods >&-",
            2,
            "noiser: error: stdout is closed; expected it open. Send it to a file, a pipe or /dev/null.\n",
        ),
        ("attribute - <&-", 2, "noiser: error: stdin is closed; expected the prompt there. "),
        ("attribute x --method nosier <&- >&-", 2, "noiser: error: Unknown method 'nosier'."),
        ("attribute x --method nosier 2>&-", 2, ""),
        ("metrics 2>&-", 0, ""),
        *((f"{typed} >/dev/full", 2, "noiser: error: [Errno 28] ") for typed in FULL),
    ],
)
def test_closed_streams(typed, status, says):
    ran = subprocess.run(
        f"'{sys.executable}' -m noiser {typed}", shell=True, capture_output=True, text=True, check=False
    )
    assert ran.returncode == status
    assert ran.stderr.startswith(says)
    assert len(ran.stderr.splitlines()) == bool(says)


# ---- parsing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("20", 20),
        ("0.5", 0.5),
        ("1e-3", 0.001),
        ("true", True),
        ("null", None),
        ("k_max", "k_max"),
        ("NaN", "NaN"),
        ("", ""),
        ("a=b", "a=b"),
    ],
)
def test_parameter_values(typed, value):
    (parsed,) = parse_parameters([f"key={typed}"]).values()
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize("pair", ["", "=", "=3", "samples", "two words=3", "1=1"])
def test_wrong_parameters(pair):
    with pytest.raises(ParameterError, match="expected key=value"):
        parse_parameters([pair])


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    "arguments",
    [
        ["attribute", " "],
        ["cite", "", "--source", str(SOURCE)],
        ["evaluate", PROMPT, "--metrics", "answerability", "--judge", "openai"],
        ["evaluate", PROMPT, "--metrics", "answerability", "--judge", "local", "--judge-set", "stile=plain"],
    ],
)
def test_what_needs_no_model_is_refused_before_one_is_loaded(noiser_command, arguments):
    result = noiser_command(*arguments)
    assert result.exit_code == 2
    assert result.asked == {}


@pytest.mark.parametrize(
    ("typed", "prompt"),
    [
        ("Hello", [{"role": "user", "content": "Hello"}]),
        (json.dumps(MESSAGES), MESSAGES),
        ("[1, 2]", [{"role": "user", "content": "[1, 2]"}]),
        ("[]", [{"role": "user", "content": "[]"}]),
        ("{}", [{"role": "user", "content": "{}"}]),
        ("[{", [{"role": "user", "content": "[{"}]),
        ("[" * 100_000, [{"role": "user", "content": "[" * 100_000}]),
    ],
)
def test_chat_prompts(typed, prompt):
    assert parse_prompt(typed, chat=True) == prompt
    assert parse_prompt(typed, chat=False) == typed


# ---- the progress bar ------------------------------------------------------------------------------------------------


class Terminal:
    """A stderr that says it is a terminal and keeps what it is given."""

    encoding = "utf-8"

    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_no_bar_without_a_terminal(capsys):
    with terminal.progress_bar("Attributing") as update:
        assert update is None
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("patience", "shown"), [(60.0, False), (-1.0, True)])
def test_bar_only_for_what_takes_long(monkeypatch, patience, shown):
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(terminal, "PATIENCE", patience)
    monkeypatch.setenv("TERM", "xterm")
    with terminal.progress_bar("Attributing") as update:
        update(1, 2)
        update(2, 4)
    assert ("Attributing" in stderr.text) == shown


def test_a_label_is_no_markup_and_gives_no_orders(monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    bar = terminal.ProgressBar("[/b] \x1b]0;owned\x07")
    bar.update(1, 2)
    bar.close()
    assert "[/b] ⟨U+001B⟩]0;owned⟨U+0007⟩" in stderr.text


def test_bar_is_closed_after_an_error(monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(terminal, "PATIENCE", -1.0)
    monkeypatch.setenv("TERM", "xterm")

    def work():
        with terminal.progress_bar("Attributing") as update:
            update(1, 2)
            raise NoiserError

    with pytest.raises(NoiserError):
        work()
    assert stderr.text.count("\x1b[?25l") == stderr.text.count("\x1b[?25h"), "the cursor is shown again"


# ---- the real model --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_main_job(gemma, tmp_path):
    """From a prompt to a picture, in a process of its own."""
    arguments = ["attribute", "LeBron James professionally plays the sport of", "--format", "json"]
    ran = subprocess.run([sys.executable, "-m", "noiser", *arguments], capture_output=True, text=True, check=True)
    (tmp_path / "a.json").write_text(ran.stdout, encoding="utf-8")
    att = noiser.Attribution.load(tmp_path / "a.json")
    assert [target.text for target in att.targets] == [" basketball"]
    assert att.model.name == "gemma-3-270m"
    assert ran.stderr == ""


def test_a_list_on_a_stdout_that_is_not_unicode():
    code = "from noiser.cli.terminal import say; say('Ōsaka – \\x1b[2J')"
    environment = os.environ | {"PYTHONIOENCODING": "cp1252"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    assert ran.stdout.decode("cp1252").startswith("\\u014csaka –")
