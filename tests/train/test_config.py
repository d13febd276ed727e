"""Configuration: presets, TOML, command line; what is impossible is exit code 2 with a reason."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import replace

import pytest

from ottava.models import GPTConfig, Llama, LlamaConfig
from ottava.train import config as sections
from ottava.train.arguments import parse, to_toml
from ottava.train.config import Config, PrecisionSection
from ottava.train.config_checks import check_data_parallel
from ottava.train.keeper import allowed
from ottava.train.presets import presets


def refused(capsys, *arguments: str) -> str:
    """What is printed before exit code 2, in one line."""
    with pytest.raises(SystemExit) as stopped:
        parse(list(arguments))
    assert stopped.value.code == 2
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_without_arguments_it_is_the_debug_preset():
    assert parse([]) == (presets()["debug"], False)


def test_the_command_line_wins_over_the_file_over_the_preset(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'preset = "llama3-8b"\n[train]\nsteps = 5000\nmicro_batch = 2\n[optimizer]\nlr = 1e-4\nbetas = [0.8, 0.9]\n'
    )
    config, dry_run = parse([str(path), "--train.steps", "6000", "--dry-run"])
    assert dry_run and config.model == presets()["llama3-8b"].model
    assert (config.train.steps, config.train.micro_batch, config.optimizer.lr) == (6000, 2, 1e-4)
    assert config.optimizer.betas == (0.8, 0.9)


def test_values_of_every_kind(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[data]\nfiles = ["a b.tokens", "./-c.tokens"]\nweights = [1, 0.5]\ndocument_mask = true\n'
        '[train]\nsample_prompt = "--- a = b\\n"\n'
        "[parallel]\ndp_shard = -1\nreshard_after_forward = false\n[gate]\nmin_mfu = 0.4\n"
    )
    config, _ = parse([str(path), "--checkpoint.no-background", "--metrics.measure-peak"])
    assert config.data.files == ("a b.tokens", "./-c.tokens") and config.data.weights == (1.0, 0.5)
    assert config.data.document_mask and not config.parallel.reshard_after_forward and not config.checkpoint.background
    assert config.train.sample_prompt == "--- a = b\n"
    assert config.gate.min_mfu == 0.4 and config.metrics.measure_peak


@pytest.mark.parametrize("name", presets())
def test_a_preset_goes_to_toml_and_back(tmp_path, name):
    config = presets()[name]
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert parse([str(path)])[0] == config


def test_fields_that_may_be_none_are_none_by_default():
    # Otherwise None could not be written to TOML.
    for section in dataclasses.fields(Config):
        cls = section.default_factory
        hints = typing.get_type_hints(cls, vars(sections))
        for field in dataclasses.fields(cls):
            if type(None) in typing.get_args(hints[field.name]):
                assert field.default is None, f"{section.name}.{field.name}"


def test_every_field_is_explained(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    plain = " ".join(text.replace("│", " ").split())
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(section.default_factory):
            assert f"--{section.name}.{field.name}".replace("_", "-") in text
    assert "Sequences of a step, over all ranks. (default: 16)" in plain
    assert "llama3-70b" in plain and text.startswith("usage: ottava train [CONFIG.toml | PRESET] [-h] [OPTIONS]")


def test_shapes_of_presets():
    shapes = {n: c.model.shape(257, c.data.length) for n, c in presets().items()}
    assert shapes["llama3-8b"] == LlamaConfig(pad_vocab_to=128)
    assert shapes["gpt2"] == GPTConfig(pad_vocab_to=128)
    assert shapes["debug"].vocab_size == 257 and shapes["debug"].max_length == 128
    sizes = {n: Llama(s, device="meta").num_parameters() for n, s in shapes.items() if n in ("llama3-1b", "llama3-70b")}
    assert sizes == {"llama3-1b": 1_235_814_400, "llama3-70b": 70_553_706_496}  # as published


def test_recipe_and_types():
    import torch

    from ottava import recipe

    config = Config()
    assert isinstance(config.precision.make_recipe(), recipe.Float8CurrentScaling)
    assert parse(["--precision.recipe", "none"])[0].precision.make_recipe() is None
    assert config.precision.dtype("cpu") == torch.float32 and config.precision.dtype("cuda") == torch.bfloat16
    assert config.plan("cpu").param_dtype == torch.float32
    assert config.precision.unquantized(12) == 0 and PrecisionSection(recipe="none").unquantized(12) == 12
    nvfp4 = PrecisionSection(recipe="NVFP4BlockScaling")
    assert [nvfp4.unquantized(layers) for layers in (1, 2, 12, 32)] == [0, 1, 2, 6]
    assert replace(nvfp4, plain_layers=0).unquantized(12) == 0


@pytest.mark.parametrize(
    "content, message",
    [
        ("[trian]\nsteps = 1\n", "there is no section [trian]. Did you mean 'train'?"),
        ("[train]\nstep = 1\n", "section [train] has no key 'step'. Did you mean 'steps'?"),
        ("train = 3\n", "train is a section: write [train]"),
        ("[train]\nsteps = {a = 1}\n", "train.steps is {'a': 1}, which no key takes"),
        ("steps = \n", "is not TOML"),
        ('[data]\nfiles = ["-a"]\n', "looks like an option: write './-a'"),
        ("[train]\nsteps = true\n", "train.steps is true, but it takes a value."),
        ("[train]\nsteps = false\n", "train.steps is false, but it takes a value."),
        ("[train]\nsteps = [1, 2]\n", "train.steps is the list [1, 2], but it takes one value."),
        ("[train]\ndeterministic = 1\n", "train.deterministic is 1, but it takes true or false."),
        ('[train]\ndeterministic = "yes"\n', "train.deterministic is 'yes', but it takes true or false."),
        ("[data]\nfiles = true\n", "data.files is true, but it takes a list."),
        ("steps = 10\n", "steps stands before all sections: write it below [train]."),
        ('preset = "gpt3"\n', "There is no preset 'gpt3'. Did you mean 'gpt2'?"),
        ("[train]\nsteps = 0\n", "run.toml: train.steps must be at least 1, got 0."),
        (f"[train]\nseed = 0x{'f' * 5000}\n", "train.seed must be at most 4,611,686,018,427,387,904, got more."),
    ],
)
def test_mistakes_in_a_file_are_named_with_it(tmp_path, capsys, content, message):
    path = tmp_path / "run.toml"
    path.write_text(content)
    said = refused(capsys, str(path))
    assert message in said and (str(path) in said or "preset" in said)


FUSED = ["--optimizer.name", "fused_adam"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--train.step", "3"], "--train.steps"),
        (["--train.steps", "many"], "--train.steps"),
        (["--precision.recipe", "fp8"], "Float8CurrentScaling"),
        (["lama3-8b"], "Did you mean 'llama3-8b'?"),
        (["none.toml"], "none.toml cannot be read: No such file"),
        (["--train.global-batch", "10", "--train.micro-batch", "4"], "train.global_batch (10) must be a multiple of"),
        (["--parallel.tp", "3"], "model.heads (4) must be a multiple of parallel.tp (3)"),
        (["--model.hidden-size", "120"], "model.hidden_size = 120 must be a multiple of 16"),
        (["--precision.plain-layers", "3"], "precision.plain_layers (3) must be from 0 to model.layers (2)"),
        (
            ["--precision.fp8-weights", "--precision.plain-layers", "1", "--optimizer.name", "fused_adam"],
            "precision.plain_layers does not go with precision.fp8_weights",
        ),
        (["--precision.fp8-weights"], "needs optimizer.name 'fused_adam'"),
        (["--optimizer.moments", "float8"], "optimizer.moments 'float8' needs optimizer.name 'fused_adam'"),
        (["--precision.gradients", "bfloat16"], "precision.gradients 'bfloat16' needs optimizer.name 'fused_adam'"),
        ([*FUSED, "--optimizer.masters", "remainder"], "is for precision.weights 'bfloat16'"),
        ([*FUSED, "--optimizer.stochastic-rounding"], "optimizer.stochastic_rounding has nothing to round"),
        ([*FUSED, "--optimizer.moments", "float8", "--parallel.strategy", "fsdp1"], "use 'fsdp2'"),
        (
            [*FUSED, "--optimizer.moments", "float8", "--parallel.tp", "2", "--model.ffn-hidden-size", "384"],
            "model.ffn_hidden_size (384) must be a multiple of 256",
        ),
        (["--precision.fp8-weights", "--precision.recipe", "none"], "precision.recipe is 'none'"),
        (["--precision.fp8-head", "--precision.recipe", "none"], "precision.fp8_head quantizes the head by the recipe"),
        (
            ["--precision.fp8-attention", "--precision.recipe", "Float8BlockScaling"],
            "precision.fp8_attention needs a recipe with one scale",
        ),
        (
            ["--precision.fp8-head", "--model.pad-vocab-to", "1"],
            "a rank has 257 rows of it: pad it with model.pad_vocab_to = 128",
        ),
        (["--model.dropout", "0.1"], "model.dropout belongs to architecture 'gpt'"),
        (["gpt2", "--model.kv-heads", "2"], "model.kv_heads belongs to architecture 'llama'"),
        (["gpt2", "--data.length", "2048"], "data.length (2048) is above model.max_length (1024)"),
        (["--model.heads", "3"], "model: LlamaConfig: hidden_size (256) must be a multiple of heads (3)"),
        (["--schedule.decay-fraction", "0.1"], "schedule.decay_fraction belongs to schedule.kind 'wsd'"),
        (["--schedule.warmup-steps", "200"], "must be below train.steps (200)"),
        (["--schedule.kind", "wsd", "--schedule.warmup-steps", "170"], "reaches into the steps"),
        (["--data.files", "a", "b", "--data.weights", "1"], "data.weights has 1 numbers for 2 data.files"),
        (["--gate.min-mfu", "40"], "gate.min_mfu is a fraction between 0 and 1, got 40.0"),
        (["--gate.min-mfu", "0.4", "--gate.warmup-steps", "200"], "leaves nothing of train.steps"),
        (["--parallel.strategy", "ddp", "--parallel.dp-shard", "2"], 'strategy "ddp" shards nothing'),
        (["--train.steps", "0"], "train.steps must be at least 1, got 0"),
        (["--optimizer.betas", "0.9", "1.5"], "optimizer.betas must lie in [0, 1)"),
        (["--train.seed", "1" + "0" * 30], "train.seed must be at most"),
        (["--optimizer.eps", "-1"], "optimizer.eps must be at least 0, got -1"),
        (["--model.pad-vocab-to", "1000000000000"], "model.pad_vocab_to must be at most 1,048,576"),
        (
            ["--health.watchdog-start-s", "1e-300"],
            "health.watchdog_start_s must be 0 (off) or at least 0.1 s, got 1e-300.",
        ),
        (["--train.run", ""], "train.run is empty: write a path."),
        (["--checkpoint.load", " "], "checkpoint.load is empty: write a path."),
        (["--health.watchdog-s", "1e300"], "health.watchdog_s must be at most 1,000,000,000"),
        (["--train.run", "~nobody-here/x"], "train.run is ~nobody-here/x, but there is no such home folder here"),
    ],
)
def test_what_is_impossible_is_exit_2_with_a_reason(capsys, arguments, message):
    assert message in refused(capsys, *arguments)


def test_what_is_impossible_is_told_in_one_sentence(tmp_path, capsys):
    assert refused(capsys, "--train.steps", "0") == "ottava train: train.steps must be at least 1, got 0."
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = 10\n")
    assert refused(capsys, str(path), "--train.steps", "0") == "ottava train: train.steps must be at least 1, got 0."


def test_the_folder_of_a_run_is_told_where_its_configuration_is(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("[train]\nsteps = 10\n")
    assert f"is the folder of a run. Its configuration is {tmp_path}/config.toml." in refused(capsys, str(tmp_path))


def test_a_configuration_after_the_options_is_told_where_it_belongs(capsys):
    said = "a configuration comes before the options: ottava train"
    assert f"{said} run.toml ..." in refused(capsys, "--train.steps", "3", "run.toml")
    assert f"{said} run.toml ..." in refused(capsys, "--config", "run.toml")
    assert f"{said} gpt2 ..." in refused(capsys, "--dry-run", "gpt2")
    assert said not in refused(capsys, "--train.run", "debug", "--train.step", "3")


def test_a_microbatch_is_never_larger_than_what_a_rank_has():
    config = presets()["debug"]
    assert [config.on_ranks(ranks).train.micro_batch for ranks in (1, 2, 4, 8, 16)] == [8, 8, 4, 2, 1]
    assert (
        config.on_ranks(3) is config
    )  # 16 sequences cannot be divided: what is wrong is told of the numbers that were given
    with pytest.raises(
        ValueError, match=r"train.global_batch \(16\) must be a multiple of train.micro_batch \(8\) times the 3"
    ):
        check_data_parallel(config, 3)
    assert [allowed(config, ranks) for ranks in (1, 2, 3, 4, 8)] == [True, True, False, True, True]


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_the_default_run_fits_machines_with_any_usual_number_of_gpus(gpus):
    config = parse([])[0]
    check_data_parallel(config.on_ranks(gpus), gpus)
