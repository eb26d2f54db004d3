"""Common Transformer mistakes to plant in a small healthy model, each with the audit question that must detect it."""

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from parity_tests.support.toy_transformer import Attention, Layer, ToyTransformer, mean_loss, step_by_step
from twinax.audit.audit_report import Audit
from twinax.audit.run import audit

CAUSAL, CAUSAL_TRAINING = "Is it causal, in evaluation?", "Is it causal, in training?"
PAST = "Does each target position see itself and all earlier ones?"
SOURCE = "Does the output depend on the source?"
PADDING = "Is source padding ignored?"
TARGET_PADDING = "Is target padding ignored?"
APART, APART_TRAINING = (f"Are the sentences of a batch independent, in {m}?" for m in ("evaluation", "training"))
LENGTHS = "May a target be longer or shorter than its source?"
EMPTY = "Are outputs finite for an all-padding source?"
WEIGHTS = "Are attention weights of masked keys zero?"
GRADIENTS = "Does every parameter receive a gradient?"
CACHE = "Does decoding with a cache equal decoding without?"
FREE = "Can cross entropy fall to zero?"
LOSS = "Does the loss range from zero to log V, with and without padding?"
DROPOUT = "Does dropout use its configured rates?"
SAME = "Do training and evaluation compute the same without dropout?"
STILL = "Is evaluation free of side effects and random draws?"


class Defect(NamedTuple):
    """One mistake."""

    name: str
    question: str  # the audit question that must fail
    plant: Callable[[ToyTransformer], Any] = lambda model: None  # modifies a healthy model in place
    arguments: Mapping[str, Any] = MappingProxyType({})  # for `audit`, if the mistake is outside the model


def _methods(**methods: Callable[..., Any]) -> Callable[[ToyTransformer], None]:
    """Overrides methods in a subclass, so that copies of the model have them too."""
    return lambda model: setattr(model, "__class__", type("Planted", (ToyTransformer,), methods))


def _every(kind: type[nn.Module], change: Callable[[Any], Any]) -> Callable[[ToyTransformer], None]:
    def plant(model: ToyTransformer) -> None:
        for part in model.modules():
            if isinstance(part, kind):
                change(part)

    return plant


def _mask(build: Callable[[Tensor], Tensor], applies: Callable[[bool], bool] = lambda training: True) -> Any:
    """Replaces the target mask by `build` of ones (T, T) in the modes where `applies(training)` is true."""

    def target_mask(self: ToyTransformer, tgt: Tensor) -> Tensor:
        ones = torch.ones(tgt.shape[1], tgt.shape[1])
        return build(ones).bool()[None, None] if applies(self.training) else ToyTransformer.target_mask(self, tgt)

    return _methods(target_mask=target_mask)


def _seen(self: ToyTransformer, src: Tensor) -> Tensor:
    return torch.ones_like(src).bool()[:, None, None]


def _square(self: ToyTransformer, src: Tensor) -> Tensor:
    keep = src != self.PAD
    return (keep[:, None, None] & keep[:, None, :, None]) | torch.eye(src.shape[1]).bool()


def _cut_source(self: ToyTransformer, src: Tensor) -> Tensor:
    return ToyTransformer.encode(self, src[:, 1:])


def _cut_mask(self: ToyTransformer, src: Tensor) -> Tensor:
    return ToyTransformer.cross_mask(self, src[:, 1:])


def _encoded(change: Callable[[Tensor], Tensor]) -> Callable[[ToyTransformer], None]:
    return _methods(encode=lambda self, src: change(ToyTransformer.encode(self, src)))


def _outputs(change: Callable[[Tensor], Tensor]) -> Callable[[ToyTransformer], None]:
    return _methods(forward=lambda self, src, tgt: change(ToyTransformer.forward(self, src, tgt)))


class _Head(nn.Module):
    """The output projection, with a function applied to its input."""

    def __init__(self, head: nn.Module, preprocess: Callable[["_Head", Tensor], Tensor]):
        super().__init__()
        self.head, self.preprocess = head, preprocess
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.preprocess(self, x))


def _head(preprocess: Callable[[Any, Tensor], Tensor]) -> Callable[[ToyTransformer], None]:
    return lambda model: setattr(model, "head", _Head(model.head, preprocess))


def _count(head: Any, x: Tensor) -> Tensor:
    head.calls += 1
    return x


class _NormOver(nn.Module):
    """Normalizes (B, T, D) over the given dimensions."""

    def __init__(self, *dims: int):
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        spread = x.var(self.dims, keepdim=True, correction=0) + 1e-5
        return (x - x.mean(self.dims, keepdim=True)) / spread.sqrt()


class _BatchNorm(nn.BatchNorm1d):
    """Batch norm over batch and positions, with running statistics in evaluation."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.transpose(1, 2)).transpose(1, 2)


def _norm(build: Callable[[int], nn.Module]) -> Callable[[ToyTransformer], None]:
    """Replaces the first norm of the decoder."""
    return lambda model: model.decoder[0].norms.__setitem__(0, build(model.positions.embedding_dim))  # pyright: ignore


class _AcrossQueries(Attention):
    def normalize(self, scores: Tensor) -> Tensor:
        return scores.softmax(-2)


class _Unscaled(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (1 - self.p if self.training else 1)


class _AlwaysOff(nn.Dropout):
    def train(self, mode: bool = True) -> "_AlwaysOff":
        return super().train(False)


def _is_now(kind: type[nn.Module]) -> Callable[[nn.Module], None]:
    return lambda part: setattr(part, "__class__", kind)


class _Detached(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.embedding(input, self.weight.detach())


def _by_row(self: ToyTransformer, src: Tensor) -> Tensor:
    """Indexes the position table by batch row, as code for (length, batch) inputs does with (batch, length)."""
    x = self.src_embedding(src) + self.positions.weight[: len(src), None]
    for layer in self.encoder:
        x = layer(x, self.source_mask(src))
    return x


def _in_a_list(model: ToyTransformer) -> None:
    layers = list(model.encoder)
    del model.encoder
    model.__dict__["encoder"] = layers


def _unmasked_in_training(self: ToyTransformer, src: Tensor) -> Tensor:
    return ToyTransformer.source_mask(self, src) | self.training


def _layer_off_for_good(self: ToyTransformer, src: Tensor) -> Tensor:
    if src.shape[1] < 7:
        self.encoder = self.encoder[:1]
    return ToyTransformer.encode(self, src)


def _written_into(self: ToyTransformer, src: Tensor, tgt: Tensor) -> Tensor:
    logits = ToyTransformer.forward(self, src, tgt)
    tgt[:, -1] = self.PAD
    return logits


class _Uncounted(_Head):
    def __init__(self, head: nn.Module):
        super().__init__(head, _count)
        self.register_buffer("calls", torch.zeros(()), persistent=False)


def _at_position_0(module: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
    """Decodes with position 0 for every token."""
    model = copy.deepcopy(module)
    assert isinstance(model, ToyTransformer)
    _methods(places=lambda self, tokens: torch.zeros(tokens.shape[1], dtype=torch.long))(model)
    return step_by_step(model, src, tgt)


def _forgetful(module: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
    """Decodes with a cache of the last two positions only."""
    assert isinstance(module, ToyTransformer)
    memory, cross = module.encode(src), module.cross_mask(src)
    steps = (module.decode(tgt[:, max(0, t - 1) : t + 1], memory, cross) for t in range(tgt.shape[1]))
    return torch.cat([step[:, -1:] for step in steps], 1)


def _with_padding(logits: Tensor, labels: Tensor) -> Tensor:
    padding = (labels == ToyTransformer.PAD).double().mean()
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) * (1 + padding)


def _of_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    return mean_loss(logits.softmax(-1), labels)


DEFECTS = (
    Defect("no causal mask", CAUSAL, _mask(torch.ones_like)),
    Defect("causal mask off by one", CAUSAL, _mask(lambda ones: ones.tril(1))),
    Defect("causal mask of which the first row is empty", CAUSAL, _mask(lambda ones: ones.tril(-1))),
    Defect("causal mask transposed", CAUSAL, _mask(torch.triu)),
    Defect("causal mask in training alone", CAUSAL, _mask(torch.ones_like, lambda training: not training)),
    Defect("causal mask in evaluation alone", CAUSAL_TRAINING, _mask(torch.ones_like, lambda training: training)),
    Defect(
        "targets not shifted",
        CAUSAL,
        _methods(forward=lambda self, s, t: ToyTransformer.forward(self, s, t.roll(-1, 1))),
    ),
    Defect("masked scores become -1e-9", WEIGHTS, _every(Attention, lambda part: setattr(part, "fill", -1e-9))),
    Defect("masked scores become -5", WEIGHTS, _every(Attention, lambda part: setattr(part, "fill", -5.0))),
    Defect("softmax over queries", WEIGHTS, _every(Attention, _is_now(_AcrossQueries))),
    Defect("a position attends only to itself", PAST, _mask(lambda ones: ones.tril().triu())),
    Defect("a position attends only to itself and the one before", PAST, _mask(lambda ones: ones.tril().triu(-1))),
    Defect("cross-attention left out", SOURCE, _every(Layer, lambda layer: setattr(layer, "cross_attention", None))),
    Defect("the encoder's output is lost", SOURCE, _encoded(torch.zeros_like)),
    Defect("the first source token is cut off", SOURCE, _methods(encode=_cut_source, cross_mask=_cut_mask)),
    Defect("no padding mask in cross-attention", PADDING, _methods(cross_mask=_seen)),
    Defect("no padding mask in the encoder", PADDING, _methods(source_mask=_seen)),
    Defect(
        "positions counted from the end",
        PADDING,
        _methods(places=lambda self, t: ToyTransformer.places(self, t).flip(0)),
    ),
    Defect("norm over positions and features", CAUSAL, _norm(lambda width: _NormOver(1, 2))),
    Defect("norm over the batch", APART, _norm(lambda width: _NormOver(0))),
    Defect("batch norm", APART_TRAINING, _norm(_BatchNorm)),
    Defect("positions by row of the batch", APART, _methods(encode=_by_row)),
    Defect("memory averaged over the batch", APART, _encoded(lambda x: x.mean(0, keepdim=True).expand_as(x))),
    Defect("the encoder's square mask in cross-attention", LENGTHS, _methods(cross_mask=_square)),
    Defect("masked scores become -inf", EMPTY, _every(Attention, lambda part: setattr(part, "fill", -torch.inf))),
    Defect("a layer that is never called", GRADIENTS, lambda model: setattr(model, "spare", nn.Linear(3, 3))),
    Defect("layers in a plain list", GRADIENTS, _in_a_list),
    Defect("NaN gradients", GRADIENTS, _encoded(lambda x: x + 0 * (x - x).square().sum(-1, True).sqrt())),
    Defect("an embedding that is detached", GRADIENTS, lambda model: _is_now(_Detached)(model.src_embedding)),
    Defect("the encoder's output is detached", GRADIENTS, _encoded(torch.Tensor.detach)),
    Defect("zero-initialized matrices", GRADIENTS, _every(Attention, lambda part: nn.init.zeros_(part.out.weight))),
    Defect("decoding with a cache stays at position 0", CACHE, arguments={"cached": _at_position_0}),
    Defect("a cache of the last two positions only", CACHE, arguments={"cached": _forgetful}),
    Defect("softmax before cross entropy", FREE, _outputs(lambda logits: logits.softmax(-1))),
    Defect("tanh behind the logits", FREE, _outputs(torch.tanh)),
    Defect("cosine-similarity logits", FREE, _outputs(lambda logits: nn.functional.normalize(logits, dim=-1))),
    Defect("padding counts in the loss", LOSS, arguments={"loss": _with_padding}),
    Defect("a sum for a mean in the loss", LOSS, arguments={"loss": lambda z, y: mean_loss(z, y) * (y != 0).sum()}),
    Defect("softmax twice in the loss", LOSS, arguments={"loss": _of_probabilities}),
    Defect("dropout fixed in the code", DROPOUT, _head(lambda head, x: nn.functional.dropout(x, 0.1, head.training))),
    Defect("dropout of another rate than was asked for", DROPOUT, arguments={"dropout": 0.3}),
    Defect("dropout that is not there", DROPOUT, _every(Layer, lambda part: setattr(part, "dropout", nn.Identity()))),
    Defect("dropout that training leaves off", DROPOUT, _every(nn.Dropout, _is_now(_AlwaysOff))),
    Defect("dropout without 1/(1 - rate)", DROPOUT, _every(nn.Dropout, _is_now(_Unscaled))),
    Defect("dropout active in evaluation", STILL, _head(lambda head, x: nn.functional.dropout(x, 0.1, True))),
    Defect("evaluation draws noise", STILL, _head(lambda head, x: x + 1e-9 * torch.randn_like(x))),
    Defect("evaluation draws from NumPy", STILL, _head(lambda head, x: x * (1 + 1e-9 * np.random.rand()))),
    Defect("evaluation modifies a buffer", STILL, _head(_count)),
    Defect(
        "evaluation modifies a non-persistent buffer",
        STILL,
        lambda model: setattr(model, "head", _Uncounted(model.head)),
    ),
    Defect("a short source switches a layer off for good", STILL, _methods(encode=_layer_off_for_good)),
    Defect("input ids modified in place", STILL, _methods(forward=_written_into)),
    Defect("no padding mask in training", SAME, _methods(source_mask=_unmasked_in_training)),
    Defect("another scale in training", SAME, _head(lambda head, x: x * (1.1 if head.training else 1.0))),
)


def examine(defect: Defect | None, seed: int = 0, **arguments: Any) -> Audit:
    """Audits the model with the defect, or the healthy model if None; `arguments` are passed on to `audit`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ToyTransformer()
    audit_arguments: dict[str, Any] = {
        "cached": step_by_step,
        "loss": mean_loss,
        "dropout": ToyTransformer.DROPOUT,
    } | arguments
    if defect is not None:
        defect.plant(model)
        audit_arguments |= defect.arguments
    return audit(
        model,
        vocab_size=ToyTransformer.VOCABULARY,
        pad_id=ToyTransformer.PAD,
        max_length=ToyTransformer.LONGEST,
        **audit_arguments,
    )
