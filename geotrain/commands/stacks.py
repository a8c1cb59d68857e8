"""A rank's stacks, cut to what a person looks for: where the user's own code is. Pure."""

import sysconfig
from pathlib import Path

import geotrain

_NUM_OWN, _NUM_LAST = 3, 2
_FRAME = '  File "'
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3")
_FOLDERS = (str(Path(geotrain.__file__).parent), sysconfig.get_path("stdlib"))


def shortened(text: str) -> str:
    """The text with the innermost frames of the user's own files, and the last two, of each thread.

    Args:
        text: Threads as `traceback.format_stack` has them, outermost frame first.
    """
    lines: list[str] = []
    frames: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith(_FRAME):
            frames.append([line])
        elif frames and line.startswith("    "):
            frames[-1].append(line)
        else:
            lines += _shown(frames)
            frames = []
            lines.append(line)
    return "\n".join([*lines, *_shown(frames)])


def _shown(frames: list[list[str]]) -> list[str]:
    own = [index for index, frame in enumerate(frames) if _is_own(frame[0])]
    last = range(max(0, len(frames) - _NUM_LAST), len(frames))
    lines: list[str] = []
    before = -1
    for index in sorted({*own[-_NUM_OWN:], *last}):
        left_out = index - before - 1
        if left_out:
            lines.append(f"  ({left_out} frame{'s' if left_out > 1 else ''} left out)")
        lines += frames[index]
        before = index
    return lines


def _is_own(line: str) -> bool:
    path = line.removeprefix(_FRAME).partition('"')[0]
    in_library = any(part in path for part in _LIBRARIES)
    return not (path.startswith("<frozen ") or in_library or path.startswith(_FOLDERS))
