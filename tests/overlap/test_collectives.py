"""The collectives of tensor parallelism: float32 sums in one order, any dtype on the wire, errors that say what to do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from distributed.ranks import Ranks
from ottava.kernels.fixed_order import matmul
from ottava.overlap import collectives


def tensor_of(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (6, 5)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).mul(3).to(dtype)


def by_halves(parts: list[Tensor], bias: Tensor | None = None) -> Tensor:
    """The sum as one process writes it down: neighbours first."""
    terms = [p.float() for p in parts]
    while len(terms) > 1:
        terms = [sum(terms[i + 1 : i + 2], terms[i]) for i in range(0, len(terms), 2)]
    return (terms[0] if bias is None else terms[0] + bias.float()).to(parts[0].dtype)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def sums(dtype: torch.dtype, rows: int, size: int) -> None:
    group = dist.new_group(list(range(size)))
    if dist.get_rank() >= size:
        return
    rank = dist.get_rank(group)
    parts = [tensor_of(r, dtype, (rows, 5)) for r in range(size)]
    for bias in (None, tensor_of(99, dtype, (5,))):
        expected = by_halves(parts, bias)
        before = parts[rank].clone()
        assert torch.equal(collectives.all_reduce(parts[rank], group, bias), expected)
        if rows % size == 0:
            own = expected.chunk(size)[rank]
            assert torch.equal(collectives.reduce_scatter(parts[rank], group, bias), own)
            strided = parts[rank].t().contiguous().t()
            assert torch.equal(collectives.reduce_scatter(strided, group, bias), own)
        assert torch.equal(parts[rank], before)  # nothing is summed in place


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_taken_in_float32_by_halves(four_ranks: Ranks, dtype: torch.dtype) -> None:
    for rows in (12, 1, 7):  # one row and odd rows cannot be scattered
        for size in (2, 3, 4):
            four_ranks.run(sums, dtype, rows, size)


def product_over_ranks() -> bool:
    """Ranks that hold parts of a contraction add up to the bits of the whole product."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(8, 512, generator=generator), torch.randn(512, 16, generator=generator)
    partial = matmul(a.chunk(size, 1)[rank], b.chunk(size, 0)[rank])
    return torch.equal(collectives.all_reduce(partial, dist.group.WORLD), matmul(a, b))


def test_partial_products_add_up_to_the_bits_of_one_process(four_ranks: Ranks) -> None:
    assert all(four_ranks.run(product_over_ranks))


GATHERED = [torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16, torch.float32, torch.int64]


def gathers() -> None:
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    for dtype in GATHERED:
        parts = [torch.randint(0, 250, (4, 3, 2), generator=torch.Generator().manual_seed(r)) for r in range(size)]
        parts = [p.to(torch.uint8).view(dtype) if dtype.itemsize == 1 else p.to(dtype) for p in parts]
        for dim in (0, 1):
            found = collectives.all_gather(parts[rank], group, dim)
            assert found.dtype == dtype
            wide = [p.view(torch.uint8) if dtype.itemsize == 1 else p for p in parts]
            assert torch.equal(found.contiguous().view(wide[0].dtype), torch.cat(wide, dim)), (dtype, dim)
    amax = torch.tensor([float(rank), float(-rank)])
    assert collectives.all_reduce_max(amax, group).tolist() == [size - 1, 0.0]
    assert amax.tolist() == [float(rank), float(-rank)]  # a new tensor


def test_any_dtype_is_gathered(four_ranks: Ranks) -> None:
    four_ranks.run(gathers)


def test_one_rank_communicates_nothing() -> None:
    x, bias = torch.randn(3, 4), torch.randn(4)
    assert collectives.all_gather(x, None) is x and collectives.all_reduce_max(x, None) is x
    assert torch.equal(collectives.all_reduce(x, None, bias), x + bias)
    assert (collectives.size_of(None), collectives.rank_of(None)) == (1, 0)


def mistakes() -> tuple[str, str]:
    messages = []
    with pytest.raises(ValueError) as uneven:
        collectives.reduce_scatter(torch.zeros(7, 2), dist.group.WORLD)
    messages.append(str(uneven.value))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError) as whole_mesh:
        collectives.process_group(mesh)
    assert collectives.process_group(mesh["tp"]) is mesh["tp"].get_group()
    return messages[0], str(whole_mesh.value)


def test_mistakes_say_what_to_do(four_ranks: Ranks) -> None:
    uneven, whole_mesh = four_ranks.run(mistakes)[0]
    assert "7 tokens over 4 ranks" in uneven and "pad the sequence to 8 tokens" in uneven
    assert 'mesh["tp"]' in whole_mesh and "('dp', 'tp')" in whole_mesh


def native() -> float:
    """The worst difference of the backend's own sums from ours, relative to the largest number; gloo stands for NCCL."""
    parts = [tensor_of(r, torch.float32, (8, 5)) for r in range(4)]
    y, bias = parts[dist.get_rank()], tensor_of(99, torch.float32, (5,))
    ours = [collectives.all_reduce(y, dist.group.WORLD, bias), collectives.reduce_scatter(y, dist.group.WORLD, bias)]
    chosen, collectives.native_sums = collectives.native_sums, lambda *_: True
    try:
        theirs = [
            collectives.all_reduce(y, dist.group.WORLD, bias),
            collectives.reduce_scatter(y, dist.group.WORLD, bias),
        ]
    finally:
        collectives.native_sums = chosen
    assert torch.equal(y, parts[dist.get_rank()])  # left as it was
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(ours, theirs, strict=True))


def test_the_backends_own_sums_are_taken_where_it_is_nccl(four_ranks: Ranks) -> None:
    assert max(four_ranks.run(native)) < 1e-6
