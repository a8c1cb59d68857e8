"""A thread for what need not hold up the one that computes: packing and unpacking tensors."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")
_Task = tuple[Callable[[], Any], "Future[Any]"]

_CLOSE_LIMIT_S = 5.0


class Worker:
    """One thread that does what it is given, in that order; it starts with the first task."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], Result]) -> "Future[Result]":
        """Have `call` done; what it raises comes out of the future. From any thread."""
        future: Future[Result] = Future()
        with self._lock:
            if self._thread is None:
                # Not an executor's thread: those refuse work as soon as the process begins to end,
                # and a message may come later than that.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._tasks.put((call, future))
        return future

    def close(self) -> None:
        """End the thread once it has done what it was given."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._tasks.put(None)
        if thread is not None:
            thread.join(_CLOSE_LIMIT_S)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            _do(*task)
            del task  # or these tensors would live until the next ones come


def _do(call: Callable[[], Any], future: "Future[Any]") -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as exc:  # raised where the result is asked for
            future.set_exception(exc)
