"""The devices that tables live on and ranks compute on."""

from typing import Literal, get_args

__all__ = ["DEVICES", "Device"]

Device = Literal["cpu", "cuda"]
DEVICES: tuple[Device, ...] = get_args(Device)
