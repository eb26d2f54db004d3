"""Whether two optimizers move parameters alike: their settings are measured by chosen gradients, then many updates."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from .update_rules import identified

Array = np.ndarray
_TOLERANCE = 1e-7  # relative; float64 itself leaves less, and settings that matter differ by more
_EXACT = 1e-13  # relative to a parameter; what float64 leaves of the sums
_FACTORS = (1.0, -0.5, 1e-3, 2.0, 0.0, 30.0, -1.0, 0.1)  # of the given gradients
_UPDATES = 40  # from the start on
_SIDE = 3  # largest size of an axis in these
# Numbers of updates at which one more is compared: some numbers of each size, none of them round.
_COUNTS = tuple(int(size * part) for size in (50, 100, 1000, 10**4, 10**5, 10**6) for part in (1.03, 2.17, 4.41, 7.93))
_WAITED = 1024  # updates without an effect after which a parameter counts as not trained
_NAMED = 3  # parameters of a difference
_PROBE = (1, 1)  # shape: a matrix, because vectors are often exempt from decay
_UNIT, _LARGE, _SMALL, _MIDDLE = 1.0, 1e6, 1e-7, 1e-4  # gradients


@dataclass(frozen=True)
class UpdateDifference:
    """A setting, or a parameter's update, in which two optimizers differ."""

    what: str
    reference: float
    candidate: float

    def __str__(self) -> str:
        return f"{self.what}: {self.reference + 0:.6g} in the reference, {self.candidate + 0:.6g} in the candidate"


Update = Callable[[dict[str, Array], Sequence[dict[str, Array]]], dict[str, Array]]
"""(parameters, gradients of several updates) -> parameters after them, in float64."""


@np.errstate(all="ignore")  # infinities and NaN are values here
def compare_updates(
    reference: Any, candidate: Any, parameters: Mapping[str, Array], gradients: Mapping[str, Array]
) -> list[UpdateDifference]:
    """Differences of two optimizers: torch factories ((name, parameter) pairs -> optimizer) or optax transformations.

    The rule and its settings are measured with one number in place of each parameter. Rules that `update_rules` does
    not know are compared by their responses. If all are equal, many updates of small parameters are compared, and some
    of the parameters themselves with the given gradients.

    Raises:
        TypeError: an argument is neither.
    """
    optimizers = [_jitted(optimizer) for optimizer in (reference, candidate)]
    updates = [update_of(optimizer) for optimizer in optimizers]
    rules = [_rules(update, parameters) for update in updates]
    count = _UPDATES
    if all(rule is not None for side in rules for rule in side.values()):
        differences = _of_rules(*rules)
    else:
        settings = [measured(update) for update in updates]
        differences = _of_settings(*settings) if all(settings) else []
        count = _UPDATES if all(settings) else _WAITED
    return differences or _of_trajectory(optimizers, parameters, count) or _of_model(optimizers, parameters, gradients)


class _Jitted(NamedTuple):
    """An optax transformation whose update is compiled once for all that is tried."""

    init: Callable[..., Any]
    update: Callable[..., Any]


def _jitted(optimizer: Any) -> Any:
    """The optimizer; if it is optax's, compiled unless it needs concrete numbers, as a schedule with a Python `if`."""
    if not _is_optax(optimizer):
        return optimizer
    programs: list[Callable[..., Any]] = [jax.jit(optimizer.update)]

    def update(*arguments: Any) -> Any:
        try:
            return programs[-1](*arguments)
        except TypeError:  # as of tracers
            programs.append(optimizer.update)
            return programs[-1](*arguments)

    return _Jitted(optimizer.init, update)


def _is_optax(optimizer: Any) -> bool:
    return hasattr(optimizer, "init") and hasattr(optimizer, "update")


def _rules(update: Update, parameters: Mapping[str, Array]) -> dict[str, tuple[str, dict[str, float]] | None]:
    """What `identified` finds for each parameter, in the place of which there is one number with as many axes."""
    shapes = {name: (1,) * np.ndim(array) for name, array in parameters.items()}

    @cache
    def ends(start: float, gradients: tuple[float, ...]) -> dict[str, float]:
        steps = [{name: np.full(shape, gradient) for name, shape in shapes.items()} for gradient in gradients]
        moved = update({name: np.full(shape, start) for name, shape in shapes.items()}, steps)
        return {name: array.item() for name, array in moved.items()}

    def response(name: str, start: float, gradients: Sequence[float]) -> float:
        return ends(start, tuple(gradients[:-1]))[name] - ends(start, tuple(gradients))[name]

    def rule(name: str) -> tuple[str, dict[str, float]] | None:
        if any(response(name, *probe) for probe in ((0.0, (_MIDDLE,)), (0.0, (_LARGE,)), (1.0, (0.0,)))):
            return identified(partial(response, name))
        # a warm-up may begin at 0, and gradients may be accumulated before an update
        return None if ends(0.0, _WAITED * (_LARGE,))[name] else ("none", {"trained": 0.0})

    return {name: rule(name) for name in shapes}


def _of_rules(reference: Mapping[str, Any], candidate: Mapping[str, Any]) -> list[UpdateDifference]:
    """Differences of the rules and settings; those of some parameters only begin with their names."""
    groups: dict[tuple[str, float, float], list[str]] = {}
    for name, (rule, settings) in reference.items():
        other_rule, others = candidate[name]
        pairs = {what: (settings.get(what, 0.0), others.get(what, 0.0)) for what in (settings | others)}
        if rule != other_rule:
            trained = pairs["trained"] == (1.0, 1.0)
            rules = {f"rule of {rule}": (1.0, 0.0), f"rule of {other_rule}": (0.0, 1.0)}
            pairs = rules if trained else {"trained": pairs["trained"]}
        for what, (one, other) in pairs.items():
            if not _near(one, other):
                groups.setdefault((what, float(f"{one:.4g}"), float(f"{other:.4g}")), []).append(name)
    return [
        UpdateDifference(what if len(names) == len(reference) else f"{_some(names)}: {what}", one, other)
        for (what, one, other), names in groups.items()
    ]


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + rest


def _of_settings(reference: Mapping[str, float], candidate: Mapping[str, float]) -> list[UpdateDifference]:
    names = dict.fromkeys((*reference, *candidate))
    pairs = [UpdateDifference(name, reference.get(name, 0.0), candidate.get(name, 0.0)) for name in names]
    differences = [pair for pair in pairs if not _near(pair.reference, pair.candidate)]
    decays = [pair for pair in differences if pair.what.startswith("weight decay")]
    if decays:  # which moves the parameter in the probes of several updates too
        differences = [pair for pair in differences if pair in decays or pair.what in ("learning rate", "epsilon")]
    return differences


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= 1e3 * _TOLERANCE * max(abs(one), abs(other), 1e-12)


def measured(update: Update) -> dict[str, float]:
    """Settings of an optimizer: those of Adam if the size of a gradient does not matter, else those of SGD.

    There are none if the first update moves nothing, as at the start of a warm-up.

    Adam: Δ = -lr (m̂ / (sqrt(v̂ + ε_root) + ε) + λ θ), with L2 instead where the decay is part of the gradient.
    Source: "Adam", algorithm 1; "Decoupled Weight Decay Regularization", algorithm 2.
    """

    def moved(start: float, *gradients: float) -> float:
        """The last of several updates of a parameter."""
        steps = [{"probe": np.full(_PROBE, gradient)} for gradient in gradients]
        ends = [update({"probe": np.full(_PROBE, start)}, part)["probe"] for part in (steps[:-1], steps)]
        return float((ends[1] - ends[0])[0, 0])

    rate = -moved(0.0, _LARGE)
    if not rate:
        return {}
    if abs(rate / moved(0.0, 10 * _LARGE)) < 0.5:  # proportional to the gradient
        return _of_sgd(moved)
    settings = {"learning rate": rate, "learning rate of the second update": -moved(0.0, _LARGE, _LARGE)}
    settings |= {"learning rate of the third update": -moved(0.0, _LARGE, _LARGE, _LARGE)}
    # sqrt(g² + ε_root) + ε = lr g / |Δ|
    small, middle = (rate * g / abs(moved(0.0, g)) - g for g in (_SMALL, _MIDDLE))
    root = 0.0 if abs(small - middle) <= 1e-3 * small else ((small + _SMALL) ** 2 - _SMALL**2)
    settings |= {"epsilon": 0.0 if root else small, "epsilon inside the root": root}
    # after 1 and 0: lr β1 / (1 + β1) / sqrt(β2 / (1 + β2)); after 1 and a large one: lr sqrt(1 + β2) / (1 + β1)
    settings["update of 0 after 1 (betas)"] = moved(0.0, _LARGE, 0.0) / rate
    settings["update of a large gradient after a small one (betas, clipping)"] = moved(0.0, _UNIT, _LARGE) / rate
    decay = -moved(1.0, 0.0) / rate
    coupled = decay > 0.5
    settings["weight decay, decoupled"] = 0.0 if coupled else decay
    settings["weight decay as part of the gradient (L2)"] = float(coupled)
    return settings


def _of_sgd(moved: Callable[..., float]) -> dict[str, float]:
    rate = -moved(0.0, _UNIT)
    return {
        "learning rate": rate,
        "momentum: second update of 1 over the first": -moved(0.0, _UNIT, _UNIT) / rate,
        "third update of 1 over the first": -moved(0.0, _UNIT, _UNIT, _UNIT) / rate,
        "momentum after a gradient of 0": -moved(0.0, _UNIT, 0.0) / rate,
        "weight decay": -moved(1.0, 0.0) / rate,
        "update of a gradient of 1000 (clipping)": -moved(0.0, 1e3 * _UNIT) / rate,
    }


def _of_model(
    optimizers: Sequence[Any], parameters: Mapping[str, Array], gradients: Mapping[str, Array]
) -> list[UpdateDifference]:
    """Parameters that a few updates with these gradients, of other signs and sizes, move differently."""
    start = {name: np.asarray(array, np.float64) for name, array in parameters.items()}
    given = {name: np.asarray(array, np.float64) for name, array in gradients.items()}
    steps = [{name: factor * array for name, array in given.items()} for factor in _FACTORS]
    return _first_difference(optimizers, start, steps, ())


def _of_trajectory(optimizers: Sequence[Any], parameters: Mapping[str, Array], count: int) -> list[UpdateDifference]:
    """Parameters that differ after so many updates, or after one at a later count, where a schedule has another rate.

    The arrays are small; each number has gradients of a size of its own, and their signs and sizes change.
    """
    random = np.random.default_rng(0)
    shapes = {name: tuple(min(size, _SIDE) for size in np.shape(array)) for name, array in parameters.items()}
    start = {name: random.standard_normal(shape) for name, shape in shapes.items()}
    scales = {name: 10 ** random.uniform(-9, 4, shape) for name, shape in shapes.items()}
    signs = {name: np.ones(shape) for name, shape in shapes.items()}
    steps = []
    for _ in range(count + len(_COUNTS)):
        for name, shape in shapes.items():
            signs[name] = signs[name] * np.where(random.uniform(size=shape) < 0.3, -1, 1)
        sizes = {name: 10 ** random.uniform(-1, 1, shape) for name, shape in shapes.items()}
        steps.append({name: signs[name] * scales[name] * sizes[name] for name in shapes})
    return _first_difference(optimizers, start, steps, _COUNTS)


def _first_difference(
    optimizers: Sequence[Any], start: dict[str, Array], steps: Sequence[dict[str, Array]], counts: Sequence[int]
) -> list[UpdateDifference]:
    """What the first update in which two optimizers differ does to parameters; of `counts`, see `_positions`."""
    before = start, start
    sides = zip(*(_positions(optimizer, start, steps, counts) for optimizer in optimizers), strict=True)
    for index, after in enumerate(sides):
        differences = []
        for name in start:
            moves = [np.asarray(new[name] - old[name]) for new, old in zip(after, before, strict=True)]
            sizes = np.maximum(*(np.abs(move) for move in moves))
            same = np.isnan(moves[0]) & np.isnan(moves[1])
            rounding = _EXACT * np.maximum(*(np.abs(new[name]) for new in after))
            with np.errstate(invalid="ignore"):
                different = ~((np.abs(moves[0] - moves[1]) <= _TOLERANCE * sizes + rounding) | same)
            if different.any():
                place = np.unravel_index(int(different.argmax()), different.shape)
                count = index if index < len(steps) - len(counts) else counts[index - len(steps)]
                differences.append(UpdateDifference(f"{name}, update {count + 1}", *(float(m[place]) for m in moves)))
        if differences:
            return differences[:_NAMED]
        before = after
    return []


def update_of(optimizer: Any) -> Update:
    """An optimizer as a function.

    Raises:
        TypeError: it is no optax transformation and no function.
    """
    _check(optimizer)

    def update(parameters: dict[str, Array], gradients: Sequence[dict[str, Array]]) -> dict[str, Array]:
        positions = [parameters, *_positions(optimizer, parameters, gradients, ())]
        return {name: np.asarray(array, np.float64) for name, array in positions[-1].items()}

    return update


def _check(optimizer: Any) -> None:
    if not _is_optax(optimizer) and not callable(optimizer):
        raise TypeError(
            f"{type(optimizer).__name__}: is not an optimizer; pass an optax transformation, or a function that "
            "returns a torch optimizer from (name, parameter) pairs, such as lambda pairs: torch.optim.AdamW(pairs, "
            "lr=1e-3)"
        )


def _positions(
    optimizer: Any, parameters: dict[str, Array], gradients: Sequence[dict[str, Array]], counts: Sequence[int]
) -> Iterator[dict[str, Array]]:
    """The parameters after each update, in float64; before the last ones, the number of updates is set to `counts`."""
    given: list[int | None] = [None] * (len(gradients) - len(counts))
    given += counts
    kind = _optax if _is_optax(optimizer) else _torch
    return kind(optimizer, parameters, zip(gradients, given, strict=True))


Steps = Iterable[tuple[dict[str, Array], int | None]]  # gradients, and the number of updates before, if it is set


def _optax(transformation: Any, parameters: dict[str, Array], steps: Steps) -> Iterator[dict[str, Array]]:
    with jax.enable_x64(True):
        state = transformation.init(parameters)
    for gradient, count in steps:
        with jax.enable_x64(True):
            if count is not None:
                state = jax.tree_util.tree_map_with_path(partial(_counted, count), state)
            updates, state = transformation.update(gradient, state, parameters)
            parameters = {name: np.asarray(value + updates[name]) for name, value in parameters.items()}
        yield parameters


def _counted(count: int, path: Any, leaf: Any) -> Any:
    """The leaf of a state after so many updates, if it counts them: only these are integers.

    Batches whose gradients are accumulated are counted as they come.
    """
    is_count = np.ndim(leaf) == 0 and jax.numpy.issubdtype(jax.numpy.result_type(leaf), jax.numpy.integer)
    return jax.numpy.full_like(leaf, count) if is_count and "mini_step" not in str(path[-1]) else leaf


def _torch(factory: Any, parameters: dict[str, Array], steps: Steps) -> Iterator[dict[str, Array]]:
    import torch

    tensors = {name: torch.nn.Parameter(torch.tensor(array, dtype=torch.float64)) for name, array in parameters.items()}
    optimizer = factory(list(tensors.items()))
    for gradient, count in steps:
        for state in optimizer.state.values():
            if count is not None and "step" in state:
                state["step"] = torch.full_like(state["step"], count) if torch.is_tensor(state["step"]) else count
        for name, tensor in tensors.items():
            tensor.grad = torch.tensor(gradient[name], dtype=torch.float64)
        optimizer.step()
        yield {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}
