"""Documents in the forms that people have them in: folders, files, dicts, other libraries'
objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, cast

from noiser.errors import PromptError, UnitError
from noiser.notices import warn
from noiser.types import Source

_ENDINGS = frozenset((".txt", ".md", ".rst", ".text", ".markdown"))
"""Of the names of a folder's files that are documents."""


def read_documents(documents: object) -> list[Any]:
    """The sources that some documents are: texts, or (title, text) pairs.

    Args:
        documents: texts or (title, text) pairs, which stay as they are; {title: text}; a folder or
            a text file, or a list with such paths, as `pathlib.Path`; documents of LangChain
            (`page_content`) or LlamaIndex (`text`, or a node with a score); dicts with a "text",
            and perhaps a "title", as chat templates and servers take them.

    Raises:
        PromptError: a file does not exist, or is no text. UnitError: the documents have another
            form.
    """
    if isinstance(documents, Mapping):
        return list(cast("Mapping[object, object]", documents).items())
    if isinstance(documents, PathLike):
        return _of_path(Path(cast("PathLike[str]", documents)))
    if isinstance(documents, str) or not isinstance(documents, Sequence):
        expected = "a list of texts or of (title, text) pairs, {title: text}, or a pathlib.Path"
        raise UnitError(f"sources is {documents!r:.60}; expected {expected}.")
    sources: list[Any] = []
    for document in cast("Sequence[object]", documents):
        if isinstance(document, PathLike):
            sources += _of_path(Path(cast("PathLike[str]", document)))
        else:
            sources.append(_of_object(document))
            _warn_of_name(len(sources), document)
    return sources


def _warn_of_name(number: int, document: Any) -> None:
    """Warns of a text that looks like the name of a text file. No file is looked for."""
    is_name = isinstance(document, str) and Path(document).suffix.lower() in _ENDINGS
    if is_name and len(document.split()) == 1:
        warn(
            f"Source {number}, {document!r:.60}, is taken as a text, and looks like the name of a "
            f"file. pathlib.Path({document!r:.60}) reads the file.",
        )


def _of_path(path: Path) -> list[tuple[str, str]]:
    """(name, text) of a text file, or of each in a folder and the folders in it, by name."""
    if not path.is_dir():
        return [(path.name, _text_of(path))]
    files = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in _ENDINGS]
    if not files:
        endings = ", ".join(sorted(_ENDINGS))
        raise PromptError(f"{str(path)!r} has no text file; expected names that end in {endings}.")
    return [(file.relative_to(path).as_posix(), _text_of(file)) for file in files]


def _text_of(path: Path) -> str:
    """The text of a file, in UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PromptError(
            f"{str(path)!r} cannot be read ({error.strerror}); expected a text file or a folder."
        ) from None
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{str(path)!r} is not UTF-8 at byte {error.start}. Convert it to plain text."
        ) from None


def _of_object(document: Any) -> Any:
    """The (title, text) of a dict or another library's document; anything else as it is."""
    if isinstance(document, Mapping):
        fields = cast("Mapping[str, object]", document)
        return (fields.get("title") or "", fields["text"]) if "text" in fields else document
    document = getattr(document, "node", document)  # LlamaIndex: a node with a score
    text = getattr(document, "page_content", getattr(document, "text", None))
    if not isinstance(text, str):
        return document
    metadata = getattr(document, "metadata", None) or {}
    for key in ("title", "file_name", "source"):
        title = metadata.get(key)
        if isinstance(title, str):
            return title, text
    return text


def with_leads(sources: Sequence[Source], given: Sequence[Any]) -> tuple[Source, ...]:
    """The sources with the numbers of white space characters before the texts that were given."""
    found: list[Source] = []
    for source, document in zip(sources, given, strict=True):
        text = document if isinstance(document, str) else document[1]
        found.append(source._replace(lead=len(text) - len(text.lstrip())))
    return tuple(found)
