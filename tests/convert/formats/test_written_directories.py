"""Written Hugging Face directories: their contents, and what is never overwritten."""

import json
import logging
import queue
import resource
import subprocess
import sys
import threading
from dataclasses import replace
from logging.handlers import QueueHandler
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import ModelCard

from parity_tests.support.conversion import changes
from parity_tests.support.text import VARIANTS, write_files
from twinax import TransformerConfig, convert, torch_reference
from twinax.cli.checkpoints.model_card import model_card
from twinax.configs.data import CorpusConfig
from twinax.configs.decoding import DecodingConfig
from twinax.configs.run import RunConfig
from twinax.convert.checkpoint import TOKENIZER_FILES, Checkpoint
from twinax.convert.formats.hugging_face import family
from twinax.convert.layouts.hugging_face_settings import BART_LIKE
from twinax.parity.functions import random_arrays

pytestmark = pytest.mark.filterwarnings("ignore")  # `transformers` warns about how it writes


def edit(directory, **settings):
    values = json.loads((directory / "config.json").read_text()) | settings
    (directory / "config.json").write_text(json.dumps(values))


def same(left, right):
    return left.keys() == right.keys() and all(
        (left[n].shape, left[n].dtype, left[n].tobytes()) == (right[n].shape, right[n].dtype, right[n].tobytes())
        for n in left
    )


def test_a_model_of_our_own_becomes_a_directory(tmp_path):
    """A PyTorch twin with Marian's settings that did not come from `transformers`."""
    settings = {"d_model": 12, "vocab_size": 31, "pad_token_id": 0, "bos_token_id": 3, "decoder_start_token_id": 0}
    settings |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 3}
    config = family("marian").config({**BART_LIKE.defaults, **settings}, "float32")
    checkpoint = Checkpoint.of(torch_reference.Transformer(config))
    convert.save(checkpoint, tmp_path / "ours", layout="marian")
    model, info = transformers.MarianMTModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    assert model.generation_config.decoder_start_token_id == 0
    assert model.generation_config.eos_token_id == 2
    round_trip = convert.load(tmp_path / "ours")
    assert round_trip.config == config
    assert same(round_trip.arrays, checkpoint.arrays)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "layout"), [("BART", "bart"), ("Marian", "marian"), ("M2M100", "m2m100"), ("T5", "t5")]
)
def test_transformers_loads_it_without_a_warning(name, layout, directories, command, tmp_path):
    code, _, err = command("convert", directories / name, tmp_path / "new", "--layout", layout, "--dtype", "bfloat16")
    assert code == 0, err
    logger, records = logging.getLogger("transformers"), queue.SimpleQueue()
    handler = QueueHandler(records)
    logger.addHandler(handler)
    try:
        _, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "new", output_loading_info=True)
    finally:
        logger.removeHandler(handler)
    assert (records.empty(), any(info.values())) == (True, False)


def test_a_changed_config_is_written_and_the_rest_kept(bart, tmp_path):
    edit(bart, num_beams=3, activation_function="gelu_new")
    checkpoint = convert.load(bart)
    new_checkpoint = replace(checkpoint, config=checkpoint.config.replace(residual_dropout=0.4, embedding_dropout=0.4))
    convert.save(new_checkpoint, tmp_path / "again", layout="bart")
    old_config, new_config = (json.loads((d / "config.json").read_text()) for d in (bart, tmp_path / "again"))
    assert {name for name in old_config if new_config[name] != old_config[name]} == {"dropout"}
    assert new_config["dropout"] == 0.4


def test_other_names_of_a_changed_setting_are_not_written(bart, tmp_path):
    """`transformers` reads num_hidden_layers as encoder_layers, and would build a layer that the file lacks."""
    edit(bart, num_hidden_layers=2, hidden_size=12, torch_dtype="float32")
    checkpoint = convert.load(bart)
    arrays = {name: a for name, a in checkpoint.arrays.items() if "encoder.layers.1." not in name}
    short_checkpoint = replace(checkpoint, config=checkpoint.config.replace(num_encoder_layers=1), arrays=arrays)
    convert.save(short_checkpoint, tmp_path / "again", layout="bart")
    _, info = transformers.BartForConditionalGeneration.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(info.values())
    assert convert.load(tmp_path / "again").config == short_checkpoint.config
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert not {"num_hidden_layers", "hidden_size", "torch_dtype"} & config.keys()


def test_a_list_of_one_eos_id_is_that_id(bart, tmp_path):
    edit(bart, eos_token_id=[2])
    checkpoint = convert.load(bart)
    assert checkpoint.config.eos_id == 2
    convert.save(checkpoint, tmp_path / "again", layout="bart")
    assert changes(bart, tmp_path / "again") == []


def test_another_layout_lists_every_reason(bart, tmp_path):
    with pytest.raises(convert.ConversionError) as error:
        convert.save(convert.load(bart), tmp_path / "x", layout="marian")
    assert str(error.value).splitlines() == [
        "marian has no such model:",
        "  embedding_norm='before_dropout': a marian model has 'none'",
        "  positions='learned': a marian model has 'sinusoidal_half'",
        "  position_offset=2: a marian model has 0",
        "the model fits bart",
    ]
    assert not (tmp_path / "x").exists()


def test_m2m100_cannot_hold_another_table(directories, tmp_path):
    checkpoint = convert.load(directories / "M2M100")
    name = "src_input.positions.table"
    other_checkpoint = replace(checkpoint, arrays=checkpoint.arrays | {name: checkpoint.arrays[name] + 1})
    with pytest.raises(convert.ConversionError, match=f"{name}: m2m_100 computes its table"):
        convert.save(other_checkpoint, tmp_path / "x", layout="m2m100")
    formula = torch_reference.Transformer(checkpoint.config).state_dict()[name].numpy()
    convert.save(replace(checkpoint, arrays=checkpoint.arrays | {name: formula}), tmp_path / "y", layout="m2m100")


def test_arrays_that_do_not_fit_the_config_are_not_written(bart, tmp_path):
    checkpoint = convert.load(bart)
    arrays = dict(checkpoint.arrays)
    del arrays["output.bias"]
    with pytest.raises(convert.ConversionError, match=r"missing: output.bias, float32\[31\]"):
        convert.save(replace(checkpoint, arrays=arrays), tmp_path / "x", layout="bart")
    assert not (tmp_path / "x").exists()


def test_an_existing_directory_is_left_alone(bart):
    contents = {path.name: path.read_bytes() for path in bart.iterdir()}
    with pytest.raises(convert.ConversionError, match="exists and is not empty"):
        convert.save(convert.load(bart), bart, layout="bart")
    with pytest.raises(convert.ConversionError, match=r"config\.json: exists; give another name"):
        convert.save(convert.load(bart), bart / "config.json", layout="bart")
    assert contents == {path.name: path.read_bytes() for path in bart.iterdir()}


def test_a_full_disk_leaves_nothing(bart, tmp_path):
    checkpoint, limits = convert.load(bart), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))  # bytes per file
    try:
        with pytest.raises(convert.ConversionError, match=r"new: cannot be written: .*File too large"):
            convert.save(checkpoint, tmp_path / "new", layout="bart")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bart"]


def test_a_full_disk_leaves_no_directory_without_its_card(bart, tmp_path, command):
    document = {"scores": [{"name": "BLEU", "value": 1.0, "signature": "x" * 200_000}]}
    (tmp_path / "scores.json").write_text(json.dumps(document))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # bytes per file; the weights have fewer
    try:
        scores = tmp_path / "scores.json"
        code, _, err = command("convert", bart, tmp_path / "new", "--layout", "bart", "--scores", scores)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (code, err) == (2, f"twinax: {tmp_path / 'new'}: cannot be written: [Errno 27] File too large\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bart", "scores.json"]


def test_of_two_at_once_one_wins(bart, tmp_path):
    checkpoint, failures = convert.load(bart), []

    def write():
        try:
            convert.save(checkpoint, tmp_path / "new", layout="bart")
        except convert.ConversionError as error:
            failures.append(str(error))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == 3
    assert changes(bart, tmp_path / "new") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bart", "new"]


def test_the_current_directory_is_not_replaced(bart, tmp_path, monkeypatch):
    checkpoint = convert.load(bart)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(convert.ConversionError, match="is the current directory; give a new name"):
        convert.save(checkpoint, ".", layout="bart")
    with pytest.raises(convert.ConversionError, match="cannot be written"):
        convert.save(checkpoint, "x\0", layout="bart")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "target").mkdir()
    convert.save(checkpoint, tmp_path / "link", layout="bart")
    assert changes(bart, tmp_path / "target") == []


def test_unknown_layout(bart, tmp_path):
    with pytest.raises(
        convert.ConversionError, match=r"layout='led': there is no such layout; choose one of twinax, .*, marian"
    ):
        convert.save(convert.load(bart), tmp_path / "x", layout="led")


SCORES = [
    {"name": "BLEU", "value": 37.964, "signature": "nrefs:1|case:mixed|eff:no|tok:13a"},
    {"name": "chrF", "value": 61.0, "signature": "nrefs:1|case:mixed|nc:6|nw:0"},
]


def test_a_directory_has_a_model_card(bart, command, tmp_path, monkeypatch):
    """The oracle is the hub's own reader of cards."""
    monkeypatch.chdir(tmp_path)
    document = {"dataset": "bentrevett/multi30k", "split": "test", "pairs": 1000, "scores": SCORES}
    Path("scores.json").write_text(json.dumps(document))
    scores = f"--scores={tmp_path / 'scores.json'}"
    code, _, err = command("convert", bart, "new", "--layout", "bart", scores)
    assert code == 0, err
    card = ModelCard.load(tmp_path / "new" / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag, card.data.language) == ("transformers", "translation", None)
    assert [(r.metric_type, r.metric_value, r.metric_args, r.dataset_type) for r in card.data.eval_results] == [
        (score["name"].lower(), round(score["value"], 2), {"signature": score["signature"]}, "bentrevett/multi30k")
        for score in SCORES
    ]
    assert command("inspect", bart, "--json", "inspected.json")[0] == 0
    assert f"`{json.loads(Path('inspected.json').read_text())['sha256 of weights']}`" in card.text
    assert "`twinax convert bart new --layout bart --scores=scores.json`" in card.text
    assert str(tmp_path) not in card.content
    assert "| multi30k test | 1000 | BLEU | 37.96 | nrefs:1|case:mixed" in card.text.replace("\\", "")


def test_a_card_names_languages_and_data_of_the_run():
    checkpoint = Checkpoint(TransformerConfig.preset("tiny"), {})
    corpora = {
        "hub/books": (CorpusConfig(dataset="hub/books", src_column="de", tgt_column="no"), ["de", "no"], ["hub/books"]),
        "a.de and a.en": (CorpusConfig(src="/home/me/a.de", tgt="/home/me/a.en"), None, None),
    }
    for data, (corpus, languages, datasets) in corpora.items():
        run = RunConfig(corpus=corpus)
        card = ModelCard(model_card("x", checkpoint, "0" * 64, run=run, scores=[], arguments=["convert"]))
        assert (card.data.language, card.data.datasets) == (languages, datasets)
        assert f"Training data: {data}\n" in card.text
        assert "/home" not in card.content


@pytest.mark.parametrize("name", ["NLLB", "Marian", "mBART"])
def test_a_card_names_the_languages_of_the_tokenizer(name, tmp_path):
    """All of a multilingual one, until its settings name two."""
    texts = [f"{word} {other} {word}{other}." for word in ("Haus", "Hund", "cat") for other in ("der", "the", "groß")]
    variant = next(variant for variant in VARIANTS if variant.startswith(name))
    write_files(variant, tmp_path, (texts, texts), 60)

    def card():
        files = {f"tokenizer/{path.name}": path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
        files = {n: content for n, content in files.items() if n in {f"tokenizer/{t}" for t in TOKENIZER_FILES}}
        documents = {"config.json": json.loads((tmp_path / "config.json").read_text())}
        checkpoint = Checkpoint(
            TransformerConfig(src_vocab_size=9999, tgt_vocab_size=9999), {}, documents=documents, files=files
        )
        return ModelCard(model_card("x", checkpoint, "0" * 64, run=None, scores=[], arguments=["convert"]))

    before = card()
    if name == "NLLB":
        assert {"deu", "eng", "zho"} <= {*before.data.language}
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    keys = ("source_lang", "target_lang") if name == "Marian" else ("src_lang", "tgt_lang")
    codes = {"NLLB": ("deu_Latn", "fra_Latn"), "Marian": ("de", "fr"), "mBART": ("de_DE", "fr_XX")}[name]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | dict(zip(keys, codes, strict=True))))
    short = [code.partition("_")[0] for code in codes]
    assert card().data.language == sorted(short)
    assert f"Languages: {short[0]} to {short[1]}\n" in card().text


WRONG_SCORES = [
    *({"value": "31.2"}, {"value": float("nan")}, {"value": 10**400}, {"value": True}),
    *({"name": ["BLEU"]}, {"signature": 3}, {"signature": None}),
]
WRONG_DOCUMENTS = [
    *("", "[]", "[" * 100_000, '{"scores": []}', '{"scores": [{"name": "BLEU"}]}', '{"scores": 1}'),
    *(json.dumps({"scores": [SCORES[0] | change]}) for change in WRONG_SCORES),
    json.dumps({"scores": SCORES, "split": 7}),
]


@pytest.mark.parametrize("content", WRONG_DOCUMENTS, ids=lambda content: content[:60])
def test_what_is_no_file_of_scores(content, bart, command, tmp_path):
    (tmp_path / "x.json").write_text(content)
    code, _, err = command("convert", bart, tmp_path / "n", "--layout", "bart", "--scores", tmp_path / "x.json")
    assert (code, err) == (
        2,
        f"twinax: --scores {tmp_path / 'x.json'}: is not a file that `twinax evaluate --json` wrote\n",
    )
    assert not (tmp_path / "n").exists()


def test_generate_translates_an_own_model_as_twinax_does(tmp_path):
    """A new directory states the defaults of the commands; without them, `generate` is greedy and stops after 20."""
    sizes = {"vocab_size": 40, "d_model": 16, "max_position_embeddings": 30, "pad_token_id": 1, "eos_token_id": 2}
    config = family("bart").config(sizes, "float32").replace(num_encoder_layers=1, num_decoder_layers=1)
    arrays = random_arrays(config, 3)
    arrays["output.bias"][config.eos_id] -= 4  # long translations
    checkpoint = Checkpoint(config, arrays)
    convert.save(checkpoint, tmp_path / "new", layout="bart")
    sources = np.random.default_rng(0).integers(4, 40, (6, 7))
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "new")
    outputs = model.generate(torch.from_numpy(sources))[:, 1:].tolist()
    decoding = DecodingConfig(beam_size=5, max_length=30)
    expected = torch_reference.generate(checkpoint.to_torch().eval(), torch.from_numpy(sources), decoding)
    texts = [[token for token in row if token != config.pad_id] for row in outputs]
    lengths = expected.lengths[:, 0].tolist()
    assert texts == [row[:n] for row, n in zip(expected.tokens[:, 0].tolist(), lengths, strict=True)]
    assert max(lengths) > 20


def test_a_directory_is_loaded_without_training_code(bart):
    """On a machine that only converts, neither orbax nor PyTorch has to be imported, or to be installed."""
    code = """
import sys
sys.modules |= dict.fromkeys(("orbax", "torch", "twinax.train"))
from twinax import convert
print(convert.load(sys.argv[1]).layout)
"""
    result = subprocess.run([sys.executable, "-c", code, bart], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("bart\n", "")
