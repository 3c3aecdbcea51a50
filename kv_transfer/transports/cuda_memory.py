"""GPU memory of one process, opened by another one of the same host (CUDA IPC).

Through the driver's library, which a process with a GPU has loaded: torch's own sharing counts
references in files and keeps memory of a process that is gone. A mapping keeps the memory alive
until it is closed.
"""

import ctypes
from functools import cache

import torch

from pdserve.core.errors import LinkDownError

HANDLE_BYTES = 64
ENABLE_PEER_ACCESS = 1

_Address = ctypes.c_uint64


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaMemory:
    """The calls, on one device. Each raises LinkDownError, with CUDA's words."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def export(self, address: int) -> tuple[bytes, int]:
        """What another process opens, and the offset of ``address`` within that."""
        handle, base, size = _Handle(), _Address(), ctypes.c_size_t()
        where = ctypes.byref(base), ctypes.byref(size), _Address(address)
        self._call("cuMemGetAddressRange_v2", *where)
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), _Address(address))
        return bytes(handle.reserved), address - base.value

    def open(self, exported: bytes) -> int:
        """Its address in this process."""
        if len(exported) != HANDLE_BYTES:
            raise LinkDownError(f"CUDA IPC: a handle of {len(exported)} bytes")
        address = _Address()
        handle = _Handle.from_buffer_copy(exported)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ENABLE_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        """Nothing may use it any more."""
        self._call("cuIpcCloseMemHandle", _Address(address))

    def _call(self, name: str, *arguments: object) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().query()  # makes the device's context this thread's
            driver = _driver()
            if status := getattr(driver, name)(*arguments):
                text = ctypes.c_char_p()
                driver.cuGetErrorString(status, ctypes.byref(text))
                reason = (text.value or b"").decode() or f"error {status}"
                raise LinkDownError(
                    f"CUDA IPC: {name}: {reason}; kv_transfer.transport nccl works without"
                )


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
