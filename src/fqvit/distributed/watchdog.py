"""Whether all workers still live, and the one line that ends them all when one does not.

A thread of every worker sends a beat to the store that torchrun keeps, and looks for bad news there. It can end the process
while the main thread waits inside gloo, which heeds neither signals nor other threads. Waiting itself has no time limit: a
worker that computes for hours still beats. Neighbour: group.py, whose calls fail at once where a worker's process has died.
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

BEAT = 0.5  # seconds
# Seconds without a beat: longer than a busy machine or a slow disk may hold a thread up.
LOST_AFTER = float(os.environ.get("FQVIT_LOST_AFTER", "60"))
SILENT_AFTER = 2.0  # the same when something is known to be wrong, and the question is only who it was
DECIDE = 5.0  # seconds to find that out; torchrun allows 30 between its SIGTERM and SIGKILL
SPEAK = 3.0  # seconds for the first worker to say it, whose terminal people look at
ARRIVE = 300.0  # seconds for all workers to start
AGAIN = "No file was left unfinished; start again."

Handler = Callable[[int, FrameType | None], Any] | int | None
Known = dict[int, tuple[bytes, float]]  # of other workers: the latest beat, and when it was new


class Watchdog:
    """store: a connection of its own, since a store's calls wait for each other. handler: of SIGTERM, for the time after."""

    def __init__(self, store: Store, rank: int, size: int, handler: Handler) -> None:
        self._handler = handler
        self._store, self.rank, self.size = store, rank, size
        self._beats = 0
        self._known: Known = {}
        self._leaving = False
        self._stopped = threading.Event()
        self._ending = threading.Lock()
        self._stepped = time.monotonic()

    def arrive(self) -> None:
        """Waits for all others. Must be called by the main thread, before `start`."""
        me = f"{socket.gethostname()}, process {os.getpid()}"
        self._beat()
        self._store.set(f"who/{self.rank}", me)
        everybody = [f"who/{rank}" for rank in range(self.size)]
        end = time.monotonic() + ARRIVE
        while not self._store.check(everybody):  # not `wait`, inside which no signal is heeded
            if time.monotonic() > end:
                here = sum(self._store.check([each]) for each in everybody)
                raise FqvitError(
                    f"{here} of {self.size} workers came within {ARRIVE:.0f} seconds. Start all of them, with one address."
                )
            time.sleep(0.05)

    def start(self) -> None:
        self._bell, self._ringer = socket.socketpair()
        self._ringer.setblocking(False)
        # The C handler rings the bell at once, whatever the main thread does; the Python handler keeps SIGTERM from ending us.
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(self._ringer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="fqvit-watch", daemon=True)
        self._thread.start()
        threading.Thread(target=self._guard, name="fqvit-guard", daemon=True).start()

    def leave(self) -> None:
        """All work is done but that of others, so that from now on the store may go with worker 0."""
        self._leaving = True

    def stop(self) -> None:
        self._stopped.set()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, self._handler)
        self._ringer.send(b"\0")
        self._thread.join()
        self._ringer.close()
        self._bell.close()

    def fail(self, message: str) -> NoReturn:
        """The reason why all must end, if nobody had one before."""
        self._end_once()
        if self.rank:
            message = f"worker {self.rank} on {socket.gethostname()}: {message}"
        self._fail(message)

    def lost(self, reason: str) -> NoReturn:
        """Something went wrong between workers: finds out who has gone, or who has said why."""
        self._end_once()
        try:
            end, known = time.monotonic() + DECIDE, Known()
            while time.monotonic() < end and not self._store.check(["failed"]):
                self._beat()
                for rank in self._silent([other for other in range(self.size) if other != self.rank], SILENT_AFTER, known):
                    self._fail(self._obituary(rank))
                time.sleep(BEAT / 2)
        except RuntimeError:
            pass  # `_fail` will find the same
        self._fail(f"{reason} {AGAIN}")

    def _run(self) -> None:
        while not self._stopped.is_set():
            ready, _, _ = select.select([self._bell], [], [], BEAT)
            rung = self._bell.recv(64) if ready else b""
            if signal.SIGINT in rung:
                time.sleep(1.0)  # the main thread ends by itself, unless it waits for others
                self._end(130)
            if signal.SIGTERM in rung:
                self.lost("a worker was lost, or somebody stopped them all (SIGTERM).")
            try:
                self._beat()
                if self._store.check(["failed"]):
                    self._end_once()
                    self._fail("")
                # The first looks at everybody and everybody at the first, so that the store is not asked too much.
                watched = range(1, self.size) if self.rank == 0 else [0]
                silent = self._silent(watched, LOST_AFTER, self._known)
                news = self._obituary(silent[0]) if silent else ""
            except RuntimeError:
                if not self._stopped.wait(SPEAK if self._leaving else 0.0):
                    self._end_once()
                    self._without_store()
                return
            if news and not self._stopped.is_set():
                self._end_once()
                self._fail(news)
            self._stepped = time.monotonic()

    def _guard(self) -> None:
        """A store on a machine that has vanished does not even fail."""
        late = 0
        while not self._stopped.wait(5.0):
            # Twice, as a process that was held up as a whole is late here, too.
            late = late + 1 if time.monotonic() - self._stepped > LOST_AFTER + SPEAK + DECIDE else 0
            if late > 1:
                self._without_store()

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self.rank}", str(self._beats))

    def _silent(self, ranks: Sequence[int], after: float, known: Known) -> list[int]:
        """Those whose beat has been the same for so many seconds."""
        now = time.monotonic()
        for rank, beat in zip(ranks, self._store.multi_get([f"beat/{rank}" for rank in ranks]), strict=True):
            if rank not in known or known[rank][0] != beat:
                known[rank] = (beat, now)
        return [rank for rank in ranks if now - known[rank][1] > after]

    def _obituary(self, rank: int) -> str:
        who = self._store.get(f"who/{rank}").decode()
        return f"worker {rank} ({who}) was lost: it was killed, ran out of memory, or its machine is gone. {AGAIN}"

    def _fail(self, message: str) -> NoReturn:
        try:
            reason = self._store.compare_set("failed", "", message).decode() if message else self._store.get("failed").decode()
            patience = time.monotonic() + SPEAK
            while self.rank and time.monotonic() < patience and not self._store.check(["said"]):
                time.sleep(0.05)
            speaker = str(self.rank)
            if self._store.compare_set("said", "", speaker).decode() == speaker:
                _say(reason)
            if self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                time.sleep(3 * BEAT)  # the store is in this process, and others must still read the news
        except RuntimeError:
            self._without_store()
        self._end(2)

    def _without_store(self) -> NoReturn:
        # Nobody can settle who speaks: one worker a machine does, or where we do not know machines, the second worker.
        local = os.environ.get("LOCAL_RANK")
        if local == "0" or (local is None and self.rank == 1):
            _say(f"worker 0 or its machine was lost: the workers cannot reach each other any more. {AGAIN}")
        self._end(2)

    def _end_once(self) -> None:
        """The first thread to come here ends the process; any other waits for that."""
        if not self._ending.acquire(blocking=False):
            time.sleep(LOST_AFTER + DECIDE + SPEAK)  # enough to find out who was lost and to say so
            self._end(2)

    def _end(self, code: int) -> NoReturn:
        files.remove_unfinished()
        progress.abandon_bars()
        if sys.stderr is not None:
            sys.stderr.flush()
        os._exit(code)  # the main thread may be inside gloo, from where nothing brings it back


def _say(line: str) -> None:
    """The last words of all workers, and so the only ones that a library may write."""
    progress.abandon_bars()
    os.write(2, f"fqvit: {' '.join(line.split())}\n".encode())
