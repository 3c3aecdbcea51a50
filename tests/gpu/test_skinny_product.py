"""Products of few rows give what the library's give."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.core.plugin import load_plugin
from pdserve.engine.kernels.select import make_kernels
from pdserve.engine.model.linear import Product, gated_product

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GPU = torch.device("cuda:0")


def skinny_product(weight: Tensor, bias: Tensor | None) -> Product | None:
    # By name: the package is on GPU machines only.
    make: Callable[[Tensor, Tensor | None], Product | None] = load_plugin(
        "pdserve.engine.model.skinny_product:skinny_product"
    )
    return make(weight, bias)


def normal(
    seed: int, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    generator = torch.Generator(GPU).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=GPU) * scale).to(dtype)


@given(
    rows=st.integers(1, 64),
    out_size=st.sampled_from([64, 4096, 6144, 16384]),
    in_size=st.sampled_from([896, 4096]),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=30)
def test_rows_times_weights(
    rows: int, out_size: int, in_size: int, has_bias: bool, seed: int
) -> None:
    assert_right(rows, out_size, in_size, has_bias, torch.bfloat16, seed)


@pytest.mark.parametrize(("rows", "out_size"), [(0, 4096), (17, 4096), (65, 16384)])
def test_no_rows_and_more_rows_are_left_to_the_library(rows: int, out_size: int) -> None:
    weight, x = normal(1, out_size, 896, scale=0.03), normal(2, rows, 896)
    product = skinny_product(weight, None)
    assert product is not None
    assert torch.equal(product(x), F.linear(x, weight))


@pytest.mark.parametrize("rows", [1, 7])
def test_float16_and_a_narrow_input(rows: int) -> None:
    assert_right(rows, 64, 64, False, torch.float16, 1)


def assert_right(
    rows: int, out_size: int, in_size: int, has_bias: bool, dtype: torch.dtype, seed: int
) -> None:
    weight = normal(seed, out_size, in_size, scale=in_size**-0.5, dtype=dtype)
    bias = normal(seed + 1, out_size, dtype=dtype) if has_bias else None
    x = normal(seed + 2, rows, in_size, dtype=dtype)
    product = skinny_product(weight, bias)
    assert product is not None
    found = product(x)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # One rounding of the result; sums are in float32.
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)
    assert torch.equal(found, product(x))


def test_rows_of_a_wider_tensor() -> None:
    weight, wide = normal(1, 4096, 512, scale=0.05), normal(2, 8, 1024)
    product = skinny_product(weight, None)
    assert product is not None
    assert torch.equal(product(wide[:, 512:]), product(wide[:, 512:].contiguous()))


@given(
    rows=st.integers(1, 70),
    out_size=st.sampled_from([32, 2048, 8192]),
    in_size=st.sampled_from([896, 4096]),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=30)
def test_silu_of_half_the_outputs_times_the_other_half(
    rows: int, out_size: int, in_size: int, has_bias: bool, seed: int
) -> None:
    """In one kernel or in two, for any number of rows."""
    weight = normal(seed, 2 * out_size, in_size, scale=in_size**-0.5)
    bias = normal(seed + 1, 2 * out_size) if has_bias else None
    x = normal(seed + 2, rows, in_size)
    found = gated_product(weight, bias, make_kernels("triton", GPU))(x)
    gate, up = F.linear(x, weight, bias).chunk(2, dim=1)
    expected = F.silu(gate.float()) * up.float()
    # Roundings of the two halves and of the result.
    torch.testing.assert_close(found.float(), expected, rtol=0.03, atol=0.03)


def test_in_one_kernel_it_is_rounded_as_in_two() -> None:
    weight, kernels = normal(1, 16384, 512, scale=0.05), make_kernels("triton", GPU)
    x = normal(2, 8, 512)
    product = skinny_product(weight, None)
    assert product is not None
    found = gated_product(weight, None, kernels)(x)
    assert torch.equal(found, kernels.silu_mul(product(x)))


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_kernels_in_a_row_wait_for_each_other_in_a_graph(rows: int) -> None:
    products = [skinny_product(normal(n, 4096, 4096, scale=1 / 64), None) for n in range(12)]
    wide = gated_product(normal(12, 16384, 4096, scale=1 / 64), None, make_kernels("triton", GPU))
    narrow = skinny_product(normal(13, 4096, 8192, scale=1 / 90), None)
    assert narrow is not None
    kernels, ones = make_kernels("triton", GPU), torch.ones(4096, device=GPU, dtype=torch.bfloat16)
    x = normal(99, rows, 4096)

    def chain(x: Tensor, between: Callable[[], object]) -> Tensor:
        for product in products:
            assert product is not None
            norm = partial(kernels.rms_norm, weight=ones, eps=1e-5)
            for operation in (product, wide, narrow, norm):
                x = operation(x)
                between()
        return x

    expected = chain(x, torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(x, lambda: None)
    for _ in range(20):
        graph.replay()
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("out_size", "in_size"), [(100, 4096), (4096, 100)])
def test_other_shapes_are_left_to_the_library(out_size: int, in_size: int) -> None:
    assert skinny_product(normal(1, out_size, in_size), None) is None
