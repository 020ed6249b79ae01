"""Holds what is cut of a model whose parts a backend cuts and gathers itself: torch and tensorflow."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.runtime.model_cache import ModelCache
from kerasdp.sharding import cut_axis, part_of, part_shape


class CutVariables:
    """What a device holds of the variables of one model that are cut, by `cut_axis`.

    A variable that is cut holds the part of each device while steps run, and the whole in between, where callbacks and
    checkpoints read it: `cut` and `gather` change from one to the other.

    Attributes:
        model: built.
        holds_weights: whether the weights are cut, too.
        cut_weights: each with the axis along which it is cut, or what the optimizer keeps for it.
        axes: of these, by the `id` of the weight.
        is_cut: whether steps run.
    """

    def __init__(self, model: Any, config: Config, size: int):
        """`config`: `shard` and `backend` are read. `size`: how many devices hold a part each."""
        from kerasdp.keras_compat.layers import is_next_value

        self.model, self.size, self._backend = model, size, config.backend
        self.holds_weights = config.shard == "weights"
        self._optimizer = getattr(model, "optimizer", None)
        weights = model.variables if self.holds_weights else model.trainable_variables
        # A constraint looks at all of its weight, and a maximum is that of all replicas.
        self.cut_weights = [
            (weight, axis)
            for weight in weights
            if weight.constraint is None
            and not is_next_value(weight)
            and (axis := cut_axis(weight.shape, size)) is not None
        ]
        self.axes = {id(weight): axis for weight, axis in self.cut_weights}
        # What was cut, with its axis and what holds its parts, in which compiled steps know where these lie.
        self._held: dict[int, tuple[Any, int, Any]] = {}
        self.is_cut = False

    def number(self) -> int:
        """Returns the number of the device whose step runs: which parts are its own."""
        raise NotImplementedError

    def hold(self, variable: Any, axis: int, value: Any, kept: Any) -> Any:
        """Lets a variable hold the parts of a value, in `kept` if it was cut before; returns what holds them."""
        raise NotImplementedError

    def whole_of(self, axis: int, kept: Any) -> Any:
        """Returns the whole of the parts in `kept`."""
        raise NotImplementedError

    def hold_whole(self, variable: Any, whole: Any, kept: Any) -> None:
        """Lets a variable hold that whole of the parts in `kept`."""
        raise NotImplementedError

    def clipping(self, optimizer: Any) -> contextlib.AbstractContextManager[None]:
        """Returns the context in which an optimizer has parts of gradients, and clips by norms of the wholes."""
        raise NotImplementedError

    @property
    def is_stale(self) -> bool:
        """Returns whether the model was compiled again since, so that other variables are cut."""
        return getattr(self.model, "optimizer", None) is not self._optimizer

    def require_steps_of_keras(self, own: Iterable[str]) -> None:
        """Raises `UserError` if there are user-defined steps, by their names: they know nothing of parts."""
        if names := ", ".join(sorted(own)):
            raise UserError(
                f"--shard={'weights' if self.holds_weights else 'optimizer'}: --backend={self._backend} knows the "
                f"steps of fit, evaluate and predict as Keras has them. Received: {names} of {self.model.name}; use "
                "--backend=jax"
            )

    def cut(self) -> None:
        """Lets each variable hold a part of it; what was assigned to the whole is kept."""
        from kerasdp.keras_compat.layers import held_in_parts, raw_value

        if self.is_cut:
            return
        for variable, axis in self.to_cut():
            value = raw_value(variable)
            if tuple(value.shape) != tuple(variable.shape):
                raise UserError(f"--shard: {variable.path} is held in parts by the training of another model just now")
            _, _, kept = self._held.get(id(variable), (None, None, None))
            self._held[id(variable)] = variable, axis, self.hold(variable, axis, value, kept)
            held_in_parts(variable, True)
        self.is_cut = True

    def gather(self) -> None:
        """Lets each variable hold all of it, one after the other. Called by all processes together."""
        from kerasdp.keras_compat.layers import held_in_parts

        for variable, axis, kept in self._held.values() if self.is_cut else ():
            self.hold_whole(variable, self.whole_of(axis, kept), kept)
            held_in_parts(variable, False)
        self.is_cut = False

    def read(self, variable: Any) -> Any:
        """Returns the whole value of a variable, which stays as it is. Called by all processes together."""
        if not self.is_cut or id(variable) not in self._held:
            return variable
        _, axis, kept = self._held[id(variable)]
        return self.whole_of(axis, kept)

    def to_cut(self) -> list[tuple[Any, int]]:
        """Returns the variables that are to be cut, each with its axis.

        Raises:
            UserError: if the optimizer cannot update parts.
        """
        from kerasdp.keras_compat.optimizers import inner_optimizer, slots_by_weight, updates_numbers_alone

        found = self.cut_weights[:] if self.holds_weights else []
        if self._optimizer is None:
            return found
        optimizer = inner_optimizer(self._optimizer)
        of_weight = slots_by_weight(optimizer)
        slots: dict[int, list[Any]] = {}
        for slot in optimizer.variables:
            if id(slot) in of_weight:
                slots.setdefault(id(of_weight[id(slot)][1]), []).append(slot)
        for weight, axis in self.cut_weights if not self._held else ():
            own = functools.partial(part_of, axis=axis, number=self.size - 1, num_parts=self.size)
            if id(weight) in slots and not updates_numbers_alone(optimizer, weight, slots[id(weight)], own):
                raise UserError(
                    f"--shard: {type(optimizer).__name__} looks at all numbers of a weight ({weight.path}), of which a "
                    f"device holds a part with --backend={self._backend}; use --backend=jax, or another --optimizer"
                )
        for weight, axis in self.cut_weights:
            alike = [slot for slot in slots.get(id(weight), ()) if tuple(slot.shape) == tuple(weight.shape)]
            found += [(slot, axis) for slot in alike]
        return found

    def own(self, variable: Any, value: Any) -> Any:
        """Returns this device's part of a value of a weight; the value itself if it is the part, or there are none."""
        axis = self.axes.get(id(variable))
        if axis is None or value.shape[axis] != variable.shape[axis]:
            return value
        return part_of(value, axis, self.number(), self.size)

    @contextlib.contextmanager
    def updating(self, optimizer: Any) -> Iterator[None]:
        """Returns the context in which an optimizer updates this device's parts, as if it saw the wholes."""
        from kerasdp.keras_compat.layers import with_shapes

        held = [*self.cut_weights, *((variable, axis) for variable, axis, _ in self._held.values())]
        shapes = {id(one): (one, part_shape(one.shape, axis, self.size)) for one, axis in held}
        with with_shapes(shapes.values()), self.clipping(optimizer):
            yield


P = TypeVar("P", bound=CutVariables)


class PartsByModel(Generic[P]):
    """What is cut of each model of a run.

    Args:
        config: of the run.
        num_replicas: likewise.
        make: makes what is cut of a model.
    """

    def __init__(self, config: Config, num_replicas: int, make: Callable[[Any], P]):
        self._is_on, self._make = config.shard != "none" and num_replicas > 1, make
        self._parts: ModelCache[P] = ModelCache()

    def of(self, model: Any) -> P | None:
        """Returns what is cut of a model, found once more when it is compiled again; None if nothing is."""
        if not self._is_on:
            return None
        if (parts := self._parts.get(model)) is None or parts.is_stale:
            parts = self._make(model)
            self._parts.put(model, parts)
        return parts

    def known(self, model: Any) -> P | None:
        """Returns what is cut of a model that has step functions; None if nothing is."""
        return self._parts.get(model)

    def read(self, model: Any, variables: list[Any], take: Callable[[Any], Any] | None) -> list[Any]:
        """See `Strategy.read`."""
        parts = self.known(model)
        wholes = variables if parts is None else map(parts.read, variables)
        return [take(whole) if take else None for whole in wholes]
