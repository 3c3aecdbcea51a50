"""What ``pdserve bench engine`` tells of a GPU besides times: its memory, and where it is idle."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

# Work of the copy engines. Their time between two steps counts as idle: no kernel runs.
COPIES = ("Memcpy", "Memset")
RESULT_COPY = "Memcpy DtoH"  # one a step: the tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes. ``step`` is the most that torch took for steps' own tensors, beyond the others."""

    weights: int
    kv: int
    graphs: int  # with the kernels that are loaded at start
    step: int

    def as_json(self) -> dict[str, int]:
        return {
            "weights_bytes": self.weights,
            "kv_bytes": self.kv,
            "graphs_bytes": self.graphs,
            "step_bytes": self.step,
        }

    def row(self) -> str:
        """One line of the table."""
        shares = (("weights", self.weights), ("KV", self.kv), ("graphs", self.graphs))
        parts = [*shares, ("steps", self.step)]
        return "memory    " + ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in parts)


class MemoryWatch:
    """Follows a device's memory from before the engine is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.zeros(1, device=device)  # CUDA's own part is there from here on
        self._marks = [self._used()]
        self._reserved = 0  # by torch, once all is warm

    def made(self) -> None:
        """The engine has its weights and its cache."""
        self._marks.append(self._used())

    def warm(self) -> None:
        """It is warm; now it will run steps."""
        self._marks.append(self._used())
        torch.cuda.reset_peak_memory_stats(self._device)
        self._reserved = torch.cuda.memory_reserved(self._device)

    def use(self, kv_bytes: int) -> MemoryUse:
        """Once the steps are done."""
        before, made, warm = self._marks
        return MemoryUse(
            weights=made - before - kv_bytes,
            kv=kv_bytes,
            graphs=warm - made,
            step=torch.cuda.max_memory_reserved(self._device) - self._reserved,
        )

    def _used(self) -> int:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


def gap_ms(work: Callable[[], object]) -> float | None:
    """The median time without a kernel between two steps of ``work``, by torch's profiler.

    From the end of a step's last kernel to the start of the next one's first; None where ``work``
    has fewer than two steps.
    """
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        work()
        torch.cuda.synchronize()
    on_gpu = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiled.events()
        if event.device_type.name == "CUDA"
    )
    gaps_us: list[float] = []
    last_end: float | None = None  # of a kernel
    is_between = False  # a step's tokens went to the host since
    for start, end, name in on_gpu:
        if name.startswith(RESULT_COPY):
            is_between = True
        elif not name.startswith(COPIES):
            if is_between and last_end is not None:
                gaps_us.append(start - last_end)
            last_end, is_between = end, False
    return statistics.median(gaps_us) / 1e3 if gaps_us else None
