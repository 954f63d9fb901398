"""The user's own images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adp2sgd.data import images
from data_files import pixels, refused, write_image

pytestmark = pytest.mark.usefixtures("nothing_of_this_machine")


def test_image_folder_with_sites(tmp_path: Path) -> None:
    seed = 0
    for site in ("south", "north"):
        for name in ("sick", "healthy"):
            for i in range(10):
                write_image(tmp_path / site / name / f"{i}.png", pixels(seed))
                seed += 1
    source = images.load(tmp_path, classes=("healthy", "sick"), sites=True)
    assert source.fitted is None
    assert source.train.site_names == ("north", "south")
    assert len(source.train) + len(source.test) == 40
    assert source.train.inputs.shape[1:] == (3, 6, 8)
    found = {
        (records.site_names[s], int(t), bytes(x.permute(1, 2, 0).contiguous().numpy()))
        for records in (source.train, source.test)
        for x, t, s in zip(records.inputs, records.targets, records.sites, strict=True)
    }
    expected = {
        (site, int(name == "sick"), bytes(pixels(20 * (site == "north") + 10 * (name == "healthy") + i)))
        for site in ("south", "north")
        for name in ("sick", "healthy")
        for i in range(10)
    }
    assert found == expected
    prepared = source.prepare(source.train.inputs)
    assert torch.allclose(prepared, source.train.inputs / 127.5 - 1, atol=1e-5)


def test_image_folder_with_train_and_test_in_grey(tmp_path: Path) -> None:
    for part, n in (("train", 4), ("test", 2)):
        for i in range(n):
            write_image(tmp_path / part / "a" / f"{i}.png", pixels(i, (5, 5)))
            write_image(tmp_path / part / "b" / f"{i}.jpg", pixels(i, (9, 9)))
    source = images.load(tmp_path, channels=1, size=(5, 5))
    assert source.train.inputs.shape == (8, 1, 5, 5)
    assert source.test.targets.tolist() == [0, 0, 1, 1]
    assert source.fitted is not None
    assert torch.equal(source.test.inputs[1, 0], torch.from_numpy(pixels(1, (5, 5))))
    with refused("9×9", "5×5", "size="):
        images.load(tmp_path, channels=1)


def test_image_folder_refuses_what_does_not_fit(tmp_path: Path) -> None:
    with refused("nowhere", "does not exist"):
        images.load(tmp_path / "nowhere")
    with refused("holds no", ".png"):
        images.load(tmp_path)
    for i in range(20):
        write_image(tmp_path / "a" / f"{i}.png", pixels(i))
    with refused("class folder 'a'", "['b']"):
        images.load(tmp_path, classes=["b"])
    with refused("layout", "site/class"):
        images.load(tmp_path, sites=True)
    with refused("channels = 2", "[1, 3]"):
        images.load(tmp_path, channels=2)
    with refused("no test image"):
        images.load(tmp_path, test_fraction=0.0)
    path = tmp_path / "a" / "3.png"
    path.write_bytes(path.read_bytes()[:100])
    with refused("3.png", "damaged"):
        images.load(tmp_path)
