"""Mistakes in the twins: formulas, masks, dropout, initial weights."""

from parity_tests.mutations.planting import Mutation

_EAGER = ("parity_tests/test_ladder.py::test_eager_is_the_same_function[tiny]",)
_HEALTHY = ("parity_tests/test_ladder_mistakes.py::test_healthy_model_and_no_traces_of_mistakes",)
_MODEL = ("tests/test_model.py",)
_NORMS = ("tests/test_model.py::test_norms_against_torch_s_own",)
_AROUND = ("tests/test_model.py::test_what_stands_around_the_layers",)
_TORCH_NN = ("parity_tests/test_torch_nn.py::test_flax_transformer",)
_DROPOUT = ("tests/test_dropout.py",)
_POSITIONS = ("tests/test_positions.py",)
_INITIAL = ("tests/test_initializers.py",)
_CONFIG = ("tests/test_config.py",)
_RELATIVE = ("tests/test_relative_positions.py",)
_T5 = ("parity_tests/test_conversion.py::test_variant[T5 v1.1, Flan-T5]",)

MODEL = (
    # Flax
    Mutation(
        "epsilon of LayerNorm ten times as large",
        "flax_transformer.layers.layer_norm",
        "keepdims=True) + eps)",
        "keepdims=True) + 10 * eps)",
        _NORMS,
    ),
    Mutation(
        "RMSNorm by the sum instead of the mean",
        "flax_transformer.layers.rms_norm",
        "jnp.square(x).mean(",
        "jnp.square(x).sum(",
        _NORMS,
    ),
    Mutation(
        "biased deviation for the sample's",
        "flax_transformer.layers.sample_std_norm",
        "/ (x.shape[-1] - 1)",
        "/ x.shape[-1]",
        _NORMS,
    ),
    Mutation(
        "norm over the length alone",
        "flax_transformer.layers.layer_norm_over_length",
        "jnp.square(centered).mean((1, 2), keepdims=True)",
        "jnp.square(centered).mean(1, keepdims=True)",
        _NORMS,
    ),
    Mutation(
        "a constant row has NaN gradients",
        "flax_transformer.layers.sample_std_norm",
        "jnp.sqrt(jnp.where(positive, variance, 1))",
        "jnp.sqrt(variance)",
        ("tests/test_model.py::test_a_constant_row_has_finite_gradients",),
    ),
    Mutation(
        "gain of the norm left out",
        "flax_transformer.layers.Norm",
        "y = scale(y, self.scale[...])",
        "y = y * 1",
        _EAGER,
    ),
    Mutation(
        "scores multiplied by sqrt(H)",
        "flax_transformer.attention.scale_product",
        "/ q.shape[-1] ** 0.5",
        "* q.shape[-1] ** 0.5",
        _EAGER,
    ),
    Mutation(
        "scores scaled by the model's width in query scaling",
        "flax_transformer.attention.scale_query",
        "q.shape[-1] ** 0.5",
        "(q.shape[-1] * q.shape[-2]) ** 0.5",
        ("parity_tests/test_published.py::test_both_twins_are_the_published_model[jadore801120-True]",),
    ),
    Mutation(
        "fully masked rows attend to every key",
        "flax_transformer.attention.exact_softmax",
        "return jnp.where(mask, weights, 0)",
        "return weights",
        (*_HEALTHY, "parity_tests/test_ladder_mistakes.py"),
    ),
    Mutation(
        "fill value of a masked key ignored",
        "flax_transformer.attention.filled_softmax",
        "jnp.where(mask, scores, value)",
        "jnp.where(mask, scores, -1e9)",
        ("parity_tests/test_published.py::test_both_twins_are_the_published_model[leftover-True]",),
    ),
    Mutation(
        "softmax over the heads",
        "flax_transformer.attention.filled_softmax",
        "softmax(jnp.where(mask, scores, value))",
        "softmax(jnp.where(mask, scores, value).swapaxes(1, -1)).swapaxes(1, -1)",
        ("parity_tests/test_published.py::test_both_twins_are_the_published_model[leftover-True]",),
    ),
    Mutation(
        "causal mask one to the left",
        "flax_transformer.attention.causal_mask",
        "jnp.tri(length, dtype=bool)",
        "jnp.tri(length, k=1, dtype=bool)",
        _MODEL,
    ),
    Mutation(
        "a given target mask is ignored",
        "flax_transformer.attention.causal_mask",
        "mask if tgt_mask is None else mask & tgt_mask[:, None, None, :]",
        "mask",
        ("parity_tests/test_settings.py::test_pairwise[6]",),
    ),
    Mutation(
        "padding of the source is seen",
        "flax_transformer.model.Transformer.source_keep",
        "src_tokens != self.config.pad_id if",
        "src_tokens == src_tokens if",
        _EAGER,
    ),
    Mutation(
        "a given source mask is turned round",
        "flax_transformer.model.Transformer.source_keep",
        "else src_mask",
        "else ~src_mask",
        ("tests/test_model.py::test_a_given_source_mask_replaces_the_one_from_padding",),
    ),
    Mutation(
        "keys and values exchanged",
        "flax_transformer.attention.MultiHeadAttention.keys_values",
        "return KeysValues(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3))",
        "return KeysValues(v.transpose(0, 2, 3, 1), k.transpose(0, 2, 1, 3))",
        _TORCH_NN,
    ),
    Mutation(
        "the residual is scaled by a half",
        "flax_transformer.layers",
        '"add": lambda x, y: x + y,',
        '"add": lambda x, y: x + 0.5 * y,',
        _TORCH_NN,
    ),
    Mutation(
        "pre-norm without its norm",
        "flax_transformer.layers",
        '"pre": lambda x, sublayer, norm, dropout, add: add(x, dropout(sublayer(norm(x)))),',
        '"pre": lambda x, sublayer, norm, dropout, add: add(x, dropout(sublayer(x))),',
        _HEALTHY,
    ),
    Mutation(
        "dropout before the norm of the embedding, not after",
        "flax_transformer.layers",
        '"before_dropout": lambda x, norm, dropout: dropout(norm(x)),',
        '"before_dropout": lambda x, norm, dropout: norm(dropout(x)),',
        ("parity_tests/test_settings.py::test_pairwise[1]",),
    ),
    Mutation(
        "tanh GELU for the exact one",
        "flax_transformer.layers",
        '"gelu": _at_least_float32(partial(jax.nn.gelu, approximate=False)),',
        '"gelu": _at_least_float32(partial(jax.nn.gelu, approximate=True)),',
        _HEALTHY,
    ),
    Mutation(
        "the last norm left out in the decoder",
        "flax_transformer.model.Decoder.__call__",
        "x = self.final_norm(x)",
        "x = x",
        ("parity_tests/test_conversion.py::test_variant[Pegasus]",),
    ),
    Mutation(
        "an id outside the vocabulary is clamped",
        "flax_transformer.quantization.table_rows",
        'jnp.take(table, numbers, axis=0, mode="fill")',
        'jnp.take(table, numbers, axis=0, mode="clip")',
        ("tests/test_model.py::test_inside_jit_a_wrong_id_makes_its_sentence_nan",),
    ),
    Mutation(
        "padding trains its row of the embedding",
        "flax_transformer.layers",
        "jnp.where(padding, jax.lax.stop_gradient(rows), rows)",
        "rows",
        ("tests/test_model.py::test_frozen_padding_is_torch_s_padding_idx",),
    ),
    Mutation(
        "positions of padding are not -1",
        "flax_transformer.layers.count_non_padding",
        "jnp.cumsum(keep, 1) * keep - 1",
        "jnp.cumsum(keep, 1) - 1",
        _POSITIONS,
    ),
    Mutation(
        "offset of positions ignored",
        "flax_transformer.layers.Positions.__call__",
        "positions + config.position_offset",
        "positions",
        ("parity_tests/test_conversion.py::test_variant[BART]",),
    ),
    Mutation(
        "scale of tied logits is the inverse",
        "flax_transformer.model",
        '"rsqrt_d_model": lambda d_model: d_model**-0.5,',
        '"rsqrt_d_model": lambda d_model: d_model**0.5,',
        _AROUND,
    ),
    Mutation(
        "distances are the query's index minus the key's",
        "flax_transformer.model.key_distances",
        "indices[None] - indices[:, None]",
        "indices[:, None] - indices[None]",
        _T5,
    ),
    Mutation(
        "layers without the biases of their stack",
        "flax_transformer.model.Encoder.__call__",
        "return layer(x, mask, distances, bias, dropout_key)",
        "return layer(x, mask, distances, None, dropout_key)",
        _T5,
    ),
    Mutation(
        "biases per layer left out",
        "flax_transformer.model.DecoderLayer.__call__",
        "else self.relative_positions(distances)",
        "else None",
        ("parity_tests/test_conversion.py::test_variant[UMT5]",),
    ),
    Mutation(
        "the activation on the wrong side of the gate",
        "flax_transformer.layers.FeedForward.__call__",
        "activation(self.gate_proj(x))) * at_least_float32(inner)",
        "self.gate_proj(x)) * at_least_float32(activation(inner))",
        ("tests/test_model.py::test_a_gated_feed_forward",),
    ),
    Mutation(
        "no dropout after the decoder",
        "flax_transformer.model.Decoder.__call__",
        "x = self.final_dropout(x, dropout_key)",
        "x = x",
        ("parity_tests/test_settings.py::test_pairwise[3]",),
    ),
    # both twins, or a shared formula
    Mutation(
        "later keys have the buckets of earlier ones",
        "formulas.relative_positions.relative_position_buckets",
        "n + sides[1:] if bidirectional",
        "sides[1:] if bidirectional",
        _RELATIVE,
    ),
    Mutation(
        "a distance on a border has the bucket before",
        "formulas.relative_positions.relative_position_buckets",
        "distance**steps >= exact",
        "distance**steps > exact",
        _RELATIVE,
    ),
    Mutation(
        "positions: frequencies grow",
        "formulas.position_tables.sinusoidal_interleaved",
        "** (-2 *",
        "** (2 *",
        _POSITIONS,
    ),
    Mutation(
        "positions: cosines first",
        "formulas.position_tables.sinusoidal_half",
        "[np.sin(angles), np.cos(angles[:, : d_model // 2])]",
        "[np.cos(angles), np.sin(angles[:, : d_model // 2])]",
        _POSITIONS,
    ),
    Mutation(
        "positions of tensor2tensor by D / 2",
        "formulas.position_tables.sinusoidal_half_t2t",
        "(half - 1)",
        "half",
        _POSITIONS,
    ),
    Mutation(
        "rate of decoder_layerdrop is not checked",
        "configs.schema",
        '    "encoder_layerdrop",\n    "decoder_layerdrop",\n)\n_LOWEST',
        '    "encoder_layerdrop",\n)\n_LOWEST',
        _CONFIG,
    ),
    Mutation(
        "a dropout rate of 1 is allowed",
        "configs.schema._check_ranges",
        "if not 0 <= value < 1:",
        "if not 0 <= value <= 1:",
        _CONFIG,
    ),
    # PyTorch
    Mutation(
        "PyTorch: epsilon outside the root",
        "torch_reference.layers.layer_norm",
        "torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)",
        "(torch.rsqrt(centered.square().mean(-1, keepdim=True)) + eps)",
        _NORMS,
    ),
    Mutation(
        "PyTorch: bias of linear maps left out",
        "torch_reference.layers.Linear.forward",
        "self.weight.to(self.compute_dtype), bias)",
        "self.weight.to(self.compute_dtype), None)",
        _EAGER,
    ),
    Mutation(
        "PyTorch: SiLU for GELU",
        "torch_reference.layers",
        '"gelu": functional.gelu,',
        '"gelu": functional.silu,',
        _HEALTHY,
    ),
    # dropout
    Mutation(
        "dropout keeps the others as they are",
        "flax_transformer.dropout.Dropout.__call__",
        "/ (1 - self.rate)",
        "/ 1",
        _DROPOUT,
    ),
    Mutation(
        "dropout at twice the rate",
        "flax_transformer.dropout._threshold",
        "round(rate * 2**32)",
        "round(2 * rate * 2**32)",
        _DROPOUT,
    ),
    Mutation(
        "dropout does not know its update",
        "flax_transformer.dropout.keep_mask",
        "(key.seed, key.update, site, key.rows)",
        "(key.seed, 0, site, key.rows)",
        _DROPOUT,
    ),
    Mutation(
        "all sites of dropout are one",
        "flax_transformer.model.Transformer.__init__",
        "zlib.crc32(join_path(path).encode())",
        "7",
        _DROPOUT,
    ),
    Mutation(
        "layers dropped one way round only",
        "flax_transformer.dropout.LayerDrop.__call__",
        "jnp.where(keep[..., None], after, before)",
        "jnp.where(keep[..., None], before, after)",
        _DROPOUT,
    ),
    # initial weights
    Mutation(
        "per-head Xavier draws a fused matrix's bound",
        "flax_transformer.initializers._glorot_per_head",
        "shape[1] / heads",
        "shape[1]",
        _INITIAL,
    ),
    Mutation(
        "padding row of the embedding is drawn",
        "flax_transformer.initializers._zero_at",
        "table if row is None else table.at[row].set(0)",
        "table",
        _INITIAL,
    ),
    Mutation(
        "queries of Mesh TensorFlow are drawn as keys",
        "flax_transformer.initializers._mesh_tensorflow",
        '"query": features * shape[1] // heads, ',
        "",
        _INITIAL,
    ),
    Mutation(
        "PyTorch: biases of Xavier layers are zeros",
        "torch_reference.initializers",
        'for name in ("torch_default", "xavier_uniform_torch_bias", "xavier_uniform_per_head")',
        'for name in ("torch_default", "xavier_uniform_per_head")',
        _INITIAL,
    ),
)
