"""Values of a master that are written through its views: bytes that are old are made anew, or refused, and never multiplied by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import ottava
from distributed.fsdp_cases import RECIPES
from distributed.ranks import Ranks
from ottava.distributed import fsdp

RECIPE = RECIPES["current"]


def _row(local: Any) -> None:
    row = local[1]
    row += 1.0


WRITES: dict[str, Callable[[Any], Any]] = {
    "an element": lambda local: local.__setitem__((1, 5), 100.0),
    "an element of .data": lambda local: local.data.__setitem__((1, 5), 100.0),
    "a row": _row,
    "a row, copied into": lambda local: local[1].copy_(torch.full((32,), 3.0)),
    "rows": lambda local: local[1:3].mul_(100.0),
    "the transpose": lambda local: local.T[5].fill_(7.0),
    "a view of a view": lambda local: local[1].view(4, 8)[2, 3:5].fill_(100.0),
    "flat": lambda local: local.flatten().__setitem__(40, 100.0),
    "one of its rows": lambda local: local.unbind()[1].zero_(),
    "detached": lambda local: local.detach().__setitem__((1, 5), 100.0),
}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(ottava.Linear(32, 32, bias=False, device="cpu"))


def forward(model: nn.Module) -> Tensor:
    x = torch.linspace(-1, 1, 8 * 32).view(8, 32)
    with torch.no_grad(), ottava.autocast(recipe=RECIPE):
        return model(x)


def written_shard(keeps: bool) -> list[tuple[str, str]]:
    """(way of writing, what is wrong) where a forward after the write goes through, or the values are not those that were written."""
    mesh, wrong = init_device_mesh("cpu", (4,)), []
    for way, write in WRITES.items():
        model = build()
        fsdp.shard_model(model, mesh, RECIPE, reshard_after_forward=not keeps)
        parameter: Any = model[0].weight  # the shard; while it is gathered the module has the whole
        before = parameter.full_tensor().clone()
        forward(model)
        with torch.no_grad():
            write(parameter.to_local())
        try:
            forward(model)
            wrong.append((way, "old bytes were multiplied by"))
        except ValueError as error:
            if "changed since its FP8 copy was made" not in str(error):
                wrong.append((way, str(error)))
        fsdp.refresh(model)
        whole, plain = parameter.full_tensor(), build()
        with torch.no_grad():
            plain[0].weight.copy_(whole)
        if torch.equal(whole, before) or not torch.equal(forward(model), forward(plain)):
            wrong.append((way, "what was written is not what is multiplied by"))
    return wrong


def written_whole() -> list[str]:
    mesh, wrong = init_device_mesh("cpu", (4, 1), mesh_dim_names=("each", "alone"))["alone"], []
    for way, write in WRITES.items():
        model, plain = build(), build()
        fsdp.keep_whole(model, mesh, RECIPE, None, None)
        forward(model)
        with torch.no_grad():
            write(model[0].weight)
            write(plain[0].weight)
        if not torch.equal(forward(model), forward(plain)):
            wrong.append(way)
    return wrong


def test_a_write_through_any_view_of_a_shard_is_noticed(four_ranks: Ranks) -> None:
    for keeps in (False, True):  # True: gathered weights are still there when it is written
        assert four_ranks.run(written_shard, keeps) == [[]] * 4


def test_a_write_through_any_view_of_a_whole_weight_is_followed(four_ranks: Ranks) -> None:
    assert four_ranks.run(written_whole) == [[]] * 4


def test_a_view_of_a_master_reads_like_a_tensor(four_ranks: Ranks) -> None:
    assert all(four_ranks.run(reads))


def reads() -> bool:
    model = build()
    values = model[0].weight.detach().clone()
    fsdp.keep_whole(
        model, init_device_mesh("cpu", (4, 1), mesh_dim_names=("each", "alone"))["alone"], RECIPE, None, None
    )
    row = model[0].weight.detach()[3]
    return row.tolist() == values[3].tolist() and row[5].item() == values[3, 5] and torch.equal(row * 2, values[3] * 2)
