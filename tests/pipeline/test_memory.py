"""What a microbatch in flight costs, and how many there is room for."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from geotrain.pipeline.memory import (
    ActivationMeter,
    bytes_to_come,
    host_spare_bytes,
    memory_limit,
    spare_bytes,
)

CPU = torch.device("cpu")
FLOAT = 4


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))


def metered(model: nn.Module, x: torch.Tensor) -> tuple[ActivationMeter, torch.Tensor]:
    meter = ActivationMeter(model.parameters(), device=CPU)
    with meter.measuring():
        output = model(x)
    return meter, output


def test_kept_tensors_are_counted_once_and_parameters_are_not():
    meter, _ = metered(network(), torch.randn(16, 64))
    # The first layer's input, what enters the GELU, and what leaves it.
    assert meter.take() == 16 * (64 + 256 + 256) * FLOAT


def test_it_grows_with_the_microbatch_and_the_most_is_told_once():
    model = network()
    meter = ActivationMeter(model.parameters(), device=CPU)
    for batch in (4, 16, 8):
        with meter.measuring():
            model(torch.randn(batch, 64))
    assert meter.take() == 16 * (64 + 256 + 256) * FLOAT
    assert meter.take() == 0


def test_what_was_just_measured_is_known_before_it_is_taken():
    meter = ActivationMeter([], device=CPU)
    assert meter.seen_bytes is None
    meter, _ = metered(network(), torch.randn(16, 64))
    assert meter.seen_bytes == 16 * (64 + 256 + 256) * FLOAT
    meter.take()
    assert meter.seen_bytes == 16 * (64 + 256 + 256) * FLOAT


def test_gradients_and_an_adams_state_are_still_to_come_before_the_first_step():
    model = nn.Linear(8, 4)  # 36 parameters, of which 4 are not trained
    model.bias.requires_grad_(False)
    assert bytes_to_come(model.parameters(), is_first_step=True) == 3 * 32 * FLOAT
    assert bytes_to_come(model.parameters(), is_first_step=False) == 32 * FLOAT
    model(torch.ones(2, 8)).sum().backward()
    assert bytes_to_come(model.parameters(), is_first_step=True) == 2 * 32 * FLOAT
    assert bytes_to_come(model.parameters(), is_first_step=False) == 0


def test_a_forward_that_is_computed_again_keeps_its_input_alone():
    model = network()
    x = torch.randn(16, 64, requires_grad=True)
    meter = ActivationMeter(model.parameters(), device=CPU)
    with meter.measuring():
        checkpoint(model, x, use_reentrant=False)
    assert meter.take() <= 16 * 64 * FLOAT


def test_measuring_changes_no_gradient():
    gradients = []
    for measure in (False, True):
        model, x = network(), torch.linspace(-1, 1, 16 * 64).reshape(16, 64)
        output = metered(model, x)[1] if measure else model(x)
        output.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_nothing_is_kept_for_having_been_measured():
    model = network()
    meter, output = metered(model, torch.randn(16, 64))
    kept = weakref.ref(output)
    output.sum().backward()
    del output
    gc.collect()
    assert kept() is None
    assert meter.take() > 0


def test_a_limit_leaves_a_fifth_free_and_never_falls_below_the_least():
    assert memory_limit(0, spare_bytes=1000, least=2) == 0
    assert memory_limit(100, spare_bytes=1000, least=2) == 8
    assert memory_limit(100, spare_bytes=100, least=2) == 2
    assert memory_limit(100, spare_bytes=None, least=2) == 0


def write(folder, **files: str):
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def machine(tmp_path):
    """A machine with 1000 KiB available, and a process in the cgroup /job/rank."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, meminfo="MemTotal: 4000 kB\nMemAvailable:    1000 kB\nHugePages_Total: 0\n")
    write(proc / "self", cgroup="0::/job/rank\n")
    cgroups.mkdir()
    return proc, cgroups


def test_a_machine_says_what_it_has_available(machine):
    proc, cgroups = machine
    assert host_spare_bytes(proc=proc, cgroups=cgroups) == 1000 * 1024


def test_the_tightest_cgroup_counts_without_the_files_that_it_caches(machine):
    proc, cgroups = machine
    for name, most, used, cached in (("job", "900000", 700000, 50000), ("job/rank", "max", 9, 0)):
        write(cgroups / name, **{
            "memory.max": most,
            "memory.current": str(used),
            "memory.stat": f"anon 5\nfile 9\ninactive_file {cached}\nactive_file 1000\n",
        })  # fmt: skip
    assert host_spare_bytes(proc=proc, cgroups=cgroups) == 900000 - 700000 + 51000


def test_a_system_that_says_nothing_sets_no_limit(tmp_path):
    assert host_spare_bytes(proc=tmp_path, cgroups=tmp_path) is None


def test_this_machine_has_some():
    assert (spare_bytes(CPU) or 0) > 1 << 20
