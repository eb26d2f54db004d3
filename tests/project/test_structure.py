"""Source structure: which folder imports which, how large a folder is, and how the two models mirror each other."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Imports lead from a later floor to an earlier one, or stay in their folder; folders of one floor do not import
# each other. Those of the last three floors are not installed.
FLOORS = (
    ("backend",),
    ("configs", "compare"),
    ("formulas",),
    ("flax_transformer", "torch_reference"),
    ("convert",),
    ("published",),
    ("presets", "train"),
    ("inference", "planning"),
    ("parity",),
    ("audit",),
    ("twinax",),
    ("parity_tests",),
    ("tests",),
    ("benchmarks",),
    ("docs",),
)
FLOOR = {folder: number for number, folders in enumerate(FLOORS) for folder in folders}
NOT_INSTALLED = ("parity_tests", "tests", "benchmarks", "docs")
MOST_FILES = 16  # of a folder, `__init__.py` aside


def modules():
    """Dotted name -> file, for every module."""
    for folder in FLOOR:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            yield (name if folder in ("twinax", *NOT_INSTALLED) else f"twinax.{name}"), path


MODULES = dict(modules())


def imports(name):
    """Modules of the project that a module imports anywhere, except for type checking."""
    path = MODULES[name]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in list(ast.walk(tree)):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            names = {f"{source}.{alias.name}" for alias in node.names} & MODULES.keys()
            yield from names or ({source} & MODULES.keys())
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & MODULES.keys()


@pytest.fixture(scope="module")
def graph():
    return {name: {target for target in imports(name) if target != name} for name in MODULES}


def test_imports_form_no_circle(graph):
    leaves = True
    while leaves:
        leaves = [name for name, targets in graph.items() if not targets]
        graph = {name: targets - set(leaves) for name, targets in graph.items() if name not in leaves}
    assert sorted(graph) == []


def folder_of(name):
    return MODULES[name].relative_to(ROOT).parts[0]


@pytest.mark.parametrize("folder", FLOOR)
def test_imports_lead_to_earlier_floors(folder, graph):
    for name in (name for name in MODULES if folder_of(name) == folder):
        for target in graph[name]:
            target_folder = folder_of(target)
            assert target_folder == folder or FLOOR[target_folder] < FLOOR[folder], f"{name} imports {target}"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout")
def test_every_folder_with_code_has_a_floor():
    tracked = subprocess.run(["git", "ls-files", "*/*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {name.partition("/")[0] for name in tracked.stdout.splitlines()} <= FLOOR.keys()


def test_a_folder_is_small_enough_to_survey():
    files = Counter(path.parent for path in MODULES.values() if path.name != "__init__.py")
    large = {str(folder.relative_to(ROOT)): count for folder, count in files.items() if count > MOST_FILES}
    assert not large


def test_every_file_begins_with_what_it_is():
    for path in MODULES.values():
        first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        assert first.endswith((".", ":")), path


def test_recipes_and_presets_import_neither_framework():
    """Training without torch installed can read them, and the command starts fast."""
    names = [name for name in MODULES if name.endswith(".recipe") or folder_of(name) in ("configs", "presets")]
    code = f"import sys; sys.modules |= {{'jax': None, 'torch': None}}\nfor n in {names}: __import__(n)"
    subprocess.run([sys.executable, "-c", code], check=True)


# file -> its mirror; a test of names, because the formulas are compared by running them
MIRROR = {
    **{
        f"flax_transformer/{name}.py": f"torch_reference/{name}.py"
        for name in (
            *("attention", "dropout", "initializers", "inputs", "layers", "model", "module"),
            *(
                f"decoding/{name}"
                for name in ("beam", "ensembles", "ngrams", "sampling", "scoring", "search", "state", "steps")
            ),
        )
    },
    **{
        f"train/step/{name}.py": f"torch_reference/{name}.py"
        for name in ("consistency", "losses", "optimizers", "step")
    },
}
# Names specific to one framework: immutable state, a cache passed as a value, names of leaves.
FLAX_ONLY = {
    "attention": {"KeysValues", "KeysValues.keys", "KeysValues.values"}
    | {"MultiHeadAttention.attend", "MultiHeadAttention.keys_values", "ATTENTIONS"},
    "search": {"Put", "generate_batches", "prepare_sources"}
    | {f"Sentences{field}" for field in ("", ".num_sentences", ".mask", ".numbers", ".prefixes", ".sources")}
    | {f"_Start.{field}" for field in ("draws", "places", "rules", "sources")},
    "state": {"Search.settled"},
    "dropout": {"threefry_mask"},
    "initializers": {"init", "drawn"},
    "inputs": {"check_dtypes", "float64_is_on"},
    "layers": {"Embedding.embedding", "Norm.scale", "RelativePositions.embedding", "Linear.kernel"},
    "model": {"UpdateCache", "Decoder.keys_values"}
    | {"Transformer.abstract", "Transformer.from_arrays", "Transformer.next_logits", "Transformer.quantized"},
    "module": {"Buffer", "join_path", "named_arrays", "on_host"},
    "optimizers": {"Params"},
    "step": {"Arrays", "Sums", "TrainState", "TrainStep", "abstract_state", "init_state", "make_train_step"}
    | {f"Sums.{field}" for field in ("loss", "tokens", "gradients")}
    | {
        f"TrainStep.{name}"
        for name in ("__init__", "forward", "compute_sums", "compile_gradients", "compile_update", "lower")
    }
    | {f"TrainState.{field}" for field in ("buffers", "optimizer", "params", "position", "seed", "update")},
}
TORCH_ONLY = {
    "state": {"Search.margins", "Search.penalties"},
    "initializers": {"BIAS_INITS"},
    "layers": {"Embedding.weight", "Norm.weight", "RelativePositions.weight", "Linear.weight"},
    "model": {"Transformer.from_state_dict", "Transformer.train"},
    "module": {"dtype_of"},
    "optimizers": {"OPTIMIZERS"},
    "step": {"train_step"},
}


def public_names(path):
    """Classes with their methods and attributes, functions and tables; `__call__` counts as torch's `forward`."""
    names = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        for inner in ast.walk(node) if isinstance(node, ast.ClassDef) else ():
            if inner in node.body and isinstance(inner, ast.FunctionDef):
                names.add(f"{node.name}.{'forward' if inner.name == '__call__' else inner.name}")
            elif inner in node.body and isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                names.add(f"{node.name}.{inner.target.id}")
            elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                names |= {f"{node.name}.{inner.attr}"} if ast.unparse(inner.value) == "self" else set()
    suffixes = {name: name.rpartition(".")[2] for name in names}
    return {name for name in names if not suffixes[name].startswith("_") or suffixes[name] == "__init__"}


@pytest.mark.parametrize("path", MIRROR)
def test_the_models_mirror_each_other(path):
    """A change to one side needs the same on the other, or an exception with its reason in this file."""
    flax, torch, name = public_names(path), public_names(MIRROR[path]), Path(path).stem
    assert flax - torch == FLAX_ONLY.get(name, set())
    assert torch - flax == TORCH_ONLY.get(name, set())


def test_every_file_of_a_model_has_a_mirror():
    mirrored = {*MIRROR, *MIRROR.values()}
    # torch finds parameters without gradient itself; how XLA executes, batches or rounds is no part of the definition
    names = (
        "decoding/programs",
        "decoding/regrouping",
        "decoding/threads",
        "execution",
        "fused_attention",
        "lookup",
        "transposition",
        "quantization",
        "unused_parameters",
    )
    exceptions = {f"flax_transformer/{name}.py" for name in names}
    for folder in ("flax_transformer", "torch_reference"):
        names = {str(path.relative_to(ROOT)) for path in (ROOT / folder).glob("*.py")}
        names |= {str(path.relative_to(ROOT)) for path in (ROOT / folder / "decoding").glob("*.py")}
        files = {name for name in names if not name.endswith("__init__.py")}
        assert files - mirrored <= exceptions, files - mirrored
