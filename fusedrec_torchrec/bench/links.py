"""Emulates hosts: network namespaces on a bridge of their own, their links shaped to a rate.

Needs root and iproute2 on Linux.  The machine's own network is left alone: the bridge lives in a
namespace, too.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Host", "hosts", "unavailable"]

BURST = "128kb"
RATE = re.compile(r"\d+(kbit|mbit|gbit)")


@dataclass(frozen=True)
class Host:
    """Says where a rank runs: what its command starts with, and the interface of its traffic."""

    prefix: tuple[str, ...]
    interface: str


def unavailable(link: str) -> str | None:
    """Returns why a link cannot be emulated here; None if it can, or is loopback."""
    if not link:
        return None
    if not RATE.fullmatch(link):
        return f"link is {link!r}, must be empty (loopback) or a rate such as 1gbit or 200mbit"
    if os.geteuid() != 0:
        return f"link {link} needs root, to make network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"link {link} needs {missing[0]} (iproute2)"
    probe = f"fusedrec{os.getpid()}probe"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "netns", "delete", probe)
    except ValueError as error:  # as in a container without the right to do so
        return f"link {link} cannot be emulated: {error}"
    return None


@contextmanager
def hosts(count: int, link: str) -> Iterator[list[Host]]:
    """Gives ``count`` hosts: this machine, or emulated ones that end with the context.

    Raises:
        ValueError: the link cannot be emulated here.
    """
    if not link:
        yield [Host((), "lo")] * count
        return
    reason = unavailable(link)
    if reason is not None:
        raise ValueError(reason)
    lab = f"fusedrec{os.getpid()}"
    switch, names = f"{lab}s", [f"{lab}h{i}" for i in range(count)]
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge0", "up")
        for i, name in enumerate(names):
            _add_host(switch, name, i, link)
        yield [Host(("ip", "netns", "exec", name), "eth0") for name in names]
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _add_host(switch: str, name: str, number: int, link: str) -> None:
    port = f"port{number}"
    _run("ip", "netns", "add", name)
    _run(
        *("ip", "link", "add", "eth0", "netns", name),
        *("type", "veth", "peer", "name", port, "netns", switch),
    )
    _run("ip", "-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _run("ip", "-n", name, "link", "set", device, "up")
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
    shape = ("root", "tbf", "rate", link, "burst", BURST, "latency", "50ms")
    _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", *shape)
    _run("ip", "netns", "exec", switch, "tc", "qdisc", "add", "dev", port, *shape)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
