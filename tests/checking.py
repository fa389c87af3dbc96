"""The run-time type checker of the tests: an int is a float, as the type system says."""

from __future__ import annotations

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
