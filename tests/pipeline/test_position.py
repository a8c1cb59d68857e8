import torch
from torch.utils.data import DataLoader, TensorDataset

from geotrain.pipeline.position import Position


def shuffled(generator=None):
    return DataLoader(
        TensorDataset(torch.arange(12)), batch_size=2, shuffle=True, generator=generator
    )


def take(batches, num):
    return [next(batches)[0].tolist() for _ in range(num)]


def resume_after(position, loader, num):
    """The batches that follow `num` taken ones, in a position restored from a checkpoint."""
    batches = position.start(loader)
    taken = take(batches, num)
    random = torch.get_rng_state()
    saved = (position.counters(), position.loader_state(), position.started_with())
    rest = take(batches, 6 - num)
    return taken, rest, saved, random


def test_a_plain_loader_is_wound_forward_to_the_same_shuffle():
    torch.manual_seed(3)
    _, rest, (counters, state, started), random = resume_after(Position(), shuffled(), 4)
    torch.manual_seed(99)  # another process
    again = Position()
    again.restore(counters, loader=None, loader_state=state, started_with=started)
    torch.set_rng_state(random)
    batches = again.start(shuffled())
    assert take(batches, 2) == rest
    assert again.batches == 6
    assert torch.equal(torch.get_rng_state(), random)


def test_a_loaders_own_generator_is_restored_too():
    loader = shuffled(torch.Generator().manual_seed(5))
    _, rest, (counters, state, started), _ = resume_after(Position(), loader, 3)
    again = Position()
    again.restore(counters, loader=None, loader_state=state, started_with=started)
    batches = again.start(shuffled(torch.Generator().manual_seed(77)))
    assert take(batches, 3) == rest


class Stateful:
    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 6:
            self.at += 1
            yield (torch.tensor(self.at),)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_a_loader_with_its_own_state_is_restored_by_it():
    _, rest, (counters, state, started), _ = resume_after(Position(), Stateful(), 4)
    again, loader = Position(), Stateful()
    again.restore(counters, loader=loader, loader_state=state, started_with=started)
    assert take(again.start(loader), 2) == rest


def test_skipped_steps_consume_their_samples():
    position = Position()
    position.advance(samples=8, committed=True)
    position.advance(samples=3, committed=False)
    assert position.counters() | {"batches": 0} == {
        "step": 2,
        "samples": 11,
        "skipped_steps": 1,
        "batches": 0,
    }
