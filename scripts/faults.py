"""Fault injection: kill or stop commands, or kill one of their workers, at random moments (`make faults`).

    python scripts/faults.py kill --times 100      # SIGKILL
    python scripts/faults.py stop --times 8        # SIGINT and SIGTERM
    python scripts/faults.py lose --times 8        # SIGKILL to one worker

After a kill, the output file is either the complete old one or the complete new one, an unfinished file never has the name of
the output, and the next run gives the same result as an undisturbed run. After a signal, the exit code is 128 + signal, the
terminal is clean, and no unfinished file or process is left. After a worker dies, the other workers end soon with a one-line
error. See tests/robustness/faults.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.robustness.faults import jobs, lost_workers, signals


def kill(names: list[str], times: int, seed: int) -> bool:
    """Kill each command many times. Returns True if no fault was found.

    Prints one line per command, with the number of kills per stage. before: nothing was written yet
    writing: there was an unfinished file   between: the old output folder was moved away, the new one not yet in place
    after: the new output was complete
    """
    from tests.robustness.faults import kills

    kills.warm_up()
    no_faults = True
    print(f"{'':16}{'seconds':>8}{'before':>8}{'writing':>8}{'between':>8}{'after':>8}{'reruns':>12}{'faults':>8}")
    with tempfile.TemporaryDirectory(prefix="fqvit-faults-") as folder:
        _in_child_process(lambda: jobs.prepare(Path(folder), names))
        for name in names or list(jobs.JOBS):
            tally = kills.campaign(name, Path(folder), times, seed)
            stages = "".join(f"{tally.counts[stage]:>8}" for stage in ("before", "writing", "between", "after"))
            print(f"{name:16}{tally.seconds:>8.2f}{stages}{tally.reruns:>12}{len(tally.faults):>8}", flush=True)
            for fault in tally.faults[:5]:
                print(f"  {fault}")
            no_faults = no_faults and not tally.faults
    return no_faults


def _in_child_process(work: object) -> None:
    """Run `work` in a child process, so that torch starts no threads in this process, which forks later."""
    child = os.fork()
    if child == 0:
        try:
            work()  # type: ignore[operator]
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def stop(names: list[str], times: int, seed: int) -> bool:
    """Send SIGINT and SIGTERM to each command many times. Returns True if no fault was found."""
    no_faults = True
    with tempfile.TemporaryDirectory(prefix="fqvit-faults-") as folder:
        _in_child_process(lambda: jobs.prepare(Path(folder), names))
        for name in names or list(signals.COMMANDS):
            for signum in (signal.SIGINT, signal.SIGTERM):
                began = time.monotonic()
                counts, faults = signals.campaign(name, Path(folder), signum, times, seed)
                summary = ", ".join(f"{count} x {code}" for code, count in sorted(counts.items()))
                print(
                    f"{name:16} {signum.name:8} exit codes {summary}; {len(faults)} faults; {time.monotonic() - began:.0f} s",
                    flush=True,
                )
                for fault in faults[:5]:
                    print(f"  {fault}")
                no_faults = no_faults and not faults
    return no_faults


def lose(names: list[str], times: int, seed: int) -> bool:
    """Kill one worker of each distributed command many times. Returns True if no fault was found."""
    no_faults = True
    with tempfile.TemporaryDirectory(prefix="fqvit-faults-") as folder:
        _in_child_process(lambda: jobs.prepare(Path(folder), names))
        for name in names or list(lost_workers.COMMANDS):
            counts, faults = lost_workers.campaign(name, Path(folder), times, seed)
            summary = ", ".join(f"{count} x {outcome}" for outcome, count in sorted(counts.items()))
            print(f"{name:16} {summary}; {len(faults)} faults", flush=True)
            for fault in faults[:5]:
                print(f"  {fault}")
            no_faults = no_faults and not faults
    return no_faults


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("kill", "stop", "lose"))
    parser.add_argument("--times", type=int, default=100, help="repetitions per command (and signal)")
    parser.add_argument("--only", action="append", default=[], help="a command, may be repeated; default: all")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    no_faults = {"kill": kill, "stop": stop, "lose": lose}[given.what](given.only, given.times, given.seed)
    print("no fault" if no_faults else "FAULTS")
    return int(not no_faults)


if __name__ == "__main__":
    sys.exit(main())
