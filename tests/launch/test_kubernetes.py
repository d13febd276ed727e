"""Manifests: by the schemas of the CRDs and of the core kinds, by what their policies do with exit codes, and by running the container's
command line as a pod would, with the operator's variables."""

from __future__ import annotations

import json
import lzma
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.jobs import attempts, config_file, environment, lines, losses, ranks_of, reference, shorten, wait_until
from ottava.cli.main import main
from ottava.doctor.run_logs import find_logs
from ottava.launch import policy

SCHEMAS = Path(__file__).parents[1] / "data" / "kubernetes"
FILES = {"TrainJob": "trainjobs", "TrainingRuntime": "trainingruntimes", "JobSet": "jobsets"}
VERSION = "1.33"


def launch(
    capsys: pytest.CaptureFixture[str], *words: str, on: str = "/mnt", config: str = "debug"
) -> list[dict[str, Any]]:
    """The objects that would be submitted."""
    given = ["--on", "kubernetes", "--image", "example/ottava:1", "--volume", f"runs:{on}", "--print"]
    if config == "debug":
        given += ["--set", f"train.run={on}/runs/debug,train.global_batch=128"]
    code = main(["launch", config, *given, *words])
    text, said = capsys.readouterr()
    assert code == 0, said
    return list(yaml.safe_load_all(text))


def strict(schema: Any) -> Any:
    """A structural schema as the API server reads it with strict validation: no unknown fields."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    found = {key: strict(value) for key, value in schema.items()}
    closed = "properties" in found and "additionalProperties" not in found
    if closed and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found["additionalProperties"] = False
    return found


def errors(manifest: dict[str, Any]) -> list[str]:
    """What is wrong with an object, by the schema of its kind."""
    if manifest["kind"] not in FILES:
        return core_errors(manifest)
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema (make test-launch installs it)")
    crd = json.loads(lzma.decompress((SCHEMAS / f"{FILES[manifest['kind']]}.json.xz").read_bytes()))
    group, version = manifest["apiVersion"].split("/")
    assert group == crd["spec"]["group"] and manifest["kind"] == crd["spec"]["names"]["kind"]
    (schema,) = [
        v["schema"]["openAPIV3Schema"] for v in crd["spec"]["versions"] if v["name"] == version and v["served"]
    ]
    schema = strict(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    found = jsonschema.Draft7Validator(schema).iter_errors(manifest)
    return [f"{'/'.join(map(str, e.absolute_path))}: {e.message[:200]}" for e in found]


def core_errors(manifest: dict[str, Any]) -> list[str]:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="needs kubernetes-validate (make test-launch installs it)"
    )
    try:
        validate.validate(manifest, VERSION, strict=True)
    except validate.ValidationError as error:
        return [str(error)]
    return []


def job_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """The batch/v1 Job inside, as the JobSet controller would make it, with what Kubeflow's operator puts in."""
    by_kind = {each["kind"]: each for each in objects}
    outer = by_kind["JobSet"] if "JobSet" in by_kind else by_kind["TrainingRuntime"]["spec"]["template"]
    (replicated,) = outer["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": replicated["template"]["spec"]}
    (container,) = job["spec"]["template"]["spec"]["containers"]
    if "TrainJob" in by_kind:
        trainer = by_kind["TrainJob"]["spec"]["trainer"]
        container |= {
            "image": trainer["image"],
            "command": trainer["command"],
            "resources": trainer.get("resourcesPerNode", {}),
        }
    return job


KINDS = [("--kind", "trainjob"), ("--kind", "jobset")]


@pytest.mark.parametrize("kind", KINDS, ids=["trainjob", "jobset"])
@pytest.mark.parametrize(
    "words",
    [
        ("--nodes", "2"),
        ("--nodes", "4", "--min-nodes", "2", "--per-node", "1", "--set", "train.global_batch=96", "--device", "cpu"),
        (
            "--namespace",
            "team",
            "--cpus",
            "16",
            "--memory",
            "64Gi",
            "--interface",
            "eth0",
            "--hca",
            "mlx5",
            "--env",
            "A=b c",
        ),
    ],
    ids=["plain", "elastic", "all"],
)
def test_objects_are_valid_by_the_schemas(capsys, kind, words):
    objects = launch(capsys, *kind, *words)
    assert [each["kind"] for each in objects] == (
        ["ConfigMap", "JobSet"] if kind[1] == "jobset" else ["ConfigMap", "TrainingRuntime", "TrainJob"]
    )
    for each in [*objects, job_of(objects)]:
        assert errors(each) == [], each["kind"]


def test_the_schemas_notice_mistakes(capsys):
    config_map, runtime, train_job = launch(capsys, "--nodes", "2")
    _, job_set = launch(capsys, "--nodes", "2", "--kind", "jobset")
    train_job["spec"]["trainer"]["numNode"] = 3
    runtime["spec"]["template"]["spec"]["failurePolicy"]["rules"][0]["action"] = "Restart"
    job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["paralelism"] = 2
    config_map["dat"] = {}
    for each in (train_job, runtime, job_set, config_map):
        assert errors(each), each["kind"]


def message_of(job: dict[str, Any], code: int | None, disrupted: bool = False) -> tuple[str, str]:
    """(reason, message) with which Kubernetes fails a Job when a pod of it ends so, by the documented rules of podFailurePolicy."""
    for index, rule in enumerate(job["spec"]["podFailurePolicy"]["rules"]):
        codes = rule.get("onExitCodes")
        if codes and code is not None and code in codes["values"]:
            return "PodFailurePolicy", (
                f"Container {codes['containerName']} for pod default/a-node-0-1-xyz failed with exit code {code} matching "
                f"{rule['action']} rule at index {index}"
            )
        if disrupted and "onPodConditions" in rule:
            return "PodFailurePolicy", (
                f"Pod default/a-node-0-1-xyz has condition DisruptionTarget matching {rule['action']} rule at index {index}"
            )
    assert job["spec"]["backoffLimit"] == 0
    return "BackoffLimitExceeded", "Job has reached the specified backoff limit"


def action_of(spec: dict[str, Any], reason: str, message: str) -> str:
    """What a JobSet does then: the first rule that matches."""
    for rule in spec["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return rule["action"]
    return "RestartJobSet"


def test_policies_follow_the_exit_codes(capsys):
    _, job_set = objects = launch(capsys, "--nodes", "2", "--kind", "jobset")
    job, spec = job_of(objects), job_set["spec"]
    for code in range(1, 256):
        expected = "RestartJobSet"
        if code in policy.FINAL:
            expected = "FailJobSet"
        elif code == policy.SAVED:
            expected = "RestartJobSetAndIgnoreMaxRestarts"
        assert action_of(spec, *message_of(job, code)) == expected, code
    assert action_of(spec, *message_of(job, None, disrupted=True)) == "RestartJobSetAndIgnoreMaxRestarts"
    _, runtime, _ = launch(capsys, "--nodes", "2")
    assert runtime["spec"]["template"]["spec"]["failurePolicy"] == spec["failurePolicy"]


def test_a_pod_outlives_the_time_to_save_and_shared_memory_is_there(capsys):
    pod = job_of(launch(capsys, "--grace", "100"))["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 100 and pod["restartPolicy"] == "Never"
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory"}} in pod["volumes"]


def operator_variables(objects: list[dict[str, Any]], index: int, port: int) -> dict[str, str]:
    """What the pod with this completion index gets: from its container, and from Kubeflow's operator (its plugins/torch)."""
    job = job_of(objects)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    found = {each["name"]: each.get("value", str(index)) for each in container["env"]}
    trainers = [each["spec"]["trainer"] for each in objects if each["kind"] == "TrainJob"]
    if trainers:
        found |= {
            "PET_NNODES": str(trainers[0]["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainers[0]["numProcPerNode"]),
            "PET_NODE_RANK": str(index),
        }
    # Where the first pod's name would lead to.
    return found | {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}


def start_pod(objects: list[dict[str, Any]], index: int, port: int, folder: Path) -> subprocess.Popen[str]:
    """The container's command, with variables put in as the kubelet does it and the ConfigMap's file where it would be mounted."""
    variables = operator_variables(objects, index, port)
    (container,) = job_of(objects)["spec"]["template"]["spec"]["containers"]
    words = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word) for word in container["command"]]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    mounted = folder / f"config-{index}"
    mounted.mkdir(exist_ok=True)
    for name, text in objects[0]["data"].items():
        (mounted / name).write_text(text)
    words = [word.replace(mounts["config"], str(mounted)) for word in words]
    assert words[0] == "python"
    return subprocess.Popen(
        [sys.executable, *words[1:]],
        env=environment(variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.extra
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS, ids=["trainjob", "jobset"])
def test_pods_train_save_when_one_is_drained_and_go_on_with_the_same_losses(capsys, tmp_path, kind):
    config, run = config_file(tmp_path, "run"), tmp_path / "run"
    shape = ("--nodes", "2", "--per-node", "1", "--device", "cpu", "--grace", "60", "--restarts", "0")
    objects = launch(capsys, *kind, *shape, on=str(tmp_path), config=str(config))

    def pods() -> list[subprocess.Popen[str]]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        return [start_pod(objects, index, port, tmp_path) for index in (0, 1)]

    first = pods()
    wait_until(lambda: len(lines(run)) >= 6, "step 6", otherwise=lambda: str([pod.poll() for pod in first]))
    first[1].send_signal(signal.SIGTERM)  # its node is drained
    said = [pod.communicate(timeout=600)[0] for pod in first]
    codes = [pod.returncode for pod in first]
    assert codes == [143, 143], said
    job, spec = job_of(objects), objects[1]["spec"]
    spec = spec.get("template", {}).get("spec", spec)
    assert action_of(spec, *message_of(job, codes[1])) == "RestartJobSetAndIgnoreMaxRestarts"

    steps = shorten(config, run)
    objects = launch(capsys, *kind, *shape, on=str(tmp_path), config=str(config))
    again = pods()
    said = [pod.communicate(timeout=600)[0] for pod in again]
    assert [pod.returncode for pod in again] == [0, 0], said
    assert losses(run) == reference(tmp_path, steps) and attempts(run) == {0, 1}, said
    assert {log.rank for log in find_logs(run)} == {0, 1}  # both are rank 0 of their node


@pytest.mark.extra
@pytest.mark.timeout(1800)
def test_a_killed_rank_ends_as_a_pod_with_its_code_or_is_started_again(capsys, tmp_path):
    config, run = config_file(tmp_path, "run"), tmp_path / "run"
    shape = ("--nodes", "1", "--per-node", "2", "--device", "cpu")
    objects = launch(capsys, *shape, "--restarts", "0", on=str(tmp_path), config=str(config))
    pod = start_pod(objects, 0, 0, tmp_path)
    wait_until(lambda: len(lines(run)) >= 6, "step 6", otherwise=lambda: str(pod.poll()))
    os.kill(ranks_of(tmp_path / "config-0" / "config.toml")[1], signal.SIGKILL)
    said = pod.communicate(timeout=600)[0]
    assert pod.returncode == 137, said
    objects = launch(capsys, *shape, "--restarts", "1", on=str(tmp_path), config=str(config))
    pod = start_pod(objects, 0, 0, tmp_path)
    wait_until(lambda: 1 in attempts(run), "another attempt", otherwise=lambda: str(pod.poll()))
    os.kill(ranks_of(tmp_path / "config-0" / "config.toml")[1], signal.SIGKILL)
    steps = shorten(tmp_path / "config-0" / "config.toml", run)
    said = pod.communicate(timeout=600)[0]
    assert pod.returncode == 0 and list(losses(run)) == list(range(1, steps + 1)) and 2 in attempts(run), said


FAKE = """#!/bin/bash
echo "$@" >> {folder}/calls
case "$*" in
  *dry-run*) {dry} ;;
  *"-o name"*) {create} ;;
esac
"""


def fake_kubectl(folder: Path, monkeypatch: pytest.MonkeyPatch, dry: str = "true", create: str = "echo made") -> Path:
    path = folder / "bin" / "kubectl"
    path.parent.mkdir(exist_ok=True)
    path.write_text(FAKE.format(folder=folder, dry=dry, create=create))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return folder / "calls"


def test_nothing_stays_when_kubernetes_refuses(tmp_path, monkeypatch, capsys):
    words = ["launch", "debug", "--on", "kubernetes", "--image", "a:1", "--volume", f"runs:{tmp_path}", "--submit"]
    words += ["--set", f"train.run={tmp_path}/a,train.global_batch=64", "--output", str(tmp_path / "out")]
    calls = fake_kubectl(tmp_path, monkeypatch, dry="echo 'no matches for kind TrainJob' >&2; exit 1")
    assert main(words) == 69 and "no matches for kind TrainJob" in capsys.readouterr().err
    assert [line.split()[0] for line in calls.read_text().splitlines()] == ["create"]  # only looked
    calls.unlink()
    fake_kubectl(tmp_path, monkeypatch, create="echo 'exceeded quota' >&2; exit 1")
    assert main(words) == 69 and "exceeded quota" in capsys.readouterr().err
    assert [line.split()[:2] for line in calls.read_text().splitlines()][2:] == [["delete", "--ignore-not-found"]] * 2
    fake_kubectl(tmp_path, monkeypatch)
    assert main(words) == 0 and "Submitted made" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, said",
    [
        (["--volume", "runs:/mnt"], "needs --image"),
        (["--image", "a:1", "--volume", "runs"], "CLAIM:/FOLDER"),
        (["--image", "a:1", "--volume", "runs:/mnt"], "checkpoints would be lost"),
        (["--image", "a b", "--volume", "runs:/mnt"], "not the name of a container image"),
        (["--image", "a:1", "--volume", "runs:/", "--memory", "lots"], "not a quantity"),
        (["--image", "a:1", "--volume", "runs:/", "--namespace", "A B"], "not the name of a namespace"),
    ],
)
def test_what_a_cluster_could_not_take_is_refused_here(words, said, capsys):
    given = ["launch", "debug", "--on", "kubernetes", "--print", "--set", "train.global_batch=64", *words]
    assert main(given) == 2 and said in capsys.readouterr().err
