"""The worker's side of :mod:`~brace_rl.tasks.math.workers`.

Run as ``python -m brace_rl.tasks.math.worker FD CPU_S MEMORY_MB``. Reads ``[given, gold]`` as JSON from the pipe and
answers one byte, until the pipe is closed.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from multiprocessing.connection import Connection

READY, SAME, DIFFERENT, OUT_OF_MEMORY = b"r", b"1", b"0", b"m"


def serve(connection: Connection, cpu_s: float, memory_mb: int) -> None:
    """Answer until the other end is closed."""
    from brace_rl.tasks.math.equivalence import prove

    logging.disable(logging.CRITICAL)  # math-verify warns about every answer it cannot read
    prove("x+1", "1+x")  # the first call compiles regular expressions and builds a parser
    limit = memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # Not handled: the kernel ends the process even where the interpreter would not get to run a handler.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    connection.send_bytes(READY)
    while True:
        try:
            given, gold = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answer = _answer(given, gold)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(answer)


def _answer(given: str, gold: str) -> bytes:
    from brace_rl.tasks.math.equivalence import prove

    try:
        return SAME if prove(given, gold) else DIFFERENT
    except MemoryError:
        return OUT_OF_MEMORY
    except Exception:  # whatever a parser does with a hostile answer, the answer is not the gold one
        return DIFFERENT


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), float(sys.argv[2]), int(sys.argv[3]))
