"""The worker's thread: one, whoever asks for it, and gone once it is closed."""

import threading

import pytest

from geotrain.pipeline.worker import Worker


def finish(worker):
    """Until everything submitted so far is done."""
    worker.submit(lambda: None).result(timeout=10)


def test_what_is_given_is_done_in_that_order():
    worker, done = Worker("geotrain-packer"), []
    for number in range(100):
        worker.submit(lambda number=number: done.append(number))
    worker.close()
    assert done == list(range(100))


def test_what_a_call_raises_comes_out_of_its_future_and_ends_nothing():
    worker = Worker("geotrain-packer")
    with pytest.raises(ZeroDivisionError):
        worker.submit(lambda: 1 / 0).result(timeout=10)
    assert worker.submit(lambda: 7).result(timeout=10) == 7
    worker.close()


def test_threads_that_ask_at_once_share_one():
    for _ in range(50):
        worker, idents = Worker("geotrain-packer"), set()
        barrier = threading.Barrier(4)

        def ask(worker=worker, idents=idents, barrier=barrier):
            barrier.wait(10)
            worker.submit(lambda: idents.add(threading.get_ident()))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        finish(worker)
        worker.close()
        assert len(idents) == 1


def test_close_ends_the_thread():
    worker = Worker("geotrain-packer")
    worker.close()
    before = threading.active_count()
    finish(worker)
    assert threading.active_count() == before + 1
    worker.close()
    assert threading.active_count() == before
