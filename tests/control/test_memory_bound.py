"""A memory limit bounds what is in flight, whatever the link and the machine do."""

from random import Random

from geotrain.control.controller import Controller
from geotrain.pipeline.simulate import Boundary, Direction, PipelineModel, StageTimes, simulate
from geotrain.pipeline.window import classic_windows
from tests.control.measured_line import figures_of

STEPS = 500
ROOM = 4
COUNT = 16


def model_at(step: int) -> PipelineModel:
    """A link whose round trip moves between 20 and 300 ms, and times that vary by a tenth."""
    rng = Random(step)
    way = Direction(latency_s=0.01 if step // 60 % 2 else 0.15, transfer_s=0.008)

    def times(mean_s: float) -> list[float]:
        return [mean_s * rng.uniform(0.9, 1.1) for _ in range(COUNT)]

    stages = [StageTimes(forward_s=times(0.02), backward_s=times(0.04)) for _ in range(2)]
    return PipelineModel(stages=stages, boundaries=[Boundary(forward=way, backward=way)])


def test_a_limit_that_admits_4_in_flight_never_sees_5_over_500_steps():
    controller, windows, peaks = Controller(["virginia", "frankfurt"]), classic_windows(2), set()
    for number in range(1, STEPS + 1):
        model = model_at(number)
        step = simulate(model, num_microbatches=COUNT, windows=windows, rng=Random(number))
        peaks.add(max(step.peak_in_flight))
        change = controller.on_step(
            number,
            figures_of(number, model, step, memory=ROOM),
            windows=windows,
            num_microbatches=COUNT,
            num_samples=64,
        )
        windows = change.plan.windows if change is not None else windows
    assert max(peaks) == ROOM


def test_the_step_is_as_fast_as_four_in_flight_allow():
    """No other windows within the limit are faster in the simulator."""
    model, windows = model_at(0), classic_windows(2)
    controller = Controller(["virginia", "frankfurt"])
    for number in range(1, 6):
        step = simulate(model, num_microbatches=COUNT, windows=windows)
        change = controller.on_step(
            number,
            figures_of(number, model, step, memory=ROOM),
            windows=windows,
            num_microbatches=COUNT,
            num_samples=64,
        )
        windows = change.plan.windows if change is not None else windows
    tried = [(a, b) for a in range(1, ROOM + 1) for b in range(1, ROOM + 1)]
    times_s = [simulate(model, num_microbatches=COUNT, windows=each).step_s for each in tried]
    found_s = simulate(model, num_microbatches=COUNT, windows=windows).step_s
    assert found_s <= min(times_s) * 1.01
    assert max(windows) == ROOM
