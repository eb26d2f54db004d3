"""LoRA adapters: merged on reading, as `peft` merges them."""

import json
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from parity_tests.support.conversion import VARIANTS, random_model
from twinax import convert
from twinax.backend.errors import ConfigError, ConversionError, MissingPackageError
from twinax.configs.run import RunConfig
from twinax.convert import checksum
from twinax.convert.arrays.frameworks import from_torch
from twinax.convert.port import flax_specs
from twinax.parity.functions import GRADIENTS, random_batch
from twinax.parity.oracles.transformers import load_model, oracle_of, with_causal_decoder
from twinax.train.loop.warm_start import read_initial_weights

TOKENS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
T5_LIKE = ("t5", "mt5", "umt5")
TIED = ("shared.weight", "embed_tokens.weight", "lm_head.weight", "embed_positions.weight")


def save_adapter(model, directory, save_embedding_layers="auto", **settings):
    """Train nothing, but give every trained tensor of an adapter random values, and save it."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings(action="ignore"), torch.random.fork_rng(devices=()):
        torch.manual_seed(0)  # peft draws the first values from it too
        adapted = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 7, **settings}))
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape) * 0.3)
        adapted.save_pretrained(directory, save_embedding_layers=save_embedding_layers)


def load_adapted(base, adapter):
    """The model of `transformers` with an adapter of `peft`, not merged."""
    import transformers
    from peft import PeftModel

    architecture = getattr(transformers, json.loads((base / "config.json").read_text())["architectures"][0])
    with warnings.catch_warnings(action="ignore"):
        return PeftModel.from_pretrained(with_causal_decoder(architecture.from_pretrained(base)), adapter).eval()


def different_from(adapted, checkpoint):
    """The names of arrays of a checkpoint that are not bit for bit those of `peft`'s merged model."""
    with warnings.catch_warnings(action="ignore"):
        merged = (adapted.merge_and_unload() if hasattr(adapted, "merge_and_unload") else adapted).state_dict()
    target, settings = convert.family(checkpoint.layout), checkpoint.documents["config.json"]
    written = target.write(settings, checkpoint.config, dict(checkpoint.arrays), dict(checkpoint.unused))
    missing = [name for name in merged if name not in written and not name.endswith(TIED)]
    return [name for name, a in written.items() if a.tobytes() != from_torch(merged[name]).tobytes()] + missing


def changed(base, checkpoint):
    """The names of arrays that differ from those of the base model."""
    arrays = convert.load(base).arrays
    return [name for name, a in checkpoint.arrays.items() if name not in arrays or (a != arrays[name]).any()]


@pytest.fixture
def saved(tmp_path):
    """Saves a model in a dtype and an adapter of it: (variant, dtype, settings) -> (base, adapter)."""

    def save(name, dtype=torch.float64, **settings):
        model = random_model(name).to(dtype)
        with warnings.catch_warnings(action="ignore"):
            model.save_pretrained(tmp_path / "base")
        save_adapter(model, tmp_path / "adapter", **settings)
        return tmp_path / "base", tmp_path / "adapter"

    return save


def projections(layout, *extra):
    return [*(("q", "v", "wi", "wi_0", "wo") if layout in T5_LIKE else ("q_proj", "v_proj", "fc1")), *extra]


FAMILIES = ("Marian", "BART", "mBART", "M2M100", "Pegasus", "Blenderbot", "T5 v1.1, Flan-T5", "mT5", "UMT5, tied")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_merges_as_peft_does(name, saved):
    """The weights bit for bit, and the logits of the model whose adapter is not merged."""
    layout = VARIANTS[name][0]
    base, adapter = saved(name, target_modules=projections(layout), use_rslora=len(name) % 2 == 0)
    adapted = load_adapted(base, adapter)
    checkpoint = convert.load(base, adapter=adapter)
    tokens = TOKENS + 1
    with torch.no_grad():
        logits = adapted(input_ids=tokens, decoder_input_ids=tokens).logits
        twin = checkpoint.to_torch().eval()(tokens, tokens)
    bound = 1e-5 if layout in T5_LIKE else 1e-12  # their norms compute in float32
    assert (twin - logits).abs().max() < bound * max(1, logits.abs().max())
    assert different_from(adapted, checkpoint) == []
    assert changed(base, checkpoint)


CASES = {
    "patterns of ranks": (
        "BART",
        {
            "rank_pattern": {"v_proj": 2},
            # The first two match no module: a pattern begins with a part of the path and ends with its end.
            "alpha_pattern": {"proj": 9, "encoder.*.v": 11, "encoder.*.v_proj": 3, "fc1": 5},
        },
    ),
    "a regular expression": ("BART", {"target_modules": r".*decoder.*\.(fc1|out_proj)"}),
    "some layers": ("BART", {"layers_to_transform": [1], "layers_pattern": "layers"}),
    "biases": ("BART", {"bias": "all"}),
    "biases of the adapted": ("BART", {"bias": "lora_only"}),
    "trained biases": ("BART", {"lora_bias": True}),
    "DoRA": ("Marian", {"use_dora": True}),
    "norms trained whole": ("M2M100", {"modules_to_save": ["layer_norm", "final_layer_norm"]}),
    "new tokens": ("BART", {"trainable_token_indices": [4, 30, 2]}),
    "new tokens of tied tables": ("BART", {"trainable_token_indices": {"embed_tokens": [4, 30, 2]}}),
    "new tokens of the shared table": ("T5", {"trainable_token_indices": {"shared": [4, 30, 2]}}),
    "new tokens of untied tables": (
        "Marian, untied",
        {"trainable_token_indices": {"encoder.embed_tokens": [3], "decoder.embed_tokens": [5, 4], "lm_head": [6]}},
    ),
    "new tokens of a separate input": ("Marian, untied", {"trainable_token_indices": [3, 4]}),
    "untied embeddings": ("Marian, untied", {"target_modules": ["embed_tokens", "lm_head", "fc2"]}),
    "DoRA of embeddings": ("Marian, untied", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "an output that it unties": ("BART", {"modules_to_save": ["lm_head"]}),
    "T5's output": ("T5", {"target_modules": ["q"], "modules_to_save": ["lm_head"]}),
    "T5's biases": ("UMT5", {"target_modules": ["o"], "bias": "all"}),
    "fan_in_fan_out": ("BART", {"fan_in_fan_out": True}),
    "saved embeddings, tied": ("M2M100", {"target_modules": ["q_proj"], "save_embedding_layers": True}),
    "saved embeddings of T5, tied": ("T5", {"target_modules": ["q"], "save_embedding_layers": True}),
    "saved embeddings, untied": ("Marian, untied", {"target_modules": ["q_proj"], "save_embedding_layers": True}),
    "saved embeddings, an output that it unties": (
        "T5",
        {"target_modules": ["q", "v"], "modules_to_save": ["lm_head"], "save_embedding_layers": True},
    ),
    "attention trained whole": ("BART", {"target_modules": ["fc1"], "modules_to_save": ["self_attn"]}),
    "a layer trained whole": ("mBART", {"target_modules": ["fc1"], "modules_to_save": ["decoder.layers.1"]}),
    "a layer of the encoder trained whole": (
        "Pegasus",
        {"target_modules": ["q_proj"], "modules_to_save": ["encoder.layers.0"]},
    ),
    "blocks trained whole": (
        "mT5",
        {"target_modules": ["q"], "modules_to_save": ["DenseReluDense", "final_layer_norm"]},
    ),
    "positions trained whole": ("BART", {"target_modules": ["q_proj"], "modules_to_save": ["embed_positions"]}),
    "the decoder trained whole": ("BART", {"target_modules": ["k_proj"], "modules_to_save": ["decoder"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_setting_merges_as_peft_does(case, saved):
    """In bfloat16, whose changes are computed in float32, and in float64."""
    name, settings = CASES[case]
    dtype = torch.bfloat16 if len(case) % 2 else torch.float64
    layout = VARIANTS[name][0]
    base, adapter = saved(name, dtype, **{"target_modules": projections(layout), **settings})
    checkpoint = convert.load(base, adapter=adapter)
    assert different_from(load_adapted(base, adapter), checkpoint) == []
    assert changed(base, checkpoint)


@pytest.fixture
def adapted(saved):
    """A BART directory in float32 and an adapter of it."""
    return saved("BART", torch.float32, target_modules=["q_proj"], rank_pattern={"decoder.*.q_proj": 2})


def change(adapter, **settings):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def change_tensors(adapter, function):
    path = adapter / "adapter_model.safetensors"
    save_file(dict(filter(None, (function(name, array) for name, array in load_file(path).items()))), path)


def test_the_command_merges(adapted, tmp_path, command):
    base, adapter = adapted
    (adapter / "adapter_model.safetensors").rename(tmp_path / "tensors")
    torch.save(
        {n: torch.from_numpy(a) for n, a in load_file(tmp_path / "tensors").items()}, adapter / "adapter_model.bin"
    )
    code, out, err = command("convert", base, tmp_path / "merged", "--adapter", adapter, "--layout", "bart")
    assert (code, err) == (0, "")
    assert "LoRA, rank 4, 4 modules, base model unknown" in " ".join(out.split())
    assert checksum(convert.load(tmp_path / "merged").arrays) == checksum(convert.load(base, adapter=adapter).arrays)
    code, out, err = command("inspect", adapter)
    assert code == 2
    assert "--adapter" in out


def test_the_oracle_of_the_proof_has_the_adapter(adapted):
    base, adapter = adapted
    checkpoint = convert.load(base, adapter=adapter)
    model = load_model(base, checkpoint, adapter)
    assert different_from(model, checkpoint) == []
    assert type(model).__name__ == "BartForConditionalGeneration"
    batch = random_batch(checkpoint.config, np.random.default_rng(0), 2, 4, 5)
    outputs = oracle_of(model.double(), checkpoint)(batch)
    names = [name for name in outputs if name.startswith(GRADIENTS)]
    assert len(names) == len(flax_specs(checkpoint.config, trained_only=True))
    assert all(np.abs(outputs[name]).max() > 0 for name in names if name.endswith("v_proj.kernel"))


def test_a_run_starts_from_merged_weights(adapted, command, tmp_path):
    base, adapter = adapted
    flags = ["--src", "a.de", "--tgt", "a.en", "--init-from", base]
    code, out, _ = command("train", *flags, "--adapter", adapter, "--print-config")
    run = RunConfig.from_dict(json.loads(out))
    assert (code, run.adapter) == (0, str(adapter))
    (tmp_path / "config.json").write_text(out)  # a run that began so; other weights have no adapter, unless it is given
    for other, expected in (([], None), (["--adapter", "None"], None), (["--adapter", adapter], str(adapter))):
        _, out, _ = command("train", tmp_path, *flags, *other, "--out", tmp_path / "b", "--print-config")
        assert json.loads(out)["adapter"] == expected
    tokenizer = replace(run.tokenizer, load=("tokenizer.json",))  # its weights need no tokenizer then
    weights = read_initial_weights(replace(run, tokenizer=tokenizer))
    assert checksum(weights.arrays) == checksum(convert.load(base, adapter=adapter).arrays)
    with pytest.raises(ConfigError, match="adapter='a': needs init_from"):
        replace(run, init_from=None, adapter="a")


REFUSALS = {  # settings of the adapter -> the message
    "peft_type='IA3': only LORA adapters are merged; merge it with peft": {"peft_type": "IA3"},
    "peft_type='PREFIX_TUNING': it adds prompts to the input": {"peft_type": "PREFIX_TUNING"},
    "alora_invocation_tokens=[1]: cannot be merged, because": {"alora_invocation_tokens": [1]},
    "layer_replication=[[0, 2]]: cannot be merged": {"layer_replication": [[0, 2]]},
    "use_magic=True: twinax does not know this setting of LoRA": {"use_magic": True},
    "init_lora_weights='pissa_niter_4': it changes the base weights": {"init_lora_weights": "pissa_niter_4"},
    "r=0: must be a positive integer": {"r": 0},
    "lora_alpha=None: must be a finite number": {"lora_alpha": None},
    "lora_alpha=nan: must be a finite number": {"lora_alpha": float("nan")},
    "alpha_pattern['fc1']=inf: must be a finite number": {"alpha_pattern": {"fc1": float("inf")}},
    "target_modules: *q is not a regular expression: nothing to repeat at position": {"target_modules": "*q"},
    "exclude_modules: ( is not a regular expression": {"exclude_modules": "("},
    "rank_pattern: *q is not a regular expression": {"rank_pattern": {"*q": 2}},
    "alpha_pattern: q) is not a regular expression": {"alpha_pattern": {"q)": 2}},
    "alpha_pattern=[1]: must be a mapping": {"alpha_pattern": [1]},
    "q_proj.lora_magnitude_vector: is missing": {"use_dora": True},
    "which contradicts rank 4": {"rank_pattern": {}},
    "q_proj: has a low-rank update, and target_modules does not name it": {"target_modules": ["v_proj"]},
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_cannot_be_merged_is_one_line(message, adapted, tmp_path, command):
    base, adapter = adapted
    change(adapter, **REFUSALS[message])
    code, out, err = command("convert", base, tmp_path / "new", "--adapter", adapter)
    assert (code, out, err.count("\n"), (tmp_path / "new").exists()) == (2, "", 1, False)
    assert err.startswith(f"twinax: {adapter}: ")
    assert message in err


def test_an_adapter_of_another_base_is_one_line(adapted, directories, tmp_path):
    base, adapter = adapted
    change(adapter, base_model_name_or_path="facebook/bart-base")
    with pytest.raises(ConversionError, match=r"no such module with a weight; its base model is facebook/bart-base$"):
        convert.load(directories / "T5", adapter=adapter)
    change_tensors(adapter, lambda name, a: (name, np.ones((4, 9), a.dtype) if "lora_A" in name and len(a) == 4 else a))
    with pytest.raises(
        ConversionError, match=r"q_proj.weight: is \[12, 12\] in the base model and \[12, 9\] in the ad"
    ):
        convert.load(base, adapter=adapter)
    convert.save(convert.load(base), tmp_path / "base.pt")
    with pytest.raises(
        ConversionError, match=r"is a PyTorch file; the adapter .* is merged into the Hugging Face direc"
    ):
        convert.load(tmp_path / "base.pt", adapter=adapter)


def test_one_copy_of_a_tied_table_that_was_trained_whole_is_refused(saved):
    base, adapter = saved("T5", target_modules=["q"], modules_to_save=["shared"])
    with pytest.raises(ConversionError, match=rf"^{base}, merged with {adapter}: .*contradicts the weights"):
        convert.load(base, adapter=adapter)


def test_embeddings_stay_tied(saved):
    base, adapter = saved("M2M100", target_modules=["q_proj"], save_embedding_layers=True)
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert [name for name in tensors if "lora" not in name]
    checkpoint = convert.load(base, adapter=adapter)
    assert checkpoint.config == convert.load(base).config
    assert (checkpoint.config.tied_output, checkpoint.config.shared_embeddings) == (True, True)


def test_a_resized_table_gets_the_hint_to_resize_the_base(saved):
    base, adapter = saved("M2M100", target_modules=["q_proj"], save_embedding_layers=True)
    size = len(convert.load(base).arrays["src_embedding.embedding"]) + 3
    change_tensors(
        adapter, lambda name, a: (name, a if "lora" in name else np.concatenate([a, np.ones((3, a.shape[1]), a.dtype)]))
    )
    with pytest.raises(ConversionError, match=rf"resize the base model .*: model.resize_token_embeddings\({size}\)"):
        convert.load(base, adapter=adapter)


def test_damaged_adapters_are_one_line(adapted):
    base, adapter = adapted
    with pytest.raises(ConversionError, match=rf"is not the directory of a PEFT adapter.*; pass {adapter}$"):
        convert.load(base, adapter=adapter / "adapter_model.safetensors")
    with pytest.raises(
        ConversionError, match=r"is not the directory of a PEFT adapter, which has adapter_config.json$"
    ):
        convert.load(base, adapter=base)
    change_tensors(adapter, lambda name, a: None if "lora_B" in name else (name, a))
    with pytest.raises(ConversionError, match=r"q_proj.lora_B.weight: is missing$"):
        convert.load(base, adapter=adapter)
    change_tensors(adapter, lambda name, a: (name, a.astype(np.int8)))
    with pytest.raises(
        ConversionError, match="is int8; an adapter of float16, bfloat16, float32, float64 can be merged"
    ):
        convert.load(base, adapter=adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConversionError, match="not a complete safetensors file"):
        convert.load(base, adapter=adapter)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(
        ConversionError, match=r"has no weights; looked for adapter_model.safetensors and adapter_model"
    ):
        convert.load(base, adapter=adapter)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "shared"])
def test_a_change_of_one_tied_tensor_is_refused(target, saved):
    """`peft` merges it into all of them and warns: the merged model is another function."""
    base, adapter = saved("BART", target_modules=[target])
    with pytest.raises(ConversionError, match=rf"{target}.weight: has a low-rank update and is tied to "):
        convert.load(base, adapter=adapter)


def test_without_torch_it_says_so(adapted, monkeypatch):
    base, adapter = adapted
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingPackageError, match=rf"{adapter}: merging it needs PyTorch, which is not installed"):
        convert.load(base, adapter=adapter)
