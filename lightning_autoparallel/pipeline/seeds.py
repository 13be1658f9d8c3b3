"""What the random draws of captured steps follow from, and torch's generators at a place of their own for a while."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from lightning_autoparallel.torch_compat.generators import generator_state, move_generator

_REMEMBERED = 65536  # states, of which those of the last calls may come again


@dataclass
class Draws:
    """Numbers the runs that draw random numbers: each has a seed made of ``seed``, its number and its batch shard.

    Ranks number alike whatever their generators hold, so that those of one batch shard draw alike, and a resumed run
    goes on with the next number. A module's call leaves the device's generator further on, and where it finds that in
    a state that another call has found, restored or seeded anew, it has that one's number: it draws the same again.
    A run that is resumed knows no states of the run before it.
    """

    seed: int = 0
    count: int = 0
    _numbers: dict[bytes, int] = field(default_factory=dict)  # by the states that calls have found, the oldest first

    @property
    def state(self) -> dict[str, int]:
        """What the next draws follow from: kept in checkpoints, so that a resumed run draws on."""
        return {"seed": self.seed, "draws": self.count}

    @state.setter
    def state(self, state: Mapping[str, int]) -> None:
        self.seed, self.count = state.get("seed", self.seed), state.get("draws", self.count)

    def next_of_call(self, device: torch.device) -> int:
        """The number of a module's call that would draw now."""
        return self._numbers.get(_digest(device), self.count + 1)

    @contextlib.contextmanager
    def of_call(self, shard: int, device: torch.device) -> Iterator[None]:
        """A module's call draws, where torch's generator says."""
        found = _digest(device)
        number = self._numbers.pop(found, None)
        if number is None:
            number = self.count = self.count + 1
        self._numbers[found] = number
        if len(self._numbers) > _REMEMBERED:
            del self._numbers[next(iter(self._numbers))]
        move_generator(device)
        with self._at(number, shard, device):
            yield

    @contextlib.contextmanager
    def of_step(self, shard: int, device: torch.device) -> Iterator[None]:
        """A step of the whole module draws, and leaves torch's generators as they are."""
        self.count += 1
        with self._at(self.count, shard, device):
            yield

    def _at(self, number: int, shard: int, device: torch.device) -> contextlib.AbstractContextManager[None]:
        return generators_at(f"{self.seed} {number} {shard}", device)


@contextlib.contextmanager
def generators_at(text: str, device: torch.device) -> Iterator[None]:
    """The host's generator and the device's are seeded by ``text``, and afterwards what they were.

    Those of other devices stay as they are: ``torch.manual_seed`` would seed them too.
    """
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def _digest(device: torch.device) -> bytes:
    return hashlib.blake2b(generator_state(device).numpy().tobytes(), digest_size=16).digest()
