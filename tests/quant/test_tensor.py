"""`QuantizedTensor`: values, copies, slices, printing, saving, and that nothing can write into it unnoticed."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor

import ottava
from ottava import recipe
from ottava.quant.tensor import BUFFER_NAMES
from quant_cases import DETERMINISTIC, QUANTIZING, RECIPES, all_same

EXACT = [name for name in DETERMINISTIC if name != "none"]


def make(
    name: str = "current", shape: tuple[int, ...] = (256, 128), role: str = "weight", dtype: torch.dtype = torch.float32
):
    return ottava.quantize(torch.randn(shape, dtype=dtype), RECIPES[name], role=role)


def buffers(q: ottava.QuantizedTensor) -> list[Tensor | None]:
    return [q._parts.get(name) for name in BUFFER_NAMES]


# ------------------------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("role,bits", [("input", 3), ("grad", 2)])
def test_error_of_a_value_is_half_a_step_of_its_format(role: str, bits: int) -> None:
    """Relative to the value where that is normal, relative to the smallest normal below."""
    x = torch.randn(64, 128) * torch.exp2(torch.randint(-12, 12, (64, 128)).float())
    q = ottava.quantize(x, recipe.Float8CurrentScaling(), role=role)
    smallest_normal = (2.0**-6 if bits == 3 else 2.0**-14) * q.rowwise_scale_inv
    bound = torch.maximum(x.abs(), smallest_normal) * 2.0 ** -(bits + 1) * 1.0001
    assert ((x - q.dequantize()).abs() <= bound).all()


@pytest.mark.parametrize("name", QUANTIZING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantize_keeps_or_takes_a_dtype(name: str, dtype: torch.dtype) -> None:
    q = make(name, dtype=dtype)
    assert q.dtype == dtype and q.dequantize().dtype == dtype
    assert q.dequantize(torch.float32).dtype == torch.float32
    assert torch.equal(q.dequantize(torch.float32).to(dtype), q.dequantize())


def test_dequantize_is_one_float32_product_rounded_once() -> None:
    q = make("current", dtype=torch.bfloat16)
    want = (q.rowwise_data.view(torch.float8_e4m3fn).float() * q.rowwise_scale_inv).bfloat16()
    assert torch.equal(q.dequantize(), want)


def test_both_copies_of_a_transposable_tensor_have_the_same_values() -> None:
    for name in ("delayed", "current", "block"):
        q = make(name, (144, 272))
        row = q.dequantize()
        assert torch.equal(q.drop_rowwise().dequantize(), row)


def test_ops_that_read_see_the_dequantized_values() -> None:
    q = make()
    plain = q.dequantize()
    assert torch.equal(q + 1, plain + 1)
    assert torch.equal(q.t(), plain.t())
    assert torch.equal(torch.cat([q, q]), torch.cat([plain, plain]))
    assert torch.equal(q[3, 5], plain[3, 5])
    assert q.sum() == plain.sum() and type(q.abs()) is Tensor
    assert torch.equal(plain @ q.t(), plain @ plain.t())


def test_a_plain_tensor_may_be_written_from_a_quantized_one() -> None:
    """The quantized tensor is only read here, so there is nothing to refuse."""
    q, plain = make(), torch.zeros(256, 128)
    plain.copy_(q)
    assert torch.equal(plain, q.dequantize())
    plain.add_(q)
    assert torch.equal(plain, 2 * q.dequantize())
    torch.add(q, 1, out=plain)
    assert torch.equal(plain, q.dequantize() + 1)


# ------------------------------------------------------------------------------------------------------------------ copies


@pytest.mark.parametrize("name", QUANTIZING)
def test_either_copy_can_be_dropped_but_not_both(name: str) -> None:
    q = make(name)
    assert q.drop_columnwise() is q
    assert q.columnwise_data is None and q.columnwise_scale_inv is None and q.rowwise_data is not None
    with pytest.raises(ValueError, match="Cannot drop rowwise_data: it is the only copy left"):
        q.drop_rowwise()
    q = make(name)
    q.drop_rowwise()
    assert q.rowwise_data is None and q.rowwise_scale_inv is None
    assert q.dequantize().shape == (256, 128)
    with pytest.raises(ValueError, match="Cannot drop columnwise_data: it is the only copy left"):
        q.drop_columnwise()


def test_asking_for_a_dropped_copy_says_what_is_left() -> None:
    q = make().drop_columnwise()
    with pytest.raises(
        ValueError, match=r"columnwise copy .* was dropped or never made; it has: rowwise_data, rowwise_scale_inv"
    ):
        q.operand("columnwise")


@pytest.mark.parametrize("name", QUANTIZING)
def test_detach_clone_and_to(name: str) -> None:
    q = make(name)
    detached = q.detach()
    assert isinstance(detached, ottava.QuantizedTensor) and detached.rowwise_data is q.rowwise_data
    clone = q.clone()
    assert all_same(buffers(clone), buffers(q)) and clone.rowwise_data.data_ptr() != q.rowwise_data.data_ptr()
    assert q.to("cpu") is q or all_same(buffers(q.to("cpu")), buffers(q))
    moved = q.to("meta")
    assert isinstance(moved, ottava.QuantizedTensor) and moved.device.type == moved.rowwise_data.device.type == "meta"
    assert type(q.to(torch.float16)) is Tensor and torch.equal(q.bfloat16(), q.dequantize().bfloat16())


def test_deepcopy_is_independent() -> None:
    q = torch.nn.Parameter(make())
    twin = copy.deepcopy(q)
    assert isinstance(twin, ottava.QuantizedTensor) and isinstance(twin, torch.nn.Parameter) and twin.requires_grad
    assert all_same(buffers(twin), buffers(q))
    with torch.no_grad():
        twin.copy_(torch.zeros(256, 128))
    assert q.dequantize().any() and not twin.dequantize().any()


# ---------------------------------------------------------------------------------------------------------- slices and views


@pytest.mark.parametrize("name,rows", [("delayed", 1), ("current", 1), ("block", 128), ("nvfp4", 16)])
def test_a_slice_of_whole_blocks_stays_quantized(name: str, rows: int) -> None:
    q = make(name, (512, 128))
    plain = q.dequantize()
    for first, last in ((0, rows), (rows, 3 * rows), (2 * rows, 512), (0, 512)):
        part = q[first:last]
        assert isinstance(part, ottava.QuantizedTensor), (first, last)
        assert part.shape == (last - first, 128) and torch.equal(part.dequantize(), plain[first:last])
        assert torch.equal(part.drop_rowwise().dequantize(), plain[first:last])


@pytest.mark.parametrize("name,rows", [("block", 128), ("mxfp8", 32), ("nvfp4", 16)])
def test_a_slice_of_1d_blocks_needs_whole_blocks_of_the_columnwise_copy_only(name: str, rows: int) -> None:
    chosen = recipe.NVFP4BlockScaling(disable_rht=True) if name == "nvfp4" else RECIPES[name]
    q = ottava.quantize(torch.randn(384, 64), chosen, role="input")
    column = q.clone().drop_rowwise().dequantize()
    part = q[rows : 2 * rows]
    assert isinstance(part, ottava.QuantizedTensor)
    assert torch.equal(part.dequantize(), q.dequantize()[rows : 2 * rows])
    assert torch.equal(part.drop_rowwise().dequantize(), column[rows : 2 * rows])
    row_only = ottava.quantize(torch.randn(384, 64), chosen, columnwise=False)
    assert isinstance(row_only[3:7], ottava.QuantizedTensor)
    assert torch.equal(row_only[3:7].dequantize(), row_only.dequantize()[3:7])


def test_other_slices_fall_back_to_plain_values() -> None:
    q = make("block", (256, 128))
    plain = q.dequantize()
    for got, want in (
        (q[3:130], plain[3:130]),
        (q[::2], plain[::2]),
        (q[:, :64], plain[:, :64]),
        (q[-100:], plain[-100:]),
    ):
        assert type(got) is Tensor and torch.equal(got, want)


def test_an_empty_slice() -> None:
    part = make("current")[5:5]
    assert part.shape == (0, 128) and part.dequantize().shape == (0, 128)


def test_split_gives_slices() -> None:
    q = make("block", (512, 128))
    parts = q.split(256)
    assert [tuple(p.shape) for p in parts] == [(256, 128)] * 2
    assert torch.equal(torch.cat([p.dequantize() for p in parts]), q.dequantize())


def test_views_that_keep_the_last_dimension_stay_quantized() -> None:
    q = make("current", (4, 8, 32))
    for shape in ((32, 32), (-1, 32), (2, 2, -1, 32)):
        view = q.view(shape)
        assert isinstance(view, ottava.QuantizedTensor) and view.numel() == q.numel()
        assert torch.equal(view.dequantize(), q.dequantize().view(shape))
    assert isinstance(q.reshape(32, 32), ottava.QuantizedTensor)
    assert type(q.view(-1)) is Tensor and torch.equal(q.view(-1), q.dequantize().view(-1))


def test_a_view_of_another_size_is_refused() -> None:
    with pytest.raises((RuntimeError, ValueError), match="shape|size"):
        make("current", (4, 32)).view(3, 32)


# ----------------------------------------------------------------------------------------------------------------- writing


def _set_row(q: Tensor) -> None:
    q[0] = 1.0


def _set_slice(q: Tensor) -> None:
    q[128:] = 1.0


def _set_mask(q: Tensor) -> None:
    q[q > 0] = 1.0


def _iadd(q: Tensor) -> None:
    q += 1


WRITES = {
    "add_": lambda q: q.add_(1),
    "mul_": lambda q: q.mul_(2),
    "zero_": lambda q: q.zero_(),
    "fill_": lambda q: q.fill_(3.0),
    "addcdiv_": lambda q: q.addcdiv_(torch.ones_like(q.dequantize()), torch.ones_like(q.dequantize())),
    "lerp_": lambda q: q.lerp_(torch.ones_like(q.dequantize()), 0.5),
    "normal_": lambda q: q.normal_(),
    "clamp_": lambda q: q.clamp_(0, 1),
    "+=": _iadd,
    "q[0] = 1": _set_row,
    "q[128:] = 1": _set_slice,
    "q[mask] = 1": _set_mask,
    "index_fill_": lambda q: q.index_fill_(0, torch.tensor([0]), 1.0),
    "out=": lambda q: torch.add(torch.ones(256, 128), 1, out=q),
    "foreach_add_": lambda q: torch._foreach_add_([q], 1.0),
}


@pytest.mark.parametrize("name", ["current", "block", "nvfp4"])
@pytest.mark.parametrize("write", list(WRITES))
def test_an_op_that_would_write_raises_and_changes_nothing(write: str, name: str) -> None:
    q = make(name)
    before = [None if b is None else b.clone() for b in buffers(q)]
    with torch.no_grad(), pytest.raises(ValueError, match=r"QuantizedTensor.*copy_\(\)"):
        WRITES[write](q)
    assert all_same(buffers(q), before)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_that_updates_in_place_raises(optimizer: type, foreach: bool) -> None:
    """The silent alternative, an update of a dequantized copy, would train nothing."""
    weight = torch.nn.Parameter(make())
    weight.grad = torch.ones(256, 128)
    before = weight.dequantize()
    with pytest.raises(ValueError, match="FusedAdam"):
        optimizer([weight], lr=0.1, foreach=foreach).step()
    assert torch.equal(weight.dequantize(), before)


@pytest.mark.parametrize("name", EXACT)
def test_copy_quantizes_again_in_place(name: str) -> None:
    q, x = make(name), torch.randn(256, 128)
    address = q.rowwise_data.data_ptr()
    assert q.copy_(x) is q and q.rowwise_data.data_ptr() == address
    # Delayed scaling has no scale of its own to reuse: a stored weight takes the scale of its values.
    fresh = recipe.Float8CurrentScaling() if name == "delayed" else RECIPES[name]
    want = ottava.quantize(x, fresh, role="weight")
    assert torch.equal(q.dequantize(), want.dequantize())
    assert torch.equal(q.clone().drop_rowwise().dequantize(), want.drop_rowwise().dequantize())


def test_copy_between_equal_schemes_copies_bytes() -> None:
    a, b = make("block"), make("block")
    a.copy_(b)
    assert all_same(buffers(a), buffers(b))
    c = make("current")
    c.copy_(b)  # another scheme: through the values
    assert torch.equal(c.dequantize(), ottava.quantize(b.dequantize(), RECIPES["current"], role="weight").dequantize())


def test_copy_of_another_shape_is_refused() -> None:
    q = make()
    before = q.dequantize()
    with pytest.raises(ValueError, match=r"equal shapes: target \(256, 128\), source \(1, 128\)"):
        q.copy_(torch.ones(1, 128))
    assert torch.equal(q.dequantize(), before)


def test_data_can_be_exchanged() -> None:
    block = recipe.Float8BlockScaling()
    q = torch.nn.Parameter(ottava.quantize(torch.ones(128, 128), block))
    q.data = torch.full((256, 128), 3.0, dtype=torch.bfloat16)
    assert q.shape == (256, 128) and q.dtype == torch.bfloat16 and q.rowwise_data.shape == (256, 128)
    assert torch.equal(q.dequantize(), torch.full((256, 128), 3.0, dtype=torch.bfloat16))
    other = ottava.quantize(torch.full((32, 64), 2.0), recipe.MXFP8BlockScaling())
    q.data = other
    assert q.scheme == other.scheme and q.shape == (32, 64) and torch.equal(q.dequantize(), other.dequantize())


def test_copy_from_another_dtype() -> None:
    q, x = make(dtype=torch.bfloat16), torch.randn(256, 128)
    q.copy_(x)
    assert q.dtype == torch.bfloat16
    assert torch.equal(q.dequantize(torch.float32), ottava.quantize(x, RECIPES["current"], role="weight").dequantize())


# --------------------------------------------------------------------------------------------------------------------- NaN


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8"])
def test_nan_is_counted_and_stays_nan(name: str) -> None:
    x = torch.randn(64, 64)
    assert ottava.quantize(x, RECIPES[name]).nan_count() == 0
    x[0, 0], x[5, 7], x[63, 63] = float("nan"), float("nan"), -float("nan")
    for role in ("input", "weight", "grad"):
        q = ottava.quantize(x, RECIPES[name], role=role)
        assert q.nan_count() == 3
        assert torch.equal(q.dequantize().isnan(), x.isnan())
        assert q.clone().drop_rowwise().nan_count() == 3


def test_nan_in_four_bits_is_carried_by_its_block() -> None:
    """E2M1 has no NaN, so the block's scale has to be one: the block is lost, and counted, but no number is made up."""
    x = torch.randn(32, 64)
    x[3, 20] = float("nan")
    q = ottava.quantize(x, recipe.NVFP4BlockScaling(disable_rht=True))
    assert q.nan_count() == 1
    lost = torch.zeros(32, 64, dtype=torch.bool)
    lost[3, 16:32] = True
    assert torch.equal(q.dequantize().isnan(), lost)


# --------------------------------------------------------------------------------------------------------- printing, saving


@pytest.mark.parametrize(
    "name,scheme", [("current", "e4m3:tensor"), ("block", "e4m3:128x128:pow2"), ("nvfp4", "e2m1:16x16")]
)
def test_printing_says_what_it_is(name: str, scheme: str) -> None:
    text = repr(make(name, dtype=torch.bfloat16))
    assert text == f"QuantizedTensor((256, 128), {scheme}, rowwise + columnwise, dtype=torch.bfloat16, device=cpu)"
    assert "rowwise, dtype" in repr(make(name).drop_columnwise())
    assert repr(torch.nn.Parameter(make(name))).count("requires_grad=True") == 1
    assert str(make(name)) == repr(make(name))


@pytest.mark.parametrize("name", QUANTIZING)
def test_save_and_load_with_weights_only(name: str) -> None:
    q = make(name, dtype=torch.bfloat16)
    file = io.BytesIO()
    torch.save({"w": q}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["w"]
    assert isinstance(loaded, ottava.QuantizedTensor)
    assert loaded.scheme == q.scheme and loaded.dtype == q.dtype and loaded.shape == q.shape
    assert all_same(buffers(loaded), buffers(q))


def test_its_state_is_plain() -> None:
    """What is saved is tensors, a string, a shape and a dtype: nothing that executes when it is read."""
    _, state = make("block").__reduce_ex__(2)
    parts, scheme, shape, dtype, requires_grad = state
    assert all(type(part) is Tensor for part in parts.values())
    assert (type(scheme), type(shape), type(dtype), type(requires_grad)) == (str, tuple, torch.dtype, bool)


def test_pickle_round_trip() -> None:
    q = make("block")
    assert all_same(buffers(pickle.loads(pickle.dumps(q))), buffers(q))


@pytest.mark.parametrize("name", QUANTIZING)
def test_flatten_and_unflatten(name: str) -> None:
    """What torch.compile and FSDP use."""
    q = make(name)
    names, meta = q.__tensor_flatten__()
    inner = {n: getattr(q, n) for n in names}
    again = ottava.QuantizedTensor.__tensor_unflatten__(inner, meta, q.shape, q.stride())
    assert all_same(buffers(again), buffers(q)) and again.scheme == q.scheme
    assert meta == copy.copy(meta) and hash(meta) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        q.nonsense  # noqa: B018


def test_as_a_parameter() -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(make())
    assert dict(module.named_parameters())["weight"] is module.weight
    assert isinstance(module.weight, ottava.QuantizedTensor) and module.weight.is_leaf
    module.weight.grad = torch.ones(256, 128)
    module.zero_grad()
    assert module.weight.grad is None
    assert isinstance(module.to("meta").weight, ottava.QuantizedTensor)


def test_gradients_flow_through_dequantized_reads() -> None:
    weight = torch.nn.Parameter(make())
    (weight * 2).sum().backward()
    assert torch.equal(weight.grad, torch.full((256, 128), 2.0))
