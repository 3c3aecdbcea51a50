"""Many copies in one call, by a GPU's copy engines: its multiprocessors are left to the model.

Through the driver's library: drivers from CUDA 12.8 on take a list of copies at once; older ones,
and those that do not for these memories, are called once for each. Addresses are numbers, of either
of two GPUs that reach each other.
"""

import ctypes
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from pdserve.core.errors import InternalError

Bytes = npt.NDArray[np.uint64]

IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
NOT_SUPPORTED = 801


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


def copy_all(targets: Bytes, sources: Bytes, sizes: Bytes, stream: torch.cuda.Stream) -> None:
    """Enqueue the copies, in any order among themselves; sizes in bytes.

    The stream's device must be the thread's. Raises InternalError, with CUDA's words.
    """
    driver, where = _driver(), ctypes.c_void_p(stream.cuda_stream)
    lists = [ctypes.c_void_p(words.ctypes.data) for words in (targets, sources, sizes)]
    attributes = _Attributes(order=IN_STREAM_ORDER)
    first = ctypes.c_size_t(0)
    rest = len(sizes), attributes, first
    if hasattr(driver, "cuMemcpyBatchAsync_v2"):
        status = _batch(driver.cuMemcpyBatchAsync_v2, lists, rest, where)
    elif hasattr(driver, "cuMemcpyBatchAsync"):
        failed = ctypes.byref(ctypes.c_size_t())
        status = _batch(driver.cuMemcpyBatchAsync, lists, rest, failed, where)
    else:
        status = NOT_SUPPORTED
    if not status:
        return
    for copy in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        _check(driver.cuMemcpyDtoDAsync_v2(*map(ctypes.c_uint64, copy), where))


def _batch(
    call: "ctypes._NamedFuncPointer",
    lists: list[ctypes.c_void_p],
    rest: tuple[int, _Attributes, ctypes.c_size_t],
    *end: object,
) -> int:
    count, attributes, first = rest
    status: int = call(
        *lists,
        ctypes.c_size_t(count),
        ctypes.byref(attributes),
        ctypes.byref(first),
        ctypes.c_size_t(1),
        *end,
    )
    return status


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise InternalError(f"CUDA: copies: {(text.value or b'').decode() or f'error {status}'}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
