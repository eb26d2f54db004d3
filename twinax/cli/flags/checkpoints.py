"""The flags of `twinax convert` and `twinax inspect`."""

from typing import Annotated, Literal

import tyro

from ..process.importing import import_without_gc
from ..usage import check_exists, one_line_errors
from .shared import CheckpointPath, JsonFile, Switch, flags


@flags
class Convert:
    """Convert a checkpoint bit-exactly to another format, with config, tokenizer and optimizer.

    The suffix of NEW selects the format: .pt (PyTorch), .safetensors, .npz (Marian), .stablehlo (programs that run
    with JAX alone, docs/export.md), or else a directory. A directory has the layout of a Hugging Face family, of
    fairseq or of CTranslate2 if --layout names one, else that of a run's checkpoint. The result is read back and
    compared.

    Example: twinax convert runs/de_en model.pt

    Attributes:
        src: a run, a checkpoint of one, a Hugging Face directory, a .pt or .safetensors file, a fairseq checkpoint or
            its directory, a Marian .npz, a CTranslate2 directory that twinax wrote.
        dst: new file, or new or empty directory, to write. Folders above it are created.
        layout: tensor names: twinax; torch_nn (files, torch.nn.Transformer); lucky_glass, jadore801120, leftover,
            d2l_note, annotated_transformer (files); marian, bart, mbart, m2m100, pegasus, blenderbot, t5, mt5, umt5
            (directories); fairseq (.pt with dictionaries, or a directory of both); marian_npz (.npz); ctranslate2
            (a directory).
        weights_only: omit the optimizer and the run.
        dtype: round the weights to this dtype, without the optimizer, and report how far the logits moved.
        max_shard_size: maximum bytes per weight file of a family's directory, such as 5GB; default: one file.
        adapter: directory of a LoRA adapter of peft, to merge into the weights of a Hugging Face directory.
        run: for the optimizer that another program saved (a checkpoint of transformers' Trainer, or a .pt with model
            and optimizer): the run that resumes from it, as a directory or as JSON of --print-config.
        config: for a file of bare tensors: its config, a JSON file, or a checkpoint of such a model, whose tokenizer is
            used too; for a published system, the settings that its tensors do not determine, as in
            leftover:repaired,num_heads=4.
        tokenizer: for a checkpoint without one: a tokenizer for both sides, or for source and target: a directory,
            a tokenizer.json, a SentencePiece model, a vocabulary in order of ids (.txt, one token per line) or one of
            Marian (.yml, .json). The vocabulary of a published system gets the pre-tokenization of that system.
        languages: languages of source and target (de en), to pre-tokenize with spaCy; default: as the published
            system.
        scores: files of `twinax evaluate --json`, for the model card of a family's directory.
        quantize: for --layout ctranslate2: int8, int8_float32 or float16 weights, which are rounded.
        with_paths: keep the paths of this machine in the run and the settings; default: of each path, its last part.
    """

    src: CheckpointPath
    dst: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NEW")]
    layout: str = "twinax"
    weights_only: Switch = False
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    max_shard_size: str | None = None
    adapter: str | None = None
    run: str | None = None
    config: str | None = None
    tokenizer: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    scores: tuple[str, ...] = ()
    quantize: Literal["int8", "int8_float32", "float16"] | None = None
    with_paths: Switch = False

    def execute(self) -> int:
        """The exit status: 1 if what was read back differs, else 0. Raises: UsageError."""
        check_exists(self.src, *filter(None, [self.adapter]))
        with one_line_errors():
            return import_without_gc("twinax.cli.checkpoints.convert_command").convert_checkpoint(self)


@flags
class Inspect:
    """Print the contents of a checkpoint: format, layout, config, counts, dtypes, ties, training, checksum.

    The checksum covers the weights by Flax name, so that it is the same in every format and layout. For anything that
    twinax cannot read, prints what it is, which setting is the obstacle, and what to do, and exits with 2.

    Example: twinax inspect runs/de_en

    Attributes:
        path: a run, a checkpoint of one, a Hugging Face directory, a .pt or .safetensors file, a fairseq checkpoint or
            its directory, a Marian .npz, a CTranslate2 directory that twinax wrote.
        tensors: list every array with its checksum.
        json_file: JSON file to write everything to.
    """

    path: CheckpointPath
    tensors: Switch = False
    json_file: JsonFile = None

    def execute(self) -> int:
        """The exit status: 2 if twinax cannot read the path, else 0. Raises: UsageError."""
        check_exists(self.path)
        with one_line_errors():
            return import_without_gc("twinax.cli.checkpoints.inspect_command").inspect_checkpoint(self)
