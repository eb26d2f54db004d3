"""The published systems: parameter names, and their mistakes, measured as published and as repaired."""

import math
import re

import numpy as np
import pytest
import torch
from flax import nnx
from jaxtyping import TypeCheckError
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from twinax import TransformerConfig, flax_transformer
from twinax.parity.oracles.published import D_MODEL, HEADS, LAYERS, LENGTH, PAD, SIZE, SYSTEMS
from twinax.parity.oracles.published import random_model as build
from twinax.published.annotated_transformer import module as annotated_transformer
from twinax.published.d2l_note import module as d2l_note
from twinax.published.jadore801120 import module as jadore801120
from twinax.published.leftover import module as leftover
from twinax.published.lucky_glass import module as lucky_glass
from twinax.published.registry import ORACLES


def logits(model, src, tgt):
    """Logits of a system, whatever its calling convention."""
    name = type(model).__module__.split(".")[-2]
    return ORACLES[name].call(model, src, tgt, PAD)


@pytest.fixture
def tokens():
    """Source and target of equal length, which every system accepts; the second pair is padded."""
    generator = torch.Generator().manual_seed(0)
    src, tgt = torch.randint(2, SIZE, (2, 2, LENGTH), generator=generator)
    src[1, 5:], tgt[1, 4:] = PAD, PAD
    return src, tgt


# The names in the write-ups: {…} is a choice, # is a number.
NAMES = {
    "lucky_glass": """{src,tgt}_tok_embed.embedding.weight pos_embed.additive
        {encoder,decoder}.layers.#.attention.wo {encoder,decoder}.layers.#.attention.attentions.#.{wk,wq,wv}
        decoder.layers.#.masked_attention.wo decoder.layers.#.masked_attention.attentions.#.{wk,wq,wv}
        {encoder,decoder}.layers.#.feed_forward.linear{1,2}.{weight,bias} linear.{weight,bias}""",
    "jadore801120": """encoder.src_word_emb.weight decoder.trg_word_emb.weight trg_word_prj.weight
        {encoder,decoder}.position_enc.pos_table {encoder,decoder}.layer_norm.{weight,bias}
        {encoder,decoder}.layer_stack.#.slf_attn.{w_qs,w_ks,w_vs,fc}.weight
        {encoder,decoder}.layer_stack.#.slf_attn.layer_norm.{weight,bias}
        decoder.layer_stack.#.enc_attn.{w_qs,w_ks,w_vs,fc}.weight
        decoder.layer_stack.#.enc_attn.layer_norm.{weight,bias}
        {encoder,decoder}.layer_stack.#.pos_ffn.{w_1,w_2,layer_norm}.{weight,bias}""",
    "leftover": """{encoder,decoder}.input_embedding.embedding.weight {encoder,decoder}.pos_embedding.pe
        encoder.encoder_blocks.#.multi_head_attention.w_{q,k,v,o}.{weight,bias}
        encoder.encoder_blocks.#.layer_norm{1,2}.{gamma,beta} encoder.encoder_blocks.#.ffn.fc{1,2}.{weight,bias}
        decoder.decoder_layers.#.{multi_head_attention1,cross_attention}.w_{q,k,v,o}.{weight,bias}
        decoder.decoder_layers.#.layer_norm{1,2,3}.{gamma,beta} decoder.decoder_layers.#.ffn.fc{1,2}.{weight,bias}
        decoder.proj.{weight,bias} projection.proj.{weight,bias}""",
    "d2l_note": """{encoder,decoder}.embedding.weight encoder.blocks.block_#.attention.W_{q,k,v,o}.weight
        encoder.blocks.block_#.addnorm{1,2}.ln.{weight,bias} decoder.blocks.block_#.attention{1,2}.W_{q,k,v,o}.weight
        decoder.blocks.block_#.addnorm{1,2,3}.ln.{weight,bias}
        {encoder,decoder}.blocks.block_#.ffn.s.{0,2}.{weight,bias} decoder.f.{weight,bias}""",
    "annotated_transformer": """{encoder,decoder}.layers.#.self_attn.linears.{0,1,2,3}.{weight,bias}
        decoder.layers.#.src_attn.linears.{0,1,2,3}.{weight,bias}
        {encoder,decoder}.layers.#.feed_forward.w_{1,2}.{weight,bias}
        {encoder,decoder}.layers.#.sublayer.{0,1}.norm.{a_2,b_2} decoder.layers.#.sublayer.2.norm.{a_2,b_2}
        {encoder,decoder}.norm.{a_2,b_2} {src,tgt}_embed.0.lut.weight {src,tgt}_embed.1.pe
        generator.proj.{weight,bias}""",
}
REPAIRED_AWAY = {"jadore801120": r"\w+\.layer_norm\..*", "leftover": r"decoder\.proj\..*"}  # names of mistakes


def spelled_out(name):
    """Every name in a system's list, with choices and numbers (of layers and heads) expanded."""
    result = set()
    for pattern in NAMES[name].split():
        names = {""}
        for part in re.findall(r"\{[^}]*\}|#|[^{#]+", pattern):
            choices = part[1:-1].split(",") if part[0] == "{" else [part]
            names = {template + choice for template in names for choice in choices}
        layers = {template.replace("#", str(i), 1) for template in names for i in range(LAYERS)}
        result |= {template.replace("#", str(i)) for template in layers for i in range(HEADS)}
    return result


@pytest.mark.parametrize("name", SYSTEMS)
def test_names(name):
    published_names, repaired_names = spelled_out(name), set(build(name, as_published=False).state_dict())
    assert set(build(name, as_published=True).state_dict()) == published_names
    assert repaired_names == {key for key in published_names if not re.fullmatch(REPAIRED_AWAY.get(name, "-"), key)}


def change(model, src, tgt, new_src=None, new_tgt=None):
    """Largest change of each target position's logits when tokens change: (T,)."""
    model.eval()
    with torch.no_grad():
        old_logits = logits(model, src, tgt)
        new_logits = logits(model, src if new_src is None else new_src, tgt if new_tgt is None else new_tgt)
    return (new_logits - old_logits).abs().amax((0, 2))


def other_tokens(tokens, positions=slice(None)):
    """Copy of the tokens with others at these positions; padding stays."""
    result = tokens.clone()
    old = tokens[:, positions]
    result[:, positions] = torch.where(old == PAD, PAD, 2 + (old - 2 + 5) % (SIZE - 2))
    return result


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_output_depends_on_the_source(name, tokens):
    src, tgt = tokens
    assert change(build(name, as_published=False), src, tgt, other_tokens(src)).min() > 1e-4
    if name == "lucky_glass":
        assert change(build(name, as_published=True), src, tgt, other_tokens(src)).max() == 0
    else:
        assert change(build(name, as_published=True), src, tgt, other_tokens(src)).max() > 1e-4


# Systems whose earlier logits move when a later target token changes, in evaluation
NOT_CAUSAL = {"lucky_glass", "leftover", "d2l_note"}


@pytest.mark.parametrize("name", SYSTEMS)
def test_causality(name, tokens):
    src, tgt = tokens
    for position in range(1, 4):
        new_tgt = other_tokens(tgt, slice(position, None))
        assert change(build(name, as_published=False), src, tgt, None, new_tgt)[:position].max() < 1e-12
    difference = change(build(name, as_published=True), src, tgt, None, other_tokens(tgt, slice(3, None)))[:3].max()
    assert difference > 1e-3 if name in NOT_CAUSAL else difference < 1e-12


@pytest.mark.parametrize("name", SYSTEMS)
def test_padding(name, tokens):
    """More padding changes nothing where the system is repaired."""
    src, tgt = (side[:, :5] for side in tokens)
    padded = [torch.cat([side, torch.full((2, 2), PAD)], dim=1) for side in (src, tgt)]
    model = build(name, as_published=False).eval()
    torch.testing.assert_close(logits(model, *padded)[:, :5], logits(model, src, tgt), rtol=0, atol=1e-12)
    if name in ("lucky_glass", "leftover"):
        model = build(name, as_published=True).eval()
        assert (logits(model, *padded)[:, :5] - logits(model, src, tgt)).abs().max() > 1e-3


@pytest.mark.parametrize(("as_published", "missing"), [(True, 61), (False, 0)])
def test_lucky_glass_trains_a_third_of_its_tensors(tokens, as_published, missing):
    """61 of 98 tensors get no gradient because the cross-attention's output is discarded."""
    model = build("lucky_glass", as_published)
    logits(model, *tokens).sum().backward()
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert len(parameters) == 98
    assert sum(p.grad is None for p in parameters) == missing


def test_lucky_glass_positions():
    """The argument of the sine grows to 9.6e6, and noise overwrites the table; repaired, it is the paper's."""
    arguments = 10000.0 ** (torch.arange(0, 512, 2, dtype=torch.float64) / 512) * 999
    assert arguments.max() == pytest.approx(9.6e6, rel=0.01)
    assert lucky_glass.published_position_table(1000, 512)[999, 511] == pytest.approx(math.sin(arguments[-1]), abs=1e-6)
    published_table = lucky_glass.Transformer(SIZE, SIZE, layers=1, as_published=True).pos_embed.additive
    assert published_table.shape == (1000, 512)
    assert 0.062 < published_table.abs().max() < 0.0631
    repaired_table = lucky_glass.Transformer(SIZE, SIZE, layers=1, as_published=False).pos_embed.additive
    assert not repaired_table.requires_grad
    expected = [math.sin(7 / 10000 ** (2 / 512)), math.cos(7 / 10000 ** (2 / 512))]
    assert repaired_table[7, 2:4].tolist() == pytest.approx(expected, abs=1e-6)


def test_position_tables_are_the_formula():
    """sin and cos in turn of position / 10000^(2i/d); the published code computes it in float32, in various orders."""
    length, width = 30, 16
    rates = 10000.0 ** (-np.arange(0, width, 2) / width)
    angles = np.arange(length)[:, None] * rates
    expected = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(length, width)
    sizes = {"d_model": width, "d_ff": 8, "layers": 1, "dropout": 0.0, "as_published": False}
    tables = [
        lucky_glass.Transformer(9, 9, heads=2, **sizes).state_dict()["pos_embed.additive"][:length],
        leftover.Transformer(9, 9, heads=2, seq_len=length, **sizes).state_dict()["encoder.pos_embedding.pe"][0],
        annotated_transformer.Transformer(9, 9, h=2, **sizes).state_dict()["src_embed.1.pe"][0, :length],
        jadore801120.Transformer(9, 9, 1, 1, d_model=width, n_position=length, as_published=False).state_dict()[
            "encoder.position_enc.pos_table"
        ][0],
    ]
    for table in [*tables, d2l_note.position_table(length, width)]:
        np.testing.assert_allclose(table, expected, atol=1e-5)


def test_a_source_of_padding_alone(tokens):
    """The output is NaN where masked scores are minus infinity; repaired, it is not."""
    src, tgt = tokens
    src = torch.full_like(src, PAD)
    model = build("lucky_glass", as_published=True)
    memory = model.encoder(model.pos_embed(model.src_tok_embed(src)), (src != PAD)[:, None, :].expand(-1, LENGTH, -1))
    assert memory.isnan().all()
    assert logits(build("lucky_glass", as_published=False), src, tgt).isfinite().all()


@pytest.mark.parametrize("name", ["jadore801120", "annotated_transformer"])
def test_dropout_of_attention_weights(name):
    """The rate stays 0.1 whatever the setting."""
    assert {m.p for m in build(name, as_published=True).modules() if isinstance(m, nn.Dropout)} == {0.0, 0.1}
    assert {m.p for m in build(name, as_published=False).modules() if isinstance(m, nn.Dropout)} == {0.0}
    assert {m.p for m in build(name, as_published=False, dropout=0.3).modules() if isinstance(m, nn.Dropout)} == {0.3}


def test_jadore801120_padding_row_and_positions():
    torch.manual_seed(0)
    published_model = jadore801120.Transformer(SIZE, SIZE, d_model=D_MODEL, n_layers=1, as_published=True)
    repaired_model = jadore801120.Transformer(SIZE, SIZE, d_model=D_MODEL, n_layers=1, as_published=False)
    assert published_model.encoder.src_word_emb.weight[PAD].abs().max() > 0
    assert repaired_model.encoder.src_word_emb.weight[PAD].abs().max() == 0
    sizes = {"d_model": 8, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "src_vocab_size": SIZE}
    for as_published in (True, False):
        config = TransformerConfig.published("jadore801120", as_published=as_published, tgt_vocab_size=SIZE, **sizes)
        twin = flax_transformer.Transformer(config, rngs=nnx.Rngs(0))
        assert bool(twin.src_embedding.embedding[PAD].any()) is as_published
    long = torch.full((1, 201), 5)
    with pytest.raises(RuntimeError, match="201"):
        published_model(long, long)
    assert repaired_model(long, long).shape == (201, SIZE)


@pytest.mark.parametrize("as_published", [True, False])
def test_jadore801120_scales(as_published, tokens):
    """If tied, logits are divided by sqrt(D) or embeddings multiplied by it; if untied, as published neither."""
    tied_model = build("jadore801120", as_published)
    assert (tied_model.logit_scale, tied_model.encoder.scale) == (D_MODEL**-0.5, 1)
    scaled_model = build("jadore801120", as_published, embedding_scale="sqrt_d_model", logit_scale="none")
    assert (scaled_model.logit_scale, scaled_model.decoder.scale) == (1, D_MODEL**0.5)
    untied_model = build("jadore801120", as_published, tied_output=False, shared_embeddings=False)
    assert (untied_model.logit_scale, untied_model.encoder.scale) == (1, 1 if as_published else D_MODEL**0.5)
    assert untied_model.trg_word_prj.weight is not untied_model.decoder.trg_word_emb.weight
    assert build("jadore801120", as_published, head_dim=2, v_head_dim=5)(*tokens).shape == (2 * LENGTH, SIZE)


def test_leftover_softmax_before_the_loss(tokens):
    """Cross entropy of a softmax stays within one nat of log V, above log V - 1."""
    model, (src, tgt) = build("leftover", as_published=True), tokens
    with torch.no_grad():
        model.projection.proj.weight.mul_(1e3)
        probabilities = logits(model, src, tgt)
        best_loss = nn.functional.cross_entropy(probabilities.flatten(0, 1), probabilities.argmax(-1).flatten())
    assert probabilities.sum(-1).allclose(torch.ones(2, LENGTH, dtype=torch.float64))
    assert math.log(SIZE) - 1 < best_loss < math.log(SIZE)
    repaired_logits = logits(build("leftover", as_published=False), src, tgt)
    assert not repaired_logits.sum(-1).allclose(torch.ones(2, LENGTH, dtype=torch.float64))


def test_leftover_lengths(tokens):
    """Lengths of source and target must be equal if cross-attention uses the encoder's mask."""
    src, tgt = tokens
    assert logits(build("leftover", as_published=False), src, tgt[:, :4]).shape == (2, 4, SIZE)
    with pytest.raises((RuntimeError, TypeCheckError), match=r"memory_mask|must match"):
        logits(build("leftover", as_published=True), src, tgt[:, :4])


def test_d2l_note_in_training(tokens):
    """The causal mask is applied in training only."""
    src, tgt = tokens
    model = build("d2l_note", as_published=True).train()
    difference = logits(model, src, tgt) - logits(model, src, other_tokens(tgt, slice(3, None)))
    assert difference[:, :3].abs().max() < 1e-12


def test_d2l_note_cache(tokens):
    """The repaired decoder gives the same token by token as at once; the published one returns too many rows."""
    src, tgt = tokens
    mask = (src == PAD)[:, None, :]
    repaired_model, published_model = (build("d2l_note", as_published).eval() for as_published in (False, True))
    state = repaired_model.decoder.init_state(repaired_model.encoder(src, mask), mask)
    steps = [repaired_model.decoder(tgt[:, i : i + 1], state)[0] for i in range(LENGTH)]
    torch.testing.assert_close(torch.cat(steps, 1), logits(repaired_model, src, tgt), rtol=0, atol=1e-12)
    state = published_model.decoder.init_state(published_model.encoder(src, mask), mask)
    assert published_model.decoder(tgt[:, :1], state)[0].shape == (2, LENGTH, SIZE)
    with pytest.raises(RuntimeError, match="must match"):  # and only lengths 1 and the table's work
        logits(published_model, src, tgt[:, :3])


def test_the_command_on_a_state_dict(command, tmp_path):
    """The file is recognized, described, converted and written back without further flags."""
    model = build("jadore801120", as_published=True).float()
    source, target, output = (tmp_path / name for name in ("theirs.pt", "ours", "back.pt"))
    torch.save(model.state_dict(), source)
    status, out, _ = command("inspect", source)
    assert status == 0
    assert "layout" in out
    assert "jadore801120" in out
    assert "assumed num_heads=8, embedding_scale='none', logit_scale='rsqrt_d_model'" in " ".join(
        out.replace("│", " ").split()
    )
    assert command("convert", source, target)[0] == 0
    assert command("convert", target, output, "--layout", "jadore801120")[0] == 0
    state = torch.load(output, weights_only=True)["model"]
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    assert len(state) == len(model.state_dict())


def test_the_command_is_told_what_the_tensors_do_not_say(command, tmp_path):
    model = build("leftover", as_published=True)
    torch.save(model.state_dict(), tmp_path / "theirs.pt")
    status, out, _ = command("inspect", tmp_path / "theirs.pt")
    assert status == 0
    assert "no config: " in " ".join(out.split())
    status, _, err = command("convert", tmp_path / "theirs.pt", tmp_path / "ours.pt")
    assert (status, err.count("\n")) == (2, 1)
    assert "leftover:num_heads=4" in err
    status, out, _ = command(
        "convert", tmp_path / "theirs.pt", tmp_path / "ours.pt", "--config", "leftover:num_heads=4"
    )
    assert status == 0
    assert "unused, kept" in " ".join(out.split())
    assert "decoder.proj.weight" in out
    assert "decoder.proj.weight" in command("inspect", tmp_path / "ours.pt")[1]


ASSUMED = "ours.pt: assumed pad_id=1, bos_id=2, eos_id=3, because the file does not state it"
WORDS = ["[UNK]", "[PAD]", "[SOS]", "[EOS]", *"abcdefghi"]


@pytest.fixture
def model_with_words(command, tmp_path):
    """The repaired leftover with vocabularies: a tokenizer.json for the source, a word list for the target."""
    model = build("leftover", as_published=False).eval()
    with torch.no_grad():
        model.get_parameter("projection.proj.bias")[:3] -= 100  # the command prints no special token
    torch.save(model.state_dict(), tmp_path / "theirs.pt")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "src.json"))
    (tmp_path / "tgt.txt").write_text("\n".join(WORDS) + "\n")
    arguments = (
        "--config",
        "leftover:repaired,num_heads=4",
        "--tokenizer",
        tmp_path / "src.json",
        tmp_path / "tgt.txt",
    )
    assert command("convert", tmp_path / "theirs.pt", tmp_path / "ours.pt", *arguments)[0] == 0
    return model


def test_text_through_a_published_file(command, model_with_words, tmp_path):
    """The command's translation equals that of the system's own greedy search."""
    (tmp_path / "text").write_text("a b c\ni h\n")
    status, out, err = command("translate", tmp_path / "ours.pt", tmp_path / "text", "--beam-size", "1")
    assert (status, ASSUMED in err) == (0, True)
    for line, ids in zip(out.splitlines(), ([2, 4, 5, 6, 3], [2, 12, 11, 3]), strict=True):
        output_ids = leftover.greedy_decode(model_with_words, torch.tensor([ids]), 1, 2, 3, LENGTH)[1:]
        assert line.split() == [WORDS[i] for i in output_ids if i != 3]
    status, out, err = command("parity", tmp_path / "ours.pt", "--src", tmp_path / "text")
    assert (status, ASSUMED in err) == (0, True)
    assert "leftover: largest float64 difference of either model from it" in " ".join(out.split())
    assert out.splitlines()[-1] == "equal, assuming pad_id=1, bos_id=2, eos_id=3"


WRONG_WORDS = {
    "": r"has no unknown token '\[UNK\]'",
    "[UNK]\n[PAD]\n": r"words.txt: has 2 tokens, so none with the model's bos_id=2",
    "a\nb\nc\nd\n": r"words.txt: has no unknown token '\[UNK\]'",
    "[UNK]\na\na\nb\n": r"words.txt: must have each token once, but 'a' occurs again",
    "\n".join([*WORDS, "more"]): r"the src tokenizer has 1 tokens beyond the model's 13 \(the first: 'more', id 13\)",
}


@pytest.mark.parametrize("words", WRONG_WORDS)
def test_wrong_words(command, words, tmp_path):
    torch.save(build("leftover", as_published=False).state_dict(), tmp_path / "theirs.pt")
    (tmp_path / "words.txt").write_text(words)
    arguments = ("--config", "leftover:repaired,num_heads=4", "--tokenizer", tmp_path / "words.txt")
    status, _, err = command("convert", tmp_path / "theirs.pt", tmp_path / "ours.pt", *arguments)
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(WRONG_WORDS[words], err)
    assert not (tmp_path / "ours.pt").exists()


def test_a_tokenizer_more(command, model_with_words, tmp_path):
    status, _, err = command("convert", tmp_path / "ours.pt", tmp_path / "x.pt", "--tokenizer", tmp_path / "tgt.txt")
    assert (status, err.count("\n")) == (2, 1)
    assert "the checkpoint has a tokenizer (source_tokenizer/tokenizer.json" in err
