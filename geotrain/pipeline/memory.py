"""What a microbatch in flight costs in memory, and how many there is room for."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

SHARE = 0.8
"""Of the memory that is free between two steps: the rest is for fragments and for surprises."""


class ActivationMeter:
    """Measures what autograd keeps of a forward until its backward.

    Args:
        owned: Parameters and buffers; they are kept anyway.
    """

    def __init__(self, owned: Iterable[torch.Tensor], *, device: torch.device) -> None:
        self._owned = {tensor.untyped_storage().data_ptr() for tensor in owned}
        self._device = device
        self._most_bytes = 0
        self.largest_bytes = 0
        """The most that any microbatch kept so far."""
        self.seen_bytes: int | None = None
        """What the last microbatch kept that was measured; None before the first."""

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Around the forward of one microbatch, its loss included."""
        if self._device.type == "cuda":
            before = torch.cuda.memory_allocated(self._device)
            yield
            found = torch.cuda.memory_allocated(self._device) - before
        else:
            storages = dict[int, int]()
            with torch.autograd.graph.saved_tensors_hooks(_note_in(storages), _as_it_is):
                yield
            found = sum(size for place, size in storages.items() if place not in self._owned)
        self.seen_bytes = found
        self._most_bytes = max(self._most_bytes, found)
        self.largest_bytes = max(self.largest_bytes, found)

    def take(self) -> int:
        """The most bytes that any microbatch kept since this was last asked; 0 where none was."""
        most, self._most_bytes = self._most_bytes, 0
        return most


def _note_in(storages: dict[int, int]) -> Callable[[torch.Tensor], torch.Tensor]:
    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # Kept tensors are alive, so no two storages have the same place.
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    return note


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def memory_limit(kept_bytes: int, *, spare_bytes: int | None, least: int) -> int:
    """How many microbatches may be in flight; 0 where nothing is known.

    Args:
        kept_bytes: What each of them keeps.
        spare_bytes: What is free while none is in flight.
        least: What the run needs in any case, and was started with.
    """
    if spare_bytes is None or kept_bytes == 0:
        return 0
    return max(least, int(SHARE * spare_bytes) // kept_bytes)


def bytes_to_come(parameters: Iterable[torch.Tensor], *, is_first_step: bool) -> int:
    """What training will take besides activations, and has not yet.

    Gradients that are not there, and, before an optimizer has run, its state: two values for each
    that is trained, as Adam's.
    """
    states = 2 if is_first_step else 0
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return sum((states + (each.grad is None)) * each.nbytes for each in trained)


def spare_bytes(device: torch.device) -> int | None:
    """Memory that this process could still take; None where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch holds on to without using it is free to us.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    return host_spare_bytes()


def host_spare_bytes(
    *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """What the machine has available, or the rest of its cgroup where that is less."""
    try:
        available = _numbers(proc / "meminfo")["MemAvailable:"] * 1024
    except (OSError, KeyError):
        return None
    return min([available, *_group_spares(proc, cgroups)])


def _group_spares(proc: Path, cgroups: Path) -> Iterator[int]:
    """Of each cgroup around this process that has a limit; version 2 only."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, path = line.partition("::")
        place = Path(path.lstrip("/"))
        for folder in (place, *place.parents) if number == "0" else ():
            try:
                most = int((cgroups / folder / "memory.max").read_text())
                used = int((cgroups / folder / "memory.current").read_text())
                files = _numbers(cgroups / folder / "memory.stat")
            except (OSError, ValueError):  # not mounted here, or "max": no limit
                continue
            # Cached files count as used, and give way at once.
            cached = files.get("inactive_file", 0) + files.get("active_file", 0)
            yield max(0, most - used + cached)


def _numbers(file: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    words = [line.split() for line in file.read_text().splitlines()]
    return {each[0]: int(each[1]) for each in words if len(each) > 1 and each[1].isdigit()}
