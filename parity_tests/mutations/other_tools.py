"""Mistakes in adapters, in training states of other programs, and in CTranslate2."""

from parity_tests.mutations.planting import Mutation

_LORA = ("tests/test_lora.py",)
_TRAINER = ("tests/test_trainer.py",)
_USER_OPTIMIZER = ("tests/test_user_optimizer.py",)
_VARIABLES = ("tests/test_ctranslate2.py",)
_DIRECTORIES = "tests/test_ctranslate2_directories.py"
_ENGINES = ("tests/test_engines.py",)

OTHER_TOOLS = (
    Mutation(
        "alpha divided by the rank with use_rslora too",
        "convert.lora.Adapter.scale",
        "alpha / math.sqrt(rank) if",
        "alpha / rank if",
        _LORA,
    ),
    Mutation(
        "the change of a bias is not scaled",
        "convert.lora._with_change",
        "to_torch_tensor(parts[_BIAS]).to(dtype) * adapter.scale(module, len(a))",
        "to_torch_tensor(parts[_BIAS]).to(dtype)",
        _LORA,
    ),
    Mutation(
        "the norm of the base weight in DoRA",
        "convert.lora._rescaled",
        "torch.linalg.norm(total.T if is_embedding else total, dim=1)",
        "torch.linalg.norm(weight.T if is_embedding else weight, dim=1)",
        _LORA,
    ),
    Mutation(
        "the pattern of a module's rank starts anywhere",
        "convert.lora_settings.value_for",
        r'rf"(.*\.)?({key})$"',
        r'rf"(.*)?({key})"',
        _LORA,
    ),
    Mutation(
        "a change of one tied tensor is merged into all",
        "convert.lora._merge",
        "        if name in ties:\n",
        "        if False:\n",
        _LORA,
    ),
    Mutation(
        "parameters by name instead of by registration",
        "convert.trainer.parameter_groups",
        'sorted(names, key=lambda name: [int(p) if p.isdecimal() else _RANK[p] for p in name.split(".")])',
        "sorted(names)",
        _TRAINER,
    ),
    Mutation(
        "Trainer's schedule stands one update late",
        "convert.trainer.trainer_files",
        "run, number = training.run, training.update + training.run.training.first_update",
        "run, number = training.run, training.update + training.run.training.first_update + 1",
        _TRAINER,
    ),
    Mutation(
        "both groups decay",
        "convert.trainer._optimizer_state",
        "(training.run.training.weight_decay, 0.0)",
        "(training.run.training.weight_decay,) * 2",
        _TRAINER,
    ),
    Mutation(
        "a rate of another schedule is taken",
        "convert.trainer._update",
        "if not math.isclose(value, own, rel_tol=_CLOSE, abs_tol=1e-300):",
        "if False:",
        _TRAINER,
    ),
    Mutation(
        "a checkpoint of another program does not resume",
        "train.loop._Loop._resume_position",
        "(expected, [self.update, 0, self.update])",
        "(expected,)",
        ("tests/test_loop.py::test_a_checkpoint_of_another_program_resumes_in_a_later_epoch",),
    ),
    Mutation(
        "the first of several possible orders is taken",
        "convert.user_optimizer.order_of",
        "if any(order != orders[0] for order in orders):",
        "if False:",
        _USER_OPTIMIZER,
    ),
    Mutation(
        "the weight decay of a user's groups is not compared",
        "convert.user_optimizer._check_decay",
        "    if decay != expected:\n",
        "    if False:\n",
        _USER_OPTIMIZER,
    ),
    Mutation(
        "keys and values exchanged in CTranslate2",
        "convert.layouts.ctranslate2._layer",
        '("q", "kv")',
        '("q", "vk")',
        _VARIABLES,
    ),
    Mutation(
        "the value and the gate exchanged in CTranslate2",
        "convert.layouts.ctranslate2._layer",
        '{"inner_proj": "linear_0_noact", "gate_proj": "linear_0"}',
        '{"inner_proj": "linear_0", "gate_proj": "linear_0_noact"}',
        _VARIABLES,
    ),
    Mutation(
        "the rows of padding stand first in CTranslate2's positions",
        "convert.layouts.ctranslate2._rows",
        "[arrays[0][first:last]]",
        "[arrays[0][: last - first]]",
        _VARIABLES,
    ),
    Mutation(
        "vocabularies of CTranslate2 exchanged",
        "convert.ctranslate2_format.write_into",
        "tokens = [list(source.tokens), list(target.tokens)]",
        "tokens = [list(target.tokens), list(source.tokens)]",
        (*_VARIABLES, _DIRECTORIES),
    ),
    Mutation(
        "another unknown token",
        "convert.ctranslate2_format._settings",
        '"unk_token": target.unk if',
        '"unk_token": target.tokens[5] if',
        (_DIRECTORIES,),
    ),
    Mutation(
        "an mBART without a language starts with padding in CTranslate2",
        "convert.ctranslate2_format.write",
        "if vocabularies.starts_with_language:",
        "if False:",
        ("tests/test_family_text.py::test_ctranslate2_takes_the_language_as_target_prefix[mBART]",),
    ),
    Mutation(
        "one scale per matrix",
        "convert.ctranslate2_format._quantize",
        "np.abs(weights).max(axis=1)",
        "np.full(len(weights), np.abs(weights).max())",
        _VARIABLES,
    ),
    Mutation(
        "EOS is not counted in the length",
        "convert.ctranslate2_decoding.translate_options",
        '"return_end_token": True',
        '"return_end_token": False',
        _ENGINES,
    ),
    Mutation(
        "every difference of n-best lists counts as rounding",
        "parity.engines.Certificate.is_rounding",
        "return ",
        "return True or ",
        _ENGINES,
    ),
)
