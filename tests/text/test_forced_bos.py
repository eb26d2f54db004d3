"""The first token of every translation, which names the target language in multilingual families."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parity_tests.support.conversion import random_model
from twinax import convert
from twinax.backend.errors import DataError
from twinax.configs.data import TokenizerConfig
from twinax.inference.translator import load
from twinax.parity.coverage import Coverage
from twinax.parity.harness import Report
from twinax.parity.ladder import Ladder
from twinax.train.data.tokenizer_pair import Tokenizers
from twinax.train.text.pretrained import load_for_model

STORED = Path(__file__).parents[1] / "checkpoints" / "v1"
WORDS = ["<s>", "<pad>", "</s>", "<unk>", "__de__", "__fr__", *(f"w{i}" for i in range(25))]
TEXTS = ["w1 w2 w3", "w24 w7", "w5"]

pytestmark = pytest.mark.filterwarnings("ignore")  # `transformers` warns about how it writes


@pytest.fixture(scope="module")
def m2m100(tmp_path_factory):
    """(`transformers`' small random M2M100, its directory with a tokenizer)."""
    folder = tmp_path_factory.mktemp("m2m100")
    torch.manual_seed(0)
    model = random_model("M2M100")
    with torch.no_grad():
        for parameter in model.parameters():  # spread the embeddings; otherwise every translation repeats one token
            parameter.mul_(2)
    model.save_pretrained(folder / "bare")
    checkpoint = convert.load(folder / "bare")
    (folder / "words.txt").write_text("\n".join(WORDS) + "\n")
    Tokenizers.of([load_for_model(str(folder / "words.txt"), checkpoint.config, TokenizerConfig())]).save(folder)
    files = {f"tokenizer/{path.name}": path.read_bytes() for path in (folder / "tokenizer").iterdir()}
    convert.save(replace(checkpoint, files=files), folder / "model", layout="m2m100")
    (folder / "text").write_text("\n".join(TEXTS) + "\n")
    return model, folder / "model"


def reference_texts(model, translator, token, beam_size):
    """Translations by `transformers`' beam search, one sentence at a time to avoid padding."""
    texts = []
    for ids in translator.source_ids(TEXTS):
        output = model.generate(
            input_ids=torch.tensor([ids]),
            num_beams=beam_size,
            max_length=translator.config.max_length + 1,
            forced_bos_token_id=WORDS.index(token),
            forced_eos_token_id=translator.config.eos_id,
            bad_words_ids=[[translator.config.pad_id]],
            early_stopping=False,
        )
        texts.append(output[0, 1:].tolist())
    return [text.partition(" </s>")[0] for text in (" ".join(WORDS[i] for i in ids) for ids in texts)]


@pytest.mark.parametrize(
    ("framework", "beam_size", "token"), [("torch", 1, "__de__"), ("torch", 3, "__fr__"), ("flax", 3, "__fr__")]
)
def test_translations_are_those_of_transformers(framework, beam_size, token, m2m100):
    model, path = m2m100
    translator = load(path)
    options = {"framework": framework, "beam_size": beam_size, "max_length": translator.config.max_length}
    options |= {"force_end": True, "allow_padding": False}  # as in the reference; the directory sets nothing
    expected = reference_texts(model, translator, token, beam_size)
    assert translator.translate(TEXTS, forced_bos=token, **options) == expected
    assert all(text.startswith(token) for text in expected)
    assert len({*expected}) == len(TEXTS)
    if framework == "torch":  # in PyTorch only, because Flax would compile another program
        assert translator.translate(TEXTS, **options) != expected


def write_text(folder, text):
    (folder / "text").write_text(text)
    return folder / "text"


def test_a_token_or_its_id_comes_first(command, tmp_path):
    """The stored model uppercases letters."""
    text = write_text(tmp_path, "a b\nc\n")
    ids = load(STORED).tokenizers.tgt.fast.get_vocab()
    options = ("--beam-size", "1", "--framework", "torch")
    outputs = [command("translate", STORED, text, "--forced-bos", bos, *options) for bos in ("H", ids["H"])]
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == 0
    assert [line[:2] for line in outputs[0][1].splitlines()] == ["H ", "H "]
    arguments = ("--src", text, "--tgt", text, "--output", tmp_path / "out", "--json", tmp_path / "e.json")
    code, _, _ = command("evaluate", STORED, *arguments, "--forced-bos", "H", *options)
    assert (code, (tmp_path / "out").read_text()) == (0, outputs[0][1])
    assert json.loads((tmp_path / "e.json").read_text())["forced_bos"] == "H"


def test_parity_compares_translations_that_begin_with_the_token(command, tmp_path, monkeypatch):
    """Both configs have the forced BOS; the ladder and beam search are replaced."""
    from twinax.cli.proofs import parity_command

    calls = []
    monkeypatch.setattr(
        parity_command,
        "show_ladder",
        lambda title, **values: Ladder(Report((), ()), Coverage(*[4] * 10), {}, (), 1.0, None, 24, True),
    )
    monkeypatch.setattr(
        parity_command, "show_translations", lambda *values, **keywords: calls.append(values) or (True, [])
    )
    arguments = ("--src", write_text(tmp_path, "a b\n"), "--tgt", write_text(tmp_path, "a b\n"), "--translations")
    command("parity", STORED, STORED, *arguments, "--forced-bos", "H", "--json", tmp_path / "p.json")
    flax, pytorch, *_ = calls.pop()
    ids = load(STORED).tokenizers.tgt.fast.get_vocab()
    assert (flax.config.forced_bos_id, pytorch.config.forced_bos_id) == (ids["H"], ids["H"])
    assert "--forced-bos H" in json.loads((tmp_path / "p.json").read_text())["command"]
    code, _, err = command("parity", STORED, "--forced-bos", "H")
    assert (code, err) == (2, "twinax: --forced-bos H: needs --src, the sentences to translate\n")


@pytest.mark.parametrize(
    ("bos", "message"),
    [
        ("__der__", "forced_bos='__der__': the target tokenizer has no such token; did you mean '__de__'?"),
        ("日", "forced_bos='日': the target tokenizer has no such token"),
        ("31", "forced_bos=31: must be 0 to 30"),
    ],
)
def test_what_is_no_token_is_one_line(bos, message, command, m2m100):
    path = m2m100[1]
    assert command("translate", path, path.parent / "text", "--forced-bos", bos) == (2, "", f"twinax: {message}\n")
    with pytest.raises(DataError, match="forced_bos"):
        load(path).translate(["w1"], forced_bos=int(bos) if bos.isdecimal() else bos)


def test_a_multilingual_family_without_a_language_is_a_warning(command, m2m100, tmp_path):
    _, path = m2m100
    arguments = (path.parent / "text", "--framework", "torch", "--max-length", "3", "--beam-size", "1")
    code, _, err = command("translate", path, *arguments)
    assert code == 0
    assert len([line for line in err.splitlines() if "generation_config.json" not in line]) == 1
    assert f"{path}: a translation's first token selects the language, and the checkpoint sets none" in err
    assert command("translate", path, *arguments, "--forced-bos", "__de__")[2].count("\n") == 1  # the settings
    checkpoint = convert.load(path)
    assert load(path).lacks_language
    changes = {"a language": {"forced_bos_id": 5}, "a language as the start": {"decoder_start_id": 5}}
    for name, change in changes.items():
        convert.save(replace(checkpoint, config=checkpoint.config.replace(**change)), tmp_path / name, layout="m2m100")
        assert not load(tmp_path / name).lacks_language
    assert not load(STORED).lacks_language
