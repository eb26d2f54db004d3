"""Text in, text out, in both frameworks, and the commands for it; the stored model uppercases letters."""

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu import corpus_bleu, corpus_chrf, corpus_ter, sentence_bleu, sentence_chrf

import twinax
from twinax import convert, torch_reference
from twinax.backend.errors import CheckpointError, ConfigError, DataError
from twinax.cli.text.resumable_output import ResumableOutput
from twinax.cli.usage import UsageError
from twinax.configs.decoding import DecodingConfig, SamplingConfig
from twinax.configs.training import TrainingConfig
from twinax.flax_transformer import named_arrays
from twinax.flax_transformer.decoding.search import generate, generate_batches
from twinax.inference.minimum_bayes_risk import expected_utilities
from twinax.inference.scores import corpus_scores
from twinax.inference.translator import Hypothesis, Translator
from twinax.train.text.tokenization import FastTokenizer

MODEL = Path(__file__).parents[1] / "checkpoints" / "v1"
TEXTS = ["a b c", "", "h e d f", "  ", "g g a b c d e f g h", "f b", "d a"]
LARGE = ["A B C", "", "H E D F", "", "G G A B C D D", "F B", "D A"]  # the fifth is truncated to seven tokens and EOS


@pytest.fixture(scope="module")
def translator():
    return twinax.load(MODEL)


def test_texts_keep_their_places(translator):
    assert translator.translate(TEXTS) == LARGE
    assert translator.translate(TEXTS, beam_size=2, framework="torch") == LARGE
    assert translator.translate([]) == []
    assert translator.too_long(TEXTS) == [4]


def test_the_command_tokenizes_a_line_once_and_a_truncated_one_again(tmp_path, command, monkeypatch):
    """In windows too, whose truncated lines keep their numbers."""
    encode, encoded = FastTokenizer.encode_sources, []

    def spy(self, texts, longest=None):
        encoded.extend(texts)
        return encode(self, texts, longest)

    monkeypatch.setattr(FastTokenizer, "encode_sources", spy)
    monkeypatch.setattr(FastTokenizer, "encode", lambda self, texts: pytest.fail(f"tokenized again: {texts}"))
    monkeypatch.setattr("twinax.cli.text.text_commands._FIRST_WINDOW", 2)
    monkeypatch.setattr("twinax.cli.text.text_commands._GROWTH", 1)
    (tmp_path / "text").write_text("\n".join(TEXTS) + "\n")
    status, out, err = command("translate", MODEL, tmp_path / "text")
    assert (status, out.splitlines()) == (0, LARGE)
    assert encoded == [*TEXTS[:6], TEXTS[4], *TEXTS[6:]]
    assert [line for line in err.splitlines() if "truncated" in line] == [
        "twinax: line 5: has more than 8 tokens and was truncated"
    ]


CALLS = {
    "translate": lambda model, texts: model.translate(texts),
    "translate for a first token": lambda model, texts: model.translate(texts, forced_bos="A"),
    "hypotheses": lambda model, texts: model.hypotheses(texts, DecodingConfig()),
    "too_long": lambda model, texts: model.too_long(texts),
    "source_ids": lambda model, texts: model.source_ids(texts),
    "target_ids": lambda model, texts: model.target_ids(texts),
    "score, sources": lambda model, texts: model.score(texts, ["A", "A"]),
    "score, targets": lambda model, texts: model.score(["a", "a"], texts),
}


@pytest.mark.parametrize("call", CALLS)
def test_sentences_are_any_iterable_but_one_sentence(call, translator):
    sentences = ["b", "c a"]
    expected = CALLS[call](translator, sentences)
    for texts in (iter(sentences), tuple(sentences), dict.fromkeys(sentences), np.array(sentences)):
        assert CALLS[call](translator, texts) == expected
    for texts, message in (
        ("b c", r"s is a str: must be a list of sentences; for one sentence, pass \["),
        (b"b", r"s is a bytes: must be a list of sentences$"),
        (None, r"s is a NoneType: must be a list"),
        (("b", None), r"s\[1\] is a NoneType: must be a sentence, a str"),
        ((["b"],), r"s\[0\] is a list: must be a sentence, a str"),
    ):
        with pytest.raises(TypeError, match=message):
            CALLS[call](translator, texts)


def test_each_source_needs_a_target(translator):
    with pytest.raises(DataError, match="2 sources and 1 targets: each source needs one target"):
        translator.score(["a", "b"], ["A"])
    with pytest.raises(TypeError, match="is a list: must be a sentence"):
        translator.attention(["a"], "A")


def test_models_say_what_they_are(translator):
    """Numbers of parameters against the frameworks' own counts."""
    parameters = sum(p.numel() for p in translator.torch.parameters())
    trained = sum(array.size for array in named_arrays(translator.flax, nnx.Param).values())
    assert parameters == trained == 1716
    for model in (translator, translator.flax, translator.flax.quantized(), translator.torch):
        for text in (repr(model), str(model), model._repr_html_()):
            assert "1,716 in float32" in text
            assert "1 encoder, 1 decoder" in text
    assert repr(translator).startswith(f"{MODEL}\n")
    assert "joint" in repr(translator)
    assert "none that can be read" in repr(Translator(replace(translator.checkpoint, files={})))
    assert len(repr(translator.flax).splitlines()) < 12


@given(
    st.builds(
        TrainingConfig, eps=st.floats(1e-9, 1), seed=st.integers(0, 9), optimizer=st.sampled_from(["adam", "adamw"])
    )
)
def test_configs_print_what_differs_from_the_defaults(config):
    assert eval(repr(config)) == config
    assert ("seed=" in repr(config)) == (config.seed != 0)
    assert '<td style="text-align:left">seed</td>' in config._repr_html_()


def test_hypotheses_are_those_of_the_search(translator):
    decoding = DecodingConfig(beam_size=3, n_best=2)
    flax_output = translator.hypotheses(TEXTS, decoding)
    torch_output = translator.hypotheses(TEXTS, decoding, "torch")
    assert [[h.tokens for h in hypotheses] for hypotheses in flax_output] == [
        [h.tokens for h in hs] for hs in torch_output
    ]
    assert [len(hypotheses) for hypotheses in flax_output] == [2, 0, 2, 0, 2, 2, 2]
    expected = generate(translator.flax, np.array([translator.tokenizers.src.encode_sources(["d a"])[0]]), decoding)
    assert [list(h.tokens) for h in flax_output[6]] == expected.sentences()[0]
    np.testing.assert_allclose([h.score for h in flax_output[6]], expected.scores[0], rtol=1e-5)


def test_few_lengths_are_compiled(translator, monkeypatch):
    """Block lengths are multiples of eight, or the model's max_length."""
    lengths, search = set(), generate_batches

    def counting(models, batches, *rest):
        batches = [*batches]
        lengths.update(src.shape[1] for batch in batches for src in batch.sources)
        return search(models, batches, *rest)

    monkeypatch.setattr("twinax.inference.translator.generate_batches", counting)
    monkeypatch.setattr("twinax.inference.batches._TOKENS_ON_CPU", 1)
    translator.translate(["a", "a b", "a b c", "a b c d e"], beam_size=1)
    assert lengths == {8}
    monkeypatch.setattr("twinax.inference.translator._MULTIPLE", 3)
    translator.translate(["a", "a b c", "g g a b c d e f g h"], beam_size=1)
    assert lengths == {8, 3, 6}


def test_scores_are_of_the_pair_that_was_given(translator):
    sources, targets = ["a b", "c", "h e d f"], ["A B", "D", "H E D F"]
    flax, torch = (translator.score(sources, targets, framework) for framework in ("flax", "torch"))
    np.testing.assert_allclose(flax, torch, rtol=1e-5)
    assert flax[1] < min(flax[0], flax[2])
    (hypothesis,) = translator.hypotheses(["h e d f"], DecodingConfig(length_exponent=0.0))[0]
    assert flax[2] == pytest.approx(hypothesis.score, rel=1e-5)
    with pytest.raises(DataError, match="pair 2: the source '' has no token"):
        translator.score(["a", ""], ["A", "A"])
    with pytest.raises(DataError, match="pair 1: a side has more than 8 tokens"):
        translator.score(["a"], ["A B C D E F G H"])


def test_attention_of_a_translation(translator):
    looked = translator.attention("a b c", "A B C")
    assert (looked.targets, looked.sources) == (["A", "B", "C", "</s>"], ["a", "b", "c", "</s>"])
    np.testing.assert_allclose(looked.weights.sum(1), 1, rtol=1e-5)
    assert looked.weights[:3].argmax(1).tolist() == [0, 1, 2]


def test_attention_of_a_hypothesis_has_its_tokens(translator):
    """Their text would be encoded to other ones."""
    letters = translator.target_ids(["A B"])[0][:-1]
    unk = translator.tokenizers.tgt.id_of("<unk>")
    looked = translator.attention("a b", Hypothesis("A B", 0.0, (*letters, unk)))
    assert looked.targets == ["A", "B", "<unk>", "</s>"]
    longest = translator.attention("a b", Hypothesis("", 0.0, (unk,) * translator.config.max_length))
    assert longest.targets == ["<unk>"] * translator.config.max_length


def test_a_directory_without_a_tokenizer_translates_no_text(tmp_path):
    from parity_tests.support.conversion import random_model

    random_model("BART").save_pretrained(tmp_path / "bart")
    bare_translator = twinax.load(tmp_path / "bart")
    assert bare_translator.config.d_model > 0
    with pytest.raises(CheckpointError, match=r"it needs tokenizer\.json, or vocab\.json and merges\.txt"):
        bare_translator.translate(["a"])


def test_scores_are_sacrebleu_s():
    predictions, references = ["The small House stands", "a dog"], ["The small house stands here", "a dog"]
    scores = {score.name: score for score in corpus_scores(predictions, [references], "intl")}
    assert scores["BLEU"].value == corpus_bleu(predictions, [references], tokenize="intl").score
    lowercase_bleu = corpus_bleu(predictions, [references], tokenize="intl", lowercase=True).score
    assert scores["BLEU, lower case"].value == lowercase_bleu
    assert scores["chrF"].value == corpus_chrf(predictions, [references]).score
    assert scores["TER"].value == corpus_ter(predictions, [references]).score
    assert scores["exact match"].value == 50
    assert "case:mixed" in scores["BLEU"].signature
    assert "tok:intl" in scores["BLEU, lower case"].signature
    with pytest.raises(DataError, match="tokenize='nope': must be one of none, zh"):
        corpus_scores(predictions, [references], "nope")
    with pytest.raises(DataError, match="1 translations and 2 references"):
        corpus_scores(predictions[:1], [references])


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("src").write_text("".join(text + "\n" for text in TEXTS))
    Path("tgt").write_text("".join(text + "\n" for text in LARGE))
    return tmp_path


def test_translate_a_file(command, files):
    code, out, err = command("translate", MODEL, "src", "--attention", "a.png")
    assert (code, out) == (0, "".join(text + "\n" for text in LARGE))
    assert err == "twinax: line 5: has more than 8 tokens and was truncated\n"
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("window", [2, 256])
def test_samples_depend_on_seed_and_line_alone(window, command, monkeypatch, files):
    """Whatever the windows and the framework are; a line's samples carry its number."""
    monkeypatch.setattr("twinax.cli.text.text_commands._FIRST_WINDOW", window)
    words = ("translate", MODEL, "src", "--samples", "3", "--temperature", "3", "--seed")
    code, out, _ = command(*words, "1")
    rows = [line.split("\t") for line in out.splitlines()]
    assert (code, [int(number) for number, _ in rows]) == (0, [1, 1, 1, 2, 3, 3, 3, 4, 5, 5, 5, 6, 6, 6, 7, 7, 7])
    assert command(*words, "1", "--framework", "torch")[1] == out
    assert command(*words, "2")[1] != out
    sampling = SamplingConfig(seed=1, temperature=3.0)
    expected = twinax.load(MODEL).hypotheses(
        TEXTS[2:3], DecodingConfig(beam_size=3, n_best=3, sampling=sampling), first=2
    )[0]
    assert [text for number, text in rows if number == "3"] == [h.text for h in expected]
    assert len({text for _, text in rows}) > 4


@pytest.mark.parametrize(("utility", "oracle"), [("chrf", sentence_chrf), ("bleu", sentence_bleu)])
def test_minimum_bayes_risk_takes_the_sample_that_is_most_like_all(utility, oracle, command, files):
    words = ("translate", MODEL, "src", "--samples", "6", "--temperature", "2", "--scores")
    _, out, _ = command(*words)
    samples = {}
    for line in out.splitlines():
        number, _, text = line.split("\t")
        samples.setdefault(number, []).append(text)
    utilities = {
        number: [np.mean([oracle(text, [other]).score for other in texts]) for text in texts]
        for number, texts in samples.items()
    }
    code, out, _ = command(*words, "--mbr", utility, "--n-best", "2")
    rows = [line.split("\t") for line in out.splitlines()]
    assert code == 0
    for number, texts in samples.items():
        if len(texts) > 1:
            found = [(float(value), text) for n, value, text in rows if n == number]
            assert [value for value, _ in found] == pytest.approx(sorted(utilities[number])[:-3:-1], abs=1e-6)
            assert found[0][1] == texts[int(np.argmax(utilities[number]))]
    best = [text for _, _, text in rows][::2]
    assert command(*words[:-1], "--mbr", utility)[1].splitlines()[0] == best[0]
    code, _, _ = command("evaluate", *words[1:2], "--src", "src", "--tgt", "tgt", *words[3:-1], "--mbr", utility)
    assert code == 0


def test_translations_begin_with_their_prefixes(command, monkeypatch, files):
    monkeypatch.setattr("twinax.cli.text.text_commands._FIRST_WINDOW", 2)
    prefixes = ["C C", "", "", "A", "B", "", "D A"]
    Path("prefix").write_text("".join(f"{prefix}\n" for prefix in prefixes))
    code, out, err = command("translate", MODEL, "src", "--prefix", "prefix")
    assert code == 0, err
    lines = out.splitlines()
    assert all(
        line.startswith(prefix) for line, prefix, text in zip(lines, prefixes, TEXTS, strict=True) if text.strip()
    )
    assert [line for line, prefix in zip(lines, prefixes, strict=True) if not prefix] == [LARGE[1], LARGE[2], LARGE[5]]
    assert command("translate", MODEL, "src", "--prefix", "prefix", "--framework", "torch")[1] == out
    Path("prefix").write_text("A\n" * 6)
    message = "twinax: --prefix prefix: must have as many lines as src, empty for no prefix\n"
    assert command("translate", MODEL, "src", "--prefix", "prefix") == (2, "", message)
    Path("prefix").write_text("A\n" + "B " * 12 + "\n" + "A\n" * 5)
    assert "prefix 'B B B" in command("translate", MODEL, "src", "--prefix", "prefix")[2]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
    Path("prefix").write_text("A\n")
    assert "--prefix prefix: has fewer lines than the source" in command("translate", MODEL, "--prefix", "prefix")[2]


def test_forbidden_words_and_ratios(command, files):
    Path("words").write_text("A\nB C\n\n")
    code, out, _ = command("translate", MODEL, "src", "--forbidden-words", "words", "--beam-size", "2")
    assert (code, out.splitlines()[2]) == (0, LARGE[2])
    assert not any("A" in line or "B C" in line for line in out.splitlines())
    _, out, _ = command("translate", MODEL, "src", "--max-length-ratio", "0.5")
    assert [len(line.split()) + 1 for line in out.splitlines() if line] == [2, 3, 4, 2, 2]  # of 4, 5, 8, 3 and 3 tokens


@pytest.fixture
def other(files):
    """A file with the stored model, its weights changed at random."""
    checkpoint, rng = convert.load(MODEL), np.random.default_rng(0)
    arrays = {
        name: array + 0.3 * np.std(array) * rng.standard_normal(array.shape).astype(array.dtype)
        for name, array in checkpoint.arrays.items()
    }
    convert.save(replace(checkpoint, arrays=arrays, training=None), "other.pt")
    return "other.pt"


def test_an_ensemble_translates_and_scores_by_mean_probabilities(command, other):
    words = ("translate", MODEL, "src", "--n-best", "3", "--scores")
    outputs = {name: command(*words, *flags)[1] for name, flags in ENSEMBLES.items()}
    assert outputs["twice"] == outputs["alone"]
    assert len({outputs[name] for name in ("alone", "both", "log-linear")}) == 3
    rows = [[line.split("\t") for line in outputs[name].splitlines()] for name in ("both", "both in PyTorch")]
    assert [(row[0], row[2]) for row in rows[0]] == [(row[0], row[2]) for row in rows[1]]
    Path("a").write_text("a b\nc d e\n")
    Path("b").write_text("A B\nC E\n")
    scores = command("score", MODEL, "--src", "a", "--tgt", "b", "--ensemble", other)[1]
    members = [twinax.load(MODEL), twinax.load(other)]
    for value, source, target in zip(scores.split(), ("a b", "c d e"), ("A B", "C E"), strict=True):
        src, tgt = (np.array(ids) for ids in (members[0].source_ids([source]), members[0].target_ids([target])))
        tokens = [torch_reference.score(m.torch, torch.tensor(src), torch.tensor(tgt)).tokens[0] for m in members]
        assert float(value) == pytest.approx(np.log(np.mean(np.exp(tokens), 0)).sum(), abs=1e-4)


def test_an_ensemble_is_evaluated(command, other):
    Path("a").write_text("a b\nc d e\n")
    for flags in ((), ("--log-linear",)):
        together = ("--ensemble", other, *flags)
        out = command("translate", MODEL, "a", *together)[1]
        words = ("evaluate", MODEL, *together, "--src", "a", "--tgt", "a", "--output", "out", "--json", "scores.json")
        assert command(*words)[0] == 0
        assert Path("out").read_text() == out
        document = json.loads(Path("scores.json").read_text())
        assert (document["checkpoint"], document.get("log_linear", False)) == (f"{MODEL} + {other}", bool(flags))
        Path("out").unlink()
    code, _, err = command("evaluate", "a", "--ensemble", other, "--src", "a", "--tgt", "a")
    assert (code, "the first system, and a is a text file" in err) == (2, True)


ENSEMBLES = {
    "alone": (),
    "twice": ("--ensemble", MODEL),
    "both": ("--ensemble", "other.pt"),
    "both in PyTorch": ("--ensemble", "other.pt", "--framework", "torch"),
    "log-linear": ("--ensemble", "other.pt", "--log-linear"),
}


def test_models_of_other_tokens_are_no_ensemble(command, files):
    checkpoint = convert.load(MODEL)
    document = json.loads(checkpoint.files["tokenizer/tokenizer.json"])
    vocabulary = document["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    swapped = {**checkpoint.files, "tokenizer/tokenizer.json": json.dumps(document).encode()}
    convert.save(replace(checkpoint, files=swapped, training=None), "swapped.pt")
    code, out, err = command("translate", MODEL, "src", "--ensemble", "swapped.pt")
    assert (code, out) == (2, "")
    assert err.startswith(
        f"twinax: {MODEL} and swapped.pt: their target vocabularies differ in 2 tokens, such as 'A'; "
    )


def test_expected_utilities_of_three_translations():
    """By hand: "a" equals two of three samples, and shares nothing with the third."""
    assert expected_utilities(["a", "b", "a"], "chrf") == pytest.approx([200 / 3, 100 / 3, 200 / 3])
    with pytest.raises(ConfigError, match=r"^utility='ter': must be 'chrf' or 'bleu'$"):
        expected_utilities(["a"], "ter")


class Terminal(io.StringIO):
    """A stream that reports itself as a terminal."""

    def isatty(self):
        return True


def test_a_bar_on_the_terminal_takes_nothing_from_the_output(command, monkeypatch, files):
    monkeypatch.setattr(sys, "stderr", Terminal())
    code, out, _ = command("translate", MODEL, "src")
    assert (code, out) == (0, "".join(text + "\n" for text in LARGE))


def test_long_files_come_window_by_window_and_the_log_says_how_far(command, monkeypatch, files):
    monkeypatch.setattr("twinax.cli.text.text_commands._FIRST_WINDOW", 2)
    monkeypatch.setattr("twinax.train.tracking.progress._QUIET", -1.0)
    Path("src").write_text("\n\n" + Path("src").read_text())
    code, out, err = command("translate", MODEL, "src", "--attention", "a.png")
    assert (code, out) == (0, "\n\n" + "".join(text + "\n" for text in LARGE))
    last_line = [line for line in err.splitlines() if line.startswith("lines")][-1]
    assert re.fullmatch(r"lines, [\d,]+ per second: 9 of 9", last_line)
    assert "twinax: line 7: has more than 8 tokens" in err
    assert Path("a.png").is_file()
    Path("src").write_text("\n\n \n")
    assert command("translate", MODEL, "src", "--attention", "b.png")[0] == 2


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr("twinax.cli.text.text_commands._FIRST_WINDOW", 2)
    monkeypatch.setattr("twinax.cli.text.text_commands._GROWTH", 1)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("written", [0, 1, 2])
def test_an_interrupted_output_goes_on(written, command, monkeypatch, files):
    """No window is translated twice; what a killed process wrote after its last state is written again."""
    command_of = ("translate", MODEL, "src", "--output", "out", "--scores", "--beam-size", "1")
    write, calls = ResumableOutput.write, []

    def interrupted(self, sources, lines):
        if len(calls) == written:
            with Path("out.part").open("a") as file:
                file.write("half a li")
            raise KeyboardInterrupt
        calls.append(sources)
        write(self, sources, lines)

    with monkeypatch.context() as context:
        context.setattr(ResumableOutput, "write", interrupted)
        assert command(*command_of)[0] == 130
    assert not Path("out").exists()
    for other in (("--beam-size", "2"), ("--n-best", "2", "--beam-size", "2")):
        status, _, err = command(*command_of, *other)
        assert (status, err.count("\n")) == (2, 1)
        assert err.startswith("twinax: out.part: was begun with other settings (")
    if written:
        text = Path("src").read_text()
        Path("src").write_text("x" + text)
        status, _, err = command(*command_of)
        assert (status, "out.part: was begun with other source lines" in err) == (2, True)
        Path("src").write_text("")
        status, _, err = command(*command_of)
        assert (status, "out.part: was begun with a longer source" in err) == (2, True)
        Path("src").write_text(text)
    hypotheses, translated = Translator.hypotheses, []

    def spy(self, texts, *rest):
        translated.extend(texts.texts)
        return hypotheses(self, texts, *rest)

    monkeypatch.setattr(Translator, "hypotheses", spy)
    assert command(*command_of)[:2] == (0, "")
    assert translated == TEXTS[2 * written :]
    _, out, _ = command("translate", MODEL, "src", "--scores", "--beam-size", "1")
    assert Path("out").read_text() == out
    assert sorted(path.name for path in Path().iterdir() if path.name.startswith("out")) == ["out"]
    status, _, err = command(*command_of)
    assert (status, err) == (2, "twinax: out: exists; remove it, or name another file\n")


def test_an_output_that_is_in_use_or_not_ours_is_left_alone(command, files):
    Path("out.part").write_text("mine\n")
    status, _, err = command("translate", MODEL, "src", "--output", "out")
    assert (status, err) == (2, "twinax: out.part: exists without out.part.json; remove it, or name another output\n")
    assert Path("out.part").read_text() == "mine\n"
    Path("out.part").unlink()
    first = ResumableOutput("out", {})
    with pytest.raises(UsageError, match=r"^out.part: another process writes it; wait for it, or name another output"):
        ResumableOutput("out", {})
    first.write(["a"], ["A"])
    first._file.close()
    Path("out.part").write_text("")
    with pytest.raises(UsageError, match=r"^out.part.json: cannot be used \(out.part is shorter than it states\)"):
        ResumableOutput("out", {})


def test_the_longest_translation(command, files):
    code, out, _ = command("translate", MODEL, "src", "--max-length", "3")
    assert (code, out.splitlines()[2]) == (0, "H E")
    code, _, err = command("translate", MODEL, "src", "--max-length", "9")
    assert (code, "max_length=9" in err) == (2, True)


def test_translate_standard_input_with_scores(command, monkeypatch, files):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a b\n\nf b")))
    code, out, _ = command("translate", MODEL, "--n-best", "2", "--scores", "--beam-size", "2")
    rows = [line.split("\t") for line in out.splitlines()]
    assert code == 0
    assert [row[0] for row in rows] == ["1", "1", "2", "3", "3"]
    assert [rows[i][2] for i in (0, 2, 3)] == ["A B", "", "F B"]
    assert float(rows[0][1]) > float(rows[1][1])


def test_translate_what_is_typed(command, monkeypatch, files):
    input_lines = iter(["a b", "", "f b"])

    def read_line(prompt):
        line = next(input_lines, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", read_line)
    code, out, _ = command("translate", MODEL)
    assert (code, out) == (0, "A B\n\nF B\n")


def test_evaluate(command, files):
    arguments = ("--src", "src", "--tgt", "tgt", "--json", "e.json", "--output", "out")
    code, out, err = command("evaluate", MODEL, *arguments)
    assert code == 0
    assert Path("out").read_text() == Path("tgt").read_text()
    report = json.loads(Path("e.json").read_text())
    assert (report["pairs"], report["cut"]) == (len(TEXTS), 1)
    assert {s["name"]: round(s["value"]) for s in report["scores"]}["BLEU"] == 100
    assert "100.00" in out
    assert "case:lc" in out.replace("\n", "")
    assert err == "twinax: truncated 1 source with more tokens than the model's maximum\n"


def test_evaluate_a_dataset(command, files):
    Path("tasks.txt").write_text("IN: a b c OUT: A B C\nIN: h e d f OUT: H E D\nIN: f b OUT: F B\nIN: d a OUT: D A\n")
    code, _, _ = command("evaluate", MODEL, "--dataset", "tasks.txt", "--beam-size", "1", "--json", "e.json")
    assert code == 0
    report = json.loads(Path("e.json").read_text())
    assert report["dataset"] == "tasks.txt"
    assert "src" not in report
    assert report["scores"][-1] == {"name": "exact match", "value": 75.0, "signature": "n:4|case:mixed|space:no"}


def test_score(command, files):
    Path("a").write_text("a b\nc\n")
    Path("b").write_text("A B\nD\n")
    code, out, _ = command("score", MODEL, "--src", "a", "--tgt", "b")
    assert code == 0
    assert [float(line) for line in out.splitlines()] == pytest.approx(
        twinax.load(MODEL).score(["a b", "c"], ["A B", "D"]), abs=1e-5
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("translate", "nowhere"), "nowhere: there is no such file or directory"),
        (("translate", "."), "is neither a run, nor a checkpoint, nor a Hugging Face directory"),
        (("translate", MODEL, "nowhere"), "nowhere: there is no such file"),
        (("translate", MODEL, "utf16"), "utf16: is UTF-16; save it as UTF-8"),
        (
            ("translate", MODEL, "src", "--top-p", "0.9", "--beam-size", "2"),
            "--top-p: samples, without a beam; omit --beam-size, and set --samples for several per line",
        ),
        (("translate", MODEL, "src", "--mbr", "bleu"), "--mbr bleu: compares samples; set their number with --samples"),
        (
            ("translate", MODEL, "src", "--samples", "2", "--mbr", "bleu", "--n-best", "3"),
            "--samples 2: must be at least --n-best 3",
        ),
        (("translate", MODEL, "src", "--samples", "0"), "--samples 0: must be at least 1"),
        (("translate", MODEL, "src", "--top-p", "0"), "top_p=0.0: must be above 0 and at most 1; 1 keeps all tokens"),
        (("translate", MODEL, "src", "--n-best", "0"), "n_best=0: must be"),
        (("translate", MODEL, "src", "--n-best", "9"), "n_best=9: must not be above beam_size=5"),
        (("translate", MODEL, "src", "--attention", "x.jpeg"), "--attention x.jpeg: must end in .png, .pdf or .svg"),
        (("translate", MODEL, "src", "--attention", "no/x.png"), "no/x.png: there is no directory no"),
        (("evaluate", MODEL, "--src", "src", "--tgt", "short"), "src has 7 lines and short has 1"),
        (("evaluate", MODEL, "--src", "src", "--tgt", "tgt", "--tokenize", "x"), "tokenize='x': must be one of"),
        (("evaluate", MODEL), "dataset=None: give src and tgt, or dataset, or store, or mixture"),
        (("evaluate", MODEL, "--src", "src"), "src='src': needs tgt too"),
        (("evaluate", MODEL, "--dataset", "no.txt"), "no.txt: there is no such file"),
        (("evaluate", MODEL, "--dataset", "a.tsv", "--split", "test"), "a.tsv': a single file has no split (test)"),
        (("evaluate", MODEL, "--src", "src", "--tgt", "tgt", "--output", "no/x"), "no/x: there is no directory no"),
        (("score", MODEL, "--src", "src", "--tgt", "tgt"), "src and tgt, line 2: the source '' has no token"),
        (("translate", MODEL, "folder"), "folder: is a directory; pass a text file"),
        (("translate", "google-t5/t5-small"), "hf download google-t5/t5-small --local-dir t5-small"),
    ],
)
def test_what_is_wrong_is_one_line(command, files, arguments, message):
    Path("utf16").write_bytes("a\n".encode("utf-16"))
    Path("short").write_text("A\n")
    Path("folder").mkdir()
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("twinax: ")
    assert err.count("\n") == 1
    assert message in err


def test_products_of_8_bit_integers(translator):
    quantized = twinax.load(MODEL, quantize="int8")
    assert quantized.translate(TEXTS) == LARGE
    scores, exact = (model.score(["a b c"], ["A B C"]) for model in (quantized, translator))
    assert scores != exact
    np.testing.assert_allclose(scores, exact, atol=0.1)
    with pytest.raises(ConfigError, match="framework='torch': has no int8; use framework='flax', or omit quantize"):
        quantized.with_config(quantized.config).translate(["a"], framework="torch")
    with pytest.raises(ConfigError, match="quantize='int4': must be None or 'int8'"):
        twinax.load(MODEL, quantize="int4")
