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
    """Bits, weights to a block (None: a whole row of the matrix), and method, for one matrix.

    With `row_scales` all blocks of a row have the same scale.
    """

    bits: int
    block_size: int | None
    method: str
    row_scales: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the matrices of one graph are rounded. The embedding, which is the head, has blocks and bits of its own.

    A block size of None is one scale for each row of a matrix. `wider` names matrices that get 8 bits although `dtype`
    is int4. `fast_prefill` asks for a graph for prompts, and `row_scales` lets that read the layers' bytes. `flavour`
    is that of the graph.
    """

    flavour: str
    dtype: str
    method: str
    block_size: int | None
    head_block_size: int | None
    head_dtype: str
    fast_prefill: bool = False
    row_scales: bool = False
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
        if self.fast_prefill:
            values |= {"fast_prefill": True, "row_scales": self.row_scales}
        return values

    @property
    def shown(self) -> str:
        """The recipe in a few words."""
        words = [f"{self.dtype}, {self.method}"]
        if self.block_size is not None:
            words.append(f"blocks of {self.block_size}")
        if self.head_block_size not in (None, self.block_size):
            words.append(f"of the head {self.head_block_size}")
        if self.head_dtype != self.dtype:
            words.append(f"head {self.head_dtype}")
        if self.fast_prefill:
            words.append("fast prefill")
        return ", ".join(words)

    def rounding_of(self, name: str, *, look_up: bool) -> Rounding:
        """Return how a matrix, by its checkpoint's name, is rounded for products or for look-ups."""
        embedding = name in (EMBEDDING, POSITIONS)
        bits = BITS[self.head_dtype if embedding else DType.INT8 if name in self.wider else self.dtype]
        if name == POSITIONS:  # few rows, and each is added to every token
            bits = 8
        block_size = self.head_block_size if embedding else self.block_size
        if self.flavour == Flavour.PORTABLE and (look_up or bits == 8):
            # Standard operators multiply and look up bytes by rows; blocks of bytes would be widened in each step.
            bits, block_size = 8, None
        search = block_size is None or name == POSITIONS or self.method == W8A8
        return Rounding(bits, block_size, SEARCH if search else self.method, self.row_scales and not embedding)


def check_choice(
    *,
    flavour: str,
    dtype: str,
    method: str | None,
    block_size: int | None,
    head_dtype: str | None,
    fast_prefill: bool = False,
) -> str:
    """Return the method, chosen where it is None. Raises ExportError for what no network could be quantised by."""
    accepted = ACCEPTED_METHODS.get((flavour, dtype))
    if accepted is None:
        raise ExportError(f"{Key.DTYPE} = {dtype!r} (accepted: {', '.join(BITS)})")
    method = accepted[0] if method is None else method
    if method not in accepted:
        raise ExportError(f"method = {method!r} with {flavour} {dtype} (accepted: {', '.join(accepted)})")
    given = [name for name, value in (("block_size", block_size), ("head_dtype", head_dtype)) if value is not None]
    if given and method in (W8A8, *DYNAMIC):
        raise ExportError(
            f"{' and '.join(given)} would have no effect (accepted with the methods in blocks, not {method})"
        )
    if fast_prefill and (flavour != Flavour.NATIVE or method == W8A8):
        raise ExportError(
            f"fast_prefill would have no effect (accepted with {Flavour.NATIVE} graphs and the methods in blocks)"
        )
    faults = [
        f"{name} = {value!r} (accepted: {', '.join(map(str, choices))})"
        for name, value, choices in (("block_size", block_size, BLOCK_SIZES), ("head_dtype", head_dtype, tuple(BITS)))
        if value is not None and (type(value) is not type(choices[0]) or value not in choices)
    ]
    if faults:
        raise ExportError("; ".join(faults))
    return method


def make_recipe(
    widths: Mapping[str, int],
    *,
    flavour: str,
    dtype: str,
    method: str | None,
    block_size: int | None,
    head_dtype: str | None,
    fast_prefill: bool = False,
) -> Recipe:
    """Return the recipe for matrices whose rows have these widths, by name; what is None is chosen.

    Raises ExportError as check_choice() does, or where blocks do not divide every width.
    """
    row_scales = fast_prefill and dtype == DType.INT8 and method is None and block_size is None
    method = check_choice(
        flavour=flavour,
        dtype=dtype,
        method=method,
        block_size=block_size,
        head_dtype=head_dtype,
        fast_prefill=fast_prefill,
    )
    head_dtype = head_dtype or dtype
    by_rows = method in (W8A8, *DYNAMIC)
    if by_rows and flavour == Flavour.PORTABLE:
        usual = head = None
    else:
        embedding = (EMBEDDING, POSITIONS)
        fitting = _fitting_sizes({name: widths[name] for name in widths if not by_rows or name in embedding})
        if block_size is not None and block_size not in fitting:
            raise ExportError(f"block_size = {block_size!r} (accepted here: {', '.join(map(str, fitting))})")
        usual = None if by_rows else block_size or fitting[0]
        most = _W8A8_HEAD_BLOCK if by_rows else _HEAD_BLOCKS[head_dtype]
        head = block_size or next(size for size in fitting if size <= most)
    return Recipe(
        flavour=flavour,
        dtype=dtype,
        method=method,
        block_size=usual,
        head_block_size=head,
        head_dtype=head_dtype,
        fast_prefill=fast_prefill,
        row_scales=row_scales,
    )


def _fitting_sizes(widths: Mapping[str, int]) -> list[int]:
    """Return the block sizes that divide every width, the largest first. Raises ExportError where none does."""
    fitting = [size for size in BLOCK_SIZES if all(width % size == 0 for width in widths.values())]
    if not fitting:
        found = ", ".join(map(str, sorted(set(widths.values()))))
        raise ExportError(
            f"this cannot be quantised in blocks: its matrices are {found} wide (accepted: multiples of "
            f"{BLOCK_SIZES[-1]})"
        )
    return fitting
