"""The five published systems in plain PyTorch, each in one file that shares nothing with the twin or with the others.

Every `Transformer(..., as_published=True)` computes what the published code computes, mistakes included, with the
published names of parameters; `as_published=False` has the mistakes of the model repaired.
"""
