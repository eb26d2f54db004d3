"""What models and configs print, and show in a notebook."""

from collections.abc import Mapping
from dataclasses import fields
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .schema import TransformerConfig


class Described:
    """A base of dataclasses: `repr` has the fields that differ from their defaults, a notebook a table of all."""

    def __repr__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    def _repr_html_(self) -> str:
        rows = {f.name: repr(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]
        changed = {f.name for f in fields(self) if getattr(self, f.name) != f.default}  # type: ignore[arg-type]
        return html_table(type(self).__name__, rows, bold=changed)


def describe_model(config: "TransformerConfig", parameters: int) -> dict[str, str]:
    """The sizes and the most important settings of a model with this many trained parameters."""
    layers = f"{config.num_encoder_layers} encoder, {config.num_decoder_layers} decoder; {config.norm_placement}-norm"
    ties = {"shared_embeddings": "source and target embedding", "tied_output": "target embedding and output layer"}
    rows = {
        "parameters": f"{parameters:,} in {config.param_dtype}",
        "layers": f"{layers}, {config.norm}",
        "width": f"{config.d_model}, {config.num_heads} heads, feed-forward {config.d_ff} ({config.activation})",
        "vocabulary": f"{config.src_vocab_size:,} source, {config.tgt_vocab_size:,} target",
        "positions": f"{config.positions}, up to {config.max_length}",
    }
    if config.relative_positions != "none":
        rows["positions"] = f"relative ({config.relative_positions}), up to {config.max_length}"
    tied = [text for field, text in ties.items() if getattr(config, field)]
    return rows | ({"tied": "; ".join(tied)} if tied else {})


def text_table(title: str, rows: Mapping[str, str]) -> str:
    """A title and one line per row."""
    width = max(map(len, rows))
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in rows.items())])


def html_table(title: str, rows: Mapping[str, str], bold: Any = ()) -> str:
    """The same in HTML; `bold`: names of emphasized rows."""
    cells = (
        f'<tr><td style="text-align:left">{escape(name)}</td><td style="text-align:left">'
        f"{f'<b>{escape(text)}</b>' if name in bold else escape(text)}</td></tr>"
        for name, text in rows.items()
    )
    return f"<table><caption>{escape(title)}</caption>{''.join(cells)}</table>"
