"""The one exception that users see, and the helper that turns a typo into a suggestion."""

import difflib
from collections.abc import Iterable

_FEW = 8  # names that are all listed


class SpipeError(ValueError):
    """Something a user gave is wrong.

    The message says what is wrong, the value, what is allowed and what to do; the command line prints it without a
    traceback and exits with code 2.
    """


def unknown(what: str, value: str, allowed: Iterable[str], hint: str = "") -> SpipeError:
    """An error for ``value``, which is not one of ``allowed``; names the nearest ones, and all where they are few."""
    names = sorted(allowed)
    near = difflib.get_close_matches(value, names, n=3, cutoff=0.4)
    message = f"unknown {what} {value!r}"
    if near:
        message += f"; nearest: {', '.join(near)}"
    if not near or len(near) < len(names) <= _FEW:
        message += f"; allowed: {', '.join(names)}"
    return SpipeError(f"{message}. {hint}" if hint else message)
