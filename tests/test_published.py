"""The published systems: the names of their parameters, and their mistakes, measured as published and repaired."""

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
from twinax.parity.published import D_MODEL, HEADS, LAYERS, LENGTH, PAD, SIZE, SYSTEMS
from twinax.parity.published import random_model as build
from twinax.published.annotated_transformer import module as annotated_transformer
from twinax.published.d2l_note import module as d2l_note
from twinax.published.jadore801120 import module as jadore801120
from twinax.published.leftover import module as leftover
from twinax.published.lucky_glass import module as lucky_glass
from twinax.published.registry import ORACLES


def logits(model, src, tgt):
    """As its system is called."""
    name = type(model).__module__.split(".")[-2]
    return ORACLES[name].call(model, src, tgt, PAD)


@pytest.fixture
def tokens():
    """Source and target of one length, which every system takes; the second pair is padded."""
    generator = torch.Generator().manual_seed(0)
    src, tgt = torch.randint(2, SIZE, (2, 2, LENGTH), generator=generator)
    src[1, 5:], tgt[1, 4:] = PAD, PAD
    return src, tgt


# The names that the write-ups list: one of {…}, and # a number.
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
    """Every name of a list with its choices and numbers (of layers and heads) spelled out."""
    found = set()
    for pattern in NAMES[name].split():
        names = {""}
        for part in re.findall(r"\{[^}]*\}|#|[^{#]+", pattern):
            choices = part[1:-1].split(",") if part[0] == "{" else [part]
            names = {known + choice for known in names for choice in choices}
        layers = {known.replace("#", str(i), 1) for known in names for i in range(LAYERS)}
        found |= {known.replace("#", str(i)) for known in layers for i in range(HEADS)}
    return found


@pytest.mark.parametrize("name", SYSTEMS)
def test_names(name):
    published, repaired = spelled_out(name), set(build(name, as_published=False).state_dict())
    assert set(build(name, as_published=True).state_dict()) == published
    assert repaired == {key for key in published if not re.fullmatch(REPAIRED_AWAY.get(name, "-"), key)}


def change(model, src, tgt, new_src=None, new_tgt=None):
    """Largest change of each target position's logits when tokens change: (T,)."""
    model.eval()
    with torch.no_grad():
        before = logits(model, src, tgt)
        after = logits(model, src if new_src is None else new_src, tgt if new_tgt is None else new_tgt)
    return (after - before).abs().amax((0, 2))


def other(tokens, at=slice(None)):
    """Other tokens at these positions; padding stays."""
    changed = tokens.clone()
    changed[:, at] = torch.where(tokens[:, at] == PAD, PAD, 2 + (tokens[:, at] - 2 + 5) % (SIZE - 2))
    return changed


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_output_depends_on_the_source(name, tokens):
    src, tgt = tokens
    assert change(build(name, as_published=False), src, tgt, other(src)).min() > 1e-4
    if name == "lucky_glass":
        assert change(build(name, as_published=True), src, tgt, other(src)).max() == 0
    else:
        assert change(build(name, as_published=True), src, tgt, other(src)).max() > 1e-4


# Systems whose earlier logits move when a later target token changes, in evaluation
NOT_CAUSAL = {"lucky_glass", "leftover", "d2l_note"}


@pytest.mark.parametrize("name", SYSTEMS)
def test_causality(name, tokens):
    src, tgt = tokens
    for at in range(1, 4):
        assert change(build(name, as_published=False), src, tgt, None, other(tgt, slice(at, None)))[:at].max() < 1e-12
    moved = change(build(name, as_published=True), src, tgt, None, other(tgt, slice(3, None)))[:3].max()
    assert moved > 1e-3 if name in NOT_CAUSAL else moved < 1e-12


@pytest.mark.parametrize("name", SYSTEMS)
def test_padding(name, tokens):
    """More padding changes nothing where the system is repaired."""
    src, tgt = (side[:, :5] for side in tokens)
    longer = [torch.cat([side, torch.full((2, 2), PAD)], dim=1) for side in (src, tgt)]
    model = build(name, as_published=False).eval()
    torch.testing.assert_close(logits(model, *longer)[:, :5], logits(model, src, tgt), rtol=0, atol=1e-12)
    if name in ("lucky_glass", "leftover"):
        model = build(name, as_published=True).eval()
        assert (logits(model, *longer)[:, :5] - logits(model, src, tgt)).abs().max() > 1e-3


@pytest.mark.parametrize(("as_published", "without"), [(True, 61), (False, 0)])
def test_lucky_glass_trains_a_third_of_its_tensors(tokens, as_published, without):
    """61 of 98 tensors get no gradient where the cross-attention's output is thrown away."""
    model = build("lucky_glass", as_published)
    logits(model, *tokens).sum().backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 98
    assert sum(p.grad is None for p in trained) == without


def test_lucky_glass_positions():
    """The table grows to 9.6e6 inside its sine, and noise overwrites it; repaired, it is that of the paper."""
    arguments = 10000.0 ** (torch.arange(0, 512, 2, dtype=torch.float64) / 512) * 999
    assert arguments.max() == pytest.approx(9.6e6, rel=0.01)
    assert lucky_glass.published_position_table(1000, 512)[999, 511] == pytest.approx(math.sin(arguments[-1]), abs=1e-6)
    published = lucky_glass.Transformer(SIZE, SIZE, layers=1, as_published=True).pos_embed.additive
    assert published.shape == (1000, 512)
    assert 0.062 < published.abs().max() < 0.0631
    repaired = lucky_glass.Transformer(SIZE, SIZE, layers=1, as_published=False).pos_embed.additive
    assert not repaired.requires_grad
    expected = [math.sin(7 / 10000 ** (2 / 512)), math.cos(7 / 10000 ** (2 / 512))]
    assert repaired[7, 2:4].tolist() == pytest.approx(expected, abs=1e-6)


def test_position_tables_are_the_formula():
    """sin and cos in turn, of position / 10000^(2i/d); the published code has it in float32, in various orders."""
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
    for found in [*tables, d2l_note.position_table(length, width)]:
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_source_of_padding_alone(tokens):
    """Is NaN where masked scores are minus infinity; repaired, it is not."""
    src, tgt = tokens
    src = torch.full_like(src, PAD)
    model = build("lucky_glass", as_published=True)
    memory = model.encoder(model.pos_embed(model.src_tok_embed(src)), (src != PAD)[:, None, :].expand(-1, LENGTH, -1))
    assert memory.isnan().all()
    assert logits(build("lucky_glass", as_published=False), src, tgt).isfinite().all()


@pytest.mark.parametrize("name", ["jadore801120", "annotated_transformer"])
def test_dropout_of_attention_weights(name):
    """Stays 0.1 whatever the setting."""
    assert {m.p for m in build(name, as_published=True).modules() if isinstance(m, nn.Dropout)} == {0.0, 0.1}
    assert {m.p for m in build(name, as_published=False).modules() if isinstance(m, nn.Dropout)} == {0.0}
    assert {m.p for m in build(name, as_published=False, dropout=0.3).modules() if isinstance(m, nn.Dropout)} == {0.3}


def test_jadore801120_padding_row_and_positions():
    torch.manual_seed(0)
    published = jadore801120.Transformer(SIZE, SIZE, d_model=D_MODEL, n_layers=1, as_published=True)
    repaired = jadore801120.Transformer(SIZE, SIZE, d_model=D_MODEL, n_layers=1, as_published=False)
    assert published.encoder.src_word_emb.weight[PAD].abs().max() > 0
    assert repaired.encoder.src_word_emb.weight[PAD].abs().max() == 0
    sizes = {"d_model": 8, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "src_vocab_size": SIZE}
    for as_published in (True, False):
        config = TransformerConfig.published("jadore801120", as_published=as_published, tgt_vocab_size=SIZE, **sizes)
        twin = flax_transformer.Transformer(config, rngs=nnx.Rngs(0))
        assert bool(twin.src_embedding.embedding[PAD].any()) is as_published
    long = torch.full((1, 201), 5)
    with pytest.raises(RuntimeError, match="201"):
        published(long, long)
    assert repaired(long, long).shape == (201, SIZE)


@pytest.mark.parametrize("as_published", [True, False])
def test_jadore801120_scales(as_published, tokens):
    """Tied, logits are divided by sqrt(D) or embeddings multiplied; untied, as published neither."""
    tied = build("jadore801120", as_published)
    assert (tied.logit_scale, tied.encoder.scale) == (D_MODEL**-0.5, 1)
    embedded = build("jadore801120", as_published, embedding_scale="sqrt_d_model", logit_scale="none")
    assert (embedded.logit_scale, embedded.decoder.scale) == (1, D_MODEL**0.5)
    untied = build("jadore801120", as_published, tied_output=False, shared_embeddings=False)
    assert (untied.logit_scale, untied.encoder.scale) == (1, 1 if as_published else D_MODEL**0.5)
    assert untied.trg_word_prj.weight is not untied.decoder.trg_word_emb.weight
    assert build("jadore801120", as_published, head_dim=2, v_head_dim=5)(*tokens).shape == (2 * LENGTH, SIZE)


def test_leftover_softmax_before_the_loss(tokens):
    """Cross entropy of a softmax stays within one nat of log V, above log V - 1."""
    model, (src, tgt) = build("leftover", as_published=True), tokens
    with torch.no_grad():
        model.projection.proj.weight.mul_(1e3)
        probabilities = logits(model, src, tgt)
        best = nn.functional.cross_entropy(probabilities.flatten(0, 1), probabilities.argmax(-1).flatten())
    assert probabilities.sum(-1).allclose(torch.ones(2, LENGTH, dtype=torch.float64))
    assert math.log(SIZE) - 1 < best < math.log(SIZE)
    repaired = logits(build("leftover", as_published=False), src, tgt)
    assert not repaired.sum(-1).allclose(torch.ones(2, LENGTH, dtype=torch.float64))


def test_leftover_lengths(tokens):
    """Source and target of two lengths cannot go in where cross-attention gets the encoder's mask."""
    src, tgt = tokens
    assert logits(build("leftover", as_published=False), src, tgt[:, :4]).shape == (2, 4, SIZE)
    with pytest.raises((RuntimeError, TypeCheckError), match=r"memory_mask|must match"):
        logits(build("leftover", as_published=True), src, tgt[:, :4])


def test_d2l_note_in_training(tokens):
    """The causal mask is there in training alone."""
    src, tgt = tokens
    model = build("d2l_note", as_published=True).train()
    moved = logits(model, src, tgt) - logits(model, src, other(tgt, slice(3, None)))
    assert moved[:, :3].abs().max() < 1e-12


def test_d2l_note_cache(tokens):
    """Token by token, the repaired decoder gives what it gives at once; the published one gives a table of rows."""
    src, tgt = tokens
    mask = (src == PAD)[:, None, :]
    repaired, published = (build("d2l_note", as_published).eval() for as_published in (False, True))
    state = repaired.decoder.init_state(repaired.encoder(src, mask), mask)
    steps = [repaired.decoder(tgt[:, i : i + 1], state)[0] for i in range(LENGTH)]
    torch.testing.assert_close(torch.cat(steps, 1), logits(repaired, src, tgt), rtol=0, atol=1e-12)
    state = published.decoder.init_state(published.encoder(src, mask), mask)
    assert published.decoder(tgt[:, :1], state)[0].shape == (2, LENGTH, SIZE)
    with pytest.raises(RuntimeError, match="must match"):  # and no length but one or the table's goes in
        logits(published, src, tgt[:, :3])


def test_the_command_on_a_state_dict(command, tmp_path):
    """Recognised, described, converted and written back, without a word about it but its name."""
    model = build("jadore801120", as_published=True).float()
    theirs, ours, back = (tmp_path / name for name in ("theirs.pt", "ours", "back.pt"))
    torch.save(model.state_dict(), theirs)
    status, out, _ = command("inspect", theirs)
    assert status == 0
    assert "layout" in out
    assert "jadore801120" in out
    assert "assumed num_heads=8, embedding_scale='none', logit_scale='rsqrt_d_model'" in " ".join(
        out.replace("│", " ").split()
    )
    assert command("convert", theirs, ours)[0] == 0
    assert command("convert", ours, back, "--layout", "jadore801120")[0] == 0
    found = torch.load(back, weights_only=True)["model"]
    assert all(torch.equal(found[key], tensor) for key, tensor in model.state_dict().items())
    assert len(found) == len(model.state_dict())


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
def with_words(command, tmp_path):
    """The repaired leftover with its words: a tokenizer.json for the source, a list for the target."""
    model = build("leftover", as_published=False).eval()
    with torch.no_grad():
        model.get_parameter("projection.proj.bias")[:3] -= 100  # the command says no special token
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


def test_text_through_a_published_file(command, with_words, tmp_path):
    """What the command translates is what the system's own greedy search finds."""
    (tmp_path / "text").write_text("a b c\ni h\n")
    status, out, err = command("translate", tmp_path / "ours.pt", tmp_path / "text", "--beam-size", "1")
    assert (status, ASSUMED in err) == (0, True)
    for line, ids in zip(out.splitlines(), ([2, 4, 5, 6, 3], [2, 12, 11, 3]), strict=True):
        found = leftover.greedy_decode(with_words, torch.tensor([ids]), 1, 2, 3, LENGTH)[1:]
        assert line.split() == [WORDS[i] for i in found if i != 3]
    status, out, err = command("parity", tmp_path / "ours.pt", "--src", tmp_path / "text")
    assert (status, ASSUMED in err) == (0, True)
    assert "leftover: largest float64 difference of either model from it" in " ".join(out.split())
    assert out.splitlines()[-1] == "equal, assuming pad_id=1, bos_id=2, eos_id=3"


WRONG_WORDS = {
    "": r"has no unknown token '\[UNK\]'",
    "[UNK]\n[PAD]\n": r"words.txt: has 2 tokens, so none with the model's bos_id=2",
    "a\nb\nc\nd\n": r"words.txt: has no unknown token '\[UNK\]'",
    "[UNK]\na\na\nb\n": r"words.txt: must have each token once, but 'a' occurs again",
    "\n".join([*WORDS, "more"]): r"the src tokenizer has 14 tokens but the model has 13",
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


def test_a_tokenizer_more(command, with_words, tmp_path):
    status, _, err = command("convert", tmp_path / "ours.pt", tmp_path / "x.pt", "--tokenizer", tmp_path / "tgt.txt")
    assert (status, err.count("\n")) == (2, 1)
    assert "the checkpoint has a tokenizer (source_tokenizer/tokenizer.json" in err
