"""Trainings on every mesh of eight virtual devices, against one device: `make scale-test`.

`python -m benchmarks.meshes PAGE` prints the table and writes it into the page. The environment must give the devices:
XLA_FLAGS=--xla_force_host_platform_device_count=8.
"""

import sys
from pathlib import Path

import jax
from rich.progress import track

from benchmarks.pages import marks, write_table
from twinax.configs.schema import TransformerConfig
from twinax.configs.training import TrainingConfig
from twinax.parity.meshes import compare_meshes, factorizations

UPDATES = 50
# Every dimension that an axis divides is a multiple of 8, and no two are equal.
MODEL = TransformerConfig(
    **{"src_vocab_size": 104, "tgt_vocab_size": 112, "d_model": 32, "num_heads": 8, "d_ff": 48, "max_length": 16},
    **{"num_encoder_layers": 2, "num_decoder_layers": 2, "norm_placement": "pre", "final_norm": True},
    **{f"{site}_dropout": 0.1 for site in ("embedding", "residual", "attention", "ffn")},
)
TRAINING = TrainingConfig(
    label_smoothing=0.1, accumulation=2, clip_norm=1.0, schedule="inverse_sqrt", learning_rate=1e-2, warmup_updates=10
)
HEADER = ("data", "fsdp", "tensor", "losses", "parameters", "float32 gradients", "")


def main(page: Path) -> int:
    """Measures, prints the table, writes it into the page. Returns 0 if every mesh gives the same training."""
    jax.config.update("jax_enable_x64", True)
    marks(page, "meshes")
    shardings = list(factorizations(jax.device_count()))
    agreements = list(track(compare_meshes(shardings, MODEL, TRAINING, UPDATES), "meshes", total=len(shardings)))
    rows = []
    for agreement in agreements:
        axes = (str(size) for size in vars(agreement.sharding).values())
        figures = (f"{agreement.loss:.1e}", f"{agreement.params:.1e}", f"{agreement.ratio:.2f}")
        rows.append((*axes, *figures, "equal" if agreement.ok else "DIFFERENT"))
    write_table(page, "meshes", HEADER, rows)
    return 0 if all(agreement.ok for agreement in agreements) else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.meshes PAGE")
    sys.exit(main(Path(sys.argv[1])))
