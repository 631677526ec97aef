"""The page of `edge serve`, in a real browser: what runs where, a chat, a preview, a lost peer and
its return."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import (
    Browser,
    FilePayload,
    Locator,
    Page,
    Route,
    expect,
    sync_playwright,
)

from edge.demos.bundled import MODEL
from edge.demos.fleet import Fleet
from edge.demos.shapes import SHAPES, checkpoint
from tests.support import known_rates
from tests.support.processes import PATIENCE_S, edge_process
from tests.support.slow_cases import shown_in_parts
from tests.support.small_pictures import noise, png

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextlib.contextmanager
def _open_browser() -> Iterator[Browser]:
    """The Chromium of this machine; the test is skipped where there is none."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("there is no Chromium: not run")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses root otherwise
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=sandbox)
        try:
            yield browser
        finally:
            browser.close()


KEY = "a-key-of-the-page-0123456789"
QUESTION = "Where does the cat live?"
ANSWER = "In the barn."
LAYERS = SHAPES["small"].num_layers

ASK = """([path, key]) =>
    fetch(path, {headers: {authorization: `Bearer ${key}`}}).then((answer) => answer.json())"""
"""What the page itself would be told there."""

expect.set_options(timeout=1e3 * PATIENCE_S)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    options = {
        name: ("--memory", "512MiB", "--kv-disk", f"{folder / name}-kv:64MiB")
        for name in ("attic", "desk")
    }
    with Fleet(tuple(options), folder, options=options) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def url(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(f"{KEY}\n")
    peers = [text for address in fleet.addresses.values() for text in ("--peer", address)]
    with edge_process(
        *(
            "serve",
            MODEL,
            f"second={MODEL}",
            f"large={checkpoint('small', tmp_path_factory.mktemp('shapes'))}",
            *peers,
            "--parallel",
            "pipeline",
            "--context",
            "512",
            "--port",
            "0",
            "--json",
        ),
        *("--api-key-file", keys),
        program=known_rates.__name__,
    ) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with _open_browser() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """With the key; a complaint of the browser fails the test."""
    said: list[str] = []
    with browser.new_context() as context:
        page = context.new_page()
        page.on("pageerror", lambda error: said.append(str(error)))
        page.add_init_script(f"sessionStorage.setItem('edge-api-key', '{KEY}')")
        page.goto(url)
        expect(page.locator("#cluster .device")).not_to_have_count(0)
        yield page
    assert said == []


def axe_finds_nothing(page: Page) -> None:
    """Nor is anything wider than the screen, of a phone or a desk."""
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        found = Axe().run(page).response["violations"]
        assert [(each["id"], each["help"]) for each in found] == []


def say(page: Page, text: str) -> Locator:
    """The reply's box, once it is whole."""
    page.locator("#ask").fill(text)
    page.locator("#ask").press("Enter")
    expect(page.locator("#send")).to_be_visible()
    reply = page.locator(".message.assistant").last
    expect(reply.locator(".foot button")).to_be_visible()
    return reply


def test_it_asks_for_the_key(browser: Browser, url: str) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        answer = page.goto(url)
        assert answer is not None
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        assert KEY not in page.content()
        expect(page.locator("#key-form")).to_be_visible()
        for scheme in ("dark", "light"):
            page.emulate_media(color_scheme=scheme)
            expect(page.locator("html")).to_have_attribute("data-theme", scheme)
            axe_finds_nothing(page)
        page.locator("#key").fill(KEY)
        page.locator("#key-form button").click()
        expect(page.locator("#cluster .device")).to_have_count(2)
        expect(page.locator("#key-form")).to_be_hidden()


def devices(page: Page) -> list[str]:
    """Names of the cluster's, without the badges that may follow them: on a busy machine they are
    slow."""
    names = page.locator("#cluster .device .name")
    return sorted(names.evaluate_all("all => all.map(each => each.firstChild.textContent)"))


def test_what_runs_where_and_a_chat(page: Page) -> None:
    assert devices(page) == ["attic", "desk"]
    reply = say(page, QUESTION)
    expect(reply.locator(".text")).to_have_text(ANSWER)
    expect(reply.locator(".foot")).to_contain_text("5 tokens, first after")
    expect(page.locator("#cluster .device").first).to_contain_text("a step: ")
    reply.get_by_text("Regenerate").click()
    expect(page.locator(".message.assistant .text")).to_have_text(ANSWER)
    expect(page.locator("#send")).to_be_visible()
    page.get_by_text("Edit").first.click()
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#ask")).to_have_value(QUESTION)
    page.locator(".settings summary").click()
    page.locator("#max-tokens").fill("2")
    expect(say(page, QUESTION).locator(".text")).to_have_text("In the")


def test_images_are_chosen_dropped_and_sent(page: Page) -> None:
    """The model reads none, and says so; the page is told that it does."""

    def with_pictures(route: Route) -> None:
        view = route.fetch().json()
        view["model"]["reads_pictures"] = True
        route.fulfill(json=view)

    expect(page.locator("#add-picture")).to_be_hidden()
    page.route("**/api/cluster?*", with_pictures)
    expect(page.locator("#add-picture")).to_be_visible()
    file = png(noise(20, 10))
    first: FilePayload = {"name": "a.png", "mimeType": "image/png", "buffer": file}
    note: FilePayload = {"name": "b.txt", "mimeType": "text/plain", "buffer": b"Hello"}
    page.locator("#picture").set_input_files([first, note])
    expect(page.locator("#pictures img")).to_have_count(1)
    page.evaluate(
        """() => {
          const data = new DataTransfer();
          data.items.add(new File(["two"], "c.png", { type: "image/png" }));
          document.getElementById("ask-form").dispatchEvent(
            new DragEvent("drop", { dataTransfer: data, cancelable: true, bubbles: true }));
        }"""
    )
    expect(page.locator("#pictures img")).to_have_count(2)
    axe_finds_nothing(page)
    page.get_by_label("Remove image 2").click()
    page.locator("#ask").fill("What is it?")
    with page.expect_request("**/v1/chat/completions") as request:
        page.locator("#ask").press("Enter")
    url = "data:image/png;base64," + base64.b64encode(file).decode()
    body: Any = request.value.post_data_json
    assert body["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": "What is it?"},
            ],
        }
    ]
    expect(page.locator(".message.user img")).to_have_count(1)
    expect(page.locator(".message .error")).to_contain_text("reads no images")
    axe_finds_nothing(page)
    page.get_by_text("Edit").first.click()
    expect(page.locator("#pictures img")).to_have_count(1)
    page.unroute_all(behavior="wait")  # a view may be on its way through the route


def test_an_answer_is_stopped(page: Page, fleet: Fleet) -> None:
    for name in fleet.processes:
        fleet.stop(name)
    page.locator("#ask").fill(QUESTION)
    page.locator("#send").click()
    expect(page.locator(".message.assistant .waits")).to_be_visible()
    page.locator("#stop").click()
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".message.assistant .foot")).to_contain_text("stopped")
    expect(page.locator(".message.assistant .waits")).to_have_count(0)
    for name in fleet.processes:
        fleet.go_on(name)
    expect(say(page, QUESTION).locator(".text")).to_have_text(ANSWER)


def test_another_placement_is_shown(page: Page) -> None:
    page.locator("#preview-devices").get_by_label("desk").uncheck()
    page.locator("#preview-form button").click()
    expect(page.locator("#preview .device")).to_have_count(1)
    said = re.compile(r"^[\d.]+(–[\d.]+)? tokens per second predicted")
    expect(page.locator("#preview-said")).to_have_text(said)
    assert "desk" not in page.locator("#preview").inner_text()
    page.locator("#preview-change").fill("something else")
    page.locator("#preview-form button").click()
    expect(page.locator("#preview-said")).to_contain_text("is not a known change")


@pytest.mark.linux_ways
def test_a_model_is_drawn_before_it_is_loaded(page: Page) -> None:
    """With less memory, too: then some of its layers would be read from disk."""

    def planned(*changes: str) -> dict[str, Any]:
        asked = "&".join(["model=large", *(f"change={quote(each)}" for each in changes)])
        found: dict[str, Any] = page.evaluate(ASK, [f"api/plan?{asked}", KEY])
        return found

    (alone,) = planned("without attic")["devices"]
    less = f"-{alone['left_bytes'] + alone['weight_bytes'] * 19 // 20}B on desk"
    page.locator("#preview-model").select_option("large")
    page.locator("#preview-devices").get_by_label("attic").uncheck()
    page.locator("#preview-form button").click()
    expect(page.locator("#preview .device .name")).to_have_text(["desk"])
    expect(page.locator("#preview .stage .title")).to_have_text(f"layers 0–{LAYERS - 1}")
    expect(page.locator("#preview .tiers")).to_have_count(0)
    page.locator("#preview-change").fill(less)
    page.locator("#preview-form button").click()
    (row,) = planned("without attic", less)["devices"]
    read = row["streamed_layers"]
    assert 0 < read < LAYERS
    expect(page.locator("#preview .tiers .t-disk")).to_have_count(read)
    expect(page.locator("#preview .tiers .t-memory")).to_have_count(LAYERS - read)
    expect(page.locator("#preview .device")).to_contain_text(
        f"layers: {LAYERS - read} in memory, {read} read from disk"
    )
    models = page.evaluate(ASK, ["api/cluster", KEY])["models"]
    assert [each["name"] for each in models if each["is_loaded"]] == [MODEL.name]


def test_another_model_is_chosen_and_talked_to(page: Page) -> None:
    names = page.locator("#models option").all_inner_texts()
    assert names == [MODEL.name, "second", "large"]
    page.locator("#models").select_option("second")
    expect(page.locator("#state")).to_contain_text("is not loaded now")
    expect(say(page, QUESTION).locator(".text")).to_have_text(ANSWER)
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#answers")).to_have_text("0")
    page.locator("#models").select_option(MODEL.name)
    expect(say(page, QUESTION).locator(".text")).to_have_text(ANSWER)


def test_what_is_kept_on_disk_is_drawn(page: Page) -> None:
    """A block of 256 tokens, of a prompt that has more. Shorter ones may be kept in memory, where a
    busy machine made the cluster change its plan."""
    kept = re.compile(r"kept of earlier prompts: .*\d+ KiB on disk")
    expect(page.locator("#cluster .device").first).not_to_contain_text(kept)
    say(page, " ".join([QUESTION] * 50))
    expect(page.locator("#cluster .device").first).to_contain_text(kept)


@pytest.mark.parametrize(
    "scheme", ["light", pytest.param("dark", marks=shown_in_parts("multiprocess/test_page.py"))]
)
def test_it_is_for_everybody(page: Page, scheme: str) -> None:
    """On a phone and at a desk, in either scheme, with all of it open. What is dark is shown by the
    question for the key, too."""
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    expect(page.locator("html")).to_have_attribute("data-theme", scheme)
    say(page, QUESTION)
    page.locator(".settings summary").click()
    expect(page.locator("#system")).to_be_visible()
    page.locator("#preview-form button").click()
    expect(page.locator("#preview .device")).not_to_have_count(0)
    axe_finds_nothing(page)


@shown_in_parts("multiprocess/test_lost_peers.py", "multiprocess/test_joining_peers.py")
def test_a_lost_peer_and_its_return_are_seen(page: Page, fleet: Fleet) -> None:
    expect(page.locator("#events")).to_have_text("None.")
    fleet.kill("desk")
    expect(page.locator("#events")).to_have_text(re.compile("desk.*(ready again|went on) after"))
    expect(page.locator("#state")).to_have_text("ready")
    assert devices(page) == ["attic"]
    expect(say(page, QUESTION).locator(".text")).to_have_text(ANSWER)
    expect(page.locator("#spares")).to_contain_text("desk (no answer)")
    assert fleet.renew() == ["desk"]
    expect(page.locator("#events")).to_contain_text("desk answers again, after")
    expect(page.locator("#spares, #cluster").filter(has_text="desk")).to_have_count(1)
    expect(page.locator("#spares")).not_to_contain_text("no answer")
    expect(say(page, QUESTION).locator(".text")).to_have_text(ANSWER)
    fleet.kill("desk")  # it was started by this test
