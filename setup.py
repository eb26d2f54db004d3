"""The description of the package: README.md with links that also work outside the repository."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
(VERSION,) = re.findall(r'^__version__ = "(.+)"', (ROOT / "twinax/__init__.py").read_text(encoding="utf-8"), re.MULTILINE)


def absolute(link: re.Match[str]) -> str:
    """A link to a file, or a picture, with the address of the file in this version."""
    image, text, target = link.groups()
    kind = "raw" if image else "tree" if (ROOT / target.partition("#")[0]).is_dir() else "blob"
    return f"{image}[{text}]({REPOSITORY}/{kind}/v{VERSION}/{target})"


README = re.sub(
    r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)", absolute, (ROOT / "README.md").read_text(encoding="utf-8")
)
setup(long_description=README, long_description_content_type="text/markdown")
