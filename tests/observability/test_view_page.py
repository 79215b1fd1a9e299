"""The viewer's page in a real browser, headless Chromium."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestServer
from support_chromium import CHROMIUM, Tab, browser
from support_view import ATTACK, lines, make_run, sample, write_step

from roll_lite.observability.view.report import write_report
from roll_lite.observability.view.server import application

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),  # of the browser
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None and not os.environ.get("CI"), reason="chromium is not installed: apt-get install chromium"),
]
TIDY = "document.documentElement.scrollWidth <= innerWidth"
UNNAMED = """[...document.querySelectorAll('a, button, input, select, summary, canvas, [role=img]')].filter(
    one => !(one.ariaLabel || one.closest('[role=img][aria-label]') || one.closest('label') || one.title
        || /[\\p{L}\\p{N}]/u.test(one.textContent))).map(one => one.outerHTML)"""


@pytest_asyncio.fixture(loop_scope="module")
async def address(tmp_path: Path) -> AsyncIterator[str]:
    make_run(tmp_path / "small/first")
    make_run(tmp_path / "small/second", steps=2, exit_state="running", seed=8)
    lines(tmp_path / "small/second/samples/validation_000002.jsonl", [sample(2, "add", 100 + number, 0) for number in range(150)])
    async with TestServer(application([tmp_path])) as server:
        yield str(server.make_url("/"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Tab]:
    async with browser() as one:
        yield one


@pytest_asyncio.fixture(loop_scope="module")
async def tab(chromium: Tab, address: str) -> AsyncIterator[Tab]:
    """Page that is left before the server ends, which it would miss."""
    chromium.requests.clear()
    yield chromium
    await chromium.call("Emulation.clearDeviceMetricsOverride")
    await chromium.call("Page.navigate", url="about:blank")
    errors, chromium.errors = chromium.errors, []
    assert errors == []


async def text(tab: Tab, selector: str = "main") -> str:
    return str(await tab.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))


async def test_curves_compare_runs_and_follow_a_live_one(tab: Tab, address: str, tmp_path: Path) -> None:
    await tab.open(address)
    await tab.until("document.querySelectorAll('.uplot').length >= 3")
    assert "first" in await text(tab, ".u-legend") and "second" in await text(tab, ".u-legend")
    await tab.value("document.querySelector('#runs input').click()")
    await tab.until("!document.querySelector('.u-legend').innerText.includes('first')")
    write_step(tmp_path / "small/second", 3)
    await tab.until(
        "document.querySelector('[aria-label=\"Curve of reward/mean\"] [role=img]').getAttribute('aria-label').includes('0.75')"
    )
    await tab.value("const add = document.getElementById('add'); add.value = 'time/train'; add.dispatchEvent(new Event('change'))")
    await tab.until("document.querySelector('[aria-label=\"Curve of time/train\"]')")
    await tab.value("window.before = fetch; window.fetch = () => Promise.reject(new Error('refused'))")
    await tab.until("document.getElementById('live').textContent.startsWith('roll-lite view does not answer')")
    await tab.value("window.fetch = window.before")
    await tab.until("document.getElementById('live').textContent === 'live'")
    assert await tab.value(TIDY) and await tab.value(UNNAMED) == []
    assert {url.split("/")[2] for url in tab.requests if url.startswith("http")} == {address.split("/")[2]}, "nothing from elsewhere"


async def test_curves_are_smoothed_chosen_and_removed(tab: Tab, address: str) -> None:
    await tab.open(address)
    said = "document.querySelector('[aria-label=\"Curve of reward/mean\"] [role=img]').ariaLabel"
    await tab.until("document.querySelector('.uplot')")
    assert "first · all from 0.25 to 1;" in await tab.value(said)
    await choose(tab, "Smoothing", "1")
    assert "first · all from 0.375 to 0.875;" in await tab.value(said), "means of neighbours"
    await choose(tab, "Smoothing", "0")
    await choose(tab, "Domains", "make")
    assert await tab.value(said) == "first · make from 1.2 to 1.8; second · make from 1.2 to 1.4"
    await choose(tab, "Domains", "-")
    assert await tab.value(said) == "first from 0.25 to 1; second from 0.25 to 0.5"
    curves = "[...document.querySelectorAll('.grid section')].map(one => one.ariaLabel)"
    before = await tab.value(curves)
    await tab.value("document.querySelector('[aria-label=\"Remove reward/mean\"]').click()")
    await tab.until(f"!{curves}.includes('Curve of reward/mean')")
    assert await tab.value(curves) == [one for one in before if one != "Curve of reward/mean"]


async def test_tabs_are_chosen_with_arrows_and_every_control_has_a_name(tab: Tab, address: str) -> None:
    await tab.open(f"{address}#curves?run=small/first")
    await tab.until("document.querySelector('.uplot')")
    await tab.value("document.getElementById('tab-curves').focus()")
    for key, name, drawn in (
        ("ArrowRight", "samples", ".sample"),
        ("ArrowRight", "domains", ".notes"),
        ("ArrowRight", "timeline", "canvas.time"),
        ("ArrowRight", "settings", "main tbody tr"),
        ("ArrowRight", "curves", ".uplot"),
        ("ArrowLeft", "settings", "main tbody tr"),
    ):
        await tab.key(key)
        await tab.until(f"document.querySelector('{drawn}') && document.activeElement.id === 'tab-{name}'")
        assert await tab.value("document.querySelector('[role=tab][aria-selected=true]').id") == f"tab-{name}"
        assert await tab.value(TIDY) and await tab.value(UNNAMED) == [], name


async def test_samples_are_filtered_read_and_never_run(tab: Tab, address: str) -> None:
    await tab.open(f"{address}#samples?run=small/first")
    await tab.until("document.getElementById('found')?.innerText.startsWith('26 samples')")
    await tab.key("/")
    await tab.value("const box = document.activeElement; box.value = 'attacked'; box.dispatchEvent(new Event('change'))")
    await tab.until("document.getElementById('found')?.innerText.startsWith('4 samples')")
    await tab.until("document.querySelectorAll('.sample').length === 3")
    assert "<script>window.attacked" in await text(tab, "#detail"), "it is shown as text"
    assert await tab.value("window.attacked === undefined && !document.querySelector('main script, main img')")
    await tab.open(f"{address}#samples?run=small/first&domain=make&step_min=2&step_max=2")
    await tab.until("document.querySelectorAll('.list tr[tabindex]').length === 3 && document.querySelector('.call')")
    turns = await tab.value("[...document.querySelectorAll('.turn.assistant b')].map(one => one.textContent)")
    assert turns == ["assistant", "assistant · reward 0", "assistant · reward 1"], "a reward belongs to a response"
    assert not await tab.value("[...document.querySelectorAll('.sample h3')].some(one => one.textContent.startsWith('Conversation'))")
    assert "calculator" in await text(tab, ".call") and "the tool says 4" in await text(tab, "#detail")
    assert await tab.value(TIDY) and await tab.value(UNNAMED) == []


SAMPLES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "Domain=make": lambda one: one["domain"] == "make",
    "Of=validation": lambda one: one["kind"] == "validation",
    "Correct=true": lambda one: one["correct"] is True,
    "Correct=false": lambda one: one["correct"] is False,
    "Outcome=failed": lambda one: one["outcome"] == "failed",
    "End=length": lambda one: one["finish_reason"] == "length",
    "Score, from=0.5": lambda one: (one["score"] or 0) >= 0.5,
    "Score, to=0.5": lambda one: one["score"] is not None and one["score"] <= 0.5,
    "Step, from=3": lambda one: one["step"] >= 3,
    "Step, to=1": lambda one: one["step"] <= 1,
    f"Failure=reward timed out {ATTACK}": lambda one: one["failure"] is not None,
    "Part=level:1": lambda one: "level:1" in one.get("parts", ()),
    "Tokens, from=4": lambda one: one["response_tokens"] >= 4,
    "Tokens, to=4": lambda one: one["response_tokens"] <= 4,
}
CONTROL = (
    "[...document.querySelectorAll('main select, main input')].find(one => (one.ariaLabel || one.closest('label').firstChild.data) === {})"
)


def samples_of(run: Path) -> list[dict[str, Any]]:
    files = sorted((run / "samples").glob("*.jsonl"))
    return [{"kind": file.name.split("_")[0], **json.loads(line)} for file in files for line in file.read_text().splitlines()]


async def choose(tab: Tab, label: str, value: str, part: str = "main") -> None:
    """Set a control as a user does, and wait until this part of the page is drawn again."""
    control = CONTROL.format(json.dumps(label))
    await tab.until(f"{control} && document.querySelector('{part} > *')")
    await tab.value(f"document.querySelector('{part} > *').dataset.old = 1")
    await tab.value(f"(one => {{ one.value = {json.dumps(value)}; one.dispatchEvent(new Event('change')); }})({control})")
    await tab.until(f"document.querySelector('{part} > *') && !document.querySelector('{part} > [data-old]')")


async def test_every_filter_finds_its_samples(tab: Tab, address: str, tmp_path: Path) -> None:
    records = samples_of(tmp_path / "small/first")
    await tab.open(f"{address}#samples?run=small/first")
    for name, holds in SAMPLES.items():
        wanted = sum(map(holds, records))
        assert 0 < wanted < len(records)
        await choose(tab, *name.split("=", 1))
        await tab.until(f"document.getElementById('found')?.innerText.match(/^{wanted} samples? /)")
        assert await tab.value("document.querySelectorAll('.list tr[tabindex]').length") == wanted, name
        await tab.value("[...document.querySelectorAll('button')].find(one => one.innerText === 'Clear').click()")
        await tab.until(f"document.getElementById('found')?.innerText.startsWith('{len(records)} samples')")
    await choose(tab, "Domain", "make")
    await tab.until("location.hash.includes('domain=make')")
    await choose(tab, "Correct", "false")
    both = sum(one["domain"] == "make" and one["correct"] is False for one in records)
    await tab.until(f"document.getElementById('found')?.innerText.startsWith('{both} samples')")


async def test_samples_do_not_wait_for_the_choices_of_filters(tab: Tab, address: str) -> None:
    await tab.open(address)
    await tab.until("document.querySelector('.uplot')")
    await tab.value(
        """const before = fetch, held = []; window.release = () => held.forEach(one => one());
        const later = given => new Promise(done => held.push(() => done(before(...given))));
        window.fetch = (...given) => given[0].includes('by=domain') ? later(given) : before(...given);
        location.hash = '#samples?run=small/first&domain=make'"""
    )
    await tab.until("document.getElementById('found')?.innerText.startsWith('12 samples') && document.querySelector('.sample')")
    assert not await tab.value(CONTROL.format("'Domain'") + " !== undefined")
    await tab.value("release()")
    await tab.until(CONTROL.format("'Domain'") + "?.value === 'make'")


async def test_a_live_run_does_not_undo_a_choice(tab: Tab, address: str) -> None:
    await tab.open(f"{address}#samples?run=small/first")
    await tab.until("document.getElementById('found')?.innerText.startsWith('26 samples')")
    await tab.value("addEventListener('hashchange', () => draw(true)); location.hash = '#samples?run=small/first&correct=false'")
    await tab.until("document.getElementById('found')?.innerText.startsWith('9 samples') && document.querySelector('.sample')")
    assert await tab.value(CONTROL.format("'Correct'") + ".value") == "false"
    assert "✗" in await text(tab, ".sample[aria-current=true]")


async def test_a_long_list_is_shown_in_parts(tab: Tab, address: str) -> None:
    rows = "document.querySelectorAll('.list tr[tabindex]').length"
    await tab.open(f"{address}#samples?run=small/first")
    await choose(tab, "Run", "small/second")
    await tab.until(f"document.getElementById('found').innerText.startsWith('164 samples') && {rows} === 100")
    await tab.value("document.querySelector('.list button').click()")
    await tab.until(f"{rows} === 164")
    assert await tab.value("document.querySelector('.list button')") is None
    assert await tab.value("new Set([...document.querySelectorAll('.list tr[tabindex]')].map(one => one.dataset.at)).size") == 164


@pytest.mark.parametrize(("column", "order"), [(0, "step"), (2, "score"), (3, "response_tokens"), (4, "advantage")])
async def test_samples_stand_in_the_chosen_order(tab: Tab, address: str, column: int, order: str) -> None:
    await tab.open(f"{address}#samples?run=small/first&kind=step")
    for sign in ("-", ""):
        await choose(tab, "Order", f"{sign}{order}")
        cells = await tab.value(f"[...document.querySelectorAll('.list tr[tabindex]')].map(one => one.children[{column}].innerText)")
        numbers = [float(cell.replace("−", "-")) for cell in cells if cell != "–"]
        assert numbers == sorted(numbers, reverse=sign == "-") and len(set(numbers)) > 1
        assert all(cell == "–" for cell in cells[len(numbers) :]), "samples without a number are last"


async def test_episodes_with_most_turns_stand_first(tab: Tab, address: str) -> None:
    await tab.open(f"{address}#samples?run=small/first")
    await choose(tab, "Order", "-turns")
    places = await tab.value("[...document.querySelectorAll('.list tr[tabindex]')].map(one => one.dataset.at)")
    assert places[:4] == ["step 3 7 2", "step 4 9 2", "step 2 5 2", "step 1 3 2"] and len(places) == 26


async def test_every_conversation_of_an_agent_is_shown_and_found(tab: Tab, address: str) -> None:
    await tab.open(f"{address}#samples?run=small/first&text=first+add+them")
    await tab.until("document.getElementById('found')?.innerText.startsWith('1 sample') && document.querySelector('.call')")
    shown = await text(tab, ".sample[aria-current=true]")
    places = [shown.index(one) for one in ("Conversation 1 of 2", "First add them.", "Conversation 2 of 2, with the last", "calculator")]
    assert places == sorted(places)
    assert "reward" not in await tab.value(
        "[...document.querySelectorAll('.sample[aria-current=true] .turn b')].map(one => one.textContent).join()"
    )


async def test_keys_move_through_samples_and_tokens_are_coloured(tab: Tab, address: str) -> None:
    await tab.open(f"{address}#samples?run=small/first&domain=add&kind=step&colour=difference")
    await tab.until("document.querySelector('.tokens span')")
    colours = await tab.value("[...document.querySelector('.tokens').children].map(one => [one.className, one.style.background !== ''])")
    assert colours[:2] == [["given", False], ["given", False]] and colours[2][1], "only the policy's tokens are coloured"
    assert "engine − trainer: -0.25" in await tab.value("document.querySelectorAll('.tokens span')[2].title")
    modes = await tab.value("[...document.querySelectorAll('#detail option')].map(one => one.value)")
    assert modes == ["text", "logprob", "advantage", "difference", "reference", "value", "version"]
    for key in ("j", "j", "k"):
        await tab.key(key)
    await tab.until("document.querySelector('.sample[aria-current=true]')?.getAttribute('aria-label').startsWith('Sample 1,')")
    assert await tab.value("document.activeElement.getAttribute('aria-selected')") == "true"
    await tab.key("ArrowDown")
    await tab.until("document.querySelector('.sample[aria-current=true]')?.getAttribute('aria-label').startsWith('Sample 2,')")
    assert "reward timed out" in await text(tab, ".sample[aria-current=true]"), "the cause of the failure"


COLOURED = {
    "text": None,
    "logprob": ["e0503f 24%", "e0503f 72%"],
    "advantage": ["2f9e5b 72%", "e0503f 72%"],
    "difference": ["e0503f 72%", "2f9e5b 0%"],
    "reference": ["2f9e5b 72%", "e0503f 72%"],
    "value": ["2f9e5b 72%", "e0503f 36%"],
    "version": ["59, 111, 182", "59, 111, 182"],
}
"""Colours of the policy's two tokens. Both are of version 0, which has the first colour."""


async def test_colours_show_each_number(tab: Tab, address: str) -> None:
    await tab.open(f"{address}#samples?run=small/first&domain=add&kind=step&step_max=1")
    await tab.until("document.querySelector('.sample')")
    for mode, wanted in COLOURED.items():
        await choose(tab, "Colour tokens by", mode, part="#detail")
        if wanted is None:
            assert not await tab.value("document.querySelector('.tokens, .scale')")
            continue
        styles = await tab.value("[...document.querySelector('.tokens').children].map(one => one.getAttribute('style') || '')")
        told = [style.replace("rgb(224, 80, 63)", "#e0503f").replace("rgb(47, 158, 91)", "#2f9e5b") for style in styles]
        assert told[:2] == ["", ""] and all(colour in style for colour, style in zip(wanted, told[2:], strict=True)), (mode, styles)


async def test_versions_are_those_of_each_training_row(tab: Tab, address: str) -> None:
    await tab.open(f"{address}#samples?run=small/first&text=first+add+them&colour=version")
    await tab.until("document.querySelector('.tokens')")
    assert await tab.value("[...document.querySelectorAll('#detail .scale i')].map(one => one.nextSibling.data)") == [
        f"version {version}" for version in (2, 3, 5, 6)
    ]
    told = await tab.value(
        """[...document.querySelectorAll('.sample')].slice(1).map(one => [...one.querySelectorAll('.tokens')].map(row =>
            [...row.children].map(token => [token.title.split('weight version: ')[1], token.style.background])))"""
    )
    missing, colours = ["–", ""], {2: "63, 155, 98", 5: "160, 138, 58", 6: "58, 154, 166"}
    first, second = told[1]
    assert first[:2] == [missing] * 2 and second[:3] == [missing] * 3, "tokens that are not the policy's"
    for (version, colour), wanted in zip([*first[2:], *second[3:]], (2, 2, 5, 6), strict=True):
        assert version == str(wanted) and colours[wanted] in colour
    assert told[0][0] == first and told[0][1] == [[None, ""]] * 5, "versions of this sample's second row were not recorded"
    lacking = await tab.value(
        "[...document.querySelectorAll('.sample')].map(one => one.innerText.includes('version: not recorded for this row'))"
    )
    assert lacking == [False, True, False] and "Training row 2 of 2" in await text(tab, ".sample[aria-current=true]")
    seen = await tab.value("[scrollY, document.querySelector('.sample[aria-current=true]').getBoundingClientRect().right <= innerWidth]")
    assert seen == [0, True], "the chosen sample is in sight, and the filters above it"


async def rows_of(tab: Tab, title: str) -> list[list[str]]:
    table = f"document.querySelector('section[aria-label={json.dumps(title)}]')"
    return list(
        await tab.value(f"[...{table}.querySelectorAll('tbody tr')].map(row => [...row.children].map(one => one.innerText).slice(0, 4))")
    )


async def test_two_ranges_of_steps_are_compared(tab: Tab, address: str) -> None:
    await tab.open(f"{address}#domains?run=small/first")
    await choose(tab, "Domain", "make")
    await tab.until("document.querySelector('.notes')")
    assert "Mean score 1.2 → 1.8: +0.6" in await text(tab), "the first and the last step"
    await choose(tab, "Before: step or steps", "1-2")
    await choose(tab, "After: step or steps", "3-4")
    assert "Mean score 1.3 → 1.7: +0.4" in await text(tab)
    assert await rows_of(tab, "Mix: asked for and got") == [
        ["rollout/requested", "2", "2", "0"],
        ["rollout/groups", "1.5", "3.5", "+2"],
    ]
    assert await rows_of(tab, "Filter and masks") == [
        ["rollout/filtered_low", "3.5", "1.5", "-2"],
        ["masks/samples", "20.0%", "20.0%", "0.0%"],
    ]
    moved = "Prompts that moved most"
    assert await rows_of(tab, moved) == [["prompt 3", "0.75", "0.5833", "-0.1667"], ["prompt 1", "0.75", "0.75", "0"]]
    clicked = "[...document.querySelectorAll('button, section[aria-label^=Prompts] a')].find(one => one.innerText === '{}')"
    for link, steps in (("Samples before", "222111"), ("Samples after", "444333"), ("prompt 3", "111333"), ("prompt 1", "222444")):
        await tab.until(clicked.format(link))
        await tab.value(clicked.format(link) + ".click()")
        await tab.until("document.getElementById('found')?.innerText.startsWith('6 samples')")
        cells = await tab.value("[...document.querySelectorAll('.list tr[tabindex]')].map(one => one.firstChild.innerText)")
        assert "".join(cells) == steps, link
        await tab.value("history.back()")


async def test_why_a_domain_moved(tab: Tab, address: str) -> None:
    await tab.open(f"{address}#domains?run=small/first&domain=add&a=1&b=4")
    await tab.until("document.querySelector('.notes') && document.querySelector('[aria-label^=\"Causes of failure\"]')")
    shown = await text(tab)
    assert "Mean score 0.2 → 0.8: +0.6" in shown and "Term base contributes +0.3" in shown and "cut at max_tokens" in shown
    assert "Causes of failure" in shown and "by another mix" in shown
    await tab.value("[...document.querySelectorAll('button')].find(one => one.innerText === 'Samples after').click()")
    await tab.until("document.getElementById('found')?.innerText.startsWith('3 samples')")


async def test_a_timeline_zooms_and_is_saved_for_perfetto(tab: Tab, address: str) -> None:
    await tab.open(f"{address}#timeline?run=small/first&step=3")
    await tab.until("document.querySelector('canvas.time')?.getAttribute('aria-label').endsWith('6 samples')")
    span = float(await tab.value("document.querySelector('canvas.time').dataset.span"))
    await tab.value("document.querySelector('canvas.time').focus()")
    await tab.key("+")
    assert float(await tab.value("document.querySelector('canvas.time').dataset.span")) == pytest.approx(0.7 * span, rel=0.01)
    saved = json.loads(
        await tab.value(
            """new Promise(done => {
            const make = URL.createObjectURL;
            URL.createObjectURL = blob => { blob.text().then(done); return make(blob); };
            document.getElementById('perfetto').click(); })"""
        )
    )
    bars = [one for one in saved["traceEvents"] if one["ph"] == "X"]
    assert {"generate", "train"} <= {one["name"] for one in bars} and all(one["ts"] >= 0 and one["dur"] > 0 for one in bars)
    assert any("engine 1" in one["args"].get("name", "") for one in saved["traceEvents"])
    lanes = {one["pid"]: one["args"]["name"] for one in saved["traceEvents"] if one["name"] == "process_name"}
    assert [name for name in lanes.values() if name.startswith("actor_train")] == ["actor_train[0]", "actor_train[1]"]
    trained = {lanes[bar["pid"]]: bar for bar in bars if bar["name"] == "train"}
    assert trained["actor_train[1]"]["dur"] == 600_000 and trained["actor_train[1]"]["ts"] - trained["driver: phases"]["ts"] == 100_000
    await tab.key("]")
    await tab.until("location.hash.includes('step=4')")


async def test_a_timeline_has_steps_keys_and_a_table(tab: Tab, address: str) -> None:
    canvas = "document.querySelector('canvas.time')"
    await tab.open(f"{address}#timeline?run=small/first&step=3")
    await choose(tab, "Step", "2")
    await tab.until(f"{canvas}?.ariaLabel.startsWith('Step 2: generate 3 seconds, train 1 seconds')")
    await tab.key("[")
    await tab.until(f"{canvas}?.ariaLabel.startsWith('Step 1:')")
    whole = await tab.value(f"{canvas}.focus(); {canvas}.toDataURL()")
    await tab.key("ArrowRight")
    moved = await tab.value(f"{canvas}.toDataURL()")
    await tab.key("ArrowLeft")
    assert await tab.value(f"{canvas}.toDataURL()") == whole != moved, "there and back"
    for key in ("+", "ArrowRight", "-", "ArrowRight"):
        await tab.key(key)
    await tab.value("[...document.querySelectorAll('button')].find(one => one.innerText === 'Whole step').click()")
    assert await tab.value(f"{canvas}.toDataURL()") == whole
    assert not await tab.value("document.querySelector('details table').checkVisibility()")
    await tab.value("document.querySelector('summary').click()")
    table = await tab.value("[...document.querySelectorAll('details tbody tr')].map(row => [...row.children].map(one => one.innerText))")
    assert table == [["generate", "3"], ["train", "1"], ["train/actor train", "0.9"], ["step", "4.1"]]


async def test_the_mouse_moves_and_zooms_the_timeline_and_opens_samples(tab: Tab, address: str) -> None:
    await tab.call("Emulation.setDeviceMetricsOverride", width=1440, height=1600, deviceScaleFactor=1, mobile=False)
    await tab.open(f"{address}#timeline?run=small/first&step=3")
    await tab.until("document.querySelector('canvas.time')?.getAttribute('aria-label').endsWith('6 samples')")
    left, top, width = await tab.value(
        "(box => [box.left, box.top, box.width])(document.querySelector('canvas.time').getBoundingClientRect())"
    )
    told, span = "document.querySelector('main [role=status]').innerText", "Number(document.querySelector('canvas.time').dataset.span)"
    phases = top + 26 + 20 + 10
    await tab.mouse(("moved", left + 0.3 * width, phases))
    assert (await tab.value(told)).startswith("generate: 3 s, from 0 s to 3 s")
    whole = await tab.value(span)
    await tab.mouse(("wheel", left + 0.3 * width, phases), wheel=-100)
    await tab.until(f"{span} < {whole}")
    assert await tab.value(span) == pytest.approx(0.8 * whole, rel=0.01)
    await tab.mouse(("moved", left + 0.3 * width, phases))
    assert (await tab.value(told)).startswith("generate"), "what is under the pointer stays there"
    await tab.mouse(("moved", left + 0.9 * width, phases))
    before = await tab.value(told)
    await tab.mouse(
        ("pressed", left + 0.2 * width, phases), ("moved", left + 0.9 * width, phases), ("released", left + 0.9 * width, phases)
    )
    await tab.mouse(("moved", left + 0.9 * width, phases))
    assert await tab.value(told) != before and await tab.value(span) == pytest.approx(0.8 * whole, rel=0.01), "moved, not zoomed"
    await tab.value("document.querySelector('canvas.time').focus()")
    await tab.key("0")
    assert await tab.value(span) == whole
    height = int(await tab.value("document.querySelector('canvas.time').clientHeight"))
    for y in range(0, height, 4):
        place = left + 0.4 * width, top + y
        await tab.mouse(("moved", *place))
        if (bar := await tab.value(told)).startswith("add, group 6, sample"):
            break
    for clicks in (1, 2):
        await tab.mouse(("pressed", *place), ("released", *place), clicks=clicks)
    number = bar.split(",")[2].split()[-1]
    await tab.until(f"document.querySelector('.sample[aria-current=true]')?.ariaLabel.startsWith('Sample {number},')")


async def test_settings_of_two_runs_are_compared_and_the_dark_page_is_dark(tab: Tab, address: str) -> None:
    await tab.open(f"{address}#settings?run=small/first&with=small/second")
    await tab.until("document.querySelectorAll('main tbody tr').length === 1")
    assert "seed" in await text(tab, "main tbody") and "1 of" in await text(tab)
    paths = "[...document.querySelectorAll('main tbody tr')].map(one => one.firstChild.innerText)"
    await tab.value("document.querySelector('main input[type=checkbox]').click()")
    every = ["domains.add.share", "domains.make.share", "experiment", "model.path", "seed", "steps"]
    await tab.until(f"{paths}.length === {len(every)}")
    assert await tab.value(paths) == every
    await choose(tab, "Find", "SHARE")
    assert await tab.value(paths) == every[:2]
    await choose(tab, "Find", "")
    await choose(tab, "Compare with", "small/first")
    assert "6 settings" in await text(tab) and len(await tab.value("[...document.querySelectorAll('main th')]")) == 2
    await tab.value("document.activeElement.blur()")
    await tab.key("1")
    await tab.until("document.querySelector('.uplot')")
    assert await tab.value("document.getElementById('tab-curves').getAttribute('aria-selected')") == "true"
    light = await tab.value("getComputedStyle(document.body).backgroundColor")
    await tab.value("document.getElementById('theme').click()")
    assert await tab.value("getComputedStyle(document.body).backgroundColor") != light
    await tab.key("?")
    assert await tab.value("document.getElementById('keys').open")


async def test_a_report_works_from_the_disk(tab: Tab, tmp_path: Path) -> None:
    path = await asyncio.to_thread(write_report, tmp_path / "small/first")
    await tab.open(path.as_uri())
    await tab.until("document.querySelectorAll('.uplot').length >= 3")
    for name, wanted in (("samples", ".sample"), ("domains", ".notes"), ("timeline", "canvas.time"), ("settings", "main tbody tr")):
        await tab.value(f"location.hash = '{name}'")
        await tab.until(f"document.querySelector('{wanted}')")
    await tab.value("location.hash = 'timeline?step=3'")
    await tab.until("document.querySelector('canvas.time')?.getAttribute('aria-label').startsWith('Step 3')")
    lanes = "lanesOf(inside('timeline', { step: 3 }), ['add', 'make']).map(lane => lane.title)"
    ranks = ["actor_train[0]", "actor_train[1]"]
    engines = ["engine 0: samples", "engine 1: samples · here · process 17", "engines: samples"]
    assert await tab.value(lanes) == ["driver: phases", *ranks, *engines, "rewards"]
    await tab.value("location.hash = 'samples?text=attacked'")
    await tab.until("document.getElementById('found')?.innerText.startsWith('4 samples')")
    assert await tab.value("window.attacked === undefined")
    assert [url for url in tab.requests if not url.startswith(("file:", "data:", "about:"))] == []
