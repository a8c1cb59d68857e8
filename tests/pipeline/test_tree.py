import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geotrain.pipeline.tree import MAX_DEPTH, TreeError, flatten, signature, unflatten

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False)
    | st.text()
)
leaves = scalars | st.just("TENSOR")
trees = st.recursive(
    leaves,
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), children, max_size=3)
    ),
    max_leaves=8,
)


def with_tensors(tree):
    if tree == "TENSOR":
        return torch.arange(3)
    if isinstance(tree, list | tuple):
        return type(tree)(with_tensors(child) for child in tree)
    if isinstance(tree, dict):
        return {key: with_tensors(child) for key, child in tree.items()}
    return tree


@given(trees)
def test_any_allowed_tree_comes_back(tree):
    tree = with_tensors(tree)
    spec, tensors = flatten(tree)
    again = unflatten(spec, tensors)
    assert str(again) == str(tree)


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ((torch.zeros(1), {1, 2}), r"output\[1\] is a set"),
        ({"a": [object()]}, r"output\['a'\]\[0\] is a object"),
        ({1: torch.zeros(1)}, "output is a dict"),
        ([torch.zeros(2, 2).to_sparse()], r"output\[0\] is a sparse tensor"),
        (2**70, "carries 64 bits"),
        ("\ud800", "not valid Unicode"),
    ],
)
def test_what_cannot_cross_is_named_by_path_and_type(tree, path):
    with pytest.raises(TreeError, match=path):
        flatten(tree)


def test_depth_is_bounded():
    tree = torch.zeros(1)
    for _ in range(MAX_DEPTH + 2):
        tree = [tree]
    with pytest.raises(TreeError, match="nested"):
        flatten(tree)


junk = st.recursive(
    st.none() | st.integers() | st.text(max_size=2) | st.binary(max_size=2),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=2), children, max_size=2)
    ),
    max_leaves=8,
)


@given(junk)
def test_a_malformed_spec_is_refused_and_nothing_else(spec):
    try:
        unflatten(spec, [torch.zeros(1)])
    except (TreeError, ValueError, TypeError):
        pass


def test_signatures_hold_structure_and_dtypes_but_no_values():
    spec, _ = flatten((torch.zeros(2), None, {"mask": 3}))
    assert signature(spec, ["float32"]) == "(float32, NoneType, {mask: int})"
    other, _ = flatten((torch.zeros(5), None, {"mask": 4}))
    assert signature(other, ["float32"]) == signature(spec, ["float32"])
