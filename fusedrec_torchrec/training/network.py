"""Finds the network interface of this machine that leads to another machine.

A machine's own host name does not tell: Debian lets it resolve to 127.0.1.1, and a machine may have
several networks.  The kernel knows: it chooses a source address for every destination, and that
address belongs to an interface.
"""

import ctypes
import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = [
    "Interface",
    "UnreachableError",
    "interface_called",
    "interface_towards",
    "is_loopback",
    "is_this_machine",
    "means_loopback",
    "wait_until_reachable",
]

ANYWHERE = "192.0.2.1"  # reserved for documentation (RFC 5737): only the default route leads there
IFF_UP = 1
LONGEST_ATTEMPT_SECONDS = 5.0
PAUSE_SECONDS = 0.2


class UnreachableError(RuntimeError):
    """An address did not answer in time; the text says why."""


@dataclass(frozen=True)
class Interface:
    """Is a network interface of this machine, and the address that others reach it at."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


def interface_called(name: str, setting: str = "launch.interface") -> Interface:
    """Returns the interface with a name.

    Args:
        name: of the interface.
        setting: where the name comes from, for the error.

    Raises:
        ValueError: there is none of this name, or it has no address.
    """
    interfaces = _interfaces()
    for interface in interfaces:
        if interface.name == name:
            return interface
    problem = "has no address" if name in _names() else "is not an interface of this machine"
    raise ValueError(f"{setting} is {name!r}, which {problem}; there are {_listed(interfaces)}")


def interface_towards(host: str) -> Interface:
    """Returns the interface whose traffic goes to ``host``, or that has the address of ``host``.

    Args:
        host: name or address of a machine, which may be this one.

    Raises:
        OSError: the name cannot be resolved.
        ValueError: no interface leads there, or it cannot be told which one other machines reach.
    """
    interfaces, targets = _interfaces(), _resolved(host)
    for target in targets:
        source = _source_address(target)
        if source is None or (is_loopback(target) and not means_loopback(host)):
            continue
        for interface in interfaces:
            if interface.address == source:
                return interface
    if not any(map(is_loopback, targets)):
        raise ValueError(
            f"no interface of this machine leads to {host} ({', '.join(targets)}); there are "
            f"{_listed(interfaces)}. Check launch.rendezvous and the routes, or set "
            "launch.interface"
        )
    # The name is this machine's own and resolves to loopback, where others cannot reach it.
    outward = [interface for interface in interfaces if not is_loopback(interface.address)]
    by_default = [
        interface for interface in outward if interface.address == _source_address(ANYWHERE)
    ]
    choice = by_default or outward
    if len({interface.name for interface in choice}) != 1:
        raise ValueError(
            f"{host} resolves to loopback ({targets[0]}) on this machine, and it cannot be told at "
            f"which address others reach it: set launch.interface; there are {_listed(interfaces)}"
        )
    return choice[0]


def is_this_machine(host: str) -> bool:
    """Tells whether a name or an address is one of this machine's own."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        targets = _resolved(host)
    except OSError:  # others may be able to resolve it, but this machine knows its own name
        return False
    return any(is_loopback(target) or _source_address(target) == target for target in targets)


def wait_until_reachable(
    host: str, port: int, seconds: float, on_wait: Callable[[str], None] = lambda problem: None
) -> None:
    """Waits until something listens at an address.

    Args:
        host: its name or address.
        port: its port.
        seconds: how long to wait at most.
        on_wait: is told once why the first attempt failed.

    Raises:
        UnreachableError: nothing answered in time.
    """
    end = time.monotonic() + seconds
    first = True
    while True:
        try:
            limit = min(max(end - time.monotonic(), 0.1), LONGEST_ATTEMPT_SECONDS)
            socket.create_connection((host, port), limit).close()
            return
        except OSError as error:
            problem = _explained(error)
        if time.monotonic() >= end:
            raise UnreachableError(problem)
        if first:
            on_wait(problem)
            first = False
        time.sleep(PAUSE_SECONDS)


def _explained(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "its name cannot be resolved"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(error, TimeoutError):
        return "there is no answer"
    return (error.strerror or str(error)).lower()


def _resolved(host: str) -> list[str]:
    return list(
        dict.fromkeys(
            str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        )
    )


def is_loopback(address: str) -> bool:
    """Tells whether an address is one of loopback."""
    return ipaddress.ip_address(address).is_loopback


def means_loopback(host: str) -> bool:
    """Tells whether the user wants loopback; a host name may only happen to resolve to it."""
    try:
        return is_loopback(host)
    except ValueError:
        return host == "localhost"


def _source_address(target: str) -> str | None:
    """Returns the address that packets to ``target`` carry; ``target`` itself if it is our own."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # to connect it sends nothing
        try:
            probe.connect((target, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _listed(interfaces: list[Interface]) -> str:
    return ", ".join(map(str, interfaces)) or "none"


def _names() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


class _Address(ctypes.Structure):
    """Is ``struct sockaddr``, as long as that of IPv6."""

    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _Entry(ctypes.Structure):
    """Is ``struct ifaddrs``; the fields that follow are not needed."""


_Entry._fields_ = (
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_Address)),
)


def _interfaces() -> list[Interface]:
    """Returns every address of every interface that is up, IPv4 first, without link-local ones."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Entry)()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    by_family: dict[int, list[Interface]] = {socket.AF_INET: [], socket.AF_INET6: []}
    entry = first
    while entry:
        info = entry.contents
        if info.flags & IFF_UP and info.address:
            family = info.address.contents.family
            where = {socket.AF_INET: slice(2, 6), socket.AF_INET6: slice(6, 22)}.get(family)
            if where is not None:
                raw = bytes(info.address.contents.data[where])
                if not ipaddress.ip_address(raw).is_link_local:
                    address = socket.inet_ntop(family, raw)
                    by_family[family].append(Interface(info.name.decode(), address))
        entry = info.next
    libc.freeifaddrs(first)
    return [interface for interfaces in by_family.values() for interface in interfaces]
