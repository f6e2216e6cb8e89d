"""Whether ONNX Runtime multiplies 8-bit integers exactly on this CPU; found by multiplying.

Without VNNI its kernels for unsigned × signed bytes add pairs of products in 16 bits and saturate without a word.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

_WIDTH = 64
# An ONNX graph of one node, y = MatMulInteger(a, b): a is uint8, b int8, the zero point of a is 0.
_PRODUCT = bytes.fromhex(
    "08083a4b0a1b0a01610a01620a017a120179220d4d61744d756c496e7465676572120170"
    "2a0810022a010042017a5a090a016112040a0208025a090a016212040a02080362090a017912040a02080642040a00100a"
)


def multiplies_exactly(ort: ModuleType) -> bool:
    """Tell whether the largest products of unsigned and signed bytes come out right, for one row and for several."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(_PRODUCT, options, providers=["CPUExecutionProvider"])
    b = np.full((_WIDTH, _WIDTH), 127, np.int8)
    products = (session.run(None, {"a": np.full((rows, _WIDTH), 255, np.uint8), "b": b})[0] for rows in (1, 4))
    return all(bool((product == 255 * 127 * _WIDTH).all()) for product in products)
