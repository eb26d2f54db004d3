"""The optimizer: clipping, Adam and weight decay, by optax. The step computes and reports learning rate and norm.

Parameters are a mapping from name to array.
"""

from collections.abc import Callable, Collection, Mapping

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from ...configs.training import TrainingConfig

Params = Mapping[str, Array]

# (norm of all gradients, its bound) -> factor of the gradients
CLIP_RULES: dict[str, Callable[[Array, float], Array]] = {
    "torch": lambda norm, bound: jnp.minimum(1, bound / (norm + 1e-6)),
    "optax": lambda norm, bound: jnp.where(norm < bound, 1, bound / norm),
}
# config.decayed -> (name of a parameter -> whether it is decayed)
DECAYED: dict[str, Callable[[str], bool]] = {
    "matrices": lambda name: not name.endswith((".scale", ".bias")),
    "all": lambda name: True,
}


def clip(gradients: Params, norm: Float[Array, ""], config: TrainingConfig) -> Params:
    """The gradients, scaled so that their global norm is at most `clip_norm`."""
    if config.clip_norm is None:
        return gradients
    factor = CLIP_RULES[config.clip_rule](norm, config.clip_norm)
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)


def make_optimizer(config: TrainingConfig, without_gradient: Collection[str] = ()) -> optax.GradientTransformation:
    """A transformation of gradients to the direction that the step multiplies by minus the learning rate.

    m / (1 - b1^n) / (sqrt(v / (1 - b2^n)) + eps), with m, v running means of g and g². adam adds weight_decay · p to g,
    adamw adds it to the direction.

    `without_gradient`: names of parameters on which the loss does not depend. Adam does not change them, and with
    config.without_gradient="skip" neither does weight decay.

    Source: Kingma and Ba 2015, algorithm 1; Loshchilov and Hutter 2019, algorithm 2; `torch.optim.Adam` and `AdamW`.
    """
    undecayed = set(without_gradient) if config.without_gradient == "skip" else set()

    def decays(params: Params) -> dict[str, bool]:
        return {name: DECAYED[config.decayed](name) and name not in undecayed for name in params}

    adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    decay = optax.add_decayed_weights(config.weight_decay, decays)
    return optax.chain(decay, adam) if config.optimizer == "adam" else optax.chain(adam, decay)
