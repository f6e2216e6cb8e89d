"""How the matrices of one network are rounded: the recipe that a request becomes. Knows no graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ortgpt.contract import DType, Flavour, RecipeName
from ortgpt.errors import shown
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.quantization.request import (
    BITS,
    BLOCK_SIZES,
    DYNAMIC,
    GPTQ,
    PADDED_SIZES,
    W8A8,
    Quantization,
    choose_method,
)

EMBEDDING, POSITIONS, HEAD = "wte.weight", "wpe.weight", "lm_head.weight"  # a tied head is the embedding
LABEL_HEADS = ("score.weight", "classifier.weight")  # those of classifiers
# Most of the accuracy loss comes from the head, so it uses smaller blocks than the layers. In blocks of 32, MatMulNBits
# rounds one row as it rounds several.
_MAX_HEAD_BLOCK = {DType.INT8: 64, DType.INT4: 32}
_MAX_W8A8_HEAD_BLOCK = 32


@dataclass(frozen=True)
class Rounding:
    """How one matrix is rounded."""

    bits: int
    """8 or 4."""
    block_size: int | None
    """How many weights share a scale; None: those of a whole row."""
    gptq: bool = False
    """Whether a calibration text decides, or the squared error of the weights."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the matrices of one graph are rounded."""

    flavour: str
    """The flavour of the graph."""
    dtype: str
    """The precision of the layers: "int8" or "int4"."""
    method: str
    """The method, one of request.ALL_METHODS."""
    block_size: int | None
    """The block size of the layers; None: one scale for each row of a matrix."""
    head_block_size: int | None
    """The same of embedding and head."""
    head_dtype: str
    """The precision of embedding and head."""
    wider: tuple[str, ...] = ()
    """The matrices that get 8 bits although `dtype` is int4."""

    @property
    def name(self) -> str:
        """The recipe's name in the manifest."""
        if self.method in DYNAMIC:
            return RecipeName.DYNAMIC_TENSOR
        return RecipeName.W8A8_ROWS if self.method == W8A8 else RecipeName.WEIGHT_BLOCKS

    @property
    def parameters(self) -> dict[str, object]:
        """The recipe's parameters in the manifest."""
        values: dict[str, object] = {"method": self.method}
        if self.block_size is not None:
            values["block_size"] = self.block_size
        if self.head_block_size is not None:
            values |= {"head_block_size": self.head_block_size, "head_dtype": self.head_dtype}
        if self.name == RecipeName.WEIGHT_BLOCKS:
            values["wider"] = list(self.wider)
        return values

    def __str__(self) -> str:
        words = [f"{self.dtype}, {self.method}"]
        if self.block_size is not None:
            words.append(f"blocks of {self.block_size}")
        if self.head_block_size not in (None, self.block_size):
            words.append(f"head in blocks of {self.head_block_size}")
        if self.head_dtype != self.dtype:
            words.append(f"head {self.head_dtype}")
        return ", ".join(words)

    def rounding_of(self, name: str, *, look_up: bool, multiplied: bool = True) -> Rounding:
        """Return how the matrix with this checkpoint name is rounded for products or for look-ups.

        `multiplied` tells whether the graph has a product with it at all.
        """
        embedding = name in (EMBEDDING, POSITIONS, HEAD)
        bits = BITS[self.head_dtype if embedding else DType.INT8 if name in self.wider else self.dtype]
        if name == POSITIONS:  # it is small, and one of its rows is added to every token
            bits = 8
        block_size = self.head_block_size if embedding else self.block_size
        if self.flavour == Flavour.PORTABLE and (look_up or bits == 8):
            # Standard operators multiply and look up bytes by rows. They would widen blocks of bytes in each step.
            bits, block_size = 8, None
        gptq = self.method == GPTQ and block_size is not None and multiplied
        return Rounding(bits, block_size, gptq)


def make_recipe(quantization: Quantization, widths: Mapping[str, int], *, flavour: str) -> Recipe:
    """Return the recipe for matrices whose rows have these widths, by name.

    Raises ExportError for choices that do not fit together, or a block size that does not fit the widths.
    """
    method = choose_method(quantization, flavour)
    dtype, block_size = quantization.dtype, quantization.block_size
    head_dtype = quantization.head_dtype or dtype
    by_rows = method in (W8A8, *DYNAMIC)
    if by_rows and flavour == Flavour.PORTABLE:
        layer_block_size = head_block_size = None
    else:
        in_blocks = [name for name in widths if not by_rows or name in (EMBEDDING, POSITIONS, HEAD)]
        fitting = _fitting_sizes({widths[name] for name in in_blocks})
        if block_size is not None and block_size not in fitting:
            raise ExportError(f"block_size = {shown(block_size)} (accepted here: {', '.join(map(str, fitting))})")
        layer_block_size = None if by_rows else block_size or fitting[0]
        limit = _MAX_W8A8_HEAD_BLOCK if by_rows else _MAX_HEAD_BLOCK[head_dtype]
        head_block_size = block_size or next(size for size in fitting if size <= limit)
    return Recipe(
        flavour=flavour,
        dtype=dtype,
        method=method,
        block_size=layer_block_size,
        head_block_size=head_block_size,
        head_dtype=head_dtype,
    )


def _fitting_sizes(widths: set[int]) -> list[int]:
    """Return the block sizes that divide every width, the largest first; if there are none, those of padded rows."""
    return [size for size in BLOCK_SIZES if all(width % size == 0 for width in widths)] or [*PADDED_SIZES]
