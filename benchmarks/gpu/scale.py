"""How much is measured: everything, or tiny models that try the program itself on any device."""

from dataclasses import dataclass

from benchmarks.performance.training_speed import Size


@dataclass(frozen=True)
class Scale:
    """Models, batches and repetitions."""

    ladder: str  # preset
    trained: tuple[Size, ...]  # without the number of sentences
    programs: tuple[str, ...]  # those that train; (): all
    sentences: tuple[int, ...]  # per batch, ascending
    steps: int  # timed together
    rounds: int
    product: int  # rows and columns of the matrices of one product
    inputs: int  # pooled for the error of attention
    cases: int  # trainings that are compared update by update, and ways in which one is resumed
    mistakes: int  # planted in the twin
    resumed: str  # preset of the training that is resumed
    beams: tuple[int, ...]
    decoders: int  # programs that translate, at most
    layers: int  # of the model that translates


LENGTH = 64  # of both sides, in tokens
WMT = {"dropout": 0.1, "attention_dropout": 0.0, "vocabulary": 37_000, "length": LENGTH, "sentences": 0}
BASE = Size("base", 512, 8, 6, 2048, **WMT)
BIG = Size("big", 1024, 16, 6, 4096, **WMT | {"dropout": 0.3})
TINY = Size("base", 16, 2, 1, 32, **WMT | {"vocabulary": 50, "length": 8})
SCALES = {
    "full": Scale(
        ladder="small",
        trained=(BASE, BIG),
        programs=(),
        sentences=(64, 256),
        steps=10,
        rounds=5,
        product=8192,
        inputs=24,
        cases=3,
        mistakes=3,
        resumed="small",
        beams=(1, 4),
        decoders=4,
        layers=6,
    ),
    "small": Scale(
        ladder="tiny",
        trained=(TINY, TINY._replace(label="big")),
        programs=("twinax, bfloat16",),
        sentences=(2, 4),
        steps=2,
        rounds=1,
        product=64,
        inputs=2,
        cases=1,
        mistakes=1,
        resumed="tiny",
        beams=(1,),
        decoders=2,
        layers=1,
    ),
}
