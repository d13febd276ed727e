"""`transformer_engine` as Ottava provides it: names, errors, coming and going."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import ottava
import ottava.optimizers
from ottava import compat, recipe
from ottava.compat.names import SOURCES
from ottava.kernels import gemm
from ottava.quant.scheme import Scheme


@pytest.fixture
def te() -> Iterator[ModuleType]:
    with compat.installed():
        yield importlib.import_module("transformer_engine.pytorch")


def test_modules_recipes_and_contexts_are_ottavas(te: ModuleType) -> None:
    import transformer_engine
    from transformer_engine.common import recipe as te_recipe
    from transformer_engine.common.recipe import DelayedScaling, Format

    for name in ("Linear", "LayerNorm", "RMSNorm", "LayerNormLinear", "LayerNormMLP", "TransformerLayer", "autocast"):
        assert getattr(te, name) is getattr(ottava, name)
    assert te.fp8_autocast is ottava.fp8_autocast
    assert te.optimizers.FusedAdam is ottava.optimizers.FusedAdam
    assert te.attention.RotaryPositionEmbedding is ottava.attention.RotaryPositionEmbedding
    assert DelayedScaling is recipe.DelayedScaling and Format is recipe.Format
    assert te_recipe.Float8BlockScaling is recipe.Float8BlockScaling
    assert te.common.recipe is te_recipe
    assert transformer_engine.pytorch is te
    assert transformer_engine.__version__.startswith("2.20")


@pytest.mark.parametrize("name", SOURCES)
def test_every_module_can_be_imported_by_its_full_name(te: ModuleType, name: str) -> None:
    module = importlib.import_module(name)
    assert sys.modules[name] is module
    assert all(hasattr(module, n) for n in dir(module))
    namespace: dict = {}
    exec(f"from {name} import *", namespace)


def test_names_that_scripts_import_from_submodules(te: ModuleType) -> None:
    from transformer_engine.pytorch.attention import DotProductAttention, RotaryPositionEmbedding  # noqa: F401
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, check_fp8_support, fp8_autocast
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
    from transformer_engine.pytorch.optimizers import FusedAdam  # noqa: F401
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensor
    from transformer_engine.pytorch.utils import is_bf16_available

    assert check_fp8_support()[0] in (True, False)
    assert isinstance(is_bf16_available(), bool)
    assert QuantizedTensor is ottava.QuantizedTensor
    assert isinstance(te.Linear(16, 16, device="cpu"), TransformerEngineBaseModule)
    assert not FP8GlobalStateManager.is_fp8_enabled()
    with fp8_autocast(enabled=True, fp8_recipe=recipe.MXFP8BlockScaling()):
        assert FP8GlobalStateManager.is_fp8_enabled()
        assert FP8GlobalStateManager.get_fp8_recipe() == recipe.MXFP8BlockScaling()
    with te.autocast(enabled=False, calibrating=True):
        assert FP8GlobalStateManager.is_fp8_calibration() and not FP8GlobalStateManager.is_fp8_enabled()
    with te.quantized_model_init():
        assert FP8GlobalStateManager.with_fp8_parameters()
    keys = [FP8GlobalStateManager.get_meta_tensor_key(forward=forward) for forward in (True, False)]
    assert all(key in ottava.Linear(16, 16, device="cpu").fp8_meta for key in keys)


def test_availability_has_transformer_engines_two_forms(te: ModuleType) -> None:
    for ask in (te.is_fp8_available, te.is_mxfp8_available, te.is_fp8_block_scaling_available, te.is_nvfp4_available):
        available, reason = ask(return_reason=True)
        assert ask() is available
        assert (reason == "") == available
    if not torch.cuda.is_available():
        assert te.is_nvfp4_available() and te.get_device_compute_capability() == (0, 0)
        assert te.get_cudnn_version() == (0, 0, 0)


def test_a_hopper_gpu_says_that_mxfp8_is_emulated(te: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ottava.compat.support.get_device_compute_capability", lambda: (9, 0))
    assert te.is_fp8_available() and te.is_fp8_block_scaling_available()
    available, reason = te.is_mxfp8_available(return_reason=True)
    assert not available and "emulation on compute capability 9.0" in reason


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_a_recipe_is_available_where_the_gemm_multiplies_it_natively(
    te: ModuleType, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    gemm._pair_on.cache_clear()  # no real device changes its capability
    went: list[str] = []
    for path, answer in (("_scaled_mm", "emulated"), ("_cublas_tensorwise", "native"), ("_cublas_blockwise", "native")):
        monkeypatch.setattr(gemm, path, lambda *_, answer=answer: went.append(answer))
    for ask, chosen in (
        (te.is_fp8_available, recipe.Float8CurrentScaling()),
        (te.is_fp8_available, recipe.DelayedScaling()),
        (te.is_fp8_block_scaling_available, recipe.Float8BlockScaling()),
        (te.is_mxfp8_available, recipe.MXFP8BlockScaling()),
        (te.is_nvfp4_available, recipe.NVFP4BlockScaling()),
    ):
        x, weight, grad = (str(Scheme.of(chosen, role)) for role in ("input", "weight", "grad"))
        went.clear()
        for a, b in ((x, weight), (grad, weight), (grad, x)):
            operands = [
                (torch.empty(128, 128), torch.empty(Scheme.parse(s).scale_shape(128, 128)), None) for s in (a, b)
            ]
            gemm._scaled_mm_cuda(*operands[0], *operands[1], a, b, None, torch.bfloat16, True)
        assert ask() == (went == ["native"] * 3), (capability, chosen, went)


@pytest.mark.parametrize(
    "kind, r",
    [
        ("Float8Tensor", recipe.DelayedScaling()),
        ("Float8BlockwiseQTensor", recipe.Float8BlockScaling()),
        ("MXFP8Tensor", recipe.MXFP8BlockScaling()),
        ("NVFP4Tensor", recipe.NVFP4BlockScaling()),
    ],
)
def test_tensor_classes_answer_isinstance_by_scheme(te: ModuleType, kind: str, r: recipe.Recipe) -> None:
    with te.quantized_model_init(recipe=r):
        weight = te.Linear(64, 64, device="cpu").weight
    kinds = ("Float8Tensor", "Float8BlockwiseQTensor", "MXFP8Tensor", "NVFP4Tensor")
    assert [k for k in kinds if isinstance(weight, getattr(te, k))] == [kind]
    assert not isinstance(torch.ones(2), getattr(te, kind))
    with pytest.raises(ValueError, match=r"ottava\.quantize"):
        getattr(te, kind)(data=None)


# -------------------------------------------------------------------------------------------------------- what is not there


def test_a_missing_attribute_names_itself_and_the_nearest(te: ModuleType) -> None:
    with pytest.raises(
        AttributeError, match=r"Ottava does not have `transformer_engine\.pytorch\.LayerNormLinaer`"
    ) as e:
        te.LayerNormLinaer  # noqa: B018
    assert "The nearest name that it has is `transformer_engine.pytorch.LayerNormLinear`." in str(e.value)
    assert not hasattr(te, "InferenceParams")
    assert getattr(te, "InferenceParams", None) is None


def test_onnx_export_says_what_to_use(te: ModuleType) -> None:
    with pytest.raises(AttributeError, match=r"onnx_export`\. Export with torch\.export"):
        te.onnx_export  # noqa: B018
    with pytest.raises(ImportError, match=r"does not have `transformer_engine\.pytorch\.export`"):
        import transformer_engine.pytorch.export  # noqa: F401


@pytest.mark.parametrize(
    "name, instead",
    [
        ("InferenceParams", "no key-value cache"),
        ("ops", "Use the modules"),
        ("get_cpu_offload_context", "save_on_cpu"),
        ("mark_not_offload", "save_on_cpu"),
        ("prepare_for_saving", "save_for_backward"),
        ("newton_schulz", "no Muon"),
        ("debug", "docs/bad-numbers.md"),
        ("router", "torch.topk"),
        ("ep", "no expert parallelism"),
    ],
)
def test_names_of_its_documentation_say_what_to_use(te: ModuleType, name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=instead):
        getattr(te, name)


@pytest.mark.parametrize(
    "name, instead",
    [
        ("tensor.utils", "FusedAdam.master_weights=True. and fully_shard"),
        ("tensor.grouped_tensor", "a weight for each group"),
        ("optimizers.multi_tensor_apply", "torch._foreach_"),
    ],
)
def test_modules_that_others_import_say_what_to_use(te: ModuleType, name: str, instead: str) -> None:
    with pytest.raises(ImportError, match=f"`transformer_engine.pytorch.{name}`. .*{instead}"):
        importlib.import_module(f"transformer_engine.pytorch.{name}")


def test_columns_of_delayed_scaling_have_their_names(te: ModuleType) -> None:
    from transformer_engine.pytorch.constants import FP8BwdTensorIdx, FP8FwdTensorIdx

    module, x = ottava.LayerNormMLP(16, 16, device="cpu"), torch.randn(16, 16)
    with ottava.autocast(recipe=recipe.DelayedScaling(amax_history_len=2)):
        y = module(x)
    y.backward(torch.full_like(y, 3.0))
    newest = {key: module.fp8_meta[key].amax_history[-1] for key in ("scaling_fwd", "scaling_bwd")}
    assert newest["scaling_fwd"][FP8FwdTensorIdx.GEMM1_WEIGHT] == module.fc1_weight.abs().max()
    assert newest["scaling_fwd"][FP8FwdTensorIdx.GEMM2_WEIGHT] == module.fc2_weight.abs().max()
    assert newest["scaling_bwd"][FP8BwdTensorIdx.GRAD_OUTPUT2] == 3.0


def test_its_compiled_part_has_the_names_that_programs_need_of_it(te: ModuleType) -> None:
    import transformer_engine_torch as tex

    assert tex.DType is te.DType
    with pytest.raises(AttributeError, match="`transformer_engine_torch.generic_gemm`. It is compiled code"):
        tex.generic_gemm  # noqa: B018
    with pytest.raises(ImportError, match="It is compiled code"):
        from transformer_engine_torch import quantize  # noqa: F401


def test_names_beside_the_modules(te: ModuleType) -> None:
    from transformer_engine.pytorch.permutation import moe_permute

    assert te.moe_permute is moe_permute
    assert te.RotaryPositionEmbedding is ottava.attention.RotaryPositionEmbedding
    assert te.UserBufferQuantizationMode.FP8 is te.module.UserBufferQuantizationMode.FP8
    rows = torch.arange(8)
    mixed = te.interleave_glu_tensor(rows, 2)
    assert mixed.tolist() == [0, 1, 4, 5, 2, 3, 6, 7] and torch.equal(te.deinterleave_glu_tensor(mixed, 2), rows)
    with pytest.raises(ValueError, match="multiple of 6"):
        te.interleave_glu_tensor(rows, 3)
    from transformer_engine.pytorch.utils import scaled_init_method_normal

    drawn = te.Linear(64, 64, init_method=scaled_init_method_normal(2.0, 8), device="cpu").weight
    assert 0.45 < drawn.std() < 0.55
    logits, targets = torch.randn(2, 3, 16, requires_grad=True), torch.tensor([[1, -100, 3], [0, 5, 15]])
    loss = te.parallel_cross_entropy(logits, targets, 0.1, True)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)


def test_from_import_of_a_missing_name_has_the_same_message(te: ModuleType) -> None:
    with pytest.raises(ImportError, match=r"nearest name that it has is `transformer_engine\.pytorch\.Linear`"):
        from transformer_engine.pytorch import Linaer  # noqa: F401
    with pytest.raises(ImportError, match=r"`transformer_engine\.common\.recipe\.DelayedScaling`"):
        from transformer_engine.common.recipe import DelayedScalin  # noqa: F401


@pytest.mark.parametrize("name", ["transformer_engine.jax", "transformer_engine_jax", "transformer_engine.pytorch.ops"])
def test_modules_ottava_does_not_have_fail_clearly(te: ModuleType, name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"Ottava does not have `{name}`"):
        importlib.import_module(name)


def test_names_that_a_module_gains_later_are_forwarded(te: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    later = ModuleType("ottava.distributed")

    def gather_everything() -> None: ...

    gather_everything.__module__ = "ottava.distributed.later"
    later.gather_everything = gather_everything  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ottava.distributed", later)
    assert te.distributed.gather_everything is gather_everything


def test_the_helper_of_fsdp_is_found_where_scripts_look_for_it(te: ModuleType) -> None:
    from transformer_engine.pytorch.distributed import prepare_te_modules_for_fsdp

    assert prepare_te_modules_for_fsdp is ottava.distributed.prepare_te_modules_for_fsdp


# --------------------------------------------------------------------------------------------------------- coming and going


def test_installing_and_uninstalling_leave_no_trace() -> None:
    before = [n for n in sys.modules if n.startswith("transformer_engine")]
    finders = list(sys.meta_path)
    with compat.installed():
        compat.install()  # a second time changes nothing
        assert "transformer_engine.pytorch" in sys.modules
        with compat.installed():
            pass
        assert "transformer_engine.pytorch" in sys.modules, "the inner block took away what the outer one installed"
    assert [n for n in sys.modules if n.startswith("transformer_engine")] == before
    assert sys.meta_path == finders
    compat.uninstall()
    assert sys.meta_path == finders


def test_a_real_transformer_engine_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("transformer_engine")
    monkeypatch.setitem(sys.modules, "transformer_engine", real)
    with compat.installed():
        assert sys.modules["transformer_engine"] is not real
    assert sys.modules["transformer_engine"] is real


def test_a_module_compiles_through_the_stand_in(te: ModuleType) -> None:
    layer, current = te.Linear(16, 16, device="cpu"), recipe.Float8CurrentScaling()

    def run(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=current):
            return layer(x)

    x = torch.randn(16, 16)
    assert torch.equal(torch.compile(run, backend="eager", fullgraph=True)(x), run(x))


def test_the_machine_is_described_without_compiled_code(te: ModuleType) -> None:
    import transformer_engine.pytorch.cpp_extensions as tex

    assert tex.ubuf_built_with_mpi() is False
    if not torch.cuda.is_available():
        assert tex.device_supports_multicast() is False
        assert tex.get_stream_priority_range() == (0, 0)
    name = "general_gemm"
    with pytest.raises(
        AttributeError, match=f"Ottava does not have `transformer_engine.pytorch.cpp_extensions.{name}`"
    ):
        getattr(tex, name)
