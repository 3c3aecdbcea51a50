"""What the link itself carries: one large copy from device to device, in one process."""

import statistics

import torch

COPY_BYTES = 1 << 30
ROUNDS = 7


def link_bytes_per_s(source: str, target: str) -> float | None:
    """None where a device is no GPU, or where both are the same one."""
    devices = torch.device(source), torch.device(target)
    if any(device.type != "cuda" for device in devices) or devices[0] == devices[1]:
        return None
    data = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device=devices[0])
    out = torch.empty(COPY_BYTES, dtype=torch.uint8, device=devices[1])
    times_ms: list[float] = []
    for _ in range(ROUNDS):
        with torch.cuda.device(devices[0]):
            begin, end = _event(), _event()
            begin.record()
            out.copy_(data, non_blocking=True)
            end.record()
            end.synchronize()
            times_ms.append(begin.elapsed_time(end))
    return COPY_BYTES / (statistics.median(times_ms[1:]) * 1e-3)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
