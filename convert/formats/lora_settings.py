"""The settings of a LoRA adapter: which of them rule out merging, and what holds for a module.

Source: `peft.LoraConfig`, version 0.21.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ...backend.errors import ConversionError
from ..identify.unreadable import printable

CONFIG = "adapter_config.json"
Settings = Mapping[str, Any]

# Settings that are applied, or that do not affect `merge_and_unload`; `check_settings` checks their values.
_KNOWN = """
alpha_pattern auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying eva_config exclude_modules
fan_in_fan_out inference_mode init_lora_weights layers_pattern layers_to_transform loftq_config lora_alpha lora_bias
lora_dropout lora_ga_config megatron_config megatron_core modules_to_save peft_type peft_version qalora_group_size r
rank_pattern revision runtime_config target_modules task_type trainable_token_indices use_dora use_rslora
"""
# Setting -> why an adapter that sets it cannot be merged.
_REFUSED = {
    "alora_invocation_tokens": "the adapter acts after these tokens only, and weights act everywhere",
    "arrow_config": "it chooses among several adapters for each token",
    "kasa_config": "its low-rank update has singular values of its own",
    "layer_replication": "the adapted model has more layers than its base",
    "monteclora_config": "its low-rank update is drawn at random",
    "target_parameters": "it changes parameters that are not the weight of a module",
    "use_bdlora": "its low-rank update is block-diagonal",
    "use_qalora": "its inputs are pooled before the low-rank update, for quantized weights",
    "velora_config": "its low-rank update has a projection of its own",
}
# Initializations that change the base weights too: the adapter is relative to weights that it does not store.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
_NO_WEIGHTS = ("PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT", "ADAPTION_PROMPT")
_MERGE = "merge it with peft, `AutoPeftModelForSeq2SeqLM.from_pretrained(DIR).merge_and_unload()`, and pass the result"


def check_settings(settings: Settings) -> None:
    """Raises: ConversionError if the adapter is not LoRA's, or a setting rules out merging."""
    kind = settings.get("peft_type")
    if kind in _NO_WEIGHTS:
        raise ConversionError(f"peft_type={kind!r}: it adds prompts to the input and changes no weight to merge into")
    if kind != "LORA":
        raise ConversionError(f"peft_type={printable(repr(kind))}: only LORA adapters are merged; {_MERGE}")
    for name, reason in _REFUSED.items():
        if settings.get(name):
            raise ConversionError(f"{name}={printable(repr(settings[name]))}: cannot be merged, because {reason}")
    unknown = [name for name, value in settings.items() if value and name not in {*_KNOWN.split(), *_REFUSED}]
    if unknown:
        value = printable(repr(settings[unknown[0]]))
        raise ConversionError(f"{unknown[0]}={value}: twinax does not know this setting of LoRA; {_MERGE}")
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ConversionError(
            f"init_lora_weights={start!r}: it changes the base weights at the start; save the adapter with "
            "save_pretrained(DIR, path_initial_model_for_weight_conversion=FIRST)"
        )
    for name in ("r", "lora_alpha"):
        _check_number(name, settings.get(name))
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(settings.get(name) or {}, Mapping):
            value = printable(repr(settings[name]))
            raise ConversionError(f"{name}={value}: must be a mapping from modules to numbers")
        for module, value in (settings.get(name) or {}).items():
            _check_pattern(name, module)
            _check_number(f"{name}[{module!r}]", value)
    for name in ("target_modules", "exclude_modules"):
        if isinstance(settings.get(name), str):
            _check_pattern(name, settings[name])


def _check_number(name: str, value: Any) -> None:
    is_finite = type(value) in (int, float) and abs(value) <= sys.float_info.max
    if not is_finite or (name.startswith("r") and (type(value) is not int or value < 1)):
        raise ConversionError(
            f"{name}={printable(repr(value))}: must be a {'positive integer' if name[0] == 'r' else 'finite number'}"
        )


def _check_pattern(name: str, pattern: str) -> None:
    try:
        re.compile(f"({pattern})")
    except (re.error, OverflowError, RecursionError) as error:
        raise ConversionError(f"{name}: {printable(pattern)} is not a regular expression: {error}") from None


def value_for(settings: Settings, name: str, pattern: str, module: str) -> Any:
    """The value of a setting for a module: of the first pattern that ends its path, else the adapter's."""
    patterns = settings.get(pattern) or {}
    matches = (key for key in patterns if re.match(rf"(.*\.)?({key})$", module))
    return patterns.get(next(matches, None), settings[name])


def is_target(settings: Settings, module: str) -> bool:
    """Whether `target_modules` names a module: by its path or the end of it, or as a pattern of the whole path."""
    targets = settings.get("target_modules")
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, module) is not None
    return any(f".{module}".endswith(f".{target}") for target in names_of(targets))


def names_of(value: Any) -> list[str]:
    """The names in a setting that is a name, a list of names or None."""
    return [value] if isinstance(value, str) else list(map(str, value or ()) if isinstance(value, Iterable) else ())
