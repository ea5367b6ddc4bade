"""Starts the process group of a run, whose ranks may be on several machines.

On several machines, gloo by itself listens where the machine's own name leads, which may be
loopback, and a rank that nobody can connect to waits for five times the timeout.  So ranks choose
the interface that leads to rank 0 (``launch.interface`` says otherwise), meet at the store, and
each machine tries to reach the next one, before gloo or NCCL begin.  What one of them finds, all
of them raise.
"""

import json
import os
import socket
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fusedrec_torchrec.training.config import LaunchConfig
from fusedrec_torchrec.training.network import (
    Interface,
    UnreachableError,
    interface_called,
    interface_towards,
    wait_until_reachable,
)
from fusedrec_torchrec.training.rendezvous import LostMachineError

__all__ = ["init_process_group"]

stores: Any = dist  # whose types do not tell of stores
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
LONGEST_PROBE_SECONDS = 10.0
ACK_SECONDS = 3.0


def init_process_group(config: LaunchConfig, backend: str) -> None:
    """Starts the process group that the environment describes; all ranks must call it.

    Raises:
        ValueError: no interface of this machine leads to the others.
        LostMachineError: ranks did not come, or machines cannot reach each other.
    """
    if config.interface is not None:
        os.environ[GLOO] = config.interface
        os.environ[NCCL] = f"={config.interface}"  # this one, not all that begin so
    timeout = timedelta(seconds=config.timeout_seconds)
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks == int(os.environ.get("LOCAL_WORLD_SIZE", ranks)):
        dist.init_process_group(backend, timeout=timeout)
        return
    store = _store(config)
    _Meeting(stores.PrefixStore("fusedrec/machines", store), config).check()
    dist.init_process_group(
        backend,
        store=stores.PrefixStore("default_pg", store),
        rank=int(os.environ["RANK"]),
        world_size=ranks,
        timeout=timeout,
    )


def _choose_interface(config: LaunchConfig) -> Interface:
    """Returns the interface through which this rank talks.

    It is that of the settings, or of the environment, or the one that leads to rank 0.
    """
    if config.interface is not None:
        return interface_called(config.interface)
    if GLOO in os.environ:
        return interface_called(os.environ[GLOO].partition(",")[0], GLOO)
    interface = interface_towards(os.environ["MASTER_ADDR"])
    os.environ[GLOO] = interface.name  # NCCL finds its interfaces by itself, and may use several
    return interface


def _store(config: LaunchConfig) -> Any:
    """Connects to the store of all ranks, which a launcher or rank 0 hosts."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if by_launcher or int(os.environ["RANK"]) != 0:
        try:
            wait_until_reachable(host, port, config.timeout_seconds)
        except UnreachableError as error:
            raise LostMachineError(
                f"{_this_rank()} cannot reach the store of rank 0 at {host}:{port} within "
                f"{config.timeout_seconds} s (launch.timeout_seconds): {error}. {_ADVICE}"
            ) from None
    timeout = timedelta(seconds=config.timeout_seconds)
    store = next(iter(stores.rendezvous("env://", timeout=timeout)))[0]
    store.set_timeout(timeout)
    return store


_ADVICE = (
    "Set launch.interface to the one that leads to the other machines, on each machine if names "
    "differ, and see that no firewall closes its ports"
)


def _this_rank() -> str:
    return f"rank {os.environ['RANK']} on {socket.gethostname()}"


@dataclass(frozen=True)
class _Rank:
    """Holds what a rank says of itself.

    Args:
        name: with its machine.
        interface: through which it talks, with the address.
        address: at which it can be reached.
        port: at which it listens during the meeting.
        speaks: whether it stands for its machine.
        problem: why it has no address; None if it has one.
    """

    name: str
    interface: str = ""
    address: str = ""
    port: int = 0
    speaks: bool = False
    problem: str | None = None


class _Meeting:
    """Ranks find out through the store that all are there and that machines reach each other.

    Args:
        store: of all ranks, for this meeting only.
        config: of the launch.
    """

    def __init__(self, store: Any, config: LaunchConfig) -> None:
        self._store, self._config = store, config
        self._rank, self._ranks = int(os.environ["RANK"]), range(int(os.environ["WORLD_SIZE"]))

    def check(self) -> None:
        """Checks that all ranks are there, and that machines reach each other.

        Raises:
            LostMachineError: the same on all ranks that are there.
        """
        try:
            problem = self._first_problem()
        except dist.DistError as error:
            raise LostMachineError(
                f"{_this_rank()} lost the store of rank 0 at {os.environ['MASTER_ADDR']} while "
                "ranks met; see what rank 0 has written"
            ) from error
        if problem is not None:
            raise LostMachineError(problem)

    def _first_problem(self) -> str | None:
        """Returns the problem of the lowest rank that has one."""
        with ExitStack() as stack:
            me = self._introduction(stack)
            self._say("here", asdict(me))
            said = self._hear("here", self._ranks, self._config.timeout_seconds)
            here = {rank: _Rank(**values) for rank, values in said.items()}
            self._say("found", self._problem(me, here))
            # All must have tried before this rank does not listen any more.
            problems = self._hear("found", here, 2 * LONGEST_PROBE_SECONDS)
        self._say("heard", True)
        if self._rank == 0:  # the store may live here
            self._hear("heard", here, ACK_SECONDS)
        return next((text for _, text in sorted(problems.items()) if text is not None), None)

    def _introduction(self, stack: ExitStack) -> _Rank:
        """Listens, until the stack ends, where others will look for this rank."""
        try:
            interface = _choose_interface(self._config)
        except ValueError as error:
            return _Rank(_this_rank(), problem=str(error))
        family = socket.AF_INET6 if ":" in interface.address else socket.AF_INET
        listener = socket.create_server((interface.address, 0), family=family)
        stack.enter_context(listener)
        return _Rank(
            _this_rank(),
            str(interface),
            interface.address,
            listener.getsockname()[1],
            speaks=os.environ.get("LOCAL_RANK") == "0",
        )

    def _problem(self, me: _Rank, here: dict[int, _Rank]) -> str | None:
        """Returns what is wrong as far as this rank can tell; None if nothing is."""
        missing = [rank for rank in self._ranks if rank not in here]
        if missing:
            return self._missing(missing, here)
        if any(rank.problem for rank in here.values()):
            return me.problem and f"{me.name}: {me.problem}"
        speakers = [rank for rank in self._ranks if here[rank].speaks]
        if self._rank not in speakers:
            return None
        following = here[speakers[(speakers.index(self._rank) + 1) % len(speakers)]]
        seconds = min(LONGEST_PROBE_SECONDS, self._config.timeout_seconds)
        try:
            wait_until_reachable(following.address, following.port, seconds)
        except UnreachableError as error:
            return (
                f"{me.name} talks through {me.interface} and cannot reach {following.name}, which "
                f"talks through {following.interface}: {error}. {_ADVICE}"
            )
        return None

    def _missing(self, missing: list[int], here: dict[int, _Rank]) -> str:
        came = ", ".join(rank.name for _, rank in sorted(here.items()))
        return (
            f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} did not come "
            f"within {self._config.timeout_seconds} s (launch.timeout_seconds); there are {came}. "
            "See what the other machines have written: they may be unable to reach this one at "
            f"{os.environ['MASTER_ADDR']} (launch.interface), or need longer to start"
        )

    def _say(self, what: str, value: Any) -> None:
        self._store.set(f"{what}/{self._rank}", json.dumps(value))

    def _hear(self, what: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """Returns what ranks have said, when all have spoken or the time is over."""
        keys = {rank: f"{what}/{rank}" for rank in ranks}
        try:
            self._store.wait(list(keys.values()), timedelta(seconds=seconds))
        except dist.DistStoreError:  # not all
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        values = self._store.multi_get(list(keys.values()))
        return {rank: json.loads(value) for rank, value in zip(keys, values, strict=True)}
