"""Launchers that meet at a store: who hosts it, who leaves last, what is said when they do not."""

import socket
import time
from typing import Any

import pytest

from fusedrec_torchrec.training.config import LaunchConfig
from fusedrec_torchrec.training.rendezvous import LostMachineError, Rendezvous, rendezvous


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def launch(port: int, **changes: Any) -> LaunchConfig:
    settings = {"nodes": 2, "timeout_seconds": 5, "rendezvous": f"127.0.0.1:{port}", **changes}
    return LaunchConfig(**settings)


def test_the_machine_that_has_the_address_hosts_and_others_join() -> None:
    config = launch(free_port())
    host, other = Rendezvous(config), Rendezvous(launch(host_port(config), is_host=False))
    assert (host.is_host, other.is_host) == (True, False)
    assert host.interface.name == other.interface.name == "lo"
    other.leave()
    host.leave()


def host_port(config: LaunchConfig) -> int:
    assert config.rendezvous is not None
    return int(config.rendezvous.rpartition(":")[2])


def test_the_host_leaves_last(monkeypatch: pytest.MonkeyPatch) -> None:
    config = launch(free_port())
    host, other = Rendezvous(config), Rendezvous(launch(host_port(config), is_host=False))
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        """What the host does while it waits."""
        pauses.append(seconds)
        if len(pauses) == 3:
            other.leave()

    monkeypatch.setattr(time, "sleep", pause)
    host.leave()
    assert len(pauses) == 3


def test_who_stops_a_run_does_not_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    config = launch(free_port())
    host, other = Rendezvous(config), Rendezvous(launch(host_port(config), is_host=False))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits"))
    host.leave(last=False)
    other.leave()


def test_a_second_host_is_refused() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"launch.is_host is true, but port {port}"):
            Rendezvous(launch(port, is_host=True))


def test_nobody_hosts_the_rendezvous(capsys: pytest.CaptureFixture[str]) -> None:
    config = launch(free_port(), is_host=False, timeout_seconds=1)
    with pytest.raises(LostMachineError, match="nothing listens there"), rendezvous(config):
        pytest.fail("it does")
    assert "waiting for the rendezvous at 127.0.0.1" in capsys.readouterr().err


def test_a_name_that_cannot_be_resolved() -> None:
    config = launch(1, rendezvous="no-such-machine.invalid:29500", timeout_seconds=1)
    with pytest.raises(LostMachineError, match="its name cannot be resolved"):
        Rendezvous(config)


def test_loopback_is_no_interface_for_several_machines() -> None:
    config = launch(1, rendezvous="192.0.2.1:29500", is_host=True, interface="lo")
    with pytest.raises(ValueError, match=r"launch.interface is lo \(127.0.0.1\), where only this"):
        Rendezvous(config)


@pytest.mark.parametrize("port", [0, 65536])
def test_ports_out_of_range(port: int) -> None:
    with pytest.raises(ValueError, match="must be host:port with a port from 1 to 65535"):
        launch(port)
