"""Mistakes in decoding and scoring, most of them in rules shared by both twins."""

from parity_tests.mutations.planting import Mutation

_RULES = ("parity_tests/test_decoding_rules.py",)
_PRECISION = ("parity_tests/test_precision.py",)
_SEARCH = ("parity_tests/test_decoding.py::test_settings_mean_the_same_in_both",)
_SCORES = ("tests/test_decoding.py",)
_TRANSLATOR = ("tests/test_translator.py",)
_PUBLISHED = ("parity_tests/test_published.py::test_decoding",)

DECODING = (
    Mutation(
        "GNMT's penalty with another base",
        "formulas.decoding",
        '"gnmt": lambda n, a: ((5 + n) / 6) ** a,',
        '"gnmt": lambda n, a: ((6 + n) / 7) ** a,',
        _RULES,
    ),
    Mutation(
        "GNMT's penalty without its divisor",
        "formulas.decoding",
        '"gnmt": lambda n, a: ((5 + n) / 6) ** a,',
        '"gnmt": lambda n, a: (5 + n) ** a,',
        _RULES,
    ),
    Mutation(
        "power penalty without its start",
        "formulas.decoding",
        '"power_with_start": lambda n, a: (n + 1) ** a,',
        '"power_with_start": lambda n, a: n**a,',
        _RULES,
    ),
    Mutation(
        "power penalty that counts the start",
        "formulas.decoding",
        '"power": lambda n, a: n**a,',
        '"power": lambda n, a: (n + 1) ** a,',
        _RULES,
    ),
    Mutation(
        "the end is forced where another token is asked for",
        "formulas.decoding.plan",
        "{longest: eos if model.forced_eos_id is None else model.forced_eos_id}",
        "{longest: eos}",
        _RULES,
    ),
    Mutation(
        "padding may be chosen",
        "formulas.decoding.plan",
        "*([] if config.allow_padding else [model.pad_id])",
        "*[]",
        _RULES,
    ),
    Mutation(
        "forbidden tokens may be chosen",
        "formulas.decoding.plan",
        "[*config.forbidden_ids, *(",
        "[*(",
        _RULES,
    ),
    Mutation(
        "shortest length off by one",
        "formulas.decoding.plan",
        "np.arange(longest + 1) < config.min_length",
        "np.arange(longest + 1) <= config.min_length",
        ("parity_tests/test_decoding.py::test_transformers_penalises_and_bounds_lengths_alike",),
    ),
    Mutation(
        "forced first token ignored",
        "formulas.decoding.plan",
        "forced_ids = {1: model.forced_bos_id}",
        "forced_ids = {1: None}",
        _RULES,
    ),
    Mutation(
        "score starts with BOS",
        "formulas.decoding.decoder_inputs",
        "np.full_like(tgt_tokens[:, :1], model.decoder_start_id)",
        "np.full_like(tgt_tokens[:, :1], model.bos_id)",
        _RULES,
    ),
    Mutation(
        "padding counts in scores",
        "formulas.decoding.target_mask",
        "return ~padding |",
        "return padding | ~padding |",
        _SCORES,
    ),
    Mutation(
        "translations begin with the decoder's start",
        "formulas.decoding.collect",
        "tokens[:, : config.n_best, 1:]",
        "tokens[:, : config.n_best, :-1]",
        _RULES,
    ),
    Mutation(
        "a cache where later tokens change earlier ones",
        "formulas.decoding.without_cache",
        'if model.norm == "layer_norm_over_length":',
        'if model.norm == "no such norm":',
        _SCORES,
    ),
    Mutation(
        "EOS accepted below rank K",
        "flax_transformer.beam.may_finish",
        "return rank < beam_size",
        "return rank >= 0",
        _SEARCH,
    ),
    Mutation(
        "stops at K finished hypotheses",
        "flax_transformer.beam.settled",
        "return worst_finished >= best_live",
        "return worst_finished > -jnp.inf",
        _SEARCH + _RULES,
    ),
    Mutation(
        "finished hypotheses are not penalised",
        "flax_transformer.beam._leave",
        "jnp.where(enters, sums / penalty, -jnp.inf)",
        "jnp.where(enters, sums, -jnp.inf)",
        _SEARCH,
    ),
    Mutation(
        "hypotheses that ended go on too",
        "flax_transformer.beam._leave",
        "jax.lax.top_k(jnp.where(ends, -jnp.inf, sums), beam_size)",
        "jax.lax.top_k(sums, beam_size)",
        _SEARCH,
    ),
    Mutation(
        "jadore801120's beam: length of the present step",
        "flax_transformer.beam._stay",
        "jnp.where(all_ended[:, None], jnp.argmax(ends, axis=-1), n)",
        "jnp.full(all_ended[:, None].shape, n) + jnp.zeros_like(jnp.argmax(ends, axis=-1))",
        ("parity_tests/test_published.py::test_decoding[jadore801120-True]", *_SEARCH),
    ),
    Mutation(
        "cached position is 0 at every step",
        "flax_transformer.decode._next",
        "positions = jnp.broadcast_to(counts, batch * beam_size)",
        "positions = jnp.broadcast_to(0 * counts, batch * beam_size)",
        _SEARCH,
    ),
    Mutation(
        "the cache forgets which hypothesis was continued",
        "flax_transformer.decode._compiled",
        "jnp.take_along_axis(ancestors, parents[..., None], axis=1)",
        "ancestors",
        _SEARCH,
    ),
    Mutation(
        "log-probabilities of the cached search in bfloat16",
        "flax_transformer.decode._next",
        "jax.nn.log_softmax(at_least_float32(logits))",
        "at_least_float32(jax.nn.log_softmax(logits))",
        _PRECISION,
    ),
    Mutation(
        "log-probabilities of the search without a cache in bfloat16",
        "flax_transformer.decode._compiled_without_cache",
        "jax.nn.log_softmax(at_least_float32(logits))",
        "at_least_float32(jax.nn.log_softmax(logits))",
        _PRECISION,
    ),
    Mutation(
        "PyTorch: log-probabilities of the search in bfloat16",
        "torch_reference.decode.generate",
        "at_least_float32(logits).log_softmax(-1)",
        "at_least_float32(logits.log_softmax(-1))",
        _PRECISION,
    ),
    Mutation(
        "log-probabilities of score in bfloat16",
        "flax_transformer.scoring._compiled",
        "jax.nn.log_softmax(at_least_float32(logits))",
        "at_least_float32(jax.nn.log_softmax(logits))",
        _PRECISION,
    ),
    Mutation(
        "PyTorch: log-probabilities of score in bfloat16",
        "torch_reference.scoring.score",
        "at_least_float32(logits).log_softmax(-1)",
        "at_least_float32(logits.log_softmax(-1))",
        _PRECISION,
    ),
    Mutation(
        "leftover's limit does not count the start",
        "published.leftover.recipe",
        "COUNTED_START_TOKENS = 1",
        "COUNTED_START_TOKENS = 0",
        ("tests/test_recipes.py::test_leftover_counts_the_start_token",),
    ),
    Mutation(
        "jadore801120 decodes with the scale that it leaves out",
        "published.jadore801120.recipe",
        'DECODING_MISTAKES: dict[str, Any] = {"logit_scale": "none"}',
        "DECODING_MISTAKES: dict[str, Any] = {}",
        ("parity_tests/test_published.py::test_decoding[jadore801120-True]",),
    ),
    Mutation(
        "translations are given back in another order",
        "train.translator.Translator.hypotheses",
        "for i, tokens, scores in zip(rows,",
        "for i, tokens, scores in zip(rows[::-1],",
        _TRANSLATOR,
    ),
)
