"""Interfaces and addresses of the machine that the test runs on."""

import socket

import pytest

from fusedrec_torchrec.training import network
from fusedrec_torchrec.training.network import (
    Interface,
    interface_called,
    interface_towards,
    is_this_machine,
)

LOOPBACK = Interface("lo", "127.0.0.1")
FIRST, SECOND = Interface("eth0", "198.51.100.7"), Interface("eth1", "203.0.113.7")


def test_interfaces_by_name() -> None:
    assert interface_called("lo") == LOOPBACK
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME is 'no', .* lo \(127.0.0.1\)"):
        interface_called("no", "GLOO_SOCKET_IFNAME")


def test_every_address_of_this_machine_is_its_own() -> None:
    for interface in network._interfaces():
        assert is_this_machine(interface.address)
        assert interface_towards(interface.address) == interface


def test_addresses_of_others() -> None:
    assert not is_this_machine("192.0.2.1")
    assert not is_this_machine("no-such-machine.invalid")
    assert is_this_machine("localhost") and is_this_machine(socket.gethostname())


def resolve_to_loopback(patch: pytest.MonkeyPatch, *interfaces: Interface) -> None:
    patch.setattr(network, "_resolved", lambda host: ["127.0.1.1"])
    patch.setattr(network, "_interfaces", lambda: [LOOPBACK, *interfaces])


def test_a_name_that_resolves_to_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to_loopback(monkeypatch, FIRST)
    monkeypatch.setattr(network, "_source_address", {"127.0.1.1": "127.0.0.1"}.get)
    assert interface_towards("machine0") == FIRST
    assert interface_towards("127.0.1.1") == LOOPBACK


def test_the_default_route_decides_between_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to_loopback(monkeypatch, FIRST, SECOND)
    routes = {network.ANYWHERE: SECOND.address}
    monkeypatch.setattr(network, "_source_address", routes.get)
    assert interface_towards("machine0") == SECOND
    routes.clear()
    with pytest.raises(ValueError, match=r"set launch.interface; there are .*eth0.*eth1"):
        interface_towards("machine0")


def test_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_source_address", lambda target: None)
    with pytest.raises(ValueError, match=r"no interface of this machine leads to 192.0.2.1"):
        interface_towards("192.0.2.1")
