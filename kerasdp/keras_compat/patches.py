"""Replaces attributes of classes, objects and modules that are not the kit's: the one way to do it, and to undo it.

What is replaced for good asks `current_step` each time what to do.
"""

import contextlib
import contextvars
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple


class Step(NamedTuple):
    """What runs in this thread: which pass of which replica, and who takes part in it.

    Attributes:
        replica: `kerasdp.same.replica_context.ReplicaContext`; None outside of a step, or with a single replica.
        share: `kerasdp.step.custom_steps.Share`, in a user-defined step on several replicas.
        drawing: what draws random numbers: see `kerasdp.same.random.portable_draws`.
        kept: by `id`, the variables whose new values a step of jax keeps; None elsewhere, where all are kept.
        weight: whose initial values are being drawn: see `kerasdp.same.initial_weights`.
        reduce: computes the losses of `compile` in their place: see `kerasdp.keras_compat.models.reducing_losses`.
        factor: by which the losses of single outputs are multiplied for their means: see `losses_of_whole_batch` in
            `kerasdp.keras_compat.models`.
        record: takes each layer and what it gives.
        adding: takes what layers add to the loss in place of Keras: a function that gives it to Keras, and the loss.
        differentiates: whether `kerasdp.value_and_grad` is calling a function.
        is_within_checkpoint: whether `jax.checkpoint` is around the whole pass, for weights that are gathered.
    """

    replica: Any = None
    share: Any = None
    drawing: Any = None
    kept: set[int] | None = None
    weight: Any = None
    reduce: Callable[..., Any] | None = None
    factor: float | None = None
    record: Callable[[Any, Any], None] | None = None
    adding: list[tuple[Callable[[Any], None], Any]] | None = None
    differentiates: bool = False
    is_within_checkpoint: bool = False


_NOTHING = Step()
# A context variable, not a global, nor functions that are swapped and restored: TensorFlow traces each replica in a
# thread of its own, in turns.
_step: contextvars.ContextVar[Step] = contextvars.ContextVar("kerasdp_step", default=_NOTHING)


def current_step() -> Step:
    """Returns what runs in this thread."""
    return _step.get()


@contextlib.contextmanager
def step_with(**values: Any) -> Iterator[None]:
    """Returns the context in which the current step has other values, by the names of `Step`."""
    token = _step.set(_step.get()._replace(**values))
    try:
        yield
    finally:
        _step.reset(token)


def step_as(step: Step) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which the current step is this one."""
    return step_with(**step._asdict())


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Gives an owner other attributes, methods among them, until it is left.

    Afterwards it has what it had itself; what it had from its class, or not at all, it has from there again. A copy of
    the owner that is made meanwhile keeps them.

    Args:
        owner: a class, for all of its objects; one object; or a module.
        **values: by name of the attribute.
    """
    is_object = not isinstance(owner, (type, types.ModuleType))
    # Past Keras, for which each new value of an object's attribute would be a change of the layer.
    write, erase = (object.__setattr__, object.__delattr__) if is_object else (setattr, delattr)
    # TensorFlow (2.21) has modules that hold the names of others: what they have is not in `vars`.
    is_module = isinstance(owner, types.ModuleType)
    held = {name: getattr(owner, name) for name in values if is_module or name in vars(owner)}
    for name, value in values.items():
        write(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in held:
                write(owner, name, held[name])
            else:
                erase(owner, name)


@contextlib.contextmanager
def replaced_in_each(owners: Iterable[tuple[Any, Mapping[str, Any]]]) -> Iterator[None]:
    """Does what `replaced` does for several owners, each with its values."""
    with contextlib.ExitStack() as stack:
        for owner, values in owners:
            stack.enter_context(replaced(owner, **values))
        yield


def in_place_of(function: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what calls another function in the place of `function`, which that gets before the arguments."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return other(function, *args, **kwargs)

    return call


def wrapped(owner: Any, **others: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which other functions are called in the place of those that there are: `in_place_of`.

    What is nested goes through both.

    Args:
        owner: as in `replaced`.
        **others: by the name of the attribute.
    """
    return replaced(owner, **{name: in_place_of(getattr(owner, name), other) for name, other in others.items()})


def original(function: Any) -> Any:
    """Returns the function that this one stands for, if `standing_for` made it; else itself."""
    return getattr(function, "_kerasdp_original", function)


def standing_for(function: Callable[..., Any], replacement: Any) -> Any:
    """Returns a replacement that knows the function for which it stands: another one may stand for the same."""
    vars(replacement)["_kerasdp_original"] = original(function)
    return replacement


def wrap_for_good(owner: Any, name: str, other: Callable[..., Any]) -> None:
    """Wraps a function of a class or a module once, as `wrapped` does, for as long as the process lasts.

    For what asks `current_step`: TensorFlow traces replicas in threads, in turns, so that what one of them put back
    would be missing to another.
    """
    found = getattr(owner, name)
    if original(found) is found:
        setattr(owner, name, standing_for(found, in_place_of(found, other)))
