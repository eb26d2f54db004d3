"""Pictures of the page of `twinax serve`: `python -m benchmarks.serving.screenshots FOLDER RUN`."""

import sys
from pathlib import Path

from playwright.sync_api import expect

import twinax
from tests.support.serving import chromium, serving

TEXT = """Ein Mann fährt mit einem roten Fahrrad durch den Wald. Zwei Hunde spielen im Schnee.

Eine Frau liest ein Buch."""


def main(folder: Path, run: str) -> None:
    """Write `serve-1280.png`, in the light scheme, and `serve-390.png`, in the dark one."""
    with (
        serving(twinax.load(run), silence=60, beam_size=5, max_length=None) as (address, _),
        chromium() as browser,
    ):
        for width, height, scheme in ((1280, 720, "light"), (390, 844, "dark")):
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, locale="en")
            page.goto(address)
            page.locator("#text").fill(TEXT)
            expect(page.locator("#status")).to_contain_text("ms", timeout=60_000)
            page.locator(".sentence").first.focus()
            page.keyboard.press("Enter")
            page.locator(".word", has_text="red").first.hover()
            expect(page.locator("#mirror mark").first).to_be_attached()
            page.screenshot(path=folder / f"serve-{width}.png", full_page=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m benchmarks.serving.screenshots FOLDER RUN")
    main(Path(sys.argv[1]), sys.argv[2])
