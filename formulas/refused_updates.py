"""The description of an update that was skipped because of non-finite values."""

import math
from collections.abc import Sequence


def describe_refusal(update: int, tokens: int, loss: float, nonfinite: Sequence[str]) -> str:
    """The reason why an update was skipped, in one line; `nonfinite` names parameters with non-finite gradients."""
    if not tokens:
        return f"update {update}: the batch has no token but padding; nothing was changed"
    if nonfinite:
        suffix = f" and {len(nonfinite) - 1} more" if len(nonfinite) > 1 else ""
        quantity = f"the norm of the gradient of {nonfinite[0]}{suffix}"
    else:
        quantity = "the norm of all gradients" if math.isfinite(loss) else "the loss"
    return f"update {update}: {quantity} is not finite (loss {loss}); nothing was changed"
