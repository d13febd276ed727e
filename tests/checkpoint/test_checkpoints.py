"""One process: what is saved, kept, pruned, refused; asynchronous saves, SIGTERM, hashes."""

from __future__ import annotations

import builtins
import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ottava
from ottava.checkpoint import CheckpointError, Checkpoints, Relaxed, StopSignal, ls, verify
from ottava.checkpoint.boxes import tiling_problem
from ottava.checkpoint.flat import flatten
from ottava.checkpoint.metadata import decode
from ottava.checkpoint.save import Save


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_values_and_every_dtype_come_back(tmp_path: Path) -> None:
    dtypes = [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.int8,
        torch.bool,
        torch.complex64,
    ]
    dtypes += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint16, torch.uint32]
    wanted: dict[str, Any] = {str(d): torch.arange(1, 13).view(3, 4).to(d) for d in dtypes}
    wanted |= {"transposed": torch.randn(4, 6).t(), "scalar": torch.tensor(3.5), "part": torch.randn(100)[10:20]}
    values = {"a": [1, 2.5, "x", None, True], "t": (0.9, 0.95), "empty": {}, "list": [{"lr": 0.1, "w": torch.ones(2)}]}
    checkpoints = Checkpoints(tmp_path, config={"lr": 0.1})
    folder = checkpoints.save(3, {"tensors": wanted, "values": values})
    found = {n: torch.zeros_like(t) for n, t in wanted.items()}
    blank = {"a": [0], "t": (0.0, 0.0), "empty": {}, "list": [{"lr": 0.0, "w": torch.zeros(2)}]}
    loaded = checkpoints.load({"tensors": found, "values": blank})
    assert loaded is not None and loaded.config == {"lr": 0.1} and loaded.step == checkpoints.last_saved == 3
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].stride() == torch.zeros_like(tensor).stride()
        assert pickle.dumps(found[name].tolist()) == pickle.dumps(tensor.tolist()), name
    assert blank["a"] == values["a"] and blank["t"] == (0.9, 0.95) and blank["list"][0]["lr"] == 0.1  # type: ignore[index]
    assert blank["list"][0]["w"].tolist() == [1, 1]  # type: ignore[index]
    # a view of a large tensor does not bring the large tensor
    assert (folder / "__0_0.distcp").stat().st_size < 40_000


def test_a_parameter_is_restored_in_place(tmp_path: Path) -> None:
    layer, other = nn.Linear(3, 2), nn.Linear(3, 2)
    Checkpoints(tmp_path).save(1, {"model": layer.state_dict()})
    weight = other.weight
    Checkpoints(tmp_path).load({"model": other.state_dict()})
    assert other.weight is weight and torch.equal(weight, layer.weight)


def test_differences_are_errors_that_list_the_keys_until_they_are_allowed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(2), "d": torch.ones(1), "n": 1})
    state = {"a": torch.zeros(2), "b": torch.zeros(4), "c": torch.zeros(2).double(), "e": torch.zeros(5), "n": "x"}
    with pytest.raises(ValueError) as caught:
        checkpoints.load(state)
    for part in ("1 missing in the checkpoint: e", "1 stored and not wanted: d", "b (stored: (3,), wanted: (4,))"):
        assert part in str(caught.value)
    assert "2 of another type: c (stored: torch.float32, wanted: torch.float64), n (stored: int, wanted: str)" in str(
        caught.value
    )
    assert not state["a"].any()
    for refused in ({"missing": ["f"]}, {"extra": ["e*"]}, {"shape": ["a"]}, {"dtype": ["c"]}):
        allowed: dict[str, Any] = {"missing": True, "extra": ["d"], "shape": ["b"], "dtype": ["c", "n"]} | refused
        with pytest.raises(ValueError, match="differs"):
            checkpoints.load(state, relaxed=Relaxed(**allowed))
    loaded = checkpoints.load(state, relaxed=Relaxed(missing=["e"], extra=["d"], shape=["b"], dtype=["c", "n"]))
    assert loaded is not None and loaded.kept == ("b", "e") and state["n"] == 1
    assert (
        state["a"].tolist() == [1, 1]
        and state["c"].tolist() == [1, 1]
        and not state["b"].any()
        and not state["e"].any()
    )


@pytest.mark.parametrize(
    "state, text",
    [
        ({"a": object()}, "expected a tensor"),
        ({"a": float("nan")}, "finite"),
        ({"a": {"b": 1}, "a.b": 2}, "Two entries"),
        ({1.5: 1}, "expected a string or an integer"),
        ({"a": torch.zeros(2, device="meta")}, "with data"),
        ({"a": torch.eye(2).to_sparse()}, "dense"),
        (
            {"a": ottava.quantize(torch.zeros(32, 32), ottava.recipe.Float8CurrentScaling(), role="weight")},
            "not a plain tensor",
        ),
        ({"a": "x" * (5 << 20)}, "use tensors"),
    ],
)
def test_what_cannot_be_saved_is_a_mistake_that_is_named(tmp_path: Path, state: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Checkpoints(tmp_path / "c").save(1, state)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("arguments", [{"keep_last": -1}, {"keep_every": -1}, {"hash": "md5"}])
def test_wrong_options(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Checkpoints(tmp_path, **arguments)
    with pytest.raises(ValueError, match="step=-1"):
        Checkpoints(tmp_path).save(-1, {})


# ---------------------------------------------------------------------------------------------------------- keeping


def test_keep_last_and_keep_every(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 11):
        checkpoints.save(step, {"w": torch.ones(1)})
    assert names(tmp_path) == [f"step-{s:08d}" for s in (4, 8, 9, 10)]


def test_pruning_counts_and_removes_only_what_is_usable(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    broken = checkpoints.save(5, {"w": torch.ones(1)})
    os.truncate(broken / "__0_0.distcp", 10)
    checkpoints.save(3, {"w": torch.ones(1)})  # older than the broken one, and the newest that is good
    assert names(tmp_path) == ["step-00000003", "step-00000005"]
    checkpoints.save(4, {"w": torch.ones(1)})
    assert names(tmp_path) == ["step-00000004", "step-00000005"]


def test_a_step_that_exists_is_replaced_and_put_back_if_the_replacement_never_came(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": torch.ones(1)})
    checkpoints.save(1, {"w": torch.full((1,), 2.0)})
    assert names(tmp_path) == ["step-00000001"]
    os.rename(tmp_path / "step-00000001", tmp_path / "step-00000001.old-ab12")  # killed between the two renames
    (tmp_path / "step-00000001.tmp-cd34").mkdir()
    state = {"w": torch.zeros(1)}
    assert checkpoints.load(state) is not None and state["w"].item() == 2.0
    checkpoints.save(2, state)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.tmp-1").write_text("mine")
    (tmp_path / "step-1").mkdir()
    Checkpoints(tmp_path, keep_last=1).save(2, {"w": torch.ones(1)})
    assert names(tmp_path) == ["notes.tmp-1", "step-00000002", "step-1"]


# ---------------------------------------------------------------------------------------------------------- in the background


def test_an_error_in_the_background_is_raised_at_the_next_call_and_the_next_save_is_synchronous(tmp_path: Path) -> None:
    threads: list[str] = []
    broken = True

    def hook(phase: str) -> None:
        if phase == "writing":
            threads.append(threading.current_thread().name)
            if broken:
                raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(tmp_path, hook=hook)
    state = {"w": torch.ones(4)}
    checkpoints.save_async(1, state)
    with pytest.raises(CheckpointError, match="step 1 was not saved: .*No space left"):
        checkpoints.save_async(2, state)
    assert names(tmp_path) == []
    broken = False
    for step in (3, 4):
        checkpoints.save_async(step, state)
    checkpoints.wait()
    assert threads == ["ottava-checkpoint", "MainThread", "ottava-checkpoint"]
    assert names(tmp_path) == ["step-00000003", "step-00000004"] and checkpoints.last_saved == 4


def test_without_a_thread_the_save_is_made_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        checkpoints.save_async(1, {"w": torch.ones(1)})
        assert names(tmp_path) == ["step-00000001"]
    checkpoints.close()


def test_an_error_while_staging_is_an_error_of_the_save(tmp_path: Path) -> None:
    def hook(phase: str) -> None:
        if phase == "staging":
            raise MemoryError("no memory for the copy")

    checkpoints = Checkpoints(tmp_path, hook=hook)
    checkpoints.save_async(1, {"w": torch.ones(1)})
    with pytest.raises(CheckpointError, match="no memory for the copy"):
        checkpoints.wait()
    checkpoints.wait()  # raised once


def test_who_was_interrupted_while_waiting_can_wait_again(tmp_path: Path) -> None:
    written, waiting = threading.Event(), threading.Event()

    def hook(phase: str) -> None:
        if phase == "writing":
            waiting.wait(60)
            time.sleep(0.1)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
            written.wait(60)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    checkpoints = Checkpoints(tmp_path, hook=hook)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        checkpoints.save_async(1, {"w": torch.ones(1)})
        with pytest.raises(KeyboardInterrupt):
            waiting.set()
            checkpoints.wait()
            pytest.fail("nothing was waited for")
    finally:
        signal.signal(signal.SIGALRM, before)
    written.set()
    checkpoints.wait()
    assert names(tmp_path) == ["step-00000001"] and checkpoints.last_saved == 1


def test_finish_waits_for_the_save_of_the_step_or_makes_it(tmp_path: Path) -> None:
    phases: list[str] = []
    checkpoints = Checkpoints(tmp_path, hook=phases.append)
    state = {"w": torch.ones(1)}
    checkpoints.save_async(1, state)
    checkpoints.finish(1, state)
    assert phases.count("writing") == 1 and checkpoints.last_saved == 1
    checkpoints.finish(2, state)
    assert phases.count("writing") == 2 and names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_is_remembered_however_often_it_comes(tmp_path: Path, number: signal.Signals) -> None:
    checkpoints = Checkpoints(tmp_path)
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("the tests were started so that this one is ignored")
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.anywhere(checkpoints.team)
        for _ in range(3):  # the group's, the launcher's, an impatient scheduler's
            os.kill(os.getpid(), number)
        assert stop.requested and stop.anywhere(checkpoints.team) and stop.number == number
    assert signal.getsignal(number) == before


def test_ctrl_c_that_is_pressed_again_interrupts_and_an_ignored_signal_stays_ignored(monkeypatch) -> None:
    monkeypatch.setattr("ottava.checkpoint.stop.AGAIN_S", 0.05)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    pressed = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)  # changes nothing
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGINT, pressed)


# ---------------------------------------------------------------------------------------------------------- hashes, listing


@pytest.mark.parametrize("algorithm", ["xxh3_128", "blake3", "blake2b", "sha256"])
def test_hashes(tmp_path: Path, algorithm: str) -> None:
    folder = Checkpoints(tmp_path, hash=algorithm).save(
        1, {"w": torch.randn(3 << 18), "v": torch.ones(3)}
    )  # 3 MiB: hashed in a thread
    assert json.loads((folder / "manifest.json").read_text())["hash"] == algorithm
    assert all(row.good for row in verify(folder))
    if algorithm == "sha256":
        import hashlib

        said = json.loads((folder / "manifest.json").read_text())["files"]
        for name, entry in said.items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == entry["digest"]


def test_without_xxhash_the_standard_library_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Checkpoints(tmp_path / "with", hash="xxh3_128").save(1, {"w": torch.ones(1)})
    find = importlib.util.find_spec
    real_import = builtins.__import__
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "xxhash" else find(name, *a))
    monkeypatch.setattr(
        importlib, "import_module", lambda name: real_import("no_such_package" if name == "xxhash" else name)
    )
    other = Checkpoints(tmp_path / "without").save(1, {"w": torch.ones(1)})
    assert json.loads((other / "manifest.json").read_text())["hash"] == "blake2b" and all(r.good for r in verify(other))
    with pytest.raises(ValueError, match="needs the package 'xxhash'"):
        Checkpoints(tmp_path, hash="xxh3_128")
    assert next(r.text for r in verify(folder) if not r.good).endswith("install 'xxhash' to verify them.")


def test_ls_says_what_there_is(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        folder = checkpoints.save(step, {"model": {"w": torch.ones(4, 2)}, "step": step})
    (folder / "state.json").unlink()
    rows = list(ls(tmp_path))
    assert [(r.name, r.good) for r in rows] == [("step-00000002", False), ("step-00000001", True)]
    assert "state.json: the file is missing" in str(rows[0]) and "3 files, 1 rank, float32" in str(rows[1])
    (tensor,) = ls(tmp_path / "step-00000001")
    assert (tensor.name, tensor.text) == ("model.w", "float32 [4, 2], 32 B in 1 box")


IMPORTS = {
    "alone": "import ottava",
    "the package": "import ottava.checkpoint",
    "before": "import ottava; first = ottava.checkpoint; import ottava.checkpoint; assert ottava.checkpoint is first",
    "a name of it": "from ottava.checkpoint import Checkpoints; import ottava",
    "under another name": "import ottava.checkpoint as saved, ottava; assert saved.Checkpoints",
    "a module inside": "import ottava.checkpoint.reshard, ottava.checkpoint.inspect, ottava",
    "from the root": "from ottava import checkpoint; import ottava.checkpoint.load; assert ottava.checkpoint is checkpoint",
}


CHECKS = """
import copy, inspect, pickle
x = torch.ones(3, requires_grad=True)
ottava.checkpoint(lambda t: t * 2, x, use_reentrant=False).sum().backward()
assert x.grad.tolist() == [2, 2, 2]
from ottava.checkpoint import Checkpoints, reshard
import ottava.distributed
assert ottava.checkpoint.Checkpoints is Checkpoints and inspect.isclass(Checkpoints)
assert ottava.checkpoint.reshard is reshard and inspect.isfunction(reshard)
assert inspect.signature(ottava.checkpoint) == inspect.signature(ottava.distributed.checkpoint)
assert copy.deepcopy(ottava.checkpoint) is ottava.checkpoint
assert pickle.loads(pickle.dumps(ottava.checkpoint)) is ottava.checkpoint
assert set(ottava.checkpoint.__all__) <= set(dir(ottava.checkpoint))
assert all(hasattr(ottava.checkpoint, name) for name in ottava.checkpoint.__all__)
assert not hasattr(ottava.checkpoint, "Nothing")
"""


def test_ottava_checkpoint_is_transformer_engines_function_and_the_package_in_any_order_of_imports() -> None:
    program = (  # torch is imported once, ottava anew in each child
        "import os, sys, torch, torch.distributed.fsdp, torch.distributed.tensor, torch.distributed.checkpoint\n"
        f"for name, imports in {IMPORTS!r}.items():\n"
        "    if os.fork() == 0:\n"
        f"        exec(imports + {CHECKS!r})\n"
        "        os._exit(0)\n"
        "    assert os.wait()[1] == 0, name\n"
        "import ottava\n"
        "assert 'xxhash' not in sys.modules and 'ottava.checkpoint.checkpoints' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------------------- boxes


@pytest.mark.parametrize(
    "shape, boxes, problem",
    [
        ((4, 4), [((0, 0), (4, 4))], None),
        ((), [((), ())], None),
        ((0, 3), [((0, 0), (0, 3))], None),
        ((0, 3), [], None),
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 2)), ((2, 2), (2, 2))], None),
        ((4, 4), [((0, 0), (2, 4))], "8 of 16"),
        ((4, 4), [((0, 0), (4, 2)), ((0, 1), (4, 2))], "overlap"),
        ((4, 4), [((2, 0), (4, 4))], "outside"),
        ((4,), [((0, 0), (4, 4))], "outside"),
        ((4,), [((-1,), (4,))], "outside"),
        ((), [((), ()), ((), ())], "2 of 1"),
    ],
)
def test_tilings(shape: Any, boxes: Any, problem: str | None) -> None:
    found = tiling_problem(shape, boxes)
    assert found is None if problem is None else found is not None and problem in found


def test_a_large_box_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ottava.checkpoint import load

    monkeypatch.setattr(load, "_BLOCK_BYTES", 100)  # 3 rows of 32 bytes
    wanted = torch.randn(10, 8)
    Checkpoints(tmp_path).save(1, {"w": wanted})
    found = torch.zeros(10, 8)
    Checkpoints(tmp_path).load({"w": found})
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("enums", ["by value", "by name, as Python before 3.11.4 does"])
def test_metadata_of_plain_dcp_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enums: str) -> None:
    """The index is torch's own format: what torch writes today has to be understood."""
    import warnings

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import metadata

    if enums != "by value":
        member = metadata._MEM_FORMAT_ENCODING
        monkeypatch.setattr(member, "__reduce_ex__", lambda self, protocol: (getattr, (member, self.name)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"w": torch.zeros(3, 4), "b": torch.zeros(2).bfloat16()}}, checkpoint_id=tmp_path)
    sizes = {p.name: p.stat().st_size for p in tmp_path.iterdir()}
    entries = decode((tmp_path / ".metadata").read_bytes(), sizes)
    assert {n: (e.dtype, e.shape) for n, e in entries.items()} == {
        "model.w": (torch.float32, (3, 4)),
        "model.b": (torch.bfloat16, (2,)),
    }


def test_flatten_joins_names_with_dots() -> None:
    state = {"a": {"b": torch.ones(1), "c": [torch.ones(1), {"d": torch.ones(1)}]}, "e": 1}
    assert sorted(flatten(state).tensors) == ["a.b", "a.c.0", "a.c.1.d"]


def test_loading_counts_as_writing(tmp_path: Path) -> None:
    """Whoever keeps something that was made from a tensor (FP8 copies, autograd) has to see that it changed."""
    Checkpoints(tmp_path).save(1, {"w": torch.ones(4, 3), "part": torch.ones(4, 3)})
    whole, part = torch.zeros(4, 3), torch.zeros(4, 6)
    versions = whole._version, part._version
    Checkpoints(tmp_path).load({"w": whole, "part": part[:, :3]})
    assert torch.equal(whole, torch.ones(4, 3)) and torch.equal(part[:, :3], torch.ones(4, 3)) and not part[:, 3:].any()
    assert whole._version > versions[0] and part._version > versions[1]


def test_what_the_optimizer_changes_is_copied_before_its_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, counter = nn.Parameter(torch.ones(4)), torch.zeros(2)
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.ones(4)
    optimizer.step()
    moments = optimizer.state[weight]
    state = {"weight": weight, "counter": counter, "moment": moments["exp_avg"]}
    wanted = {name: tensor.detach().clone() for name, tensor in state.items()}
    begun, go_on, plain = threading.Event(), threading.Event(), Save.stage_rest

    def slow(self: Save, *args: Any) -> None:
        begun.set()
        go_on.wait(30)
        plain(self, *args)

    monkeypatch.setattr(Save, "stage_rest", slow)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save_async(1, state, until=optimizer)
        counter += 1  # nobody's but ours: it was copied at once
        assert begun.wait(30)
        threading.Timer(0.3, go_on.set).start()
        optimizer.step()  # waits
        assert go_on.is_set() and not torch.equal(weight, wanted["weight"])
        checkpoints.wait()
        optimizer.step()  # the hook is gone
        found = {name: torch.empty_like(tensor) for name, tensor in wanted.items()}
        checkpoints.load(found)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
