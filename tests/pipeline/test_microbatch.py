import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geotrain.pipeline.microbatch import batch_size, count_targets, split_batch, split_sizes


@given(num_samples=st.integers(0, 200), num_microbatches=st.integers(1, 64))
def test_sizes_cover_the_batch_and_differ_by_one_at_most(num_samples, num_microbatches):
    sizes = split_sizes(num_samples, num_microbatches)
    assert sum(sizes) == num_samples
    assert len(sizes) == min(num_samples, num_microbatches)
    if sizes:
        assert max(sizes) - min(sizes) <= 1
        assert list(sizes) == sorted(sizes, reverse=True)


def test_a_ragged_batch():
    assert split_sizes(8, 3) == (3, 3, 2)


def test_a_tree_is_cut_along_its_samples_and_keeps_the_rest():
    batch = ((torch.arange(5), None, 7), {"y": torch.arange(10).view(5, 2)})
    first, second = split_batch(batch, (3, 2))
    assert first[0][0].tolist() == [0, 1, 2] and second[1]["y"].tolist() == [[6, 7], [8, 9]]
    assert first[0][1] is None and second[0][2] == 7


def test_tensors_that_disagree_on_the_samples_are_named():
    with pytest.raises(ValueError, match=r"disagree .* \[2, 3\]"):
        batch_size((torch.zeros(2), torch.zeros(3)))
    with pytest.raises(ValueError, match="no tensor"):
        batch_size((None, torch.tensor(1.0)))


def test_ignored_labels_are_not_counted():
    assert count_targets(torch.tensor([[1, -100], [-100, 3]])) == 2.0
    assert count_targets(torch.zeros(4, 3)) == 12.0
    with pytest.raises(ValueError, match="num_targets"):
        count_targets((torch.zeros(1),))


def test_cutting_copies_nothing():
    batch = (torch.zeros(4, 2), torch.zeros(()))
    first, second = split_batch(batch, (2, 2))
    assert first[0].data_ptr() == batch[0].data_ptr()
    assert second[0].data_ptr() == batch[0][2:].data_ptr()
