"""Every private torch API that Ottava uses, in one place.

`tests/torch_private/` exercises each function here, so a torch release that changes one of them fails loudly there.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

GLOO_THREAD = "pt_gloo_runloop"
"""What torch calls the threads that run a gloo group's collectives, as the system shows it."""


def inside_backward() -> bool:
    """Whether this thread runs a backward pass now. A forward that runs inside one is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def _no_gpu(device: int = -1) -> int:
    return -1


# What `torch.cuda.current_device()` and `torch.cuda.current_stream(device).cuda_stream` find out, without their Python.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _no_gpu)
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_gpu)
# `torch.cuda.is_current_stream_capturing()`, the same; only where there is a GPU.
is_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", bool)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    a_type: int,
    b_scale: torch.Tensor,
    b_type: int,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_mm` with one scale an operand, and without the Python around it. Types: values of `ScalingType`."""
    return torch._scaled_mm_v2(a, b, [a_scale], [a_type], [], [b_scale], [b_type], [], bias, dtype, (), fast)  # type: ignore[attr-defined]


def constant_when_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.assume_constant_result`, which imports the compiler: its tracer calls `function`, and takes the result as it is."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def cudnn_attention_backward(
    by_head: Sequence[torch.Tensor], sums: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v by the kernel that backward of torch's scaled_dot_product_attention runs for cuDNN.

    by_head: gradient of the output, q, k, v, output, [b, heads, s, d] with any strides. sums: float32 [b, heads, s], the logarithm of the
    sum of exp(score). There is no dropout, so its seed and offset are not read.
    """
    grad, q, k, v, out = by_head
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, sums.unsqueeze(-1), unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
        scale=scale,
    )  # fmt: skip


# The `__torch_function__` of a tensor subclass whose ops all go to `__torch_dispatch__`.
DISABLED_TORCH_FUNCTION = torch._C._disabled_torch_function_impl


def local_tensor(parameter: Any) -> torch.Tensor:
    """What this rank holds of a DTensor: the object itself, where `to_local()` would make a view of it."""
    return parameter._local_tensor


def root_mesh(mesh: Any) -> Any:
    """The device mesh that `mesh` was sliced from, or itself."""
    return mesh._get_root_mesh()


def lists_model_state() -> bool:
    """Whether who calls the function that asks is `torch.distributed.checkpoint.state_dict`, which then lists what a module can load."""
    return sys._getframe(2).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"


def makes_optimizer_state() -> bool:
    """Whether `get_state_dict` or `set_state_dict` of torch runs a step with a rate and gradients of 0, to see what an optimizer keeps."""
    listing = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if listing is None or torch.compiler.is_compiling():
        return False
    code, frame = listing._init_optim_state.__code__, sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


PIPELINE_STAGES = "torch.distributed.pipelining.stage"


def tries_pipeline_stage() -> bool:
    """Whether `torch.distributed.pipelining` runs a stage on memory that nobody has written to, to see what shapes come out.

    Never while `PIPELINE_STAGES` is not in `sys.modules`, which is asked without a call. A compiler does not know.
    """
    if torch.compiler.is_compiling():
        return False
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in ("_forward_metadata_inference", "_shape_inference"):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def in_reentrant_checkpoint() -> bool:
    """Whether torch's reentrant checkpoint runs its function again now; its first run was under `no_grad`."""
    return type(torch._C._current_autograd_node()).__name__ == "CheckpointFunctionBackward"


def bare_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without the Python that looks at every argument first: for where neither a compiler traces nor a transform of
    `torch.func` is active."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def release_saved(ctx: Any) -> None:
    """Inside of `Function.backward`: what `save_for_backward` has kept lives only as long as what `ctx.saved_tensors` gave, from now on. If
    the graph is kept for another backward, nothing happens."""
    ctx.maybe_clear_saved_tensors()


# Whether a transform of `torch.func` (vmap, grad, ...) is active.
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


# What may want to see an op before its device's version runs; each says whether it does. Modes are fake tensors, counters, selective
# checkpoints. To be called one by one: they are functions in C, and a function around them would be one in Python.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
is_tracing: Callable[[], bool] = torch._C._is_tracing
profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled


_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


def reshaped(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """x, whose rows are contiguous, in another shape: the same memory, but for autograd no view. An in-place op (`y += x`) on a view that
    a module returns cuts it off from FSDP2's hooks: backward then multiplies by weights that were not gathered. Not for what is saved for
    a backward, which would not notice such an op."""
    return x if x.shape == shape else _UNSAFE_VIEW(x, shape)


def no_view(x: torch.Tensor) -> torch.Tensor:
    """x, which may be a view for autograd, as none: FSDP2 warns of views that a module returns. It is not to be changed in place."""
    return _UNSAFE_VIEW(x, x.shape)


def weak_storage(tensor: torch.Tensor) -> StorageWeakRef:
    """What tells the memory of `tensor` from any other, also from memory that later lies at the same address, without keeping it."""
    return StorageWeakRef(tensor.untyped_storage())


def is_storage_of(reference: StorageWeakRef, tensor: torch.Tensor) -> bool:
    """Whether `tensor` lies in that memory."""
    return reference.cdata == tensor.untyped_storage()._cdata


# Identity of the backward pass that this thread runs now; -1 outside of one. A function in C.
backward_id: Callable[[], int] = torch._C._current_graph_task_id


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs `callback` once, when the backward pass that this thread runs now has finished, and with it what others have left for its end:
    DDP waits there for its sums, and a hook such as PowerSGD's starts collectives in other threads until then."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(callback))


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has a shape but no data, as under FakeTensorMode."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def wait_for_work(result: Any) -> None:
    """Waits for what a collective op (`torch.ops.c10d`) has returned beside its tensors."""
    from torch._C._distributed_c10d import Work
    from torch.utils._pytree import tree_leaves

    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.ScriptObject):
            Work.unbox(leaf).wait()


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """targets[i].copy_(sources[i]) for all i, in few kernels."""
    torch._foreach_copy_(targets, sources)


def add_to_all(tensors: list[torch.Tensor], number: float) -> None:
    """tensors[i] += number for all i, in few kernels."""
    torch._foreach_add_(tensors, number)


def is_compiled(module: Any) -> bool:
    """Whether `module.compile()` was called: its calls go to torch.compile."""
    return module._compiled_call_impl is not None


def largest_magnitudes(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The largest magnitude of each tensor, NaN where there is one, in a few launches for all. Not for FP8, nor for empty tensors."""
    return list(torch._foreach_norm(tensors, math.inf))


def map_instances(kind: type, function: Callable, tree: Any) -> Any:
    """`tree` (nested tuples, lists, dicts) with `function` applied to every leaf that is a `kind`."""
    from torch.utils._pytree import tree_map_only

    return tree_map_only(kind, function, tree)


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """(the leaves of nested tuples, lists and dicts, what puts them together again). None is a leaf."""
    from torch.utils._pytree import tree_flatten

    return tree_flatten(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    """The inverse of `tree_flatten`."""
    from torch.utils._pytree import tree_unflatten

    return tree_unflatten(leaves, spec)


def generator_state(key: bytes) -> torch.Tensor:
    """State of a CPU generator whose 624 words come from `key`.

    `manual_seed` looks at 32 bits of its seed only: among the million slabs of a 500B model about a hundred pairs would share a
    seed, and so be equal. The layout (seed, left, seeded, next, then the words as uint64) is that of every saved RNG state.
    """
    state = torch.Generator().manual_seed(0).get_state()  # just seeded: the words are used from the first on
    if state.numel() != 5056:
        raise RuntimeError(f"torch {torch.__version__} keeps {state.numel()} bytes of generator state; 5056 are known.")
    words = torch.frombuffer(bytearray(hashlib.shake_128(key).digest(4 * 624)), dtype=torch.int32)
    state[24 : 24 + 8 * 624].view(torch.int64).copy_(words.to(torch.int64) & 0xFFFFFFFF)
    return state


def local_box(parameter: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, offset) of what this rank holds of a DTensor, also inside `fake_mode`, which would not let torch read its own numbers."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for placement in parameter.placements:
        factor = getattr(placement, "split_factor", 1)  # _StridedShard: FSDP over a dimension that tp has split before
        if factor > 1 and parameter.shape[placement.dim] % factor:
            raise ValueError(
                f"Dimension {placement.dim} of shape {tuple(parameter.shape)} is sharded by FSDP over {factor} tensor-parallel parts "
                f"that are not equal, where torch's offsets are wrong: make {parameter.shape[placement.dim]} a multiple of {factor}."
            )
    with unset_fake_temporarily():
        mesh, placements = parameter.device_mesh, parameter.placements
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return tuple(shape), tuple(offset)


def is_exporting() -> bool:
    """Whether `torch.export` traces now. Reads the flag itself: dynamo of torch 2.11 takes `torch.compiler.is_exporting()` for True."""
    return torch.compiler._is_exporting_flag


_SDPA_PRIORITY = torch._C._get_sdp_priority_order()


def sdpa_priority() -> list[Any] | None:
    """`SDPBackend`s in the order of `sdpa_kernel(..., set_priority=True)`; None where nobody has said one."""
    now = torch._C._get_sdp_priority_order()
    return None if now == _SDPA_PRIORITY else [torch.nn.attention.SDPBackend(number) for number in now]


@contextmanager
def sdpa_in_order(kernels: Sequence[Any]) -> Iterator[None]:
    """`sdpa_kernel(kernels, set_priority=True)` for kernels that are all allowed now. That one, where others are not, leaves another order
    behind than it found: what came first in it stays first for all who call torch's attention later."""
    before, first = torch._C._get_sdp_priority_order(), [int(kind) for kind in kernels]
    torch._C._set_sdp_priority_order([*first, *(kind for kind in before if kind not in first)])
    try:
        yield
    finally:
        torch._C._set_sdp_priority_order(before)


def saved_tensor_hooks_active() -> bool:
    """Whether somebody decides now how tensors are saved for backward: a checkpoint, `save_on_cpu`, ..."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def fsdp1_replicas(unit: Any) -> Any:
    """The group of a hybrid-sharded FSDP1 unit whose ranks hold equal shards; None where nothing is replicated."""
    return getattr(unit, "_inter_node_pg", None)


def fsdp2_groups(module: Any) -> list[tuple[tuple[int, ...], int, torch.dtype | None]]:
    """(ranks that the weights are gathered over, copies of these shards, type in which gradients are summed) of what `fully_shard` made.

    The type is None where nothing is trained. Before the first forward too.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    found = []
    for group in groups:
        if group is None:
            continue
        shard, copies = getattr(group.mesh_info, "shard_process_group", None), 1
        if group.mesh_info.replicate_mesh_dim is not None:
            copies = group.mesh_info.mesh.size(group.mesh_info.replicate_mesh_dim)
        ranks = (
            (torch.distributed.get_rank(),)
            if shard is None
            else tuple(torch.distributed.get_process_group_ranks(shard))
        )
        dtype = None
        for parameter in group.fsdp_params:
            if parameter.sharded_param.requires_grad:  # a unit sums in one type
                policy = parameter.mp_policy
                dtype = policy.reduce_dtype or policy.param_dtype or parameter.sharded_param.dtype
                break
        found.append((ranks, copies, dtype))
    return found


def is_fsdp_managed(module: torch.nn.Module) -> bool:
    """Whether FSDP1 or FSDP2 gathers and frees what the module multiplies by."""
    return "_is_fsdp_managed_module" in module.__dict__


def ddp_hook_dtype(module: Any) -> torch.dtype | None:
    """The type that a communication hook of DistributedDataParallel sums gradients in; None without one that changes it."""
    names = [getattr(hook, "__name__", "") for hook, _ in module._comm_hooks]
    kinds = {"bf16_compress": torch.bfloat16, "fp16_compress": torch.float16}
    return next((dtype for name in names for start, dtype in kinds.items() if name.startswith(start)), None)


@contextmanager
def around_reduce_scatter(module: Any, see: Callable[..., Any]) -> Iterator[None]:
    """In here `see(work, output, input, group, op)` goes in the place of each reduce-scatter of gradients of an FSDP2 module.

    `work()` makes it, and its result is to be returned.
    """
    state = module._get_fsdp_state()
    groups = [
        group for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] if group is not None
    ]
    kept = [group._reduce_scatter_comm for group in groups]

    class Seen:
        def __init__(self, comm: Any) -> None:
            self.comm, self.allocate = comm, comm.allocate

        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
            def work() -> Any:
                return self.comm(output_tensor, input_tensor, group, op, async_op)

            return see(work, output_tensor, input_tensor, group, op)

    for group, comm in zip(groups, kept):
        group._reduce_scatter_comm = Seen(comm)
    try:
        yield
    finally:
        for group, comm in zip(groups, kept):
            group._reduce_scatter_comm = comm


def storage_info(file: str, offset: int, length: int) -> Any:
    """DCP's record of where an entry lies: `length` bytes at `offset` of `file`."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def forget_gathered(module: Any) -> None:
    """Makes FSDP2 set up what it gathers for `module` anew at its next all-gather: sizes and the gathered tensors may differ then.

    The module must be sharded (not gathered) now.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in groups:
        for parameter in group.fsdp_params if group is not None else ():
            parameter.all_gather_outputs = []
            parameter._unsharded_inner_tensors = []
            if hasattr(parameter, "_unsharded_param"):
                del parameter._unsharded_param


def gather_without_streams(module: Any) -> None:
    """Lets FSDP2's gathers of `module` travel until they are waited for where its group is gloo's, which has no stream to queue them in.

    There torch waits for a gather where it begins, and what is gathered ahead is hidden by nothing.
    """
    state = module._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        shards = None if group is None else getattr(group.mesh_info, "shard_process_group", None)
        if shards is not None and shards._get_backend(group.device).name() == "gloo":
            group.unshard_async_op = True


@contextmanager
def around_fsdp_waits(around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """In here FSDP2 waits for gathered weights (and unpacks them), and for reduced gradients, inside `around()`.

    A CPU has no streams: there a gather that nobody began ahead, or a reduce-scatter, is itself the wait.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    kept = [(FSDPParamGroup, "wait_for_unshard"), (FSDPParamGroup, "finalize_backward")]
    collectives = [(DefaultAllGather, "__call__"), (DefaultReduceScatter, "__call__")]
    methods = [(owner, name, getattr(owner, name)) for owner, name in (*kept, *collectives)]

    def wrap(method: Callable, collective: bool) -> Callable:
        def wrapped(self: Any, *args: Any, **options: Any) -> Any:
            tensors = [*args, *options.values()]
            on_host = any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in tensors)
            with around() if on_host or not collective else nullcontext():
                return method(self, *args, **options)

        return wrapped

    for owner, name, method in methods:
        setattr(owner, name, wrap(method, name == "__call__"))
    try:
        yield
    finally:
        for owner, name, method in methods:
            setattr(owner, name, method)


def persistent_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The buffers of the module itself that belong into its state dict."""
    left_out = module._non_persistent_buffers_set
    return [(name, b) for name, b in module._buffers.items() if b is not None and name not in left_out]


def fsdp1_stretches(unit: Any) -> list[tuple[torch.nn.Module, str, tuple[int, ...], torch.Tensor, int]]:
    """(module, parameter's name, its shape, what this rank holds of it, flattened, and where that begins) for an FSDP1 unit.

    Of the unit's own memory, also while the parameters are gathered. Tied parameters come once, at the first of their modules.
    """
    if unit._handle is None:
        return []
    flat = unit._handle.flat_param
    shard = getattr(flat, "_local_shard", flat.data)
    ends = itertools.accumulate(flat._numels_with_padding)  # padding lies between parameters
    own = [end for end, padding in zip(ends, flat._is_padding_mask) if not padding]
    found = []
    for info, shape, place, end in zip(flat._param_infos, flat._shapes, flat._shard_param_infos, own, strict=True):
        if not unit._handle.uses_sharded_strategy:  # all of it lies here; `place` says nothing then
            start, local = 0, shard[end - shape.numel() : end]
        elif place.in_shard:
            start = place.intra_param_start_idx
            local = shard[place.offset_in_shard : place.offset_in_shard + place.numel_in_shard]
        else:
            start, local = 0, shard[:0]
        found.append((info.module, info.param_name, tuple(shape), local.detach(), start))
    return found


def has_multicast(device: int) -> bool:
    """Whether the memory of CUDA device `device` can be bound to a multicast address, which one store writes on all GPUs of a node."""
    from torch._C._distributed_c10d import _SymmetricMemory

    if not torch.cuda.is_available():  # it would ask a driver that is not there
        return False
    return _SymmetricMemory.has_multicast_support(torch._C._autograd.DeviceType.CUDA, device)


def flight_record() -> str:
    """The collectives that this process has started, as JSON: what torch's flight recorder holds (TORCH_FR_BUFFER_SIZE of them)."""
    record = torch._C._distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
    return record.decode() if isinstance(record, bytes) else record


def abort_device_groups() -> int:
    """Ends what NCCL runs on this process's GPU, in every group, so that nothing waits there for a rank that is dead. How many groups."""
    from torch.distributed import distributed_c10d as c10d

    if not torch.cuda.is_initialized() or not c10d.is_nccl_available():
        return 0
    count = 0
    for group in list(c10d._world.pg_map):
        try:
            backend: Any = group._get_backend(torch.device("cuda"))
        except RuntimeError:  # a group of the CPU alone
            continue
        if isinstance(backend, c10d.ProcessGroupNCCL):
            backend.abort()
            count += 1
    return count


def first_report(group: Any, key: str, text: str) -> str | None:
    """What the first rank to report under `key` has written into the group's store: `text`, if that is this one. None: no store answers."""
    world = torch.distributed.distributed_c10d._world
    try:
        store: Any = world.pg_map[group or torch.distributed.group.WORLD][1]  # type: ignore[index]
        return store.compare_set(key, "", text).decode()
    except (KeyError, RuntimeError):
        return None


def has_symmetric_memory() -> bool:
    """Whether this torch can map buffers of other GPUs."""
    try:
        import torch.distributed._symmetric_memory as symmetric
    except ImportError:
        return False
    return all(hasattr(symmetric, name) for name in ("empty", "rendezvous"))


def symmetric_memory(count: int, device: torch.device, group: Any) -> tuple[torch.Tensor, Any]:
    """`count` bytes on each rank's GPU that all ranks of the group can write, and a handle with get_buffer, put_signal and wait_signal."""
    import torch.distributed._symmetric_memory as symmetric

    owned = symmetric.empty(count, dtype=torch.uint8, device=device)
    return owned, symmetric.rendezvous(owned, group)


def group_timeout_s(group: Any, device: torch.device) -> float:
    """Seconds after which a collective of the group fails."""
    known: Any = group or torch.distributed.group.WORLD
    backend = known._get_backend(device)
    return backend.options._timeout.total_seconds()


def fake_store() -> Any:
    """The store of a process group with backend "fake", whose collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def fake_mode() -> Any:
    """A context in which operators compute shapes only. Tensors from outside, such as meshes, may be read."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def peak_memory(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], None]) -> dict[str, int]:
    """Bytes of tensors on the CPU when most live during `step()`, by kind ("Sharded Param", "Activation", ...) and in "Total".

    Inside `fake_mode`. A model that `fully_shard` has sharded has kinds of its own.
    """
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        tracker: MemTracker = FSDPMemTracker(model, optimizer)
    else:
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
    with tracker:
        step()
    snapshot = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {str(getattr(kind, "value", kind)): int(size) for kind, size in snapshot.items()}


@contextmanager
def elastic_agent(is_final: Callable[[list[int]], bool], grace_s: float) -> Iterator[list[int]]:
    """Inside, `torch.distributed.run.run` does not start ranks again whose exit codes (128 + n for signal n) are final, and gives
    ranks `grace_s` seconds after a signal. Yields a list that will have the return codes of ranks that ended after one.
    Folders of logs have a file `rank`.
    """
    import signal

    from torch.distributed.launcher import api

    ended: list[int] = []
    usual = api.LocalElasticAgent

    class Agent(usual):  # type: ignore[misc, valid-type]
        def _start_workers(self, worker_group: Any) -> Any:
            started = super()._start_workers(worker_group)
            for worker in worker_group.workers:  # folders of logs have the rank on this node as their name
                if path := self._pcontext.stdouts.get(worker.local_rank):
                    Path(path).with_name("rank").write_text(str(worker.global_rank))
            return started

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            codes = [failure.exitcode for failure in result.failures.values()]
            if is_final([128 - code if code < 0 else code for code in codes]):
                self._remaining_restarts = 0
            return result

        def _shutdown(self, death_sig: Any = None, timeout: float = 30) -> None:
            if death_sig is not None and self._pcontext is not None:  # the agent was signalled: ranks save now
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
                    signal.signal(number, signal.SIG_IGN)  # a second one would cut that short
                self._pcontext.close(death_sig, round(grace_s))
                handlers = getattr(self._pcontext, "subprocess_handlers", {})
                ended.extend(code for h in handlers.values() if (code := h.proc.poll()) is not None)
            super()._shutdown()

    api.LocalElasticAgent = Agent  # type: ignore[misc]
    try:
        yield ended
    finally:
        api.LocalElasticAgent = usual  # type: ignore[misc]
