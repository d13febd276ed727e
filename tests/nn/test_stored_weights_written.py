"""What torch's own tools do to weights stored in FP8: write, move, load and share them."""

import copy

import pytest
import torch
from torch import nn

import ottava
from ottava import recipe

BLOCKED = [recipe.Float8BlockScaling(), recipe.MXFP8BlockScaling(), recipe.NVFP4BlockScaling()]
ALL = [recipe.Float8CurrentScaling(), *BLOCKED]


def make(scaling, seed=0, device="cpu", stored=True):
    """An MLP whose gate and up are two parameters of one matrix."""
    torch.manual_seed(seed)
    with ottava.quantized_model_init(enabled=stored, recipe=scaling):
        return ottava.LayerNormMLP(
            128, 256, activation="swiglu", set_parallel_mode=True, params_dtype=torch.float32, device=device
        )


def forward(model, scaling, tokens=None):
    torch.manual_seed(9)  # NVFP4 rounds gradients by chance
    tokens = torch.randn(32, 128, generator=torch.Generator().manual_seed(1)) if tokens is None else tokens
    with ottava.autocast(recipe=scaling):
        return model(tokens)


def train(model, optimizer, scaling):
    optimizer.zero_grad()
    forward(model, scaling).square().mean().backward()
    optimizer.step()


def copies(state):
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize("scaling", BLOCKED, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_products_take_the_scales_that_torchs_optimizers_have_written(scaling, kind):
    model = make(scaling)
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(2):
        train(model, optimizer, scaling)
    fresh = make(scaling, seed=1)
    fresh.load_state_dict(copies(model.state_dict()))
    assert torch.equal(forward(model, scaling), forward(fresh, scaling))


@pytest.mark.parametrize("scaling", ALL, ids=lambda r: type(r).__name__)
def test_backward_refuses_bytes_that_were_written_after_forward(scaling):
    model = make(scaling)
    output = forward(model, scaling, torch.randn(32, 128, requires_grad=True))
    with torch.no_grad():
        model.fc2_weight.mul_(3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("scaling", ALL, ids=lambda r: type(r).__name__)
def test_training_goes_on_after_an_evaluation_in_inference_mode(scaling):
    model = make(scaling)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.inference_mode():
        evaluated = forward(model, scaling)
    assert torch.equal(evaluated, forward(model, scaling))
    train(model, optimizer, scaling)
    with torch.inference_mode():
        forward(model, scaling)
    train(model, optimizer, scaling)


@pytest.mark.parametrize("scaling", ALL, ids=lambda r: type(r).__name__)
def test_state_dicts_copies_and_views_in_inference_mode(scaling):
    model = make(scaling)
    with torch.inference_mode():
        twin, state = copy.deepcopy(model), model.state_dict()
        vector = nn.utils.parameters_to_vector(model.parameters())
        assert torch.equal(model.fc2_weight.t(), model.fc2_weight.dequantize().t())
        assert torch.equal(forward(twin, scaling), forward(model, scaling))
    assert torch.equal(vector, nn.utils.parameters_to_vector(model.parameters()))
    other = make(scaling, seed=1)
    other.load_state_dict(state)
    for each in (model, other):
        train(each, torch.optim.SGD(each.parameters(), lr=0.1), scaling)
    assert torch.equal(model.fc2_weight, other.fc2_weight)


VIEWS = {
    "row": lambda w: w[0],
    "column": lambda w: w[:, 3],
    "columns": lambda w: w[:, :32],
    "rows": lambda w: w[:64],
    "flat": lambda w: w.view(-1),
    "reshape": lambda w: w.reshape(64, -1),
    "transpose": lambda w: w.t(),
    "diagonal": lambda w: w.diagonal(),
    "view of a view": lambda w: w.t()[3].view(2, -1),
    "unbind": lambda w: w.unbind(0)[1],
    "chunk of data": lambda w: w.data.chunk(2, dim=1)[0],
}


@pytest.mark.parametrize("scaling", ALL, ids=lambda r: type(r).__name__)
def test_a_write_into_a_view_of_stored_values_raises(scaling):
    """They are copies: the weight would stay as it is."""
    model = make(scaling)
    weight, values = model.fc2_weight, model.fc2_weight.dequantize().detach()
    with torch.no_grad():
        for name, view in VIEWS.items():
            seen = view(weight)
            assert torch.equal(seen, view(values)), name
            assert seen.tolist() == view(values).tolist()
            for write in (lambda t: t.mul_(3.0), lambda t: t.copy_(torch.zeros(t.shape)), lambda t: t.add_(1, alpha=2)):
                with pytest.raises(ValueError, match=r"copy_\(\)"):
                    write(seen)
        weight.t().clone().mul_(3.0)  # a copy that says so
    assert torch.equal(weight, values)


@pytest.mark.parametrize("scaling", ALL, ids=lambda r: type(r).__name__)
def test_plain_values_in_the_place_of_one_part_are_multiplied_with_the_other(scaling):
    model, gate = make(scaling), make(scaling, seed=1, stored=False).fc1_gate_weight
    tokens = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))
    plain = make(scaling, stored=False)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        plain.fc1_gate_weight.copy_(gate)
    with ottava.autocast(recipe=scaling):
        found = torch.func.functional_call(model, {"fc1_gate_weight": gate}, (tokens,))
    assert torch.equal(found, forward(plain, scaling))
    nn.utils.parametrizations.weight_norm(model, "fc1_up_weight")
    forward(model, scaling).sum().backward()
    assert model.parametrizations.fc1_up_weight.original1.grad.abs().max() > 0


def test_values_that_are_assigned_to_data_are_stored():
    model = make(ALL[0])
    values = torch.randn(128, 256)
    model.fc2_weight.data = values
    assert (model.fc2_weight.dequantize() - values).norm() < 0.05 * values.norm()
    vector = torch.full((sum(p.numel() for p in model.parameters()),), 0.5)
    nn.utils.vector_to_parameters(vector, model.parameters())
    assert torch.equal(model.fc1_weight, torch.full((512, 128), 0.5))
    with pytest.raises(ValueError, match="takes values of its own shape"):
        model.fc2_weight.data = torch.randn(64, 256)


def test_another_dtype_leaves_the_bytes_and_takes_no_memory():
    model = make(ALL[0])
    before = copies(model.state_dict())
    weight = model.fc2_weight
    model.to(torch.bfloat16)
    assert model.fc2_weight is weight and weight.dtype == torch.bfloat16 and weight.data_ptr() == 0
    assert torch.equal(model.state_dict()["fc2_weight"], before["fc2_weight"])
    forward(model, ALL[0], torch.randn(32, 128, dtype=torch.bfloat16)).sum().backward()
    assert weight.grad.dtype == torch.bfloat16


def test_orthogonal_first_values():
    model = make(ALL[0])
    nn.init.orthogonal_(model.fc2_weight)
    rows = model.fc2_weight.dequantize()
    assert (rows @ rows.t() - torch.eye(128)).abs().max() < 0.1


@pytest.mark.parametrize("scaling", ALL, ids=lambda r: type(r).__name__)
def test_shared_memory_holds_the_same_weights(scaling):
    model = make(scaling)
    before = forward(model, scaling)
    model.share_memory()
    assert all(tensor.is_shared() for tensor in model.fc2_weight.memory.tensors())
    assert torch.equal(forward(model, scaling), before)


@pytest.mark.parametrize("scaling", ALL, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("of_bytes", [True, False])
def test_a_meta_model_takes_a_state_dict_by_assignment(scaling, of_bytes):
    model = make(scaling)
    state = copies((model if of_bytes else make(scaling, stored=False)).state_dict())
    empty = make(scaling, device="meta")
    with pytest.raises(RuntimeError, match="assign=True"), pytest.warns(UserWarning, match="no-op"):
        empty.load_state_dict(state)
    empty.load_state_dict(state, assign=True)
    assert empty.fc2_weight.stored_quantized
    assert torch.equal(forward(empty, scaling), forward(model, scaling))


@pytest.mark.parametrize("scaling", [recipe.DelayedScaling(), *ALL], ids=lambda r: type(r).__name__)
def test_values_in_another_dtype_are_rounded_once(scaling):
    """`weight.float()` is not the bf16 tensor that the weight stands for: a master made of it starts as FusedAdam's does."""
    with ottava.quantized_model_init(recipe=scaling):
        layer = ottava.Linear(128, 128, params_dtype=torch.bfloat16, device="cpu")
    weight = layer.weight
    master = torch.empty(128, 128)
    with torch.no_grad():
        master.copy_(weight)
    for dtype in (torch.float32, torch.float16):
        exact = weight.dequantize(dtype)
        assert torch.equal(weight.to(dtype), exact) and torch.equal(weight.detach().clone().to(dtype), exact)
    assert torch.equal(master, weight.dequantize(torch.float32)) and torch.equal(weight.float(), master)
    assert torch.equal(weight.double(), master.double())
    before = copies(layer.state_dict())
    layer.float()
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def test_a_weight_that_is_only_read_is_written_where_it_was_asked_to():
    """A QuantizedTensor takes it by copy_(), and refuses the rest as it always does."""
    scaling = recipe.Float8CurrentScaling()
    for stored in (True, False):
        weight = make(scaling, stored=stored).fc2_weight
        target = ottava.quantize(torch.randn(weight.shape), scaling, role="weight")
        before = target.dequantize()
        with torch.no_grad():
            target.copy_(weight)
            assert torch.equal(target, ottava.quantize(weight.detach(), scaling, role="weight"))
            with pytest.raises(ValueError, match="would write into a QuantizedTensor"):
                target.add_(weight)
            if stored:
                with pytest.raises(ValueError, match="would write into a QuantizedTensor"):
                    torch._foreach_add_([weight, target], 1.0)
            assert torch.equal(torch.zeros(weight.shape).add_(weight), weight.to(torch.float32))
        assert not torch.equal(target.dequantize(), before)
