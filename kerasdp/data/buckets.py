"""Puts sequences of similar length together, so that little is padded and few shapes are compiled."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from kerasdp.data.sampling import epoch_order
from kerasdp.errors import UserError


class Buckets(keras.utils.PyDataset):
    """Batches of sequences of similar length, padded at their end to one of a few lengths.

    A sequence is in the bucket of the shortest of these lengths that holds it; what is longer than all is cut. All
    batches are full but the last of the longest bucket: what is left of a bucket goes to the next longer one. So a
    compiled step is compiled once for each length, and once for the last batch. Each sequence comes once in an epoch.

    Args:
        sequences: of whole numbers, each of shape `(length,)`.
        targets: an array with a row for each sequence, or a list of sequences as long as these, padded likewise.
        lengths: to which they are padded.
        batch_size: the global batch.
        shuffle: whether each epoch has new batches; else they are the same, the shortest first.
        seed: of that shuffling. In which order the batches come, `fit` decides.
        padding: the number that stands for nothing, as `mask_zero` of Keras' `Embedding` has it.

    Raises:
        UserError: if there are no sequences or lengths, or not as many targets as sequences.
    """

    def __init__(
        self,
        sequences: Sequence[Any],
        targets: Any,
        *,
        lengths: Sequence[int],
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        padding: int = 0,
    ):
        super().__init__()
        if not len(sequences) or len(sequences) != len(targets):
            raise UserError(
                f"expected sequences, and a target for each. Received: {len(sequences)} and {len(targets)} targets"
            )
        if not lengths or min(lengths) < 1 or batch_size < 1:
            raise UserError(f"expected lengths and a batch of at least 1. Received: {list(lengths)}, {batch_size}")
        self._sequences, self._lengths, self._padding = sequences, sorted(set(lengths)), padding
        self._targets = np.asarray(targets) if hasattr(targets, "shape") else targets
        self._batch_size, self._shuffle, self._seed, self._epoch = batch_size, shuffle, seed, -1
        # The bucket of each sequence, by the number of its length.
        sizes = np.array([len(sequence) for sequence in sequences])
        self._bucket_of = np.minimum(np.searchsorted(self._lengths, sizes), len(self._lengths) - 1)
        self._batches = self._arranged(0)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns a batch: int32 sequences of shape `(rows, length)`, and their targets."""
        length, numbers = self._batches[index]
        inputs = self._padded([self._sequences[number] for number in numbers], length)
        if isinstance(self._targets, np.ndarray):
            return inputs, self._targets[numbers]
        return inputs, self._padded([self._targets[number] for number in numbers], length)

    def on_epoch_begin(self) -> None:
        """Puts the sequences together again, in a new order."""
        self._epoch += 1
        if self._shuffle:
            self._batches = self._arranged(self._epoch)

    def _arranged(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """Returns the length of each batch of an epoch, and the numbers of its sequences."""
        batches = []
        waiting = np.zeros(0, int)
        for bucket, length in enumerate(self._lengths):
            own = np.flatnonzero(self._bucket_of == bucket)
            if self._shuffle:
                own = own[epoch_order(len(own), self._seed, epoch)]
            waiting = np.concatenate([waiting, own])
            is_last = bucket == len(self._lengths) - 1
            end = len(waiting) if is_last else len(waiting) - len(waiting) % self._batch_size
            batches += [
                (length, part)
                for part in np.split(waiting[:end], range(self._batch_size, end, self._batch_size))
                if end
            ]
            waiting = waiting[end:]
        return batches

    def _padded(self, sequences: list[Any], length: int) -> np.ndarray:
        return keras.utils.pad_sequences(sequences, length, padding="post", truncating="post", value=self._padding)
