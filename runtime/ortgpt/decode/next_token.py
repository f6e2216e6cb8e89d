"""Pick a row's next token from its logits, after checking that they are finite."""

from __future__ import annotations

import numpy as np

from ortgpt.contract import Tensor
from ortgpt.decode.row import Row
from ortgpt.engine.engine import Engine
from ortgpt.engine.forward import Logits
from ortgpt.errors import NonFiniteLogitsError
from ortgpt.sampling.logprobs import token_logprob


def check_finite(logits: Logits, where: str, *, name: str = Tensor.LOGITS) -> None:
    """Raise NonFiniteLogitsError, which says `where`, if any of the logits, or what `name` says, is NaN or infinite."""
    if not (np.isfinite(logits.max()) and np.isfinite(logits.min())):  # a NaN is the largest and the smallest
        raise NonFiniteLogitsError(
            f"{np.count_nonzero(~np.isfinite(logits)):,} of {logits.size:,} {name} are not finite {where}; the weights "
            "are damaged, or overflow in this precision"
        )


def pick_token(engine: Engine, logits: Logits, row: Row, index: int) -> int:
    """Return the next token of row `index` by logits (vocab_size,), which are changed; note its log-probability.

    Raises NonFiniteLogitsError, which names step and row, if the model computed NaN or infinity.
    """
    check_finite(logits, f"at step {len(row.token_ids)} of row {index}")
    logits[engine.allowed_vocab_size :] = -np.inf
    if row.logprobs is None:
        return row.sampler.pick(logits, row.ids)
    allowed = logits[: engine.allowed_vocab_size].copy()
    token_id = row.sampler.pick(logits, row.ids)
    row.token_logprobs.append(token_logprob(allowed, token_id, row.logprobs))
    return token_id
