"""Sphinx's settings of the site: the pages of this folder, and the public names by their docstrings."""

import re
import tomllib
from pathlib import Path
from typing import Any

from packaging.version import Version

import twinax

ROOT = Path(__file__).parents[1]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
_LINK = re.compile(r"(\]\()([^):#]+)([^):]*\))")  # of Markdown, to a file

project = "twinax"
version = release = twinax.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]
default_role = "code"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_custom_sections = [("Source", "returns_style")]
html_theme = "furo"
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        *("sidebar/brand.html", "sidebar/search.html", "sidebar/scroll-start.html", "sidebar/navigation.html"),
        *("sidebar/versions.html", "sidebar/scroll-end.html"),
    ]
}
html_title = f"twinax {release}"
html_use_index = html_domain_indices = False  # api.md lists the names
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False


def _to_repository(folder: Path, text: str) -> str:
    """Links to files that are no pages of the site lead to the repository; those of README are of its own folder."""

    def replaced(match: re.Match[str]) -> str:
        path = (folder / match[2]).resolve()
        if not path.exists():
            return match[0]
        if path.is_relative_to(ROOT / "docs") and not path.is_dir():
            return f"{match[1]}/{path.relative_to(ROOT / 'docs')}{match[3]}"
        kind = "tree" if path.is_dir() else "blob"
        return f"{match[1]}{REPOSITORY}/{kind}/v{release}/{path.relative_to(ROOT)}{match[3]}"

    return _LINK.sub(replaced, text)


def _list_versions(site: Path) -> None:
    """Write the page that links the versions, which are the folders of the site, the newest first."""
    names = [path.name for path in site.iterdir() if re.match(r"\d", path.name) and (path / "index.html").exists()]
    items = "".join(f'<li><a href="{name}/index.html">{name}</a></li>' for name in sorted(names, key=Version)[::-1])
    head = '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    style = "<style>:root { color-scheme: light dark; font-family: sans-serif }</style>"
    page = f"{head}<title>twinax</title>{style}<h1>Versions of twinax</h1><ul>{items}</ul>\n"
    (site / "index.html").write_text(page)


def setup(app: Any) -> None:
    """Rewrite the links of pages while they are read; list the versions at the end."""

    def read(app: Any, name: str, content: list[str]) -> None:
        content[0] = _to_repository((ROOT / "docs" / name).parent, content[0])

    def included(app: Any, path: Path, name: str, content: list[str]) -> None:
        content[0] = _to_repository((ROOT / "docs" / path).resolve().parent, content[0])

    app.connect("source-read", read)
    app.connect("include-read", included)
    app.connect("build-finished", lambda app, error: error or _list_versions(Path(app.outdir).parent))
