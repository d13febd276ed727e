"""Each check judges facts: what is wrong is found, named and explained; what is right is not reported."""

from __future__ import annotations

import json

import pytest
import torch

from ottava.detect import Machine
from ottava.detect.acs import bridges_with_acs
from ottava.doctor import (
    cards,
    clock,
    environment,
    gpu_state,
    host,
    links,
    nccl_log,
    network,
    pcie,
    places,
    run_plan,
    speed,
    versions,
)
from ottava.doctor.finding import Check, Finding, Report, differing

NAMES = ["rank 0 on a", "rank 1 on a", "rank 2 on b", "rank 3 on b"]
SMI = "{i}, GPU-{i}, NVIDIA H200, 1980, 1980, {ecc}, {reasons}, {limit}, 700.00, {free}, 143771, 41"


def smi(ecc: str = "0", reasons: str = "0x0000000000000004", limit: str = "700.00", free: str = "143000") -> str:
    return "\n".join(SMI.format(i=i, ecc="0", reasons="0x1", limit="700.00", free="143000") for i in range(1)) + "\n" + SMI.format(
        i=1, ecc=ecc, reasons=reasons, limit=limit, free=free
    )  # fmt: skip


@pytest.mark.parametrize(
    "text, status, said",
    [
        (smi(), "ok", "2 GPUs"),
        (smi(ecc="[N/A]"), "ok", "2 GPUs"),
        (smi(ecc="3"), "problem", "GPU 1 of a: 3 uncorrected ECC errors"),
        (smi(reasons="0x0000000000000048"), "problem", "hardware slowdown, hardware thermal limit at 41 C"),
        (smi(limit="500.00"), "warning", "power capped at 500 of 700 W"),
        (smi(free="100000"), "warning", "42.7 of 140 GiB are in use"),
    ],
)
def test_gpu_state(text: str, status: str, said: str) -> None:
    facts = [{"gpus": gpu_state.parse(text)}] * 2  # two ranks of one machine see the same GPUs
    (found,) = gpu_state.judge(facts, NAMES[:2])
    assert found.status == status and said in found.message


def test_what_is_not_here_says_so(monkeypatch) -> None:
    monkeypatch.setattr("ottava.detect.command.shutil.which", lambda name: None)
    for check in (gpu_state.CHECK, pcie.CHECK):
        (found,) = check.findings([check.measure(None)], ["this machine"])
        assert found.status == "not here" and "is not here" in found.message


def test_a_check_that_raises_is_a_problem_of_that_rank() -> None:
    check = Check("x", dict, lambda facts, names: [Finding("x", "problem", names[0], (0,))])
    found = check.findings([{"failed": "OSError: no"}, {"not here": "none"}, {"fine": 1}], NAMES[:3])
    assert [(f.status, f.ranks) for f in found] == [("problem", (0,)), ("not here", (1,)), ("problem", (2,))]
    assert found[0].message == "rank 0 on a: OSError: no" and found[2].message == "rank 2 on b"


def test_versions_name_the_odd_one_out() -> None:
    facts = [{"torch": "2.11", "nccl": None}] * 3 + [{"torch": "2.10", "nccl": None}]
    (found,) = versions.judge(facts, NAMES)
    assert found.ranks == (3,) and "rank 3 on b: torch 2.10; the others have 2.11" in found.message
    assert differing(["a", "b"], NAMES[:2]) == ("a", {"b": [1]})


def test_clocks() -> None:
    assert clock.judge([{"time": 100.0}, {"time": 100.3}], NAMES[:2])[0].status == "ok"
    (found,) = clock.judge([{"time": 100.0}, {"time": 100.1}, {"time": 95.0}], NAMES[:3])
    assert found.ranks == (2,) and "5.0 s behind" in found.message


def test_speed_of_a_gpu_beside_its_peers() -> None:
    facts = [{"device": "cuda", "bf16": 700.0, "FP8": 1300.0}] * 3 + [{"device": "cuda", "bf16": 690.0, "FP8": 1000.0}]
    (found,) = speed.judge(facts, NAMES)
    assert found.ranks == (3,) and "FP8 products at 1e+03 TFLOP/s, 77%" in found.message
    assert speed.judge(facts[:3], NAMES[:3])[0].status == "ok"


def test_a_slow_rank_is_blamed_where_its_peers_have_their_cores() -> None:
    facts = [
        {"device": "cpu", "float32": rate, "runs": runs} for rate, runs in ((0.08, 0.99), (0.01, 0.14), (0.08, 0.9))
    ]
    (found,) = speed.judge(facts, NAMES[:3])
    assert found.status == "problem" and found.ranks == (1,)
    assert "it runs 14% of the time: something else has its cores, or it is limited" in found.message
    facts[1]["runs"] = 0.97
    assert "it runs 97% of the time: its cores are slow" in speed.judge(facts, NAMES[:3])[0].message
    for fact in facts:
        fact["runs"] = 0.4
    (found,) = speed.judge(facts, NAMES[:3])
    assert found.status == "warning" and "machines are busy, its peers run 40% of the time" in found.message


def test_how_much_of_the_time_a_rank_runs_is_measured() -> None:
    assert 0.0 < speed.measure(torch.device("cpu"), 0.05)["runs"] <= 1.1
    assert speed.better({"device": "cpu", "runs": 0.9}, {"device": "cpu", "runs": 0.4})["runs"] == 0.9


def pair_facts(slow: dict[tuple[int, int], float], size: int = 4) -> list[dict]:
    facts = []
    for rank in range(size):
        pairs = [[p, slow.get((min(rank, p), max(rank, p)), 40e9)] for p in range(size) if p != rank]
        facts.append({"device": "cuda", "collectives": {"all-reduce": 35e9}, "pairs": pairs})
    return facts


def test_a_slow_link_is_named_by_its_pair() -> None:
    hosts = ["a", "b", "c", "d"]
    assert [f.status for f in links.judge(pair_facts({}), NAMES, hosts)] == ["ok"]
    first, _ = links.judge(pair_facts({(1, 3): 4e9}), NAMES, hosts)
    assert first.ranks == (1, 3) and "4 GB/s between machines; other pairs have 40" in first.message
    first, rest = links.judge(pair_facts({(0, 2): 4e9, (1, 2): 4e9, (2, 3): 4e9}), NAMES, hosts)
    assert first.ranks == (2,) and "all its links" in first.message and rest.status == "warning"


def test_links_inside_and_between_machines_are_not_compared() -> None:
    between = {(0, 2): 4e9, (0, 3): 4e9, (1, 2): 4e9, (1, 3): 4e9}
    assert [f.status for f in links.judge(pair_facts(between), NAMES, ["a", "a", "b", "b"])] == ["ok"]


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 12, 64])
def test_partners_agree(size: int) -> None:
    schedule = [links.partners(rank, size) for rank in range(size)]
    met = set()
    for rank, row in enumerate(schedule):
        for turn, peer in enumerate(row):
            if peer is not None:
                assert schedule[peer][turn] == rank != peer
                met.add(frozenset((rank, peer)))
    assert len(met) == size * (size - 1) // 2 or size > links.ALL_PAIRS


def place(host_: str, local: str | None, gpu: str | None = None, size: str = "2") -> dict:
    return {"host": host_, "local_rank": local, "local_size": size, "gpu": gpu, "gpus": 0}


@pytest.mark.parametrize(
    "facts, said",
    [
        ([place("a", "0"), place("a", "1"), place("b", "0"), place("b", "1")], "2 machines, 2 ranks on each"),
        ([place("a", "0"), place("a", "0")], "rank 0 on a, rank 1 on a both have LOCAL_RANK 0"),
        ([place("a", "0"), place("a", "5")], "LOCAL_RANK is 5, but a has 2 ranks"),
        ([place("a", "0"), place("a", None)], "rank 1 on a has no LOCAL_RANK"),
        ([place("a", "0"), place("a", "1", size="4")], "LOCAL_WORLD_SIZE is 4"),
        ([place("a", "0", "GPU-1"), place("a", "1", "GPU-1")], "drive one GPU, GPU-1 of a"),
        ([place("a", "0", "GPU-1"), place("b", "0", "GPU-1")], "LOCAL_WORLD_SIZE is 2"),
    ],
)
def test_places(facts: list[dict], said: str) -> None:
    assert said in " ".join(f.message for f in places.judge(facts, NAMES[: len(facts)]))


def test_memory_files_and_shared_memory() -> None:
    sound = {"available": 2**36, "shared": 2**34, "files": 65536}
    assert host.judge([sound] * 2, NAMES[:2])[0].status == "ok"
    (found,) = host.judge([sound, sound | {"shared": 64 * 2**20}], NAMES[:2])
    assert found.ranks == (1,) and "0.0625 GiB free in /dev/shm" in found.message and "--shm-size" in found.message
    assert host.judge([sound | {"files": -1}], NAMES[:1])[0].status == "ok"  # no limit


def test_interfaces() -> None:
    known = {
        "lo": {"address": "127.0.0.1", "up": True},
        "eth0": {"address": "10.0.0.1", "up": True},
        "ib0": {"address": None, "up": False},
    }

    def judged(chosen: dict[str, str], resolved: dict | None = None) -> str:
        facts = [
            {"resolved": resolved or {}, "interfaces": known, "chosen": c, "host": h} for c, h in (({}, "a"), (chosen, "b"))
        ]  # fmt: skip
        return " ".join(f"{f.status} {f.message}" for f in network.judge(facts, NAMES[:2]))

    assert judged({"NCCL_SOCKET_IFNAME": "eth"}).startswith("ok")
    assert "rank 1 on a: NCCL_SOCKET_IFNAME=ib0 means ib0, which is down" in judged({"NCCL_SOCKET_IFNAME": "ib0"})
    assert "names no interface" in judged({"GLOO_SOCKET_IFNAME": "eth"})  # gloo takes whole names
    assert "loopback" in judged({"GLOO_SOCKET_IFNAME": "lo"})
    assert "node-9 does not resolve" in judged({}, {"MASTER_ADDR node-9": None})


def test_environment() -> None:
    assert environment.judge([{"NCCL_DEBUG_FILE": "a"}, {"NCCL_DEBUG_FILE": "b"}], NAMES[:2])[0].status == "ok"
    (found,) = environment.judge([{"NCCL_IB_HCA": "mlx5_0"}, {}, {"NCCL_IB_HCA": "mlx5_0"}], NAMES[:3])
    assert found.ranks == (1,) and "NCCL_IB_HCA is not set; elsewhere mlx5_0" in found.message
    (found,) = environment.judge([{"NCCL_P2P_DISABLE": "1"}], NAMES[:1])
    assert found.status == "warning" and "NVLink" in found.message
    assert environment.judge([{"NCCL_NVLS_ENABLE": "1"}], NAMES[:1])[0].status == "ok"


def test_access_control_of_bridges() -> None:
    text = (
        "00:01.0 PCI bridge: Vendor Device\n\tCapabilities: [100] Access Control Services\n"
        "\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+\n0000:17:00.0 3D controller: NVIDIA\n\t\tACSCtl:\tSrcValid- TransBlk-\n"
    )
    assert bridges_with_acs(text) == ["00:01.0"]
    (found,) = pcie.judge([{"on": ["00:01.0"]}], NAMES[:1])
    assert "rank 0 on a: ACS is on at 00:01.0" in found.message


SOCKETS = """
node-0:4711:4711 [0] NCCL INFO Bootstrap : Using eth0:10.1.0.4<0>
node-0:4711:4790 [0] NCCL INFO NET/IB : No device found.
node-0:4711:4790 [0] NCCL INFO NET/Socket : Using [0]eth0:10.1.0.4<0>
node-0:4711:4790 [0] NCCL INFO Using network Socket
node-0:4711:4790 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [receive] via NET/Socket/0
node-0:4711:4790 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
"""
INFINIBAND = """
NCCL version 2.28.3+cuda13.0
node-0:99:99 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.1.0.4<0>
node-0:99:99 [0] NCCL INFO Using network IB
node-0:99:99 [0] NCCL INFO NVLS multicast support is available on dev 0
node-0:99:99 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA
node-0:99:99 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
"""


def test_what_nccl_chose_is_read_from_its_log() -> None:
    choice = nccl_log.parse(SOCKETS)
    assert choice.network == {"Socket"} and choice.sockets == ("eth0",) and not choice.nvls
    (found,) = nccl_log.judge(choice, machines=2)
    assert found.status == "problem" and "TCP sockets (eth0)" in found.message
    choice = nccl_log.parse(INFINIBAND)
    assert choice.cards == ("mlx5_0:1", "mlx5_1:1") and choice.gpu_direct and choice.nvls
    assert choice.version == "2.28.3+cuda13.0"
    (found,) = nccl_log.judge(choice, machines=2)
    assert found.status == "ok" and "GPUDirect RDMA" in found.message
    (found,) = nccl_log.judge(nccl_log.parse(INFINIBAND.replace("/GDRDMA", "")), machines=2)
    assert found.status == "warning" and "nvidia-peermem" in found.message
    assert nccl_log.judge(nccl_log.parse("nothing"), 2)[0].status == "not here"
    # One machine: NCCL names Socket as its network where there is no card, and uses NVLink.
    one = "\n".join(line for line in SOCKETS.splitlines() if "NET/Socket/0" not in line)
    assert nccl_log.judge(nccl_log.parse(one), machines=1)[0].status == "ok"


def test_a_report_counts_and_sorts() -> None:
    report = Report(2, (Finding("b", "problem", "x", (1,)), Finding("a", "ok", "y")), 1.0)
    assert not report.sound and report.as_text().splitlines()[-1] == "2 ranks, 1.0 s: 1 problem, 0 warnings."
    assert report.as_text().index("problem") > report.as_text().index("ok")
    assert report.as_json()["findings"][0]["ranks"] == (1,)


def test_a_plan_that_does_not_suit_the_machines_is_told(tmp_path) -> None:
    four_nodes = Machine(gpus_per_node=8, nodes=4)
    (found,) = run_plan.look(tmp_path, None, four_nodes, True)
    assert found.status == "not here"
    (found,) = run_plan.look(tmp_path, "llama3-8b", four_nodes, True)
    assert found.status == "warning" and "1-D FSDP over dp_shard=32" in found.message
    (found,) = run_plan.look(tmp_path, "llama3-9b", four_nodes, True)
    assert found.status == "problem" and "no preset 'llama3-9b'" in found.message
    missing = str(tmp_path / "missing.toml")
    (found,) = run_plan.look(tmp_path, missing, four_nodes, True)
    assert found.message == f"{missing} cannot be read: No such file or directory."
    hybrid = tmp_path / "config.toml"
    hybrid.write_text('preset = "llama3-8b"\n[parallel]\ndp_replicate = 4\ndp_shard = 8\n')
    (found,) = run_plan.look(tmp_path, None, four_nodes, True)
    assert found.status == "ok", found


def test_a_run_whose_communication_shows_on_sound_links_is_told_what_to_change(tmp_path) -> None:
    lines = [{"step": n, "step_s": 2.0, "communication_s": 0.9} for n in range(1, 40)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.toml").write_text('preset = "llama3-8b"\n[parallel]\nprefetch = 0\n')
    (found,) = run_plan.look(tmp_path, None, Machine(8), True)
    assert found.status == "warning" and "45% of a step" in found.message and "parallel.prefetch = 1" in found.message
    assert "no streams" not in found.message
    (found,) = run_plan.look(tmp_path, None, Machine(8), True, device="cpu")
    assert "parallel.prefetch" not in found.message and "A CPU has no streams" in found.message
    (found,) = run_plan.look(tmp_path, None, Machine(8), False)  # slow links are told by "links"
    assert found.status == "ok"


def test_links_are_held_against_what_they_carry() -> None:
    facts = [
        {"device": "cpu", "collectives": {"all-reduce": 1e7}, "pairs": [[1 - n, 1e7]],
         "interface": {"name": "eth1", "address": f"10.0.0.{n}", "rate": 1.25e9}} for n in range(2)
    ]  # fmt: skip
    first, _ = links.judge(facts, NAMES[:2], ["a", "b"])
    assert first.ranks == (0, 1) and "0.01 GB/s, and eth1 carries 1.25" in first.message
    same = [fact | {"interface": facts[0]["interface"]} for fact in facts]  # through the machine's own memory
    assert [f.status for f in links.judge(same, NAMES[:2], ["a", "a"])] == ["ok"]
    gpus = [{"device": "cuda", "collectives": {"all-reduce": 40e9}, "pairs": [], "should": 478e9}] * 2
    first, _ = links.judge(gpus, NAMES[:2], ["a", "a"])
    assert "all-reduce at 40 GB/s, and the links of all ranks carry 478" in first.message


def test_the_wrong_card_is_a_problem_of_its_rank() -> None:
    fact = {
        "cards": [{"name": "mlx5_0", "port": 1, "active": True, "gbit_s": 400.0, "layer": "InfiniBand"}],
        "chosen": None,
    }
    assert cards.judge([fact] * 2, NAMES[:2])[0].status == "ok"
    (found,) = cards.judge([fact, fact | {"chosen": "mlx5_9"}], NAMES[:2])
    assert (
        found.status == "problem"
        and found.ranks == (1,)
        and "NCCL_IB_HCA=mlx5_9 names no network card" in found.message
    )
