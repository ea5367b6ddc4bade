"""Python programs in processes that have nothing to import: they are forked from one that has.

``fusedrec train`` spends five seconds on imports, and so does each of its ranks.  ``interpreter``
gives the path of a stand-in for ``python``: ``-m module``, ``-c code`` and scripts run as they
would there, with arguments, environment, folder, standard streams and exit code of their own, and
what they start by ``sys.executable`` runs in the same way.

What a cold start may change is not seen here: the environment at the time of imports (such as
``PYTHONHASHSEED``), the process tree, a process that is stopped.  Tests of these use
``sys.executable``.

Files: ``forks`` is the process with all imports, ``server`` forks from it what is to become a
``program``, ``client`` is the stand-in.
"""

import atexit
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.warm.client import SOCKET
from tests.warm.forks import CONTEXT
from tests.warm.server import serve

__all__ = ["interpreter"]

CLIENT = Path(__file__).with_name("client.py")


@cache
def interpreter() -> str:
    """Starts the server on the first call; it ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="warm"))  # a short name: those of sockets are limited
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    executable, address = folder / "python", folder / SOCKET
    executable.write_text(f"#!{sys.executable} -IS\n{CLIENT.read_text()}")
    executable.chmod(0o755)
    ready, begun = CONTEXT.Pipe(duplex=False)
    # No daemon: these may not start processes.
    server = CONTEXT.Process(target=serve, args=(str(address), str(executable), begun))
    server.start()
    atexit.register(server.terminate)
    begun.close()
    ready.recv()  # it listens
    return str(executable)
