"""A port of irhum/esmjax: Linen with logical axes for sharding."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.external_pairs.pair import Pair, random_parameters
from benchmarks.external_pairs.pairs import only_output
from benchmarks.external_pairs.source.ports.port import Port, linen_called, renamed


def esm2(folder: Path) -> Pair:
    """`EsmForMaskedLM`: a language model of proteins with rotary positions, scaled for the masked tokens it sees."""
    import transformers
    from flax import traverse_util

    modules, loader = import_module("esmjax.modules.modules"), import_module("esmjax.io")
    sizes: dict[str, Any] = {"vocab_size": 33, "hidden_size": 18, "intermediate_size": 72, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 3, "layer_norm_eps": 1e-5, "position_embedding_type": "rotary"}
    config = transformers.EsmConfig(**sizes, token_dropout=True, mask_token_id=32, pad_token_id=1)
    module = transformers.EsmForMaskedLM(config)
    random_parameters(module)
    fields = SimpleNamespace(encoder_layers=2, encoder_embed_dim=18, encoder_attention_heads=3)
    inner, _ = modules.get_esm2_model({"model": fields}, lm_head=True)
    changes = [(r"^esm\.embeddings\.word_embeddings", "encoder.sentence_encoder.embed_tokens")]
    changes += [(r"^esm\.encoder\.emb_layer_norm_after", "encoder.sentence_encoder.emb_layer_norm_after")]
    changes += [
        (r"^esm\.encoder\.layer\.", "encoder.sentence_encoder.layers."),
        ("attention.LayerNorm", "self_attn_ln"),
    ]
    changes += [(r"attention\.self\.(query|key|value)", r"self_attn.\1_proj"), ("query_proj", "q_proj")]
    changes += [("key_proj", "k_proj"), ("value_proj", "v_proj"), (r"attention\.output\.dense", "self_attn.out_proj")]
    changes += [("self_attn_ln", "self_attn_layer_norm"), (r"intermediate\.dense", "fc1"), (r"output\.dense", "fc2")]
    changes += [(r"(\d)\.LayerNorm", r"\1.final_layer_norm")]
    changes += [("^lm_head", "encoder.lm_head")]
    tensors = {renamed(name, changes): tensor.detach() for name, tensor in module.state_dict().items()}
    arrays = loader.convert_encoder(tensors, {"model": fields}, lm_head=True)
    tokens = np.random.default_rng(0).integers(4, 24, (2, 9))
    tokens[0, 3] = tokens[1, 5] = tokens[1, 6] = 32
    candidate = linen_called(inner, traverse_util.flatten_dict(arrays, sep="."), lambda model, x: model(x))
    return Pair(only_output(module, "logits", ("input_ids",)), candidate, (tokens,))


_MODULES = ("EncoderLayer", "ESM2")
ESMJAX = {
    "esmjax ESM-2": Port(esm2, "esmjax", "esmjax/modules/modules.py", _MODULES),
    "esmjax attention": Port(esm2, "esmjax", "esmjax/modules/multihead_attention.py", ("",)),
}
