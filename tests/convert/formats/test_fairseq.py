"""fairseq checkpoints: versions, settings, dictionaries, what is refused, and the way back."""

import os
import re
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import twinax
from parity_tests.support.fairseq_files import (
    fairseq_args,
    fairseq_changes,
    fairseq_content,
    fairseq_model,
    fairseq_state,
    save_fairseq,
    write_dictionaries,
)
from twinax import convert
from twinax.configs.data import CorpusConfig
from twinax.configs.run import RunConfig
from twinax.convert import Checkpoint, ConversionError
from twinax.convert.formats import fairseq as fairseq_format
from twinax.convert.formats.fairseq_dictionary import read_dictionary
from twinax.convert.layouts import fairseq
from twinax.train.data.prepare import prepare
from twinax.train.data.tokenizer_pair import Tokenizers

NAME = "fairseq, post-norm"
pytestmark = pytest.mark.filterwarnings("ignore")  # `transformers` warns about changes in later versions


@pytest.fixture(scope="module")
def state():
    return fairseq_state(fairseq_model(NAME))


@pytest.fixture
def folder(state, tmp_path):
    """A directory as fairseq's archives have it; a test may change it."""
    torch.save(fairseq_content(fairseq_args(NAME), state), tmp_path / "model.pt")
    write_dictionaries(tmp_path, (31, 29))
    (tmp_path / "bpecodes").write_text("a b\n")
    return tmp_path


def save(folder, content):
    torch.save(content, folder / "model.pt")
    return folder / "model.pt"


def same(left, right):
    return left.config == right.config and {n: a.tobytes() for n, a in left.arrays.items()} == {
        n: a.tobytes() for n, a in right.arrays.items()
    }


def old_names(state):
    """The arrays under the names of the first versions: packed projections, numbered norms, embed_out."""
    old = dict(state)
    for name in [name for name in state if "_attn.q_proj" in name]:
        parts = [old.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
        old[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
    for side, norms in (("encoder", ["self_attn", "final"]), ("decoder", ["self_attn", "encoder_attn", "final"])):
        for number, norm in enumerate(norms):
            for name in [name for name in old if name.startswith(side) and f".{norm}_layer_norm." in name]:
                old[name.replace(f"{norm}_layer_norm", f"layer_norms.{number}")] = old.pop(name)
    old["decoder.embed_out"] = old.pop("decoder.output_projection.weight")
    old["encoder.embed_positions.weights"] = torch.ones(15, 12)
    return old


def with_fast_path(state, fill):
    """The arrays of 0.12: each encoder layer has copies of its weights; `fill` makes an array of the same shape."""
    new = dict(state)
    for layer in [match[1] for n in state if (match := re.fullmatch(r"(encoder\.layers\.\d+)\.fc1\.weight", n))]:
        for kind in ("weight", "bias"):
            packed = torch.cat([state[f"{layer}.self_attn.{letter}_proj.{kind}"] for letter in "qkv"])
            new[f"{layer}.in_proj_{kind}"] = fill(packed)
            new[f"{layer}.out_proj_{kind}"] = fill(state[f"{layer}.self_attn.out_proj.{kind}"])
            new |= {f"{layer}.{name}_{kind}": fill(state[f"{layer}.{name}.{kind}"]) for name in ("fc1", "fc2")}
    return new


def nested(args):
    """The settings as hydra nests them."""
    values = {name: value for name, value in vars(args).items() if name not in ("source_lang", "target_lang", "task")}
    model = {"_name": values.pop("arch"), "encoder": {}, "decoder": {}, "quant_noise": {"pq": 0.0, "scalar": 0.0}}
    for name, value in values.items():
        section, _, rest = name.partition("_")
        target = model[section] if section in ("encoder", "decoder") else model
        target[rest if target is not model else name] = value
    model["decoder"]["output_dim"] = "${model.decoder.embed_dim}"
    return {"_name": None, "model": model, "task": {"_name": "translation", "source_lang": "de", "target_lang": "en"}}


def test_a_file_alone_is_read_without_tokenizers(folder, tmp_path):
    expected = convert.load(folder)
    (tmp_path / "alone").mkdir()
    (folder / "model.pt").rename(tmp_path / "alone" / "checkpoint_best.pt")
    checkpoint = convert.load(tmp_path / "alone" / "checkpoint_best.pt")
    assert same(checkpoint, expected)
    assert not checkpoint.files
    of_directory = convert.load(tmp_path / "alone")
    assert same(of_directory, expected)
    assert not of_directory.files
    assert convert.formats.registry.describe(tmp_path / "alone") == "fairseq directory"
    (tmp_path / "other").mkdir()
    torch.save({"a": torch.ones(2)}, tmp_path / "other" / "model.pt")
    assert not fairseq_format.recognizes(tmp_path / "other")


def test_text_without_the_bpe_of_the_training_is_a_warning(folder, tmp_path, command):
    (tmp_path / "plain").write_text("der w1 Hund w2 Haus\n" * 30)
    (tmp_path / "segmented").write_text("w1 w2 w3@@ w4\n" * 30)
    warning = (
        "60% of the source tokens are unknown (<unk>); the tokenizer looks up tokens between spaces; segment the text "
        "first as the training data was, with its BPE codes: subword-nmt apply-bpe -c bpecodes"
    )
    options = ("--framework", "torch", "--beam-size", "1", "--max-length", "1")
    for name, expected in (("plain", f"twinax: {warning}\n"), ("segmented", "")):
        assert command("translate", folder, tmp_path / name, *options)[2] == expected
    checkpoint = convert.load(folder)
    corpus = CorpusConfig(src=str(tmp_path / "plain"), tgt=str(tmp_path / "segmented"))
    run, lines = RunConfig(corpus=corpus, init_from=str(folder), model=checkpoint.config), []
    tokenizers = Tokenizers.of_checkpoint(checkpoint, run.tokenizer, "fairseq")
    prepare(run, tokenizers, sizes=checkpoint.config, say=lines.append)
    assert f"warning: {warning}" in lines


def test_every_version_is_the_same_model(folder, state):
    expected, args = convert.load(folder), fairseq_args(NAME)
    task = {"_name": "translation", "source_lang": "de", "target_lang": "en"}
    contents = {
        "old names": fairseq_content(args, old_names(state)),
        "settings as a dict": fairseq_content(vars(args), state),
        "cfg": fairseq_content(None, state, nested(args)),
        "cfg with a Namespace": fairseq_content(None, state, {"model": Namespace(**vars(args)), "task": task}),
        "averaged": {"args": args, "model": state},
        # fairseq 0.12 overwrites them with the layer's weights when it loads a checkpoint, whatever they are
        "0.12, copies": fairseq_content(None, with_fast_path(state, torch.clone), nested(args)),
        "0.12, zeros": fairseq_content(None, with_fast_path(state, torch.zeros_like), nested(args)),
        "0.12, trained on": fairseq_content(None, with_fast_path(state, torch.randn_like), nested(args))
        | {"criterion": {"weight": torch.ones(2)}, "task_state": {}, "extra_state": {"ema": state}},
    }
    for version, content in contents.items():
        checkpoint = convert.load(save(folder, content))
        assert same(checkpoint, expected), version
        assert checkpoint.files == expected.files, version
        assert any("copies of its weights" in name for name in checkpoint.skipped) == ("0.12" in version)
    torch.save(contents["old names"], folder / "model.pt", _use_new_zipfile_serialization=False)
    assert convert.formats.registry.describe(folder / "model.pt") == "fairseq checkpoint"
    assert same(convert.load(folder), expected)


REFUSED = {  # changes of args -> message
    "lstm": ({"arch": "lstm"}, "arch='lstm': is not supported; twinax reads transformer, "),
    "no arch": ({"arch": None}, "arch=None: is not supported"),
    "softmax": ({"adaptive_softmax_cutoff": "100,200"}, "adaptive_softmax_cutoff='100,200': twinax does not support"),
    "noise": ({"quant_noise_pq": 0.1}, "quant_noise_pq=0.1: twinax does not support"),
    "cross": ({"cross_self_attention": True}, "cross_self_attention=True: twinax does not support"),
    "experts": ({"moe_freq": 2}, "moe_freq=2: twinax does not support"),
    "widths": ({"decoder_embed_dim": 8}, "decoder_embed_dim=8: must be that of encoder_embed_dim=12"),
    "norms": (
        {"decoder_normalize_before": True},
        "decoder_normalize_before=True: must be that of encoder_normalize_be",
    ),
    "kinds": ({"encoder_learned_pos": True}, "decoder_learned_pos=False: must be that of encoder_learned_pos=True"),
    "tanh": ({"activation_fn": "tanh"}, "activation_fn='tanh': must be one of relu, gelu"),
    "layers": ({"encoder_layers": 3}, "encoder_layers=3: contradicts the weights, which have 2"),
    "no number": ({"encoder_layers": "x"}, "encoder_layers='x'"),
    "heads": ({"encoder_attention_heads": 5}, "encoder_attention_heads=5: d_model=12 is not divisible by it"),
    "dropout": ({"dropout": 1.5}, "dropout=1.5: a dropout rate must be at least 0 and below 1"),
    "languages": ({"source_lang": "../de"}, "source_lang='../de', target_lang='en': must be names of languages"),
    "ties": (
        {"share_decoder_input_output_embed": True},
        "decoder.output_projection.weight: differs from decoder.embed",
    ),
    "sizes": (
        {"encoder_ffn_embed_dim": 16},
        "wrong: encoder.layers.0.fc1.weight is float32[17, 12], must be float32[16",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_named(case, folder, state):
    changes, message = REFUSED[case]
    path = save(folder, fairseq_content(Namespace(**{**vars(fairseq_args(NAME)), **changes}), state))
    with pytest.raises(ConversionError) as error:
        convert.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_a_pre_norm_model_needs_both_final_norms(tmp_path):
    save_fairseq("fairseq, pre-norm, shared", tmp_path)
    content = torch.load(tmp_path / "model.pt", weights_only=False)
    content["model"]["decoder.version"] = torch.tensor([2.0])
    with pytest.raises(ConversionError, match=r"decoder\.version=2: this version has no final norm"):
        convert.load(save(tmp_path, content))
    content["args"].no_decoder_final_norm = True
    with pytest.raises(
        ConversionError, match="no_decoder_final_norm=True: a pre-norm model of twinax has a final norm"
    ):
        convert.load(save(tmp_path, content))


BROKEN = {
    "no dictionary of the target": (lambda f: (f / "dict.en.txt").unlink(), "dict.en.txt: there is no such file"),
    "a token too many": (lambda f: append(f, "more 1\n"), "dict.de.txt: has 32 tokens, special ones included, but the"),
    "a token twice": (lambda f: append(f, "w1 1\n"), "line 28: 'w1' occurs again; fairseq requires #fairseq:overwrite"),
    "no count": (lambda f: append(f, "more\n"), "line 28 is 'more', must be a token, a space and a count"),
    "no text": (lambda f: (f / "dict.de.txt").write_bytes(b"\xff 1\n"), "dict.de.txt: cannot be read"),
    "no settings": (lambda f: edit(f, args=None), "states neither args nor cfg.model"),
    "cfg of nothing": (lambda f: edit(f, args=None, cfg={"model": [1]}), "states neither args nor cfg.model"),
    "settings in a circle": (lambda f: edit(f, args=circle()), "arch=None: is not supported"),
    "no model": (lambda f: edit(f, model=None, extra="encoder.embed_tokens.weight"), "is not a state dict"),
    "no embedding": (
        lambda f: edit(f, model={"encoder.embed_tokens.weight": torch.ones(3)}),
        "has no matrix encoder.embed",
    ),
    "truncated": (
        lambda f: truncate(f / "model.pt"),
        "model.pt: not a complete PyTorch file; download or copy it again (",
    ),
    "several": (lambda f: several(f), "holds several checkpoints (a.pt, b.pt); name one of them"),
}


def append(folder, line):
    with open(folder / "dict.de.txt", "a", encoding="utf-8") as file:
        file.write(line)


def edit(folder, **changes):
    save(folder, torch.load(folder / "model.pt", weights_only=False) | changes)


def circle():
    values = {"a": []}
    values["a"].append(values)
    return values


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def several(folder):
    (folder / "model.pt").rename(folder / "a.pt")
    (folder / "b.pt").write_bytes((folder / "a.pt").read_bytes())


@pytest.mark.parametrize("case", BROKEN)
def test_a_damaged_directory_is_one_line(case, folder, command):
    damage, message = BROKEN[case]
    damage(folder)
    code, out, err = command("convert", folder, folder / "new.safetensors")
    assert (code, out) == (2, "")
    assert message in err
    assert (err.count("\n"), "Traceback" in err) == (1, False)


class Config(dict):
    """Stands for the objects of omegaconf in checkpoints of fairseq 0.10."""


def test_code_is_refused_with_the_command_that_removes_it(folder, state, tmp_path, monkeypatch):
    args, path = fairseq_args(NAME), folder / "model.pt"
    module = ModuleType("omegaconf.dictconfig")
    module.Config = Config
    with monkeypatch.context() as patch:
        patch.setattr(Config, "__module__", module.__name__)
        patch.setitem(sys.modules, "omegaconf", ModuleType("omegaconf"))
        patch.setitem(sys.modules, module.__name__, module)
        save(folder, fairseq_content(None, state, Config(nested(args))))
    with pytest.raises(ConversionError) as error:
        convert.load(path)
    message = str(error.value)
    assert "holds more than tensors, a omegaconf.dictconfig.Config; none of its code was run" in message
    _, separator, command = message.partition("where fairseq is installed, run: ")
    assert separator
    command = command.removesuffix("; then convert PLAIN.pt").removesuffix(f"{path} PLAIN.pt").strip()
    code = command.removeprefix('python -c "').removesuffix('"')
    stub = tmp_path / "stub" / "omegaconf"
    stub.mkdir(parents=True)
    (stub / "dictconfig.py").write_text("class Config(dict):\n    pass\n")
    (stub / "__init__.py").write_text(
        "from .dictconfig import Config\n\nclass OmegaConf:\n"
        "    is_config = staticmethod(lambda o: isinstance(o, Config))\n"
        "    to_container = staticmethod(lambda o, resolve, enum_to_str: dict(o))\n"
    )
    plain = tmp_path / "plain" / "model.pt"
    plain.parent.mkdir()
    write_dictionaries(plain.parent, (31, 29))
    monkeypatch.syspath_prepend(stub.parent)
    monkeypatch.setattr(sys, "argv", ["-c", str(path), str(plain)])
    exec(compile(code, "<string>", "exec"), {})
    for name in [name for name in sys.modules if name.partition(".")[0] == "omegaconf"]:
        del sys.modules[name]
    save(folder, fairseq_content(args, state))
    assert same(convert.load(plain.parent), convert.load(folder))


def test_a_dictionary_is_fairseq_s(tmp_path):
    """Literal ids: specials first, then lines; an overwritten token is looked up at its last line."""
    path = tmp_path / "dict.de.txt"
    path.write_text("ein@@ 9\nHaus 8\n\u2581a b 7\n<s> 3 #fairseq:overwrite\nmadeupword0000 0\n", encoding="utf-8")
    ids = {"<s>": 7, "<pad>": 1, "</s>": 2, "<unk>": 3, "ein@@": 4, "Haus": 5, "\u2581a b": 6, "madeupword0000": 8}
    assert read_dictionary(path) == ids


def test_text_is_split_at_spaces_and_subwords_are_joined(folder):
    translator = twinax.load(folder)
    src, tgt = translator.tokenizers
    assert src.encode_sources(["w0@@ w1  w2 nie"]) == [[4, 5, 6, 3, 2]]
    assert (src.pad_id, src.bos_id, src.eos_id, src.unk_id) == (1, 0, 2, 3)
    assert tgt.decode([[4, 5, 6, 7, 8, 2], [4, 2]]) == ["w0w1 w2 w3w4", "w0"]
    assert len(translator.translate(["w0@@ w1"], framework="torch", max_length=5)) == 1


def test_a_sentencepiece_dictionary_joins_pieces(folder):
    lines = ["\u2581Ein 9", "\u2581H 8", "aus 7", *[f"x{i} 1" for i in range(22)]]
    (folder / "dict.en.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert twinax.load(folder).tokenizers.tgt.decode([[4, 5, 6, 2]]) == ["Ein Haus"]


def test_the_commands_read_and_write_it(folder, command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = command("inspect", folder)
    assert (code, "fairseq directory" in out, "last_optimizer_state" in out) == (0, True, True)
    new = tmp_path / "new"
    for source, target, *flags in (
        (folder, new / "a.pt"),
        (new / "a.pt", new / "b"),
        (new / "b", new / "c" / "model.pt", "--layout", "fairseq"),
        (new / "a.pt", new / "hub", "--layout", "fairseq"),
    ):
        code, out, err = command("convert", source, target, *flags)
        assert (code, "DIFFERENT" in out) == (0, False), out + err
    for result in (new / "c", new / "hub"):
        assert fairseq_changes(folder, result) == []
    assert sorted(os.listdir(new / "c")) == ["dict.de.txt", "dict.en.txt", "model.pt"]
    code, _, err = command("convert", folder, new / "x.pt", "--config", "leftover")
    assert (code, "has its own config; omit" in err) == (2, True)
    code, _, err = command("convert", folder, new / "x.bin", "--layout", "fairseq")
    assert (code, "x.bin: layout fairseq needs a name that ends in .pt, .pth, or no suffix" in err) == (2, True)


def test_other_dictionaries_are_never_replaced(folder, tmp_path):
    checkpoint = convert.load(folder)
    convert.save(checkpoint, tmp_path / "again.pt", layout="fairseq")  # equal dictionaries are beside it
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "dict.en.txt").write_text("other 1\n")
    with pytest.raises(ConversionError, match=r"dict\.en\.txt: exists; give another name"):
        convert.save(checkpoint, tmp_path / "sub" / "x.pt", layout="fairseq")
    assert os.listdir(tmp_path / "sub") == ["dict.en.txt"]


def test_a_changed_config_changes_the_settings(folder, tmp_path):
    checkpoint = convert.load(folder)
    changed = Checkpoint(checkpoint.config.replace(ffn_dropout=0.3), checkpoint.arrays, "fairseq", checkpoint.documents)
    convert.save(changed, tmp_path / "x.pt", layout="fairseq")
    args = torch.load(tmp_path / "x.pt", weights_only=False)["args"]
    assert (args.activation_dropout, args.source_lang, args.lr) == (0.3, "de", [0.0005])
    assert convert.load(tmp_path / "x.pt").config == changed.config


def test_a_table_of_another_formula_is_refused(folder, tmp_path):
    checkpoint = convert.load(folder)
    arrays = {n: a + (n == "src_input.positions.table") for n, a in checkpoint.arrays.items()}
    with pytest.raises(ConversionError, match=r"src_input\.positions\.table: fairseq computes its table"):
        convert.save(Checkpoint(checkpoint.config, arrays), tmp_path / "x.pt", layout="fairseq")


def test_a_file_of_something_else_is_not_fairseq_s(tmp_path):
    torch.save({"model": {"encoder.embed_tokens.weight": torch.ones(2, 2)}}, tmp_path / "x.pt")
    torch.save({"args": Namespace(), "model": {"a": torch.ones(2)}}, tmp_path / "y.pt")
    Path(tmp_path / "empty.pt").write_bytes(b"")
    assert not any(fairseq_format.recognizes(path) for path in tmp_path.iterdir())
    assert np.array_equal(
        fairseq.position_table(fairseq.config_of({"arch": "transformer"}, (9, 9), "float32"))[1], np.zeros(512)
    )
