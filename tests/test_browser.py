"""The browser of the tests clicks what it was told to, also while the page is still moving."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from browser import Browser, Page, require_browser

# `one` moves down by its own height when it has been aimed at for the first time; `other` is then under the mouse.
MOVING = """data:text/html,<button id=other style="display:none">other</button><button id=one>one</button><script>
window.pressed = [];
for (const each of document.querySelectorAll('button')) each.onclick = () => pressed.push(each.id);
one.scrollIntoView = () => requestAnimationFrame(() => other.style.display = 'block');
</script>"""
COVERED = """data:text/html,<button id=one>one</button><p style="position:fixed;inset:0">above</p>"""


@pytest.fixture
def page() -> Iterator[Page]:
    require_browser()
    with Browser() as browser:
        yield browser.page()


def test_an_element_that_moves_away_is_clicked_all_the_same(page: Page) -> None:
    page.open(MOVING)
    page.click("#one")
    assert page.evaluate("pressed") == ["one"]


def test_what_is_covered_or_missing_is_said(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("browser._SECONDS", 1.0)
    page.open(COVERED)
    with pytest.raises(AssertionError, match="something else lies over #one"):
        page.click("#one")
    with pytest.raises(AssertionError, match="nothing matches #two"):
        page.click("#two")
