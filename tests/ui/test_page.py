"""The page in a real browser: load, every control, search, compare, downloads, links, wrong input, phone, themes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import Browser, Page, require_browser
from shardwise.spec import presets
from shardwise.spec.installation import is_installed
from shardwise.spec.job import Job
from shardwise.ui.answer import answer, published
from shardwise.ui.choices import FIRST, catalogue
from shardwise.ui.given import imported, job_of
from ui.dropped import CONFIG, FILES
from ui.serving import Served, serving

pytestmark = pytest.mark.skipif(not is_installed("uvicorn"), reason="the ui extra is not installed")
MOST_LOADED_BYTES = 300_000
SENTENCE = "document.querySelector('#sentence').textContent.replaceAll('\\u00a0', ' ')"
STATE = "Object.fromEntries(new URLSearchParams(location.hash.slice(1)))"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    require_browser()
    with serving(tmp_path_factory.mktemp("started-here")) as one:
        yield one


@pytest.fixture(scope="module")
def browser(served: Served) -> Iterator[Browser]:
    with Browser() as one:
        yield one


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Page, str], None]:
    """Keeps a screenshot where SHARDWISE_PICTURES names a folder, to be looked at; always takes it."""
    folder = Path(os.environ.get("SHARDWISE_PICTURES") or tmp_path_factory.mktemp("pictures"))
    folder.mkdir(parents=True, exist_ok=True)

    def take(page: Page, name: str) -> None:
        page.settle()
        page.screenshot(folder / f"page-{name}.png")

    return take


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    """A tab with the first job, wide and light; nothing may complain in it."""
    one = browser.page()
    one.shape(1360, 1000)
    one.open(served.address + "/")
    one.wait_for("document.documentElement.dataset.answered")
    yield one
    assert one.problems == []
    one.call("Page.close")


def changed(page: Page, action: Callable[[], None]) -> None:
    """Does something, and waits until the page has drawn what the server said to it."""
    asked = "Number(document.documentElement.dataset.answered ?? 0)"
    before = page.evaluate(asked)
    action()
    page.wait_for(f"{asked} > {before} || !!document.documentElement.dataset.refused")


def typed(page: Page, field: str, text: str) -> None:
    page.evaluate(f"document.querySelector('#{field}').focus(); document.querySelector('#{field}').select()")
    page.type(text)
    page.press("Enter", 13)


def state(page: Page) -> dict[str, Any]:
    """The job of the address as the page reads it."""

    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    return {name: value(text) for name, text in page.evaluate(STATE).items() if name != "pin"}


def assert_shows(page: Page, given: dict[str, Any]) -> None:
    assert page.evaluate(SENTENCE) == answer(given)["verdict"]["sentence"]


# -- load -------------------------------------------------------------------------------------------------------


def test_it_loads_light_and_says_the_verdict(page: Page, served: Served, picture: Callable[[Page, str], None]) -> None:
    page.wait_for("document.querySelectorAll('#runs tbody tr').length > 3")
    assert_shows(page, FIRST)
    assert page.received_bytes < MOST_LOADED_BYTES
    assert all(one.startswith((served.address, "data:")) for one in page.requests)
    runs = page.evaluate("document.querySelector('#runs').textContent")
    assert "This job, predicted" in runs and all(one["source"] in runs for one in published(FIRST)["runs"])
    picture(page, "light")


@pytest.mark.slow
def test_every_control_and_every_value_that_is_refused(page: Page) -> None:
    """The last value that each offers is pressed: the page then shows what the server says of that job."""
    page.evaluate("document.querySelector('#more').open = true")
    for field, values in answer(FIRST)["controls"].items():
        shown = page.evaluate(f"[...document.querySelectorAll('#field-{field} .chip')].map(one => one.dataset.value)")
        assert shown == [_written(one["value"]) for one in values]
        for one in (one for one in values if "refused" in one):
            page.click(f"#field-{field} .chip[data-value='{_written(one['value'])}']")
            assert one["refused"] in page.evaluate(f"document.querySelector('#field-{field} .reason').textContent")
            assert state(page) in ({}, FIRST), "a refused value changes nothing"
        offered = [one for one in values if not {"refused", "chosen"} & one.keys()]
        if offered:
            press = f"#field-{field} .chip[data-value='{_written(offered[-1]['value'])}']"
            changed(page, lambda press=press: page.click(press))  # type: ignore[misc]
            wanted = {**FIRST, **offered[-1]["set"]}
            assert state(page) == {name: value for name, value in wanted.items() if value is not None}
            assert_shows(page, state(page))
            changed(page, lambda: page.evaluate("history.back()"))


def _written(value: Any) -> str:
    """As JavaScript writes it."""
    return json.dumps(value) if isinstance(value, bool) or value is None else str(value)


@pytest.mark.slow
def test_models_clusters_and_batches_are_picked(page: Page) -> None:
    def pick(field: str, value: str) -> None:
        place = f"document.querySelector('#{field}')"
        page.evaluate(f"{place}.value = {json.dumps(value)}; {place}.dispatchEvent(new Event('change'))")

    changed(page, lambda: typed(page, "model", "llama3-8b"))
    changed(page, lambda: pick("cluster", "dgx-b200"))
    changed(page, lambda: typed(page, "size", "4"))
    changed(page, lambda: typed(page, "global_batch", "1M-tokens"))
    changed(page, lambda: typed(page, "seq", "4096"))
    changed(page, lambda: pick("stack", "torchtitan"))
    wanted = {**FIRST, "model": "llama3-8b", "cluster": "dgx-b200:4", "global_batch": "1M-tokens", "seq": 4096,
              "stack": "torchtitan"}  # fmt: skip
    assert state(page) == wanted
    assert_shows(page, wanted)


@pytest.mark.slow
def test_by_keyboard_alone(page: Page) -> None:
    page.evaluate("document.querySelector('#field-tp .chip[aria-checked=true]').focus()")
    page.press("ArrowLeft", 37)
    assert page.evaluate("document.activeElement.dataset.value") == "4"
    changed(page, lambda: page.press("Enter", 13))
    assert state(page)["tp"] == 4
    assert page.evaluate("document.activeElement.dataset.value") == "4", "the focus stays where it was"
    page.press("End", 35)
    assert "does not divide" in page.evaluate("document.querySelector('#field-tp .reason').textContent")
    assert page.evaluate("document.getElementById(document.activeElement.getAttribute('aria-describedby')).textContent")
    page.press("Escape", 27)
    assert page.evaluate("document.querySelector('#field-tp .reason').textContent") == ""
    page.press("Tab", 9)
    assert page.evaluate("document.activeElement.closest('.field').dataset.field") == "pp"


def test_a_model_is_searched_by_keyboard_and_by_mouse(page: Page, picture: Callable[[Page, str], None]) -> None:
    field = "document.querySelector('#model')"
    offered = (
        "[...document.querySelectorAll('#model-list li')].filter(one => !one.hidden).map(one => one.dataset.value)"
    )
    active = f"document.getElementById({field}.getAttribute('aria-activedescendant'))?.dataset.value"
    page.click("#model")
    assert page.evaluate(offered) == presets.names("model") and page.evaluate(active) == FIRST["model"]
    page.type("qwen3")
    names = [name for name in presets.names("model") if name.startswith("qwen3")]
    assert page.evaluate(offered) == names and page.evaluate(active) == names[0]
    picture(page, "models")
    for _ in range(2):
        page.press("ArrowDown", 40)
    assert page.evaluate(active) == names[2]
    changed(page, lambda: page.press("Enter", 13))
    assert state(page) == {**FIRST, "model": names[2]} and page.evaluate(f"{field}.value") == names[2]
    assert page.evaluate("document.activeElement.id") == "model" and page.evaluate(f"{field}.ariaExpanded") == "false"
    page.evaluate(f"{field}.select()")
    page.type("llama-3 70")
    page.press("Escape", 27)
    assert page.evaluate(f"{field}.value") == names[2] and state(page)["model"] == names[2]
    page.evaluate(f"{field}.select()")
    page.type("llama-3 70")
    changed(page, lambda: page.click("#model-list [data-value='llama3-70b']"))
    assert_shows(page, FIRST)
    changed(page, lambda: typed(page, "model", "Qwen/Qwen2.5-32B-Instruct"))
    assert page.evaluate(SENTENCE).startswith("qwen2.5-32b on")
    assert "preset qwen2.5-32b" in page.evaluate("document.querySelector('#verdict').textContent")
    changed(page, lambda: typed(page, "model", "Qwen/Qwen2.5-33B"))
    assert "hf download Qwen/Qwen2.5-33B" in page.evaluate(
        "document.querySelector('[data-field=model] .problem').textContent"
    )
    page.problems[:] = [one for one in page.problems if "422" not in one]  # the browser logs every refusal


@pytest.mark.slow
def test_every_part_of_the_memory_opens_its_formula(page: Page) -> None:
    for name in ("memory", "timeline", "communication", "levels"):
        page.evaluate(f"document.querySelector('#{name}').scrollIntoView()")
        page.wait_for(f"!!document.querySelector('#{name} canvas')")
    chart = answer(FIRST)["charts"]["memory"]
    page.click("#memory .parts details summary")
    lines = page.evaluate(
        "[...document.querySelectorAll('#memory .parts details[open] p')].map(one => one.textContent)"
    )
    assert lines == chart["series"][0]["details"][0] and len(lines) == 3
    other = page.evaluate("[...document.querySelectorAll('#memory .formulas .chip')].map(one => one.textContent)")
    assert other == chart["categories"]
    page.evaluate("document.querySelector('#memory > details').open = true")
    page.wait_for("document.querySelectorAll('#memory .chart-table tbody tr').length === 2")


# -- wrong input ------------------------------------------------------------------------------------------------


def test_wrong_input_is_one_line_beside_its_field(page: Page) -> None:
    for field, text, said in (
        ("global_batch", "513", "do not divide over dp 4 × microbatch 1"),
        ("global_batch", "1e99", "is out of range"),
        ("seq", "-1", "is below 1"),
        ("size", "0", "0 nodes"),
    ):
        before = page.evaluate(f"document.querySelector('#{field}').value")
        changed(page, lambda field=field, text=text: typed(page, field, text))  # type: ignore[misc]
        name = "cluster" if field == "size" else field
        line = page.evaluate(f"document.querySelector('[data-field={name}] .problem').textContent")
        shown = page.evaluate(f"!document.querySelector('[data-field={name}] .problem').hidden")
        assert said in line and shown, (field, line)
        assert page.evaluate("document.body.classList.contains('stale')")
        changed(page, lambda field=field, before=before: typed(page, field, before))  # type: ignore[misc]
        assert not page.evaluate("document.body.classList.contains('stale')")
    page.problems[:] = [one for one in page.problems if "422" not in one]  # the browser logs every refusal


@pytest.mark.slow
def test_a_config_is_pasted_and_script_in_its_name_stays_text(page: Page) -> None:
    name = "<img src=x onerror=window.hit=1><script>window.hit=1</script>"
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
              "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
              "_name_or_path": name.replace("/", "")}  # fmt: skip
    page.click("#paste")
    page.evaluate("document.querySelector('#config').value = '{nonsense'")
    page.click("#config-use")
    page.wait_for("document.querySelector('#config-problem').textContent.includes('malformed YAML')")
    page.evaluate(f"document.querySelector('#config').value = {json.dumps(json.dumps(config))}")
    changed(page, lambda: page.click("#config-use"))
    assert page.evaluate(SENTENCE).startswith("<img src=x")
    assert page.evaluate("window.hit === undefined && document.querySelector('#sentence img') === null")
    changed(page, lambda: dropped(page, "config.json", json.dumps({**config, "_name_or_path": "dropped"})))
    assert page.evaluate(SENTENCE).startswith("dropped on 64 × h100-sxm")
    page.problems[:] = [one for one in page.problems if "422" not in one]


def dropped(page: Page, name: str, text: str) -> None:
    held = f"held.items.add(new File([{json.dumps(text)}], {json.dumps(name)}))"
    event = "new DragEvent('drop', {dataTransfer: held, bubbles: true, cancelable: true})"
    page.evaluate(f"(() => {{ const held = new DataTransfer(); {held}; window.dispatchEvent({event}); }})()")


@pytest.mark.slow
def test_a_run_of_another_framework_is_dropped(page: Page, picture: Callable[[Page, str], None]) -> None:
    """Its job and its notes; swapped with a pinned one, loaded again, reset; a refusal; a config.json after it."""
    told = "document.querySelector('#origin').hidden ? '' : document.querySelector('#origin').textContent"
    _, script, _ = FILES["pretrain.sh"]
    page.click("#pin")
    changed(page, lambda: dropped(page, "<b>pretrain.sh", script))
    found = imported({"text": script, "name": "pretrain.sh", "job": FIRST})
    assert state(page) == found["job"]
    assert_shows(page, found["job"])
    assert all(one in page.evaluate(told) for one in ("pretrain", "Megatron-LM", *found["notes"]))
    assert page.evaluate("document.querySelector('#origin b').textContent") == "<b>pretrain.sh"
    assert page.evaluate("document.querySelector('#model').value") == "from-megatron"
    assert "core_attn" in page.evaluate(told)
    page.evaluate("scrollTo(0, 0)")
    picture(page, "dropped")
    page.wait_for("!document.querySelector('#swap').hidden")
    changed(page, lambda: page.click("#swap"))
    assert state(page) == FIRST and page.evaluate(told) == ""
    changed(page, lambda: page.click("#swap"))
    assert state(page) == found["job"] and "core_attn" in page.evaluate(told)
    page.evaluate("document.documentElement.dataset.answered = ''")
    page.call("Page.reload")
    page.wait_for("document.documentElement?.dataset.answered")
    assert_shows(page, found["job"])
    assert "core_attn" in page.evaluate(told), "the history of the tab has the notes"
    dropped(page, "train.toml", "[parallelism]\ntensor_paralel_degree = 2")
    page.wait_for("document.querySelector('#paste-dialog').open")
    line = page.evaluate("document.querySelector('#config-problem').textContent")
    assert line.startswith("train.toml: parallelism.tensor_paralel_degree: ") and "did you mean" in line
    page.press("Escape", 27)
    assert state(page) == found["job"]
    changed(page, lambda: page.click("#plain"))
    kept = {name: value for name, value in found["job"].items() if name not in catalogue()["varied"]}
    assert state(page) == kept and "core_attn" in page.evaluate(told)
    changed(page, lambda: dropped(page, "config.json", json.dumps(CONFIG)))
    assert state(page) == {**kept, "model": CONFIG}
    page.problems[:] = [one for one in page.problems if "422" not in one]


def test_a_link_that_makes_no_sense_says_so(browser: Browser, served: Served) -> None:
    one = browser.page()
    one.open(served.address + "/#model=nothing&cluster=dgx-h100&tp=%zz&constructor=1")
    one.wait_for("!!document.documentElement.dataset.refused")
    assert "unknown" in one.evaluate("document.body.textContent")
    one.call("Page.close")


@pytest.mark.slow
def test_a_layout_that_another_model_refuses_is_adapted_and_undone(
    page: Page, picture: Callable[[Page, str], None]
) -> None:
    changed(page, lambda: typed(page, "model", "gpt2"))
    told = page.wait_for("!document.querySelector('#adapted').hidden && document.querySelector('#adapted').textContent")
    assert "8 does not divide 12 query heads: " in told and "tp 8 → 4" in told
    assert not page.evaluate("document.body.classList.contains('stale')")
    assert state(page)["model"] == "gpt2" and state(page)["tp"] == 4
    assert_shows(page, state(page))
    picture(page, "adapted")
    changed(page, lambda: page.click("#adapted button"))
    assert state(page) == FIRST and page.evaluate("document.querySelector('#adapted').hidden")
    page.problems[:] = [one for one in page.problems if "422" not in one]


@pytest.mark.slow
def test_what_cannot_run_is_searched_or_reset(page: Page) -> None:
    """Another model, for which no layout is near: the search and the reset are of what is on the page."""
    # A search of one that is never over: a quick one could end before the page is told to stop it.
    endless = "new Promise((_, stop) => told[1].signal.onabort = () => stop(new DOMException('', 'AbortError')))"
    far = "Promise.resolve(new Response('{\"set\": null}'))"
    instead = f"told[0] === '/api/plan' ? {endless} : told[0] === '/api/adapt' ? {far} : real(...told)"
    noted = f"window.fetch = (...told) => {{ asked.push(told); return {instead}; }}"
    page.evaluate(f"window.asked = []; const real = fetch; {noted}; 0")
    changed(page, lambda: typed(page, "model", "gpt2"))
    assert page.evaluate("document.body.classList.contains('stale')"), "12 heads do not divide by 8"
    assert page.evaluate("document.querySelector('[data-field=tp] .problem button').textContent") == "Reset the layout"
    page.click("#find")
    sent = json.loads(page.wait_for("asked.find(([to]) => to === '/api/plan')?.[1].body"))
    kept = {name: value for name, value in FIRST.items() if name not in ("tp", "pp", "zero")}
    assert sent == {**kept, "model": "gpt2", "pareto": "memory"}
    page.click("#search .heading button")
    page.wait_for("document.querySelector('#search .status').textContent === 'Cancelled.'")
    changed(page, lambda: page.click("[data-field=tp] .problem button"))
    assert state(page) == {**kept, "model": "gpt2"}
    page.problems[:] = [one for one in page.problems if "422" not in one]


@pytest.mark.slow
def test_what_no_control_shows_is_shown_and_can_be_left_out(page: Page) -> None:
    other = {**FIRST, "stage_layers": "balanced", "cluster": "dgx-h100:4+dgx-h100:4"}
    changed(page, lambda: page.evaluate(f"import('/assets/state.js').then(it => it.replace({json.dumps(other)})); 0"))
    assert page.evaluate("document.querySelector('#cluster').selectedOptions[0].textContent") == other["cluster"]
    assert page.evaluate("document.querySelector('#others .chip').textContent") == "stage_layers balanced ×"
    changed(page, lambda: page.click("#others .chip"))
    assert state(page) == {**FIRST, "cluster": other["cluster"]}
    assert page.evaluate("document.querySelector('#others').hidden")


# -- the demo of fine-tuning ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_tiny_model_is_taught_while_its_loss_falls(page: Page, picture: Callable[[Page, str], None]) -> None:
    page.shape(1440, 900)
    status = "document.querySelector('#demo .status').textContent"
    lessons = "document.querySelectorAll('#demo .lesson')"
    page.click("#demo .heading button")
    page.wait_for(f"!!{lessons}[0]?.querySelector('canvas') && {status}.startsWith('training')", seconds=120)
    picture(page, "demo-training")
    page.wait_for(f"{status}.startsWith('Done')", seconds=240)
    answers = page.evaluate(f"[...{lessons}].map(one => [...one.querySelectorAll('dd')].map(dd => dd.textContent))")
    (question, random, chatting), (asked_again, before, after) = answers
    assert question == asked_again and question.count("road") == 1
    assert chatting == before == "The road is grey." != random
    assert after == "The road is grey, says the fox."
    assert page.evaluate("[...document.querySelectorAll('#demo canvas')].length") == 2
    picture(page, "demo")


# -- links, comparison, search, downloads -----------------------------------------------------------------------


def test_a_link_is_the_job_and_back_is_undo(page: Page, browser: Browser) -> None:
    changed(page, lambda: page.click("#field-zero .chip[data-value='3']"))
    changed(page, lambda: page.click("#field-tp .chip[data-value='4']"))
    other = browser.page()
    other.open(page.evaluate("location.href"))
    other.wait_for("document.documentElement.dataset.answered")
    assert other.evaluate(SENTENCE) == page.evaluate(SENTENCE)
    other.call("Page.close")
    changed(page, lambda: page.evaluate("history.back()"))
    assert_shows(page, {**FIRST, "zero": 3})


@pytest.mark.slow
def test_a_against_b_with_its_reason(page: Page, browser: Browser, picture: Callable[[Page, str], None]) -> None:
    page.click("#pin")
    changed(page, lambda: page.click("#field-pp .chip[data-value='4']"))
    page.wait_for("(document.querySelector('#reason')?.textContent ?? '').includes('time a token than A')")
    sides = page.evaluate("[...document.querySelectorAll('.sides thead th')].map(one => one.textContent)")
    assert "pp 2" in sides[0] and "pp 4" in sides[1]
    other = browser.page()
    other.open(page.evaluate("location.href"))
    other.wait_for("!!document.querySelector('#reason')")
    assert other.evaluate("document.querySelector('#reason').textContent") == page.evaluate(
        "document.querySelector('#reason').textContent"
    )
    other.call("Page.close")
    changed(page, lambda: page.click("#swap"))
    assert state(page)["pp"] == 2
    page.click("#unpin")
    assert page.evaluate("document.querySelector('#reason')") is None


def test_the_search_shows_progress_can_be_cancelled_and_its_rows_used(
    page: Page, picture: Callable[[Page, str], None]
) -> None:
    small = {"model": "gpt2", "cluster": "workstation-4090", "global_batch": 16, "seq": 1024}
    page.evaluate(f"import('/assets/state.js').then(it => it.replace({json.dumps(small)}))")
    page.wait_for("document.querySelector('#sentence').textContent.startsWith('gpt2 on ')")
    page.click("#find")
    page.wait_for("document.querySelector('#search .heading button').textContent === 'Cancel'")
    page.click("#search .heading button")
    page.wait_for("document.querySelector('#search .status').textContent === 'Cancelled.'")
    page.click("#search .heading button")
    page.wait_for("document.querySelectorAll('.found tbody tr').length > 2", 120)
    assert "strategies priced" in page.evaluate("document.querySelector('#search .status').textContent")
    assert page.evaluate("document.querySelector('.why').textContent").startswith("Why 1 wins.")
    page.evaluate("document.querySelector('#pareto').scrollIntoView()")
    page.wait_for("!!document.querySelector('#pareto canvas')")
    picture(page, "search")
    page.evaluate("document.querySelector('#pareto > details').open = true")
    page.wait_for("!!document.querySelector('#pareto tbody button')")
    row = "row => [row.cells[0].textContent, row.querySelector('button').ariaLabel]"
    rows = page.evaluate(f"[...document.querySelectorAll('#pareto tbody tr')].map({row})")
    assert all(label == f"Use {words}" for words, label in rows)
    words = page.evaluate("document.querySelectorAll('.found tbody th')[1].firstChild.textContent")
    changed(page, lambda: page.click(".found tbody tr:nth-child(2) button"))
    assert answer(state(page))["job"]["words"] == words


@pytest.mark.slow
def test_what_is_saved_is_the_job(page: Page, browser: Browser, tmp_path: Path) -> None:
    browser.call("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})

    def saved(selector: str, name: str) -> str:
        page.click(selector)
        ends = time.monotonic() + 30
        while not (tmp_path / name).is_file():
            assert time.monotonic() < ends, f"{name} never came: {list(tmp_path.iterdir())}"
            time.sleep(0.05)
        return (tmp_path / name).read_text(encoding="utf-8")

    job, _ = job_of(FIRST)
    assert Job.from_yaml(saved("#save-yaml", "job.yaml")) == job
    assert json.loads(saved("#save-json", "analysis.json"))["job"] == job.to_dict()
    assert json.loads(saved("#save-trace", "trace.json"))["traceEvents"]
    page.click("#exports [data-to=megatron]")
    page.wait_for("document.querySelector('.losses').textContent.includes('As megatron runs it')")
    assert page.evaluate("document.querySelector('#command').textContent") == answer(FIRST)["command"]


@pytest.mark.slow
def test_the_step_is_handed_to_perfetto(page: Page) -> None:
    """Its window answers that it is ready, and is given the trace; a message of anybody else is not."""
    page.evaluate("window.posted = []; window.open = () => ({postMessage: (...sent) => posted.push(sent)}); 0")
    page.click("#perfetto")
    page.wait_for("posted.some(([message]) => message === 'PING')")
    for origin in ("https://evil.example", "https://ui.perfetto.dev"):
        told = f"{{data: 'PONG', origin: {json.dumps(origin)}}}"
        page.evaluate(f"window.dispatchEvent(new MessageEvent('message', {told})); 0")
        handed = page.evaluate("posted.filter(([message]) => message.perfetto).length")
        assert handed == (origin == "https://ui.perfetto.dev")
    text = page.evaluate("new TextDecoder().decode(posted.find(([message]) => message.perfetto)[0].perfetto.buffer)")
    assert json.loads(text)["traceEvents"]
    assert page.evaluate("posted.every(([, to]) => to === 'https://ui.perfetto.dev')")


@pytest.mark.slow
def test_advice_is_applied(page: Page) -> None:
    changed(page, lambda: page.click("#field-tp .chip[data-value='4']"))
    assert "does not fit" in page.evaluate(SENTENCE)
    page.wait_for("document.querySelector('#advice').textContent.includes('What would fit')")
    changed(page, lambda: page.click("#advice button"))
    assert "fits with" in page.evaluate(SENTENCE)


# -- looks ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_fits_a_phone(page: Page, picture: Callable[[Page, str], None]) -> None:
    page.wait_for("document.querySelectorAll('#runs tbody tr').length > 3")
    for width in (360, 390, 768):
        page.shape(width, 800)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        first = page.evaluate("document.querySelector('#verdict').getBoundingClientRect().top")
        assert first < 200, "the verdict comes first"
    page.shape(390, 844)
    picture(page, "phone")


@pytest.mark.slow
def test_both_themes(page: Page, picture: Callable[[Page, str], None]) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.shape(1360, 1000, dark=True)
    dark = page.evaluate(ground)
    assert dark != light
    picture(page, "dark")
    page.click("#theme")  # auto → light, whatever the system says
    assert page.evaluate(ground) == light
    page.click("#theme")
    page.shape(1360, 1000)
    assert page.evaluate(ground) == dark
    page.click("#theme")
    assert page.evaluate(ground) == light
