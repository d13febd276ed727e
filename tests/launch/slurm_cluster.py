"""A real Slurm on one machine: munged, slurmctld and two slurmd, in a folder of their own, as the packages of Debian have them."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "srun", "squeue")


def missing() -> str | None:
    """Why there can be no Slurm here."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"needs Slurm (make debian): there is no {', '.join(absent)}"
    return None if os.geteuid() == 0 else "needs root, which slurmd runs jobs as"


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return found


class Slurm:
    """Nodes n1 and n2 with `cpus` cores each. Use it in a `with` block.

    >>> with Slurm() as slurm:
    ...     slurm.call("sbatch", "--parsable", "job.sbatch")
    """

    def __init__(self, cpus: int = 2) -> None:
        # A short path: a socket's name has at most 108 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._cpus = cpus
        self.environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _path()}

    def __enter__(self) -> Self:
        for name in ("munge", "state", "spool", "log"):
            (self.folder / name).mkdir()
        self._write_files()
        try:
            self._start("munged", "--force", "--foreground", *self._munge_options())
            self._wait(lambda: (self.folder / "munge" / "socket").exists(), "munged")
            self._start("slurmctld", "-D")
            for node in ("n1", "n2"):
                self._start("slurmd", "-D", "-N", node)
            self._wait(lambda: self.call("sinfo", "-h", "-o", "%T %D") == "idle 2", "two idle nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, *words: str) -> str:
        """What a command of Slurm prints; an error if it fails."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr or done.stdout}\n{self.logs()}")
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, ..."""
        words = self.call("scontrol", "show", "job", job).split()
        return next(word.removeprefix("JobState=") for word in words if word.startswith("JobState="))

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(f"{path}:\n{path.read_text()[-2000:]}" for path in sorted((self.folder / "log").glob("*")))

    def _wait(self, true: object, what: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if true():  # type: ignore[operator]
                    return
            except RuntimeError:
                pass  # the controller does not answer yet
            time.sleep(0.2)
        raise RuntimeError(f"{what} did not come in {seconds:.0f} s:\n{self.logs()}")

    def _start(self, *words: str) -> None:
        log = (self.folder / "log" / f"{len(self._processes)}-{words[0]}.out").open("wb")
        self._processes.append(subprocess.Popen(words, env=self.environment, stdout=log, stderr=log))

    def _munge_options(self) -> list[str]:
        folder = self.folder / "munge"
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        return [f"--{option}={folder / name}" for option, name in files.items()]

    def _write_files(self) -> None:
        key = self.folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        controller, *nodes = _free_ports(3)
        host, folder = socket.gethostname(), self.folder
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={controller}",
            "AuthType=auth/munge",
            # Slurm holds a requeued job back as long as credentials live: 120 s if nobody says otherwise.
            f"AuthInfo=socket={folder}/munge/socket,cred_expire=20",
            "CredType=cred/munge",
            "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny",
            "SlurmUser=root",
            "SlurmdUser=root",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool/%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/slurmd-%n.pid",
            f"SlurmctldLogFile={folder}/log/slurmctld.log",
            f"SlurmdLogFile={folder}/log/slurmd-%n.log",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SwitchType=switch/none",
            "MpiDefault=none",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
            "SchedulerType=sched/backfill",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "ReturnToService=0",  # a node that is down stays down
            "KillWait=15",
            "SlurmdTimeout=30",
        ]
        for name, port in zip(("n1", "n2"), nodes):
            lines.append(
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self._cpus} RealMemory=1000 State=UNKNOWN"
            )
        lines.append("PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP")
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
