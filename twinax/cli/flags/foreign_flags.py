"""Flags of fairseq, `transformers`, Marian, OpenNMT and CTranslate2, with their equivalents in twinax, if any."""

from collections.abc import Iterable, Sequence

from ..usage import UsageError


def _table(*rows: tuple[str, str]) -> dict[str, str]:
    """Foreign flag -> flag of twinax; each row has several foreign flags."""
    return {foreign: flag for names, flag in rows for foreign in names.split()}


# A flag of twinax may have a value, or a remark in brackets.
_TRAIN = _table(
    ("--lr --learning-rate -lr --learn-rate", "--training.learning-rate"),
    ("--warmup-steps --warmup-updates --lr-warmup --num-warmup-steps", "--training.warmup-updates"),
    ("--lr-scheduler --lr-scheduler-type --decay-method", "--training.schedule"),
    ("--optimizer --optim", "--training.optimizer"),
    ("--weight-decay", "--training.weight-decay"),
    ("--clip-norm --max-grad-norm", "--training.clip-norm"),
    ("--label-smoothing --label-smoothing-factor", "--training.label-smoothing"),
    ("--update-freq --gradient-accumulation-steps --accum-count --optimizer-delay", "--training.accumulation"),
    ("--seed --random-seed", "--training.seed"),
    (
        "--batch-size --max-tokens --per-device-train-batch-size --train-batch-size --mini-batch --max-sentences",
        "--batches.tokens (tokens per side, padding included)",
    ),
    ("--num-workers --dataloader-num-workers", "--batches.workers"),
    ("--max-source-length --max-source-positions --src-seq-length", "--batches.max-src-length"),
    ("--max-target-length --max-target-positions --tgt-seq-length", "--batches.max-tgt-length"),
    ("--max-length", "--model.max-length"),
    ("--epochs --max-epoch --num-train-epochs --after-epochs", "--loop.epochs"),
    ("--updates --max-update --max-steps --train-steps", "--loop.updates"),
    ("--patience --early-stopping --early-stopping-patience", "--loop.patience"),
    ("--eval-steps --valid-freq --valid-steps --validate-interval-updates", "--loop.validate-every"),
    ("--save-steps --save-freq --save-interval-updates --save-checkpoint-steps", "--loop.checkpoint-every"),
    ("--save-dir --output-dir --save-model --model-dir", "--out"),
    ("--resume-from-checkpoint --restore-file --train-from --finetune-from-model", "--init-from"),
    ("--model-name-or-path --pretrained-model", "--init-from"),
    ("--arch --task", "--model.d-model, --model.d-ff, --model.num-encoder-layers and so on"),
    ("--d-model --encoder-embed-dim --decoder-embed-dim --dim-emb --hidden-size", "--model.d-model"),
    ("--d-ff --encoder-ffn-embed-dim --transformer-dim-ffn --transformer-ff", "--model.d-ff"),
    ("--heads --num-heads --encoder-attention-heads --transformer-heads", "--model.num-heads"),
    ("--encoder-layers --enc-layers --enc-depth", "--model.num-encoder-layers"),
    ("--decoder-layers --dec-layers --dec-depth", "--model.num-decoder-layers"),
    ("--dropout --transformer-dropout", "--model.residual-dropout and --model.embedding-dropout"),
    ("--attention-dropout", "--model.attention-dropout"),
    ("--activation-dropout --relu-dropout", "--model.ffn-dropout"),
    ("--fp16 --bf16 --amp --precision", "--model.compute-dtype bfloat16"),
    ("--share-all-embeddings --tied-embeddings-all", "--model.shared-embeddings and --model.tied-output"),
    ("--vocab-size --src-vocab-size --dim-vocabs", "--tokenizer.vocab-size"),
    ("--source-lang --train-file --source-file --lang", "--src (a text file)"),
    ("--src-lang", "--tokenizer.src-lang"),
    ("--tgt-lang", "--tokenizer.tgt-lang"),
    ("--target-lang", "--tgt (a text file)"),
    ("--validation-file --validpref --valid-sets", "--valid-src and --valid-tgt"),
    ("--dataset-name", "--dataset"),
    (
        "--report-to --wandb --wandb-project --tensorboard --tensorboard-logdir --logging-dir",
        "--loop.swanlab; TensorBoard's files are always written to the run",
    ),
)
# The answer to what twinax does not have begins with a word instead of a flag.
_ABSENT = "not available: "
_DEVICE = _table(
    (
        "--device --devices --gpu --gpus --cpu --cuda --no-cuda --use-cuda",
        f"{_ABSENT}JAX chooses the device; the environment variable JAX_PLATFORMS=cpu, cuda or tpu selects another",
    ),
)
_LANGUAGE = (
    "--lang --target-lang",
    "--tgt-lang",
)
_FIRST_TOKEN = ("--forced-bos-token --forced-bos-token-id", "--forced-bos")
_SEARCH = _table(
    ("--beam --num-beams --beams", "--beam-size"),
    ("--lenpen --length-penalty --normalize --alpha", "--length-exponent"),
    ("--max-len --max-len-b --max-new-tokens --max-target-length --max-output-length", "--max-length"),
    _LANGUAGE,
    _FIRST_TOKEN,
    ("--do-sample --sampling --output-sampling", "--samples"),
    ("--topk --sampling-topk --random-sampling-topk", "--top-k"),
    ("--topp --sampling-topp --random-sampling-topp", "--top-p"),
    ("--random-sampling-temp --random-sampling-temperature", "--temperature"),
    (
        "--batch-size --max-batch-size --mini-batch --per-device-eval-batch-size --batch-type",
        f"{_ABSENT}sentences of similar length are decoded together, 32 at a time",
    ),
)
_TRANSLATE = _table(
    ("--nbest --num-return-sequences", "--n-best"),
    (
        "--input --input-file --source --src --source-file --src-file -i -src",
        f"{_ABSENT}the name of the file follows that of the checkpoint: twinax translate CHECKPOINT FILE",
    ),
    (
        "--output-file --results-path --predictions-file --hyp -o -output",
        "--output",
    ),
)
_CONVERT = _table(
    (
        "--output --output-dir --output-file --out --input --checkpoint --checkpoint-path -o -i",
        f"{_ABSENT}the names follow the command: twinax convert CHECKPOINT NEW",
    ),
    ("--format --to --output-format", "--layout, or the suffix of the new name"),
    ("--torch-dtype --outtype --precision", "--dtype"),
    ("--quantization", "--quantize"),
)
_FILES = _table(
    ("--source --source-file --input --ref-src", "--src"),
    ("--target --target-file --reference --ref", "--tgt"),
)
FOREIGN: dict[str, dict[str, str]] = {
    "train": _TRAIN | _DEVICE,
    "data": _TRAIN | _DEVICE,
    "translate": _SEARCH | _TRANSLATE | _DEVICE,
    "evaluate": _SEARCH | _FILES | _DEVICE,
    "score": _FILES | _DEVICE,
    "parity": _FILES | _table(_LANGUAGE) | _DEVICE,
    "audit": _DEVICE,
    "compare": _table(("--input --data", "--inputs"), ("--output --html", "--report")) | _DEVICE,
    "convert": _CONVERT | _DEVICE,
    "inspect": _DEVICE,
}


# Flags with several values, of which a second one of the same name would replace the first.
LISTS = ("--references", "--ensemble", "--optimizer", "--tokenizer", "--languages", "--scores")
LISTS += ("--tokenizer.load", "--tokenizer.languages", "--tokenizer.special-order", "--tokenizer.tags")


def check_flags(command: str, words: Sequence[str]) -> None:
    """Raises: UsageError at a list given twice, and at a flag of another toolkit, with its equivalent in twinax."""
    flags = [*_flags(words)]
    for word in LISTS:
        if flags.count(word) > 1:
            raise UsageError(f"{word}: is given twice, and only the last would count; give it once, with all values")
    for word in flags:
        if word in FOREIGN.get(command, {}):
            raise UsageError(describe_foreign(command, word))


def describe_foreign(command: str, flag: str) -> str:
    """The equivalent of a flag of another toolkit, or what to do without one."""
    equivalent = FOREIGN[command][flag]
    return f"{flag}: {equivalent}" if equivalent.startswith(_ABSENT) else f"{flag}: in twinax, use {equivalent}"


def _flags(words: Sequence[str]) -> Iterable[str]:
    for word in words:
        if word == "--":
            return
        if word.startswith("-"):
            yield word.partition("=")[0].replace("_", "-")
