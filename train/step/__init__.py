"""The train step: its loss, its optimizer, and where its arrays are."""

from ...backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(
    __name__,
    {
        "Batch": "step",
        "TrainState": "step",
        "explain": "step",
        "init_state": "step",
        "abstract_state": "step",
        "make_train_step": "step",
    },
)
