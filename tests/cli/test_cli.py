"""The command line, as a user calls it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from twinax import TransformerConfig
from twinax.parity.coverage import Coverage
from twinax.parity.harness import Report
from twinax.parity.ladder import Ladder
from twinax.presets.models import PRESETS

TWINAX = Path(sys.executable).parent / "twinax"
STORED = Path(__file__).parents[1] / "checkpoints" / "v1"


@pytest.fixture
def twinax(command):
    """Call the command in this process; `test_wrong_seed` starts the installed one."""

    def call(*arguments):
        status, out, err = command(*arguments)
        return subprocess.CompletedProcess(arguments, status, out, err)

    return call


@pytest.fixture
def shallow(monkeypatch):
    """The preset `tiny` with one layer per side."""
    config = TransformerConfig.preset("tiny", num_encoder_layers=1, num_decoder_layers=1)
    monkeypatch.setitem(PRESETS, "tiny", config)


@pytest.mark.usefixtures("shallow")
def test_parity_prints_the_ladder_and_exits_with_0(twinax, monkeypatch):
    from twinax.parity import ladder

    monkeypatch.setattr(ladder, "POOLED", 4)
    result = twinax("parity", "tiny", "--seed", "1")
    assert result.returncode == 0, result.stderr
    for rung in ("masks", "attention weights", "sublayers", "encoder", "decoder", "logits", "gradients"):
        (line,) = [line for line in result.stdout.splitlines() if line.startswith(f"│ {rung} ")]
        assert line.split("│")[-2].strip() == "equal"


@pytest.mark.usefixtures("shallow")
def test_parity_exits_with_1_where_the_twins_differ(monkeypatch, capsys):
    from twinax.cli import commands
    from twinax.parity import ladder
    from twinax.torch_reference import layers

    monkeypatch.setattr(ladder, "_ratios", lambda *_: {})  # float64 is enough
    monkeypatch.setattr(ladder, "compare_twins", lambda *_: None)  # the ladder's own tests have it
    monkeypatch.setitem(layers.EMBEDDING_SCALES, "sqrt_d_model", lambda d_model: 1.0)
    monkeypatch.setattr(sys, "argv", ["twinax", "parity", "tiny"])
    with pytest.raises(SystemExit) as exit_info:
        commands.main()
    assert exit_info.value.code == 1
    output = capsys.readouterr().out
    assert "DIFFERENT" in output
    assert "reproduce: twinax parity tiny --seed 0" in output
    assert "computation order: src_input.embedded" in output


@pytest.mark.parametrize("command", [[TWINAX], [sys.executable, "-m", "twinax"]])
def test_wrong_seed(command):
    result = subprocess.run([*command, "parity", "tiny", "--seed", "-1"], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "twinax: --seed -1: must be at least 0\n"


def test_wrong_preset(twinax):
    result = twinax("parity", "huge")
    assert result.returncode == 2
    assert "huge" in result.stderr
    assert "tiny" in result.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["parity", "--help"]])
def test_help_has_an_example(arguments, twinax):
    result = twinax(*arguments)
    assert result.returncode == 0
    assert "Example: twinax parity tiny" in result.stdout


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A small Marian model as `transformers` writes it."""
    from parity_tests.support.conversion import random_model

    folder = tmp_path_factory.mktemp("marian")
    random_model("Marian").save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_parity_of_a_directory_has_transformers_for_a_third(directory, twinax, monkeypatch):
    from twinax.parity import ladder

    monkeypatch.setattr(ladder, "POOLED", 4)
    result = twinax("parity", str(directory))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "┃ transformers ┃" in result.stdout
    for rung in ("attention weights", "encoder", "decoder", "logits", "gradients"):
        (line,) = [line for line in result.stdout.splitlines() if line.startswith(f"│ {rung} ")]
        assert float(line.split("│")[3]) <= 1e-12
        assert line.split("│")[-2].strip() == "equal"


@pytest.mark.filterwarnings("ignore")
def test_parity_of_a_directory_sees_where_transformers_differs(directory, monkeypatch, capsys):
    from twinax.cli import commands
    from twinax.cli.proofs import parity_command
    from twinax.parity import ladder

    right = parity_command.load_oracle

    def load_changed_oracle(*args):
        oracle = right(*args)
        return lambda batch: {name: value + (name == "logits") * 1e-9 for name, value in oracle(batch).items()}

    monkeypatch.setattr(parity_command, "load_oracle", load_changed_oracle)
    monkeypatch.setattr(ladder, "POOLED", 2)
    monkeypatch.setattr(sys, "argv", ["twinax", "parity", str(directory)])
    with pytest.raises(SystemExit) as exit_info:
        commands.main()
    assert exit_info.value.code == 1
    output = capsys.readouterr().out
    assert "Flax and transformers: 1 of " in output
    assert "PyTorch and transformers: 1 of " in output
    assert "computation order: logits" in output


CLIMBED = Ladder(Report((), ()), Coverage(*[4] * 10), {}, (), 1.0, None, 24, True)


@pytest.mark.filterwarnings("ignore")
def test_parity_of_a_directory_without_transformers(command, directory, monkeypatch):
    from twinax.cli.proofs import parity_command

    calls = []
    monkeypatch.setattr(parity_command, "find_spec", lambda name: None)
    monkeypatch.setattr(parity_command, "show_ladder", lambda title, **keywords: calls.append(keywords) or CLIMBED)
    code, _, err = command("parity", directory)
    assert (code, err) == (1, "twinax: transformers is not installed; only the twins are compared with each other\n")
    assert "oracle" not in calls[0]


@pytest.mark.filterwarnings("ignore")
def test_a_directory_that_transformers_refuses(directory, tmp_path, twinax):
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"use_cache": "no"}))
    result = twinax("parity", str(tmp_path))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"twinax: {tmp_path}: transformers cannot load it: ")
    assert "use_cache" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (
            "nowhere/model",
            "nowhere/model: is neither a preset (tiny, small, base, big, t5_small) nor a checkpoint; for a model of "
            "the Hugging Face Hub, run: hf download nowhere/model --local-dir model",
        ),
        ("smal", "smal: is neither a preset (tiny, small, base, big, t5_small) nor a checkpoint; did you mean small?"),
        (
            ".",
            ".: is an empty directory: it has no config.json; pass a run, a Hugging Face directory "
            "(config.json and weights), a .safetensors or .pt file, a fairseq checkpoint or a Marian .npz",
        ),
        ("x" * 300, f"{'x' * 300}: is neither a preset (tiny, small, base, big, t5_small) nor a checkpoint"),
    ],
)
def test_parity_of_what_is_no_model(model, line, tmp_path, monkeypatch, twinax):
    monkeypatch.chdir(tmp_path)
    result = twinax("parity", model)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"twinax: {line}\n")


def test_audit(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    small = {"d_model": 16, "num_heads": 2, "d_ff": 8, "num_encoder_layers": 1, "num_decoder_layers": 1}
    config = TransformerConfig.published("lucky_glass", as_published=True, src_vocab_size=9, tgt_vocab_size=9, **small)
    Path("c.json").write_text(config.to_json())
    code, out, _ = command("audit", "c.json", "--json", "a.json", "--report", "a.html")
    assert code == 1
    page = Path("a.html").read_text()
    assert "Audit of <code>c.json</code>" in page
    assert "Repaired by <code>cross_attention_residual=&#39;add&#39;</code>" in page
    assert "weights: random, because a config has none" in page
    assert "twinax audit c.json --seed 0" in page
    assert "cross_attention_residual='add'" in out
    report = json.loads(Path("a.json").read_text())
    assert (report["dtype"], report["dtype_reason"]) == ("float64", "")
    assert report["mistakes"][0]["repaired"] == "cross_attention_residual='add'"
    assert {"question": "Does the output depend on the source?", "ok": False}.items() <= report["answers"][4].items()
    code, out, err = command("audit", "lucky")
    assert (code, out) == (2, "")
    assert err.endswith(" or a checkpoint; did you mean lucky_glass?\n")
    own = "audit a module of your own from Python, with twinax.audit (docs/audit.md)"
    assert command("audit", "m.py:Model") == (2, "", f"twinax: m.py:Model: {own}\n")
    Path("d.json").write_text(config.replace(max_length=4).to_json())
    code, _, err = command("audit", "d.json")
    assert (code, err.splitlines()) == (2, [f"twinax: d.json: {err.partition('d.json: ')[2].strip()}"])


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Two parallel files in the current directory."""
    monkeypatch.chdir(tmp_path)
    lines = [" ".join("abcdefg"[i % 7 : i % 7 + 1 + i % 5]) for i in range(60)]
    Path("a.de").write_text("\n".join(lines) + "\n")
    Path("a.en").write_text("\n".join(lines).upper() + "\n")
    return ["--src", "a.de", "--tgt", "a.en"]


def test_data_prints_the_corpus(command, corpus):
    sizes = ["--tokenizer.kind", "word", "--batches.tokens", "40", "--held_out", "6", "--model.max-length", "5"]
    code, out, err = command("data", *corpus, *sizes, "--plot", "lengths.png")
    assert code == 0
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line[:1] == "│"]
    table = {row[0]: row[1:] for row in cells}
    pairs_read, pairs_kept, pairs_too_long = (table[name] for name in ("pairs read", "kept", "dropped: too long"))
    assert pairs_read == ["54", "6"]
    assert [int(k) + int(d) for k, d in zip(pairs_kept, pairs_too_long, strict=True)] == [54, 6]
    assert int(pairs_too_long[0]) > 0
    assert table["vocabulary, source and target"][0] == "18, 18"
    assert [name for name in table if name.startswith("shapes: ")]
    assert f"dropped 0 with an empty side and {pairs_too_long[0]} longer than 5 source or 5 target tokens" in err
    assert "tokens per word: 1.00 in sources, 1.00 in targets" in err
    share = round(100 * int(pairs_too_long[0]) / 54)
    assert f"warning: {share}% of the train pairs are dropped" in err
    assert Path("lengths.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in Path().iterdir()) == ["a.de", "a.en", "lengths.png"]


def test_data_of_weights_to_start_from_has_their_tokenizer(command, corpus):
    code, out, _ = command("data", *corpus, "--init-from", str(STORED))
    assert code == 0
    assert "20, 20" in out  # the letters that the stored model knows
    dropout = ("--tokenizer.bpe-dropout", "0.1")  # of the run, not of the tokenizer
    _, _, err = command("train", *corpus, "--init-from", str(STORED), *dropout)
    assert "bpe_dropout=0.1: needs kind='bpe', not 'word'" in err
    code, _, err = command("data", *corpus, "--plot", "x.foo")
    assert (code, err) == (2, "twinax: --plot x.foo: must end in .png, .pdf or .svg\n")


def test_train_prints_its_config(command, corpus):
    flags = ["--model.d-model", "64", "--loop.epochs", "3", "--print-config"]
    code, out, err = command("train", *corpus, *flags)
    config = json.loads(out)
    assert code == 0
    assert "the corpus determines null values" in err
    assert (config["corpus"]["src"], config["model"]["d_model"], config["loop"]["epochs"]) == ("a.de", 64, 3)
    code, out, _ = command("train", "multi30k_de_en", *corpus, "--print-config")
    config = json.loads(out)
    assert (config["corpus"]["src"], config["corpus"]["dataset"], config["model"]["d_model"]) == ("a.de", None, 128)
    for flag, other_flag in (("updates", "epochs"), ("epochs", "updates")):
        _, out, _ = command("train", "multi30k_de_en", *corpus, f"--loop.{flag}", "7", "--print-config")
        loop = json.loads(out)["loop"]
        assert (loop[flag], loop[other_flag]) == (7, None)
    code, out, _ = command("train", "scan", *corpus, "--out", "scan", "--print-config")
    assert (code, json.loads(out)["corpus"]["src"]) == (0, "a.de")
    assert not Path("runs").exists()


def test_training_from_trained_weights_has_settings_of_its_own(command, corpus):
    """Not of a predefined run, and flags override them."""

    def settings(*arguments):
        code, out, _ = command("train", *arguments, *corpus, "--print-config")
        assert code == 0
        training = json.loads(out)["training"]
        return training["learning_rate"], training["warmup_updates"]

    tuned = ("--init-from", str(STORED))
    assert (settings(), settings(*tuned)) == ((1e-3, 1000), (1e-3, 100))  # its width is 8
    assert settings(*tuned, "--training.learning-rate", "0.01", "--training.warmup-updates", "7") == (0.01, 7)
    assert settings("multi30k_de_en", *tuned) == settings("multi30k_de_en")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give src and tgt, or dataset, or store, or mixture"),
        (
            ["multi30k_en"],
            "twinax: multi30k_en: is neither a predefined run (multi30k_de_en, multi30k_en_de, ",
        ),
        (["--src", "a.de"], "needs tgt too"),
        (["--src", "a.de", "--tgt", "nowhere"], "twinax: nowhere: there is no such file"),
        (["--src", "a.de", "--tgt", "short"], "twinax: a.de has 60 lines and short has 1: they must have"),
        (["CORPUS", "--model.d-modl", "5"], "--model.d-model"),
        (["CORPUS", "--model.d-model", "5"], "d_model=5 is not divisible by it"),
        (["CORPUS", "--model.pad-id", "5"], "twinax: --model.pad-id: the tokenizer determines it"),
        (["CORPUS", "--loop.updates", "5", "--loop.epochs", "5"], "updates=5, epochs=5: give one of them"),
        (["CORPUS", "--training.learning-rate", "x"], "--training.learning-rate"),
        (["--out", "x", "multi30k_de_en"], "multi30k_de_en: the name of a run must come first"),
        (["CORPUS", "--tokenizer.load", "a", "--tokenizer.kind", "word"], "kind='word': only affects training"),
        (["CORPUS", "--init-from", str(STORED), "--tokenizer.lowercase"], "come with their tokenizer; omit the flag"),
        (["CORPUS", "--init-from", str(STORED), "--model.d-ff", "9"], "arrays do not fit the model"),
        (["CORPUS", "--tokenizer.kind", "unigram", "--tokenizer.vocab-size", "9"], "tokens cannot be trained"),
        (["CORPUS", "--held-out", "60"], "no training pair remains"),
        (["CORPUS", "--tokenizer.load", "nowhere.model"], "twinax: nowhere.model: there is no such file"),
        (["CORPUS", "--init-from", "nowhere"], "twinax: nowhere: there is no such file or directory for"),
        (["CORPUS", "--init-from", "."], "is neither a run, nor a checkpoint, nor a Hugging Face directory"),
    ],
)
def test_train_says_what_is_wrong(command, corpus, arguments, message):
    Path("short").write_text("A\n")
    command_line = [word for argument in arguments for word in (corpus if argument == "CORPUS" else [argument])]
    code, out, err = command("train", *command_line)
    assert code == 2
    assert out == ""
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
    assert not Path("runs").exists()


def test_a_run_directory_names_its_run(command, monkeypatch, corpus):
    from twinax.train.loop import loop

    calls = []

    def train(run, out, group):
        calls.append((run, out))
        return loop.Outcome(3, None, 15)

    monkeypatch.setattr(loop, "train", train)
    assert command("train", *corpus, "--model.d-model", "64")[0] == 128 + 15
    run_config, out = calls.pop()
    assert out == Path("runs/own")
    out.mkdir(parents=True)
    (out / "config.json").write_text(run_config.to_json())
    command("train", "runs/own", "--loop.epochs", "9")
    assert (calls[0][0].loop.updates, calls.pop()[0].loop.epochs) == (None, 9)
    command("train", "runs/own", "--loop.updates", "9")
    assert (calls[0][0].model, calls[0][0].loop.updates, calls[0][1]) == (run_config.model, 9, out)
    code, _, err = command("train", "runs/own", "--out", "elsewhere")
    advice = "omit --out, or pass --init-from for a new run with these settings"
    assert (code, err) == (2, f"twinax: --out elsewhere: runs/own is resumed in its own directory; {advice}\n")
