import torch

from diffattn.config import AugmentConfig
from diffattn.train.augment import Offsets, augment, epoch_offsets, epoch_order


def offsets(top, left, flip):
    return Offsets(torch.tensor(top), torch.tensor(left), torch.tensor(flip))


def test_crop_and_flip_by_hand():
    image = torch.arange(1, 7, dtype=torch.uint8).view(1, 1, 2, 3)
    images = image.repeat(4, 2, 1, 1)
    result = augment(images, offsets([1, 0, 2, 1], [1, 2, 0, 1], [False, False, False, True]), crop_padding=1)
    expected = [
        [[1, 2, 3], [4, 5, 6]],
        [[0, 0, 0], [2, 3, 0]],
        [[0, 4, 5], [0, 0, 0]],
        [[3, 2, 1], [6, 5, 4]],
    ]
    assert result.dtype == torch.uint8
    assert result[:, 0].tolist() == expected
    assert torch.equal(result[:, 0], result[:, 1])
    assert torch.equal(images, image.repeat(4, 2, 1, 1))


def test_nothing_asked_for_changes_nothing():
    images = torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    made = epoch_offsets(5, AugmentConfig(), seed=0, epoch=1)
    assert torch.equal(augment(images, made, crop_padding=0), images)


def test_an_images_augmentation_depends_on_seed_epoch_and_index_alone():
    config = AugmentConfig(crop_padding=2, flip=True)
    many = epoch_offsets(1000, config, seed=3, epoch=2)
    few = epoch_offsets(10, config, seed=3, epoch=2)
    assert all(torch.equal(a[:10], b) for a, b in zip(many, few, strict=True))
    for seed, epoch in ((4, 2), (3, 3)):
        assert not torch.equal(epoch_offsets(1000, config, seed=seed, epoch=epoch).top, many.top)
    images = torch.randint(0, 256, (10, 1, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    whole = augment(images, few, crop_padding=2)
    part = torch.tensor([7, 2])
    assert torch.equal(augment(images[part], Offsets(*(v[part] for v in few)), crop_padding=2), whole[part])


def test_offsets_cover_their_range_evenly():
    made = epoch_offsets(20_000, AugmentConfig(crop_padding=1, flip=True), seed=0, epoch=1)
    for corner in (made.top, made.left):
        assert (corner.bincount(minlength=3) / 20_000 - 1 / 3).abs().max() < 0.02
    assert abs(made.flip.float().mean().item() - 0.5) < 0.02
    assert not epoch_offsets(100, AugmentConfig(crop_padding=1), seed=0, epoch=1).flip.any()


def test_the_order_is_a_keyed_permutation():
    order = epoch_order(50, seed=0, epoch=1)
    assert order.sort().values.tolist() == list(range(50))
    assert torch.equal(order, epoch_order(50, seed=0, epoch=1))
    assert not torch.equal(order, epoch_order(50, seed=0, epoch=2))
    assert not torch.equal(order, epoch_order(50, seed=1, epoch=1))
