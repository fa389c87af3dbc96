"""Durations as text."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A duration as people say it, such as "12 s", "3 min 10 s" or "2 h 05 min".

    >>> duration(0.4), duration(95), duration(4000), duration(90000)
    ('under a second', '1 min 35 s', '1 h 06 min', '25 h 00 min')
    """
    if seconds < 1:
        return "under a second"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
