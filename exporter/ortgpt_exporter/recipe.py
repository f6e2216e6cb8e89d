"""How weights become integers: the methods there are, what fits which graph, and the defaults. Knows no graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ortgpt.contract import DType, Flavour, Key, RecipeName
from ortgpt_exporter.blocks import METHODS, SEARCH
from ortgpt_exporter.errors import ExportError

BITS = {DType.INT8: 8, DType.INT4: 4}
BLOCK_SIZES = (128, 64, 32, 16)
EMBEDDING, POSITIONS = "wte.weight", "wpe.weight"
GPTQ, W8A8 = "gptq", "w8a8"
# Optimum's dynamic quantisation, for the instructions of these CPUs.
DYNAMIC = ("dynamic-avx2", "dynamic-avx512", "dynamic-avx512-vnni", "dynamic-arm64")
# What each kind of graph can be, the default first.
ACCEPTED_METHODS: Mapping[tuple[str, str], tuple[str, ...]] = {
    (Flavour.NATIVE, DType.INT8): (*METHODS, GPTQ, W8A8),
    (Flavour.NATIVE, DType.INT4): (*METHODS, GPTQ),
    (Flavour.PORTABLE, DType.INT8): (W8A8, *DYNAMIC),
    (Flavour.PORTABLE, DType.INT4): (*METHODS, GPTQ),
}
ALL_METHODS = (*METHODS, GPTQ, W8A8, *DYNAMIC)
# Most of what is lost is lost in the head. At 32, one row is rounded as several are.
_HEAD_BLOCKS = {DType.INT8: 64, DType.INT4: 32}
_W8A8_HEAD_BLOCK = 32


@dataclass(frozen=True)
class Rounding:
    """Bits, weights to a scale (None: a whole row of the matrix), and method, for one matrix."""

    bits: int
    block_size: int | None
    method: str


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the matrices of one graph are rounded. The embedding, which is the head, has blocks and bits of its own.

    A block size of None is one scale for each row of a matrix, or none of ours (Optimum's). `wider` names matrices that
    get 8 bits although `dtype` is int4.
    """

    flavour: str
    dtype: str
    method: str
    block_size: int | None
    head_block_size: int | None
    head_dtype: str
    wider: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        if self.method in DYNAMIC:
            return RecipeName.DYNAMIC_TENSOR
        return RecipeName.W8A8_ROWS if self.method == W8A8 else RecipeName.WEIGHT_BLOCKS

    @property
    def parameters(self) -> dict[str, object]:
        """What the manifest says of it beside name and dtype."""
        values: dict[str, object] = {"method": self.method}
        if self.block_size is not None:
            values["block_size"] = self.block_size
        if self.head_block_size is not None:
            values |= {"head_block_size": self.head_block_size, "head_dtype": self.head_dtype}
        if self.name == RecipeName.WEIGHT_BLOCKS:
            values["wider"] = list(self.wider)
        return values

    @property
    def shown(self) -> str:
        """The recipe in a few words."""
        words = [f"{self.dtype}, {self.method}"]
        if self.block_size is not None:
            words.append(f"blocks of {self.block_size}")
        if self.head_block_size not in (None, self.block_size):
            words.append(f"head {self.head_block_size}")
        if self.head_dtype != self.dtype:
            words.append(f"head {self.head_dtype}")
        return ", ".join(words)

    def rounding_of(self, name: str, *, look_up: bool) -> Rounding:
        """Return how a matrix, by its checkpoint's name, is rounded for products or for look-ups."""
        search = SEARCH if self.method in (W8A8, GPTQ) else self.method
        if look_up and self.flavour == Flavour.PORTABLE:
            return Rounding(8, None, SEARCH)
        if name == POSITIONS:  # few rows, and each is added to every token
            return Rounding(8, self.head_block_size, search)
        if name == EMBEDDING:
            return Rounding(BITS[self.head_dtype], self.head_block_size, GPTQ if self.method == GPTQ else search)
        bits = 8 if name in self.wider else BITS[self.dtype]
        return Rounding(bits, self.block_size, GPTQ if self.method == GPTQ else search)


def make_recipe(
    widths: Mapping[str, int],
    *,
    flavour: str,
    dtype: str,
    method: str | None,
    block_size: int | None,
    head_dtype: str | None,
) -> Recipe:
    """Return the recipe for matrices whose rows have these widths, by name; what is None is chosen.

    Raises ExportError for a value that is not accepted or would have no effect, or a block size that does not divide
    every width.
    """
    accepted = ACCEPTED_METHODS.get((flavour, dtype))
    if accepted is None:
        raise ExportError(f"{Key.DTYPE} = {dtype!r} (accepted: {', '.join(BITS)})")
    method = accepted[0] if method is None else method
    if method not in accepted:
        raise ExportError(f"method = {method!r} with {flavour} {dtype} (accepted: {', '.join(accepted)})")
    if method == W8A8 or method in DYNAMIC:
        return _without_blocks(flavour, dtype, method, block_size, head_dtype)
    faults = []
    if head_dtype is not None and head_dtype not in BITS:
        faults.append(f"head_dtype = {head_dtype!r} (accepted: {', '.join(BITS)})")
    fitting = [size for size in BLOCK_SIZES if all(width % size == 0 for width in widths.values())]
    if not fitting:
        widest = ", ".join(sorted({str(width) for width in widths.values()}))
        faults.append(f"the matrices are {widest} wide; blocks want multiples of {BLOCK_SIZES[-1]}")
    elif block_size is not None and block_size not in fitting:
        faults.append(f"block_size = {block_size!r} (accepted here: {', '.join(map(str, fitting))})")
    if faults:
        raise ExportError(f"this cannot be quantised: {'; '.join(faults)}")
    usual, head = block_size or fitting[0], head_dtype or dtype
    return Recipe(
        flavour=flavour,
        dtype=dtype,
        method=method,
        block_size=usual,
        head_block_size=min(usual, _HEAD_BLOCKS[head]) if block_size is None else usual,
        head_dtype=head,
    )


def _without_blocks(flavour: str, dtype: str, method: str, block_size: int | None, head_dtype: str | None) -> Recipe:
    given = [name for name, value in (("block_size", block_size), ("head_dtype", head_dtype)) if value is not None]
    if given:
        raise ExportError(f"{' and '.join(given)} would have no effect with the method {method} on a {flavour} bundle")
    head_block_size = _W8A8_HEAD_BLOCK if flavour == Flavour.NATIVE else None
    return Recipe(
        flavour=flavour,
        dtype=dtype,
        method=method,
        block_size=None,
        head_block_size=head_block_size,
        head_dtype=dtype,
    )
