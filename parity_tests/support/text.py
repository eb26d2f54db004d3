"""Tokenizer files as people have them, and their text against `transformers`' own tokenizers.

`transformers` 5 writes tokenizer.json only. Here directories have what version 4 and the hub have: SentencePiece models
and vocabularies, trained on any sentences.
"""

import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import sentencepiece
from tokenizers import ByteLevelBPETokenizer

from twinax.configs.data import TokenizerConfig
from twinax.inference.translator import load
from twinax.train.data.tokenizer_pair import Tokenizers
from twinax.train.text.languages import M2M100, NLLB
from twinax.train.text.pretrained import load_tokenizer

Sides = tuple[Sequence[str], Sequence[str]]  # sentences of the source's and the target's language
_T5_IDS = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
_FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")


class Variant(NamedTuple):
    """A directory: what writes its files, config.json's model_type, and tokenizer_config.json."""

    write: Callable[[Path, Sides, int], None]
    model_type: str
    settings: dict[str, Any]
    added: tuple[str, ...] = ()  # tokens with ids after those of SentencePiece, as version 4 writes them
    model: Mapping[str, Any] = MappingProxyType({})  # settings of its model
    reference: str = "AutoTokenizer"  # class of `transformers` that reads the files


def _train(sentences: Iterable[str], size: int, **settings: Any) -> bytes:
    """A SentencePiece model of at most `size` pieces."""
    file = io.BytesIO()
    fixed: dict[str, Any] = {"vocab_size": size, "hard_vocab_limit": False, "minloglevel": 2}
    trainer: Any = sentencepiece.SentencePieceTrainer
    trainer.train(sentence_iterator=iter(sentences), model_writer=file, **fixed, **settings)
    return file.getvalue()


def _pieces(model: bytes) -> list[str]:
    processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(i) for i in range(processor.get_piece_size())]


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _marian(languages: tuple[str, ...] = (), separate: bool = False) -> Callable[[Path, Sides, int], None]:
    def write(folder: Path, sides: Sides, size: int) -> None:
        models = [_train(sentences, size) for sentences in sides]
        for name, model in zip(("source.spm", "target.spm"), models, strict=True):
            (folder / name).write_bytes(model)
        groups = [models[:1], models[1:]] if separate else [models]
        for name, group in zip(("vocab.json", "target_vocab.json"), groups, strict=False):
            pieces = [piece for model in group for piece in _pieces(model)[3:]]
            first = ["</s>", "<unk>", *(["<pad>"] if separate else [])]  # the model has one padding id
            tokens = dict.fromkeys([*first, *(f">>{code}<<" for code in languages), *pieces, "<pad>"])
            _write_json(folder / name, {token: i for i, token in enumerate(tokens)})

    return write


def _sentencepiece(name: str, settings: dict[str, Any], vocabulary: bool = False) -> Callable[[Path, Sides, int], None]:
    def write(folder: Path, sides: Sides, size: int) -> None:
        model = _train([*sides[0], *sides[1]], size, **settings)
        (folder / name).write_bytes(model)
        if vocabulary:
            _write_json(folder / "vocab.json", {t: i for i, t in enumerate((*_FAIRSEQ, *_pieces(model)[3:]))})

    return write


def _byte_level(folder: Path, sides: Sides, size: int) -> None:
    tokenizer = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer.train_from_iterator(
        [*sides[0], *sides[1]], vocab_size=size + 256, special_tokens=special, show_progress=False
    )
    tokenizer.save_model(str(folder))


_FAIRSEQ_MODEL, _T5_MODEL = "sentencepiece.bpe.model", "spiece.model"
_UNIGRAM, _BPE = _sentencepiece(_FAIRSEQ_MODEL, {}), _sentencepiece(_FAIRSEQ_MODEL, {"model_type": "bpe"})
VARIANTS: dict[str, Variant] = {
    "Marian": Variant(_marian(), "marian", {"source_lang": "de", "target_lang": "en"}),
    "Marian, multilingual": Variant(_marian(("fra", "deu")), "marian", {}),
    "Marian, two vocabularies": Variant(_marian(separate=True), "marian", {"separate_vocabs": True}),
    "mBART": Variant(_UNIGRAM, "mbart", {}),
    "mBART-50": Variant(_UNIGRAM, "mbart", {"tokenizer_class": "MBart50Tokenizer"}),
    "M2M100": Variant(
        _sentencepiece(_FAIRSEQ_MODEL, {"model_type": "bpe"}, vocabulary=True),
        "m2m_100",
        {"additional_special_tokens": [f"__{code}__" for code in M2M100["m2m100"]]},
    ),
    "NLLB": Variant(_BPE, "m2m_100", {"tokenizer_class": "NllbTokenizer"}, (*NLLB, "<mask>")),
    "Pegasus": Variant(_sentencepiece(_T5_MODEL, _T5_IDS), "pegasus", {}),
    "BART": Variant(_byte_level, "bart", {}),
    "Blenderbot": Variant(_byte_level, "blenderbot", {}),
    "T5": Variant(_sentencepiece(_T5_MODEL, _T5_IDS), "t5", {"clean_up_tokenization_spaces": True}),
    "T5 v1.1": Variant(
        _sentencepiece(_T5_MODEL, _T5_IDS),
        "t5",
        {},
        model={"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    # version 5 has no tokenizer for umt5 without tokenizer.json; version 4 has T5's
    "UMT5": Variant(_sentencepiece(_T5_MODEL, _T5_IDS), "umt5", {}, reference="T5Tokenizer"),
    "mT5": Variant(
        _sentencepiece(_T5_MODEL, _T5_IDS | {"byte_fallback": True}),
        "mt5",
        {"tokenizer_class": "T5Tokenizer", "extra_ids": 0, "additional_special_tokens": None},
    ),
}
# family -> (source language, target language) to set
LANGUAGES = {
    "mBART": ("de_DE", "fr_XX"),
    "mBART-50": ("de_DE", "pl_PL"),
    "M2M100": ("de", "fr"),
    "NLLB": ("deu_Latn", "fra_Latn"),
}


def write_files(name: str, folder: Path, sides: Sides, size: int = 1000) -> None:
    """Write a family's tokenizer files and a config.json with its model_type into a folder.

    `size`: number of SentencePiece's pieces, at most.
    """
    variant = VARIANTS[name]
    folder.mkdir(parents=True, exist_ok=True)
    variant.write(folder, sides, size)
    _write_json(folder / "config.json", {"model_type": variant.model_type})
    _write_json(folder / "tokenizer_config.json", variant.settings | _added(folder, variant.added))


def _added(folder: Path, tokens: tuple[str, ...]) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    first = len(_pieces((folder / _FAIRSEQ_MODEL).read_bytes())) + 1 if tokens else 0
    entries = {str(first + i): {"content": token, **flags} for i, token in enumerate(tokens)}
    return {"added_tokens_decoder": entries} if tokens else {}


class Row(NamedTuple):
    """Texts that differ from `transformers`: ids of sources, ids of targets, and decoded texts."""

    name: str
    texts: int
    sources: list[str]
    targets: list[str]
    decoded: list[str]

    @property
    def ok(self) -> bool:
        """Whether all are equal."""
        return not (self.sources or self.targets or self.decoded)


def reference_tokenizer(name: str, folder: Path, **languages: str) -> Any:
    """The tokenizer of `transformers` for a family's files."""
    import transformers

    return getattr(transformers, VARIANTS[name].reference).from_pretrained(folder, **languages)


def compare_text(name: str, folder: Path, texts: Sequence[str]) -> Row:
    """Ids and decoded texts of a family's files, against the tokenizer of `transformers` 5."""
    languages = dict(zip(("src_lang", "tgt_lang"), LANGUAGES.get(name, ()), strict=False))
    reference = reference_tokenizer(name, folder, **languages)
    tokenizer = load_tokenizer(str(folder), TokenizerConfig())
    if languages:
        tokenizer = tokenizer.with_languages(languages["src_lang"], languages["tgt_lang"])
    src, tgt = Tokenizers.of([tokenizer])
    source_ids = [reference(text)["input_ids"] for text in texts]
    target_ids = [reference(text_target=text, add_special_tokens=False)["input_ids"] for text in texts]
    decoded = [reference.decode(ids, skip_special_tokens=True) for ids in target_ids]

    def different(values: Sequence[Any], expected: Sequence[Any]) -> list[str]:
        return [text for text, a, b in zip(texts, values, expected, strict=True) if a != b]

    sources, targets = src.encode_sources(texts), tgt.encode(texts)
    return Row(
        name,
        len(texts),
        different(sources, source_ids),
        different(targets, target_ids),
        different(tgt.decode(target_ids), decoded),
    )


# family -> what its config.json and generation_config.json say, with names of tokens in place of ids
_START = {"Pegasus": "pad", "BART": "eos", "Blenderbot": "bos", "mBART-50": "eos", "M2M100": "eos", "NLLB": "eos"}
_GENERATION: dict[str, dict[str, Any]] = {
    "Marian": {"num_beams": 6, "renormalize_logits": True},
    "BART": {"num_beams": 4, "no_repeat_ngram_size": 3, "min_length": 5, "length_penalty": 2.0, "early_stopping": True},
    "Blenderbot": {"num_beams": 3, "encoder_no_repeat_ngram_size": 3, "min_length": 4, "length_penalty": 0.65},
    "M2M100": {"num_beams": 5, "early_stopping": True},
}


def write_model(name: str, folder: Path, seed: int = 0) -> None:
    """Write a small random model of `transformers` beside a family's tokenizer files.

    Its generation_config.json is as the hub's: beam search, forbidden padding, and what the family's models set.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig

    tokenizer = reference_tokenizer(name, folder)
    ids = {role: getattr(tokenizer, f"{role}_token_id", None) for role in ("pad", "bos", "eos")}
    target = getattr(tokenizer, "target_encoder", {})
    size = max(len(tokenizer), load_tokenizer(str(folder), TokenizerConfig()).vocab_size)
    sizes: dict[str, Any] = {"vocab_size": size, "d_model": 16, "max_position_embeddings": 256, "init_std": 0.7}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 24}
    if "T5" in name:
        sizes = {"vocab_size": size, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
        sizes["initializer_factor"] = 3.0
    if target:
        sizes |= {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": len(target)}
    start = {"decoder_start_token_id": ids[_START.get(name, "pad")]}
    start |= {} if "T5" in name else {"forced_eos_token_id": ids["eos"]}
    special = {f"{role}_token_id": number for role, number in ids.items()} | start
    config = AutoConfig.for_model(VARIANTS[name].model_type, **sizes, **special, **VARIANTS[name].model)
    torch.manual_seed(seed)
    model: Any = AutoModelForSeq2SeqLM.from_config(config).eval()
    with torch.no_grad():
        for parameter_name, buffer in model.named_buffers():
            if parameter_name == "final_logits_bias":  # sentences of many lengths
                buffer[0, ids["eos"]] = 4.0
    settings = {"max_length": 24, "bad_words_ids": [[ids["pad"]]], **_GENERATION.get(name, {"num_beams": 4})}
    model.generation_config = GenerationConfig(**settings, **special)
    model.save_pretrained(folder)


def compare_translations(name: str, folder: Path, texts: Sequence[str], beam_size: int | None) -> list[tuple[str, str]]:
    """(translation by twinax, by `transformers`) of each text where they differ; None: the directory's beam size."""
    import torch
    from transformers import AutoModelForSeq2SeqLM

    languages = dict(zip(("src_lang", "tgt_lang"), LANGUAGES.get(name, ()), strict=False))
    tokenizer = reference_tokenizer(name, folder, **languages)
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder)
    # beam search of transformers before 5.18 takes the width of the logits from the source's vocabulary
    model.config.vocab_size = getattr(model.config, "decoder_vocab_size", None) or model.config.vocab_size
    options: dict[str, Any] = {} if beam_size is None else {"num_beams": beam_size}
    if languages:
        token = f"__{languages['tgt_lang']}__" if name == "M2M100" else languages["tgt_lang"]
        first = "decoder_start_token_id" if name == "mBART" else "forced_bos_token_id"
        options[first] = tokenizer.convert_tokens_to_ids(token)
    expected = []
    for text in texts:
        with torch.no_grad():
            output = model.generate(**tokenizer(text, return_tensors="pt"), **options)
        expected.append(tokenizer.decode(output[0], skip_special_tokens=True))
    translator = load(folder)
    changes: dict[str, Any] = {} if beam_size is None else {"beam_size": beam_size}
    translations = translator.translate(texts, framework="torch", **languages, **changes)
    return [pair for pair in zip(translations, expected, strict=True) if pair[0] != pair[1]]
