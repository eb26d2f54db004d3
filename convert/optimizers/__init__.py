"""Adam's state: of optax, of `torch.optim`, of `transformers`' Trainer, and of a user's own file."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
