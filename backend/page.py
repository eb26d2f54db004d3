"""HTML pages that need no other file and no script."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

_PACKAGE = Path(__file__).parents[1]


def render(template: str, styles: Sequence[str], images: bool = False, **values: Any) -> str:
    """The page of a template that extends `backend/page.html`.

    `template` and `styles`: files below the package; `styles` follow `backend/page.css`. `images`: the page has images.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, loader=jinja2.FileSystemLoader(_PACKAGE)
    )
    style = "".join(environment.get_template(name).render(values) + "\n" for name in ("backend/page.css", *styles))
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template(template).render(values, style=style, style_hash=f"sha256-{digest}", images=images)
