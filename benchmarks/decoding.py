"""Compares the speed of beam search with `transformers`' `generate`, on the same weights, sentences and tokens.

`python -m benchmarks.decoding` alternates both, each in its own process because their threads would slow each other
down, and prints the median ratio over rounds. Needs `transformers`.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from rich.progress import track

ROUNDS, SENTENCES, SOURCE, TARGET = 5, 32, 24, 40
BEAMS = (1, 4)
PAD = 8191

Generate = Callable[[np.ndarray, int], np.ndarray]  # (sources, beam size) -> tokens of the best hypotheses


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


def in_flax(folder: Path) -> Generate:
    """Decoding in twinax, compiled."""
    from twinax import convert, flax_transformer
    from twinax.configs.decoding import DecodingConfig

    model = convert.load(folder).to_flax()

    def run(src: np.ndarray, beam_size: int) -> np.ndarray:
        config = DecodingConfig(beam_size=beam_size, max_length=TARGET)
        return flax_transformer.generate(model, src, config).tokens[:, 0]

    return run


def in_transformers(folder: Path) -> Generate:
    """Decoding in `transformers`, eager, with its cache."""
    import torch
    from transformers import MarianMTModel

    model = MarianMTModel.from_pretrained(folder).eval()

    def run(src: np.ndarray, beam_size: int) -> np.ndarray:
        tokens = torch.from_numpy(src)
        output = model.generate(
            input_ids=tokens, attention_mask=(tokens != PAD).long(), num_beams=beam_size, max_new_tokens=TARGET,
            do_sample=False, early_stopping=False, bad_words_ids=[[PAD]],
        )  # fmt: skip
        return output[:, 1:].numpy()

    return run


def serve(prepare: Callable[[Path], Generate], folder: Path, requests: Connection) -> None:
    """Receives (sources, beam size) and sends (seconds, tokens), until it receives None."""
    run = prepare(folder)
    while (request := requests.recv()) is not None:
        begin = time.perf_counter()
        tokens = run(*request)
        requests.send((time.perf_counter() - begin, tokens))


def main() -> None:
    """Prints one line per beam size."""
    rng = np.random.default_rng(0)
    src = rng.integers(1, PAD, (SENTENCES, SOURCE))
    src = np.where(np.arange(SOURCE) < rng.integers(6, SOURCE + 1, (SENTENCES, 1)), src, PAD)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        make_model(folder := Path(name) / "model")
        pipes, processes = [], []
        for prepare in (in_flax, in_transformers):
            parent_pipe, child_pipe = context.Pipe()
            processes.append(context.Process(target=serve, args=(prepare, folder, child_pipe), daemon=True))
            processes[-1].start()
            pipes.append(parent_pipe)
        lines = []
        for beam_size in BEAMS:
            seconds: list[list[float]] = []
            for number in track(range(ROUNDS + 1), f"beam {beam_size}", transient=True):
                results = []
                for pipe in pipes:
                    pipe.send((src, beam_size))
                    results.append(pipe.recv())
                if number:  # the first round compiles
                    seconds.append([result[0] for result in results])
                same = np.array_equal(*(result[1] for result in results))
            ratios = [flax_time / transformers_time for flax_time, transformers_time in seconds]
            medians = [1000 * statistics.median(times) for times in zip(*seconds, strict=True)]
            lines.append(
                f"beam {beam_size}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), medians "
                f"{medians[0]:.0f} and {medians[1]:.0f} ms, tokens {'equal' if same else 'DIFFERENT'}"
            )
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join()
    print(
        f"twinax time / transformers time, {SENTENCES} sentences of at most {SOURCE} tokens, {TARGET} tokens each, CPU"
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
