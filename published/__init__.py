"""Five published PyTorch Transformers, one per folder, as their code computes them, with their mistakes and repairs.

| file | content | imports |
|---|---|---|
| `recipe.py` | the config, its mistakes and repairs, data, training and decoding | configs |
| `module.py` | the model in plain PyTorch, with the published names; shares no code with the twins | torch |
| `layout.py` | the names of its state dict | convert |
| `oracle.py` | functions that build, call and decode the module, and the paths of its activations | torch |
| `training.py` | the published training loop | torch |

To add a system, add a folder; `registry` detects it.
"""

from ..backend.submodules import lazy_attributes

__getattr__ = lazy_attributes(__name__)
