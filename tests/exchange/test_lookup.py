"""A bucket is one physical table that looks like its tables."""

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice

from fusedrec_torchrec.compat.bucket_table import BucketKernel, BucketTable


def bucket(rows: list[int], optimizer: EmbOptimType) -> BucketTable:
    table = BucketTable(
        rows, 4, EmbeddingLocation.HOST, ComputeDevice.CPU, optimizer=optimizer, learning_rate=1.0
    )
    table.weights_host.data.copy_(torch.arange(table.weights_host.numel()).float())
    return table


def test_tables_are_views_one_after_another() -> None:
    table = bucket([2, 0, 3], EmbOptimType.EXACT_SGD)
    views = table.split_embedding_weights()
    assert [view.shape for view in views] == [(2, 4), (0, 4), (3, 4)]
    assert views[2][0].tolist() == [8, 9, 10, 11]
    views[2].zero_()
    assert table.weights_host.data[8:].eq(0).all()


def test_optimizer_state_belongs_to_the_rows_of_its_table() -> None:
    for optimizer, shape in (
        (EmbOptimType.EXACT_ADAGRAD, (3, 4)),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, (3,)),
    ):
        table = bucket([2, 3], optimizer)
        out = table(torch.tensor([3, 1]), torch.tensor([0, 1, 2]))  # row 1 of either table
        out.backward(torch.tensor([[2.0] * 4, [1.0] * 4]))
        first, second = (states["sum"] for states in table.get_optimizer_state())
        assert second.shape == shape
        assert first.reshape(2, -1).mean(1).tolist() == [0, 1]
        assert second.reshape(3, -1).mean(1).tolist() == [0, 4, 0]


def test_a_bucket_without_rows_still_answers() -> None:
    table = bucket([0, 0], EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    assert [view.shape for view in table.split_embedding_weights()] == [(0, 4), (0, 4)]
    out = table(torch.empty(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    assert out.shape == (0, 4)
    out.sum().backward()


class Offsets:
    one_id_per_bag = BucketKernel.one_id_per_bag

    def __init__(self) -> None:
        self._offsets = torch.empty(0, dtype=torch.int32)


def test_offsets_of_one_id_per_bag() -> None:
    offsets = Offsets()
    for ids in (0, 1, 2, 3, 7, 15, 3):
        assert offsets.one_id_per_bag(ids).tolist() == list(range(ids + 1))  # type: ignore[misc]


def test_offsets_made_in_inference_can_be_trained_with() -> None:
    offsets = Offsets()
    with torch.inference_mode():
        offsets.one_id_per_bag(5)  # type: ignore[misc]
    assert not offsets.one_id_per_bag(5).is_inference()  # type: ignore[misc]
