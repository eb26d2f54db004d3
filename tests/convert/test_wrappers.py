"""Weights as wrappers of models and training programs save them: prefixes, containers, heads of other classes."""

import json
import shutil

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from parity_tests.support.conversion import VARIANTS, random_model
from twinax import convert
from twinax.backend.errors import ConversionError
from twinax.convert.weight_files.wrappers import unwrap
from twinax.parity.oracles.transformers import load_model

NAMES = ("BART", "Marian", "M2M100", "T5", "T5 v1.1, Flan-T5")  # names with a prefix of their own, and without
COMPONENTS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
pytestmark = pytest.mark.filterwarnings("ignore")  # `transformers` warns about how it writes


def same(left, right):
    return left.config == right.config and {n: a.tobytes() for n, a in left.arrays.items()} == {
        n: a.tobytes() for n, a in right.arrays.items()
    }


def wrapped(state, prefix, inner=""):
    """A state dict with a prefix before all names, and another before each number of a layer."""
    return {prefix + name.replace(".0.", f".0.{inner}", 1): array.clone() for name, array in state.items()}


def lightning(state):
    """The entries of a checkpoint of PyTorch Lightning."""
    versions = {"pytorch-lightning_version": "2.4.0", "hyper_parameters": {"lr": 1e-4}, "hparams_name": "kwargs"}
    return {"epoch": 3, "global_step": 9, "loops": {}, "state_dict": state, "optimizer_states": [], **versions}


FILES = {
    "safetensors": lambda folder, state: save_file(state, folder / "model.safetensors", {"format": "pt"}),
    "PyTorch": lambda folder, state: torch.save(state, folder / "pytorch_model.bin"),
    "Lightning": lambda folder, state: torch.save(lightning(state), folder / "pytorch_model.bin"),
    "DeepSpeed": lambda folder, state: torch.save({"module": state, "dp_world_size": 1}, folder / "pytorch_model.bin"),
    "shards": lambda folder, state: write_shards(folder, state),
}


def write_shards(folder, state):
    halves = [dict(sorted(state.items())[i::2]) for i in range(2)]
    for i, half in enumerate(halves):
        torch.save(half, folder / f"pytorch_model-{i}.bin")
    index = {name: f"pytorch_model-{i}.bin" for i, half in enumerate(halves) for name in half}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("file", FILES)
def test_a_directory_is_read_without_what_wrappers_add(name, file, directories, tmp_path):
    state, expected = load_file(directories / name / "model.safetensors"), convert.load(directories / name)
    folder = tmp_path / "wrapped"
    for prefix, inner in (
        ("module.", ""),
        ("model._orig_mod.", ""),
        ("net.module.", "_fsdp_wrapped_module."),
        ("", "_orig_mod."),
    ):
        shutil.copytree(directories / name, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        FILES[file](folder, wrapped(state, prefix, inner))
        checkpoint = convert.load(folder)
        assert same(checkpoint, expected), prefix
        assert sorted(checkpoint.stripped) == sorted({*prefix.replace(".", ". ").split(), inner} - {""})
        assert ("global_step" in checkpoint.skipped) == (file == "Lightning")
        shutil.rmtree(folder)


parts = st.lists(st.sampled_from(COMPONENTS), max_size=3).map("".join)


@given(prefix=parts, inner=parts, last=parts, outer=st.sampled_from(["", "model.", "net.inner."]))
def test_components_are_removed_anywhere(prefix, inner, last, outer):
    names = ("shared.weight", "encoder.layers.0.fc1.weight", "lm_head.weight")
    arrays = {f"{prefix}{outer}{last}{name.replace('0.', f'0.{inner}')}": name for name in names}
    unwrapped, removed = unwrap(arrays, ("shared.weight", "encoder.embed_tokens.weight"))
    assert unwrapped == {name: name for name in names}
    assert {*removed} == {*(prefix + inner + last).replace(".", ". ").split(), *([outer] if outer else [])}


def test_a_file_alone_is_read_with_the_config_of_a_directory(directories, tmp_path, command):
    """Neither a directory around the file nor weights in the directory are needed."""
    for name, suffix in (("T5", ".ckpt"), ("BART", ".pt"), ("M2M100", ".safetensors")):
        state, config = load_file(directories / name / "model.safetensors"), tmp_path / name
        config.mkdir()
        shutil.copy(directories / name / "config.json", config)
        file = tmp_path / f"last{suffix}"
        state = wrapped(state, "model.module.")
        save_file(state, file) if suffix == ".safetensors" else torch.save(lightning(state), file)
        arguments = ("convert", file, tmp_path / f"new {name}", "--layout", VARIANTS[name][0], "--config", config)
        status, _, errors = command(*arguments)
        assert (status, errors) == (
            0,
            f"twinax: {file}: removed module., model. from the names of its arrays, as torch.compile, DDP, FSDP or "
            "Lightning add them\n",
        )
        assert same(convert.load(tmp_path / f"new {name}"), convert.load(directories / name))


CLASSES = {
    "T5ForSequenceClassification": "have the head of another class, classification_head.dense.",
    "T5ForTokenClassification": "have the head of another class, classifier.",
    "T5ForQuestionAnswering": "have the head of another class, qa_outputs.",
    "T5EncoderModel": "have no decoder",
    "BartForSequenceClassification": "have the head of another class, classification_head.dense.",
    "BartForCausalLM": "have no encoder",
    "MBartForQuestionAnswering": "have the head of another class, qa_outputs.",
    "UMT5EncoderModel": "have no decoder",
}


@pytest.mark.parametrize("name", CLASSES)
def test_the_class_of_other_weights_is_named(name, tmp_path):
    family = next(family for family in ("UMT5", "T5", "MBart", "Bart") if name.startswith(family))
    config = random_model({"UMT5": "UMT5", "T5": "T5", "MBart": "mBART", "Bart": "BART"}[family]).config
    getattr(transformers, name)(config).save_pretrained(tmp_path / "other")
    with pytest.raises(ConversionError) as error:
        convert.load(tmp_path / "other")
    assert f"architectures=['{name}']: twinax reads {family}ForConditionalGeneration, and the weights" in str(
        error.value
    )
    assert CLASSES[name] in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["T5Model", "BartModel"])
def test_the_model_without_an_output_layer_is_read(name, tmp_path):
    model = random_model({"T5Model": "T5", "BartModel": "BART"}[name])
    bare = getattr(transformers, name)(model.config)
    bare.save_pretrained(tmp_path / "bare")
    state = load_file(tmp_path / "bare" / "model.safetensors")
    expected = convert.load(tmp_path / "bare")
    save_file(wrapped(state, "net.module."), tmp_path / "bare" / "model.safetensors", {"format": "pt"})
    assert same(convert.load(tmp_path / "bare"), expected)


def test_arrays_beside_the_model_are_one_line(directories, tmp_path):
    state = wrapped(load_file(directories / "T5" / "model.safetensors"), "model.")
    shutil.copytree(directories / "T5", tmp_path / "t5")
    for extra, message in (
        ("loss.weight", r"and 1 others, such as loss\.weight; save the state dict of the model alone"),
        ("model.module.shared.weight", r"two arrays have one name without module\.; save the model without wrappers"),
    ):
        save_file(state | {extra: torch.ones(2)}, tmp_path / "t5" / "model.safetensors", {"format": "pt"})
        with pytest.raises(ConversionError, match=message) as error:
            convert.load(tmp_path / "t5")
        assert "\n" not in str(error.value)


def test_the_oracle_of_parity_has_the_same_weights(directories, tmp_path):
    """`transformers` itself would start from random weights, without an error."""
    folder = shutil.copytree(directories / "T5", tmp_path / "t5")
    state = load_file(folder / "model.safetensors")
    save_file(wrapped(state, "module.", "_orig_mod."), folder / "model.safetensors", {"format": "pt"})
    loaded = load_model(folder, convert.load(folder)).state_dict()
    assert all(torch.equal(loaded[name], array) for name, array in state.items())
