"""The description of the package: README.md with links that also work outside the repository."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
SETTINGS, MODULE, README = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "twinax/__init__.py", "README.md")
)
REPOSITORY = tomllib.loads(SETTINGS)["project"]["urls"]["Repository"]
(VERSION,) = re.findall(r'^__version__ = "(.+)"', MODULE, flags=re.MULTILINE)


def absolute(link: re.Match[str]) -> str:
    """A link to a file, or a picture, with the address of the file in this version."""
    image, text, target = link.groups()
    kind = "raw" if image else "tree" if (ROOT / target.partition("#")[0]).is_dir() else "blob"
    return f"{image}[{text}]({REPOSITORY}/{kind}/v{VERSION}/{target})"


description = re.sub(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)", absolute, README)
setup(long_description=description, long_description_content_type="text/markdown")
