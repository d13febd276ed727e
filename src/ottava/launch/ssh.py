"""Machines that can be reached by ssh: one torchrun on each, started and stopped together."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ottava.launch import policy
from ottava.launch.commands import Refused, call
from ottava.launch.job import Job
from ottava.launch.torchrun import config_files, log_options, port_of, shell, torchrun

HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.@:-]*[A-Za-z0-9_])?")
OPTIONS = "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15"
"""No questions, and a machine that is gone is noticed."""


@dataclass(frozen=True)
class Ssh:
    """hosts: as ssh knows them, in order; the others must reach the first by the same name. They see the same files."""

    hosts: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ValueError("--on ssh needs --hosts a,b,...: the machines, the first of which the others meet at.")
        for host in self.hosts:
            if not HOST.fullmatch(host):
                raise ValueError(f"--hosts: {host!r} is not the name of a machine.")
        if len(set(self.hosts)) < len(self.hosts):
            raise ValueError(f"--hosts names a machine twice: {', '.join(self.hosts)}.")

    def files(self, job: Job) -> dict[str, str]:
        """ssh.sh starts all, passes signals on, and ends as the run does."""
        if job.nodes != len(self.hosts):
            raise ValueError(f"--nodes is {job.nodes}, but --hosts names {len(self.hosts)} machines.")
        return {"ssh.sh": _script(job, self)} | config_files(job)

    def submit(self, job: Job, folder: Path) -> int:
        """Every machine must answer, see the files and have Ottava first; then the script runs here, in the foreground."""
        missing = "install an ssh client."
        sees = f"test -r {shlex.quote(str(folder / 'config.toml'))} && {shell([job.python, '-c', 'import ottava.launch.agent'])}"
        silent = []
        for host in self.hosts:
            try:
                call(["ssh", *OPTIONS.split(), host, sees], missing, seconds=300.0)
            except Refused as error:
                silent.append(f"{host} is not ready. {str(error).rstrip('.')}.")
        if silent:
            raise Refused(" ".join(silent) + " Nothing was started.")
        return subprocess.call(["bash", str(folder / "ssh.sh")])


def _script(job: Job, ssh: Ssh) -> str:
    first = ssh.hosts[0].rpartition("@")[2]
    words = torchrun(
        job, job.elastic(), f"{first}:{port_of(job)}", str(job.folder / "config.toml"), rdzv_id=job.name, rdzv_conf="is_host=HOST",
        **log_options(job.config.run_folder),
    )  # fmt: skip
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in job.variables.items())
    remote = f"cd {shlex.quote(str(job.config.run_folder))} && echo $$ > PIDFILE && exec env {exports} {shell(words)}"
    final = "|".join(map(str, policy.FINAL))
    return f"""#!/bin/bash
# {job.name}: {job.nodes} machines x {job.per_node} ranks, by ssh. Ctrl-C or SIGTERM: the ranks save, and everything ends.
hosts=({" ".join(map(shlex.quote, ssh.hosts))})
node={shlex.quote(remote)}
pidfile={shlex.quote(str(job.folder))}/agent-

start() {{  # number of the machine
  local words=${{node/PIDFILE/$(printf '%q' "$pidfile$1.pid")}}
  ssh {OPTIONS} "${{hosts[$1]}}" "${{words/is_host=HOST/is_host=$(($1 == 0))}}"
}}
stop() {{
  for i in "${{!hosts[@]}}"; do
    ssh {OPTIONS} "${{hosts[$i]}}" "kill -$1 \\$(cat $(printf '%q' "$pidfile$i.pid"))" 2> /dev/null &
  done
}}
trap 'stop TERM' TERM INT HUP
trap 'stop USR1' USR1

clients=()
for i in "${{!hosts[@]}}"; do
  start "$i" < /dev/null &
  clients+=($!)
done

# Done if any machine says so: others may have been lost on the way.
result=0 done=no
for i in "${{!clients[@]}}"; do
  wait "${{clients[$i]}}"; code=$?
  while kill -0 "${{clients[$i]}}" 2> /dev/null; do wait "${{clients[$i]}}"; code=$?; done  # a signal ends a wait early
  echo "${{hosts[$i]}}: exit code $code" >&2
  case "$code" in
    0) done=yes ;;
    {final}) done=no; result=$code; break ;;
    *) if [ "$code" -gt "$result" ] && [ "$code" -ne 255 ] || [ "$result" -eq 0 ]; then result=$code; fi ;;
  esac
done
wait
if [ "$done" = yes ]; then exit 0; fi
exit "$result"
"""
