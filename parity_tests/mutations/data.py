"""Mistakes in corpora, batches and their order."""

from parity_tests.mutations.planting import Mutation

_BOOKS = ("tests/test_bookkeeping.py",)
_BPE_DROPOUT = ("tests/test_bpe_dropout.py",)
_DATASET = ("tests/test_dataset.py",)
_CORPUS = ("tests/test_corpus.py",)
_BUCKETS = ("tests/test_buckets.py",)
_TOKENS = ("tests/test_tokenization.py",)
_FAMILIES, _FAMILY_TEXT = ("tests/test_family_tokenizers.py",), ("tests/test_family_text.py",)

DATA = (
    Mutation(
        "every epoch in the same order",
        "train.data.dataset.Batches.__getitem__",
        "encoded, plan = self._epoch(epoch)",
        "encoded, plan = self._epoch(0)",
        _BOOKS,
    ),
    Mutation(
        "every epoch has the same BPE-dropout",
        "train.data.bpe_dropout.BpeDropout.epoch",
        "(self.seed, number, side)",
        "(self.seed, 0, side)",
        _BPE_DROPOUT,
    ),
    Mutation(
        "a skipped merge stays skipped",
        "train.data.bpe_dropout._merge",
        "np.atleast_1d(rounds)",
        "np.atleast_1d(0)",
        _BPE_DROPOUT,
    ),
    Mutation(
        "merges across words",
        "train.data.bpe_dropout._possible_merges",
        "np.append(words[1:] == words[:-1], False)",
        "np.append(words[1:] >= 0, False)",
        _BPE_DROPOUT,
    ),
    Mutation(
        "the position of a resumed run is that without BPE-dropout",
        "train.data.dataset.Batches.position",
        "if self._resegmentation is None:",
        "if self._resegmentation is not ...:",
        _BPE_DROPOUT,
    ),
    Mutation(
        "the data's seed is ignored",
        "train.data.prepare.PreparedRun.batches",
        "run.training.seed",
        "0",
        _BOOKS,
    ),
    Mutation(
        "batches are sorted by shape",
        "train.data.buckets.plan_epoch",
        "order = rng.permutation(len(batches))",
        "order = np.argsort(numbers, kind='stable')",
        _BOOKS,
    ),
    Mutation(
        "pairs of a batch are neighbors of the corpus",
        "train.data.buckets.plan_epoch",
        "shuffled = rng.permutation(len(lengths))",
        "shuffled = np.arange(len(lengths))",
        _BOOKS,
    ),
    Mutation(
        "pairs that fill no batch are dropped",
        "train.data.buckets.plan_epoch",
        "waiting[next_larger] = np.concatenate([waiting[next_larger], rows.pop()])",
        "rows.pop()",
        _BUCKETS,
    ),
    Mutation(
        "labels are not shifted",
        "train.data.dataset.pad_rows",
        "ids[1:] for ids",
        "ids[:-1] for ids",
        _DATASET,
    ),
    Mutation(
        "sources lose their end",
        "train.data.tokenization.FastTokenizer.frame_sources",
        'for role in ("bos", "eos") if getattr',
        'for role in ("bos",) if getattr',
        _DATASET,
    ),
    Mutation(
        "targets begin with BOS, not with the decoder's start",
        "train.data.dataset.encode_pairs",
        "[*sides.first_ids, *b, sides.tgt.eos_id]",
        "[sides.tgt.bos_id, *b, sides.tgt.eos_id]",
        _DATASET,
    ),
    Mutation(
        "pairs with an empty side are kept",
        "train.data.dataset.encode_pairs",
        "if len(a) <= sides.src.added or not b or not all(map(str.strip, texts)):",
        "if len(a) <= sides.src.added or not b:",
        (*_DATASET, "tests/test_tokenization.py"),
    ),
    Mutation(
        "longest sources may be one longer",
        "train.data.dataset.encode_pairs",
        "elif len(a) > sides.longest[0]",
        "elif len(a) > sides.longest[0] + 1",
        _DATASET,
    ),
    Mutation(
        "held-out pairs are trained on too",
        "train.data.prepare._split",
        "[pairs[i] for i in np.flatnonzero(~mask)]",
        "pairs",
        (*_DATASET, "tests/test_recipes.py::test_scan"),
    ),
    Mutation(
        "columns exchanged",
        "train.data.corpus._tab_separated",
        "yield fields[indices[0]], fields[indices[1]]",
        "yield fields[indices[1]], fields[indices[0]]",
        _CORPUS,
    ),
    Mutation(
        "a byte order mark is text",
        "train.data.corpus.decode_lines",
        '"utf-8-sig" if number == 1 else "utf-8"',
        '"utf-8"',
        _CORPUS,
    ),
    Mutation(
        "files of different lengths are cut",
        "train.data.corpus._parallel",
        "if src is None and tgt is None:",
        "if src is None or tgt is None:",
        _CORPUS,
    ),
    Mutation(
        "rare words have ids",
        "train.data.tokenization.train_tokenizer",
        "trainers.WordLevelTrainer(min_frequency=config.min_frequency, **common)",
        "trainers.WordLevelTrainer(**common)",
        _TOKENS,
    ),
    Mutation(
        "text is not lower-cased",
        "train.data.tokenization.prepare_text",
        "[normalizers.Lowercase()] if config.lowercase else []",
        "[]",
        _TOKENS,
    ),
    Mutation(
        "Marian's sources are segmented by the target's model",
        "train.data.sentencepiece_tokenizer.marian",
        'for name in ("source.spm", "target.spm")',
        'for name in ("target.spm", "source.spm")',
        _FAMILIES,
    ),
    Mutation(
        "pieces that Marian's vocabulary lacks are dropped",
        "train.data.sentencepiece_tokenizer.SentencePieceTokenizer.encode",
        "[self._ids.get(token, self.unk_id) for token in self._segment(text)]",
        "[self._ids[token] for token in self._segment(text) if token in self._ids]",
        _FAMILIES,
    ),
    Mutation(
        "fairseq's ids without their offset",
        "train.data.family_tokenizers._fairseq_scores",
        "*_scores(proto)[3:]",
        "*_scores(proto)[4:]",
        _FAMILIES,
    ),
    Mutation(
        "T5's sentinels in ascending order",
        "train.data.family_tokenizers._t5",
        "for token in reversed(_sentinels(files))",
        "for token in _sentinels(files)",
        _FAMILIES,
    ),
    Mutation(
        "mBART-50's sources end with their language",
        "train.data.family_tokenizers",
        '_mbart50,\n        ("language", "$A", "eos")',
        '_mbart50,\n        ("$A", "eos", "language")',
        _FAMILIES,
    ),
    Mutation(
        "NLLB's mask before its languages",
        "train.data.family_tokenizers._nllb",
        "for code in _nllb_codes(files):",
        'for code in ("<mask>", *_nllb_codes(files)):',
        _FAMILIES,
    ),
    Mutation(
        "a sentence is truncated with its end",
        "train.data.tokenizer.Tokenizer.encode_sources",
        "[[*before, *ids[:room], *after] for ids in self.encode(texts)]",
        "[[*before, *ids, *after][:longest] for ids in self.encode(texts)]",
        _FAMILIES,
    ),
    Mutation(
        "targets without the language that is forced",
        "train.translator.Translator.target_ids",
        "[*self._forced_ids, *ids, self.config.eos_id]",
        "[*ids, self.config.eos_id]",
        _FAMILY_TEXT,
    ),
    Mutation(
        "every ten thousand sentences have the same BPE-dropout",
        "train.data.bpe_dropout.segment",
        "np.arange(first, first + len(starts) - 1)",
        "np.arange(len(starts) - 1)",
        ("tests/test_bpe_dropout.py::test_every_sentence_has_random_numbers_of_its_own",),
    ),
    Mutation(
        "the shorter of two added tokens counts",
        "train.data.added_tokens.AddedTokens.__init__",
        "key=len, reverse=True",
        "key=len",
        ("tests/test_added_tokens.py::test_the_longer_of_two_special_tokens_counts",),
    ),
)
