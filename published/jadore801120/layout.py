"""Layout of jadore801120: tied tensors are stored under each of their names; head widths are free."""

from typing import Any

import numpy as np

from ...backend.errors import ConversionError
from ...configs.schema import TransformerConfig
from ...convert.layouts.published import IDS, Named, PublishedLayout, attention, count, embedding, linear, norm, table
from ...convert.rules import TRANSPOSE, Rule

_SRC, _TGT, _OUTPUT = "encoder.src_word_emb.weight", "decoder.trg_word_emb.weight", "trg_word_prj.weight"

_SCALES = ("embedding_scale", "logit_scale")


def _stated_fields(settings: Any, arrays: Named) -> dict[str, Any]:
    """The config fields stated by the settings in a training checkpoint, an argparse.Namespace."""
    heads, scale = getattr(settings, "n_head", None), getattr(settings, "scale_emb_or_prj", None)
    pads = {getattr(settings, f"{side}_pad_idx", None) for side in ("src", "trg")}
    fields: dict[str, Any] = {"num_heads": heads} if isinstance(heads, int) else {}
    if len(pads) == 1 and isinstance(pad := pads.pop(), int):
        fields["pad_id"] = pad
    tied = _OUTPUT in arrays and _TGT in arrays and np.array_equal(arrays[_OUTPUT], arrays[_TGT])
    if tied and scale in ("prj", "emb", "none"):  # without tying, the code ignores it
        fields["embedding_scale"] = "sqrt_d_model" if scale == "emb" else "none"
        fields["logit_scale"] = "rsqrt_d_model" if scale == "prj" else "none"
    return fields


def _embeddings(config: TransformerConfig) -> list[Rule]:
    tied = (_OUTPUT,) if config.tied_output else ()
    if config.shared_embeddings:
        rules = [embedding("src_embedding", _TGT, _SRC, *tied)]
    else:
        rules = [embedding("src_embedding", _SRC), embedding("tgt_embedding", _TGT, *tied)]
    return rules if tied else [*rules, Rule(("output.proj.kernel",), (_OUTPUT,), TRANSPOSE)]


def _attention(source: str, target: str) -> list[Rule]:
    names = {"q_proj": "w_qs", "k_proj": "w_ks", "v_proj": "w_vs", "out_proj": "fc"}
    rules = attention(source, {name: f"{target}.{other}" for name, other in names.items()}, bias=False)
    return rules + norm(f"{source}_residual.norm", f"{target}.layer_norm")


def _rules(config: TransformerConfig) -> list[Rule]:
    rules = _embeddings(config)
    for side, stack, number in (
        ("src", "encoder", config.num_encoder_layers),
        ("tgt", "decoder", config.num_decoder_layers),
    ):
        rules.append(table(side, f"{stack}.position_enc.pos_table"))
        if config.embedding_norm != "none":
            rules += norm(f"{side}_input.norm", f"{stack}.layer_norm")
        for i in range(number):
            source, target = f"{stack}.layers.{i}", f"{stack}.layer_stack.{i}"
            rules += _attention(f"{source}.self_attention", f"{target}.slf_attn")
            if stack == "decoder":
                rules += _attention(f"{source}.cross_attention", f"{target}.enc_attn")
            rules += linear(f"{source}.feed_forward.inner_proj", f"{target}.pos_ffn.w_1")
            rules += linear(f"{source}.feed_forward.outer_proj", f"{target}.pos_ffn.w_2")
            rules += norm(f"{source}.feed_forward_residual.norm", f"{target}.pos_ffn.layer_norm")
    return rules


def _fields(arrays: Named, as_published: bool, heads: int) -> dict[str, Any]:
    """The fields; weight tying is inferred from equal tensors, and tied logits are divided by sqrt(D), the default."""
    src, tgt = arrays[_SRC], arrays[_TGT]
    tied = np.array_equal(arrays[_OUTPUT], tgt)
    widths = [arrays[f"encoder.layer_stack.0.slf_attn.{name}.weight"].shape[0] for name in ("w_qs", "w_vs")]
    if any(width % heads for width in widths):
        raise ConversionError(
            f"num_heads={heads}: does not divide the attention widths {widths[0]} and {widths[1]}; set "
            "it, as in jadore801120:num_heads=4"
        )
    fields = {
        "src_vocab_size": src.shape[0],
        "tgt_vocab_size": tgt.shape[0],
        "d_model": src.shape[1],
        "head_dim": widths[0] // heads,
        "v_head_dim": widths[1] // heads,
        "d_ff": arrays["encoder.layer_stack.0.pos_ffn.w_1.weight"].shape[0],
        "num_encoder_layers": count(arrays, "encoder.layer_stack.#."),
        "num_decoder_layers": count(arrays, "decoder.layer_stack.#."),
        "max_length": arrays["encoder.position_enc.pos_table"].shape[1],
        "shared_embeddings": np.array_equal(src, tgt),
        "tied_output": tied,
        "embedding_scale": "none" if tied or as_published else "sqrt_d_model",
        "logit_scale": "rsqrt_d_model" if tied else "none",
    }
    return fields if "encoder.layer_norm.weight" in arrays else fields | {"embedding_norm": "none"}


def _refusal(config: TransformerConfig, as_published: bool) -> str | None:
    """The problem with the scales: the code has at most one, and without tying none for the logits."""
    scales = config.embedding_scale, config.logit_scale
    allowed = [("none", "rsqrt_d_model"), ("sqrt_d_model", "none"), ("none", "none")]
    if not config.tied_output:
        allowed = [("none" if as_published else "sqrt_d_model", "none")]
    if scales in allowed:
        return None
    choices = " or ".join(f"embedding_scale={e!r} with logit_scale={s!r}" for e, s in allowed)
    return (
        f"embedding_scale={scales[0]!r}, logit_scale={scales[1]!r}: with tied_output={config.tied_output} must be "
        f"{choices}"
    )


LAYOUT = PublishedLayout(
    _rules,
    _fields,
    mark=r"encoder\.src_word_emb\.weight",
    free=("shared_embeddings", "tied_output", "embedding_scale", "logit_scale"),
    refusal=_refusal,
    stated_fields=_stated_fields,
    # without tying, the scales of embeddings and logits are fixed
    undetermined=lambda config: ("num_heads", *(_SCALES if config.tied_output else ()), *IDS),
)
