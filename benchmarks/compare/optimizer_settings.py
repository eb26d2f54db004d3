"""Every optimizer of torch.optim and optax beside itself with one setting changed: what `compare_updates` finds.

`python -m benchmarks.compare.optimizer_settings PAGE` writes the table into the page.
"""

import inspect
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optax
import torch

from benchmarks.pages import write_table
from twinax.compare.training.updates import compare_updates

RATE = 1e-2
# These choose an implementation or a dtype, not a rule.
_NOT_RULES = {"foreach", "fused", "capturable", "differentiable", "mu_dtype", "accumulator_dtype", "dtype_momentum"}
_NOT_RULES |= {
    "max_eval",
    "key",
    "seed",
    "mask",
    "weight_decay_mask",
    "trust_ratio_mask",
    "linesearch",
    "line_search_fn",
}
_FROM_NONE = {"momentum": 0.9, "weight_decay_rate": 0.1, "eps": 1e-3, "optimism": 0.5}
_FROM_NONE |= {"adjust_lr_fn": "match_rms_adamw"}
_OTHERS = {"min_dim_size_to_factor": 2, "ns_steps": 3, "threshold": 30.0, "momentum_decay": 0.1, "t0": 10.0, "d": 2.0}
_OTHERS |= {"dampening": 0.5, "trust_coefficient": 0.01, "decay_offset": 5, "max_step_size": 1e-2}
# Without which a setting has no effect.
_WITH = {
    **{key: {"momentum": 0.9} for key in (("SGD", "nesterov"), ("SGD", "dampening"), ("sgd", "nesterov"))},
    ("rmsprop", "nesterov"): {"momentum": 0.9},
    **{(name, "decoupled_weight_decay"): {"weight_decay": 0.1} for name in ("Adam", "NAdam", "RAdam")},
    ("adafactor", "factored"): {"min_dim_size_to_factor": 2},
}


def _changed(name: str, default: Any) -> Iterator[tuple[str, Any]]:
    """(setting, another value)."""
    if isinstance(default, bool):
        yield name, not default
    elif name in _OTHERS:
        yield name, _OTHERS[name]
    elif isinstance(default, tuple):
        for i, value in enumerate(default):
            other = 1e-3 if value is None else 0.5 * value if value != 50 else 1e-2
            yield f"{name}[{i}]", (*default[:i], other, *default[i + 1 :])
    elif default is None:
        yield name, _FROM_NONE[name]
    else:
        yield name, 0.5 * default if default else 0.1


def _optimizers() -> Iterator[tuple[str, str, Any]]:
    """(library, name, function of settings that returns what is compared)."""
    for name, kind in vars(torch.optim).items():
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer":
            yield "torch", name, partial(_of_torch, kind)
    for name in dir(optax):
        function = getattr(optax, name)
        is_public = inspect.isfunction(function) and not name.startswith(("_", "scale_by"))
        if is_public and "learning_rate" in inspect.signature(function).parameters:
            yield "optax", name, partial(function, RATE)


def _of_torch(kind: Any, **settings: Any) -> Any:
    return lambda pairs: kind(pairs, **{"lr": RATE, **settings})


def rows() -> Iterator[tuple[str, str, str, str]]:
    """(library, optimizer, setting, what is found)."""
    random = np.random.default_rng(0)
    parameters = {"w": random.standard_normal((3, 4)), "v": random.standard_normal((2, 2))}
    gradients = {name: random.standard_normal(array.shape) for name, array in parameters.items()}
    for library, name, make in _optimizers():
        signature = inspect.signature(getattr(torch.optim, name) if library == "torch" else getattr(optax, name))
        for setting, parameter in signature.parameters.items():
            if setting in _NOT_RULES or setting in ("params", "learning_rate", "lr", "eta", "gamma"):
                continue
            default = None if parameter.default is parameter.empty else parameter.default
            base = _WITH.get((name, setting), {})
            for label, value in _changed(setting, default):
                try:
                    found = compare_updates(make(**base), make(**base, **{setting: value}), parameters, gradients)
                except Exception as error:  # such as an optimizer that needs a closure
                    yield library, name, label, f"cannot be compared: {error}".splitlines()[0][:90]
                    continue
                yield library, name, label, f"found: {found[0].what}" if found else "**not found**"


def main() -> int:
    """Write the table; 1 if a setting is not found."""
    table = list(rows())
    write_table(Path(sys.argv[1]), "optimizer-settings", ("library", "optimizer", "setting", "result"), table)
    missed = [row for row in table if "not found" in row[-1]]
    print(f"{len(table)} settings; not found: {len(missed)}", *missed, sep="\n")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
