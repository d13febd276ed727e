"""Kubernetes: a TrainJob of Kubeflow Trainer v2 with its runtime, or a JobSet. What follows from an exit code is in the manifest.

rank ends -> torchrun on its node starts the ranks again, if the code is not final, `restarts` times
pod ends  -> its Job fails at once (podFailurePolicy, backoffLimit 0): ranks of other pods cannot go on without it
Job fails -> the JobSet (failurePolicy) ends for a final code; starts again, uncounted, after a save or a disruption; else counted
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ottava.launch import policy
from ottava.launch.commands import Refused, call
from ottava.launch.job import Job, check_on
from ottava.launch.torchrun import log_options, torchrun
from ottava.launch.yaml_text import documents
from ottava.train.arguments import to_toml

CONFIG_FOLDER = "/etc/ottava"
PORT = 29500
CONTAINER = "node"
"""What Kubeflow's runtimes call the replicated job and the container that train."""
ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
GPU = "nvidia.com/gpu"
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Kubernetes:
    """image: with Ottava in it. volume: (claim, folder it is mounted at), for the run and its data."""

    image: str
    volume: tuple[str, str]
    kind: str = "trainjob"
    namespace: str | None = None
    cpus: str | None = None
    memory: str | None = None

    def __post_init__(self) -> None:
        if not IMAGE.fullmatch(self.image):
            raise ValueError(f"--image {self.image!r} is not the name of a container image.")
        claim, folder = self.volume
        if not CLAIM.fullmatch(claim) or not folder.startswith("/"):
            raise ValueError(f"--volume {claim}:{folder}: write CLAIM:/FOLDER, a volume claim and where it is mounted.")
        if self.namespace is not None and not LABEL.fullmatch(self.namespace):
            raise ValueError(f"--namespace {self.namespace!r} is not the name of a namespace.")
        for name, value in (("cpus", self.cpus), ("memory", self.memory)):
            if value is not None and not QUANTITY.fullmatch(value):
                raise ValueError(f"--{name} {value!r} is not a quantity: write 16 or 64Gi.")

    def files(self, job: Job) -> dict[str, str]:
        """One file with all objects."""
        check_on(self.volume[1], job.config, job.name)
        objects = _train_job(job, self) if self.kind == "trainjob" else _job_set(job, self)
        return {f"{self.kind}.yaml": documents([_config_map(job, self), *objects])}

    def submit(self, job: Job, folder: Path) -> int:
        """The server checks all objects before any is made; those that were made are removed if one is refused."""
        path = str(folder / f"{self.kind}.yaml")
        missing = "install kubectl, or apply the file where it is."
        call(["kubectl", "create", "--dry-run=server", "-f", path], missing)
        try:
            made = call(["kubectl", "create", "-o", "name", "-f", path], missing)
        except Refused as error:
            raise Refused(f"{error} {_undo(path, job, self)}") from error
        names = made.split()
        where = f" -n {self.namespace}" if self.namespace else ""
        print(
            f"Submitted {', '.join(names)}. Watch it: kubectl get pods{where} -l jobset.sigs.k8s.io/jobset-name={job.name}"
        )
        return 0


def _undo(path: str, job: Job, options: Kubernetes) -> str:
    """A refusal between two objects leaves the ones before it: they belong to this job's name, which was free."""
    where = ["-n", options.namespace] if options.namespace else []
    made = [("configmap", f"{job.name}-config")]
    made += [("trainingruntime.trainer.kubeflow.org", job.name)] if options.kind == "trainjob" else []
    for kind, name in made:
        call(["kubectl", "delete", "--ignore-not-found", *where, kind, name], "")
    return "What had been made was removed."


def _meta(name: str, options: Kubernetes) -> Manifest:
    return {"name": name} | ({"namespace": options.namespace} if options.namespace else {})


def _config_map(job: Job, options: Kubernetes) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _meta(f"{job.name}-config", options),
        "data": {"config.toml": to_toml(job.config)},
    }


def _job_set(job: Job, options: Kubernetes) -> list[Manifest]:
    spec = _spec(job, options)
    container = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    # What Kubeflow's operator would set: torchrun reads PET_* in place of options.
    container["env"] += [
        {"name": "PET_NNODES", "value": job.elastic()},
        {"name": "PET_NPROC_PER_NODE", "value": str(job.per_node)},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}},
        {"name": "PET_MASTER_ADDR", "value": f"{job.name}-{CONTAINER}-0-0.{job.name}"},
        {"name": "PET_MASTER_PORT", "value": str(PORT)},
    ]
    container |= {"command": _command(job, ""), "ports": [{"containerPort": PORT}]}
    return [
        {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _meta(job.name, options), "spec": spec}
    ]


def _train_job(job: Job, options: Kubernetes) -> list[Manifest]:
    """The runtime has the policies and the pod, the TrainJob what to run on how many nodes."""
    spec = _spec(job, options)
    spec["replicatedJobs"][0]["template"]["metadata"] = {"labels": {ANCESTOR: "trainer"}}
    api = "trainer.kubeflow.org/v1alpha1"
    runtime = {
        "apiVersion": api,
        "kind": "TrainingRuntime",
        "metadata": _meta(job.name, options) | {"labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {"mlPolicy": {"numNodes": job.nodes, "torch": {}}, "template": {"spec": spec}},
    }
    trainer: Manifest = {
        "numNodes": job.nodes,
        "numProcPerNode": job.per_node,
        "image": options.image,
        # Nodes that may be missing are torchrun's business; otherwise the operator says how many there are.
        "command": _command(job, "" if job.least == job.nodes else job.elastic()),
    }
    if limits := _limits(job, options):
        trainer["resourcesPerNode"] = {"limits": limits, "requests": limits}
    train_job = {
        "apiVersion": api,
        "kind": "TrainJob",
        "metadata": _meta(job.name, options),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
            "trainer": trainer,
        },
    }
    return [runtime, train_job]


def _command(job: Job, nnodes: str) -> list[str]:
    """Kubernetes puts the variables in. Nodes meet at the first pod."""
    return torchrun(
        job, nnodes, "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)", f"{CONFIG_FOLDER}/config.toml", rdzv_id=job.name,
        **log_options(job.config.run_folder),
    )  # fmt: skip


def _limits(job: Job, options: Kubernetes) -> Manifest:
    found: Manifest = {GPU: job.per_node} if job.device == "cuda" else {}
    found |= {"cpu": options.cpus} if options.cpus else {}
    return found | ({"memory": options.memory} if options.memory else {})


def _spec(job: Job, options: Kubernetes) -> Manifest:
    """Of the JobSet: one Job, a pod a node."""
    job_spec: Manifest = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": _pod_rules()},
        "template": {"spec": _pod(job, options)},
    }
    if job.least < job.nodes:  # a pod that never got a node must not keep a finished run waiting
        job_spec["successPolicy"] = {"rules": [{"succeededCount": job.least}]}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": job.restarts, "rules": _job_rules()},
        "replicatedJobs": [{"name": CONTAINER, "replicas": 1, "template": {"spec": job_spec}}],
    }


def _pod_rules() -> list[Manifest]:
    """Which ends of a pod fail its Job by a rule; the Job's message then has the exit code or the condition. Others fail it by count."""
    codes = [
        {"containerName": CONTAINER, "operator": "In", "values": sorted(v)} for v in (policy.FINAL, (policy.SAVED,))
    ]
    return [
        *({"action": "FailJob", "onExitCodes": each} for each in codes),
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]


def _job_rules() -> list[Manifest]:
    """The first that matches is taken; without any the JobSet starts again, at most maxRestarts times."""
    failed = {"onJobFailureReasons": ["PodFailurePolicy"]}
    again = [rf"exit code {policy.SAVED}\b", "DisruptionTarget"]
    return [
        {
            "name": "savedOrDisrupted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureMessagePatterns": again,
            **failed,
        },
        {"name": "final", "action": "FailJobSet", **failed},
    ]


def _pod(job: Job, options: Kubernetes) -> Manifest:
    claim, folder = options.volume
    container: Manifest = {
        "name": CONTAINER,
        "image": options.image,
        "env": [{"name": name, "value": value} for name, value in job.variables.items()],
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_FOLDER},
            {"name": "runs", "mountPath": folder},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    if limits := _limits(job, options):
        container["resources"] = {"limits": limits, "requests": limits}
    return {
        "restartPolicy": "Never",  # what podFailurePolicy asks for
        "terminationGracePeriodSeconds": job.grace_s + 30,
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": f"{job.name}-config"}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # NCCL's; 64 MB by default
        ],
    }
