"""What every result can do, and the forms that a result can be written in, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from noiser.errors import ParameterError
from noiser.files import csv_text, write_text
from noiser.registry import Registry

if TYPE_CHECKING:
    from pandas import DataFrame


@runtime_checkable
class Result(Protocol):
    """What `attribute`, `compare`, `cite`, `rule`, `diff`, `tolerance` and `evaluate` return.

    A result is shown by `print` and in notebooks, is read back by `load`, and can be written in
    every form of `FORMS`.
    """

    def to_text(self) -> str:
        """Plain text without colours, safe for a terminal."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """The content of the saved file: dicts, lists, texts and finite numbers."""
        ...

    def to_json(self) -> str:
        """The text of the saved file."""
        ...

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """A complete page without network and scripts, also written to `path` if given."""
        ...

    def to_markdown(self) -> str:
        """Markdown, to be pasted into an issue or a page."""
        ...

    def to_dataframe(self) -> DataFrame:
        """A table."""
        ...

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the saved file (docs/schema.md): the whole file or, on OSError, nothing."""
        ...

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """The result that `save` wrote. Raises StoredFileError for any other or damaged file."""
        ...


@dataclass(frozen=True, kw_only=True)
class Form:
    r"""A form of output.

    Attributes:
        ending: of the names of its files, such as ".json".
        write: from a result to the text of the file.

    Example:
        >>> form = Form(ending=".tsv", write=lambda result: result.to_dataframe().to_csv(sep="\t"))
        >>> FORMS.register("tsv", lambda: form, summary="columns with tabs")  # doctest: +SKIP
    """

    ending: str
    write: Callable[[Any], str]


FORMS: Registry[Form] = Registry("form", "noiser.forms")
"""Every form of output by name; packages add theirs through the entry point `noiser.forms`."""


FORMS.register(
    "text",
    partial(Form, ending=".txt", write=lambda result: result.to_text()),
    summary="plain text, as on the terminal",
)
FORMS.register(
    "json",
    partial(Form, ending=".json", write=lambda result: result.to_json()),
    summary="the saved file",
)
FORMS.register(
    "html",
    partial(Form, ending=".html", write=lambda result: result.to_html()),
    summary="a page",
)
FORMS.register(
    "csv",
    partial(Form, ending=".csv", write=lambda result: csv_text(result.to_dataframe())),
    summary="the table",
)
FORMS.register(
    "markdown",
    partial(Form, ending=".md", write=lambda result: result.to_markdown()),
    summary="Markdown",
)


def form_of(path: str | PathLike[str], form: str | None = None) -> str:
    """The name of a form: the one that is given, or by the ending of a file's name.

    Raises:
        UnknownNameError: no such form. ParameterError: no form has the file's ending.
    """
    if form is not None:
        return FORMS.get(form).name
    ending = Path(path).suffix.lower()
    by_ending = {FORMS.get(name).factory().ending: name for name in FORMS.names()}
    if ending not in by_ending:
        *endings, last = by_ending
        raise ParameterError(
            f"got {Path(path).name}, expected a name that ends in {', '.join(endings)} or {last}. "
            "Or name the form (--format)."
        )
    return by_ending[ending]


def write_result(result: Result, path: str | PathLike[str], form: str | None = None) -> None:
    """Writes a result in a form of `FORMS`: the whole file or, on OSError, nothing.

    Args:
        result: what `noiser.attribute` or another question returns.
        path: of the file.
        form: its name; None: by the file's ending.

    Raises:
        UnknownNameError: no such form. ParameterError: no form has the file's ending.

    Example:
        >>> write_result(att, "a.csv")  # doctest: +SKIP
    """
    text = FORMS.get(form_of(path, form)).factory().write(result)
    write_text(path, text.rstrip("\n") + "\n")
