"""Data that several tests of recipes use."""

import pytest

from tests.helpers import some_images, write_idx


@pytest.fixture(scope="session")
def idx_folder(tmp_path_factory):
    """A small data set in MNIST's files."""
    folder = tmp_path_factory.mktemp("idx")
    write_idx(folder, "train", *some_images(1100, 28, 28), packed=True)
    write_idx(folder, "t10k", *some_images(50, 28, 28), packed=True)
    return folder
