"""The plain reference: a pure function of its arguments, alone in the world."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from geotrain.lab.demo import plain

TINY = plain.ByteConfig(width=16, num_heads=2, num_layers=2, context=8)


def test_it_imports_torch_and_the_standard_library_only():
    tree = ast.parse(Path(plain.__file__).read_text())
    names = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert names - sys.stdlib_module_names == {"torch"}


def test_batches_are_a_pure_function_of_seed_and_step():
    first = plain.batch_of(seed=1, step=3, batch=4, context=8)
    torch.manual_seed(99)
    again = plain.batch_of(seed=1, step=3, batch=4, context=8)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], plain.batch_of(seed=1, step=4, batch=4, context=8)[0])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])


def test_a_layer_has_the_same_weights_whatever_stands_before_it():
    whole = plain.ByteTransformer(TINY)
    plain.init_weights(whole, seed=5)
    other = plain.ByteTransformer(TINY)
    del other.tok_embeddings, other.layers[0].up
    plain.init_weights(other, seed=5)
    own = whole.state_dict()
    assert all(torch.equal(value, own[name]) for name, value in other.state_dict().items())


def test_a_module_that_cannot_be_initialised_is_named():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

    with pytest.raises(ValueError, match=r"module 'inner' has parameters but no reset"):
        plain.init_weights(nn.ModuleDict({"inner": Bare()}), seed=0)


def test_training_moves_every_parameter_and_repeats_exactly():
    def trained():
        return plain.train(TINY, seed=2, steps=2, batch=3, num_microbatches=2)

    first, again = trained().state_dict(), trained().state_dict()
    start = plain.ByteTransformer(TINY)
    plain.init_weights(start, seed=2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], value) for name, value in start.state_dict().items())


def test_segments_are_compared_by_name(tmp_path):
    model = plain.ByteTransformer(TINY)
    plain.init_weights(model, seed=0)
    state = model.state_dict()
    names = sorted(state)
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    torch.save({name: state[name] for name in names[:3]}, paths[0])
    torch.save({name: state[name] for name in names[3:]}, paths[1])
    assert plain.max_abs_difference(model, paths) == 0.0
    changed = {name: state[name] for name in names[3:]}
    changed[names[3]] = changed[names[3]] + 0.25
    torch.save(changed, paths[1])
    assert plain.max_abs_difference(model, paths) == 0.25
    changed[names[3]] = changed[names[3]] * float("nan")
    torch.save(changed, paths[1])
    assert plain.max_abs_difference(model, paths) is None
    with pytest.raises(ValueError, match=names[0].replace(".", r"\.")):
        plain.max_abs_difference(model, paths[1:])


def test_it_runs_as_a_script(tmp_path):
    saved = tmp_path / "whole.pt"
    options = ["--steps", "1", "--batch", "2", "--layers", "1", "--microbatches", "2"]
    assert plain.main([*options, "--save", str(saved)]) == 0
    command = [sys.executable, plain.__file__, *options, "--compare", str(saved)]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout == '{"max_abs_param_diff": 0.0}\n'


def test_it_times_its_steps(capsys):
    options = ["--steps", "3", "--batch", "2", "--layers", "1", "--microbatches", "2"]
    assert plain.main([*options, "--times"]) == 0
    (answer,) = capsys.readouterr().out.splitlines()
    step_s = json.loads(answer)["step_s"]
    assert len(step_s) == 3 and min(step_s) > 0
