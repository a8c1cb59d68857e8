"""The live view on a terminal: drawn over the whole of it, and given back as it was."""

import os
import time
from collections.abc import Mapping

from rich.console import Console, RenderableType
from rich.live import Live

from geotrain.lab.demo.state import RunState
from geotrain.lab.demo.view import MIN_HEIGHT, MIN_WIDTH, frame


def can_show(console: Console, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this is a terminal that can be drawn on, large enough for the view."""
    # rich also takes FORCE_COLOR for a terminal; whether the cursor can move is another question.
    if not console.file.isatty() or console.is_dumb_terminal or not environment.get("TERM"):
        return False
    width, height = console.size
    return width >= MIN_WIDTH and height >= MIN_HEIGHT


class LiveScreen:
    """Shows the state until it is stopped; then the last frame stays, as text like any other."""

    def __init__(self, state: RunState, console: Console) -> None:
        self._state = state
        self._console = console
        self._live = Live(
            console=console,
            screen=True,  # a terminal that changes its size then needs no repair
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def start(self) -> None:
        self._live.start()
        self.draw()

    def draw(self) -> None:
        self._live.update(self._frame(), refresh=True)

    def stop(self) -> None:
        """Give the terminal back; a second call does nothing. OSError where it is gone."""
        if self._live.is_started:
            self._live.stop()
            self._console.print(self._frame())

    def _frame(self) -> RenderableType:
        width, height = self._console.size
        return frame(
            self._state,
            width=width,
            height=height,
            now=time.monotonic(),
            ascii_only=self._console.options.ascii_only,
        )
