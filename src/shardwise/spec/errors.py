"""The one error a user's mistake raises: where, what, and what would fix it."""

from __future__ import annotations

from collections.abc import Iterable


class SpecError(ValueError):
    """A mistake in what the user wrote.

    ``field`` is the dotted path of the value (``strategy.tp``), ``problem`` says what is wrong with
    it and names the value, ``remedy`` says what would fix it. Its text is always one line.
    """

    status = 2  # of the command that it ends

    def __init__(self, field: str, problem: str, remedy: str = "") -> None:
        self.field = field
        self.problem = problem
        self.remedy = remedy
        super().__init__(field, problem, remedy)

    def __str__(self) -> str:
        text = f"{self.field}: {self.problem}" if self.field else self.problem
        if self.remedy:
            text += f"; {self.remedy}"
        return " ".join(text.split())

    def under(self, prefix: str) -> SpecError:
        """The same mistake, seen from the enclosing document."""
        if not prefix:
            return self
        return type(self)(join_path(prefix, self.field), self.problem, self.remedy)


class DoesNotFit(SpecError):
    """What was written is right, but the devices have no room for it."""

    status = 1


def join_path(prefix: str, field: str) -> str:
    if not prefix or not field:
        return prefix or field
    return f"{prefix}{field}" if field.startswith("[") else f"{prefix}.{field}"


def shown(value: object, limit: int = 60) -> str:
    """A user's value as it is quoted in an error: short, and on one line; a long one keeps both its ends."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]  # as it is written in a file
    try:
        text = " ".join((repr(value) if isinstance(value, str) else str(value)).split())
    except (ValueError, RecursionError):  # a whole number of thousands of digits; lists nested without end
        return f"this {type(value).__name__}"
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[1 - limit // 2 :]}"


def nearest_name(wanted: str, known: Iterable[str]) -> str:
    """'did you mean ...' for a misspelt name, or the whole short list when nothing is near."""
    import difflib  # only needed on the way to an error message

    names = sorted(known)
    close = difflib.get_close_matches(wanted.lower(), names, n=3, cutoff=0.55)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    if len(names) <= 12:
        return "choose one of " + ", ".join(names)
    return ""
