"""Small host values to a rank's device and results back, without waiting for the device.

A GPU copies from and to pageable memory only when all work queued before is done, so on GPUs both
ways go through pinned memory. On a CPU there is nothing to stage.
"""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

Values = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]]


def on_device(values: Values, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values as a tensor on ``device``; a GPU's copy is queued on the current stream."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """The values, in host memory that may change later, on ``device``; as ``on_device`` does it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def integers_on_host(values: Sequence[int], device: torch.device) -> Tensor:
    """The values, one at least, as int64 from where ``device`` may copy them without waiting."""
    # Several times as quick as torch.tensor.
    held = torch.frombuffer(array("q", values), dtype=torch.int64)
    return held.pin_memory() if device.type == "cuda" else held


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Done when ``device`` has done all work queued so far on the current stream; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True, enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class HostCopy:
    """Tensors on their way to the host, after all work queued so far on the current stream.

    Without tensors it is that work alone that is waited for.
    """

    def __init__(self, device: torch.device, *tensors: Tensor) -> None:
        self._tensors = tensors
        if device.type == "cuda":
            self._tensors = tuple(_queue_copy(tensor) for tensor in tensors)
        self._done = mark(device)

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors in host memory, once they are there. From any thread."""
        if self._done is not None:
            self._done.synchronize()  # sync: the caller needs the values
        return self._tensors

    def since_s(self, began: torch.cuda.Event | None) -> float | None:
        """Seconds of the device's time since ``began``, a ``mark``, once ``wait`` is over; None on
        a CPU.
        """
        if began is None or self._done is None:
            return None
        return float(began.elapsed_time(self._done)) / 1e3


def _queue_copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
