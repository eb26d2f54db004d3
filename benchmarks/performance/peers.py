"""Translate a text with CTranslate2 or transformers as their users do.

`python peers.py PROGRAM MODEL TOKENIZER < SOURCES`; PROGRAM is transformers, or CTranslate2's compute type.
"""

import os
import sys

BEAM_SIZE, LONGEST, BATCH = 5, 256, 32


def ctranslate2(model: str, tokenizer_file: str, lines: list[str], compute_type: str) -> list[str]:
    """CTranslate2 sorts the sentences itself."""
    import ctranslate2
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_file)
    translator = ctranslate2.Translator(
        model, compute_type=compute_type, inter_threads=1, intra_threads=os.cpu_count() or 1
    )
    sources = [encoding.tokens for encoding in tokenizer.encode_batch(lines)]
    results = translator.translate_batch(
        sources, beam_size=BEAM_SIZE, max_batch_size=BATCH, max_decoding_length=LONGEST, max_input_length=0
    )
    return tokenizer.decode_batch([[tokenizer.token_to_id(t) for t in result.hypotheses[0]] for result in results])


def transformers(model: str, tokenizer_file: str, lines: list[str]) -> list[str]:
    """`generate`, in batches of similar lengths."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForSeq2SeqLM

    tokenizer, network = Tokenizer.from_file(tokenizer_file), AutoModelForSeq2SeqLM.from_pretrained(model).eval()
    pad_id = network.config.pad_token_id
    ids = [encoding.ids for encoding in tokenizer.encode_batch(lines)]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    translations = [""] * len(ids)
    for rows in (order[start : start + BATCH] for start in range(0, len(order), BATCH)):
        width = max(len(ids[i]) for i in rows)
        tokens = torch.tensor([ids[i] + [pad_id] * (width - len(ids[i])) for i in rows])
        output = network.generate(
            input_ids=tokens, attention_mask=(tokens != pad_id).long(), num_beams=BEAM_SIZE, max_length=LONGEST + 1,
            do_sample=False, early_stopping=False, bad_words_ids=[[pad_id]],
        )  # fmt: skip
        for i, text in zip(rows, tokenizer.decode_batch(output.tolist()), strict=True):
            translations[i] = text
    return translations


if __name__ == "__main__":
    program, *files = sys.argv[1:]
    sources = sys.stdin.read().splitlines()
    texts = transformers(*files, sources) if program == "transformers" else ctranslate2(*files, sources, program)
    print(*texts, sep="\n")
