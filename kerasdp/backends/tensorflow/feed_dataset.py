"""Hands the feed to Keras' trainer as a dataset that it leaves as it is."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import tensorflow as tf

if TYPE_CHECKING:
    from kerasdp.data.feed import Feed


class FeedDataset(tf.distribute.DistributedDataset):
    """Wraps the feed: Keras' `fit` takes only a dataset of `tf.distribute` as it is."""

    def __init__(self, feed: "Feed"):
        self._feed = feed

    def __iter__(self) -> Iterator[object]:
        return iter(self._feed)

    @property
    def element_spec(self) -> None:
        """Returns None: batches are made in Python, so their shapes are not known."""
        return None
