"""A user's own module around `torch.nn.Transformer`: its config, and the rules between the twin's names and its own.

The encoder and decoder are those of the only `torch.nn.Transformer` in the module. Around it, the `nn.Linear` is the
output layer, each `nn.Embedding` a table of tokens, or of positions if its name says so, and any other table with a row
per position is a table of positions. What is ambiguous is refused until `names` states it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..backend.errors import ConfigError, ConversionError
from ..configs.schema import TransformerConfig
from ..formulas.position_tables import POSITION_TABLES
from .arrays.frameworks import from_torch, to_torch_tensor
from .arrays.lazy import Spec, specs_of
from .checkpoint import Checkpoint
from .layouts.torch_nn import transformer_fields, transformer_rules
from .port import LEAVES, arrays_by_name, flax_specs
from .rules import Rule, Transform, Translation, target_specs, translate

Names = Mapping[str, str] | None  # twinax name -> the module's name, for tensors outside the torch.nn.Transformer
_SIDES = {"src": "src|source|enc|encoder|input|in", "tgt": "tgt|trg|target|dec|decoder|output|out"}
_TABLES = ("src_input.positions.table", "tgt_input.positions.table")
_EMBEDDINGS = ("src_embedding.weight", "tgt_embedding.weight")
_OUTPUT = ("output.proj.weight", "output.bias")
_OUTSIDE = (*_EMBEDDINGS, *_OUTPUT, *_TABLES)
_HINT = "pass names, as in names={'src_embedding.weight': 'first.weight', 'tgt_embedding.weight': 'second.weight'}"


def from_module(
    module: nn.Module, *, pad_id: int, embedding_scale: str, names: Names = None, **fields: Any
) -> Checkpoint:
    """The checkpoint of a module around `torch.nn.Transformer`; its `to_flax()` is the twin.

    `embedding_scale` and `fields` are the config's fields that no tensor states: `decoder_start_id`, `eos_id`,
    `decoder_mask`, and `positions` of a module without a position table. `names` has the module's names of
    `src_embedding.weight`, `tgt_embedding.weight`, `output.proj.weight`, `output.bias`, `src_input.positions.table` and
    `tgt_input.positions.table`, where they are ambiguous.

    Raises:
        ConversionError: the module has a part that twinax does not support or that cannot be identified, or `fields`
            contradict it.
    """
    own = _Module(module, names)
    stated = own.fields()
    if contradictions := [f"{n}={v!r}: the module has {stated[n]!r}" for n, v in fields.items() if n in stated != v]:
        raise ConversionError("; ".join(contradictions))
    length = stated.get("position_table_length", TransformerConfig.max_length)
    try:
        config = TransformerConfig(
            **{"max_length": length, "pad_id": pad_id, "embedding_scale": embedding_scale} | stated | fields
        )
    except (ConfigError, TypeError) as error:
        raise ConversionError(str(error)) from None
    specs, arrays = flax_specs(config), {}
    for name in _TABLES if config.positions in POSITION_TABLES else ():
        arrays[name] = POSITION_TABLES[config.positions](*specs[name].shape).astype(specs[name].dtype)
    port = own.translation({name: spec for name, spec in specs.items() if name not in arrays})
    return Checkpoint(config, arrays | translate(port.inverses, own.arrays(), port.target_specs))


def module_state_dict(params: Any, module: nn.Module, *, names: Names = None) -> dict[str, torch.Tensor]:
    """The argument of `module.load_state_dict`, from the arrays of the twin of `from_module`, by Flax name.

    Buffers that the twin does not have are the module's.

    Raises:
        ConversionError: as `from_module`; or the arrays do not fit the module.
    """
    own = _Module(module, names)
    arrays = {name: np.asarray(a) for name, a in arrays_by_name(params).items()}
    computed = {*_TABLES} - {source for rule in own.rules for source in rule.source}
    port = own.translation(own.specs())
    tensors = translate(port.rules, {n: a for n, a in arrays.items() if n not in computed}, port.specs)
    return {
        name: to_torch_tensor(tensors[own.first[name]]) if own.first[name] in tensors else tensor
        for name, tensor in module.state_dict().items()
    }


def trained_translation(module: nn.Module, specs: Mapping[str, Spec], names: Names = None) -> Translation:
    """The rules from the Flax names of trained parameters, of these specs, to those of `module.named_parameters()`.

    Raises:
        ConversionError: as `from_module`; or the twin has two parameters where the module has one.
    """
    own = _Module(module, names)
    if own.tables.get(_TABLES[0]) in own.trained and len({*own.tables.values()}) < len(own.tables):
        raise ConversionError(
            f"{own.tables[_TABLES[0]]}: is one parameter in the module, and one per side in the twin, so that their "
            "updates differ"
        )
    return own.translation(specs)


class _Module:
    """A module's tensors, and the rules to them; a tensor with several names has the first."""

    def __init__(self, module: nn.Module, names: Names):
        transformers = [(name, m) for name, m in module.named_modules() if isinstance(m, nn.Transformer)]
        if len(transformers) != 1:
            raise ConversionError(
                f"{type(module).__name__}: has {len(transformers)} torch.nn.Transformer; one is needed, with "
                "embeddings and output layer in the module around it"
            )
        prefix, self.transformer = f"{transformers[0][0]}.".removeprefix("."), transformers[0][1]
        tensors, first = module.state_dict(keep_vars=True), {}
        self.first = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
        self.tensors = {name: tensor for name, tensor in tensors.items() if self.first[name] == name}
        self.trained = {name for name, _ in module.named_parameters()}
        inside = {id(m) for m in self.transformer.modules()}
        self.modules = {name: m for name, m in module.named_modules() if id(m) not in inside}
        outside = {name: tensor for name, tensor in self.tensors.items() if not name.startswith(prefix)}
        self.parts, self.tables = self._identify(outside, dict(names or {}))
        if left := sorted(
            name for name in outside if name in self.trained - {*self.parts.values(), *self.tables.values()}
        ):
            raise ConversionError(f"the module's {', '.join(left)}: twinax has no such part, or {_HINT}")
        self.rules = [*transformer_rules(transformer_fields(self.transformer), prefix), *self._outside_rules()]

    def arrays(self) -> dict[str, np.ndarray]:
        """The module's arrays that the rules have."""
        return {name: from_torch(self.tensors[name]) for rule in self.rules for name in rule.target}

    def specs(self) -> dict[str, Spec]:
        """The specs of the twin's arrays."""
        return target_specs([rule.inverse for rule in self.rules], specs_of(self.arrays()))

    def translation(self, specs: Mapping[str, Spec]) -> Translation:
        """The rules from the Flax arrays of these specs. Raises: ConversionError if the module lacks one."""
        rules = [rule for rule in self.rules if {*rule.source} <= specs.keys()]
        if missing := specs.keys() - {name for rule in rules for name in rule.source}:
            raise ConversionError(f"the module has no {', '.join(sorted(missing))}, or {_HINT}")
        return Translation.of(rules, specs)

    def fields(self) -> dict[str, Any]:
        """The config fields that the module states."""
        fields, source = transformer_fields(self.transformer), self.parts[_EMBEDDINGS[0]]
        target = self.parts.get(_EMBEDDINGS[1], source)
        fields["src_vocab_size"], fields["tgt_vocab_size"] = (len(self.tensors[name]) for name in (source, target))
        fields |= {"shared_embeddings": target == source, "tied_output": _OUTPUT[0] not in self.parts}
        fields["output_bias"] = "learned" if _OUTPUT[1] in self.parts else "none"
        if self.tables:
            table = self.tables[_TABLES[0]]
            fields["positions"] = "learned" if table in self.trained else "stored"
            fields["position_table_length"] = self.tensors[table].numel() // self.transformer.d_model
        rates = {module.p for module in self.modules.values() if isinstance(module, nn.Dropout)} or {0.0}
        if len(rates) > 1:
            raise ConversionError(f"the module has the dropout rates {sorted(rates)}; the embeddings need one")
        return fields | {"embedding_dropout": rates.pop()}

    def _outside_rules(self) -> list[Rule]:
        rules = []
        for twin_name, module_name in self.parts.items():
            path, _, leaf = twin_name.rpartition(".")
            leaf = "embedding" if twin_name in _EMBEDDINGS else "kernel" if leaf == "weight" else leaf
            rules.append(Rule((f"{path}.{leaf}",), (module_name,), LEAVES[leaf][1]))
        for module_name in dict.fromkeys(self.tables.values()):
            sides = tuple(side for side in _TABLES if self.tables[side] == module_name)
            shape, table = self.tensors[module_name].shape, (-1, self.transformer.d_model)
            rules.append(Rule(sides, (module_name,), _reshape(shape, table, len(sides))))
        return rules

    def _identify(self, outside: Mapping[str, torch.Tensor], names: dict[str, str]) -> tuple[dict[str, str], ...]:
        """(embeddings and output, position tables): the module's names by the twin's."""
        if wrong := [
            f"{twin_name}={module_name!r}" for twin_name, module_name in names.items() if module_name not in self.first
        ]:
            raise ConversionError(f"names: the module has no {', '.join(wrong)}")
        if wrong := sorted(names.keys() - {*_OUTSIDE}):
            raise ConversionError(f"names: {', '.join(wrong)}: must be of {', '.join(_OUTSIDE)}")
        names = {
            twin_name: self.first[t] for twin_name, t in ({n: n for n in _OUTSIDE if n in self.first} | names).items()
        }
        kinds = {
            f"{path}.weight": type(m) for path, m in self.modules.items() if isinstance(m, nn.Embedding | nn.Linear)
        }
        linear = [name for name, kind in kinds.items() if issubclass(kind, nn.Linear)]
        if len(linear) == 1 and not names.keys() & {*_OUTPUT}:
            names[_OUTPUT[0]] = self.first[linear[0]]
            bias = f"{linear[0].removesuffix('weight')}bias"
            names |= {_OUTPUT[1]: bias} if bias in outside else {}
        embeddings = [name for name, kind in kinds.items() if issubclass(kind, nn.Embedding)]
        tables = [name for name in embeddings if "pos" in name.lower()]
        tables += [name for name, tensor in outside.items() if name not in kinds and self._is_table(tensor)]
        self._assign(_EMBEDDINGS, [name for name in embeddings if name not in tables], names)
        self._assign(_TABLES, tables, names)
        if _EMBEDDINGS[0] not in names:
            raise ConversionError(f"the module has no embedding outside torch.nn.Transformer, or {_HINT}")
        target = names.get(_EMBEDDINGS[1], names[_EMBEDDINGS[0]])
        parts = {twin_name: names[twin_name] for twin_name in (*_EMBEDDINGS, *_OUTPUT) if twin_name in names}
        if target == parts[_EMBEDDINGS[0]]:
            parts.pop(_EMBEDDINGS[1], None)
        if parts.get(_OUTPUT[0]) == target:
            del parts[_OUTPUT[0]]
        return parts, {twin_name: names[twin_name] for twin_name in _TABLES if twin_name in names}

    def _is_table(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has a row per position; a mask has infinities or is not of numbers."""
        rows = [size for size in tensor.shape if size != 1]
        is_table = len(rows) == 2 and rows[-1] == self.transformer.d_model and tensor.is_floating_point()
        return is_table and bool(tensor.isfinite().all())

    def _assign(self, sides: tuple[str, str], candidates: Sequence[str], names: dict[str, str]) -> None:
        """Add the tensors of both sides: one is of both; of several, their names must say which is which."""
        stated = {names[side] for side in sides if side in names}
        candidates = [name for name in candidates if self.first[name] not in stated]
        for side, words in zip(sides, _SIDES.values(), strict=True):
            if side in names or not candidates:
                continue
            pattern = re.compile(rf"(^|[._])({words})(?=[._]|$)")
            matches = [name for name in candidates if len(candidates) == 1 or pattern.search(name.lower())]
            if len(matches) != 1:
                raise ConversionError(f"which of {', '.join(candidates)} is {side}? {_HINT}")
            names[side] = self.first[matches[0]]


def _reshape(shape: Sequence[int], table: tuple[int, int], copies: int) -> Transform:
    """A position table of several sides <-> one tensor, with dimensions of size 1."""
    return Transform(
        lambda arrays: [arrays[0].reshape(shape)], lambda arrays: [arrays[0].reshape(table) for _ in range(copies)]
    )
