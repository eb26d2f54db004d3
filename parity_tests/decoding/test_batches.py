"""Sentences of many batches, which leave and join batches as others are finished, against PyTorch, which has one."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parity_tests.decoding.small_twins import SMALL, small_twins
from twinax import flax_transformer, torch_reference
from twinax.backend.errors import NotFiniteError
from twinax.configs.decoding import DecodingConfig, SamplingConfig
from twinax.flax_transformer.decoding import programs, regrouping, search, threads

LONG = SMALL.replace(max_length=40)
SIZE = 4


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    """Runs the tests in float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry per merge of two batches: the number of sentences that were left over."""
    left, merged = [], regrouping._merged

    def counting(*batches: Any) -> Any:
        filled, rest = merged(*batches)
        left.append(0 if rest is None else int(rest.used.sum()))
        return filled, rest

    monkeypatch.setattr(regrouping, "_merged", counting)
    return left


def sources(number: int, seed: int, longest: int = 9) -> np.ndarray:
    """Random sentences of different lengths."""
    rng = np.random.default_rng(seed)
    src = rng.integers(3, LONG.src_vocab_size, (number, longest))
    return np.where(np.arange(longest) < rng.integers(1, longest + 1, (number, 1)), src, LONG.pad_id)


def batches(all_sources: list[np.ndarray], prefixes: list[list[int]] | None) -> Iterator[search.Sentences]:
    """The sentences in batches of one size; the last repeats its first."""
    number = len(all_sources[0])
    for first in range(0, number, SIZE):
        rows = np.arange(first, min(first + SIZE, number))
        filled = np.concatenate([rows, np.repeat(first, SIZE - len(rows))])
        own = None if prefixes is None else [prefixes[i] for i in filled]
        yield search.Sentences([src[filled] for src in all_sources], filled, own, num_sentences=len(rows))


CASES = {
    "greedy": (1, {"beam_size": 1}),
    "beam": (1, {"beam_size": 3, "n_best": 2}),
    "hypotheses stay": (1, {"beam_size": 2, "ended": "stay"}),
    "groups": (1, {"beam_size": 4, "n_best": 4, "beam_groups": 2, "diversity_penalty": 0.5}),
    "samples": (1, {"beam_size": 2, "n_best": 2, "sampling": SamplingConfig(seed=3, top_k=5)}),
    "ensemble": (2, {"beam_size": 2}),
    "prefixes, ratios": (1, {"beam_size": 2, "max_length_ratio": 3.0}),
    "without a cache": (1, {"beam_size": 2, "cache": False, "max_length": 6}),
}


@pytest.mark.parametrize("name", CASES)
def test_batches_are_translated_as_each_sentence(name: str, merges: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    models, fields = CASES[name]
    config = DecodingConfig(**{"max_length": 30, **fields})
    pairs = [small_twins(LONG, seed, end=0.5) for seed in range(models)]

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(
        number=st.integers(1, 60),
        seed=st.integers(0, 99),
        share=st.sampled_from([0.5, 0.75, 1.0]),
        waiting=st.sampled_from([0, 1 << 17, 1 << 30]),
        small=st.sampled_from([0, 1, 2]),
        number_of_threads=st.sampled_from([1, 1, 2, 3]),
    )
    def check(number: int, seed: int, share: float, waiting: int, small: int, number_of_threads: int) -> None:
        monkeypatch.setattr(search, "SMALL", small)
        monkeypatch.setattr(regrouping, "SHARE", share)
        monkeypatch.setattr(regrouping, "WAITING_BYTES", waiting)
        all_sources = [sources(number, seed + i) for i in range(models)]
        prefixes = [[4, 5, 6][: i % 4] for i in range(number)] if "prefixes" in name else None
        tensors = [torch.from_numpy(src) for src in all_sources]
        expected = torch_reference.generate_together([m for _, m in pairs], tensors, config, prefixes=prefixes)
        places = []
        for rows, decoded in flax_transformer.generate_batches(
            [m for m, _ in pairs], batches(all_sources, prefixes), config, number_of_threads
        ):
            places += rows.tolist()
            width = decoded.tokens.shape[-1]
            assert (decoded.tokens == expected.tokens[rows, :, :width]).all()
            assert (decoded.lengths == expected.lengths[rows]).all()
            np.testing.assert_allclose(decoded.scores, expected.scores[rows], rtol=1e-10)
        assert sorted(places) == [*range(number)]

    check()
    assert bool(merges) == (config.cache is None)


def test_regrouping_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "FEW", 16)
    model, _ = small_twins(LONG, 0, end=0.5)
    config = DecodingConfig(beam_size=5, max_length=31)  # of no other test
    for number in (SIZE, 40):
        src = [sources(number, 7)]
        assert sum(len(rows) for rows, _ in flax_transformer.generate_batches([model], batches(src, None), config))
    compiled = [program._cache_size() for program in programs.search_programs((LONG,), config)]
    assert compiled == [1, 2]  # caches of 16 and 31 positions


def test_threads_share_programs_and_end_together() -> None:
    """Whether all is translated, the caller stops, or a batch is wrong."""
    model, _ = small_twins(LONG, 2, end=0.5)
    config = DecodingConfig(beam_size=3, max_length=29)  # of no other test
    every = [*flax_transformer.generate_batches([model], batches([sources(40, 1)], None), config, threads=3)]
    assert sum(len(rows) for rows, _ in every) == 40
    sizes = [program._cache_size() for program in programs.search_programs((LONG,), config)]
    assert sizes == [1, 1]
    begun = []

    def repeated() -> Iterator[search.Sentences]:
        while True:
            begun.append(1)
            yield from batches([sources(SIZE, 3)], None)

    parts = flax_transformer.generate_batches([model], repeated(), config, threads=2)
    next(parts)
    parts.close()
    assert len(begun) < 60
    wrong = [*batches([sources(40, 1)], None), search.Sentences([np.full((SIZE, 9), 99)])]
    with pytest.raises(ValueError, match="99"):
        [*flax_transformer.generate_batches([model], wrong, config, threads=2)]
    both = [flax_transformer.generate_batches([model], batches([sources(9, 1)], None), config, 2) for _ in range(9)]
    assert sum(len(rows) for parts in zip(*both, strict=False) for rows, _ in parts) > 0  # none waits for another
    assert sum(thread.name.startswith("decoding") for thread in threading.enumerate()) <= 18 + 3


def test_one_thread_makes_the_first_call_of_a_shape() -> None:
    begun, first_ends = [], threading.Event()

    def program(array: np.ndarray) -> int:
        begun.append(array.shape)
        assert first_ends.wait(20)
        return len(array)

    call = threads.compiling_once(program)
    running = [threading.Thread(target=call, args=(np.zeros(n),)) for n in (3, 3, 3, 5)]
    for thread in running:
        thread.start()
    time.sleep(0.2)
    assert sorted(begun) == [(3,), (5,)]
    first_ends.set()
    for thread in running:
        thread.join()
    assert sorted(begun) == [(3,), (3,), (3,), (5,)]


@pytest.mark.parametrize("end", [0.5, -1.0])
def test_batches_of_other_shapes_may_follow(end: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last sentences of all shapes go on together, when they reach the end of a cache."""
    monkeypatch.setattr(search, "SMALL", 3)
    model, torch_model = small_twins(LONG, 1, end)
    config = DecodingConfig(beam_size=2)
    every = [sources(number, number, longest) for number, longest in ((4, 9), (4, 20), (3, 20), (4, 5))]
    prefixes = [None, [[4, 5], [], [], [6]], None, None]
    translations: dict[int, list[list[int]]] = {}
    all_batches = [search.Sentences([src], prefixes=own) for src, own in zip(every, prefixes, strict=True)]
    for rows, decoded in flax_transformer.generate_batches([model], all_batches, config):
        translations |= dict(zip(rows.tolist(), decoded.sentences(), strict=True))
    expected = [
        sentence
        for src, own in zip(every, prefixes, strict=True)
        for sentence in torch_reference.generate(torch_model, torch.from_numpy(src), config, prefixes=own).sentences()
    ]
    assert [translations[i] for i in range(len(expected))] == expected
    assert (max(len(sentences[0]) for sentences in expected) > 16) == (end < 0)


def test_an_error_names_the_place_of_the_sentence() -> None:
    model, _ = small_twins(LONG, 0, end=0.5)
    arrays = dict(flax_transformer.named_arrays(model))
    (name,) = (name for name in arrays if name.startswith("src_embedding"))
    arrays[name] = arrays[name].at[12].set(np.nan)
    src = np.minimum(sources(11, 0), 11)
    src[9, 0] = 12
    broken = flax_transformer.Transformer.from_arrays(LONG, arrays)
    with pytest.raises(NotFiniteError, match="NaN") as error:
        list(flax_transformer.generate_batches([broken], batches([src], None), DecodingConfig(beam_size=2)))
    assert error.value.row == 9
