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
def generation_page(generation: Generation) -> Iterator[Piece | str]:
    """Every text, numbered if there are several, then how fast they came."""
    for number, (result, text) in enumerate(zip(generation.results, generation.texts), 1):
        if len(generation.results) > 1:
            yield Line(f"prompt {number}", style="bold")
        # Nothing is folded: it is the model's text, to be copied.
        yield Line(" ".join(map(str, result.tokens)) if text is None else text, fixed=True)
    yield figures(generation)


def figures(generation: Generation) -> str:
    times = generation.times
    where = "" if generation.out is None else f" -> {generation.out}"
    ranks = "" if generation.tp == 1 else f" on {generation.tp} ranks"
    return (
        f"{counted(generation.prompts, 'prompt')}{where}, {counted(times.tokens, 'token')} "
        f"by {generation.model}{ranks}: "
        f"{times.tokens_per_second:.1f} tokens/s, first token after {times.first_token_seconds:.3f} s "
        f"(weights read in {times.load_seconds:.1f} s)"
    )


@contextmanager
def shown_text(prompts: list[str], *, shown: bool) -> Iterator[OnText | None]:
    """Yields a function to call with every piece of text, or None unless standard output is a terminal.

    The text of a single prompt is printed as it grows. Several prompts get a line each, which shows the end of their
    text; the lines are removed at the end, since the page has the texts.
    """
    if not shown or not sys.stdout.isatty():
        yield None
        return
    console = Console(highlight=False)
    if len(prompts) == 1:
        waiting = [Text(prompts[0], style="dim")]  # printed with the first piece: errors come before it

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
