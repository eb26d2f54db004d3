"""What is said of an update that changed nothing."""

import math
from collections.abc import Sequence


def describe_refusal(update: int, tokens: int, loss: float, nonfinite: Sequence[str]) -> str:
    """Why an update changed nothing, in one line; `nonfinite` names the parameters whose gradient's norm is."""
    if not tokens:
        return f"update {update}: the batch has no token but padding; nothing was changed"
    if nonfinite:
        more = f" and {len(nonfinite) - 1} more" if len(nonfinite) > 1 else ""
        what = f"the norm of the gradient of {nonfinite[0]}{more}"
    else:
        what = "the norm of all gradients" if math.isfinite(loss) else "the loss"
    return f"update {update}: {what} is not finite (loss {loss}); nothing was changed"
