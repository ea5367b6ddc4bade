"""Lets the launchers of several machines meet: one hosts a store, the others join it.

The machine that has the address of the rendezvous hosts it (``launch.is_host`` says otherwise).
torch's own rendezvous works on the same store; ours is opened before it, and quietly: torch's would
try for twice its timeout and write C++ stack traces meanwhile.  The host leaves last, as the others
still talk to the store when their ranks have ended.
"""

import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from fusedrec_torchrec.core.lost_rank import first_line
from fusedrec_torchrec.training.config import LaunchConfig
from fusedrec_torchrec.training.network import (
    Interface,
    UnreachableError,
    interface_called,
    interface_towards,
    is_loopback,
    is_this_machine,
    means_loopback,
    wait_until_reachable,
)

__all__ = ["LostMachineError", "Rendezvous", "rendezvous"]

stores: Any = dist  # whose types do not tell of stores
FAREWELL_SECONDS = 10.0
POLL_SECONDS = 0.1
LOOPBACK = "127.0.0.1"


class LostMachineError(RuntimeError):
    """Machines did not find each other, or one of them is gone."""


@contextmanager
def rendezvous(config: LaunchConfig) -> Iterator["Rendezvous"]:
    """Hosts or joins the rendezvous of a job, for as long as the launcher of this machine works.

    Raises:
        ValueError: the settings cannot work on this machine.
        LostMachineError: the machines do not meet, or lose each other.
    """
    meeting = Rendezvous(config)
    try:
        yield meeting
    except SignalException:  # who stops a run does not want to wait
        meeting.leave(last=False)
        raise
    except ChildFailedError:
        meeting.leave()
        raise
    except (RendezvousTimeoutError, RendezvousClosedError) as error:
        problem = meeting.explained(error)
        meeting.leave()
        raise LostMachineError(problem) from error
    except (RendezvousError, DistError) as error:
        raise LostMachineError(meeting.explained(error)) from error
    else:
        meeting.leave()


class Rendezvous:
    """Is what one machine does in a rendezvous.

    Attributes:
        is_host: whether the store lives on this machine, in this process.
        endpoint: where this machine finds the store.
        interface: through which this machine reaches the others.
    """

    def __init__(self, config: LaunchConfig) -> None:
        assert config.rendezvous is not None
        self._config = config
        host, self._port = parse_rendezvous_endpoint(config.rendezvous, default_port=-1)
        mine = is_this_machine(host) if config.is_host is None else config.is_host
        if not mine:
            self._wait_for(host)
        self.interface = self._interface(host)
        store = self._host() if mine else None
        self.is_host = store is not None
        # The host does not depend on how the network leads to its own address.
        self.endpoint = f"{LOOPBACK}:{self._port}" if self.is_host else config.rendezvous
        if store is None:
            store = self._join(host)
        self._store = stores.PrefixStore(f"fusedrec/{config.job}", store)
        self._name = f"{socket.gethostname()} ({self.interface.address})"
        for kind in ("came", "left"):
            self._store.append(kind, "")  # to read what nobody has written would wait
        self._store.append("came", f"{self._name}\n")

    def _host(self) -> Any | None:
        """Opens the store; None if another launcher of this machine has done so."""
        try:
            return stores.TCPStore(
                LOOPBACK,
                self._port,
                is_master=True,
                multi_tenant=True,  # torch's rendezvous asks for it again
                wait_for_workers=False,
                timeout=timedelta(seconds=self._config.timeout_seconds),
            )
        except DistError as error:
            if self._config.is_host:
                raise ValueError(
                    f"launch.is_host is true, but port {self._port} of launch.rendezvous "
                    f"{self._config.rendezvous} cannot be opened on this machine: "
                    f"{first_line(error)}"
                ) from None
            return None

    def _wait_for(self, host: str) -> None:
        def say(problem: str) -> None:
            print(
                f"waiting for the rendezvous at {self._config.rendezvous}: {problem}",
                file=sys.stderr,
                flush=True,
            )

        try:
            wait_until_reachable(host, self._port, self._config.timeout_seconds, say)
        except UnreachableError as error:
            raise self._unreachable(error) from None

    def _join(self, host: str) -> Any:
        timeout = timedelta(seconds=self._config.timeout_seconds)
        try:
            return stores.TCPStore(host, self._port, is_master=False, timeout=timeout)
        except DistError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> LostMachineError:
        return LostMachineError(
            f"cannot reach the rendezvous at {self._config.rendezvous} within "
            f"{self._config.timeout_seconds} s (launch.timeout_seconds): {first_line(error)}. The "
            "machine that has this address hosts it: start the same command there, and see that no "
            "firewall closes the port. If it runs there, but does not know the address as its own, "
            "give it launch.is_host=true"
        )

    def _interface(self, host: str) -> Interface:
        if self._config.interface is not None:
            interface = interface_called(self._config.interface)
            if is_loopback(interface.address) and not means_loopback(host):
                raise ValueError(
                    f"launch.interface is {interface}, where only this machine reaches itself, but "
                    f"launch.nodes is {self._config.nodes}"
                )
            return interface
        try:
            return interface_towards(host)
        except OSError as error:
            raise ValueError(
                f"launch.rendezvous is {self._config.rendezvous!r}, whose host name this machine "
                f"cannot resolve ({error}); give an IP address, or set launch.interface"
            ) from None

    def leave(self, last: bool = True) -> None:
        """Says good-bye.

        Args:
            last: whether a host waits until all others have left, who need its store so long.
        """
        try:
            self._store.append("left", f"{self._name}\n")
            end = time.monotonic() + FAREWELL_SECONDS
            while last and self.is_host and self._present() and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
        except DistError:  # the host is gone already
            pass

    def _present(self) -> list[str]:
        """Returns the machines that have come and not left."""
        came, left = (
            Counter(self._store.get(kind).decode().splitlines()) for kind in ("came", "left")
        )
        return list((came - left).elements())

    def explained(self, error: RendezvousError | DistError) -> str:
        """Returns what an error of torch's rendezvous means, and what to do."""
        config = self._config
        where = f"the rendezvous at {config.rendezvous}"
        if isinstance(error, RendezvousTimeoutError):
            least = config.min_nodes or config.nodes
            text = (
                f"{least} machines should meet at {where}, but within {config.timeout_seconds} s "
                f"(launch.timeout_seconds) there were only {', '.join(self._present())}. Start the "
                f"same command on every machine, with the same launch.job ({config.job}), "
                "launch.nodes and launch.rendezvous"
            )
            if config.is_host:
                text += "; launch.is_host must be true on one of them only"
            return text
        if isinstance(error, RendezvousClosedError):
            return (
                f"the job {config.job} at {where} has ended, or another machine has given it up; "
                "see what that one has written, and start the job again on all machines"
            )
        return (
            f"lost the connection to {where}: the machine that hosts it has ended or cannot be "
            f"reached any more ({first_line(error.__cause__ or error)}). See what it has written; "
            "then start the same command on all machines again, with --resume"
        )
