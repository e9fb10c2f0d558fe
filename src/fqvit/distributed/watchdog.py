"""Monitor whether all workers are alive, and end all of them with one line on stderr when one is lost.

A thread of every worker sends a heartbeat to torchrun's key-value store every 0.5 s and looks there for a failure reported by
another worker. It can end the process while the main thread waits inside gloo, where neither signals nor other threads reach
it. Waiting has no time limit: a worker that computes for hours still sends heartbeats. See also: group.py, whose calls fail at
once when the process of another worker has died.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from fqvit.errors import FqvitError
from fqvit.system import files, progress

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# All in seconds.
HEARTBEAT = 0.5
# A worker without a heartbeat for this long is lost. A busy machine or a slow disk may delay heartbeats, but not for that long.
LOST_AFTER = float(os.environ.get("FQVIT_LOST_AFTER", "60"))
SUSPECT_AFTER = 2.0  # replaces LOST_AFTER once a failure is known and only the lost worker must be found
SEARCH = 5.0  # time limit to find the lost worker; torchrun waits 30 s between its SIGTERM and SIGKILL
REPORT = 3.0  # time limit for worker 0 to print the message, as its terminal is the one that users watch
RENDEZVOUS = 300.0  # time limit for all workers to start
ADVICE = "No file was left unfinished; start again."

Handler = Callable[[int, FrameType | None], Any] | int | None
Heartbeats = dict[int, tuple[bytes, float]]  # {rank: (latest heartbeat, time when it was first seen)}


class Watchdog:
    """Watch the other workers from a background thread.

    store: a separate connection to the key-value store, because calls on the same connection wait for each other.
    handler: the SIGTERM handler that `stop` restores.
    """

    def __init__(self, store: Store, rank: int, size: int, handler: Handler) -> None:
        self._handler = handler
        self._store, self.rank, self.size = store, rank, size
        self._beats = 0
        self._heartbeats: Heartbeats = {}
        self._finished = False
        self._stopped = threading.Event()
        self._ending = threading.Lock()
        self._checked = time.monotonic()

    def wait_for_all(self) -> None:
        """Wait until all workers have started. Must be called by the main thread, before `start`."""
        me = f"{socket.gethostname()}, process {os.getpid()}"
        self._beat()
        self._store.set(f"who/{self.rank}", me)
        keys = [f"who/{rank}" for rank in range(self.size)]
        end = time.monotonic() + RENDEZVOUS
        while not self._store.check(keys):  # not Store.wait, inside which Python handles no signals
            if time.monotonic() > end:
                here = sum(self._store.check([key]) for key in keys)
                raise FqvitError(
                    f"workers: {here} of {self.size} started within {RENDEZVOUS:.0f} seconds."
                    " Start all of them, with the same MASTER_ADDR and MASTER_PORT."
                )
            time.sleep(0.05)

    def start(self) -> None:
        """Start the threads, and take over SIGTERM until `stop`."""
        self._wakeup, self._signals = socket.socketpair()
        self._signals.setblocking(False)
        # Python's C handler writes the signal to the socket at once, even while the main thread is inside gloo.
        # The Python handler only keeps SIGTERM from ending the process.
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="fqvit-watchdog", daemon=True)
        self._thread.start()
        threading.Thread(target=self._guard, name="fqvit-guard", daemon=True).start()

    def finish(self) -> None:
        """Tell the watchdog that this worker is done: from now on worker 0 may exit and take the store with it."""
        self._finished = True

    def stop(self) -> None:
        """Stop the threads, and restore the handler of SIGTERM."""
        self._stopped.set()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, self._handler)
        self._signals.send(b"\0")
        self._thread.join()
        self._signals.close()
        self._wakeup.close()

    def fail(self, message: str) -> NoReturn:
        """End all workers with this message, or with that of another worker if it has already reported a failure."""
        self._end_once()
        if self.rank:
            message = f"worker {self.rank} on {socket.gethostname()}: {message}"
        self._fail(message)

    def report_loss(self, reason: str) -> NoReturn:
        """End all workers after a failed connection: find the lost worker, or the failure that another worker reported."""
        self._end_once()
        try:
            end, heartbeats = time.monotonic() + SEARCH, Heartbeats()
            others = [rank for rank in range(self.size) if rank != self.rank]
            while time.monotonic() < end and not self._store.check(["failed"]):
                self._beat()
                for rank in self._silent(others, SUSPECT_AFTER, heartbeats):
                    self._fail(self._lost_message(rank))
                time.sleep(HEARTBEAT / 2)
        except RuntimeError:
            pass  # the store is gone, which `_fail` reports
        self._fail(f"{reason} {ADVICE}")

    def _run(self) -> None:
        while not self._stopped.is_set():
            ready, _, _ = select.select([self._wakeup], [], [], HEARTBEAT)
            received = self._wakeup.recv(64) if ready else b""
            if signal.SIGINT in received:
                time.sleep(1.0)  # the main thread ends the process itself, unless it waits inside gloo
                self._end(130)
            if signal.SIGTERM in received:
                self.report_loss("a worker was lost, or all of them were terminated (SIGTERM).")
            try:
                self._beat()
                if self._store.check(["failed"]):
                    self._end_once()
                    self._fail("")
                # Worker 0 watches all others and they watch worker 0, to keep the load on the store low.
                watched = range(1, self.size) if self.rank == 0 else [0]
                silent = self._silent(watched, LOST_AFTER, self._heartbeats)
                message = self._lost_message(silent[0]) if silent else ""
            except RuntimeError:
                if not self._stopped.wait(REPORT if self._finished else 0.0):
                    self._end_once()
                    self._fail_without_store()
                return
            if message and not self._stopped.is_set():
                self._end_once()
                self._fail(message)
            self._checked = time.monotonic()

    def _guard(self) -> None:
        """End the process if a call to the store hangs, as it does when the store's machine has disappeared."""
        late = 0
        while not self._stopped.wait(5.0):
            # Require two late checks in a row: if the whole process was suspended, the first check is late, too.
            late = late + 1 if time.monotonic() - self._checked > LOST_AFTER + REPORT + SEARCH else 0
            if late > 1:
                self._fail_without_store()

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self.rank}", str(self._beats))

    def _silent(self, ranks: Sequence[int], after: float, heartbeats: Heartbeats) -> list[int]:
        """Return the workers without a new heartbeat for `after` seconds."""
        now = time.monotonic()
        for rank, beat in zip(ranks, self._store.multi_get([f"beat/{rank}" for rank in ranks]), strict=True):
            if rank not in heartbeats or heartbeats[rank][0] != beat:
                heartbeats[rank] = (beat, now)
        return [rank for rank in ranks if now - heartbeats[rank][1] > after]

    def _lost_message(self, rank: int) -> str:
        who = self._store.get(f"who/{rank}").decode()
        return f"worker {rank} ({who}) was lost: it was killed, ran out of memory, or its machine is gone. {ADVICE}"

    def _fail(self, message: str) -> NoReturn:
        """Report a failure to all workers, print the first one reported, and end. message: empty if one is reported already."""
        try:
            reason = self._store.compare_set("failed", "", message).decode() if message else self._store.get("failed").decode()
            end = time.monotonic() + REPORT
            while self.rank and time.monotonic() < end and not self._store.check(["printed"]):
                time.sleep(0.05)
            me = str(self.rank)
            if self._store.compare_set("printed", "", me).decode() == me:
                _print(reason)
            if self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                time.sleep(3 * HEARTBEAT)  # the store is in this process, and other workers must still read the message
        except RuntimeError:
            self._fail_without_store()
        self._end(2)

    def _fail_without_store(self) -> NoReturn:
        """End the process. Workers cannot agree on who prints: the first on each machine does; without LOCAL_RANK, worker 1."""
        local = os.environ.get("LOCAL_RANK")
        if local == "0" or (local is None and self.rank == 1):
            _print(f"worker 0 or its machine was lost: the workers cannot reach each other any more. {ADVICE}")
        self._end(2)

    def _end_once(self) -> None:
        """Let only the first thread that calls this end the process. Any other thread waits for the end."""
        if not self._ending.acquire(blocking=False):
            time.sleep(LOST_AFTER + SEARCH + REPORT)  # enough to find the lost worker and to print the message
            self._end(2)

    def _end(self, code: int) -> NoReturn:
        files.remove_unfinished()
        progress.abandon_bars()
        if sys.stderr is not None:
            sys.stderr.flush()
        os._exit(code)  # the main thread may be inside gloo, which no exception can interrupt


def _print(line: str) -> None:
    """Print the error of the command. The process ends right after this, so the command line cannot do it."""
    progress.abandon_bars()
    os.write(2, f"fqvit: {' '.join(line.split())}\n".encode())
