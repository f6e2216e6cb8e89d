"""How to train a LoRA. The command line imports it, so it imports neither torch nor peft."""

from __future__ import annotations

from dataclasses import dataclass

from ortgpt_models.errors import ModelError
from ortgpt_models.settings import check_settings, setting


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """Say whether to train a LoRA in place of the weights, and which.

    Raises ModelError naming every field out of range, and every one that would have no effect.
    """

    lora_rank: int | None = setting(
        None,
        "Train a LoRA of this rank, on the product that makes query, key and value, in place of the weights; OUT "
        "becomes the folder of a PEFT adapter (extra [lora]).",
        kind=int,
        least=1,
    )
    lora_alpha: int | None = setting(
        None, "The LoRA's update is multiplied by alpha / rank. [default: twice the rank]", kind=int, least=1
    )
    lora_dropout: float = setting(0.0, "Dropout on the input of the LoRA, below 1.", most=0.99)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.lora_rank is None:
            idle = [name for name in ("lora_alpha", "lora_dropout") if getattr(self, name)]
            if idle:
                raise ModelError(f"{' and '.join(idle)} would have no effect without lora_rank")

    @property
    def alpha(self) -> int:
        """The numerator of the factor on the update."""
        return self.lora_alpha or 2 * (self.lora_rank or 0)
