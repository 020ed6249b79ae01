"""Takes batches from objects that keep their order, their place in it and their random numbers to themselves."""

import base64
import collections
import hashlib
import json
import random
import sys
from typing import Any, NamedTuple

import keras
import numpy as np

from kerasdp.data.sources import as_arrays
from kerasdp.errors import UserError

# Stands for a batch where there is none left.
END: Any = object()
# tf.data's word for a data set without end; a Grain data set that is repeated has this length.
_NO_END, _GRAIN_NO_END = -1, sys.maxsize
# Elements of each array, evenly spread, that tell one batch from another.
_MOST_DIGESTED = 512


class Item(NamedTuple):
    """A batch, and where its iterator stood after it.

    Attributes:
        data: as the object gave it.
        state: of the iterator, in JSON; None if it does not tell.
    """

    data: Any
    state: Any


class Stream:
    """The batches of an iterator; they may be looked at ahead, and given back."""

    def __init__(self, batches: Any, state: Any = None):
        """Opens `batches`; with a state, as `Item` has it, after the batch of that state.

        Raises:
            UserError: if the object does not take that state.
        """
        self._batches = batches
        try:
            if state is not None and _keeps_state_itself(batches):
                batches.load_state_dict(_from_json(state))
            self._iterator = iter(batches)
            if state is not None and not _keeps_state_itself(batches):
                self._iterator.set_state(_from_json(state))
        except Exception as error:
            if state is None:
                raise
            line = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(
                f"--resume: the {kind_of(batches)} cannot take the place that the checkpoint holds ({line:.300})"
            ) from error
        self._waiting: collections.deque[Item] = collections.deque()

    def peek(self) -> Any:
        """Returns the next batch without taking it; END if there is none."""
        item = self._waiting[0] if self._waiting else self._next()
        if item is not END and not self._waiting:
            self._waiting.append(item)
        return item if item is END else item.data

    def take(self) -> Any:
        """Takes the next `Item`; END if there is none."""
        return self._waiting.popleft() if self._waiting else self._next()

    def give_back(self, items: list[Item]) -> None:
        """Lets the items that were taken last come again."""
        self._waiting.extendleft(reversed(items))

    def _next(self) -> Any:
        data = next(self._iterator, END)
        return END if data is END else Item(data, self._state())

    def _state(self) -> Any:
        if _keeps_state_itself(self._batches):
            return _as_json(self._batches.state_dict())
        has_state = all(hasattr(self._iterator, name) for name in ("get_state", "set_state"))
        return _as_json(self._iterator.get_state()) if has_state else None


def is_read_once(batches: Any) -> bool:
    """Returns whether an object is its own iterator, as a generator is."""
    return hasattr(batches, "__next__")


def kind_of(batches: Any) -> str:
    """Returns what people call an object that gives batches."""
    return "tf.data.Dataset" if type(batches).__module__.startswith("tensorflow.") else type(batches).__name__


def length_of(batches: Any) -> int | None:
    """Returns how many batches an object gives; None if it does not tell.

    Raises:
        UserError: if it says that it has no end.
    """
    length: int | None = None
    if hasattr(batches, "cardinality"):  # tf.data: negative where it is infinite or unknown
        length = int(batches.cardinality())
    elif hasattr(batches, "__len__"):
        try:
            length = len(batches)
        except TypeError:  # a DataLoader over an IterableDataset that has no length
            return None
    if length in (_NO_END, _GRAIN_NO_END):
        raise UserError(f"x: the {kind_of(batches)} gives batches without end; add steps_per_epoch")
    return length if length is None or length >= 0 else None


def seed_pass(batches: Any, seed: int, number: int) -> None:
    """Seeds what an object shuffles with, so that its order depends on the run's seed and the pass alone.

    The random numbers of Python, NumPy and torch, a DataLoader's own generator, and what has a `set_epoch`.

    Args:
        batches: the object; a pass over it begins.
        seed: of the run.
        number: of the pass, from 0.
    """
    words = np.random.SeedSequence([seed % 2**64, number]).generate_state(2)
    random.seed(int(words[0]))
    np.random.seed(int(words[0]))
    samplers = [getattr(batches, name, None) for name in ("sampler", "batch_sampler")]
    samplers.append(getattr(samplers[1], "sampler", None))
    for part in (batches, *samplers):
        if hasattr(part, "set_epoch"):
            part.set_epoch(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(int(words[1]))
        for part in (batches, *samplers):
            if getattr(part, "generator", None) is not None:
                part.generator.manual_seed(int(words[1]))


def skip_passes(batches: Any, count: int) -> None:
    """Lets an object prepare for a pass as if `count` more before it had been read.

    tf.data (2.21) draws the order of a pass when its iterator is made, and a DataLoader is seeded for each. What
    another object does is not known: it may draw when it gives its first batch.
    """
    torch = sys.modules.get("torch")
    for _ in range(0 if torch is not None and isinstance(batches, torch.utils.data.DataLoader) else count):
        iterator = iter(batches)
        if not hasattr(batches, "cardinality"):
            next(iterator, None)


def refuse_split_data(batches: Any) -> None:
    """Raises `UserError` for an object that gives each process other samples, which kerasdp does itself."""
    sampler: Any = getattr(batches, "sampler", None)
    if type(sampler).__name__ == "DistributedSampler" and sampler.num_replicas > 1:
        raise UserError(
            "x: a DataLoader with a DistributedSampler gives a part of the samples; leave the sampler out (or "
            "shuffle=True): each device gets its rows of the global batch"
        )


def unpacked(data: Any) -> tuple[Any, Any, Any]:
    """Returns inputs, targets and sample weights of a batch, in NumPy; None for those that are missing."""
    return as_arrays(keras.utils.unpack_x_y_sample_weight(data))


def digest_of(data: Any) -> str:
    """Returns a digest of some elements of each array of a batch, by which it is known again."""
    digest = hashlib.sha256()
    for leaf in keras.tree.flatten(data):
        if leaf is not None:
            digest.update(f"{leaf.shape} {leaf.dtype.str}".encode())
            some = np.ascontiguousarray(leaf).reshape(-1)[:: 1 + leaf.size // _MOST_DIGESTED]
            some = some.astype(str) if some.dtype == object else some
            digest.update(np.ascontiguousarray(some).view("uint8").data)
    return digest.hexdigest()[:16]


def _keeps_state_itself(batches: Any) -> bool:
    """Returns whether the object has the state, not its iterator, as torchdata's StatefulDataLoader."""
    return all(hasattr(batches, name) for name in ("state_dict", "load_state_dict"))


def _as_json(state: Any) -> Any:
    """Returns a state in JSON; None if JSON has no words for it."""
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    try:
        return json.loads(json.dumps({"object": state}))
    except TypeError:
        return None


def _from_json(state: Any) -> Any:
    return base64.b64decode(state["bytes"]) if "bytes" in state else state["object"]
