"""jadore801120: a reimplementation of the model of attention-is-all-you-need-pytorch.

As published, dropout of attention weights is always 0.1, a LayerNorm follows the positions, the padding row of an
embedding is not zero, there are only 200 positions, untied embeddings are not scaled, and beam search omits the scale
of the logits. `as_published=False` repairs all of these.

Letters: B batch, S source length, T target length, L either, N heads, D d_model, V vocabulary.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

FILL = -1e9


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes and settings of all parts, including those that depend on the variant."""

    d_model: int = 512
    d_inner: int = 2048
    n_layers: int = 6
    n_head: int = 8
    d_k: int = 64
    d_v: int = 64
    dropout: float = 0.1
    n_position: int | None = None
    scaled: bool
    as_published: bool

    @property
    def positions(self) -> int:
        """The number of rows of the position table."""
        return self.n_position or (200 if self.as_published else 512)

    @property
    def attention_dropout(self) -> float:
        """The dropout rate of attention weights."""
        return 0.1 if self.as_published else self.dropout

    @property
    def embedding_scale(self) -> float:
        """The factor of embeddings."""
        return self.d_model**0.5 if self.scaled else 1.0

    def input_norm(self) -> nn.Module:
        """The module after the positions and their dropout."""
        return nn.LayerNorm(self.d_model, eps=1e-6) if self.as_published else nn.Identity()


def position_table(rows: int, d_model: int) -> Float[Tensor, "1 P D"]:
    """Interleaved sin and cos of position · 10000^(-2k/D), computed in float64 and rounded once."""
    frequencies = 10000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    angles = torch.arange(rows)[:, None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[None, :, :d_model].float()


class PositionalEncoding(nn.Module):
    """x + table."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.register_buffer("pos_table", position_table(sizes.positions, sizes.d_model))

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        return x + self.get_buffer("pos_table")[:, : x.shape[1]]


class MultiHeadAttention(nn.Module):
    """norm(q + dropout(fc(softmax((q / sqrt(d_k)) kᵀ) v)))."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.n_head, self.d_k, self.d_v = sizes.n_head, sizes.d_k, sizes.d_v
        self.w_qs = nn.Linear(sizes.d_model, self.n_head * self.d_k, bias=False)
        self.w_ks = nn.Linear(sizes.d_model, self.n_head * self.d_k, bias=False)
        self.w_vs = nn.Linear(sizes.d_model, self.n_head * self.d_v, bias=False)
        self.fc = nn.Linear(self.n_head * self.d_v, sizes.d_model, bias=False)
        self.attention_dropout, self.dropout = nn.Dropout(sizes.attention_dropout), nn.Dropout(sizes.dropout)
        self.layer_norm = nn.LayerNorm(sizes.d_model, eps=1e-6)

    def forward(
        self, x: Float[Tensor, "B T D"], memory: Float[Tensor, "B S D"], keep: Bool[Tensor, "B #T S"]
    ) -> Float[Tensor, "B T D"]:
        q = self.w_qs(x).unflatten(-1, (self.n_head, self.d_k)).transpose(1, 2)
        k = self.w_ks(memory).unflatten(-1, (self.n_head, self.d_k)).transpose(1, 2)
        v = self.w_vs(memory).unflatten(-1, (self.n_head, self.d_v)).transpose(1, 2)
        scores = (q / self.d_k**0.5) @ k.transpose(2, 3)
        weights = self.attention_dropout(scores.masked_fill(~keep[:, None], FILL).softmax(-1))
        output = self.dropout(self.fc((weights @ v).transpose(1, 2).flatten(2)))
        return self.layer_norm(output + x)


class PositionwiseFeedForward(nn.Module):
    """norm(x + dropout(w_2(relu(w_1(x)))))."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(sizes.d_model, sizes.d_inner), nn.Linear(sizes.d_inner, sizes.d_model)
        self.layer_norm = nn.LayerNorm(sizes.d_model, eps=1e-6)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        return self.layer_norm(self.dropout(self.w_2(self.w_1(x).relu())) + x)


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward network."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.slf_attn, self.pos_ffn = MultiHeadAttention(sizes), PositionwiseFeedForward(sizes)

    def forward(self, x: Float[Tensor, "B S D"], keep: Bool[Tensor, "B 1 S"]) -> Float[Tensor, "B S D"]:
        return self.pos_ffn(self.slf_attn(x, x, keep))


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention, then the feed-forward network."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.slf_attn, self.enc_attn = MultiHeadAttention(sizes), MultiHeadAttention(sizes)
        self.pos_ffn = PositionwiseFeedForward(sizes)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S D"],
        keep: Bool[Tensor, "B T T"],
        src_keep: Bool[Tensor, "B 1 S"],
    ) -> Float[Tensor, "B T D"]:
        return self.pos_ffn(self.enc_attn(self.slf_attn(x, x, keep), memory, src_keep))


class Encoder(nn.Module):
    """Embedding, positions, dropout, as published an additional norm, and the layers."""

    def __init__(self, vocab_size: int, pad_idx: int, sizes: Sizes):
        super().__init__()
        self.src_word_emb = nn.Embedding(vocab_size, sizes.d_model, padding_idx=pad_idx)
        self.position_enc, self.dropout = PositionalEncoding(sizes), nn.Dropout(sizes.dropout)
        self.layer_norm = sizes.input_norm()
        self.layer_stack = nn.ModuleList(EncoderLayer(sizes) for _ in range(sizes.n_layers))
        self.scale = sizes.embedding_scale

    def forward(self, tokens: Int[Tensor, "B S"], keep: Bool[Tensor, "B 1 S"]) -> Float[Tensor, "B S D"]:
        x = self.layer_norm(self.dropout(self.position_enc(self.src_word_emb(tokens) * self.scale)))
        for layer in self.layer_stack:
            x = layer(x, keep)
        return x


class Decoder(nn.Module):
    """As `Encoder`, with cross-attention to the encoder's output."""

    def __init__(self, vocab_size: int, pad_idx: int, sizes: Sizes):
        super().__init__()
        self.trg_word_emb = nn.Embedding(vocab_size, sizes.d_model, padding_idx=pad_idx)
        self.position_enc, self.dropout = PositionalEncoding(sizes), nn.Dropout(sizes.dropout)
        self.layer_norm = sizes.input_norm()
        self.layer_stack = nn.ModuleList(DecoderLayer(sizes) for _ in range(sizes.n_layers))
        self.scale = sizes.embedding_scale

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        keep: Bool[Tensor, "B T T"],
        memory: Float[Tensor, "B S D"],
        src_keep: Bool[Tensor, "B 1 S"],
    ) -> Float[Tensor, "B T D"]:
        x = self.layer_norm(self.dropout(self.position_enc(self.trg_word_emb(tokens) * self.scale)))
        for layer in self.layer_stack:
            x = layer(x, memory, keep, src_keep)
        return x


class Transformer(nn.Module):
    """Logits (B·T, V) of source and target ids."""

    def __init__(
        self,
        n_src_vocab: int,
        n_trg_vocab: int,
        src_pad_idx: int = 1,
        trg_pad_idx: int = 1,
        *,
        as_published: bool,
        trg_emb_prj_weight_sharing: bool = True,
        emb_src_trg_weight_sharing: bool = True,
        scale_emb_or_prj: str = "prj",
        **sizes: int | float,
    ):
        super().__init__()
        self.src_pad_idx, self.trg_pad_idx, self.as_published = src_pad_idx, trg_pad_idx, as_published
        tied = trg_emb_prj_weight_sharing
        scaled = scale_emb_or_prj == "emb" if tied else not as_published
        settings = Sizes(scaled=scaled, as_published=as_published, **sizes)  # pyright: ignore[reportArgumentType]
        self.logit_scale = settings.d_model**-0.5 if tied and scale_emb_or_prj == "prj" else 1.0
        self.encoder = Encoder(n_src_vocab, src_pad_idx, settings)
        self.decoder = Decoder(n_trg_vocab, trg_pad_idx, settings)
        self.trg_word_prj = nn.Linear(settings.d_model, n_trg_vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)  # overwrites the zero rows of padding
        if not as_published:
            for table, pad_idx in ((self.encoder.src_word_emb, src_pad_idx), (self.decoder.trg_word_emb, trg_pad_idx)):
                nn.init.zeros_(table.weight.data[pad_idx])
        if tied:
            self.trg_word_prj.weight = self.decoder.trg_word_emb.weight
        if emb_src_trg_weight_sharing:
            self.encoder.src_word_emb.weight = self.decoder.trg_word_emb.weight

    def forward(self, src_seq: Int[Tensor, "B S"], trg_seq: Int[Tensor, "B T"]) -> Float[Tensor, "BT V"]:
        src_keep = (src_seq != self.src_pad_idx)[:, None, :]
        causal = torch.ones(trg_seq.shape[1], trg_seq.shape[1], dtype=torch.bool, device=trg_seq.device).tril()
        memory = self.encoder(src_seq, src_keep)
        x = self.decoder(trg_seq, causal & (trg_seq != self.trg_pad_idx)[:, None, :], memory, src_keep)
        return (self.trg_word_prj(x) * self.logit_scale).flatten(0, 1)


@torch.no_grad()
def translate_sentence(
    model: Transformer,
    src_seq: Int[Tensor, "1 S"],
    trg_bos_idx: int,
    trg_eos_idx: int,
    *,
    beam_size: int = 5,
    max_seq_len: int = 100,
    alpha: float = 0.7,
) -> list[int]:
    """The translation of one sentence by beam search, with start token and EOS.

    Finished hypotheses stay in the beam and grow. When all are finished, the best sum over length^alpha wins, where the
    length includes the start token. If they do not all finish, the first hypothesis is returned.
    """
    src_keep = (src_seq != model.src_pad_idx)[:, None, :]
    memory, src_keep = (side.expand(beam_size, -1, -1) for side in (model.encoder(src_seq, src_keep), src_keep))
    scale = 1.0 if model.as_published else model.logit_scale

    def next_best(sequences: Int[Tensor, "B T"]) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
        number, length = sequences.shape
        causal = torch.ones(number, length, length, dtype=torch.bool).tril()
        x = model.decoder(sequences, causal, memory[:number], src_keep[:number])
        best = (model.trg_word_prj(x[:, -1]) * scale).softmax(-1).topk(beam_size)
        return best.values.log(), best.indices

    sequences = torch.full((beam_size, max_seq_len), model.trg_pad_idx)
    sequences[:, 0] = trg_bos_idx
    first_scores, first = next_best(sequences[:1, :1])
    scores, sequences[:, 1] = first_scores[0], first[0]
    answer, lengths = 0, torch.full((beam_size,), max_seq_len)
    for step in range(2, max_seq_len):
        log_probs, tokens = next_best(sequences[:, :step])
        scores, indices = (log_probs + scores[:, None]).flatten().topk(beam_size)
        sequences[:, :step] = sequences[indices // beam_size, :step]
        sequences[:, step] = tokens.flatten()[indices]
        ends = sequences == trg_eos_idx
        lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, max_seq_len)
        if ends.any(1).all():
            answer = int((scores / lengths**alpha).argmax())
            break
    return sequences[answer, : lengths[answer]].tolist()
