"""Mistakes in parameter names, layouts, and external files and tokenizers."""

from parity_tests.mutations.planting import Mutation

_PORT = ("parity_tests/test_port.py",)
_BART = ("parity_tests/test_conversion.py::test_variant[BART]",)
_MARIAN = ("parity_tests/test_conversion.py::test_variant[Marian]",)
_TORCH_NN = ("parity_tests/test_torch_nn.py",)
_FILES = ("tests/test_published_files.py",)
_TEXT = ("tests/test_published_text.py",)
_PORTABLE = ("tests/test_formats.py",)
_RATE = ("tests/test_optimizers.py::test_the_rate_in_a_file_is_where_torch_s_scheduler_stands",)
_STATE = ("parity_tests/test_trajectories.py",)
_PUBLISHED = ("parity_tests/test_published.py::test_a_state_dict_comes_back_bit_for_bit",)
_T5 = ("parity_tests/test_t5.py",)
_STREAMING = ("tests/test_streaming.py",)
_ORACLE = ("parity_tests/test_published.py::test_both_twins_are_the_published_model",)

CONVERSION = (
    Mutation(
        "kernels are transposed where shapes differ only",
        "convert.rules",
        "TRANSPOSE = Transform(lambda arrays: [a.T for a in arrays],",
        "TRANSPOSE = Transform(lambda arrays: [a if a.shape == a.T.shape else a.T for a in arrays],",
        _PORT,
    ),
    Mutation(
        "norms of both embeddings exchanged",
        "convert.layouts.hugging_face",
        '"src_input.norm": "model.encoder.layernorm_embedding",\n'
        '    "tgt_input.norm": "model.decoder.layernorm_embedding",',
        '"src_input.norm": "model.decoder.layernorm_embedding",\n'
        '    "tgt_input.norm": "model.encoder.layernorm_embedding",',
        _BART,
    ),
    Mutation(
        "what nothing reads is not written",
        "convert.file_layouts.to_named",
        " | PUBLISHED[name].split(unused or {})[1]",
        "",
        _PUBLISHED,
    ),
    Mutation(
        "packed projections in the order k, q, v",
        "convert.layouts.torch_nn",
        '_QKV = ("q_proj", "k_proj", "v_proj")',
        '_QKV = ("k_proj", "q_proj", "v_proj")',
        _TORCH_NN,
    ),
    Mutation(
        "arrays of a wrong shape are taken",
        "convert.rules._check",
        "if name in actual and actual[name] != spec",
        "if name in actual and actual[name].dtype != spec.dtype",
        _PORT,
    ),
    Mutation(
        "arrays that the model lacks are dropped",
        "convert.rules._check",
        "for name, spec in actual.items() if name not in specs]",
        "for name, spec in actual.items() if name not in specs and False]",
        _PORT,
    ),
    Mutation(
        "another dtype by way of float32",
        "convert.arrays._cast",
        "array = _to_odd(array)",
        "array = array.astype(np.float32)",
        _STREAMING,
    ),
    Mutation(
        "all arrays of a file in memory",
        "convert.safetensors_files.write_safetensors",
        "    checksums = dict",
        "    arrays = {name: np.array(arrays[name]) for name in specs}\n    checksums = dict",
        _STREAMING,
    ),
    Mutation(
        "what a killed process left stays",
        "convert.atomic_io._temporary",
        "                if free:",
        "                if not free:",
        _STREAMING,
    ),
    Mutation(
        "the output's bias is lost",
        "convert.layouts.hugging_face.Family.rules",
        'Rule(("output.bias",), (_BIAS,), _AS_ROW)',
        'Rule(("output.bias",), (_BIAS,), Transform(lambda a: [0 * a[0][None]], lambda a: [0 * a[0][0]]))',
        _BART,
    ),
    Mutation(
        "an output that differs from the embeddings is tied",
        "convert.layouts.hugging_face.Family._are_tied",
        "return output not in arrays or",
        "return True or",
        _T5,
    ),
    Mutation(
        "tie_word_embeddings does not scale T5's logits",
        "convert.layouts.t5._resolve",
        'settings.get("tie_word_embeddings") is not False',
        "True",
        _T5,
    ),
    Mutation(
        "a shared table of an untied model counts as unused",
        "convert.layouts.hugging_face.Family.unused",
        "if shares and not config.shared_embeddings",
        "if shares and not config.tied_output",
        _T5,
    ),
    Mutation(
        "the gate of T5 v1.1 and its inner projection exchanged",
        "convert.layouts.t5",
        '{"gate_proj": "wi_0", "inner_proj": "wi_1"}',
        '{"gate_proj": "wi_1", "inner_proj": "wi_0"}',
        ("parity_tests/test_conversion.py::test_variant[T5 v1.1, Flan-T5]",),
    ),
    Mutation(
        "Marian has the paper's positions",
        "convert.layouts.marian",
        '"positions": "sinusoidal_half",',
        '"positions": "sinusoidal_interleaved",',
        _MARIAN,
    ),
    Mutation(
        "Marian is pre-norm",
        "convert.layouts.marian",
        '"norm_placement": "post",',
        '"norm_placement": "pre",',
        _MARIAN,
    ),
    Mutation(
        "heads of lucky_glass in the wrong order",
        "published.lucky_glass.layout._heads",
        "np.split(arrays[0], number, axis=1)",
        "np.split(arrays[0], number, axis=1)[::-1]",
        ("parity_tests/test_published.py::test_a_state_dict_comes_back_bit_for_bit[lucky_glass-False-dtype0]",),
    ),
    Mutation(
        "queries and keys of annotated_transformer exchanged",
        "published.annotated_transformer.layout",
        '("linears.0", "linears.1", "linears.2", "linears.3")',
        '("linears.1", "linears.0", "linears.2", "linears.3")',
        ("parity_tests/test_published.py::test_both_twins_are_the_published_model[annotated_transformer-False]",),
    ),
    Mutation(
        "gains and shifts of leftover exchanged",
        "published.leftover.layout",
        'gain="gamma", shift="beta"',
        'gain="beta", shift="gamma"',
        ("parity_tests/test_published.py::test_both_twins_are_the_published_model[leftover-False]",),
    ),
    Mutation(
        "what was assumed is not said",
        "convert.layouts.published.PublishedLayout.assumptions",
        "if f not in overrides]",
        "if f not in overrides and f != 'num_heads']",
        _FILES,
    ),
    Mutation(
        "the variant counts as known",
        "convert.layouts.published.PublishedLayout._could_be_repaired",
        "return names ==",
        "return not names and names ==",
        _FILES,
    ),
    Mutation(
        "what was assumed is lost in our files",
        "convert.single_file._describe",
        '"assumed": checkpoint.assumed}',
        '"assumed": ()}',
        _FILES,
    ),
    Mutation(
        "files are recognized by their names",
        "convert.single_file.is_safetensors",
        'if head[8:] == b"{" and',
        'if path.suffix == ".safetensors" and',
        _FILES,
    ),
    Mutation(
        "float64 weights compute in float32",
        "convert.layouts.published.PublishedLayout.config",
        'dtypes["compute_dtype"] = "float64"',
        'dtypes["compute_dtype"] = "float32"',
        _FILES,
    ),
    Mutation(
        "spaCy's tokens of whitespace are dropped",
        "train.data.spacy_pretokenizer.split_words",
        "[word.text for word in words] if",
        "[word.text for word in words if not word.is_space] if",
        _TEXT,
    ),
    Mutation(
        "spaCy does not split the text of a vocabulary",
        "train.data.pretrained.load_for_model",
        'config.languages[side] if config.languages and location.suffix == ".txt" else None',
        "None",
        _TEXT,
    ),
    Mutation(
        "both sides are German",
        "train.data.pretrained.load_for_model",
        "config.languages[side]",
        "config.languages[0]",
        _TEXT,
    ),
    Mutation(
        "the book's rule splits at brackets too",
        "train.data.tokenization",
        r'r"[,.!?][^\s,.!?]*|[^\s,.!?]+"',
        r'''r"[,.!?()][^\s,.!?()]*|[^\s,.!?()]+"''',
        _TEXT,
    ),
    Mutation(
        "the rate in a file is one update late",
        "convert.optimizer.to_torch_optimizer",
        "learning_rate(training.update, config,",
        "learning_rate(max(training.update - 1, 0), config,",
        _RATE,
    ),
    Mutation(
        "moments of Adam exchanged on their way to PyTorch",
        "convert.optimizer._optimizer_state",
        '"exp_avg": mu[name], "exp_avg_sq": nu[name]',
        '"exp_avg": nu[name], "exp_avg_sq": mu[name]',
        _STATE,
    ),
    Mutation(
        "Adam's count is lost on its way to PyTorch",
        "convert.optimizer._optimizer_state",
        "torch.tensor(float(count), dtype=torch.float32)",
        "torch.tensor(1.0, dtype=torch.float32)",
        _STATE,
    ),
    Mutation(
        "the decoder starts with the published BOS",
        "convert.layouts.published.PublishedLayout.config",
        'dtypes["decoder_start_id"] = overrides["bos_id"]',
        "pass",
        _FILES,
    ),
    Mutation(
        "a vocabulary of other ids is taken",
        "train.data.pretrained.load_for_model",
        "_check_ids(location, fast, model, config)",
        "pass",
        _FILES,
    ),
    Mutation(
        "translate does not say what was assumed",
        "text_commands.load_translator",
        "report_assumed(checkpoint, translator.checkpoint)",
        "pass",
        ("tests/test_published_files.py::test_what_computes_says_it_too",),
    ),
    Mutation(
        "the scale in jadore801120's settings is not read",
        "published.jadore801120.layout._stated_fields",
        'if tied and scale in ("prj", "emb", "none"):',
        "if tied and not scale:",
        _FILES,
    ),
)
