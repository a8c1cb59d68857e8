"""The random parts of a link: which segments are lost, and how long jitter holds a packet."""

import math
from random import Random

_FAR_AWAY = 1e15
"""Beyond this a number has no fraction, and it may be infinite."""


class Loss:
    """Independent losses, drawn as the distance to the next one: cheap where they are rare."""

    def __init__(self, probability: float, rng: Random) -> None:
        self._rng = rng
        self.change(probability)

    def change(self, probability: float) -> None:
        """From now on; the distance to the next loss has no memory, so it is drawn anew."""
        self._probability = probability
        self._spared = self._draw()

    def among(self, num_segments: int) -> list[int]:
        """The indexes of those lost of the next `num_segments`, ascending."""
        lost = []
        position = self._spared
        while position < num_segments:
            lost.append(int(position))
            position += 1 + self._draw()
        self._spared = position - num_segments
        return lost

    def _draw(self) -> float:
        """How many are spared before the next loss: geometric."""
        if self._probability <= 0:
            return math.inf
        if self._probability >= 1:
            return 0
        spared = math.log(1.0 - self._rng.random()) / math.log1p(-self._probability)
        return spared if spared > _FAR_AWAY else math.floor(spared)


class Jitter:
    """A delay that comes and goes: half-normal, a new draw each time its own length has passed.

    Drawn for each packet, a busy link that keeps order would show the largest of many draws all
    the time, which is a longer delay and no jitter.
    """

    def __init__(self, deviation_s: float, rng: Random) -> None:
        self._rng = rng
        self.change(deviation_s)

    def change(self, deviation_s: float) -> None:
        self._deviation_s = deviation_s
        self._extra_s = 0.0
        self._until = -math.inf

    def at(self, now: float) -> float:
        if self._deviation_s == 0.0:
            return 0.0
        if now >= self._until:
            self._extra_s = abs(self._rng.gauss(0.0, self._deviation_s))
            self._until = now + self._deviation_s
        return self._extra_s
