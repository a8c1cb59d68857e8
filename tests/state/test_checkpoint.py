"""A step is on the disk whole or not at all, and comes back bit for bit."""

import json
import logging
import shutil
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

from geotrain.errors import ConfigError, GeotrainError
from geotrain.state import checkpoint
from geotrain.state.checkpoint import (
    check_names,
    complete_saves,
    complete_steps,
    load_state,
    newest_common,
    save_state,
)
from geotrain.state.errors import CheckpointError
from geotrain.state.packing import pack_object, unpack_object

DTYPES = (
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.complex64,
)


def put(root: Path, step: int, region: str = "virginia", value: float = 1.0) -> Path:
    return save_state(
        root,
        region=region,
        step=step,
        tensors={"model/w": torch.full((3, 2), value)},
        extra={"value": value},
    )


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path):
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for dtype in DTYPES:
        high = 2 if dtype == torch.bool else 256
        raw = torch.randint(0, high, (24 * 16,), dtype=torch.uint8, generator=generator)
        flat = raw.view(dtype)
        tensors[f"model/layers.0/{dtype}"] = flat[:24].view(2, 3, 4)
        tensors[f"scalar/{dtype}"] = flat[30]
        tensors[f"empty/{dtype}"] = flat[:0].view(0, 5)
    tensors["strided"] = torch.arange(20.0).view(4, 5).t()[1:3]
    tensors["parameter"] = torch.nn.Parameter(torch.tensor([0.0, -0.0, float("nan")]))
    save_state(tmp_path, region="virginia", step=3, tensors=tensors, extra={})
    loaded, _ = load_state(tmp_path, region="virginia", step=3)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(loaded[name]) == bits(tensor), name


def test_the_rest_comes_back_exactly(tmp_path):
    tensors, node = pack_object(
        {
            "lr": 0.1 + 0.2,
            "best": float("inf"),
            "milestones": Counter({3: 1}),
            "rng": torch.ones(2),
        },
        "scheduler.0",
    )
    save_state(tmp_path, region="a", step=1, tensors=tensors, extra={"s": node, "text": "é\n"})
    loaded, extra = load_state(tmp_path, region="a", step=1)
    state = unpack_object(loaded, extra["s"])
    assert state["lr"] == 0.1 + 0.2 and state["best"] == float("inf")
    assert state["milestones"] == Counter({3: 1})
    assert extra["text"] == "é\n"


def test_no_tensors_at_all_is_a_checkpoint_too(tmp_path):
    save_state(tmp_path, region="a", step=0, tensors={}, extra={"n": 1})
    assert load_state(tmp_path, region="a", step=0) == ({}, {"n": 1})


def test_the_layout_is_the_documented_one(tmp_path):
    folder = put(tmp_path, 500)
    assert folder == tmp_path / "step-00000500" / "virginia"
    assert sorted(path.name for path in folder.iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "extra.json",
        "meta.json",
    ]
    meta = json.loads((folder / "meta.json").read_text())
    assert (meta["format"], meta["region"], meta["step"]) == (1, "virginia", 500)
    assert set(meta["files"]) == {".metadata", "__0_0.distcp", "extra.json"}


def test_saving_and_loading_warn_of_nothing_and_leave_filters_alone(tmp_path):
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        put(tmp_path, 1)
        load_state(tmp_path, region="virginia", step=1)
    assert caught == []
    assert warnings.filters == before


def test_regions_share_a_root_and_each_sees_its_own_steps(tmp_path):
    put(tmp_path, 20)
    put(tmp_path, 3)
    put(tmp_path, 20, region="frankfurt", value=2.0)
    assert complete_steps(tmp_path, "virginia") == [3, 20]
    assert complete_steps(tmp_path, "frankfurt") == [20]
    assert load_state(tmp_path, region="frankfurt", step=20)[1] == {"value": 2.0}


def test_a_root_that_is_not_there_has_no_steps(tmp_path):
    assert complete_steps(tmp_path / "none", "virginia") == []


def test_the_same_step_is_replaced(tmp_path):
    put(tmp_path, 1, value=1.0)
    put(tmp_path, 1, value=2.0)
    assert load_state(tmp_path, region="virginia", step=1)[1] == {"value": 2.0}
    assert [path.name for path in (tmp_path / "step-00000001").iterdir()] == ["virginia"]


@pytest.mark.parametrize("crash_at", ("save", "write_json", "write_manifest", "_put_in_place"))
def test_a_crash_while_writing_leaves_the_old_step(tmp_path, monkeypatch, crash_at):
    put(tmp_path, 1, value=1.0)

    def crash(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, crash_at, crash)
    with pytest.raises(KeyboardInterrupt):
        put(tmp_path, 1, value=2.0)
    monkeypatch.undo()
    assert complete_steps(tmp_path, "virginia") == [1]
    assert load_state(tmp_path, region="virginia", step=1)[1] == {"value": 1.0}
    put(tmp_path, 2)  # takes leftovers away
    assert [path.name for path in (tmp_path / "step-00000001").iterdir()] == ["virginia"]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path):
    folder = put(tmp_path, 1, value=1.0)
    folder.rename(folder.with_name(".virginia.replaced"))
    assert complete_steps(tmp_path, "virginia") == [1]
    assert load_state(tmp_path, region="virginia", step=1)[1] == {"value": 1.0}
    put(tmp_path, 1, value=2.0)
    assert load_state(tmp_path, region="virginia", step=1)[1] == {"value": 2.0}
    assert [path.name for path in folder.parent.iterdir()] == ["virginia"]


def test_leftovers_of_a_killed_writer_are_no_step_and_go_away(tmp_path):
    leftover = tmp_path / "step-00000001" / ".virginia.writing"
    shutil.copytree(put(tmp_path, 5), leftover)
    assert complete_steps(tmp_path, "virginia") == [5]
    put(tmp_path, 6)
    assert not leftover.exists()


def spoil_bit(folder: Path) -> None:
    raw = bytearray((folder / "__0_0.distcp").read_bytes())
    raw[len(raw) // 2] ^= 1
    (folder / "__0_0.distcp").write_bytes(raw)


def spoil_length(folder: Path) -> None:
    (folder / "__0_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes()[:-1])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "meta.json").unlink(), "meta.json is missing"),
        (lambda f: (f / "meta.json").write_text("{"), "meta.json cannot be read"),
        (lambda f: (f / "meta.json").write_text("[]"), "meta.json is not a checkpoint's list"),
        (lambda f: (f / "extra.json").unlink(), "extra.json is missing"),
        (lambda f: (f / ".metadata").unlink(), ".metadata is missing"),
        (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (spoil_length, "__0_0.distcp has "),
        (spoil_bit, "__0_0.distcp is damaged"),
    ],
)
def test_damage_is_named_with_file_and_remedy(tmp_path, spoil, message):
    spoil(put(tmp_path, 1))
    with pytest.raises(CheckpointError) as caught:
        load_state(tmp_path, region="virginia", step=1)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "resume from another step" in str(caught.value)


def test_a_broken_step_is_left_out_and_logged(tmp_path, caplog):
    put(tmp_path, 1)
    spoil_length(put(tmp_path, 2))
    with caplog.at_level(logging.WARNING):
        assert complete_steps(tmp_path, "virginia") == [1]
    assert "checkpoint of step 2 is left out" in caplog.text


def test_a_missing_step_names_those_that_are_there(tmp_path):
    put(tmp_path, 250)
    put(tmp_path, 500)
    with pytest.raises(CheckpointError, match=r"is missing; whole .* virginia .*: 250, 500$"):
        load_state(tmp_path, region="virginia", step=400)
    with pytest.raises(CheckpointError, match=r"frankfurt under .*: none$"):
        load_state(tmp_path, region="frankfurt", step=250)


def test_another_regions_folder_is_refused(tmp_path):
    folder = put(tmp_path, 1)
    folder.rename(folder.with_name("frankfurt"))
    with pytest.raises(CheckpointError, match=r"region virginia's state, wanted region frankfurt"):
        load_state(tmp_path, region="frankfurt", step=1)
    assert complete_steps(tmp_path, "frankfurt") == []


def test_a_renamed_step_is_refused(tmp_path):
    put(tmp_path, 1).parent.rename(tmp_path / "step-00000002")
    with pytest.raises(CheckpointError, match="this is step 1, the folder says step 2"):
        load_state(tmp_path, region="virginia", step=2)


def test_a_newer_format_is_refused_by_name(tmp_path):
    path = put(tmp_path, 1) / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2, "geotrain": "9.1"}))
    with pytest.raises(CheckpointError, match=r"format 2, written by geotrain 9\.1"):
        load_state(tmp_path, region="virginia", step=1)


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"region virginia: step 1 cannot be saved under"):
        put(tmp_path / "file", 1)


def test_a_full_disk_under_dcp_is_one_error(tmp_path, monkeypatch):
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        put(tmp_path, 1)
    monkeypatch.undo()
    assert complete_steps(tmp_path, "virginia") == []
    assert list((tmp_path / "step-00000001").iterdir()) == []


def test_a_value_that_is_no_tensor_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"model/_extra_state: a dict cannot be saved"):
        save_state(tmp_path, region="a", step=1, tensors={"model/_extra_state": {}}, extra={})


def test_errors_are_geotrain_errors():
    assert issubclass(CheckpointError, GeotrainError)


@pytest.mark.parametrize(
    ("sets", "newest"),
    [
        ([], None),
        ([[(1, 7), (2, 7), (3, 7)]], (3, 7)),
        ([[(1, 7), (2, 7), (3, 7)], [(2, 7), (1, 7)]], (2, 7)),
        ([[(500, 7)], [(1000, 7)]], None),
        ([[(1, 7), (2, 7)], []], None),
        ([((0, 7),), {(0, 7), (5, 7)}], (0, 7)),
        # Step 3 was saved by one attempt here, and there by one that went back to step 2.
        ([[(2, 7), (3, 7)], [(2, 7), (3, 8)]], (2, 7)),
        ([[(2, 7), (3, 0)], [(2, 7), (3, 0)]], (3, 0)),
    ],
)
def test_the_newest_common_step_is_the_largest_that_all_hold_of_one_attempt(sets, newest):
    assert newest_common(sets) == newest


def test_a_checkpoint_says_which_attempt_wrote_it(tmp_path):
    save_state(tmp_path, region="a", step=1, attempt=2**63 - 1, tensors={}, extra={})
    save_state(tmp_path, region="a", step=2, tensors={}, extra={})
    assert complete_saves(tmp_path, "a") == [(1, 2**63 - 1), (2, 0)]
    save_state(tmp_path, region="a", step=2, attempt=5, tensors={}, extra={})
    assert complete_saves(tmp_path, "a")[1] == (2, 5)
    meta = tmp_path / "step-00000002" / "a" / "meta.json"
    meta.write_text(meta.read_text().replace('"attempt": 5', '"attempt": "five"'))
    assert complete_saves(tmp_path, "a") == [(1, 2**63 - 1)]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"b": torch.ones(2)}, "only in the checkpoint: a; only in this script: b"),
        ({"a": torch.ones(3)}, r'"a" is torch.float32 (2,) in the checkpoint and'),
        ({"a": torch.ones(2).half()}, "torch.float16 (2,) in this script's model"),
    ],
)
def test_tensors_of_another_model_are_named(wanted, message):
    with pytest.raises(CheckpointError) as caught:
        check_names({"a": torch.ones(2)}, wanted, region="virginia", what="model, step 500")
    assert message in str(caught.value)
    assert str(caught.value).startswith("region virginia, model, step 500: ")


def test_tensors_of_the_same_model_pass():
    check_names({"a": torch.ones(2)}, {"a": torch.zeros(2)}, region="virginia", what="model")
