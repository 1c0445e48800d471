"""Generated text: on a terminal as it comes, and as a page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from shardwise.report.page import Line, Piece, paged
from shardwise.spec.units import counted

if TYPE_CHECKING:
    from shardwise.generation.request import Generation

OnText = Callable[[int, str], None]


@paged
def generation_page(found: Generation) -> Iterator[Piece | str]:
    """Every text, numbered if there are several, then how fast they came."""
    for number, (one, text) in enumerate(zip(found.results, found.texts), 1):
        if len(found.results) > 1:
            yield Line(f"prompt {number}", style="bold")
        # Nothing is folded: it is the model's text, to be copied.
        yield Line(" ".join(map(str, one.tokens)) if text is None else text, fixed=True)
    yield figures(found)


def figures(found: Generation) -> str:
    times = found.times
    where = "" if found.out is None else f" -> {found.out}"
    ranks = "" if found.tp == 1 else f" on {found.tp} ranks"
    return (
        f"{counted(found.prompts, 'prompt')}{where}, {counted(times.tokens, 'token')} by {found.model}{ranks}: "
        f"{times.tokens_per_second:.1f} tokens/s, first token after {times.first_token_seconds:.3f} s "
        f"(weights read in {times.load_seconds:.1f} s)"
    )


@contextmanager
def shown_text(prompts: list[str], *, shown: bool) -> Iterator[OnText | None]:
    """A function to call with every piece of text: one prompt's text is written on, several grow side by side.

    None unless standard output is a terminal. Several are removed at the end, since the page has them.
    """
    if not shown or not sys.stdout.isatty():
        yield None
        return
    console = Console(highlight=False)
    if len(prompts) == 1:
        waiting = [Text(prompts[0], style="dim")]  # until it is known that all is well

        def write(number: int, piece: str) -> None:
            while waiting:
                console.print(waiting.pop(), end="", soft_wrap=True)
            console.print(Text(piece), end="", soft_wrap=True)

        yield write
        console.print()
        return
    texts = ["" for _ in prompts]

    def drawn() -> Group:
        width = max(20, console.width - 5)
        lines = (text.replace("\n", " ")[-width:] for text in texts)
        return Group(*(Text(f"{number:>3} {line}", no_wrap=True) for number, line in enumerate(lines, 1)))

    def add(number: int, piece: str) -> None:
        texts[number] += piece

    with Live(get_renderable=drawn, console=console, transient=True, refresh_per_second=10):
        yield add
