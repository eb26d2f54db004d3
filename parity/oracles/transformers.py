"""The `transformers` model of a directory as an oracle: an independent reference for both twins.

Needs the package `transformers`, which the twins do not.
"""

import warnings
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ...configs.schema import TransformerConfig
from ...configs.verification import verifying
from ...convert.arrays.frameworks import from_torch
from ...convert.checkpoint import Checkpoint
from ...convert.formats.hugging_face import family, read_directory, write_hugging_face
from ...convert.optimizers.trainer import FILES as TRAINER_FILES
from ...convert.port import flax_specs
from ...convert.rules import Rule, target_specs, translate
from ...convert.weight_files.reading import has_flax_weights
from ..functions import GRADIENTS, Batch, Outputs

Oracle = Callable[[Batch], Outputs]


def load_oracle(
    directory: str | PathLike[str], checkpoint: Checkpoint, adapter: str | PathLike[str] | None = None
) -> Oracle:
    """The directory's model in `transformers`, as an oracle in float64; `checkpoint` is the same model in twinax.

    It is loaded in its own dtype, in which it computes its position tables, and then converted to float64.
    """
    return oracle_of(with_float64_norms(load_model(directory, checkpoint, adapter).double()), checkpoint)


def load_model(
    directory: str | PathLike[str], checkpoint: Checkpoint, adapter: str | PathLike[str] | None = None
) -> Any:
    """The directory's model, loaded by `transformers` in its own dtype, in evaluation mode.

    A LoRA adapter is merged by `peft`. `transformers` 5 cannot read the weights of a Flax class, or those that wrappers
    saved: it gets them in a new directory.
    """
    import transformers

    assert checkpoint.layout is not None
    transformers.utils.logging.disable_progress_bar()
    architecture = getattr(transformers, family(checkpoint.layout).architecture)
    own_type = getattr(torch, checkpoint.config.param_dtype)
    with verifying(False):
        stored = read_directory(Path(directory))
    is_wrapped = stored.stripped or {*stored.skipped} - {*TRAINER_FILES}
    if not is_wrapped and not has_flax_weights(Path(directory)):
        model = architecture.from_pretrained(directory, dtype=own_type).eval()
    else:
        with TemporaryDirectory() as folder:
            write_hugging_face(stored, Path(folder, "model"), checkpoint.layout)
            model = architecture.from_pretrained(Path(folder, "model"), dtype=own_type).eval()
    model = with_causal_decoder(model if adapter is None else _merged(model, adapter))
    return _with_stored_scale(model, checkpoint) if checkpoint.layout == "umt5" else model


def _with_stored_scale(model: Any, checkpoint: Checkpoint) -> Any:
    """A UMT5 that scales its logits as its file says.

    `transformers` 5.0 to 5.23 scale them always; 4 and 5.24 not if `tie_word_embeddings` is false, as the published
    models were trained. The result must not be saved or tied again: its setting now decides the scale alone.
    """
    if not hasattr(type(model.config)(), "scale_decoder_outputs"):  # before 5.24
        model.config.tie_word_embeddings = checkpoint.config.logit_scale != "none"
    return model


def _merged(model: Any, adapter: str | PathLike[str]) -> Any:
    """The model with an adapter merged by `peft`, which warns that this can untie the output layer."""
    from peft import PeftModel

    with warnings.catch_warnings(action="ignore"):
        merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    return merged.requires_grad_(True)  # `peft` has frozen them


def with_causal_decoder(model: Any) -> Any:
    """The model, with a decoder that sees no later token.

    UMT5 of `transformers` 5.15 to 5.17 does not pass `is_causal` to its self-attention, so that with the default
    attention, SDPA, and without a mask of the target's padding, each position attends to all of them. Other versions,
    eager attention, and T5 of these versions mask the later ones, as T5's and UMT5's training does.
    """
    for module in model.modules():
        if getattr(module, "has_relative_attention_bias", False) and getattr(module, "is_decoder", False):
            module.is_causal = True
    return model


def with_float64_norms(model: Any) -> Any:
    """The model with `torch.nn.RMSNorm` for T5's norms, which compute in float32 whatever the model's dtype."""
    for module in [*model.modules()]:
        for name, norm in module.named_children():
            if hasattr(norm, "variance_epsilon"):
                replacement = torch.nn.RMSNorm(len(norm.weight), norm.variance_epsilon, dtype=norm.weight.dtype)
                replacement.weight = norm.weight
                setattr(module, name, replacement)
    return model


def randomize(model: Any, seed: int = 0) -> None:
    """Add noise of scale width^-0.5 to every learned parameter; a bias of 0 or a gain of 1 would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for array in (*trained, *(b for n, b in model.named_buffers() if n == "final_logits_bias")):
            width = 4 if array.ndim == 1 else array.shape[-1]
            array.add_(torch.randn(array.shape, generator=generator) * width**-0.5)


def oracle_of(model: Any, checkpoint: Checkpoint, rules: Sequence[Rule] | None = None) -> Oracle:
    """f(batch) -> encoder and decoder output, logits, loss, attention weights and gradients, by the twins' paths.

    Attention maps need `transformers`' eager attention; everything else uses its default attention. `rules`: from Flax
    names to the model's; by default those of the checkpoint's family.
    """
    config = checkpoint.config
    if rules is None:
        assert checkpoint.layout is not None
        rules = family(checkpoint.layout).rules(config)

    def run(batch: Batch) -> Outputs:
        src, tgt, labels = (torch.from_numpy(array) for array in (batch.src_tokens, batch.tgt_tokens, batch.labels))
        keep = src != config.pad_id if batch.src_mask is None else torch.from_numpy(batch.src_mask)
        inputs = {"input_ids": src, "attention_mask": keep.long(), "decoder_input_ids": tgt, "use_cache": False}
        _set_attention(model, "sdpa")
        result = model(**inputs, output_hidden_states=True)
        losses = torch.nn.functional.cross_entropy(
            result.logits.flatten(0, 1), labels.flatten(), ignore_index=config.pad_id, reduction="sum"
        )
        loss = losses / (labels != config.pad_id).sum().clamp(min=1)
        outputs = {
            "encoder.output": result.encoder_last_hidden_state,
            "decoder.output": result.decoder_hidden_states[-1],
        }
        outputs |= {"logits": result.logits, "loss": loss} | _gradients(model, loss, config, rules)
        _set_attention(model, "eager")
        with torch.no_grad():
            result = model(**inputs, output_attentions=True)
        _set_attention(model, "sdpa")
        maps = {
            "encoder.layers.{}.self_attention.weights": result.encoder_attentions,
            "decoder.layers.{}.self_attention.weights": result.decoder_attentions,
            "decoder.layers.{}.cross_attention.weights": result.cross_attentions,
        }
        outputs |= {path.format(i): a for path, layers in maps.items() for i, a in enumerate(layers)}
        return outputs

    return run


def _set_attention(model: Any, name: str) -> None:
    """Set the attention of a model and of its stacks: before 5.20, `transformers` omits those of T5's family."""
    parts: list[Any] = [*model.modules()] if isinstance(model, torch.nn.Module) else [model]
    for part in parts:
        if hasattr(part, "set_attn_implementation"):
            part.set_attn_implementation(name)


def _gradients(model: Any, loss: torch.Tensor, config: TransformerConfig, rules: Sequence[Rule]) -> Outputs:
    """The gradient of every trained array by Flax name; tied tensors are one parameter on both sides."""
    specs = flax_specs(config.replace(param_dtype="float64", compute_dtype="float64"), trained_only=True)
    rules = [rule for rule in rules if rule.source[0] in specs]
    oracle_specs = target_specs(rules, specs)
    parameters = {n: p for n, p in model.named_parameters(remove_duplicate=False) if n in oracle_specs}
    grads = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    by_name = {name: from_torch(g) for name, g in zip(parameters, grads, strict=True)}
    translated = translate([rule.inverse for rule in rules], by_name, oracle_specs)
    return {GRADIENTS + name: g for name, g in translated.items()}
