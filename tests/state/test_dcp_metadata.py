"""DCP's metadata is a pickle; only what DCP itself writes gets through."""

import os
import pickle
import subprocess

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from geotrain.state.checkpoint import save_state
from geotrain.state.dcp_metadata import read_tensor_layout
from geotrain.state.errors import CheckpointError


def test_dtype_and_shape_of_every_tensor(tmp_path):
    tensors = {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.tensor(True)}
    folder = save_state(tmp_path, region="r", step=1, tensors=tensors, extra={})
    assert read_tensor_layout(folder / ".metadata") == {
        "a": (torch.bfloat16, torch.Size([2, 3])),
        "b": (torch.bool, torch.Size([])),
    }


class Runs:
    def __init__(self, function, *args):
        self._call = function, args

    def __reduce__(self):
        return self._call


@pytest.mark.parametrize(
    "payload",
    [
        Runs(os.system, "true"),
        Runs(eval, "1"),
        Runs(subprocess.Popen, ["true"]),
        Runs(torch.load, "x"),
        Runs(torch.hub.load, "x", "y"),
    ],
    ids=("system", "eval", "popen", "torch.load", "hub"),
)
def test_a_pickle_that_would_run_something_is_refused(tmp_path, payload):
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(payload))
    with pytest.raises(CheckpointError, match="which DCP never writes"):
        read_tensor_layout(path)


@pytest.mark.parametrize(
    "name",
    ["os.system", "pickle.loads", "os", "FileSystem.rename", "_split_by_size_and_type"],
)
def test_what_dcps_own_modules_import_is_refused_too(tmp_path, name):
    path = tmp_path / ".metadata"
    module = b"torch.distributed.checkpoint.filesystem"
    path.write_bytes(
        b"\x80\x04"
        + b"\x8c" + bytes([len(module)]) + module
        + b"\x8c" + bytes([len(name)]) + name.encode()
        + b"\x93."
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="which DCP never writes"):
        read_tensor_layout(path)


@pytest.mark.parametrize("raw", (b"", b"\x80", b"garbage", b"\x80\x04K\x01.", pickle.dumps([1])))
def test_damage_is_a_checkpoint_error(tmp_path, raw):
    path = tmp_path / ".metadata"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"resume from another step"):
        read_tensor_layout(path)


def test_a_missing_file_is_a_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError, match="is missing"):
        read_tensor_layout(tmp_path / ".metadata")


def test_entries_that_are_no_tensors_are_refused(tmp_path):
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(Metadata(state_dict_metadata={"x": BytesStorageMetadata()})))
    with pytest.raises(CheckpointError, match='"x" is not a tensor'):
        read_tensor_layout(path)
