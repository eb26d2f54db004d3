"""Mistakes that compute float32 operations in bfloat16; error ratios between twins do not detect them."""

from parity_tests.mutations.planting import Mutation

_PRECISION = ("parity_tests/test_precision.py",)

PRECISION = (
    Mutation(
        "statistics of norms in bfloat16",
        "flax_transformer.layers.Norm.__call__",
        "NORMS[self.config.norm](at_least_float32(x), self.config.norm_eps)",
        "at_least_float32(NORMS[self.config.norm](x, self.config.norm_eps))",
        _PRECISION,
    ),
    Mutation(
        "PyTorch: statistics of norms in bfloat16",
        "torch_reference.layers.Norm.forward",
        "NORMS[self.config.norm](at_least_float32(x), self.config.norm_eps)",
        "at_least_float32(NORMS[self.config.norm](x, self.config.norm_eps))",
        _PRECISION,
    ),
    Mutation(
        "scale of the embedding in bfloat16",
        "flax_transformer.layers.Embedding.__call__",
        "(at_least_float32(rows) * scale).astype(config.compute_dtype)",
        "rows.astype(config.compute_dtype) * scale",
        _PRECISION,
    ),
    Mutation(
        "PyTorch: scale of the embedding in bfloat16",
        "torch_reference.layers.Embedding.forward",
        "(at_least_float32(rows) * scale).to(dtype_of(config.compute_dtype))",
        "rows.to(dtype_of(config.compute_dtype)) * scale",
        _PRECISION,
    ),
    Mutation(
        "attention scores divided in bfloat16",
        "flax_transformer.attention.scale_product",
        'at_least_float32(jnp.einsum("BTNH,BNHS->BNTS", q, k)) / q.shape[-1] ** 0.5',
        'at_least_float32(jnp.einsum("BTNH,BNHS->BNTS", q, k) / q.shape[-1] ** 0.5)',
        _PRECISION,
    ),
    Mutation(
        "PyTorch: softmax of attention in bfloat16",
        "torch_reference.attention.scale_product",
        'return at_least_float32(torch.einsum("BTNH,BSNH->BNTS", q, k)) / q.shape[-1] ** 0.5',
        'return torch.einsum("BTNH,BSNH->BNTS", q, k) / q.shape[-1] ** 0.5',
        _PRECISION,
    ),
    Mutation(
        "queries scaled in bfloat16",
        "flax_transformer.attention.scale_query",
        "(at_least_float32(q) / q.shape[-1] ** 0.5).astype(q.dtype)",
        "q / q.shape[-1] ** 0.5",
        _PRECISION,
    ),
    Mutation(
        "logits rounded before their bias",
        "flax_transformer.model.Output.__call__",
        "logits = add_bias(logits, self.bias[...])",
        "logits = logits.astype(x.dtype) + self.bias[...].astype(x.dtype)",
        _PRECISION,
    ),
    Mutation(
        "PyTorch: logits scaled in bfloat16",
        "torch_reference.model.Output.forward",
        "logits = at_least_float32(logits) *",
        "logits = logits *",
        _PRECISION,
    ),
    Mutation(
        "GELU in bfloat16",
        "flax_transformer.layers._at_least_float32",
        "activation(at_least_float32(x)).astype(x.dtype)",
        "activation(x)",
        _PRECISION,
    ),
    Mutation(
        "dropout divides in bfloat16",
        "flax_transformer.dropout.Dropout.__call__",
        "(at_least_float32(x) / (1 - self.rate)).astype(x.dtype)",
        "x / (1 - self.rate)",
        _PRECISION,
    ),
    Mutation(
        "scaled logits rounded before their bias",
        "flax_transformer.model.Output.__call__",
        "logits = add_bias(logits, self.bias[...])",
        "logits = at_least_float32(logits.astype(x.dtype)) + self.bias[...]",
        _PRECISION,
    ),
    Mutation(
        "scaled scores rounded before the softmax",
        "flax_transformer.attention.MultiHeadAttention._exact_heads",
        "weights = masked_softmax(scores, mask, self.config.mask_value)",
        "weights = masked_softmax(scores.astype(v.dtype).astype(scores.dtype), mask, self.config.mask_value)",
        _PRECISION,
    ),
    Mutation(
        "PyTorch: scores divided by a tensor in bfloat16",
        "torch_reference.attention.scale_product",
        'at_least_float32(torch.einsum("BTNH,BSNH->BNTS", q, k)) / q.shape[-1] ** 0.5',
        'at_least_float32(torch.einsum("BTNH,BSNH->BNTS", q, k) / torch.tensor(q.shape[-1] ** 0.5))',
        _PRECISION,
    ),
    Mutation(
        "PyTorch: dropout divides by a tensor in bfloat16",
        "torch_reference.dropout.Dropout.forward",
        "(at_least_float32(x) / (1 - self.rate)).to(x.dtype)",
        "x / torch.tensor(1 - self.rate)",
        _PRECISION,
    ),
)
