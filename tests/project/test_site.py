"""The site: what it lists as public is there, and its pages fit a phone, without a broken link or another host."""

import ast
import importlib
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.serving import chromium

ROOT = Path(__file__).parents[2]
LISTED = re.findall(r"^\.\. auto\w+:: (\S+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)
PACKAGES = ("audit", "compare", "configs", "convert", "flax_transformer", "torch_reference")
NO_API = {"twinax.configs.SCHEMA_VERSION"}  # a number


def found(name):
    """The object of a dotted name."""
    module, _, attribute = name.rpartition(".")
    owner = importlib.import_module(module)
    return getattr(owner, attribute) if hasattr(owner, attribute) else importlib.import_module(name)


def test_public_names_are_listed_once_and_documented():
    assert len(LISTED) == len({*LISTED}) > 60
    for name in LISTED:
        assert found(name).__doc__, name


def test_what_the_packages_export_is_public():
    for package in PACKAGES:
        module = importlib.import_module(f"twinax.{package}")
        exported = {f"twinax.{package}.{name}" for name in module.__all__} - NO_API
        assert {id(found(name)) for name in exported} <= {id(found(name)) for name in LISTED}, package


def test_what_the_pages_import_is_public():
    """Except for the modules of published systems."""
    listed = {id(found(name)) for name in LISTED}
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("twinax."):
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                    objects = {n: found(n) for n in names if not n.startswith("twinax.published.")}
                    assert [n for n, thing in objects.items() if id(thing) not in listed] == [], page.name


# The beginnings of elements that reach beyond the window, and are in no box of their own that scrolls.
CUT = """() => {
  const scrolls = e => e.localName !== "article"
    && (/auto|scroll/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  return [...document.querySelectorAll("article *")]
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e.parentElement))
    .map(e => e.outerHTML.slice(0, 80));
}"""


@contextmanager
def http_server(folder):
    """The address at which a folder is served."""
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages by path."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", ROOT / "docs", folder]
    subprocess.run(command, check=True)
    return {page: page.read_text() for page in folder.rglob("*.html")}


@pytest.mark.slow
def test_links_of_the_site_lead_somewhere(site):
    """To pages, pictures and headings; those to the repository, to files of it."""
    ids = {page: {*re.findall(r'\bid="([^"]+)"', text)} for page, text in site.items()}
    for page, text in site.items():
        for target in re.findall(r'(?:href|src)="([^"]+)"', text):
            url = urlsplit(target)
            if url.netloc and url.path.startswith("/twinax/twinax/"):
                assert (ROOT / "/".join(url.path.split("/")[5:])).exists(), target
            if url.scheme:
                continue
            linked = (page.parent / unquote(url.path)).resolve() if url.path else page
            assert linked.exists(), (page.name, target)
            assert not url.fragment or linked not in ids or url.fragment in ids[linked], (page.name, target)


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_and_need_no_other_host(site, width):
    problems = []
    folder = next(path.parent for path in site if path.name == "search.html")
    with http_server(folder) as address, chromium() as browser:
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("request", lambda r: None if r.url.startswith((address, "data:")) else problems.append(r.url))
        page.on("response", lambda r: problems.append(r.url) if r.status >= 400 else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        for path in site:
            page.goto(f"{address}/{path.relative_to(folder)}")
            problems += [f"{path.name}: {text}" for text in page.evaluate(CUT)]
        page.goto(f"{address}/search.html?q=ladder")
        page.get_by_text(re.compile("found [1-9][0-9]* pages")).wait_for()
    assert problems == []
