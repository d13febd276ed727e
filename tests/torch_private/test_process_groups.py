"""Process groups: what they know of themselves, symmetric memory, the flight record, torchrun's agent."""

from __future__ import annotations

import datetime
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ottava import torch_private


def test_what_a_group_knows_of_itself(tmp_path: Path) -> None:
    timeout = datetime.timedelta(seconds=77)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=timeout
    )
    try:
        assert torch_private.group_timeout_s(None, torch.device("cpu")) == 77.0
        group = torch.distributed.group.WORLD
        assert torch_private.group_timeout_s(group, torch.device("cpu")) == 77.0
        assert torch_private.first_report(group, "who", "me") == "me"
        assert torch_private.first_report(None, "who", "another") == "me"
        assert torch_private.first_report("no group", "who", "me") is None
    finally:
        torch.distributed.destroy_process_group()


def test_wait_for_work() -> None:
    """Collectives of a tensor subclass arrive as ops of c10d, whose schemas say of no argument that it is written."""
    seen = []

    class Wrapped(Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        @staticmethod
        def __new__(cls, inner: Tensor) -> Any:
            return Tensor._make_wrapper_subclass(cls, inner.shape)

        def __init__(self, inner: Tensor) -> None:
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            plain = torch_private.map_instances(Wrapped, lambda w: w.inner, args)
            result = func(*plain, **(kwargs or {}))
            torch_private.wait_for_work(result)
            seen.append((func.namespace, func._schema.is_mutable, [a.name for a in func._schema.arguments][:1]))
            return result

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch.distributed.broadcast(Wrapped(torch.ones(2)), 0, async_op=True)
        torch.distributed.all_reduce(Wrapped(torch.ones(2)))
    finally:
        torch.distributed.destroy_process_group()
    assert seen == [("c10d", False, ["tensors"])] * 2


def test_flight_record_is_json() -> None:
    assert isinstance(json.loads(torch_private.flight_record()), dict)


def test_without_a_gpu_there_is_nothing_to_abort() -> None:
    if not torch.cuda.is_available():  # with one: tests/gpu/test_restart.py
        assert torch_private.abort_device_groups() == 0


def test_symmetric_memory_is_where_torch_has_it() -> None:
    import torch.distributed._symmetric_memory as symmetric

    assert torch_private.has_symmetric_memory()
    parameters = list(inspect.signature(symmetric.rendezvous).parameters)
    assert parameters == ["tensor", "group"], "symmetric_memory calls it so; tests/gpu/test_overlap.py runs it"
    handle = torch._C._distributed_c10d._SymmetricMemory
    assert all(hasattr(handle, name) for name in ("get_buffer", "put_signal", "wait_signal"))
    assert callable(torch_private.symmetric_memory)


def test_has_multicast_answers_for_a_device() -> None:
    assert torch_private.has_multicast(0) in ((True, False) if torch.cuda.is_available() else (False,))


def test_torchruns_agent_has_what_ours_overrides():
    """What it does is seen in tests/launch/test_agent.py, with real ranks."""
    from torch.distributed.launcher import api

    usual = api.LocalElasticAgent
    assert inspect.signature(usual._monitor_workers).parameters.keys() == {"self", "worker_group"}
    assert list(inspect.signature(usual._shutdown).parameters)[:2] == ["self", "death_sig"]
    assert "_remaining_restarts" in inspect.getsource(usual.__mro__[1])
    with torch_private.elastic_agent(lambda codes: False, grace_s=1.0):
        assert issubclass(api.LocalElasticAgent, usual) and api.LocalElasticAgent is not usual
    assert api.LocalElasticAgent is usual
