"""One-line errors for wrong input: the field, the value and the nearest valid one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """Input that cannot be used. The message is one line, ready to be shown to the user."""


def nearest(value: object, known: Iterable[object]) -> str:
    """`; did you mean 'deepnorm'?`, or the list of what is known where nothing comes close."""
    names = [str(k) for k in known]
    close = difflib.get_close_matches(str(value), names, 1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    shown = names if len(names) <= 12 else [*names[:10], f"and {len(names) - 10} more"]
    return f"; known: {', '.join(shown)}" if names else "; there are none"


def unknown(what: str, value: object, known: Iterable[object]) -> ConfigError:
    """An error for a name that is not among `known`."""
    return ConfigError(f"{what} {value!r} is unknown{nearest(value, known)}")
