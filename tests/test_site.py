"""The documentation as a site: `make docs`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shardwise.cli.main import VERBS
from shardwise.cli.main import main as shardwise
from shardwise.labs.registry import lab_named

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


class _Loaded(HTMLParser):
    """Addresses that a page loads by itself: scripts, styles, pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        address = named.get("href") if tag == "link" and named.get("rel") != "canonical" else named.get("src")
        if address and tag in ("link", "script", "img", "iframe"):
            self.found.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Strict: a link, an anchor or a page of the menu that is not there fails, and so does a page that is not in it."""
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return place


def test_every_page_opens_from_disk(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) >= 60
    for page in pages:
        loaded = _Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        remote = [one for one in loaded.found if re.match(r"https?:|//", one)]
        assert not remote, f"{page.name} loads {remote}"
        for one in loaded.found:
            if page.name != "404.html" and not one.startswith(("data:", "#")):
                assert (page.parent / one.split("?")[0].split("#")[0]).exists(), f"{page.name}: {one}"


def test_the_reference_has_every_public_function(site: Path) -> None:
    text = (site / "reference.html").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(\w+)`", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(table) >= 10
    for name in table:
        assert re.search(rf'id="shardwise\.api\.\w+\.{name}"', text), name


def test_every_command_of_the_glossary_runs(capsys: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"`shardwise ([^`]*)`", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"))
    assert len(commands) >= 18
    for command in commands:
        verb, *rest = shlex.split(command)
        assert verb in VERBS
        if verb == "lab":
            assert lab_named(rest[0])
        else:
            assert shardwise([verb, *rest]) in (0, 1), capsys.readouterr().err
