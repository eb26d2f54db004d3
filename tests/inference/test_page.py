"""The page in a browser: typing, languages, pointing at a word, errors, and narrow and wide windows."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

import twinax
from parity_tests.support.text import write_files, write_model
from tests.support.serving import chromium, serving
from twinax.backend.errors import NotFiniteError

pytestmark = pytest.mark.slow
MODEL = Path(__file__).parents[1] / "checkpoints" / "v1"
TOKEN = "a-token-of-sixteen-characters"


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def served():
    with serving(twinax.load(MODEL), silence=60, beam_size=3) as (address, service):
        yield address, service


@pytest.fixture
def open_page(browser):
    """Open an address; every message of the console is a failure."""
    messages, pages = [], []

    def open_page(address, width=1280, expected=()):
        page = browser.new_page(viewport={"width": width, "height": 800}, locale="en")
        page.on("console", lambda m: None if any(e in m.text for e in expected) else messages.append(m.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith((address, "data:")) else messages.append(r.url))
        page.goto(address)
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert messages == []


def type_text(page, text):
    page.locator("#text").press_sequentially(text, delay=10)


@pytest.mark.parametrize("width", [390, 1280])
def test_what_is_typed_is_translated(width, served, open_page):
    page = open_page(served[0], width)
    type_text(page, "a b c\n\nh e d f")
    expect(page.locator("#output")).to_have_text("A B C\n\nH E D F", use_inner_text=True)
    expect(page.locator("#status")).to_have_text(re.compile(r"^\d+ ms$"))
    expect(page.locator("#model")).to_have_text("model")
    for locator in (page.locator("#text"), page.locator("#output")):
        box = locator.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("#text").fill("")
    expect(page.locator("#output")).to_be_empty()


def test_only_the_last_text_is_shown(served, open_page):
    page = open_page(served[0])
    for text in ("a b", "a b c", "f b", "d a"):
        page.locator("#text").fill(text)
        page.wait_for_timeout(260)
    expect(page.locator("#output")).to_have_text("D A")


def test_pointing_at_a_word_shows_what_it_attends_to(served, open_page):
    """The model copies, so that the same word of the source has the largest weight."""
    page = open_page(served[0])
    page.locator("#text").fill("c h\n😀 a b h e")  # two elements of a string in JavaScript, one character in Python
    expect(page.locator(".sentence")).to_have_count(2)
    sentence = page.locator(".sentence").last
    for i, letter in enumerate("abhe"):
        sentence.locator(".word").nth(i + 1).hover()
        expect(page.locator("#mirror mark")).to_have_count(4)
        expect(page.locator(".word.pointed")).to_have_text(letter.upper())
        weights = page.locator("#mirror mark").evaluate_all(
            "marks => marks.map(mark => [mark.textContent, +mark.style.getPropertyValue('--weight')])"
        )
        assert "".join(text for text, _ in weights) == "abhe"
        assert max(weights, key=lambda pair: pair[1])[0] == letter
    mark, text = page.locator("#mirror mark").first.bounding_box(), page.locator("#text").bounding_box()
    assert text["y"] < mark["y"] < text["y"] + text["height"]
    page.mouse.move(1, 1)
    expect(page.locator("#mirror mark")).to_have_count(0)


def test_another_translation_of_a_sentence_can_be_chosen(served, open_page):
    page = open_page(served[0])
    page.locator("#text").fill("a b c\nh e d f")
    expect(page.locator(".sentence")).to_have_count(2)
    page.locator(".sentence").nth(1).focus()
    page.keyboard.press("Enter")
    others = page.locator("#others button")
    expect(others).to_have_count(3)
    text = others.nth(1).evaluate("button => button.firstChild.textContent")
    assert text != "H E D F"
    others.nth(1).click()
    expect(page.locator("#output")).to_have_text(f"A B C\n{text}", use_inner_text=True)


def test_languages_are_switched(tmp_path, open_page):
    write_files("M2M100", tmp_path, (["ein Haus im Wald"] * 9, ["a house in the woods"] * 9), 300)
    write_model("M2M100", tmp_path)
    translator = twinax.load(tmp_path)
    with serving(translator, names=(None, None), silence=60) as (address, _):
        page = open_page(address)
        for source, target in (("de", "en"), ("de", "fr"), ("fr", "de")):
            page.locator("#source").select_option(source)
            page.locator("#target").select_option(target)
            page.locator("#text").fill("ein Haus")
            (expected,) = translator.translate(
                ["ein Haus"], src_lang=source, tgt_lang=target, beam_size=2, max_length=8
            )
            expect(page.locator("#output")).to_have_text(expected)
        names = page.locator("#source option").all_inner_texts()
        assert {"German", "French"} <= {*names}
        page.locator("#swap").click()
        assert page.locator("#source").input_value() == "de"
        assert page.locator("#target").input_value() == "fr"
        expect(page.locator("#text")).to_have_value(expected)


def test_errors_are_shown(served, open_page, monkeypatch):
    address, service = served

    def failing(*rest, **more):
        raise NotFiniteError("the model's logits are NaN")

    page = open_page(address, expected=("status of 413",))
    with monkeypatch.context() as context:
        context.setattr(type(service.engine.directions.translator("de", "en")), "stream", failing)
        page.locator("#text").fill("a")
        expect(page.locator("#status")).to_have_text("item 1: the model's logits are NaN")
        expect(page.locator("#status")).to_have_class("error")
    page.locator("#text").fill("f b")
    expect(page.locator("#output")).to_have_text("F B")
    expect(page.locator("#status")).not_to_have_class("error")
    page.locator("#text").fill("a\n" * 2001)
    expect(page.locator("#status")).to_have_text("q: has 2,001 sentences; at most 2,000 are translated at once")


def test_a_token_is_asked_for(open_page):
    with serving(twinax.load(MODEL), TOKEN, silence=60) as (address, _):
        page = open_page(address, expected=("status of 403",))
        page.locator("#text").fill("f b")
        page.locator("#token").fill(TOKEN)
        page.locator("#token").press("Enter")
        expect(page.locator("#output")).to_have_text("F B")
        expect(page.locator("#access")).to_be_hidden()


def test_a_server_that_ends_is_reported(open_page):
    with serving(twinax.load(MODEL), silence=60) as (address, _):
        page = open_page(address, expected=("ERR_CONNECTION_REFUSED",))
        expect(page.locator("#source")).to_be_disabled()
    page.locator("#text").fill("a")
    expect(page.locator("#status")).to_have_text("The server does not answer.")
