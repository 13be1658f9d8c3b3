"""Torch's default generators, read and put back whatever modes a trace has entered."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


def generator_states() -> dict[str, Tensor]:
    """The state of the CPU's generator, and of every CUDA one that is in use."""
    with _disable_current_modes():
        states = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states |= {f"cuda:{i}": torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())}
        return states


def restore_generators(states: dict[str, Tensor]) -> str | None:
    """Put back the states of generators that moved on; the name of one that did."""
    moved = None
    with _disable_current_modes():
        for name, now in generator_states().items():
            if name in states and not torch.equal(states[name], now):
                moved = name
                torch.set_rng_state(states[name]) if name == "cpu" else torch.cuda.set_rng_state(states[name], name)
    return moved


def generator_state(device: torch.device) -> Tensor:
    """The state of the device's generator, on the host; the device is not waited for."""
    with _disable_current_modes():
        return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """The device's generator goes on from a state that one of its kind had."""
    with _disable_current_modes():
        torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)


def move_generator(device: torch.device) -> None:
    """Draw one number from the device's generator."""
    with _disable_current_modes():
        torch.empty((), dtype=torch.int64, device=device).random_()
