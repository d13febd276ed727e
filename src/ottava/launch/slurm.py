"""Slurm: an sbatch script with one torchrun a node, that requeues itself after a save or a failure, and an array for a sweep."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from ottava.launch import environment, policy
from ottava.launch.commands import call
from ottava.launch.job import Job
from ottava.launch.torchrun import config_files, log_options, torchrun
from ottava.notices import warn_once

TIME = re.compile(r"\d+(-\d+(:\d+){0,2}|(:\d+){0,2})")
OWNED = {
    "nodes", "ntasks", "ntasks-per-node", "signal", "requeue", "no-requeue", "open-mode", "output", "array", "time", "job-name",
    "gpus-per-node",
}  # fmt: skip
"""Options of sbatch that the script sets itself."""
SHORT = {"-N": "nodes", "-n": "ntasks", "-o": "output", "-a": "array", "-t": "time", "-J": "job-name"}


@dataclass(frozen=True)
class Slurm:
    """options: more lines for sbatch, such as "--partition=gpu". cpus: cores of a node. concurrent: runs of a sweep at a time."""

    options: tuple[str, ...] = ()
    cpus: str | None = None
    concurrent: int | None = None

    def __post_init__(self) -> None:
        for option in self.options:
            word = re.split(r"[=\s]", option, maxsplit=1)[0]
            name = word[2:] if word.startswith("--") else SHORT.get(word[:2], "")
            if not option.startswith("-") or "\n" in option:
                raise ValueError(f"--sbatch {option!r}: write one option of sbatch, such as --sbatch=--partition=gpu.")
            if name in OWNED:
                raise ValueError(
                    f"--sbatch {option}: the script has its own --{name}; `ottava launch --help` says from what."
                )
        if self.cpus is not None and not re.fullmatch("[1-9][0-9]*", self.cpus):
            raise ValueError(f"--cpus {self.cpus!r}: a number of cores.")
        if self.concurrent is not None and self.concurrent < 1:
            raise ValueError(f"--concurrent must be at least 1, got {self.concurrent}.")

    def files(self, job: Job) -> dict[str, str]:
        """job.sbatch, and the configuration."""
        if job.time is not None and not TIME.fullmatch(job.time):
            raise ValueError(f"--time {job.time!r}: write it as Slurm does: 90 (minutes), 12:00:00 or 2-12:00:00.")
        limit = seconds_of(job.time) if job.time is not None else 0
        if limit and job.grace_s >= limit:  # ranks would save and be requeued before they have made a step
            raise ValueError(
                f"--grace {job.grace_s} is all of --time {job.time} ({limit} s): ranks would be told to save as soon as they start, again "
                "and again. Take a longer --time, or a shorter --grace."
            )
        if self.concurrent is not None and not job.sweep:
            raise ValueError("--concurrent is for a --sweep.")
        if (
            job.device == "cuda"
            and self.cpus is None
            and not any(o.startswith(("--exclusive", "--cpus")) for o in self.options)
        ):
            warn_once(
                "ottava launch: Slurm may give a node's ranks one core: say how many with --cpus, or take whole nodes with "
                "--sbatch=--exclusive."
            )
        lines = [
            "#!/bin/bash",
            *_header(job),
            *(f"#SBATCH {line}" for line in self._options(job)),
            "",
            *_environment(job),
        ]
        return {"job.sbatch": "\n".join(lines) + "\n" + _body(job)} | config_files(job)

    def submit(self, job: Job, folder: Path) -> int:
        """One sbatch: all of a sweep, or nothing."""
        (job.config.run_folder / "logs").mkdir(parents=True, exist_ok=True)  # Slurm makes no folder for its output
        missing = "Slurm is not installed here. Submit the script where it is, or take --print."
        number = call(["sbatch", "--parsable", str(folder / "job.sbatch")], missing).partition(";")[0]
        print(
            f"Submitted Slurm job {number}: squeue -j {number}; ottava status {job.config.run_folder}; "
            f"save and start again: scancel --signal=TERM {number}; end it: scancel {number}"
        )
        return 0

    def _options(self, job: Job) -> list[str]:
        nodes = str(job.nodes) if job.least == job.nodes else f"{job.least}-{job.nodes}"
        found = [f"--job-name={job.name}", f"--nodes={nodes}"]  # with a number of tasks, Slurm takes the fewest nodes
        if job.device == "cuda":
            found.append(f"--gpus-per-node={job.per_node}")
        if self.cpus is not None:
            found.append(f"--cpus-per-task={self.cpus}")
        if job.time is not None:
            found.append(f"--time={job.time}")
        if job.sweep:
            limit = "" if self.concurrent is None else f"%{self.concurrent}"
            found.append(f"--array=0-{len(job.sweep) - 1}{limit}")
        # To the ranks, not to this script: they have the time to save before the limit. Requeued jobs add to their log.
        found += [f"--signal=USR1@{job.grace_s}", "--requeue", "--open-mode=append"]
        found.append(f"--output={job.config.run_folder}/logs/slurm-{'%A-%a' if job.sweep else '%j'}.out")
        return [*found, *self.options]


def seconds_of(time: str) -> int:
    """A time as Slurm writes it: minutes, minutes:seconds, hours:minutes:seconds, or days-hours and the rest. 0 is no limit.

    >>> seconds_of("90"), seconds_of("1:30"), seconds_of("2-12")
    (5400, 90, 216000)
    """
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        parts = [*parts, 0, 0][:3]
    elif len(parts) == 1:
        parts = [0, *parts, 0]
    hours, minutes, seconds = [0, *parts][-3:]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def _header(job: Job) -> list[str]:
    found = [f"# {job.name}: {job.nodes} nodes x {job.per_node} ranks. Written by `ottava launch`."]
    return found + [f"# {number}: {what}" for number, (what, _) in enumerate(job.sweep)]


def _environment(job: Job) -> list[str]:
    found = []
    for name, value in job.variables.items():
        why = environment.WHY.get(name)
        found.append(f"export {name}={shlex.quote(value)}" + (f"  # {why}" if why else ""))
    return found


def _body(job: Job) -> str:
    """What the batch script does: chooses the nodes, starts torchrun on each, and decides what follows from the exit code."""
    task = "${SLURM_ARRAY_TASK_ID}"
    config = f"config-{task}.toml" if job.sweep else "config.toml"
    run = f"{job.config.run_folder}/sweep-{task}" if job.sweep else str(job.config.run_folder)
    # In double quotes: the shell of the batch script puts in the number of the array's task.
    path, logs = f'"{_escaped(job.folder)}/{config}"', f'"{_escaped(run)}"'
    words = torchrun(
        job, "$NODES", "$RENDEZVOUS", "$CONFIG", rdzv_id="$SLURM_JOB_ID", rdzv_conf="is_host=$host", local_addr="$address",
        **log_options("$RUN"),
    )  # fmt: skip
    line = " ".join(f'"{word}"' if "$" in word else shlex.quote(word) for word in words)
    node = f"""
host=0; if [ "$SLURM_NODEID" = 0 ]; then host=1; fi
address=$(address_of "$SLURMD_NODENAME")
exec {line}
"""
    final = "|".join(map(str, policy.FINAL))
    return f"""
export CONFIG={path} RUN={logs}
mkdir -p "$RUN"

# As many nodes as this allocation has and the plan can use.
NODES=0
for count in {" ".join(map(str, job.counts))}; do
  if [ "$count" -le "$SLURM_JOB_NUM_NODES" ]; then NODES=$count; fi
done
export NODES

# Nodes meet at the first one, by the address that Slurm itself uses.
address_of() {{ scontrol show node "$1" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p'; }}
export -f address_of
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
RENDEZVOUS="$(address_of "$first"):$((20000 + SLURM_JOB_ID % 10000))"
export RENDEZVOUS

node={shlex.quote(node)}
trap : TERM USR1  # ranks get these too, and save; this script waits for them
# A node that ends gives the others the time to save. torchrun binds ranks to cores.
srun --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 --kill-on-bad-exit=0 --wait={job.grace_s} --cpu-bind=none \\
  ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} bash -c "$node"
code=$?

# What the exit codes of `ottava train` mean is in docs/launch.md.
failures="$RUN/failed-starts"
case "$code" in
  0) rm -f "$failures"; exit 0 ;;
  {policy.SAVED}) rm -f "$failures"; echo "ottava launch: saved after a signal; requeued." ;;
  {final}) echo "ottava launch: exit code $code: another start would end the same way."; exit "$code" ;;
  *)
    failed=$(($(cat "$failures" 2>/dev/null || echo 0) + 1))
    if [ "$failed" -gt {job.restarts} ]; then
      echo "ottava launch: exit code $code, and {job.restarts} starts have failed before."; rm -f "$failures"; exit "$code"
    fi
    echo "$failed" > "$failures"
    echo "ottava launch: exit code $code: start $failed of {job.restarts} that failed; requeued." ;;
esac
job=$SLURM_JOB_ID
if [ -n "${{SLURM_ARRAY_JOB_ID:-}}" ]; then job="${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"; fi
scontrol requeue "$job" || echo "ottava launch: Slurm does not requeue this job: submit it again to go on."
exit "$code"
"""


def _escaped(path: Path | str) -> str:
    """Inside double quotes. The number of an array's task stays a variable."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`")
    return re.sub(r"\$(?!\{SLURM_ARRAY_TASK_ID\})", r"\\$", text)
