"""Which rule an optimizer follows, and with which settings: solved from its updates of one number, then checked."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import sqrt

import numpy as np

LARGE, SMALL, MIDDLE = 1e6, 1e-7, 1e-4  # gradients
CLIPPED = 1e-2  # the largest gradient where LARGE explains nothing, because it is clipped
UNIT = 1e-3  # for rules that are proportional to the gradient
_CHECKS = ((0.5, -0.3, 1.1, 0.0, 0.7), (1e-3, 2e-3, -1e-3, 4e-3, 1e-3))  # gradients
_TOLERANCE = 1e-5  # relative; rounding in the probes leaves less
Response = Callable[[float, Sequence[float]], float]  # start, gradients -> the last update, with its sign turned
Settings = dict[str, float]


def identified(response: Response) -> tuple[str, Settings] | None:
    """(rule, settings) of the optimizer that responds like this; None if it follows none of the rules known here."""
    for large in (LARGE, CLIPPED):
        for pull, coupled in _decays(response, large):
            pure = _without_decay(response, pull, coupled)
            for rule, settings in _solutions(pure, large):
                if all(np.isfinite(value) for value in settings.values()) and _fits(rule, settings, pure, large):
                    decays = {"weight decay, decoupled": pull / settings["learning rate"]}
                    decays |= {"weight decay as part of the gradient (L2)": coupled}
                    clipping = {} if large == LARGE else {"clipping, largest gradient": _clipping(rule, settings, pure)}
                    return rule, {"trained": 1.0} | {n: float(x) for n, x in (settings | clipping | decays).items()}
    return None


def _clipping(rule: str, settings: Mapping[str, float], response: Response) -> float:
    """The gradient after CLIPPED to which a huge one is reduced."""
    update = response(0.0, (CLIPPED, LARGE))
    low, high = CLIPPED, LARGE
    for _ in range(60):
        middle = sqrt(low * high)
        low, high = (middle, high) if _last_update(rule, settings, (CLIPPED, middle)) < update else (low, middle)
    return low


def _decays(d: Response, large: float) -> list[tuple[float, float]]:
    """(what is subtracted from a parameter of 1, decay that is added to its gradient): all that is possible."""
    pull, update = d(1.0, (0.0,)), d(0.0, (large,))
    if update > 5 * d(0.0, (large / 10,)) > 0:  # proportional to the gradient
        return [(0.0, pull / d(0.0, (UNIT,)) * UNIT), (pull, 0.0)]
    if pull < 0.5 * update:
        return [(pull, 0.0)]
    low, high = 1e-9, 1e2
    for _ in range(60):  # a gradient that cancels the decay
        middle = sqrt(low * high)
        low, high = (middle, high) if d(1.0, (-middle,)) > 0 else (low, middle)
    return [(0.0, low)]


def _without_decay(d: Response, pull: float, coupled: float) -> Response:
    """The response of the same optimizer without decay, of a parameter of 0."""

    def run(_: float, gradients: Sequence[float]) -> float:
        position, step = 0.0, 0.0
        given: list[float] = []
        for gradient in gradients:
            given.append(gradient - coupled * position)
            moved = d(0.0, tuple(given)) if position or gradient or coupled else 0.0
            step = moved - pull * position
            position -= moved
        return step

    return run


def _fits(rule: str, settings: Mapping[str, float], response: Response, large: float) -> bool:
    """Whether the rule predicts updates that its settings were not solved from."""
    for gradients in (tuple(min(1.0, large) * g for g in check) for check in _CHECKS):
        for count in range(1, len(gradients) + 1):
            try:
                expected = _last_update(rule, settings, gradients[:count])
            except (ValueError, ZeroDivisionError, OverflowError):
                return False
            scale = max(abs(expected), 1e-3 * abs(settings["learning rate"]) * (max(map(abs, gradients))))
            if not abs(response(0.0, gradients[:count]) - expected) <= _TOLERANCE * scale:
                return False
    return True


def _solutions(response: Response, large: float) -> Iterator[tuple[str, Settings]]:
    """Settings of every rule that explain the probes."""
    with np.errstate(all="ignore"):
        for solve in (_sgd, _adam, _amsgrad, _adam_uncorrected, _adagrad, _rmsprop, _adamax, _adadelta):
            try:
                yield from solve(response, large)
            except (ZeroDivisionError, ValueError, OverflowError):
                continue  # the rule cannot explain these numbers


def _sgd(d: Response, _: float) -> Iterator[tuple[str, Settings]]:
    first = d(0.0, (UNIT,))
    coast = d(0.0, (UNIT, 0.0))
    momentum = d(0.0, (UNIT, 0.0, 0.0)) / coast if coast else 0.0
    for nesterov in (0.0, 1.0):
        share = 1 + nesterov * momentum
        rate = first / share / UNIT
        dampening = 1 - (d(0.0, (UNIT, UNIT)) - coast) / first
        yield (
            "SGD",
            {
                "learning rate": rate,
                "momentum": momentum,
                "Nesterov momentum": nesterov if momentum else 0.0,
                "dampening": dampening if abs(dampening) > 1e-9 else 0.0,
            },
        )


def _epsilons(d: Response, first: float, factor: float = 1.0) -> Settings:
    """Of first · g / (sqrt(g² + ε_root) + ε), where the rule multiplies g² by factor² before."""
    small, middle = (first * g / d(0.0, (g,)) for g in (SMALL, MIDDLE))
    outside = (middle**2 - small**2 - (MIDDLE**2 - SMALL**2)) / (2 * (middle - small))
    outside = outside if abs(outside) > 1e-7 * small else 0.0
    inside = (small - outside) ** 2 - SMALL**2
    inside = inside if abs(inside) > 1e-3 * SMALL**2 else 0.0
    return {"epsilon": factor * outside, "epsilon inside the root": factor**2 * inside}


def _adam(d: Response, large: float) -> Iterator[tuple[str, Settings]]:
    rate = d(0.0, (large,))
    x, y = d(0.0, (0.0, large)) / rate, d(0.0, (large, 0.0)) / rate
    for root in np.roots([y**2 - 1, 2 * x * y, x**2 - 1]):  # root = sqrt(β2): x + y sqrt(β2) = sqrt(1 + β2)
        if abs(root.imag) < 1e-9 and 0 < root.real < 1:
            betas = {"beta 1": y / x * root.real, "beta 2": root.real**2}
            yield "Adam", {"learning rate": rate, **_epsilons(d, rate), **betas}


def _amsgrad(d: Response, large: float) -> Iterator[tuple[str, Settings]]:
    """PyTorch keeps the largest mean of squares, optax the largest one after its correction."""
    rate = d(0.0, (large,))
    x, y = d(0.0, (0.0, large)) / rate, d(0.0, (large, 0.0)) / rate
    for rule, beta1 in (("AMSGrad", y / x), ("AMSGrad of corrected squares", y / (1 - y))):
        betas = {"beta 1": beta1, "beta 2": (x * (1 + beta1)) ** 2 - 1}
        yield rule, {"learning rate": rate, **_epsilons(d, rate), **betas}


def _adam_uncorrected(d: Response, large: float) -> Iterator[tuple[str, Settings]]:
    first = d(0.0, (large,))
    y, z = d(0.0, (large, 0.0)) / first, d(0.0, (large, large)) / first
    for root in np.roots([y**2 - z**2, 2 * y, 1 - z**2]):  # 1 + y sqrt(β2) = z sqrt(1 + β2)
        if abs(root.imag) < 1e-9 and 1e-6 < root.real < 1 and abs(y) > 1e-9:  # without y it is RMSProp
            beta1, beta2 = y * root.real, root.real**2
            rate = first * sqrt(1 - beta2) / (1 - beta1)
            settings = {"learning rate": rate, **_epsilons(d, first, sqrt(1 - beta2)), "beta 1": beta1}
            yield "Adam without bias correction", settings | {"beta 2": beta2}


def _rmsprop(d: Response, large: float) -> Iterator[tuple[str, Settings]]:
    first = d(0.0, (large,))
    momentum = d(0.0, (large, 0.0)) / first
    z = d(0.0, (large, large)) / first - momentum
    plain, centered = 1 / z**2 - 1, (sqrt(1 + 4 / z**2) - 1) / 2
    for rule, decay, factor in (
        ("RMSProp", plain, sqrt(1 - plain)),
        ("centered RMSProp", centered, sqrt(centered * (1 - centered))),
    ):
        settings = {"learning rate": first * factor, **_epsilons(d, first, factor), "decay of the squares": decay}
        yield rule, settings | {"momentum": momentum}


def _adagrad(d: Response, large: float) -> Iterator[tuple[str, Settings]]:
    rate = d(0.0, (large,))
    if abs(d(0.0, (large, large)) / rate - sqrt(0.5)) < _TOLERANCE:
        yield "Adagrad", {"learning rate": rate, **_epsilons(d, rate)}


def _adamax(d: Response, large: float) -> Iterator[tuple[str, Settings]]:
    rate = d(0.0, (large,))
    beta1 = rate / d(0.0, (0.0, large)) - 1
    beta2 = beta1 / (1 + beta1) * rate / d(0.0, (large, 0.0))
    betas = {"beta 1": beta1, "beta 2": beta2}
    yield "AdaMax", {"learning rate": rate, **_epsilons(d, rate), **betas}


def _adadelta(d: Response, large: float) -> Iterator[tuple[str, Settings]]:
    first = d(0.0, (large,))
    decay = 2 / (d(0.0, (large, large)) / first) ** 2 - 1
    rate = d(0.0, (SMALL,)) / SMALL
    epsilon = (first / rate) ** 2 * (1 - decay)
    yield "Adadelta", {"learning rate": rate, "epsilon": epsilon, "decay of the squares": decay}


def _last_update(rule: str, settings: Mapping[str, float], gradients: Sequence[float]) -> float:
    """What a rule subtracts from a parameter of 0 in the last of several updates; decay is left out."""
    known = defaultdict(float, settings)
    rate, root, epsilon = known["learning rate"], known["epsilon inside the root"], known["epsilon"]
    beta1, beta2, decay = known["beta 1"], known["beta 2"], known["decay of the squares"]
    mean = square = buffer = 0.0
    step = 0.0
    for count, gradient in enumerate(gradients, 1):
        if rule == "SGD":
            share = 1 - known["dampening"] if count > 1 else 1.0
            buffer = known["momentum"] * buffer + share * gradient
            step = gradient + known["momentum"] * buffer if known["Nesterov momentum"] else buffer
        elif rule in ("Adam", "Adam without bias correction"):
            mean, square = beta1 * mean + (1 - beta1) * gradient, beta2 * square + (1 - beta2) * gradient**2
            corrected = rule == "Adam"
            high, low = (1 - beta1**count, 1 - beta2**count) if corrected else (1.0, 1.0)
            step = mean / high / (sqrt(square / low + root) + epsilon)
        elif rule.startswith("AMSGrad"):
            mean, square = beta1 * mean + (1 - beta1) * gradient, beta2 * square + (1 - beta2) * gradient**2
            low = 1 - beta2**count
            buffer = max(buffer, square if rule == "AMSGrad" else square / low)
            variance = buffer / low if rule == "AMSGrad" else buffer
            step = mean / (1 - beta1**count) / (sqrt(variance + root) + epsilon)
        elif rule.endswith("RMSProp"):
            mean, square = decay * mean + (1 - decay) * gradient, decay * square + (1 - decay) * gradient**2
            variance = square - (mean**2 if rule.startswith("centered") else 0.0)
            buffer = known["momentum"] * buffer + gradient / (sqrt(variance + root) + epsilon)
            step = buffer
        elif rule == "Adagrad":
            square += gradient**2
            step = gradient / (sqrt(square + root) + epsilon)
        elif rule == "AdaMax":
            mean, buffer = beta1 * mean + (1 - beta1) * gradient, max(beta2 * buffer, abs(gradient) + epsilon)
            step = mean / (1 - beta1**count) / buffer
        elif rule == "Adadelta":
            square = decay * square + (1 - decay) * gradient**2
            step = sqrt(buffer + epsilon) / sqrt(square + epsilon) * gradient
            buffer = decay * buffer + (1 - decay) * step**2
    return rate * step
