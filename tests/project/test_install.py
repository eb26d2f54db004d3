"""The package as others install it: wheel, sdist and their metadata."""

import importlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import BytesParser
from importlib.metadata import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from twinax.renamed import RENAMED

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
HOUSE = [folder for folder in SETTINGS["tool"]["setuptools"]["package-dir"].values() if folder != "twinax"]


def subpackages():
    """Every source folder that has an __init__.py, by its installed name."""
    for folder in HOUSE:
        for init in sorted((ROOT / folder).rglob("__init__.py")):
            yield "twinax." + ".".join(init.parent.relative_to(ROOT).parts)
    for init in sorted((ROOT / "twinax").rglob("__init__.py")):
        yield ".".join(init.parent.relative_to(ROOT).parts)


def test_every_folder_is_listed():
    assert sorted(SETTINGS["tool"]["setuptools"]["packages"]) == sorted(subpackages())
    for folder in HOUSE:
        python = {path.parent for path in (ROOT / folder).rglob("*.py")}
        assert all((path / "__init__.py").exists() for path in python), "a folder without __init__.py is left out"


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with the sdist, the wheel that was built from it, and in `site` the unpacked wheel.

    They are built from a copy, so that no build folder remains.
    """
    folder = tmp_path_factory.mktemp("dist")
    ignore = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "build", "dist", "runs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "source", ignore=ignore)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*command, str(folder / "source")], check=True, capture_output=True)
    (wheel,) = folder.glob("twinax-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder


@pytest.fixture(scope="module")
def wheel_folder(dist):
    """A folder that holds only the unpacked wheel."""
    return dist / "site"


@pytest.fixture(scope="module")
def package_metadata(wheel_folder):
    """What an index shows of the package."""
    (file,) = wheel_folder.glob("*.dist-info/METADATA")
    return BytesParser().parsebytes(file.read_bytes())


TYPED = """import twinax
from twinax import TransformerConfig, convert

reveal_type(TransformerConfig.preset("tiny").d_model)  # int
reveal_type(twinax.load("run").translate(["a"]))  # list[str]
reveal_type(convert.load("model.pt").config)  # TransformerConfig
"""


def run(code, folder, cwd):
    """Run code with the dependencies and the unpacked wheel, but no other twinax."""
    prelude = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]; "
    prelude += f"sys.path.insert(0, {str(folder)!r}); "
    return subprocess.run([sys.executable, "-c", prelude + code], cwd=cwd, check=True, capture_output=True, text=True)


def test_wheel_imports_from_an_empty_folder(wheel_folder, tmp_path):
    names = [*subpackages(), "twinax.cli.commands"]
    code = f"import importlib; [print(importlib.import_module(n).__file__) for n in {names}]"
    files = run(code, wheel_folder, tmp_path).stdout.split()
    assert len(files) == len(names)
    assert all(file.startswith(str(wheel_folder)) for file in files)


def test_wheel_has_every_source_file(wheel_folder):
    for folder in HOUSE:
        for path in (path for suffix in ("py", "html", "css") for path in (ROOT / folder).rglob(f"*.{suffix}")):
            assert (wheel_folder / "twinax" / path.relative_to(ROOT)).exists(), path
    assert (wheel_folder / "twinax" / "py.typed").exists()  # one holds for all subpackages
    assert sorted(p.name for p in wheel_folder.iterdir() if "dist-info" not in p.name) == ["twinax"]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout")
def test_sdist_has_every_file_of_the_repository_and_no_other(dist):
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    with tarfile.open(*dist.glob("twinax-*.tar.gz")) as archive:
        files = {member.name.partition("/")[2] for member in archive if member.isfile()}
    generated = {name for name in files if name.startswith("twinax.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert files - generated == {name for name in listed if (ROOT / name).is_file()}


def test_version_is_that_of_the_module(package_metadata):
    assert package_metadata["Version"] == importlib.import_module("twinax").__version__


def test_every_address_of_the_package_is_in_the_repository():
    urls = SETTINGS["project"]["urls"]
    assert all((url + "/").startswith(urls["Repository"] + "/") for url in urls.values())


def test_links_of_the_description_lead_to_files_of_this_version(package_metadata):
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]*)\)", package_metadata.get_payload(decode=True).decode())
    assert len(links) > 30
    repository = SETTINGS["project"]["urls"]["Repository"]
    for image, target in links:
        assert re.match(r"https://\w", target), target
        if target.startswith(repository):
            kind, version, file = target.removeprefix(f"{repository}/").partition("#")[0].split("/", 2)
            assert (ROOT / file).exists(), target
            assert version == f"v{package_metadata['Version']}"
            assert kind == ("raw" if image else "tree" if (ROOT / file).is_dir() else "blob")


@pytest.mark.slow
def test_a_type_checker_sees_the_types(wheel_folder, tmp_path):
    """Of the names that are loaded on first use too."""
    (tmp_path / "own.py").write_text(TYPED)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(wheel_folder)]}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    messages = [entry["message"] for entry in json.loads(result.stdout)["generalDiagnostics"]]
    assert messages == [f'Type of "{name}" is "{kind}"' for name, kind in re.findall(r"\((.*)\)  # (.*)", TYPED)]


def test_a_user_s_own_train_and_configs_do_no_harm(wheel_folder, tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit('the wrong train')")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").write_text("raise SystemExit('the wrong configs')")
    code = "from twinax import TransformerConfig; import twinax.train; print(TransformerConfig.preset('tiny').d_model)"
    assert run(code, wheel_folder, tmp_path).stdout == "32\n"


def test_training_side_never_imports_torch():
    code = "import sys; sys.modules['torch'] = None; import twinax.train, twinax.flax_transformer, twinax.convert"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names():
    twinax = importlib.import_module("twinax")
    for name in dir(twinax):
        assert getattr(twinax, name) is not None
    attribute = "nothing"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(twinax, attribute)


@pytest.mark.parametrize("name", RENAMED)
def test_a_module_that_moved_is_found_under_its_former_name(name):
    sys.modules.pop(name, None)
    with pytest.warns(DeprecationWarning, match=re.escape(f"{name} is now {RENAMED[name]}")):
        assert importlib.import_module(name) is importlib.import_module(RENAMED[name])
    package, _, attribute = name.rpartition(".")
    assert getattr(importlib.import_module(package), attribute) is importlib.import_module(RENAMED[name])


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-newest.txt"])
def test_constraints_pin_every_dependency_within_its_range(file):
    lines = [line.partition("==") for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
    pinned = {canonicalize_name(name): version for name, _, version in lines}
    assert len(pinned) == len(lines)
    project = SETTINGS["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["test"]]:
        requirement = Requirement(text)
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, text


def test_the_lowest_versions_are_the_bounds():
    """Of each dependency, and of the extras that `test` installs too."""
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines[1:])}
    project, bounds = SETTINGS["project"], {}
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *(text for extra in extras.values() for text in extra)]:
        requirement = Requirement(text)
        if ">=" in str(requirement.specifier):
            bounds.setdefault(canonicalize_name(requirement.name), set()).add(str(requirement.specifier))
    assert {name: bounds[name] for name in pinned} == {name: {f">={version}"} for name, version in pinned.items()}
    tested = {Requirement(text).name for text in extras["test"]}
    used = {
        Requirement(text).name
        for extra in ("export", "serve", "spacy", "torch", "ctranslate2")
        for text in extras[extra]
    }
    assert used <= tested
    assert {canonicalize_name(Requirement(text).name) for text in project["dependencies"]} <= pinned.keys()
    assert {canonicalize_name(name) for name in used} <= pinned.keys()


def test_only_extras_install_torch():
    extras = SETTINGS["project"]["optional-dependencies"]
    assert not [text for text in SETTINGS["project"]["dependencies"] if "torch" in text]
    assert {*extras["torch"], *extras["serve"]} <= {*extras["test"]}


@pytest.mark.parametrize("name", ["cuda", "tpu"])
def test_accelerators_are_extras_that_jax_has(name):
    """pip only warns about an unknown extra, and leaves the CPU build of jax."""
    (requirement,) = SETTINGS["project"]["optional-dependencies"][name]
    extra = re.fullmatch(r"jax\[(\w+)\]>=[\d.]+", requirement)[1]
    assert extra in metadata("jax").get_all("Provides-Extra")
    for page in ("README.md", "README.zh-CN.md", "docs/runs.md"):
        assert f".[{name}]" in (ROOT / page).read_text()


def test_calls_that_macos_lacks_are_not_needed(monkeypatch):
    from twinax.cli.proofs.parity_command import _parse_shape
    from twinax.configs import TransformerConfig
    from twinax.inference.batches import decoding_threads

    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.sysconf_names", {})
    assert decoding_threads() in (1, 2)
    assert _parse_shape("2x3", TransformerConfig.preset("tiny")) == (2, 3)
