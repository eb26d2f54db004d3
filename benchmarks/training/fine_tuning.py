"""The three commands of fine-tuning, on a Marian directory of OPUS-MT's size with random weights.

`python -m benchmarks.training.fine_tuning FOLDER` writes the directory and runs the commands in FOLDER, which must be
empty or new, and checks that `transformers` translates with the result as twinax does.
"""

import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianConfig, MarianMTModel

import twinax
from parity_tests.support.text import write_files
from twinax.cli.demo.demo_language import make_corpus

VOCABULARY, PAIRS = 58101, 2000
SIZES = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 6), ("attention_heads", 8))}


def main(folder: Path) -> int:
    """Run everything, print what was measured. Returns 0 if the translations are equal."""
    warnings.simplefilter("ignore")
    folder.mkdir(parents=True, exist_ok=True)
    corpus = make_corpus(train=PAIRS, test=20)
    for name, pairs in (("train", corpus.train), ("test", corpus.unseen_sentences)):
        for side, language in enumerate(("en", "it")):
            (folder / f"{name}.{language}").write_text("".join(f"{pair[side]}\n" for pair in pairs))
    print(f"parameters: {write_directory(folder / 'opus', corpus.train):,}")
    updates = ("--loop.updates", "2", "--training.warmup-updates", "1", "--batches.shapes", "2")
    commands = (
        ("train", "--init-from", "opus", "--src", "train.en", "--tgt", "train.it", "--out", "run", *updates),
        ("evaluate", "run", "--src", "test.en", "--tgt", "test.it", "--max-length", "10", "--beam-size", "1"),
        ("convert", "run", "tuned", "--layout", "marian"),
    )
    for command in commands:
        start = time.monotonic()
        subprocess.run([Path(sys.executable).with_name("twinax"), *command], cwd=folder, check=True)
        print(f"twinax {command[0]}: {time.monotonic() - start:.0f} s")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "tuned")
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder / "tuned")
    texts = [pair[0] for pair in corpus.unseen_sentences[:3]]
    with torch.no_grad():
        outputs = [model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=10) for text in texts]
    expected = [tokenizer.decode(output[0], skip_special_tokens=True) for output in outputs]
    equal = twinax.load(folder / "tuned").translate(texts, framework="torch", max_length=10) == expected
    print(f"transformers translates as twinax: {equal}")
    return 0 if equal else 1


def write_directory(folder: Path, pairs: Any) -> int:
    """Write tokenizer files and a model of OPUS-MT's size; return its number of parameters."""
    write_files("Marian", folder, ([pair[0] for pair in pairs], [pair[1] for pair in pairs]), 400)
    pad = AutoTokenizer.from_pretrained(folder).pad_token_id
    ids = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0, "forced_eos_token_id": 0}
    widths = {"d_model": 512, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "max_position_embeddings": 512}
    torch.manual_seed(0)
    model = MarianMTModel(
        MarianConfig(vocab_size=VOCABULARY, **SIZES, **widths, **ids, activation_function="swish", scale_embedding=True)
    )
    assert model.generation_config is not None
    model.generation_config.update(num_beams=4, bad_words_ids=[[pad]], renormalize_logits=True)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.training.fine_tuning FOLDER")
    sys.exit(main(Path(sys.argv[1])))
