"""Plans: FLOPs and communication read from compiled programs, chips, bounds, estimates, pathologies.

XLA's own `cost_analysis` is the oracle of FLOPs where no loop runs; JAX's shardings that of bytes.
"""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jaxlib import _jax

from twinax import TransformerConfig
from twinax.backend.errors import ConfigError
from twinax.configs.data import CorpusConfig
from twinax.configs.execution import ExecutionConfig
from twinax.configs.run import RunConfig
from twinax.configs.sharding import ShardingConfig
from twinax.configs.training import TrainingConfig
from twinax.planning.chips import CHIPS
from twinax.planning.compilation import CompiledProgram, _measure, check_compiler
from twinax.planning.cost import Collective, Cost, Memory, cost
from twinax.planning.estimate import estimate, shard_bytes
from twinax.planning.flops import executed_flops, model_flops
from twinax.planning.hlo import parse
from twinax.planning.pathologies import pathologies
from twinax.planning.roofline import roofline
from twinax.planning.sweep import consider, meshes, rank, utilization
from twinax.planning.topology import family, parse_topology
from twinax.train.step.partitioning import partition

try:
    from jaxlib._hlo import hlo_module_from_text
except ImportError:  # before jaxlib 0.10.2
    from jaxlib._jax import hlo_module_from_text
from twinax.planning.workload import Workload
from twinax.train.step.step import abstract_state

MODEL = TransformerConfig(
    **{"src_vocab_size": 256, "tgt_vocab_size": 512, "d_model": 128, "num_heads": 8, "d_ff": 384, "max_length": 64},
    **{"num_encoder_layers": 3, "num_decoder_layers": 3, "norm_placement": "pre", "final_norm": True},
)


SMALL = MODEL.replace(num_encoder_layers=1, num_decoder_layers=1)


def workload(model=MODEL, rows=64, length=32, **parts):
    run = RunConfig(corpus=CorpusConfig(src="-", tgt="-"), model=model, **parts)
    return Workload(run, rows, length, length)


def module(function, *arguments):
    """XLA's module before any optimization."""
    computation = jax.jit(function).lower(*arguments).compiler_ir("hlo")
    return hlo_module_from_text(computation.as_hlo_text())


def flops_of(hlo):
    """(ours, XLA's)."""
    client = jax.devices()[0].client
    return cost(parse(hlo.to_string())).flops, _jax.hlo_module_cost_analysis(client, hlo).get("flops", 0)


@settings(max_examples=30)
@given(st.tuples(*[st.integers(1, 9)] * 5), st.booleans())
def test_flops_of_products(sizes, batched):
    b, m, k, n, j = sizes
    formula = "bmkj,bkjn->bmn" if batched else "bmkj,kjn->bmn"
    shapes = (b, m, k, j), (b, k, j, n)[not batched :]
    ours, xla = flops_of(module(lambda x, y: jnp.einsum(formula, x, y), *(jnp.zeros(shape) for shape in shapes)))
    assert ours == xla == 2 * b * m * k * n * j


@settings(max_examples=40)
@given(
    st.tuples(*[st.integers(1, 4)] * 4),
    st.lists(
        st.tuples(*[st.integers(1, 7)] * 2, *[st.integers(1, 3)] * 3, *[st.integers(0, 3)] * 2), min_size=1, max_size=2
    ),
)
def test_flops_of_convolutions(sizes, spatial):
    """XLA for TPUs writes products as convolutions with all kinds of strides, padding and dilation."""
    batch, features, kernel_features, _ = sizes
    lengths, windows, strides, bases, dilations, low, high = zip(*spatial, strict=True) if spatial else [()] * 7
    longest = [(n - 1) * base + 1 + a + b for n, base, a, b in zip(lengths, bases, low, high, strict=True)]
    windows = [min(w, (n - 1) // d + 1) for w, n, d in zip(windows, longest, dilations, strict=True)]
    hlo = module(
        lambda x, y: jax.lax.conv_general_dilated(x, y, strides, [*zip(low, high, strict=True)], bases, dilations),
        jnp.zeros((batch, features, *lengths)),
        jnp.zeros((kernel_features, features, *windows)),
    )
    ours, xla = flops_of(hlo)
    assert ours == xla


@pytest.mark.parametrize("trips", [1, 6])
def test_loops_count_as_often_as_they_run(trips):
    """XLA counts a body once. A scan that is unrolled has no loop. Each step of this one has a loop itself."""
    weights, x = jnp.zeros((trips, 3, 8, 8)), jnp.zeros((4, 8))

    def run(weights, x, unroll):
        def layers(x, weights):
            return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights, unroll=unroll)[0], None

        return jax.lax.scan(layers, x, weights, unroll=unroll)[0]

    flops = {}
    for unroll in (False, True):
        compiled = jax.jit(run, static_argnums=2).lower(weights, x, unroll).compile()
        flops[unroll] = cost(parse(compiled.as_text())).flops
    assert flops[False] == flops[True] == trips * 3 * 2 * 4 * 8 * 8


def test_loops_of_unknown_length():
    """Beam search ends when it is done: its body counts as often as the caller says."""
    compiled = jax.jit(lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, x)).lower(jnp.eye(4))
    program = parse(compiled.compile().as_text())
    assert cost(program, 5).flops == 5 * cost(program).flops == 5 * 2 * 4**3

    def count_down(x):
        return jax.lax.while_loop(lambda s: s[0] > 3, lambda s: (s[0] - 1, s[1] @ s[1]), (x.shape[0] + 4, x))[1]

    program = parse(module(count_down, jnp.eye(4)).to_string())  # the constant of the condition is no number of steps
    assert cost(program, 5).flops == 5 * 2 * 4**3


def collective(kind, shapes, groups, reducer="add"):
    operand, result = shapes
    text = f"""HloModule m
ENTRY %e (p: {operand}) -> {result} {{
  %p = {operand} parameter(0)
  ROOT %c = {result} {kind}(%p), channel_id=1, replica_groups={groups}, dimensions={{0}}, to_apply=%{reducer}
}}
"""
    return cost(parse(text)).collectives[0]


@pytest.mark.parametrize("groups", ["{{0,2,4,6},{1,3,5,7}}", "[2,4]<=[4,2]T(1,0)", "mesh['a'=2,'b'=2,'c'=2] {'a','b'}"])
def test_bytes_sent(groups):
    """Of b bytes, each of n devices sends 2b(n - 1)/n in an all-reduce, and b(n - 1)/n in the other collectives."""
    whole, part = "f32[8,16]{1,0}", "f32[2,16]{1,0}"
    assert collective("all-reduce", (whole, whole), groups).sent == 2 * 512 * 3 / 4
    assert collective("all-gather", (part, whole), groups).sent == 512 * 3 / 4
    assert collective("reduce-scatter", (whole, part), groups).sent == 512 * 3 / 4
    assert collective("all-to-all", (whole, whole), groups).sent == 512 * 3 / 4
    # a CPU adds bfloat16 in float32; the reducer's name says so
    assert collective("all-reduce", (whole, whole), groups, "add.1_promoted").sent == 512 * 3 / 4


def test_reduce_scatter_of_a_tpu():
    """A fusion of an all-reduce and the slices that each device keeps sends half of what an all-reduce does."""
    text = """HloModule m
%f (p: f32[8,16]) -> f32[2,16] {
  %p = f32[8,16]{1,0} parameter(0)
  %i = u32[] partition-id()
  %z = u32[] constant(0)
  %c = f32[8,16]{1,0} all-reduce(%p), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%add
  ROOT %d = f32[2,16]{1,0} dynamic-slice(%c, %i, %z), dynamic_slice_sizes={2,16}
}
ENTRY %e (a: f32[8,16]) -> f32[2,16] {
  %a = f32[8,16]{1,0} parameter(0)
  ROOT %s = f32[2,16]{1,0} fusion(%a), kind=kCustom, calls=%f
}
"""
    (collective,) = cost(parse(text)).collectives
    assert (collective.kind, collective.sent) == ("reduce-scatter", 512 * 3 / 4)


def test_bytes_of_hbm():
    """What stays in a TPU's VMEM, S(1), does not count; of an array that is sliced, the slice counts."""
    text = """HloModule m
%f (p: f32[100,8]) -> f32[1,8] {
  %p = f32[100,8]{1,0} parameter(0)
  %z = s32[] constant(0)
  ROOT %d = f32[1,8]{1,0} dynamic-slice(%p, %z, %z), dynamic_slice_sizes={1,8}
}
ENTRY %e (a: f32[100,8], b: f32[8]) -> f32[8] {
  %a = f32[100,8]{1,0} parameter(0)
  %b = f32[8]{0:T(8)} parameter(1)
  %s = f32[1,8]{1,0:T(8,128)S(1)} fusion(%a), kind=kLoop, calls=%f
  %c = (f32[8]{0:T(8)S(1)}, f32[8]{0:T(8)}, u32[]{:S(2)}) copy-start(%b)
  %v = f32[8]{0:T(8)S(1)} copy-done(%c)
  ROOT %r = f32[8]{0:T(8)} add(%v, %v)
}
"""
    assert cost(parse(text)).hbm_bytes == 32 + 32 + 32  # read by %s, copied by %c, written by %r


def test_bytes_of_updates_in_place():
    """A scan writes one row of its stacked results per step: the row counts, not the array."""

    def run(x):
        return jax.lax.scan(lambda c, _: (c * 2, (c + 1, jnp.tanh(c))), x, None, length=1000)[1]

    program = parse(jax.jit(run).lower(jnp.zeros(64)).compile().as_text())
    row, stacked = 64 * 8, 1000 * 64 * 8  # float64
    assert cost(program).hbm_bytes < 20 * 1000 * row + 4 * stacked
    text = """HloModule m
ENTRY %e (a: f32[100,8], b: f32[1,8]) -> f32[100,8] {
  %a = f32[100,8]{1,0} parameter(0)
  %b = f32[1,8]{1,0} parameter(1)
  %z = s32[] constant(0)
  ROOT %u = f32[100,8]{1,0} dynamic-update-slice(%a, %b, %z, %z)
}
"""
    assert cost(parse(text)).hbm_bytes == 32 + 32  # the row is read, and written


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *[("pred", jnp.bool_), ("bf16", jnp.bfloat16), ("s32", jnp.int32), ("c64", jnp.complex64)],
        *[("f8e4m3fn", jnp.float8_e4m3fn), ("u8", jnp.uint8), ("f64", jnp.float64)],
    ],
)
def test_bytes_of_dtypes(name, dtype):
    """As JAX counts them."""
    text = f"HloModule m\nENTRY %e (a: {name}[3,5]) -> {name}[3,5] {{\n  %a = {name}[3,5]{{1,0}} parameter(0)\n"
    text += f"  ROOT %c = {name}[3,5]{{1,0}} copy(%a)\n}}\n"
    assert cost(parse(text)).hbm_bytes == 2 * jnp.zeros((3, 5), dtype).nbytes


def test_no_program():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e:32x32", r"TPU v5e has no such slice; its slices: 1x1, 2x2, .*16x16"),
        ("v5e:4x2", "has no such slice"),
        ("v5p:4x4x6", "has no such slice"),
        ("v5e", "needs a size, as v5e:2x2"),
        ("h100:0", "must be h100:N, N from 1 to 4,096"),
        ("h100:12", "needs a multiple of 8"),
        ("l4:16", "N from 1 to 8"),
        ("v99:4x4", "there is no such chip; choose one of v4, v5e"),
        ("", "there is no such chip"),
    ],
)
def test_impossible_topologies(name, message):
    with pytest.raises(ConfigError, match=message):
        parse_topology(name)


def test_topologies():
    assert parse_topology("V5P:4x4x12").chips == 192
    assert [t.chips for t in family("v6e")] == [1, 4, 8, 16, 32, 64, 128, 256]
    assert max(t.chips for t in family("v4")) == max(t.chips for t in family("h100")) == 4096
    # A ring has two links per chip and dimension; of 2×2 chips, each has one neighbor in a dimension.
    links = {"v5e:1x1": 0, "v5e:2x2": 2, "v5e:4x4": 3, "v5e:16x16": 4, "v4:2x4x4": 4, "v4:4x4x4": 6}
    assert {name: parse_topology(name).links for name in links} == links
    # 900 GB/s of NVLink in both directions; between machines eight GPUs share eight cards of 50 GB/s
    assert parse_topology("h100:8").seconds(450e9, 8) == 1
    assert parse_topology("h100:16").seconds(8 * 50e9, 16) == 1


# As the makers print them. TPUs: TFLOPS, GiB and GB/s of HBM, Gb/s of all links, of which each chip has so many.
TPUS = {
    "v4": (275, 32, 1200, 2400, 6),
    "v5e": (197, 16, 819, 1600, 4),
    "v5p": (459, 95, 2765, 4800, 6),
    "v6e": (918, 32, 1638, 3200, 4),
}
# GPUs: TFLOPS of bfloat16 and of TF32, both with sparsity, GB and GB/s of HBM, GB/s of NVLink or PCIe in both
# directions, Gb/s of the network.
GPUS = {
    "a100": (624, 312, 80, 2039, 600, 200),
    "h100": (1978, 989, 80, 3350, 900, 400),
    "h200": (1978, 989, 141, 4800, 900, 400),
    "l4": (242, 121, 24, 300, 64, 0),
}


def test_chips_are_those_of_the_data_sheets():
    assert CHIPS.keys() == TPUS.keys() | GPUS.keys()
    for name, (flops, memory, bandwidth, links, number) in TPUS.items():
        chip = CHIPS[name]
        assert (chip.flops, chip.float32_flops) == (flops * 1e12, flops * 1e12)
        assert (chip.hbm_bytes, chip.hbm_bandwidth) == (memory * 2**30, bandwidth * 1e9)
        assert (8 * number * chip.link_bandwidth, chip.dimensions) == (links * 1e9, number / 2)
    for name, (flops, tf32, memory, bandwidth, links, network) in GPUS.items():
        chip = CHIPS[name]
        assert (2 * chip.flops, 2 * chip.float32_flops) == (flops * 1e12, tf32 * 1e12)
        assert (chip.hbm_bytes, chip.hbm_bandwidth) == (memory * 1e9, bandwidth * 1e9)
        assert (2 * chip.link_bandwidth, 8 * chip.network_bandwidth) == (links * 1e9, network * 1e9)


# Measured model FLOPs utilization of decoder-only models, per chip. Source: MaxText, configs/v5e and configs/v5p;
# their dimensions from its `global_parameter_scale`: base 2048 (width), 16 (heads of 128, layers), 7168, 32,000.
MAXTEXT = [
    ("v5e:16x16", {"heads": 64, "width": 4096, "layers": 32, "d_ff": 28672}, 6, 8 / 6, (16, 0.6110)),
    ("v5e:16x16", {"heads": 64, "width": 8192, "layers": 32, "d_ff": 28672}, 4, 8 / 6, (32, 0.6686)),
    ("v5p:4x4x4", {"heads": 64, "width": 8192, "layers": 32, "d_ff": 28672}, 7, 1, (32, 0.7147)),
]


@pytest.mark.parametrize(("name", "sizes", "rows", "executed", "published"), MAXTEXT)
def test_published_utilization_lies_under_the_bound(name, sizes, rows, executed, published):
    """Fully sharded parameters are gathered twice in bfloat16; with full rematerialization 8/6 of the FLOPs run."""
    billions, measured = published
    topology, length = parse_topology(name), 2048
    attention = 4 * sizes["width"] * sizes["heads"] * 128
    weights = sizes["layers"] * (attention + 3 * sizes["width"] * sizes["d_ff"]) + 32_000 * sizes["width"]
    assert weights / 1e9 == pytest.approx(billions, rel=0.15)
    scores = 12 * sizes["layers"] * sizes["heads"] * 128 * length
    flops = (6 * weights + scores) * rows * length
    group = topology.chips
    collectives = tuple(Collective("all-gather", group, (), 2 * weights, 1) for _ in range(2))
    collectives += (Collective("reduce-scatter", group, (), 2 * weights, 1),)
    bound = roofline(Cost(flops * executed, 2 * 3 * weights, collectives), topology, "bfloat16")
    limit = bound.utilization(flops, topology.chip.peak("bfloat16"))
    assert measured < limit <= 1.0 / executed + 1e-9
    assert limit < measured * 1.5  # the bound says something


def test_bound():
    """The slowest part bounds the time; the others may run beside it."""
    cost = Cost(197e12 * 3, 819e9 * 2, (Collective("all-gather", 4, (), 100e9, 1),))
    bound = roofline(cost, parse_topology("v5e:2x2"), "bfloat16")  # 75 GB leave by two links of 50 GB/s
    assert bound.parts == {"matrix units": 3, "HBM": 2, "links": 0.75}
    assert (bound.seconds, bound.without_overlap, bound.limit) == (3, 5.75, "matrix units")
    assert bound.utilization(197e12, 197e12) == pytest.approx(1 / 3)
    # float32 products run at half the speed on a GPU
    assert roofline(cost, parse_topology("h100:8"), "float32").matrix_units == 2 * 197e12 * 3 / 989e12


def test_model_flops():
    """Literal numbers of a tiny model: 2 FLOPs per weight and token, 4 per width, query and key; three passes."""
    tiny = MODEL.replace(num_encoder_layers=1, num_decoder_layers=1, tied_output=False)
    encoder, decoder, output = 4 * 128**2 + 2 * 128 * 384, 8 * 128**2 + 2 * 128 * 384, 128 * 512
    moved = 2 * 128**2  # keys and values of cross-attention read the source
    weights = (encoder + moved) * 5 + (decoder - moved + output) * 7
    attention = 128 * (5 * 5 + 7 * 7 + 7 * 5)
    assert model_flops(tiny, 3, 5, 7) == 3 * 3 * (2 * weights + 4 * attention)
    again = executed_flops(tiny, 3, 5, 7, "layers") - model_flops(tiny, 3, 5, 7)
    assert again == 3 * (2 * (weights - output * 7) + 4 * attention)


@settings(max_examples=20)
@given(st.sampled_from(list(meshes(8))), st.booleans())
def test_bytes_of_the_state_are_exact(sharding, tied):
    """Against the shapes that JAX's own shardings give."""
    model = MODEL.replace(tied_output=tied, relative_positions="shared")
    state = abstract_state(model, TrainingConfig())
    mesh = AbstractMesh(tuple(vars(sharding).values()), tuple(vars(sharding)))
    expected = [
        math.prod(NamedSharding(mesh, partition(path)).shard_shape(array.shape)) * array.dtype.itemsize
        for path, array in jax.tree_util.tree_leaves_with_path(state)
    ]
    assert shard_bytes(state, sharding) == expected


@pytest.mark.parametrize("consistency", ["none", "r_drop"])
def test_utilization_is_full_where_nothing_but_the_model_is_computed(consistency):
    """Rows of both passes, on the chips that share them."""
    work = workload(training=TrainingConfig(consistency=consistency))
    topology, passes = parse_topology("h100:8"), 1 if consistency == "none" else 2
    flops = model_flops(MODEL, 64 * passes, 32, 32) / 8
    assert utilization(work, topology, roofline(Cost(flops, 0), topology, "float32")) == pytest.approx(1)


def test_what_a_device_holds_and_sends():
    """Twice the devices for twice the rows need the same memory each; gradients are summed once, however divided."""
    one, two = (estimate(workload(SMALL, rows=64 * n), ShardingConfig(data=n))[1] for n in (1, 2))
    assert one.temporaries == two.temporaries
    state = abstract_state(SMALL, TrainingConfig()).params
    size = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(state))
    for sharding in (ShardingConfig(data=4), ShardingConfig(data=1, fsdp=4), ShardingConfig(data=2, fsdp=2)):
        collectives = estimate(workload(SMALL), sharding)[0].collectives
        assert sum(c.bytes for c in collectives if c.kind != "all-gather") == size


def test_sums_of_activations_that_a_layer_adds(monkeypatch):
    """Per sublayer one forward and one backward; the encoder's output has one per cross-attention, backward.

    Source: Shoeybi et al. 2019, "Megatron-LM", figure 4.
    """
    monkeypatch.setattr("twinax.planning.estimate._traced_bytes", lambda *arguments: 0)  # of no concern here
    sharding, (src, tgt) = ShardingConfig(data=1, tensor=2), (16, 32)

    def sent(**layers):
        work = replace(workload(SMALL.replace(**layers)), src_length=src, tgt_length=tgt)
        return estimate(work, sharding)[0].sent / (64 * 128 * 4)  # rows, d_model, float32

    assert sent(num_encoder_layers=2) - sent() == 4 * src
    assert sent(num_decoder_layers=2) - sent() == 6 * tgt + src


@given(*4 * [st.integers(1, 9)])
def test_padded_rows_are_divisible(rows, data, fsdp, accumulation):
    work = workload(rows=rows, training=TrainingConfig(accumulation=accumulation))
    padded = work.padded(ShardingConfig(data=data, fsdp=fsdp)).rows
    parts = data * fsdp * accumulation
    assert padded % parts == 0
    assert 0 <= padded - rows < parts


def test_sweep_ranks_all_meshes():
    work = workload(SMALL)
    candidates = rank(work, [parse_topology("v5e:4x4")])
    assert len(candidates) == len(list(meshes(16))) == 15
    times = [candidate.seconds for candidate in candidates]
    assert times == sorted(times)
    assert times[-1] == math.inf
    assert {c.obstacle for c in candidates if c.sharding.tensor == 16} == {"tensor=16: does not divide num_heads=8"}
    assert all(0 < utilization(work, c.topology, c.bound) < 1 for c in candidates if c.bound)
    small = consider(workload(rows=8), parse_topology("v5e:4x4"), ShardingConfig(data=16))
    assert small.obstacle == "16 devices divide the rows of a batch, which has 8; use larger --tokens"


def test_sweep_says_what_does_not_fit():
    huge = workload(rows=500_000)
    candidate = consider(huge, parse_topology("v5e:1x1"), ShardingConfig(data=1))
    assert candidate.obstacle is not None
    assert re.fullmatch(r"needs \d+\.\d GB more than a chip has", candidate.obstacle)
    parts = workload(rows=500_000, training=TrainingConfig(accumulation=50))
    assert consider(parts, parse_topology("v5e:1x1"), ShardingConfig(data=1)).obstacle is None


def test_rematerialization_saves_memory_and_costs_flops():
    plain, remat = (
        estimate(workload(execution=ExecutionConfig(remat=r)), ShardingConfig(data=4)) for r in ("none", "layers")
    )
    assert remat[1].temporaries < plain[1].temporaries
    assert 1.2 < remat[0].flops / plain[0].flops < 4 / 3


STEP = "train step"


def names(work, sharding, collectives=(), flops=1e12, topology="v5e:4x4"):
    program = CompiledProgram(STEP, Memory(0, 0), Cost(flops, 1e6, tuple(collectives)))
    return {p.name: str(p) for p in pathologies(work, parse_topology(topology), sharding, [program])}


def test_healthy_plan_has_no_pathology():
    wide = MODEL.replace(num_heads=1)
    assert names(workload(wide), ShardingConfig(data=16)) == {}


def test_pathologies_of_the_config():
    wide = MODEL.replace(num_heads=1)
    padded = names(workload(wide.replace(tgt_vocab_size=32_001)), ShardingConfig(data=16))
    assert padded == {
        "padded dimension": "padded dimension: tgt_vocab_size=32,001 is padded to a multiple of 128; set "
        "--tokenizer.vocab-size 32128, or 32000"
    }
    divided = names(workload(wide), ShardingConfig(data=4, tensor=4))  # d_ff 384 and the vocabularies, by 4 × 128
    assert "on each of 4 devices" in divided["padded dimension"]
    assert "heads of width 16 fill 12%" in names(workload(), ShardingConfig(data=16))["narrow heads"]
    assert "rows are padded to 80" in names(workload(wide, rows=65), ShardingConfig(data=16))["padded batch"]
    assert names(workload(), ShardingConfig(data=8), topology="h100:8") == {}  # a GPU pads neither


def test_batch_too_small_for_the_links():
    wide = workload(MODEL.replace(num_heads=1))
    gradients = Collective("all-reduce", 16, ((32, 32),), 10**9, 1)
    line = names(wide, ShardingConfig(data=16), [gradients])["batch too small for the links"]
    assert "set --batches.tokens 6000 or more, or use fewer chips" in line
    activations = Collective("all-reduce", 4, ((32, 32),), 10**9, 1)
    line = names(wide, ShardingConfig(data=4, tensor=4), [activations])["too much communication within layers"]
    assert line.endswith("set --sharding.tensor 2")

    gradients = Collective("all-reduce", 8, ((32, 32),), 10**9, 1)  # over another axis than `tensor`
    assert "batch too small for the links" in names(wide, ShardingConfig(data=8, tensor=2), [gradients])


def test_the_fewest_micro_batches_that_fit_are_advised():
    chip = parse_topology("l4:1")
    work, limit = workload(SMALL, rows=100_000), chip.chip.hbm_bytes
    program = CompiledProgram(STEP, Memory(0, int(3 * limit)), None)
    (problem,) = pathologies(work, chip, ShardingConfig(data=1), [program])
    assert "needs 3.00 times the memory" in str(problem)
    assert problem.remedy == "set --execution.remat layers --training.accumulation 2"

    def needed(accumulation):
        parts = {"training": TrainingConfig(accumulation=accumulation), "execution": ExecutionConfig(remat="layers")}
        return estimate(workload(SMALL, rows=100_000, **parts), ShardingConfig(data=1))[1].total

    assert needed(2) <= limit < needed(1)


def test_tables_are_found_though_they_are_transposed():
    gathered = [Collective("all-gather", 4, ((128, 512),), 4 * 128 * 512, 1)]
    problems = names(workload(MODEL.replace(num_heads=4)), ShardingConfig(data=2, tensor=4), gathered)
    assert "gathers the whole table 128×512" in problems["re-materialized embedding"]


PLANTED = """
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import numpy as np
from twinax.planning.cost import cost
from twinax.planning.hlo import parse

mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))
def abstract(shape, spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
table = abstract((512, 128), P("tensor", None))
whole = NamedSharding(mesh, P())
programs = {
    "logits": (lambda x, t: jax.lax.top_k(x @ t.T, 5), abstract((64, 128), P("data"))),
    "table": (lambda ids, t: jax.lax.with_sharding_constraint(t, whole)[ids], abstract((64,), P("data"), jnp.int32)),
    "sound": (lambda x, t: (x @ t.T).max(-1), abstract((64, 128), P("data"))),
}
for name, (function, argument) in programs.items():
    collectives = cost(parse(jax.jit(function).lower(argument, table).compile().as_text())).collectives
    print(name, [(c.kind, c.group, c.shapes, c.bytes, c.count) for c in collectives], sep="|")
"""


def test_planted_gathers_are_found(forks):
    """Programs of eight devices that gather logits, or the embedding, although `tensor` divides them."""
    result = forks(PLANTED, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    assert result.returncode == 0, result.stderr
    problems = {}
    for line in result.stdout.splitlines():
        name, collectives = line.split("|")
        parts = [Collective(*part) for part in eval(collectives)]
        problems[name] = names(workload(MODEL.replace(num_heads=4)), ShardingConfig(data=2, tensor=4), parts)
    assert "64×512 of the whole vocabulary" in problems["logits"]["gathered logits"]
    assert "gathers the whole table 512×128" in problems["table"]["re-materialized embedding"]
    assert {"gathered logits", "re-materialized embedding"} & {*problems["sound"]} == set()
    remedy = "set --sharding.tensor 1 --sharding.fsdp 4"
    assert problems["logits"]["gathered logits"].endswith(remedy)


def test_compiler_of_another_version(monkeypatch):
    module = "twinax.planning.compilation"
    monkeypatch.setattr(f"{module}.requires", lambda name: ['libtpu==0.0.42.*; extra == "tpu"', "numpy>=2"])
    monkeypatch.setattr(f"{module}.version", lambda name: {"libtpu": "0.0.52", "jax": "0.10.2"}[name])
    with pytest.raises(ConfigError, match=r"libtpu 0.0.52 does not match jax 0.10.2, which needs libtpu==0.0.42"):
        check_compiler(parse_topology("v5e:2x2"))
    check_compiler(parse_topology("h100:8"))


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        (
            "Ran out of memory in memory space hbm. Used 21.5G of 15.75G hbm. Exceeded hbm capacity by 5.75G.",
            21.5 * 2**30,
        ),
        ("Allocation type: HLO temporaries 512.0M, which do not fit", 1000 + 512 * 2**20),
        ("temporaries (2.5G) exceed", 1000 + 2.5 * 2**30),
    ],
)
def test_what_the_compiler_refuses_needs_what_it_says(message, needed):
    """With all, or with the temporaries alone, to which the arguments are added."""

    def compile_program():
        raise RuntimeError(message)

    program = _measure("step", compile_program, 1000)
    assert (program.memory.total, program.cost) == (needed, None)
    message = "INTERNAL: Used 3 registers"
    with pytest.raises(RuntimeError, match="registers"):
        _measure("step", compile_program, 1000)


@given(*4 * [st.integers(0, 2**40)])
def test_the_memory_is_the_sum_of_its_parts(arguments, temporaries, code, results):
    assert Memory(arguments, temporaries, code, results).total == arguments + temporaries + code + results


@pytest.mark.parametrize("donated", [(), (0,)])
def test_a_result_counts_unless_it_takes_the_place_of_an_argument(donated):
    """Both are 4,000 bytes."""
    x = jnp.zeros(1000, jnp.float32)
    program = jax.jit(lambda x: x * 2 + 1, donate_argnums=donated).lower(x).compile()
    memory = _measure("double", lambda: SimpleNamespace(program=program, loops=1)).memory
    assert (memory.arguments, memory.results) == (4000, 0 if donated else 4000)
    assert memory.total >= memory.arguments + memory.results
