"""Pictures of the pages of `twinax serve` and of reports, in docs: `python -m benchmarks.screenshots DOCS RUN`."""

import re
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image
from playwright.sync_api import Browser, expect

import twinax
from tests.support.serving import chromium, serving
from twinax.audit.page import page as audit_page
from twinax.audit.run import audit_config
from twinax.configs import TransformerConfig
from twinax.configs.training import TrainingConfig
from twinax.parity.functions import random_arrays
from twinax.parity.ladder import run_ladder
from twinax.parity.page import page as ladder_page

TEXT = """Ein Mann fährt mit einem roten Fahrrad durch den Wald. Zwei Hunde spielen im Schnee.

Eine Frau liest ein Buch."""
WRONG = "decoder.layers.0.cross_attention.k_proj.kernel"  # which the second model has multiplied by 1.001
SYSTEM = "leftover"
WIDTH, HEIGHT = 1120, 1000  # of the pictures of reports, in pixels


def main(docs: Path, run: str) -> None:
    """Take all pictures; those of the server only if there is the run."""
    with chromium() as browser:
        reports(browser, docs)
        if Path(run).is_dir():
            server(browser, docs / "measurements", run)
        else:
            print(f"{run}: there is no such run, so that no picture of the server's page is taken", file=sys.stderr)


def reports(browser: Browser, folder: Path) -> None:
    """Write `parity-errors.png`, `parity-attention.png`, `audit-report.png` and `compare.png`."""
    config = TransformerConfig.preset("tiny")
    arrays = random_arrays(config, 0)
    wrong = arrays | {WRONG: arrays[WRONG] * np.float32(1.001)}
    parity = ladder_page(run_ladder(config, arrays=arrays, flax=(config, wrong)), ("a.pt", "b.pt"))
    training = TrainingConfig.published(SYSTEM, as_published=True)
    audit = audit_config(TransformerConfig.published(SYSTEM, as_published=True), name=SYSTEM, training=training)
    for text, name, selector in (
        (parity, "parity-errors", "#errors"),
        (parity, "parity-attention", "#attention"),
        (audit_page(audit), "audit-report", "header"),
        (comparison((folder / "compare.md").read_text(encoding="utf-8")), "compare", "header"),
    ):
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.set_content(text)
        page.locator(selector).evaluate("element => window.scrollTo(0, element.offsetTop - 16)")
        picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
        picture.quantize(256, Image.Quantize.MAXCOVERAGE).save(folder / f"{name}.png", optimize=True)
        page.close()


def comparison(text: str) -> str:
    """The page of the worked example in `compare.md`, made by its command."""
    with TemporaryDirectory() as parent:
        folder = Path(parent, "example")
        folder.mkdir()
        for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, flags=re.DOTALL):
            (folder / name).write_text(f"# {name}\n{code}", encoding="utf-8")
        (arguments,) = re.findall(r"\ntwinax (compare .* --report report\.html)\n", text)
        command = [Path(sys.executable).with_name("twinax"), *arguments.split()]
        if (status := subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=False).returncode) != 1:
            sys.exit(f"compare.md: the worked example differs, but its command ended with {status}")
        return (folder / "report.html").read_text(encoding="utf-8")


def server(browser: Browser, folder: Path, run: str) -> None:
    """Write `serve-1280.png`, in the light scheme, and `serve-390.png`, in the dark one."""
    with serving(twinax.load(run), silence=60, beam_size=5, max_length=None) as (address, _):
        for width, height, scheme in ((1280, 720, "light"), (390, 844, "dark")):
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, locale="en")
            for _ in range(2):  # the first visit compiles
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
        sys.exit("usage: python -m benchmarks.screenshots DOCS RUN")
    main(Path(sys.argv[1]), sys.argv[2])
