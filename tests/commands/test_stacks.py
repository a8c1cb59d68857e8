"""What of a stack is shown."""

import sys
import traceback

import pytest

from geotrain.commands import stacks
from geotrain.commands.stacks import shortened


def frame(path: str, name: str) -> str:
    return f'  File "{path}", line 3, in {name}\n    {name}()\n'


TORCH = "/opt/venv/lib/python3.11/site-packages/torch/nn/module.py"


def test_own_frames_and_the_last_two_are_kept_and_the_rest_counted():
    deep = "".join(frame(TORCH, f"call{number}") for number in range(15))
    text = (
        f"thread MainThread\n{frame('<frozen runpy>', 'run')}{frame('/home/me/train.py', 'main')}"
    )
    assert shortened(text + deep).splitlines() == [
        "thread MainThread",
        "  (1 frame left out)",
        *frame("/home/me/train.py", "main").splitlines(),
        "  (13 frames left out)",
        *frame(TORCH, "call13").splitlines(),
        *frame(TORCH, "call14").splitlines(),
    ]


def test_of_many_own_frames_the_innermost_are_kept():
    text = "".join(frame("/home/me/model.py", f"layer{number}") for number in range(9))
    lines = shortened(text).splitlines()
    assert lines[0] == "  (6 frames left out)"
    assert [line.split()[-1] for line in lines[1::2]] == ["layer6", "layer7", "layer8"]


def test_every_thread_is_cut_by_itself():
    threads = [f"thread {n}\n" + frame(TORCH, "a") * 4 for n in ("one", "two")]
    assert shortened("\n".join(threads)).count("  (2 frames left out)\n") == 2


@pytest.mark.parametrize("text", ["", "no answer within 2 s: the process is stopped or swapping"])
def test_what_is_no_stack_stays(text):
    assert shortened(text) == text


def test_a_real_stack_has_this_file_as_the_users_and_the_librarys_as_not():
    text = "".join(traceback.format_stack(sys._getframe()))
    short = shortened(text)
    assert __file__ in short
    assert "frames left out" in short
    assert len(short) < len(text)
    assert not stacks._is_own(f'  File "{stacks.__file__}", line 1, in f')
    assert not stacks._is_own(f'  File "{traceback.__file__}", line 1, in f')
