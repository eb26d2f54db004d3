"""Compares the speed of beam search with `transformers`' `generate`, on the same weights, sentences and tokens.

`python -m benchmarks.decoding` alternates both, each in its own process because their threads would slow each other
down, and prints the median ratio over rounds; and the same for twinax with products of 8-bit integers, whose tokens may
differ. All use a GPU if they see one. Needs `transformers`.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.progress import track

ROUNDS, SENTENCES, SOURCE, TARGET = 5, 32, 24, 40
BEAMS = (1, 4)
PAD = 8191

Generate = Callable[[np.ndarray, int], np.ndarray]  # (sources, beam size) -> tokens of the best hypotheses


class Row(NamedTuple):
    """The comparison at one beam size."""

    beam_size: int
    ratios: list[float]  # twinax time / transformers time, one per round
    int8_ratios: list[float]  # twinax time with 8-bit integers / twinax time
    milliseconds: list[float]  # medians: twinax, transformers, twinax with 8-bit integers
    same: bool  # whether the tokens of twinax and transformers are equal
    devices: list[str]  # of the three


def make_model(folder: Path) -> None:
    """Saves a random Marian of the base size. No translation ends early, so that all steps are made."""
    import torch
    from transformers import MarianConfig, MarianMTModel

    sizes = {"vocab_size": PAD + 1, "d_model": 512, "max_position_embeddings": 64, "init_std": 0.05}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 6, f"{side}_attention_heads": 8, f"{side}_ffn_dim": 2048}
    ids = {"pad_token_id": PAD, "decoder_start_token_id": PAD, "eos_token_id": 0, "forced_eos_token_id": 0}
    torch.manual_seed(0)
    MarianMTModel(MarianConfig(**sizes, **ids)).save_pretrained(folder)


def in_flax(folder: Path, quantized: bool = False) -> tuple[Generate, str]:
    """Decoding in twinax, compiled, and its device."""
    import jax

    from twinax import convert, flax_transformer
    from twinax.configs.decoding import DecodingConfig

    jax.config.update("jax_default_matmul_precision", "highest")  # float32 on a GPU too, as in torch
    model = convert.load(folder).to_flax()
    model = model.quantized() if quantized else model

    def run(src: np.ndarray, beam_size: int) -> np.ndarray:
        config = DecodingConfig(beam_size=beam_size, max_length=TARGET)
        return flax_transformer.generate(model, src, config).tokens[:, 0]

    return run, jax.devices()[0].device_kind


def in_transformers(folder: Path) -> tuple[Generate, str]:
    """Decoding in `transformers`, eager, with its cache, and its device."""
    import torch
    from transformers import MarianMTModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = MarianMTModel.from_pretrained(folder).eval().to(device)

    def run(src: np.ndarray, beam_size: int) -> np.ndarray:
        tokens = torch.from_numpy(src).to(device)
        output = model.generate(
            input_ids=tokens, attention_mask=(tokens != PAD).long(), num_beams=beam_size, max_new_tokens=TARGET,
            do_sample=False, early_stopping=False, bad_words_ids=[[PAD]],
        )  # fmt: skip
        return output[:, 1:].cpu().numpy()

    return run, torch.cuda.get_device_name() if device == "cuda" else device


def serve(prepare: Callable[[Path], tuple[Generate, str]], folder: Path, requests: Connection) -> None:
    """Sends the device, then receives (sources, beam size) and sends (seconds, tokens), until it receives None."""
    run, device = prepare(folder)
    requests.send(device)
    while (request := requests.recv()) is not None:
        begin = time.perf_counter()
        tokens = run(*request)
        requests.send((time.perf_counter() - begin, tokens))


def compare(beam_sizes: Sequence[int], rounds: int) -> list[Row]:
    """Decodes in both, `rounds` times per beam size after a round that compiles."""
    rng = np.random.default_rng(0)
    src = rng.integers(1, PAD, (SENTENCES, SOURCE))
    src = np.where(np.arange(SOURCE) < rng.integers(6, SOURCE + 1, (SENTENCES, 1)), src, PAD)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        make_model(folder := Path(name) / "model")
        pipes, processes = [], []
        for prepare in (in_flax, in_transformers, partial(in_flax, quantized=True)):
            parent_pipe, child_pipe = context.Pipe()
            processes.append(context.Process(target=serve, args=(prepare, folder, child_pipe), daemon=True))
            processes[-1].start()
            pipes.append(parent_pipe)
        devices = [pipe.recv() for pipe in pipes]
        rows = []
        for beam_size in beam_sizes:
            seconds: list[list[float]] = []
            same = True
            for number in track(range(rounds + 1), f"beam {beam_size}", transient=True):
                results = []
                for pipe in pipes:
                    pipe.send((src, beam_size))
                    results.append(pipe.recv())
                if number:  # the first round compiles
                    seconds.append([result[0] for result in results])
                same &= np.array_equal(results[0][1], results[1][1])
            ratios = [flax_time / transformers_time for flax_time, transformers_time, _ in seconds]
            int8_ratios = [int8_time / flax_time for flax_time, _, int8_time in seconds]
            medians = [1000 * statistics.median(times) for times in zip(*seconds, strict=True)]
            rows.append(Row(beam_size, ratios, int8_ratios, medians, same, devices))
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join()
    return rows


def main() -> None:
    """Prints one line per beam size."""
    rows = compare(BEAMS, ROUNDS)
    print(
        f"twinax time / transformers time, {SENTENCES} sentences of at most {SOURCE} tokens, {TARGET} tokens each, on "
        f"{' and '.join(rows[0].devices[:2])}"
    )
    for row in rows:
        milliseconds = " and ".join(f"{value:.0f}" for value in row.milliseconds[:2])
        print(
            f"beam {row.beam_size}: {_spread(row.ratios)}, medians {milliseconds} ms, tokens "
            f"{'equal' if row.same else 'DIFFERENT'}; 8-bit integers / float32: {_spread(row.int8_ratios)}"
        )


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    main()
