"""The operations in C give what their torch twins give."""

import pytest
import torch
from torch import Tensor

from pdserve.core.errors import ConfigError
from pdserve.engine.kernels.interface import Destination, HeadNorms
from pdserve.engine.kernels.native_kernels import NativeKernels
from pdserve.engine.kernels.select import make_kernels
from pdserve.engine.kernels.torch_kernels import TorchKernels

ORACLE = TorchKernels()
DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_close(found: Tensor, expected: Tensor) -> None:
    # Two units of the last place: sums and the exponential may round another way.
    unit = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=2 * unit, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 700])  # 700: more than one thread
def test_norm_after_adding(dtype: torch.dtype, rows: int) -> None:
    x, residual = random(rows, 72, dtype=dtype), random(rows, 72, dtype=dtype) * 3
    weight = random(72, dtype=dtype)
    found_residual, expected_residual = residual.clone(), residual.clone()
    found = NativeKernels().add_rms_norm(x, found_residual, weight, EPS)
    assert_close(found, ORACLE.add_rms_norm(x, expected_residual, weight, EPS))
    assert torch.equal(found_residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_rows_and_of_heads_inside_wider_rows(dtype: torch.dtype) -> None:
    x, weight = random(5, 9, 40, dtype=dtype), random(40, dtype=dtype)
    for view in (x[:, 0].contiguous(), x[:, 0], x[:, 2:6]):
        found = NativeKernels().rms_norm(view, weight, EPS)
        assert_close(found, ORACLE.rms_norm(view, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 300])
def test_silu_times_up(dtype: torch.dtype, rows: int) -> None:
    gate_up = random(rows, 2 * 50, dtype=dtype) * 8
    assert_close(NativeKernels().silu_mul(gate_up), ORACLE.silu_mul(gate_up))


def test_silu_of_huge_gates_is_finite() -> None:
    gate_up = torch.tensor([[1e4, -1e4, 0.0, 88.0, -88.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert_close(NativeKernels().silu_mul(gate_up), ORACLE.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_in_place_of_views(dtype: torch.dtype) -> None:
    qkv, table = random(6, 7, 32, dtype=dtype), random(90, 32, dtype=torch.float32)
    positions = torch.tensor([0, 89, 3, 3, 50, 1])
    found, expected = qkv.clone(), qkv.clone()
    NativeKernels().rotate(found[:, :4], found[:, 4:6], positions, table, None)
    ORACLE.rotate(expected[:, :4], expected[:, 4:6], positions, table, None)
    assert_close(found, expected)
    assert torch.equal(found[:, 6], qkv[:, 6])  # v is left alone


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_after_norms_of_heads(dtype: torch.dtype) -> None:
    qkv, table = random(6, 7, 32, dtype=dtype), random(90, 32, dtype=torch.float32)
    positions = torch.tensor([0, 89, 3, 3, 50, 1])
    norms = HeadNorms(q=random(32, dtype=dtype), k=random(32, dtype=dtype), eps=EPS)
    for kernels in (NativeKernels(), ORACLE):
        found, expected = qkv.clone(), qkv.clone()
        kernels.rotate(found[:, :4], found[:, 4:6], positions, table, norms)
        expected[:, :4] = kernels.rms_norm(qkv[:, :4], norms.q, EPS)
        expected[:, 4:6] = kernels.rms_norm(qkv[:, 4:6], norms.k, EPS)
        kernels.rotate(expected[:, :4], expected[:, 4:6], positions, table, None)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_rotation_and_the_write_into_pages(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    qkv, table = random(6, 8, 32, dtype=dtype), random(90, 32, dtype=torch.float32)
    positions, cells = torch.tensor([0, 89, 3, 3, 50, 1]), torch.tensor([11, 0, 7, 5, 4, 9])
    cache = random(3, 2, 2, 2, 4, 32, dtype=kv_dtype)  # two layers
    results = []
    for kernels in (NativeKernels(), ORACLE):
        x, pages = qkv.clone(), cache.clone()
        to = Destination(pages=pages[:, :, 1], cells=cells)
        kernels.rotate_and_write(x[:, :4], x[:, 4:6], x[:, 6:], positions, table, None, to)
        for token, cell in enumerate(cells.tolist()):
            written = pages[cell // 4, :, 1, :, cell % 4]
            assert torch.equal(written[:, 0], x[token, 4:6].to(kv_dtype))
            assert torch.equal(written[:, 1], qkv[token, 6:].to(kv_dtype))
        results.append(x)
    assert_close(*results)


def test_unknown_operations_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'cuda' is not one of auto, native, torch, triton"):
        make_kernels("cuda", torch.device("cpu"))
