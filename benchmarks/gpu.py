"""Measures a GPU or TPU: the ladder, attention, training, its largest operations, decoding: `make benchmark-gpu`.

`python -m benchmarks.gpu PAGE` measures each part in its own process, prints the tables and writes them into the page.
`python -m benchmarks.gpu --small` only prints them, for tiny models, on a CPU too: it tries the program itself.
"""

import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.progress import track

from benchmarks import decoding
from benchmarks.alternating import spread
from benchmarks.pages import markdown, marks, write_between
from twinax import TransformerConfig
from twinax.configs.execution import AttentionImplementation, ExecutionConfig
from twinax.configs.training import TrainingConfig
from twinax.convert.port import flax_specs
from twinax.flax_transformer.fused_attention import uses_cudnn
from twinax.flax_transformer.model import Transformer
from twinax.parity.functions import GRADIENTS, LOSS, Batch, random_arrays, random_batch, torch_function
from twinax.parity.ladder import run_ladder
from twinax.train import step as train_step
from twinax.train.losses import cross_entropy
from twinax.train.planning.chips import peak_of
from twinax.train.planning.flops import model_flops
from twinax.train.xla_flags import set_xla_flags

ATTENTIONS: tuple[AttentionImplementation, ...] = ("exact", "fused")
OPERATIONS, TRACED_STEPS = 10, 5
ANY_ORDER = "--xla_gpu_deterministic_ops=false"  # in XLA_FLAGS: takes precedence over what `set_xla_flags` sets


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    ladder: str  # preset
    presets: tuple[str, ...]  # trained
    sizes: Mapping[str, int]  # of the presets, other than their own
    sentences: tuple[int, ...]  # per batch
    length: int  # of both sides, in tokens
    steps: int
    inputs: int  # pooled for the error of attention
    beams: tuple[int, ...]
    rounds: int


SCALES = {
    "full": Scale("small", ("base", "big"), {}, (32, 128, 512), 64, 20, 24, decoding.BEAMS, decoding.ROUNDS),
    "small": Scale(
        "tiny",
        ("base",),
        {"d_model": 16, "num_heads": 2, "d_ff": 32, "num_encoder_layers": 1, "num_decoder_layers": 1}
        | {"src_vocab_size": 50, "tgt_vocab_size": 50},
        *((4,), 8, 2, 2, (1,), 1),
    ),
}


def trained_model(scale: Scale, preset: str) -> TransformerConfig:
    """The config of a preset in bfloat16, without attention dropout, which fused attention lacks."""
    return TransformerConfig.preset(preset, **scale.sizes, attention_dropout=0.0, compute_dtype="bfloat16")


def device(scale: Scale) -> dict[str, str]:
    """The device, its driver, and the versions of what computes on it."""
    first = jax.devices()[0]
    driver = ""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0]
    software = " ".join(first.client.platform_version.split())
    return {"platform": first.platform, "kind": first.device_kind, "driver": driver, "software": software}


def refuse_cpu(facts: Mapping[str, str]) -> None:
    """Exit with one line if the device is a CPU."""
    if facts["platform"] == "cpu":
        sys.exit("JAX sees no GPU or TPU here; `python -m benchmarks.gpu --small` tries this program on a CPU")


def ladder(scale: Scale) -> list[list[str]]:
    """One row per rung, Flax on the device and PyTorch on the CPU."""
    result = run_ladder(TransformerConfig.preset(scale.ladder), backend=jax.default_backend())
    rows = []
    for rung in result.rungs:
        ratios = ("" if ratio is None else f"{ratio:.2f}" for ratio in (rung.float32_ratio, rung.bfloat16_ratio))
        rows.append([rung.name, f"{rung.error:.1e}", *ratios, "yes" if rung.ok else "NO"])
    return rows


def attention(scale: Scale) -> list[list[str]]:
    """Errors of logits and gradients in bfloat16 with both attentions, against PyTorch in float64."""
    config = trained_model(scale, "small").replace(max_length=16)
    arrays = random_arrays(config, 0)
    wide = config.replace(param_dtype="float64", compute_dtype="float64")
    reference = torch_function(wide)
    wide_arrays = {name: array.astype("float64") for name, array in arrays.items()}

    def outputs(params: Mapping[str, Any], batch: Batch, implementation: AttentionImplementation) -> Any:
        def loss(params: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
            execution = ExecutionConfig(attention=implementation)
            model = Transformer.from_arrays(config, {**arrays, **params}, execution)
            logits = model(batch.src_tokens, batch.tgt_tokens)
            total, tokens = cross_entropy(logits, batch.labels, config.pad_id, LOSS)
            return total / jnp.maximum(tokens, 1), logits

        (_, logits), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return {"logits": logits, **{GRADIENTS + name: gradient for name, gradient in gradients.items()}}

    compiled = jax.jit(outputs, static_argnums=2)
    params = {name: jnp.asarray(arrays[name]) for name in flax_specs(config, trained_only=True)}
    squares: Counter[tuple[str, str]] = Counter()
    for number in range(scale.inputs):
        batch = random_batch(config, np.random.default_rng(number), 8, 16, 12)  # even lengths, as cuDNN needs
        exact = {path: np.asarray(value) for path, value in reference(wide_arrays, batch).items()}
        for implementation in ATTENTIONS:
            for path, value in compiled(params, batch, implementation).items():
                kind = "gradients" if path.startswith(GRADIENTS) else path
                squares[kind, implementation] += float(np.square(np.asarray(value, np.float64) - exact[path]).sum())
                squares[kind, "reference"] += float(np.square(exact[path]).sum()) / len(ATTENTIONS)
    rows = []
    for kind in ("logits", "gradients"):
        errors = [math.sqrt(squares[kind, name] / squares[kind, "reference"]) for name in ATTENTIONS]
        rows.append([kind, *(f"{error:.1e}" for error in errors), f"{errors[1] / errors[0]:.2f}"])
    width = config.query_key_width(config.num_heads)
    q, k = (jnp.zeros((8, length, config.num_heads, width), jnp.bfloat16) for length in (12, 16))
    return [*rows, ["computed by", "the formula", "cuDNN" if uses_cudnn(q, k) else "XLA", ""]]


def prepare_training(scale: Scale, preset: str, sentences: int, implementation: AttentionImplementation) -> Any:
    """(compiled step, state, batch) of a training in bfloat16."""
    config = trained_model(scale, preset)
    rng = np.random.default_rng(0)
    shape = sentences, scale.length
    src, tgt, labels = (jnp.asarray(rng.integers(4, config.tgt_vocab_size, shape)) for _ in range(3))
    batch = train_step.Batch(src, tgt, labels, jnp.arange(sentences))
    state = train_step.init_state(Transformer(config, rngs=nnx.Rngs(0)), TrainingConfig())
    step = train_step.make_train_step(config, TrainingConfig(), execution=ExecutionConfig(attention=implementation))
    return step.lower(state, batch).compile(), state, batch


def training(
    scale: Scale, preset: str, sentences: int, implementation: AttentionImplementation
) -> dict[str, float] | None:
    """Seconds of a step, and bytes of the compiled program with its arguments; None if they do not fit."""
    try:
        compiled, state, batch = prepare_training(scale, preset, sentences, implementation)
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
        begin = time.perf_counter()
        for _ in range(scale.steps):
            state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
        seconds = (time.perf_counter() - begin) / scale.steps
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None
    memory = compiled.memory_analysis()
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    size = memory.argument_size_in_bytes + memory.temp_size_in_bytes + new
    return {"seconds": seconds, "bytes": size}


def operations(scale: Scale, implementation: AttentionImplementation) -> list[list[str]]:
    """The kinds of operation that take most of the device's time in a training, by JAX's profiler."""
    compiled, state, batch = prepare_training(scale, scale.presets[0], scale.sentences[-1], implementation)
    state, _ = compiled(state, batch)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(TRACED_STEPS):
                state, _ = compiled(state, batch)
            jax.block_until_ready(state)
        (trace,) = Path(folder).rglob("*.xplane.pb")
        times: Counter[str] = Counter()
        for name, nanoseconds in device_events(jax.profiler.ProfileData.from_file(str(trace))):
            times[re.sub(r"[._]\d+\b", "", name)] += nanoseconds
    total = sum(times.values())  # 0, and no rows, if the trace names its lines otherwise
    return [[f"`{name}`", f"{time / total:.1%}"] for name, time in times.most_common(OPERATIONS)]


def device_events(trace: jax.profiler.ProfileData) -> Iterator[tuple[str, float]]:
    """(name, nanoseconds) of the operations in a trace: of a TPU's cores, a GPU's streams or XLA's CPU threads."""
    planes = list(trace.planes)
    for plane in [plane for plane in planes if plane.name.startswith("/device:")] or planes:
        for line in plane.lines:
            if line.name == "XLA Ops" or line.name.startswith(("Stream", "tf_XLA")):
                for event in line.events:
                    if "::" not in event.name and not event.name.startswith("end: "):  # of the CPU's runtime
                        yield event.name, event.duration_ns


PARTS = {part.__name__: part for part in (device, ladder, attention, training, operations)}


def measure_apart(scale: str, part: str, *arguments: Any, flags: str = "") -> Any:
    """What a part returns in a process of its own: the next one has the device's whole memory."""
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    command = [sys.executable, "-m", __spec__.name, json.dumps([scale, part, *arguments])]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout)


def training_rows(name: str, kind: str) -> Iterator[list[str]]:
    """One row per setting; the first preset's largest batch also without deterministic operations."""
    scale = SCALES[name]
    settings = [(*setting, "") for setting in product(scale.presets, scale.sentences, ATTENTIONS)]
    settings += [(scale.presets[0], scale.sentences[-1], implementation, ANY_ORDER) for implementation in ATTENTIONS]
    for preset, sentences, implementation, flags in track(settings, "training"):
        row = [f"`{preset}`", str(sentences), implementation, "no" if flags else "yes"]
        try:
            figures = measure_apart(name, "training", preset, sentences, implementation, flags=flags)
        except subprocess.CalledProcessError:
            yield [*row, "failed", "", "", ""]
            continue
        if figures is None:
            yield [*row, "out of memory", "", "", ""]
            continue
        seconds = figures["seconds"]
        flops = model_flops(trained_model(scale, preset), sentences, scale.length, scale.length) / seconds
        speed = f"{sentences * scale.length / seconds:,.0f}"
        yield [*row, f"{1 / seconds:,.1f}", speed, f"{figures['bytes'] / 1e9:.2f}", utilization(flops, kind)]


def utilization(flops_per_second: float, kind: str) -> str:
    """Percent of the bfloat16 peak of a device, or "unknown peak"."""
    peak = peak_of(kind)
    return "unknown peak" if peak is None else f"{flops_per_second / peak:.1%}"


def decoding_rows(scale: Scale) -> Iterator[list[str]]:
    """One row per beam size."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # both processes share the device's memory
    names = decoding.TWINAX, decoding.TRANSFORMERS
    for row in decoding.compare(scale.beams, scale.rounds, names):
        seconds = [row.seconds[name] for name in names]
        times = " and ".join(f"{1000 * statistics.median(each):,.0f}" for each in seconds)
        devices = " and ".join(row.devices[name] for name in names)
        yield [str(row.beam_size), spread(*seconds), times, "yes" if row.same else "NO", devices]


def main(name: str, page: Path | None) -> None:
    """Measure all parts, print the tables, write them into the page. This process does not use the device."""
    if page is not None:
        marks(page, "gpu")
    facts = measure_apart(name, "device")
    if page is not None:
        refuse_cpu(facts)
    scale = SCALES[name]
    driver = f", driver {facts['driver']}" if facts["driver"] else ""
    sections = [f"{facts['kind']}{driver}, jax {jax.__version__}, {facts['software']}; `make benchmark-gpu`."]
    print(sections[0], flush=True)

    def add(title: str, header: tuple[str, ...], measure: Callable[[], Iterable[list[str]]]) -> None:
        try:
            result = markdown(header, list(measure()))
        except subprocess.CalledProcessError as error:  # the other parts are measured nevertheless
            result = f"Failed with exit status {error.returncode}."
        sections.append(f"{title}:\n\n{result}")
        print(f"\n{sections[-1]}", flush=True)
        if page is not None:
            write_between(page, "gpu", "\n\n".join(sections))

    header = ("rung", "float64 difference", "float32 ratio", "bfloat16 ratio", "holds")
    title = f"The ladder of the preset `{scale.ladder}`, Flax on this device"
    add(title, header, lambda: measure_apart(name, "ladder"))
    header = ("bfloat16", "error, exact", "error, fused", "fused / exact")
    add("Attention, against PyTorch in float64", header, lambda: measure_apart(name, "attention"))
    header = ("preset", "sentences", "attention", "deterministic", "steps / s", "target tokens / s", "GB", "MFU")
    title = f"Training in bfloat16, {scale.length} tokens per side"
    add(title, header, lambda: training_rows(name, facts["kind"]))
    for implementation in ATTENTIONS:
        title = f"Operations of a training step, {implementation} attention"
        add(title, ("operation", "time"), partial(measure_apart, name, "operations", implementation))
    header = ("beam", "twinax time / transformers time", "median milliseconds", "same tokens", "devices")
    add("Decoding in float32", header, lambda: decoding_rows(scale))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.gpu PAGE, or python -m benchmarks.gpu --small")
    if sys.argv[1].startswith("["):
        set_xla_flags()
        scale_name, part_name, *part_arguments = json.loads(sys.argv[1])
        print(json.dumps(PARTS[part_name](SCALES[scale_name], *part_arguments)))
    elif sys.argv[1] == "--small":
        main("small", None)
    else:
        main("full", Path(sys.argv[1]))
