"""Whether ONNX Runtime multiplies 8-bit integers exactly on this CPU, found out by multiplying.

Without VNNI, its kernels for unsigned × signed bytes add pairs of products in 16 bits and saturate silently.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from ortgpt.errors import DeviceError
from ortgpt.native_call import native_call
from ortgpt.ort.package import comes_from_onnxruntime

_WIDTH, _LARGEST = 16, 127
# An ONNX graph of one node, y = MatMulInteger(a, b): a is uint8 with zero point 0, b a constant (16, 16) of int8, as
# the weights of a bundle are.
_PRODUCT = (
    bytes.fromhex(
        "08083acf020a1b0a01610a01620a017a120179220d4d61744d756c496e7465676572"
        "1201702a0810022a010042017a2a8c020810081010034201624a8002"
    )
    + bytes([_LARGEST]) * _WIDTH**2
    + bytes.fromhex("5a090a016112040a02080262090a017912040a02080642040a00100a")
)


def multiplies_exactly(ort: ModuleType) -> bool:
    """Tell whether the largest products of unsigned and signed bytes are right, for one row and for several.

    Raises DeviceError if ONNX Runtime runs no graph at all.
    """
    try:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        with native_call:
            session = ort.InferenceSession(_PRODUCT, options, providers=["CPUExecutionProvider"])
            products = [session.run(None, {"a": np.full((rows, _WIDTH), 255, np.uint8)})[0] for rows in (1, 4)]
    except Exception as error:
        if not comes_from_onnxruntime(error):
            raise
        raise DeviceError(f"ONNX Runtime cannot run a graph of one product ({error}); install it again") from error
    return all(bool((product == 255 * _LARGEST * _WIDTH).all()) for product in products)
