"""Old checkpoints go only when nobody can need them, whatever is killed when."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geotrain.state.checkpoint import (
    complete_steps,
    load_state,
    newest_common,
    prune,
    save_state,
    superseded,
)

KILLED_WRITER = Path(__file__).with_name("killed_writer.py")
LIMIT_S = 60.0


def put(root, step, region="virginia"):
    save_state(root, region=region, step=step, tensors={"w": torch.ones(2)}, extra={"step": step})


def prune_all(root, saved, *, region="virginia", resumed=None, keep=2):
    return prune(root, region=region, saved=saved, resumed=resumed, keep=keep)


@pytest.mark.parametrize(
    ("complete", "saved", "resumed", "keep", "gone"),
    [
        ([], [], None, 2, []),
        ([1], [1], None, 2, []),
        ([1, 2], [1, 2], None, 2, []),
        ([1, 2, 3], [1, 2, 3], None, 2, [1]),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], None, 3, [1, 2]),
        # Before a resume: older ones of the same run.
        ([1, 2, 3, 4], [4], 3, 2, [1, 2]),
        # 9 was given up for 3: with it counted, 3 would go, which may be the one all have.
        ([2, 3, 4, 9], [4], 3, 2, [2]),
        # What this run did not write and did not resume from is somebody else's.
        ([1, 2, 7, 8], [7, 8], None, 2, []),
        ([5, 6, 7], [6, 7], 4, 2, []),
    ],
)
def test_the_newest_of_this_run_are_kept(complete, saved, resumed, keep, gone):
    assert superseded(complete, saved=saved, resumed=resumed, keep=keep) == gone


@given(
    regions=st.integers(1, 4),
    keep=st.integers(2, 4),
    # Each life of the run: gaps between its saves, and how far its last save got in each region.
    lives=st.lists(
        st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.randoms()), max_size=6
    ),
)
def test_whenever_regions_are_killed_they_resume_from_the_last_save_of_all(regions, keep, lives):
    held: list[dict[int, int]] = [{} for _ in range(regions)]  # attempt by step
    common = None
    for attempt, (gaps, rng) in enumerate(lives):
        found = newest_common([list(own.items()) for own in held])
        assert found == common
        resumed = found[0] if found else None
        step, saved = resumed or 0, [set() for _ in held]
        for number, gap in enumerate(gaps, 1):
            step += gap
            # No region is further than a save ahead of another, and each is killed where it is.
            is_last = number == len(gaps)
            reached = [rng.choice(("none", "saved", "pruned")) for _ in held] if is_last else []
            for index, state in enumerate(reached or ["pruned"] * regions):
                if state != "none":
                    held[index][step] = attempt
                    saved[index].add(step)
                if state == "pruned":
                    for old in superseded(
                        held[index], saved=saved[index], resumed=resumed, keep=keep
                    ):
                        del held[index][old]
            if all(own.get(step) == attempt for own in held):
                common = (step, attempt)
            if is_last:
                break


def test_only_this_regions_steps_go_and_empty_folders_with_them(tmp_path):
    for step in (1, 2, 3):
        put(tmp_path, step)
    put(tmp_path, 2, region="frankfurt")
    (tmp_path / "notes").mkdir()
    assert prune_all(tmp_path, {1, 2, 3}) == [1]
    assert prune_all(tmp_path, {1, 2, 3}) == []
    put(tmp_path, 4)
    assert prune_all(tmp_path, {1, 2, 3, 4}) == [2]
    assert complete_steps(tmp_path, "virginia") == [3, 4]
    assert complete_steps(tmp_path, "frankfurt") == [2]
    names = ["notes", "step-00000002", "step-00000003", "step-00000004"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_damaged_one_counts_for_nothing(tmp_path):
    for step in (1, 2, 3):
        put(tmp_path, step)
    (tmp_path / "step-00000003" / "virginia" / "extra.json").unlink()
    assert prune_all(tmp_path, {1, 2, 3}) == []
    put(tmp_path, 4)
    assert prune_all(tmp_path, {1, 2, 3, 4}) == [1]


def test_what_cannot_be_removed_is_logged_and_tried_again(tmp_path, caplog, monkeypatch):
    for step in (1, 2, 3):
        put(tmp_path, step)

    def refuse(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", refuse)
        prune_all(tmp_path, {1, 2, 3})
    assert "an old checkpoint" in caplog.text and "Permission denied" in caplog.text
    assert complete_steps(tmp_path, "virginia") == [2, 3]
    prune_all(tmp_path, {1, 2, 3})
    assert not (tmp_path / "step-00000001").exists()


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Two runs that saved steps 1 to 4 and were killed in the fourth save; see the script."""
    folder = tmp_path_factory.mktemp("killed")
    subprocess.run([sys.executable, KILLED_WRITER, folder], check=True, timeout=LIMIT_S)
    return folder


@pytest.mark.parametrize(
    ("place", "left"), [("before the first move", [2, 3, 4]), ("between move and removal", [3, 4])]
)
def test_a_kill_around_the_removal_leaves_whole_ones_and_the_next_save_tidies_up(
    killed, place, left
):
    root = killed / place
    assert complete_steps(root, "virginia") == left
    for step in left:
        assert load_state(root, region="virginia", step=step)[1] == {"step": step}
    put(root, 5)
    prune_all(root, {5}, resumed=4)
    assert sorted(path.name for path in root.iterdir()) == ["step-00000004", "step-00000005"]
