"""Which tensors a DCP folder holds, read without running anything that is in it.

DCP pickles its `.metadata`, and unpickling runs whatever a pickle names. A checkpoint may come from
a shared bucket, so only the names that DCP writes are let through; what has passed here may then be
read by DCP itself. (The tensors themselves DCP loads with weights_only.)
"""

import dataclasses
import enum
import importlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from geotrain.state.errors import CheckpointError

_DCP_PACKAGE = "torch.distributed.checkpoint."
_PATH_NAMES = frozenset({"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"})


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, name: str) -> Any:
        if module_name == "torch" and name == "Size":
            return torch.Size
        if module_name == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module_name == "torch.serialization" and name == "_get_layout":  # a table look-up
            return super().find_class(module_name, name)
        # 3.13 moved the classes to pathlib._local
        if module_name in ("pathlib", "pathlib._local") and name in _PATH_NAMES:
            return super().find_class(module_name, name)
        if module_name.startswith(_DCP_PACKAGE):
            found = getattr(importlib.import_module(module_name), name, None)
            if isinstance(found, type) and (
                dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)
            ):
                return found
        raise pickle.UnpicklingError(f"it names {module_name}.{name}, which DCP never writes")


def read_tensor_layout(path: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Name -> (dtype, shape) of all tensors, from DCP's metadata file at `path`.

    Raises:
        CheckpointError: The file is missing, damaged, or holds what it should not.
    """
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except FileNotFoundError as exc:
        raise CheckpointError(f"{path} is missing; resume from another step") from exc
    # A damaged pickle can fail in any of these ways.
    except (
        pickle.UnpicklingError,
        AttributeError,
        EOFError,
        ImportError,
        IndexError,
        KeyError,
        OSError,
        TypeError,
        ValueError,
    ) as exc:
        raise CheckpointError(
            f"{path} cannot be read ({type(exc).__name__}: {exc}); resume from another step"
        ) from exc
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} is not what DCP writes; resume from another step")
    layout = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(
                f'{path}: "{name}" is not a tensor; this folder was not written by geotrain'
            )
        layout[name] = (entry.properties.dtype, entry.size)
    return layout
