"""An exported model, run in a process without this project, finds the tokens of PyTorch's greedy search."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity_tests.decoding.small_twins import SMALL
from twinax import convert, flax_transformer, torch_reference
from twinax.backend import xla_flags
from twinax.configs.decoding import DecodingConfig
from twinax.inference.exported_file import write_exported
from twinax.parity.functions import random_arrays

pytestmark = pytest.mark.newest

FLOAT32 = SMALL.replace(param_dtype="float32", compute_dtype="float32")
CONFIGS = {
    "pre-norm": FLOAT32.replace(num_decoder_layers=2, decoder_num_heads=4),
    "post-norm, tied": FLOAT32.replace(
        norm_placement="post", src_vocab_size=11, shared_embeddings=True, tied_output=True, mask_value=-1e9
    ),
    "T5": FLOAT32.replace(
        positions="none",
        relative_positions="shared",
        relative_position_buckets=6,
        relative_position_max_distance=5,
        norm="rms_norm",
        norm_bias=False,
        score_scaling="none",
        ffn_gate=True,
        activation="gelu_tanh",
        decoder_start_id=0,
    ),
    "M2M100": FLOAT32.replace(
        position_counting="non_padding",
        position_offset=2,
        decoder_mask="causal_padding_and_query",
        activation="gelu",
        pad_id=1,
        decoder_start_id=2,
        forced_bos_id=7,
        forced_eos_id=5,
    ),
    "bfloat16": FLOAT32.replace(param_dtype="bfloat16", compute_dtype="bfloat16"),
}
# Sentences of lengths 1 to 8, the longest that the models take, in batches of several sizes, and the longest result.
RANDOM = np.random.default_rng(0)
BATCHES = [
    ([RANDOM.integers(3, 11, length).tolist() for length in lengths], longest)
    for lengths, longest in (((4, 1, 6, 2, 7, 5, 3), 8), ((2, 3, 3, 1), 6), ((8,), 5))
]
NUMBERS = {"pre-norm": 3, "bfloat16": 0}  # of batches that a model translates, unless two
TARGETS = RANDOM.integers(0, 11, (7, 5), dtype=np.int32)  # for the first batch; with padding
PARENTS = [2, 0, 2, 6, 5, 1, 1]  # rows that go on after two steps, as in a beam search
ROUNDING = {"float32": 1e-5, "bfloat16": 5e-2}  # of the largest log-probability

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("twinax", "flax", "torch", "optax", "parity_tests"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
"""
RUN = """
def forced(model, sentences, targets, parents):
    info, weights, encode, step = model
    src = np.full((len(sentences), max(map(len, sentences))), info["pad_id"], np.int32)
    for row, ids in zip(src, sentences):
        row[: len(ids)] = ids
    memory, sizes = encode(weights, src), {"b": len(src), "t": info["max_length"]}
    specs = info["arrays"]["cache"].items()
    cache = {name: np.zeros([sizes.get(n, n) for n in s["shape"]], s["dtype"]) for name, s in specs}
    results, targets = [], np.array(targets, np.int32)
    for position in range(targets.shape[1]):
        if position == 2:
            memory, cache, targets = jax.tree.map(lambda array: array[np.array(parents)], (memory, cache, targets))
        log_probs, cache = step(weights, targets[:, position], np.int32(position), memory, cache)
        results.append(np.asarray(log_probs).tolist())
    outside, _ = step(weights, targets[:, 0], np.int32(info["max_length"]), memory, cache)
    return results, bool(np.isnan(outside).all())

job, results = json.load(sys.stdin), {}
for path, number in job["paths"].items():
    model = load(path)
    results[path] = [
        [greedy(model, sentences, longest) for sentences, longest in job["batches"][:number]],
        *forced(model, job["batches"][0][0], job["targets"], job["parents"]),
    ]
try:
    greedy(model, [[3] * (model[0]["max_length"] + 1)])
except ValueError as error:
    results["too long"] = str(error)
assert not {"twinax", "flax", "torch"} & sys.modules.keys()
json.dump(results, sys.stdout)
"""


def script() -> str:
    """The script of docs/export.md, as users copy it."""
    page = Path(__file__).parents[2] / "docs" / "export.md"
    (block,) = [
        text for text in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) if "def greedy" in text
    ]
    return block


@pytest.fixture(scope="module")
def models():
    """Models by name of their config; the end is likely, so that translations have several lengths."""
    models = {}
    for name, config in CONFIGS.items():
        arrays = random_arrays(config, 0)
        output = "output.proj.kernel" if "output.proj.kernel" in arrays else "src_embedding.embedding"
        arrays[output] = 2 * arrays[output]
        arrays["output.bias"][config.eos_id] += np.asarray(1, arrays["output.bias"].dtype)
        jax_arrays = {path: jnp.asarray(array) for path, array in arrays.items()}
        models[name] = flax_transformer.Transformer.from_arrays(config, jax_arrays)
    return models


@pytest.fixture(scope="module")
def results(models, tmp_path_factory):
    """What the script finds for each model: tokens of all batches, log-probabilities of the targets, and more."""
    folder = tmp_path_factory.mktemp("exported")
    paths = {name: str(folder / f"{number}.stablehlo") for number, name in enumerate(models)}
    for name, model in models.items():
        write_exported(convert.Checkpoint.of(model), Path(paths[name]))
    numbers = {path: NUMBERS.get(name, 2) for name, path in paths.items()}
    job = {"paths": numbers, "batches": BATCHES, "targets": TARGETS.tolist(), "parents": PARENTS}
    command = [sys.executable, "-c", BLOCKED + script() + RUN]
    flags = xla_flags.fast_compilation()  # without those that this project adds: the script has to
    environment = os.environ | {"PYTHONSAFEPATH": "1", "XLA_FLAGS": flags}
    process = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    return {name: found[path] for name, path in paths.items()} | {"too long": found["too long"]}


def test_the_script_avoids_the_wrong_sums_of_the_same_compilers():
    assert ", ".join(f'"{version}"' for version in xla_flags.MISCOMPILING) in script()
    assert xla_flags.NO_FUSED_SUMS in script()


def padded(sentences, pad_id):
    src = np.full((len(sentences), max(map(len, sentences))), pad_id, np.int32)
    for row, ids in zip(src, sentences, strict=True):
        row[: len(ids)] = ids
    return src


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "bfloat16"])
def test_one_file_finds_the_tokens_of_pytorch(models, results, name):
    twin, translations = convert.to_torch(models[name]), set()
    assert len(results[name][0]) >= 2
    for (sentences, longest), tokens in zip(BATCHES, results[name][0], strict=False):
        src = torch.from_numpy(padded(sentences, CONFIGS[name].pad_id))
        expected = torch_reference.generate(twin, src, DecodingConfig(beam_size=1, max_length=longest))
        assert expected.margins.min() > 1e-4
        assert tokens == [hypotheses[0] for hypotheses in expected.sentences()]
        translations |= {*map(tuple, tokens)}
    assert len(translations) > 3  # or the comparison is empty


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_are_the_model_s(models, results, name):
    """Also after rows of memory and cache were selected, as in a beam search."""
    model, config = models[name], CONFIGS[name]
    logits = jax.jit(model)(padded(BATCHES[0][0], config.pad_id), TARGETS)
    expected = np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32)))
    _, log_probs, outside = results[name]
    bound = ROUNDING[config.compute_dtype] * abs(expected).max()
    for position, result in enumerate(log_probs):
        rows = expected[:, position] if position < 2 else expected[PARENTS, position]
        np.testing.assert_allclose(np.array(result), rows, rtol=0, atol=bound)
    assert outside


def test_a_source_that_is_too_long_is_rejected(results):
    assert results["too long"] == "a sentence has more than 8 tokens"
