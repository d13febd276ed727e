"""Ops and memory of tensors, trees of them, and the state that random numbers come from."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ottava import torch_private


def test_scaled_mm_is_that_of_functional() -> None:
    from torch.nn.functional import ScalingType
    from torch.nn.functional import scaled_mm as public

    a, b = (torch.randn(16, 16).to(torch.float8_e4m3fn) for _ in range(2))
    scale, kind = torch.ones(1), ScalingType.TensorWise
    device = "cuda" if torch.cuda.is_available() else "meta"
    a, b, scale = a.to(device), b.to(device), scale.to(device)
    want = public(a, b.t(), scale, kind, scale, kind, output_dtype=torch.bfloat16, use_fast_accum=True)
    got = torch_private.scaled_mm(a, b.t(), scale, kind.value, scale, kind.value, None, torch.bfloat16, True)
    assert got.shape == want.shape and got.dtype == want.dtype
    assert device == "meta" or torch.equal(got, want)


def test_cudnn_attention_backward_has_the_signature_that_is_called() -> None:
    """On the meta device: shapes and the order of arguments. tests/gpu compares its numbers."""

    def meta(heads: int, *last: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(1, heads, 32, *last, dtype=dtype, device="meta")

    q, k, v = meta(8, 64), meta(2, 64), meta(2, 64)
    grads = torch_private.cudnn_attention_backward(
        [meta(8, 64), q, k, v, meta(8, 64)], meta(8, dtype=torch.float32), True, 0.125
    )
    assert [tuple(x.shape) for x in grads] == [(1, 8, 32, 64), (1, 2, 32, 64), (1, 2, 32, 64)]
    schema = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default._schema
    names = [argument.name for argument in schema.arguments]
    assert names[:8] == ["grad_out", "query", "key", "value", "out", "logsumexp", "philox_seed", "philox_offset"]
    assert names[8:] == ["attn_bias", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "scale"]
    # Sums as torch's own forward gives them: [b, heads, s, 1], float32.
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=0.125)
    assert forward[1].shape == (1, 8, 32, 1) and forward[1].dtype is torch.float32


def test_current_device_and_stream_are_those_of_torch_cuda() -> None:
    if torch.cuda.is_available():
        torch.cuda.init()
        assert torch_private.current_device() == torch.cuda.current_device()
        assert torch_private.current_stream(0) == torch.cuda.current_stream(0).cuda_stream
        assert torch_private.is_capturing() is torch.cuda.is_current_stream_capturing() is False
    elif torch.version.cuda is None:
        assert torch_private.current_device() == torch_private.current_stream(0) == -1


def test_copy_all() -> None:
    targets, sources = [torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16)], [torch.ones(2), torch.full((3,), 2.5)]
    torch_private.copy_all(targets, sources)
    assert [t.tolist() for t in targets] == [[1.0, 1.0], [2.5, 2.5, 2.5]] and targets[1].dtype == torch.bfloat16


def test_add_to_all() -> None:
    tensors = [torch.zeros(()), torch.ones(2)]
    torch_private.add_to_all(tensors, 1.0)
    assert [t.tolist() for t in tensors] == [1.0, [2.0, 2.0]]


def test_largest_magnitudes_of_many_with_their_nan() -> None:
    tensors = [
        torch.tensor([1.0, -3.0]),
        torch.tensor([[torch.inf]]),
        torch.tensor([1.0, torch.nan]),
        torch.zeros(2).bfloat16(),
    ]
    found = [float(m) for m in torch_private.largest_magnitudes(tensors)]
    assert found[:2] == [3.0, torch.inf] and math.isnan(found[2]) and found[3] == 0.0


def test_weak_storage_knows_its_memory_and_takes_no_other_for_it() -> None:
    tensor = torch.randn(4, 6)
    reference = torch_private.weak_storage(tensor)
    assert torch_private.is_storage_of(reference, tensor) and torch_private.is_storage_of(
        reference, tensor.view(24)[3:]
    )
    assert not torch_private.is_storage_of(reference, tensor.clone())
    del tensor
    assert reference.expired()  # it keeps nothing
    assert not any(torch_private.is_storage_of(reference, torch.randn(4, 6)) for _ in range(100))


def test_tree_flatten_and_unflatten() -> None:
    tree = ((1, None), {"a": [2]})
    leaves, spec = torch_private.tree_flatten(tree)
    assert leaves == [1, None, 2] and torch_private.tree_unflatten(leaves, spec) == tree
    assert spec != torch_private.tree_flatten(((1, None), {"b": [2]}))[1]


def test_map_instances() -> None:
    assert torch_private.map_instances(int, lambda n: n + 1, (1, ["a", 2], {"k": 3.0})) == (2, ["a", 3], {"k": 3.0})


def test_generator_state_is_a_state_that_torch_takes() -> None:
    def numbers(key: bytes) -> Tensor:
        generator = torch.Generator()
        generator.set_state(torch_private.generator_state(key))
        return torch.randn(1000, generator=generator)

    assert torch.equal(numbers(b"a"), numbers(b"a")) and not torch.equal(numbers(b"a"), numbers(b"b"))
    assert abs(float(numbers(b"a").mean())) < 0.15 and abs(float(numbers(b"a").std()) - 1) < 0.1


def test_persistent_buffers() -> None:
    module = torch.nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("left_out", torch.ones(1), persistent=False)
    module.register_buffer("none", None)
    assert [name for name, _ in torch_private.persistent_buffers(module)] == list(module.state_dict()) == ["kept"]
