"""malloc keeps freed memory: the kernel does not clear new pages at every update."""

import platform

from twinax.backend.malloc import keep_freed_memory

_CODE = """
import resource, statistics
from pathlib import Path
from twinax.configs.data import CorpusConfig, TokenizerConfig
from twinax.configs.run import LoopConfig, RunConfig
from twinax.configs.schema import TransformerConfig
from twinax.train.loop import loop

faults = []

class Counting(loop.TrainingProgress):
    def advance(self, *numbers):
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        super().advance(*numbers)

loop.TrainingProgress = Counting
Path("text").write_text("a b c d e f g h\\n" * 600)
model = TransformerConfig.preset("tiny", num_encoder_layers=1, num_decoder_layers=1, max_length=16)
run = RunConfig(
    corpus=CorpusConfig(src="text", tgt="text", held_out=8),
    tokenizer=TokenizerConfig(kind="word", joint=False),
    model=model,
    loop=LoopConfig(updates=25, translations=0),
)
loop.train(run, Path("run"))
print(statistics.median(after - before for before, after in zip(faults[10:], faults[11:])))
"""


def test_updates_clear_no_pages(tmp_path, forks):
    if platform.libc_ver()[0] != "glibc":  # nothing to set, and no error
        assert not keep_freed_memory()
        return
    result = forks(_CODE, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 100  # thousands if memory is returned to the kernel
