"""The first region's inputs: copies of the microbatches, in whatever order they are asked for."""

import threading

import pytest
import torch

from geotrain.pipeline.inputs import Inputs
from geotrain.pipeline.microbatch import split_batch
from geotrain.pipeline.worker import Worker

CPU = torch.device("cpu")


@pytest.fixture
def worker():
    worker = Worker("geotrain-unpacker")
    yield worker
    worker.close()


@pytest.mark.parametrize("tensor", [torch.zeros(4, 2), torch.zeros(4, 2, 3).transpose(1, 2)])
def test_a_microbatch_that_runs_shares_no_memory_with_the_batch(worker, tensor):
    batch = (tensor, torch.tensor(0.0), None)
    microbatches = split_batch(batch, (2, 2))
    inputs = Inputs(worker=worker, device=CPU)
    inputs.start(microbatches)
    for microbatch in range(2):
        copied = inputs.take(microbatch)
        assert copied[0].stride() == microbatches[0][0].stride() and copied[2] is None
        copied[0].add_(1)
        copied[1].add_(1)
        worker.submit(lambda: None).result(timeout=10)  # the next one is there
    assert batch[0].sum() == batch[1] == 0


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 2, 1, 3], [3, 3, 0, 1]])
def test_each_microbatch_is_the_one_asked_for(worker, order):
    inputs = Inputs(worker=worker, device=CPU)
    inputs.start(split_batch((torch.arange(4.0), None), (1, 1, 1, 1)))
    assert [inputs.take(microbatch)[0].item() for microbatch in order] == order


def test_a_new_batch_forgets_what_was_copied_of_the_old_one(worker):
    inputs = Inputs(worker=worker, device=CPU)
    inputs.start(split_batch((torch.zeros(2), None), (1, 1)))
    inputs.take(0)
    inputs.start(split_batch((torch.ones(2), None), (1, 1)))
    assert inputs.take(1)[0].item() == 1


def test_a_copy_that_waits_behind_something_else_is_made_by_who_needs_it(worker):
    blocked = threading.Event()
    blocker = worker.submit(lambda: blocked.wait(10))
    inputs = Inputs(worker=worker, device=CPU)
    inputs.start(split_batch((torch.arange(2.0), None), (1, 1)))
    assert [inputs.take(0)[0].item(), inputs.take(1)[0].item()] == [0, 1]
    blocked.set()
    assert blocker.result(timeout=10)
