"""The planner: sizes and memory near what was measured, the layouts that the chart names, errors that say what would do."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

from ottava.cli.main import main
from ottava.cli.plan import number_of_tokens
from ottava.distributed import ParallelPlan
from ottava.overlap.schedule import default_method
from ottava.plan import Cluster, NothingFits, estimate, plan_run
from ottava.plan.calibrate import calibrate
from ottava.plan.devices import find_gpu, known_gpus, short_name, write_entry
from ottava.plan.footprint import SPACE, ElementBytes, footprint
from ottava.plan.layouts import Layout, States, layout_of, layouts
from ottava.plan.links import Fabric, Group, Link
from ottava.plan.model_size import ModelSize
from ottava.plan.show import as_html, as_json, mesh_picture
from ottava.plan.step_time import step_time
from ottava.train.arguments import preset
from ottava.train.config import Config, DataSection, ModelSection, PrecisionSection, TrainSection
from ottava.train.model import construct
from ottava.train.presets import presets

GIB = 2.0**30
USUAL = States("adamw", "float32", False, "float32", "float32", "float32", 0)


def one_gpu(name: str, micro_batch: int, length: int, recompute: str = "none", states: States = USUAL):
    base = preset(name)
    config = replace(
        base,
        data=replace(base.data, length=length),
        train=replace(base.train, global_batch=micro_batch, micro_batch=micro_batch),
    )
    layout = Layout(1, 1, 1, False, recompute, micro_batch, 1, states)
    return config, ModelSize.of(config), ElementBytes.of(config), layout


@pytest.mark.parametrize("name", sorted(presets()))
def test_sizes_are_those_of_the_model(name: str) -> None:
    config = preset(name)
    model = construct(config, config.model.vocab_size or 257)
    assert ModelSize.of(config).parameters == sum(p.numel() for p in model.parameters())


def test_memory_is_near_what_an_h200_allocated() -> None:
    lean = States("fused_adam", "float32", False, "float32", "bfloat16", "bfloat16", 0)
    found = footprint(*one_gpu("llama3-1b", 4, 4096, states=lean))
    assert found.allocated / GIB == pytest.approx(26.4, rel=0.05)  # "current" of results/step-nvidia-h200-1b.json
    # Weights stored in FP8: version 0.1 kept both copies of them, 6.5 GiB more than now, and allocated 121 GiB.
    stored = States("fused_adam", "bfloat16", True, "float32", "float32", "float32", 1)
    found = footprint(*one_gpu("llama3-8b", 1, 8192, "full", stored))
    assert found.allocated / GIB + 6.5 == pytest.approx(121, rel=0.05)


@pytest.mark.parametrize(
    "recipe, ranks, recompute, tp",
    [
        ("Float8CurrentScaling", 1, "none", 1),
        ("Float8CurrentScaling", 8, "none", 1),
        ("Float8CurrentScaling", 8, "full", 1),
        ("Float8CurrentScaling", 16, "none", 2),
        ("none", 64, "selective", 1),
    ],
)
def test_memory_is_near_that_of_a_step_without_data(recipe: str, ranks: int, recompute: str, tp: int) -> None:
    model = ModelSection(vocab_size=32000, hidden_size=1024, ffn_hidden_size=3584, layers=4, heads=8, kv_heads=2)
    config = Config(
        model=model,
        data=DataSection(length=2048),
        precision=PrecisionSection(recipe=recipe),  # type: ignore[arg-type]
        train=TrainSection(global_batch=2 * ranks // tp, micro_batch=2),
    )

    def loss(whole: torch.nn.Module) -> torch.Tensor:
        tokens = torch.randint(32000, (2, 2049))
        return whole(tokens[:, :-1], tokens[:, 1:])

    plan = ParallelPlan(recompute=recompute, tp=tp, sequence_parallel=tp > 1)
    (exact,) = estimate(lambda: construct(config, 32000), lambda _: plan, [ranks], config.precision.make_recipe(), loss)
    layout = Layout(1, ranks // tp, tp, tp > 1, recompute, 2, 1, USUAL)
    found = footprint(config, ModelSize.of(config), ElementBytes.of(config), layout)
    assert found.allocated - SPACE == pytest.approx(exact.peak, rel=0.08)


def test_activations_are_those_that_the_memory_page_counts() -> None:
    for recipe, recompute, units in (
        ("Float8CurrentScaling", "none", 25.0),
        ("Float8CurrentScaling", "selective", 23.0),
        ("none", "none", 27.0),
        ("none", "full", 2.0),
    ):
        base, size, _, layout = one_gpu("llama3-8b", 1, 8192, recompute)
        config = replace(base, precision=replace(base.precision, recipe=recipe))
        found = footprint(config, size, ElementBytes.of(config), replace(layout, accumulate=2))
        unit = 32 * 8192 * 4096  # layers x tokens x hidden
        at_loss = found.kinds["activations"] / unit
        assert units <= at_loss < units + 1.5, (recipe, recompute, at_loss)


def test_rates_add_up_to_the_measured_layer() -> None:
    base, size, bytes_, layout = one_gpu("llama3-8b", 1, 8192)
    config = replace(base, model=replace(base.model, layers=4), precision=PrecisionSection(recipe="DelayedScaling"))
    size = ModelSize.of(config)
    parts = step_time(config, size, bytes_, Cluster.of("h200", 1), layout).parts
    layers = parts["products"] + parts["attention"] + parts["elementwise"]
    assert layers == pytest.approx(0.0564, rel=0.08)  # busy time of four layers in a profile


def test_the_chart() -> None:
    def best(name: str, gpus: int, **more):
        found = plan_run(preset(name), Cluster.of("h200", gpus, **more))
        return found.winner.layout, found.advice

    layout, words = best("llama3-1b", 1)
    assert layout.ranks == 1 and "plain" in words
    layout, words = best("llama3-1b", 8)
    assert layout.name == "DDP" and "fits on one GPU" in words
    layout, words = best("llama3-8b", 8)
    assert layout.name == "FSDP2" and "in a node" in words
    layout, words = best("llama3-8b", 64)
    assert (layout.name, layout.shard) == ("HSDP", 8) and "inside the NVLink domain" in words
    layout, words = best("llama3-8b", 2048)
    assert layout.tp > 1 and "too small for 2048 data-parallel ranks" in words
    layout, words = best("llama3-8b", 64, link="wan")
    assert "DiLoCo" in words and "does not do that yet" in words


def test_fewer_bits_are_taken_only_where_they_pay() -> None:
    assert plan_run(preset("llama3-8b"), Cluster.of("h200", 8)).winner.layout.states.rungs == 0
    alone = plan_run(preset("llama3-8b"), Cluster.of("h200", 1)).winner
    assert alone.layout.states.moments != "float32"  # 32 bits of everything are 128 GB without activations
    asked = preset("llama3-8b")
    asked = replace(asked, optimizer=replace(asked.optimizer, name="fused_adam", moments="bfloat16"))
    found = Counter(layout.states.moments for layout in layouts(asked, ModelSize.of(asked), 8, 8, Counter()))
    assert "float32" not in found and found["bfloat16"] and found["float8"]


@pytest.mark.parametrize("gpus", [1, 8, 64, 512])
@pytest.mark.parametrize("name", sorted(presets()))
def test_every_layout_is_a_configuration_that_train_takes(name: str, gpus: int) -> None:
    base = preset(name)
    config = replace(base, train=replace(base.train, global_batch=max(base.train.global_batch, gpus)))
    seen = set()
    for layout in layouts(config, ModelSize.of(config), gpus, 8, Counter()):
        key = (layout.shard, layout.tp, layout.sequence_parallel, layout.recompute, layout.states)
        if key not in seen:
            seen.add(key)
            assert layout.apply(config, 8).plan("cpu").resolve(gpus).shape == (
                layout.replicate,
                layout.shard,
                layout.tp,
            )
    assert seen


def test_all_presets_up_to_16384_gpus_take_seconds() -> None:
    start = time.process_time()
    for name in presets():
        base = preset(name)
        config = replace(base, train=replace(base.train, global_batch=16384))
        for power in range(0, 15, 2):
            if name == "llama3-70b" and power < 3:
                continue  # does not fit
            found = plan_run(config, Cluster.of("h200", 2**power))
            assert found.winner.memory.total < 139.8 * GIB and found.winner.tokens_per_s > 0
            assert found.considered == len(found.best) + sum(
                count for why, count in found.dropped.items() if "memory" in why or "slower" in why
            )
    assert time.process_time() - start < 40


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(NothingFits, match="8 GPUs would do: --gpus 8"):
        plan_run(preset("llama3-70b"), Cluster.of("h200", 1))
    assert plan_run(preset("llama3-70b"), Cluster.of("h200", 8)).winner.layout.ranks == 8
    with pytest.raises(NothingFits, match="--set train.global_batch=2048"):
        plan_run(preset("llama3-8b"), Cluster.of("h200", 16384))
    with pytest.raises(NothingFits, match="cannot be divided over 24 GPUs"):
        plan_run(preset("llama3-8b"), Cluster.of("h200", 24))
    odd = preset("llama3-8b")
    odd = replace(odd, train=replace(odd.train, global_batch=7))
    with pytest.raises(
        NothingFits, match=r"global_batch \(7\) cannot be divided over 16 GPUs.*--set train.global_batch=8\."
    ):
        plan_run(odd, Cluster.of("h200", 16))
    even = replace(odd, train=replace(odd.train, global_batch=8))
    assert plan_run(even, Cluster.of("h200", 16)).winner.layout.ranks == 16
    endless = Config(
        model=ModelSection(hidden_size=16384, layers=1, heads=1), train=TrainSection(global_batch=1, micro_batch=1)
    )
    endless = replace(endless, data=replace(endless.data, length=2**22))
    with pytest.raises(NothingFits, match="More GPUs do not help"):
        plan_run(endless, Cluster.of("h100", 1, per_node=1))


def test_what_train_would_refuse_is_not_planned() -> None:
    base = preset("llama3-1b")
    graph = replace(base, train=replace(base.train, cuda_graph=True))
    assert plan_run(graph, Cluster.of("h200", 1)).winning_config().train.cuda_graph
    with pytest.raises(NothingFits, match="train.cuda_graph needs one rank"):
        plan_run(graph, Cluster.of("h200", 8))
    with pytest.raises(ValueError, match="cpu_offload"):
        plan_run(replace(base, parallel=replace(base.parallel, cpu_offload=True)), Cluster.of("h200", 8))


def test_documents_make_attention_cheaper() -> None:
    whole, packed = (plan_run(preset("llama3-8b"), Cluster.of("h200", 8), document=d) for d in (None, 1000.0))
    assert packed.winner.time.parts["attention"] < 0.6 * whole.winner.time.parts["attention"]
    with pytest.raises(ValueError, match="data.document_mask"):
        plan_run(preset("gpt2"), Cluster.of("h200", 8), document=1000.0)


def test_a_configuration_has_a_layout_of_its_own() -> None:
    layout = layout_of(preset("llama3-70b"), 64)
    assert (layout.replicate, layout.shard, layout.tp, layout.accumulate) == (1, 8, 8, 64)
    assert layout.apply(preset("llama3-70b"), 8).parallel.dp_shard == 8


def test_the_overlap_of_a_mesh_is_its_default_unless_the_configuration_has_one() -> None:
    base = preset("llama3-70b")
    for tp, on, asked, expected in [
        (8, True, "none", default_method(8, True)),
        (8, True, "ring", "ring"),
        (8, False, "ring", "none"),  # without spread tokens there is nothing to hide
        (1, False, "none", default_method(1, False)),
    ]:
        config = replace(base, parallel=replace(base.parallel, overlap=asked))
        layout = replace(layout_of(base, 64), tp=tp, sequence_parallel=on, replicate=8 // tp)
        found = layout.apply(config, 8)
        assert found.parallel.overlap == expected == found.plan().overlap


def test_compiled_layers_are_sharded_as_others_are() -> None:
    base = preset("llama3-8b")
    compiled = replace(base, train=replace(base.train, compile=True))
    meshes = [plan_run(config, Cluster.of("h200", 8)).winner.layout for config in (base, compiled)]
    assert meshes[0] == meshes[1] and meshes[1].shard == 8


def test_activations_in_float32_take_twice_the_memory_and_have_no_rates() -> None:
    base, size, _, layout = one_gpu("llama3-1b", 1, 1024)
    layout = replace(layout, accumulate=2)
    exact = replace(base, precision=replace(base.precision, recipe="none", activations="float32"))
    plain = replace(base, precision=replace(base.precision, recipe="none"))
    found, half = (footprint(config, size, ElementBytes.of(config), layout).kinds for config in (exact, plain))
    assert found["activations"] > 1.9 * half["activations"]
    with pytest.raises(ValueError, match="rates of bfloat16 alone: --set precision.activations=auto"):
        plan_run(exact, Cluster.of("h200", 8))


def test_impossible_clusters_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fill nodes of 8: take --gpus 8 or 16"):
        Cluster.of("h200", 12)
    with pytest.raises(ValueError, match="1 or more; got 0 and 8"):
        Cluster.of("h200", 0)
    with pytest.raises(ValueError, match="Did you mean 'h200'.*a100, b200, h100, h200"):
        Cluster.of("h20", 8)
    with pytest.raises(ValueError, match="ib400"):
        Cluster.of("h200", 8, link="carrier pigeon")
    with pytest.raises(ValueError, match="emulated and slow"):
        plan_run(preset("llama3-8b"), Cluster.of("a100", 8))
    with pytest.raises(ValueError, match="--gpus 1,000,000,000 are more than anybody has"):
        Cluster.of("h200", gpus=10**9)


def test_collectives_take_the_slower_link() -> None:
    fabric = Fabric(Link(400e9, 3e-6), Link(22e9, 5e-6))
    inside, between, both = Group.of(8, 1, 8), Group.of(8, 8, 8), Group.of(64, 1, 8)
    assert (inside, between, both) == (Group(8, 1), Group(1, 8), Group(8, 8))
    assert fabric.all_gather(8e9, inside) == pytest.approx(7e9 / 400e9, rel=0.01)
    assert fabric.all_gather(8e9, between) == pytest.approx(7e9 / 22e9, rel=0.01)
    assert fabric.all_gather(8e9, both) == pytest.approx(7e9 / (8 * 22e9), rel=0.01)  # eight cards to a node
    assert fabric.all_reduce(8e9, inside) == pytest.approx(2 * fabric.reduce_scatter(8e9, inside), rel=0.01)
    assert fabric.all_reduce(1e3, Group(8, 1024)) < fabric.all_gather(1e3, Group(8, 1024))  # a tree
    assert fabric.all_gather(1e9, Group(1)) == 0


def test_fp8_halves_what_travels() -> None:
    config = preset("llama3-8b")
    plain = replace(config, precision=replace(config.precision, recipe="none"))
    assert ElementBytes.of(plain).wire == 2
    assert 1 <= ElementBytes.of(config).wire < 1.01


def test_tables_can_be_extended(tmp_path) -> None:
    rows = [
        {"device": "NVIDIA H200", "kind": "current", "layer": "qkv", "m": 8192, "n": 6144, "k": 4096, "tflops": 1000.0}
    ]
    (tmp_path / "gemm.json").write_text(json.dumps({"benchmark": "gemm", "results": rows}))
    gpu = find_gpu("h200", [tmp_path / "gemm.json"])
    assert gpu.product_tflops("current", 8192, 6144, 4096) == gpu.product_tflops("current", 8192, 4096, 4096) == 1000.0
    assert gpu.product_tflops("current", 64, 64, 64) == find_gpu("h200").gemm_tflops["current"]
    write_entry(tmp_path / "mine.json", "x100", replace(gpu, name="X100"))
    assert known_gpus([tmp_path / "mine.json"])["x100"].name == "X100"
    (tmp_path / "layer.json").write_text(json.dumps({"benchmark": "layer", "results": {}}))
    with pytest.raises(ValueError, match="ottava bench gemm"):
        known_gpus([tmp_path / "layer.json"])
    (tmp_path / "short.json").write_text(json.dumps({"y": {"name": "Y"}}))
    with pytest.raises(ValueError, match="memory_gib"):
        known_gpus([tmp_path / "short.json"])
    assert short_name("NVIDIA A100-SXM4-80GB") == "a100"


def test_calibration_measures_an_entry(tmp_path) -> None:
    key, gpu = calibrate(torch.device("cpu"), ((32, 32, 32),), length=64, copied=2**16)
    assert gpu.gemm_tflops["bf16"] > 0 and gpu.copy_tb_s > 0 and gpu.attention_tflops["64"]["backward"] > 0
    write_entry(tmp_path / "table.json", key, gpu)
    assert known_gpus([tmp_path / "table.json"])[key].products == gpu.products


def test_the_page_escapes_and_draws_every_rank() -> None:
    found = plan_run(preset("llama3-8b"), Cluster.of("h200", 16))
    page = as_html(found, "<script>alert(1)</script>")
    assert "<script>" not in page and page.count("<title>rank ") == 16 and "<svg" in page
    layout = Layout(16, 8, 8, True, "none", 1, 1, USUAL)
    assert "more nodes are like these" in mesh_picture(layout, 8)
    assert as_json(found)["best"][0]["total_gib"] == pytest.approx(found.winner.memory.total / GIB)


def test_the_command_writes_what_train_takes(tmp_path, capsys) -> None:
    output, page = tmp_path / "best.toml", tmp_path / "plan.html"
    words = ["plan", "llama3-8b", "--gpus", "64", "--per-node", "8", "--gpu", "h200", "--tokens", "15T"]
    assert main([*words, "--output", str(output), "--html", str(page), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 15e12 and found["toml"] == output.read_text() and "<svg" in page.read_text()
    assert main(["train", str(output), "--dry-run"]) == 0
    assert "dp_replicate 8 x dp_shard 8 x tp 1, fsdp2" in capsys.readouterr().out
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "tokens/s/GPU" in text and "Passed over" in text and "GPU-hours" in text
    assert number_of_tokens("1e12") == number_of_tokens("1T") == 1e12


@pytest.mark.parametrize(
    "words, said",
    [
        (["llama3-8b", "--gpus", "12"], "do not fill nodes"),
        (["llama3-8b", "--gpus", "8", "--gpu", "tpu"], "Known are"),
        (["llama3-8b"], "--gpus"),
        (["llama3-8b", "--gpus", "8", "--tokens", "lots"], "15T"),
        (["llama3-8b", "--gpus", "8", "--document-length", "nan"], "A mean document of nan tokens"),
        (["llama3-8b", "--gpus", "8", "--gpu", "a100"], "Choose --set precision.recipe=none, or give"),
        (
            ["llama3-8b", "--gpus", "8", "--set", "train.global_batchs=3"],
            "has no key 'global_batchs'. Did you mean 'global_batch'?",
        ),
        (
            ["llama3-8b", "--gpus", "8", "--set", "trian.steps=3"],
            "with a section of `ottava train`. Did you mean 'train'?",
        ),
        (["llama3-8b", "--gpus", "8", "--table", "nowhere.json"], "cannot be read"),
    ],
)
def test_wrong_usage_is_exit_2(words: list[str], said: str, capsys) -> None:
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err
