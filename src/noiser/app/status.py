"""Lines about the work: how far it is, how it ended, what went wrong; as HTML with every text escaped."""

from __future__ import annotations

from html import escape

from noiser.app.jobs import State
from noiser.durations import duration
from noiser.errors import NoiserError
from noiser.model.memory import is_out_of_memory

__all__ = ["explain", "note", "problem", "progress_line"]


def explain(error: BaseException, name: str = "Error") -> str:
    """An error. Ours say what to do; of others the type and the text, and the server's log has the rest."""
    if isinstance(error, NoiserError):
        return problem(name, str(error))
    if is_out_of_memory(error):
        text = "The model ran out of memory. Shorten the prompt, or ask for fewer targets or a coarser unit."
        return problem(name, f"{text} ({type(error).__name__})")
    text = f"{type(error).__name__}: {error}. The server's log has the details; the page goes on working."
    return problem(name, text)


def problem(name: str, text: str) -> str:
    """A line that is read out at once."""
    return f'<div class="noiser-line error" role=alert><b>{escape(name)}</b> {escape(text)}</div>'


def note(text: str) -> str:
    """A line that is read out."""
    return f'<div class="noiser-line" role=status>{escape(text)}</div>'


def progress_line(state: State) -> str:
    """A line whose label is read out when it changes, and whose numbers are not, every time they do."""
    if state.ahead:
        others = "one question" if state.ahead == 1 else f"{state.ahead} questions"
        return _moving(f"Waiting: the model answers {others} first", None, f"{state.seconds:.0f} s")
    left = "" if state.left is None else f", about {duration(state.left)} left"
    share = "" if state.share is None else f"{state.share:.0%}, "
    return _moving(state.label, state.share, f"{share}{state.seconds:.0f} s{left}")


def _moving(text: str, share: float | None, numbers: str) -> str:
    value = "" if share is None else f' value="{share:.3f}"'
    return (
        f'<div class="noiser-line busy" role=status><span>{escape(text)}</span> '
        f"<progress max=1{value} aria-label=progress></progress> <span aria-hidden=true>{escape(numbers)}</span></div>"
    )
