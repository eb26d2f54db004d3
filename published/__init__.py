"""Five published PyTorch Transformers, a folder each: what their code computes, mistakes and all, and what repairs it.

| file | holds | imports |
|---|---|---|
| `recipe.py` | the config, its mistakes and repairs, data, training and decoding | configs |
| `module.py` | the model in plain PyTorch, with the published names; it shares nothing with the twins | torch |
| `layout.py` | the names of its state dict | convert |
| `oracle.py` | how the module is built, called and decoded, and where its activations are | torch |
| `training.py` | its own training loop | torch |

A sixth system is a sixth folder: `registry` finds it.
"""
