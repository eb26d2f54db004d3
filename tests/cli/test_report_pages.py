"""The pages of a ladder and of an audit in a browser, wide, narrow and printed."""

import numpy as np
import pytest

from parity_tests.support.defects import DEFECTS, examine
from tests.support.serving import chromium
from twinax import TransformerConfig
from twinax.audit.page import page as audit_page
from twinax.parity import ladder
from twinax.parity.functions import random_arrays
from twinax.parity.page import page as ladder_page

pytestmark = pytest.mark.slow
PAPER = 718  # width of A4 with margins of 1 cm, in pixels


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The addresses of a page per report, of models with long names and many layers."""
    folder = tmp_path_factory.mktemp("pages")
    config = TransformerConfig.preset("tiny", num_encoder_layers=13)
    arrays = random_arrays(config, 0)
    wrong = {name: array * np.float32(1.001) if ".k_proj" in name else array for name, array in arrays.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder, "_ratios", lambda *arguments: {})
        result = ladder.run_ladder(config, arrays=arrays, flax=(config, wrong), reproduce="twinax parity " + "a" * 200)
    labels = tuple([f"▁Donaudampfschiff{i}" for i in range(len(ids))] for ids in result.attention.tokens)
    pages = {
        "parity": ladder_page(result, ("runs/" + "a" * 120, "b"), labels=labels),
        "audit": audit_page(examine(DEFECTS[0])),
    }
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in pages}


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "media"), [(390, "screen"), (1280, "screen"), (PAPER, "print")])
@pytest.mark.parametrize("name", ["parity", "audit"])
def test_nothing_is_wider_than_the_window(name, width, media, scheme, files, browser):
    """Whatever is folded is opened first; nothing is loaded, and the browser has nothing to say."""
    messages = []
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.on("console", lambda message: messages.append(message.text))
    page.on(
        "request", lambda request: None if request.url.startswith(("file:", "data:")) else messages.append(request.url)
    )
    page.emulate_media(media=media)
    page.goto(files[name])
    if media == "screen":
        page.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for image in page.locator("svg image").all():
        assert image.is_visible()
        assert image.bounding_box()["width"] > 20
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(14, 17, 22)" if scheme == "dark" and media == "screen" else "rgb(255, 255, 255)")
    page.close()
    assert messages == []
