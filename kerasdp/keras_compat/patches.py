"""Replaces attributes of classes, objects and modules of other packages, and restores them.

All of kerasdp uses this module for it. A permanent patch reads `current_step` in each call to decide what to do.
"""

import contextlib
import contextvars
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple


class Step(NamedTuple):
    """Describes the step that runs in this thread: its replica, and the hooks that are active.

    Attributes:
        replica: the `kerasdp.same.replica_context.ReplicaContext`; None outside of a step, or with a single replica.
        share: the `kerasdp.step.custom_steps.Share` of a user-defined step on several replicas.
        drawing: the layer or step that draws random numbers: see `kerasdp.same.random.portable_draws`.
        kept: on jax, the `id` of each variable whose new value the step returns. None on other backends, which keep
            all.
        weight: the weight whose initial values are being drawn: see `kerasdp.same.initial_weights`.
        reduce: computes the losses of `compile` instead of Keras: see `kerasdp.keras_compat.models.reducing_losses`.
        factor: multiplies the loss of each output before Keras adds it to the mean of that loss: see
            `losses_of_whole_batch` in `kerasdp.keras_compat.models`.
        record: a function that gets each layer and its outputs.
        adding: collects the losses of `add_loss`, as pairs of the function that passes a loss to Keras, and the loss.
            None: losses go to Keras at once.
        differentiates: whether `kerasdp.value_and_grad` is calling a function.
        is_within_checkpoint: whether one `jax.checkpoint` wraps the whole pass, for weights that are gathered.
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
# A context variable, because TensorFlow traces each replica in a separate thread, in turns. A global variable, or
# functions that are replaced and restored, would mix them up.
_step: contextvars.ContextVar[Step] = contextvars.ContextVar("kerasdp_step", default=_NOTHING)


def current_step() -> Step:
    """Returns the description of the step that runs in this thread."""
    return _step.get()


@contextlib.contextmanager
def step_with(**values: Any) -> Iterator[None]:
    """Returns a context in which the current step has other values; the arguments are fields of `Step`."""
    token = _step.set(_step.get()._replace(**values))
    try:
        yield
    finally:
        _step.reset(token)


def step_as(step: Step) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which `step` is the current step."""
    return step_with(**step._asdict())


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Sets attributes and methods of an owner, and restores them at the end of the context.

    An attribute that the owner did not have itself is deleted again. A copy of the owner that is made within the
    context keeps the new attributes.

    Args:
        owner: a class (for all of its objects), one object, or a module.
        **values: new values by name of the attribute.
    """
    is_object = not isinstance(owner, (type, types.ModuleType))
    # Not `setattr`, with which Keras would track the new attribute of a layer.
    write, erase = (object.__setattr__, object.__delattr__) if is_object else (setattr, delattr)
    # Some modules of TensorFlow (2.21) forward names of other modules: these are not in `vars`.
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
    """Calls `replaced` for several owners, each with its own values."""
    with contextlib.ExitStack() as stack:
        for owner, values in owners:
            stack.enter_context(replaced(owner, **values))
        yield


def in_place_of(function: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `other(function, *args, **kwargs)` instead of `function(*args, **kwargs)`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return other(function, *args, **kwargs)

    return call


def wrapped(owner: Any, **others: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which methods or functions of an owner are wrapped by `in_place_of`.

    Nested contexts wrap the wrappers: a call goes through all of them.

    Args:
        owner: as in `replaced`.
        **others: the wrapping functions, by name of the attribute.
    """
    return replaced(owner, **{name: in_place_of(getattr(owner, name), other) for name, other in others.items()})


def original(function: Any) -> Any:
    """Returns the function that `standing_for` replaced; any other function unchanged."""
    return getattr(function, "_kerasdp_original", function)


def standing_for(function: Callable[..., Any], replacement: Any) -> Any:
    """Marks `replacement` as a replacement of `function` for `original`, and returns it.

    If `function` is a replacement itself, the mark names the first function.
    """
    vars(replacement)["_kerasdp_original"] = original(function)
    return replacement


def wrap_for_good(owner: Any, name: str, other: Callable[..., Any]) -> None:
    """Wraps a function of a class or module permanently, as `wrapped` does; a second call has no effect.

    For functions that read `current_step`. TensorFlow traces replicas in threads, in turns: if one thread restored the
    function, another one would miss the wrapper.
    """
    found = getattr(owner, name)
    if original(found) is found:
        setattr(owner, name, standing_for(found, in_place_of(found, other)))
