"""Lines of stages for tests that simulate."""

from random import Random

from hypothesis import strategies as st

from geotrain.control.ideal import Costs
from geotrain.pipeline.simulate import (
    Boundary,
    Direction,
    PipelineModel,
    Simulated,
    StageTimes,
    simulate,
)
from geotrain.pipeline.window import windows_for_latency

MIB_S = 2**20 / 125e6
"""1 MiB over 1 Gbit/s."""
TIMES = st.floats(0.001, 0.1)


def line(costs: Costs, **direction: object) -> PipelineModel:
    """The same figures as `costs`, each direction of a boundary alike."""
    ways = [
        Direction(latency_s=latency_s, transfer_s=transfer_s, **direction)  # type: ignore[arg-type]
        for latency_s, transfer_s in zip(costs.latency_s, costs.transfer_s, strict=True)
    ]
    return PipelineModel(
        stages=[
            StageTimes(forward_s=[f], backward_s=[b])
            for f, b in zip(costs.forward_s, costs.backward_s, strict=True)
        ],
        boundaries=[Boundary(forward=way, backward=way) for way in ways],
    )


def noisy(
    costs: Costs, rng: Random, *, jitter_s: float, late_from: int = 0, late_s: float = 0.0
) -> PipelineModel:
    """A line whose every time varies by 20 %, and deliveries by `jitter_s` more.

    Args:
        late_from, late_s: From this microbatch on, what each takes longer, as where the link
            changes in mid-step.
    """
    count = costs.num_microbatches

    def varied(value_s: float) -> list[float]:
        return [value_s * rng.uniform(0.8, 1.2) for _ in range(count)]

    late = [late_s if index >= late_from else 0.0 for index in range(count)]
    ways = [
        Direction(
            latency_s=latency_s,
            transfer_s=transfer_s,
            jitter_s=[rng.uniform(0.0, jitter_s) + each for each in late],
        )
        for latency_s, transfer_s in zip(costs.latency_s, costs.transfer_s, strict=True)
    ]
    return PipelineModel(
        stages=[
            StageTimes(forward_s=varied(f), backward_s=varied(b))
            for f, b in zip(costs.forward_s, costs.backward_s, strict=True)
        ],
        boundaries=[Boundary(forward=way, backward=way) for way in ways],
    )


def hiding(costs: Costs) -> tuple[int, ...]:
    delays_s = [sum(each) for each in zip(costs.latency_s, costs.transfer_s, strict=True)]
    return windows_for_latency(delays_s, delays_s, slowest_s=costs.slowest_s)


def run(costs: Costs, windows: tuple[int, ...], **direction: object) -> Simulated:
    model = line(costs, **direction)
    return simulate(model, num_microbatches=costs.num_microbatches, windows=windows)


def equal_stages(num_stages: int, *, one_way_s: float, num_microbatches: int = 32) -> Costs:
    return Costs(
        num_microbatches=num_microbatches,
        forward_s=[0.02] * num_stages,
        backward_s=[0.04] * num_stages,
        latency_s=[one_way_s] * (num_stages - 1),
        transfer_s=[MIB_S] * (num_stages - 1),
    )


UNEQUAL = Costs(
    num_microbatches=32,
    forward_s=[0.010, 0.020, 0.015],
    backward_s=[0.020, 0.040, 0.030],
    latency_s=[0.05, 0.05],
    transfer_s=[0.0084, 0.0084],
)


@st.composite
def any_costs(draw: st.DrawFn, *, equal: bool = False, link_keeps_up: bool = False) -> Costs:
    num_stages = draw(st.integers(1, 4))

    def times(count: int, values: st.SearchStrategy[float]) -> list[float]:
        return [draw(values)] * count if equal else [draw(values) for _ in range(count)]

    forward_s, backward_s = times(num_stages, TIMES), times(num_stages, TIMES)
    slowest_s = max(f + b for f, b in zip(forward_s, backward_s, strict=True))
    transfers = st.floats(0.0, slowest_s / 2 if link_keeps_up else 0.2)
    return Costs(
        num_microbatches=draw(st.integers(1, 32)),
        forward_s=forward_s,
        backward_s=backward_s,
        latency_s=[draw(st.floats(0.0, 0.3)) for _ in range(num_stages - 1)],
        transfer_s=[draw(transfers) for _ in range(num_stages - 1)],
    )
