"""The operations in Triton give what their torch twins give."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.engine.kernels.interface import Destination, HeadNorms, Kernels
from pdserve.engine.kernels.select import make_kernels
from pdserve.engine.kernels.torch_kernels import TorchKernels

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ORACLE = TorchKernels()
GPU = torch.device("cuda:0")
EPS = 1e-5
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
ROWS = st.integers(1, 5) | st.integers(6, 700)
SIZES = st.sampled_from([40, 64, 128, 896, 4096, 14336])


def ours() -> Kernels:
    return make_kernels("triton", GPU)  # by name: the package is on GPU machines only


def random(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(GPU).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=GPU).to(dtype)


def assert_close(found: Tensor, expected: Tensor) -> None:
    # Two units of the last place: sums and the exponential may round another way.
    unit = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=2 * unit, atol=4e-6)


def assert_rotated_alike(
    found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32
) -> None:
    # What is a unit apart after the norm is so after turning too, where the result may be small.
    unit = max(torch.finfo(found.dtype).eps, torch.finfo(dtype).eps)
    torch.testing.assert_close(
        found, expected, rtol=2 * unit, atol=unit * float(expected.abs().max())
    )


@given(rows=ROWS, size=SIZES, dtype=DTYPES, seed=st.integers(0, 99))
@settings(max_examples=60)
def test_norm_after_adding(rows: int, size: int, dtype: torch.dtype, seed: int) -> None:
    x, residual = random(seed, rows, size, dtype=dtype), random(seed + 1, rows, size, dtype=dtype)
    weight = random(seed + 2, size, dtype=dtype)
    found_residual, expected_residual = residual.clone(), residual.clone()
    found = ours().add_rms_norm(x, found_residual, weight, EPS)
    assert_close(found, ORACLE.add_rms_norm(x, expected_residual, weight, EPS))
    assert torch.equal(found_residual, expected_residual)


@given(rows=ROWS, heads=st.integers(1, 9), size=SIZES, dtype=DTYPES, seed=st.integers(0, 99))
@settings(max_examples=40)
def test_norm_of_rows_and_of_heads_inside_wider_rows(
    rows: int, heads: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    x = random(seed, min(rows, 50), heads + 2, size, dtype=dtype)
    weight = random(seed + 1, size, dtype=dtype)
    for view in (x[:, 0].contiguous(), x[:, 0], x[:, 1 : 1 + heads]):
        assert_close(ours().rms_norm(view, weight, EPS), ORACLE.rms_norm(view, weight, EPS))


@given(rows=ROWS, size=SIZES, dtype=DTYPES, seed=st.integers(0, 99))
@settings(max_examples=40)
def test_silu_times_up(rows: int, size: int, dtype: torch.dtype, seed: int) -> None:
    gate_up = random(seed, rows, 2 * size, dtype=dtype) * 8
    assert_close(ours().silu_mul(gate_up), ORACLE.silu_mul(gate_up))


def test_silu_of_huge_gates_is_finite() -> None:
    gate_up = torch.tensor([[1e4, -1e4, 0.0, 88.0, -88.0, 1.0, 1.0, 1.0, 1.0, 1.0]], device=GPU)
    assert_close(ours().silu_mul(gate_up), ORACLE.silu_mul(gate_up))


# Few shapes: each is a kernel to compile.
ROTATIONS = st.sampled_from(
    [
        ((4, 2), 16, torch.float32),
        ((32, 8), 128, torch.bfloat16),
        ((1, 1), 24, torch.float16),
        ((14, 2), 64, torch.bfloat16),
    ]
)


def norms(has_norms: bool, size: int, dtype: torch.dtype) -> HeadNorms | None:
    if not has_norms:
        return None
    return HeadNorms(q=random(7, size, dtype=dtype), k=random(8, size, dtype=dtype), eps=EPS)


@given(rows=ROWS, shape=ROTATIONS, has_norms=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_rotation_in_place_of_views(
    rows: int, shape: tuple[tuple[int, int], int, torch.dtype], has_norms: bool, seed: int
) -> None:
    (q, kv), size, dtype = shape
    qkv = random(seed, rows, q + 2 * kv, size, dtype=dtype)
    table = random(seed + 1, 90, size, dtype=torch.float32)
    positions = torch.randint(90, (rows,), device=GPU)
    found, expected = qkv.clone(), qkv.clone()
    before = norms(has_norms, size, dtype)
    ours().rotate(found[:, :q], found[:, q : q + kv], positions, table, before)
    ORACLE.rotate(expected[:, :q], expected[:, q : q + kv], positions, table, before)
    assert_rotated_alike(found, expected)
    assert torch.equal(found[:, q + kv :], qkv[:, q + kv :])  # v is left alone


# Query heads, KV heads, head size, block size, dtypes of the model and of the cache.
WRITES = st.sampled_from(
    [
        (4, 2, 16, 1, torch.float32, torch.float32),
        (32, 8, 128, 16, torch.bfloat16, torch.bfloat16),
        (14, 2, 64, 24, torch.float32, torch.bfloat16),
        (1, 1, 24, 16, torch.float16, torch.float16),
        (20, 20, 64, 16, torch.bfloat16, torch.float32),
    ]
)


@given(rows=ROWS, shape=WRITES, has_norms=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_rotation_and_the_write_into_pages(
    rows: int,
    shape: tuple[int, int, int, int, torch.dtype, torch.dtype],
    has_norms: bool,
    seed: int,
) -> None:
    q, kv, size, block_size, dtype, kv_dtype = shape
    qkv = random(seed, rows, q + 2 * kv, size, dtype=dtype)
    table = random(seed + 1, 90, size, dtype=torch.float32)
    positions = torch.randint(90, (rows,), device=GPU)
    num_blocks = rows // block_size + 3
    cache = random(seed + 2, num_blocks, kv, 2, 2, block_size, size, dtype=kv_dtype)  # two layers
    cells = torch.randperm(num_blocks * block_size, device=GPU)[:rows]
    results = []
    for kernels in (ours(), ORACLE):
        x, pages = qkv.clone(), cache.clone()
        to = Destination(pages=pages[:, :, 1], cells=cells)
        q_rows, k_rows, v_rows = x.split([q, kv, kv], dim=1)
        kernels.rotate_and_write(
            q_rows, k_rows, v_rows, positions, table, norms(has_norms, size, dtype), to
        )
        results.append((x, pages))
    (found, found_pages), (expected, expected_pages) = results
    assert_rotated_alike(found, expected)
    assert_rotated_alike(found_pages, expected_pages, dtype)
    assert torch.equal(found[:, q + kv :], qkv[:, q + kv :])  # v is left alone
    assert torch.equal(found_pages[:, :, 0], cache[:, :, 0])  # and the other layer


def test_auto_takes_them_on_a_gpu() -> None:
    assert type(make_kernels("auto", GPU)) is type(ours())
