"""Faults that are put into real ranks are found, and the rank or link is named; sound ranks are called sound."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from doctor import faulty_ranks as faulty
from ottava.doctor import Options


def problems(report: dict[str, Any]) -> list[tuple[str, list[int]]]:
    return [(f["check"], list(f["ranks"])) for f in report["findings"] if f["status"] == "problem"]


def said(report: dict[str, Any], check: str) -> str:
    return " ".join(f["message"] for f in report["findings"] if f["check"] == check and f["status"] == "problem")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte; only root can make one."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("a small file system needs root and mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_sound_ranks_are_sound(tmp_path) -> None:
    found = faulty.reports(3, {}, Options(run=str(tmp_path), seconds=0.2, timeout=30.0))
    assert problems(found[0]) == [] and found[0]["sound"], found[0]
    assert {f["check"] for f in found[0]["findings"]} >= {
        "versions",
        "places",
        "host",
        "disk",
        "network",
        "clock",
        "speed",
        "links",
    }
    assert found[1]["findings"] == found[0]["findings"] == found[2]["findings"]


def test_versions_files_clock_local_rank_and_variables(tmp_path) -> None:
    faults = {
        1: [faulty.other_version, faulty.few_files, faulty.wrong_clock],
        2: [faulty.wrong_local_rank, faulty.other_hca],
    }
    found = faulty.reports(3, faults, Options(run=str(tmp_path), seconds=0.1, timeout=30.0))[0]
    assert sorted(problems(found)) == [
        ("cards", [2]), ("clock", [1]), ("environment", [2]), ("host", [1]), ("places", [2]), ("versions", [1]),
    ]  # fmt: skip
    assert "ottava 0.0.7; the others have" in said(found, "versions") and "rank 1 on" in said(found, "versions")
    assert "30.0 s ahead" in said(found, "clock") or "29.9 s ahead" in said(found, "clock")
    assert "256 open files" in said(found, "host") and "LOCAL_RANK is 7" in said(found, "places")
    assert "NCCL_IB_HCA is mlx5_9" in said(found, "environment")


def test_a_full_disk_and_little_shared_memory(small_disk) -> None:
    faults = {1: [faulty.shared_memory_at(str(small_disk))]}
    found = faulty.reports(2, faults, Options(run=str(small_disk), seconds=0.1, timeout=30.0))[0]
    assert ("host", [1]) in problems(found) and ("disk", [0, 1]) in problems(found)
    assert "--shm-size" in said(found, "host") and "No space left" in said(found, "disk")


def test_a_wrong_interface_and_two_ranks_on_one_gpu(tmp_path) -> None:
    faults = {1: [faulty.wrong_interface, faulty.one_gpu_for_all], 2: [faulty.one_gpu_for_all]}
    found = faulty.reports(3, faults, Options(run=str(tmp_path), seconds=0.1, timeout=30.0))[0]
    assert ("network", [1]) in problems(found) and "names no interface" in said(found, "network")
    assert ("places", [1, 2]) in problems(found) and "drive one GPU" in said(found, "places")
    assert "not measured until" in str(found["findings"])


@pytest.mark.slow
def test_a_slow_rank_is_named(tmp_path) -> None:
    found = faulty.reports(2, {1: [faulty.busy]}, Options(run=str(tmp_path), seconds=0.4, timeout=60.0))[0]
    named = [f for f in found["findings"] if f["check"] == "speed" and list(f["ranks"]) == [1]]
    assert named and "of its peers'" in named[0]["message"], found
    assert named[0]["status"] == "problem" or "machines are busy" in named[0]["message"]


def test_a_stopped_rank_is_named_in_time(tmp_path) -> None:
    options = Options(run=str(tmp_path), seconds=0.1, timeout=3.0)
    found = faulty.reports(3, {2: [faulty.stopped]}, options, silent=(2,))
    for report in found.values():
        assert problems(report) == [("ranks", [2])] and "did not answer within 3 s" in said(report, "ranks")
        assert report["seconds"] < 20


@pytest.fixture
def cluster() -> Iterator[list[str]]:
    """Three network namespaces on one bridge; from the second to the third goes a hundredth of what goes elsewhere."""
    names = [f"ottava-{os.getpid()}-{n}" for n in range(3)]
    bridge = f"ot{os.getpid()}"
    lines = [f"ip link add {bridge} type bridge", f"ip link set {bridge} up"]
    for n, name in enumerate(names):
        lines += [
            f"ip netns add {name}",
            f"ip link add {bridge}v{n} type veth peer name eth1 netns {name}",
            f"ip link set {bridge}v{n} master {bridge} up",
            f"ip -n {name} addr add 10.77.0.{n + 1}/24 dev eth1",
            f"ip -n {name} link set eth1 up",
            f"ip -n {name} link set lo up",
        ]
    limited = f"tc -n {names[1]}"
    lines += [
        f"{limited} qdisc add dev eth1 root handle 1: htb default 1",
        f"{limited} class add dev eth1 parent 1: classid 1:1 htb rate 20gbit quantum 60000",
        f"{limited} class add dev eth1 parent 1: classid 1:2 htb rate 100mbit quantum 60000",
        f"{limited} filter add dev eth1 parent 1: protocol ip u32 match ip dst 10.77.0.3/32 flowid 1:2",
    ]
    try:
        for line in lines:
            try:
                made = subprocess.run(line.split(), capture_output=True, text=True)
            except FileNotFoundError:
                pytest.skip("network namespaces need ip and tc")
            if made.returncode:
                pytest.skip(f"network namespaces need root and a kernel that has them: {line}: {made.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


@pytest.mark.slow
def test_a_slow_link_is_named_by_its_pair(cluster, tmp_path) -> None:
    faults = {rank: [faulty.InNamespace(name, "eth1")] for rank, name in enumerate(cluster)}
    options = Options(run=str(tmp_path), seconds=0.1, timeout=60.0)
    found = faulty.reports(3, faults, options, address="10.77.0.1")[0]
    named = [f for f in found["findings"] if f["check"] == "links" and list(f["ranks"]) == [1, 2]]
    assert named and "rank 1 on" in named[0]["message"] and "GB/s" in named[0]["message"], found
    assert named[0]["status"] == "problem" or "machines are busy" in named[0]["message"]
    assert all(check == "links" for check, _ in problems(found))


def test_one_process_under_the_command(tmp_path, capsys) -> None:
    from ottava.cli.main import main

    assert "RANK" not in os.environ
    assert main(["doctor", "--run", str(tmp_path), "--space-gib", "0.001"]) == 0
    assert "sound." in capsys.readouterr().out
    assert main(["doctor", "--run", str(tmp_path), "--space-gib", "1e9", "--json"]) == 1
    assert '"sound": false' in capsys.readouterr().out
    for words in (["--timeout", "0"], ["--timeout", "nan"], ["--space-gib", "-1"], ["--space-gib", "nan"]):
        assert main(["doctor", "--run", str(tmp_path), *words]) == 2
        assert "--timeout is above 0 s" in capsys.readouterr().err
    log = tmp_path / "nccl.log"
    log.write_text(
        "n:1:2 [0] NCCL INFO Using network Socket\nn:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n"
    )
    assert main(["doctor", "--run", str(tmp_path), "--space-gib", "0.001", "--nccl-log", str(log)]) == 1
    assert "machines talk over TCP sockets" in capsys.readouterr().out
