"""`noiser test`: a file of cases, tried on a model; unchanged ones are not run again."""

from __future__ import annotations

import hashlib
import json
import re
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

import typer

from noiser.checks import check_choice, check_count, check_positive
from noiser.cli import options as o
from noiser.cli.terminal import printable, say
from noiser.errors import ExpectationError, NoiserError, ParameterError, PlanError
from noiser.files import json_messages, json_text, parse_json, write_text
from noiser.registry import __version__, version_of
from noiser.types import Prompt

_KEYS_OF_FILE = ("model", "case", "limit", "max_new_tokens")
_KEYS_OF_CASE = (
    "name",
    "prompt",
    "says",
    "depends_on",
    "not_on",
    "from_memory",
    "action",
    "limit",
    "max_new_tokens",
)
_TEXTS = ("says", "action")
_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class PromptCase:
    """A prompt and what is expected of its answer: arguments of `noiser.expect`."""

    name: str
    path: Path
    prompt: Prompt
    expected: Mapping[str, Any]


@dataclass(kw_only=True)
class CaseOutcome:
    """What became of a case.

    Attributes:
        key: of everything that it depends on.
        verdict: "pass", "FAIL" or "undecided".
        text: what is printed and reported.
        seconds: how long it took.
        passed: the prompt of the last run that passed, or None.
        unchanged: whether it is the stored one.
    """

    key: str
    verdict: str
    text: str
    seconds: float
    passed: Any
    unchanged: bool = field(default=False)


def run_tests(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Cases in TOML: docs/howto/tests.md.")
    ],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="In place of the file's model.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("-k", metavar="NAME", help="Cases whose name has this text.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Undecided expectations fail, too.")
    ] = False,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Also write JUnit's XML.")
    ] = None,
    seed: o.Seed = 0,
    model_options: o.Loading = o.LOADING,  # not `loading`: unchanged cases need no model
) -> None:
    """Tests that the answers to prompts depend on what they should.

    Exit status 0 where all pass, 1 where one fails, 2 where the file or the model cannot be used.
    Results are kept in .noiser beside FILE, so that unchanged cases cost nothing.
    """
    o.check_place("--junit", junit)
    named_model, cases = read_cases(file)
    model_name = model or named_model
    if model_name is None:
        raise PlanError(f"{file} names no model; expected model = NAME in it, or --model NAME.")
    if name is not None:
        cases = [case for case in cases if name in case.name]
        if not cases:
            raise ParameterError(f"-k: no case of {file} has {name!r} in its name.")
    store = file.parent / ".noiser" / f"{file.name}.json"
    stored = _read_store(store)
    facts = [model_name, _stamp(model_name), asdict(model_options), seed, strict]
    todo: list[PromptCase] = []
    for case in cases:
        known = stored.get(case.name)
        if known is not None and known.key == _key(case, facts):
            known.unchanged = True
        else:
            todo.append(case)
    lm = None
    if todo:
        _check_clauses(todo)
        say(f"Loading {model_name} ...", err=True)
        lm = model_options.load(model_name)
    finished: list[tuple[PromptCase, CaseOutcome]] = []
    for number, case in enumerate(cases, 1):
        if case in todo:
            say(f"{number} of {len(cases)}: {case.name} ...", err=True)
            outcome = _run(lm, case, stored.get(case.name), seed=seed, strict=strict)
            outcome.key = _key(case, facts)
            stored[case.name] = outcome
            _write_store(store, stored)
        finished.append((case, stored[case.name]))
        say(_shown(case, stored[case.name]))
        if junit is not None:  # as far as it is, since a run may be stopped
            write_text(junit, _junit(file, finished, strict=strict))
    say(_summary([outcome for _, outcome in finished]))
    if any(_fails(outcome, strict=strict) for _, outcome in finished):
        raise typer.Exit(1)


# ---- the file -----------------------------------------------------------------------------------


def read_cases(file: Path) -> tuple[str | None, list[PromptCase]]:
    """The model and the cases of a file.

    Raises:
        PlanError: it is not TOML, or has other keys or values than expected; with the line.
    """
    text = o.text_of(file)
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PlanError(f"{file} is not TOML: {error}.") from None
    _check_keys(file, text, data, _KEYS_OF_FILE, 0)
    rows = data.get("case")
    if not isinstance(rows, list) or not rows:
        raise PlanError(f"{file} has no case; expected at least one [[case]].")
    model = data.get("model")
    if model is not None and not isinstance(model, str):
        raise PlanError(f"{file}: model is {model!r}; expected a name in quotes.")
    shared = {key: data[key] for key in ("limit", "max_new_tokens") if key in data}
    cases: list[PromptCase] = []
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise PlanError(f"{file}: case {index + 1} is {row!r}; expected [[case]] with keys.")
        _check_keys(file, text, row, _KEYS_OF_CASE, index + 1)
        case = _case(file, index, shared | row)
        if any(case.name == other.name for other in cases):
            raise PlanError(f"{file} has the case {case.name!r} twice; expected names that differ.")
        cases.append(case)
    return model, cases


def _check_keys(
    file: Path, text: str, table: Mapping[str, Any], known: Sequence[str], case: int
) -> None:
    """Raises PlanError, with the line, for an unknown key of the file (case 0) or of a case."""
    for key in table:
        try:
            check_choice("key", key, known)
        except NoiserError as error:
            line = _line_of(text, key, case)
            if line:
                place = f", line {line}"
            else:  # written in a form that is not looked for, such as case = [{name = "a"}]
                place = f", case {case}" if case else ""
            raise PlanError(f"{file}{place}: {error}") from None


def _line_of(text: str, key: str, case: int) -> int | None:
    """The number of the line where a key of a case stands; of the file where `case` is 0.

    None where it is not found.
    """
    case_begins = re.compile(r"""\s*\[\[\s*["']?case["']?\s*\]\]""")
    table_of_case = r"""(\s*\[\s*["']?case["']?\s*\.)?"""
    names_key = re.compile(rf"""{table_of_case}[\s\["']*{re.escape(key)}["'\s\]]*(=|\.|$)""")
    cases_begun = 0
    for number, line in enumerate(text.split("\n"), 1):
        cases_begun += bool(case_begins.match(line))
        if cases_begun == case and names_key.match(line):
            return number
    return None


def _case(file: Path, index: int, row: Mapping[str, Any]) -> PromptCase:
    """A case whose values are checked, with the text of its prompt."""
    name = row.get("name", f"case {index + 1}")
    where = f"{file}, case {name!r}"
    path = row.get("prompt")
    if not isinstance(name, str) or not name or not isinstance(path, str):
        raise PlanError(f"{where}: expected name and prompt in quotes; prompt is a file's path.")
    expected: dict[str, Any] = {}
    for key in ("depends_on", "not_on"):
        clauses = row.get(key, [])
        clauses = [clauses] if isinstance(clauses, str) else clauses
        if not isinstance(clauses, list) or not all(isinstance(each, str) for each in clauses):
            raise PlanError(f"{where}: {key} is {clauses!r}; expected a list of texts.")
        if clauses:
            expected[key] = clauses
    for key in _TEXTS:
        if key in row and not isinstance(row[key], str):
            raise PlanError(f"{where}: {key} is {row[key]!r}; expected a text in quotes.")
        if key in row:
            expected[key] = row[key]
    if "from_memory" in row:
        if not isinstance(row["from_memory"], bool):
            raise PlanError(
                f"{where}: from_memory is {row['from_memory']!r}; expected true or false."
            )
        expected["from_memory"] = row["from_memory"]
    if not expected:
        raise PlanError(
            f"{where} expects nothing; give depends_on, not_on, says, from_memory or action."
        )
    try:
        if "limit" in row:
            check_positive("limit", row["limit"])
            expected["limit"] = row["limit"]
        if "max_new_tokens" in row:
            expected["max_new_tokens"] = check_count("max_new_tokens", row["max_new_tokens"])
        text = o.text_of(file.parent / path)
    except NoiserError as error:
        raise PlanError(f"{where}: {error}") from None
    prompt: Prompt = json_messages(text) or text
    return PromptCase(name=name, path=file.parent / path, prompt=prompt, expected=expected)


def _check_clauses(cases: Sequence[PromptCase]) -> None:
    """Raises PlanError for clauses that do not stand in their prompts, before a model is loaded."""
    from noiser.explain.clauses import Clauses

    for case in cases:
        try:
            clauses = Clauses(case.prompt)
            for key in ("depends_on", "not_on"):
                for index, clause in enumerate(case.expected.get(key, ())):
                    clauses.removable(clause, f"{key}[{index}]")
        except NoiserError as error:
            raise PlanError(f"case {case.name!r}: {error}") from None


# ---- running and keeping ------------------------------------------------------------------------


def _run(
    lm: Any, case: PromptCase, before: CaseOutcome | None, *, seed: int, strict: bool
) -> CaseOutcome:
    """What becomes of a case on a model."""
    from noiser.explain import expect

    started = time.monotonic()
    last_pass = before.passed if before else None
    options: dict[str, Any] = {"seed": seed, "strict": strict, "passed_before": last_pass}
    try:
        result = expect(lm, case.prompt, **case.expected, **options)
        text = result.to_text()
    except ExpectationError as error:
        result = error.result
        *lines, _ = str(error).split("\n")
        chat = "" if isinstance(case.prompt, str) else "--chat "
        command = (
            f"noiser attribute - {chat}--unit sentence --model {lm.identity.name} < {case.path}"
        )
        text = "\n".join([*lines, f"More: {command}"])
    except NoiserError as error:
        raise PlanError(f"case {case.name!r}: {error}") from error
    verdict = result.verdict
    return CaseOutcome(
        key="",
        verdict=verdict,
        text=text,
        seconds=time.monotonic() - started,
        passed=case.prompt if verdict == "pass" else last_pass,
    )


def _key(case: PromptCase, facts: Sequence[Any]) -> str:
    """A hash of everything that the outcome of a case depends on."""
    versions = [__version__, version_of("torch"), version_of("transformers")]
    content = [*facts, versions, case.prompt, dict(case.expected), str(case.path)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _stamp(model: str) -> list[Any]:
    """Sizes and times of a local model's files; nothing for other names."""
    path = Path(model)
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
        return [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    except OSError:
        return []


def _read_store(path: Path) -> dict[str, CaseOutcome]:
    """The outcomes of earlier runs by name; none where the file is absent or of another form."""
    try:
        data = parse_json(path.read_bytes())
        if data["schema"] != _SCHEMA:
            return {}
        return {name: CaseOutcome(**outcome) for name, outcome in data["cases"].items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return {}


def _write_store(path: Path, outcomes: Mapping[str, CaseOutcome]) -> None:
    path.parent.mkdir(exist_ok=True)
    cases = {name: asdict(outcome) | {"unchanged": False} for name, outcome in outcomes.items()}
    write_text(path, json_text({"schema": _SCHEMA, "cases": cases}))


# ---- reports ------------------------------------------------------------------------------------


def _fails(outcome: CaseOutcome, *, strict: bool) -> bool:
    return outcome.verdict == "FAIL" or (strict and outcome.verdict == "undecided")


def _shown(case: PromptCase, outcome: CaseOutcome) -> str:
    """A line, and of a case that does not pass the details."""
    unchanged = " (unchanged)" if outcome.unchanged else ""
    line = f"{outcome.verdict} {case.name}{unchanged}"
    if outcome.verdict == "pass":
        return line
    details = outcome.text.replace("\n", "\n    ")
    return f"{line}\n    {details}"


def _summary(outcomes: Sequence[CaseOutcome]) -> str:
    """Such as "3 passed, 1 failed, 0 undecided; 2 unchanged"."""
    verdicts = [outcome.verdict for outcome in outcomes]
    unchanged = sum(outcome.unchanged for outcome in outcomes)
    return (
        f"{verdicts.count('pass')} passed, {verdicts.count('FAIL')} failed, "
        f"{verdicts.count('undecided')} undecided; {unchanged} unchanged"
    )


def _junit(file: Path, outcomes: Sequence[tuple[PromptCase, CaseOutcome]], *, strict: bool) -> str:
    """The outcomes in JUnit's XML; undecided ones are skipped tests unless they fail."""
    failures = sum(_fails(outcome, strict=strict) for _, outcome in outcomes)
    undecided = sum(outcome.verdict == "undecided" for _, outcome in outcomes)
    counts = {
        "tests": str(len(outcomes)),
        "failures": str(failures),
        "skipped": str(0 if strict else undecided),
        "errors": "0",
        "time": f"{sum(outcome.seconds for _, outcome in outcomes):.3f}",
    }
    suites = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": _xml_text(str(file)), **counts})
    for case, outcome in outcomes:
        attributes = {
            "classname": _xml_text(str(file)),
            "name": _xml_text(case.name),
            "time": f"{outcome.seconds:.3f}",
        }
        element = ElementTree.SubElement(suite, "testcase", attributes)
        if outcome.verdict == "pass":
            continue
        tag = "failure" if _fails(outcome, strict=strict) else "skipped"
        text = _xml_text(outcome.text)
        detail = ElementTree.SubElement(element, tag, {"message": text.split("\n")[0]})
        detail.text = text
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _xml_text(text: str) -> str:
    """The text without characters that XML cannot hold."""
    return re.sub("[\ud800-\udfff\ufffe\uffff]", "\N{REPLACEMENT CHARACTER}", printable(text))
