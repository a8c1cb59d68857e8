"""The sites of a lab without namespaces: all on this machine's loopback, joined by relays."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from geotrain.lab.emulator.relay import Relay
from geotrain.lab.emulator.shaper import Wire
from geotrain.lab.settings import Direction, LinkSettings, Topology, joined, path_between

HOST = "127.0.0.1"


class RelayedSites:
    """A relay for each way that programs ask for; needs a running event loop."""

    def __init__(
        self,
        sites: Sequence[str],
        topology: Topology,
        links: Mapping[Direction, LinkSettings],
        *,
        seed: int,
    ) -> None:
        self._sites = list(sites)
        self._topology = topology
        self._links = dict(links)
        self._seed = seed
        self._relays: dict[tuple[str, str, int], Relay] = {}
        self._wires = {way: Wire() for way in itertools.permutations(sites, 2)}
        """Of a way over several links too, which so does not compete with those on a part of it."""
        self._number = 0

    async def open_route(self, source: str, target: str, port: int) -> tuple[str, int, int]:
        """Where `source` dials to reach `port` of `target`; with port 0, `aim` says it later.

        Returns host, port and the number by which `aim` knows the route.
        """
        self._number += 1
        wires = self._wires[target, source], self._wires[source, target]
        relay = Relay(*self._both_ways(source, target), seed=self._seed + self._number, wires=wires)
        self._relays[source, target, self._number] = relay
        own_port = await relay.start(HOST)
        if port:
            relay.aim(HOST, port)
        return HOST, own_port, self._number

    def aim(self, number: int, port: int) -> None:
        for (_, _, own), relay in self._relays.items():
            if own == number:
                relay.aim(HOST, port)

    async def close_route(self, number: int) -> None:
        for key in [key for key in self._relays if key[2] == number]:
            await self._relays.pop(key).close()

    def change(self, direction: Direction, settings: LinkSettings) -> None:
        self._links[direction] = settings
        for (source, target, _), relay in self._relays.items():
            relay.change(*self._both_ways(source, target))

    def counters(self, direction: Direction) -> dict[str, Any]:
        """Bytes delivered over routes that pass this direction."""
        total = 0
        for (source, target, _), relay in self._relays.items():
            back, forward = relay.num_bytes
            total += forward if direction in self._path(source, target) else 0
            total += back if direction in self._path(target, source) else 0
        return {"payload_bytes": total}

    async def close(self) -> None:
        await asyncio.gather(*(relay.close() for relay in self._relays.values()))

    def _both_ways(self, source: str, target: str) -> tuple[LinkSettings, LinkSettings]:
        forward, back = self._path(source, target), self._path(target, source)
        return joined(self._links[way] for way in forward), joined(self._links[way] for way in back)

    def _path(self, source: str, target: str) -> list[Direction]:
        return path_between(source, target, self._sites, self._topology)
