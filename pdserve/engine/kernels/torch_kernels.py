"""The small operations in plain torch: right on every device, and the oracle of the fast ones."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.kernels.interface import Destination, HeadNorms


class TorchKernels:
    """Computes in float32 and rounds once, whatever the dtype of the input."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor, norms: HeadNorms | None
    ) -> None:
        if norms is not None:
            q.copy_(self.rms_norm(q, norms.q, norms.eps))
            k.copy_(self.rms_norm(k, norms.k, norms.eps))
        cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D/2] each
        for x in (q, k):
            left, right = x.float().chunk(2, dim=-1)  # [T, H, D/2] each
            x.copy_(torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1))

    def rotate_and_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        table: Tensor,
        norms: HeadNorms | None,
        to: Destination,
    ) -> None:
        self.rotate(q, k, positions, table, norms)
        to.write(k, v)
