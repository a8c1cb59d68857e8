"""The folder of one region at one step: its names, and meta.json, which says that it is whole.

meta.json is written last and lists every other file with size and hash. DCP does not notice a
flipped bit in a tensor file, and a bit is what this project promises to keep.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from geotrain.state.errors import CheckpointError

FORMAT = 1
META_NAME = "meta.json"
EXTRA_NAME = "extra.json"

_STEP_NAME = re.compile(r"step-(\d{8,})")
_HASH_CHUNK_BYTES = 1 << 22


def step_folder(root: Path, step: int) -> Path:
    assert step >= 0, "steps count from 0"
    return root / f"step-{step:08d}"


def region_folder(root: Path, step: int, region: str) -> Path:
    return step_folder(root, step) / region


def writing_folder(root: Path, step: int, region: str) -> Path:
    """Where a checkpoint is written before it is one."""
    return step_folder(root, step) / f".{region}.writing"


def replaced_folder(root: Path, step: int, region: str) -> Path:
    """Where the old one waits while the new one of the same step takes its place."""
    return step_folder(root, step) / f".{region}.replaced"


def dropped_folder(root: Path, step: int, region: str) -> Path:
    """Where an old one goes in one move before its files are removed one by one."""
    return step_folder(root, step) / f".{region}.dropped"


def existing_folder(root: Path, step: int, region: str) -> Path | None:
    """The folder to read: the region's, or the replaced one if a crash came between two renames."""
    for folder in (region_folder(root, step, region), replaced_folder(root, step, region)):
        if folder.is_dir():
            return folder
    return None


def steps_in(root: Path) -> list[int]:
    """Every step with a folder under `root`, ascending, whole or not. An absent root has none."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise CheckpointError(f"{root} cannot be listed: {exc}") from exc
    matches = (_STEP_NAME.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def write_json(path: Path, value: Any) -> None:
    """Write and flush to the disk. Floats come back exactly."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """Raises CheckpointError where the file is missing or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise CheckpointError(f"{path} is missing; resume from another step") from exc
    except (OSError, ValueError, RecursionError) as exc:
        raise CheckpointError(f"{path} cannot be read ({exc}); resume from another step") from exc


def write_manifest(
    folder: Path, *, region: str, step: int, attempt: int, geotrain_version: str
) -> None:
    """Seal a folder: list and hash what is in it, and flush the list and the folder."""
    files = {
        path.name: {"bytes": path.stat().st_size, "xxh3_128": _hash_of(path)}
        for path in sorted(folder.iterdir())
    }
    meta = {
        "format": FORMAT,
        "region": region,
        "step": step,
        "attempt": attempt,
        "geotrain": geotrain_version,
        "layout": "torch.distributed.checkpoint, one writer",
        "files": files,
    }
    write_json(folder / META_NAME, meta)
    sync_folder(folder)


def check_manifest(folder: Path, *, region: str, step: int, hashes: bool) -> int:
    """Make sure that a folder is whole and is what it is taken for.

    Args:
        hashes: Also read every file and compare its hash; else its size only.

    Returns:
        The attempt that wrote it; 0 where its list names none.

    Raises:
        CheckpointError: It is not, with the file and the remedy.
    """
    path = folder / META_NAME
    meta = read_json(path)
    if not isinstance(meta, dict) or not isinstance(meta.get("files"), dict):
        raise CheckpointError(f"{path} is not a checkpoint's list; resume from another step")
    if meta.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: format {meta.get('format')}, written by geotrain {meta.get('geotrain')}; "
            f"this version reads format {FORMAT}: resume with that version"
        )
    if meta.get("region") != region:
        raise CheckpointError(
            f"{path}: this is region {meta.get('region')}'s state, wanted region {region}'s; "
            "put each region's folder under its own name"
        )
    if meta.get("step") != step:
        raise CheckpointError(
            f"{path}: this is step {meta.get('step')}, the folder says step {step}; "
            "give the folder its own name back"
        )
    for name, entry in meta["files"].items():
        _check_file(folder / name, entry, hashes=hashes)
    attempt = meta.get("attempt", 0)
    if not isinstance(attempt, int):
        raise CheckpointError(f"{path}: attempt {attempt!r} is no number; resume from another step")
    return attempt


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename or a new file in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_file(path: Path, entry: Mapping[str, Any], *, hashes: bool) -> None:
    try:
        found_bytes = path.stat().st_size
        found_hash = _hash_of(path) if hashes else entry["xxh3_128"]
    except FileNotFoundError as exc:
        raise CheckpointError(f"{path} is missing; resume from another step") from exc
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read ({exc}); resume from another step") from exc
    if found_bytes != entry["bytes"]:
        raise CheckpointError(
            f"{path} has {found_bytes} bytes, not the {entry['bytes']} that were written; "
            "resume from another step"
        )
    if found_hash != entry["xxh3_128"]:
        raise CheckpointError(
            f"{path} is damaged: its hash is not that of what was written; resume from another step"
        )


def _hash_of(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
