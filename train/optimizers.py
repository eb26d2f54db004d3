"""The optimiser: clipping, Adam, weight decay. Moments are optax's; rate and norm the step's, which reports them.

Parameters are arrays by name, as everywhere here.
"""

from collections.abc import Callable, Collection, Mapping

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from ..configs.training import TrainingConfig

Params = Mapping[str, Array]

# (norm of all gradients, its bound) -> what the gradients are multiplied with
CLIP_RULES: dict[str, Callable[[Array, float], Array]] = {
    "torch": lambda norm, bound: jnp.minimum(1, bound / (norm + 1e-6)),
    "optax": lambda norm, bound: jnp.where(norm < bound, 1, bound / norm),
}
# whether the parameter of a name is decayed
DECAYED: dict[str, Callable[[str], bool]] = {
    "matrices": lambda name: not name.endswith((".scale", ".bias")),
    "all": lambda name: True,
}


def clip(gradients: Params, norm: Float[Array, ""], config: TrainingConfig) -> Params:
    """The gradients, multiplied so that the norm of all of them together is at most `clip_norm`."""
    if config.clip_norm is None:
        return gradients
    factor = CLIP_RULES[config.clip_rule](norm, config.clip_norm)
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)


def make_optimizer(config: TrainingConfig, without_gradient: Collection[str] = ()) -> optax.GradientTransformation:
    """Gradients -> the direction that the step multiplies by minus the learning rate.

    m / (1 - b1^n) / (sqrt(v / (1 - b2^n)) + eps), with m, v running means of g and g²; adam: g has weight_decay · p
    added, adamw: the direction has.

    `without_gradient`: names of parameters that the loss does not reach. Adam leaves them as they are; decay does too
    where the config says skip.

    Source: Kingma and Ba 2015, algorithm 1; Loshchilov and Hutter 2019, algorithm 2; `torch.optim.Adam` and `AdamW`.
    """
    left_out = set(without_gradient) if config.without_gradient == "skip" else set()

    def decays(params: Params) -> dict[str, bool]:
        return {name: DECAYED[config.decayed](name) and name not in left_out for name in params}

    adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    decay = optax.add_decayed_weights(config.weight_decay, decays)
    return optax.chain(decay, adam) if config.optimizer == "adam" else optax.chain(adam, decay)
