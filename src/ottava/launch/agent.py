"""`python -m ottava.launch.agent TORCHRUN'S ARGUMENTS`: torchrun for one node, with what a scheduler needs besides.

* Its exit code is that of the ranks (docs/training.md has the table); torchrun's own is 1 whatever happened.
* Ranks whose exit code says that another start would end the same way are not started again.
* A signal (SIGTERM, SIGUSR1, ...) gives the ranks `--grace` seconds to save; torchrun 2.11 gives 30.
* `--bind-cpus`: each rank runs on the cores next to its GPU, where numactl is installed; where it is not, it says so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import traceback

from ottava import torch_private
from ottava.launch import policy
from ottava.train import exits
from ottava.train.console import say

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def main(arguments: list[str]) -> int:
    """Runs the ranks of this node, again where that helps; returns the exit code.

    >>> sys.exit(main(["--standalone", "--nproc-per-node=2", "-m", "ottava", "train", "run.toml"]))
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    options, words = _options(arguments)
    os.environ.setdefault(
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank ${rank}]: "
    )  # torchrun's own is the rank on this node
    asked = parse_args([f"--signals-to-handle={SIGNALS}", *_binding(options.bind_cpus), *words])
    with torch_private.elastic_agent(policy.is_final, options.grace) as ended:
        try:
            run(asked)
        except ChildFailedError as error:
            say(str(error), sys.stderr)
            return policy.exit_code(policy.as_shell(failure.exitcode) for failure in error.failures.values())
        except SignalException as signal:
            return _after_signal(signal.sigval.name, [policy.as_shell(code) for code in ended])
        except Exception:  # the rendezvous: other nodes are gone, or did not come
            traceback.print_exc()
            return exits.FAILED
    return exits.DONE


def _options(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(ours, torchrun's). Ours come first, so that nothing of the ranks' own arguments is taken."""
    parser = argparse.ArgumentParser(prog="python -m ottava.launch.agent", allow_abbrev=False, add_help=False)
    parser.add_argument("--grace", type=float, default=30.0)
    parser.add_argument("--bind-cpus", action="store_true")
    count = 0
    while count < len(arguments) and arguments[count].startswith(("--grace=", "--bind-cpus")):
        count += 1
    return parser.parse_args(arguments[:count]), arguments[count:]


def _binding(wanted: bool) -> list[str]:
    import torch

    if not wanted or not torch.cuda.is_available():
        return []
    if shutil.which("numactl") is None:
        say(
            "ottava launch: numactl is not installed, so ranks are not bound to the cores next to their GPUs.",
            sys.stderr,
        )
        return []
    return ["--numa-binding=node"]


def _after_signal(name: str, codes: list[int]) -> int:
    """Ranks that had to be killed have not saved."""
    killed = [code for code in codes if code == 137]
    if killed:
        say(f"ottava launch: {name}: {len(killed)} ranks did not save in time, and were killed.", sys.stderr)
        return killed[0]
    say(f"ottava launch: {name}: the ranks have ended.", sys.stderr)
    return policy.exit_code(codes) if policy.is_final(codes) else policy.SAVED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
