"""Replaces attributes of classes, objects and modules of other packages, and restores them.

kerasdp makes all of its patches with this module. A function that is patched permanently reads `current_step` in each
call. The result determines whether the patch has an effect.
"""

import contextlib
import contextvars
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple


class Step(NamedTuple):
    """Describes the training step that runs in the current thread: its replica and its active hooks.

    Attributes:
        replica: the `kerasdp.same.replica_context.ReplicaContext` of the step. None outside of a step, or with a single
            replica.
        share: the `kerasdp.step.custom_steps.Share` of the replica, in a user-defined step on several replicas.
        drawing: the layer, loss or step that draws random values: see `kerasdp.same.random.portable_draws`.
        kept: on jax, the `id` of each variable whose new value the compiled step returns. None on other backends, where
            all variables keep their new values.
        weight: the weight whose initial values are being drawn: see `kerasdp.same.initial_weights`.
        reduce: a function that computes the losses of `compile` instead of Keras: see
            `kerasdp.keras_compat.models.reducing_losses`.
        factor: a factor for the mean loss of each output: see `losses_of_whole_batch` in `kerasdp.keras_compat.models`.
        record: a function that gets each layer and the outputs of the layer.
        adding: a list that collects the losses of `add_loss`, as pairs of a function and a loss. The function passes
            the loss to Keras. None: Keras gets each loss at once.
        differentiates: whether `kerasdp.value_and_grad` is calling a function.
        is_within_checkpoint: whether one `jax.checkpoint` wraps the whole forward pass. This is the case if the pass
            gathers sharded weights.
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
    """Returns a context in which the given fields of the current step have new values.

    Args:
        **values: the new values of fields of `Step`, by name.
    """
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
    """Replaces attributes or methods of an owner, and restores them at the end of the context.

    If the owner itself did not have an attribute before, the attribute is deleted at the end. A copy of the owner that
    is made within the context keeps the new attributes.

    Args:
        owner: a class, an object or a module. A new attribute of a class affects all objects of the class.
        **values: the new values, by name of the attribute.
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
    """Replaces attributes of several owners in one context, like `replaced` for one owner.

    Args:
        owners: pairs of an owner and the new values of its attributes, by name.
    """
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

    If contexts are nested, the wrapper of the inner context calls the wrapper of the outer context.

    Args:
        owner: a class, an object or a module: see `replaced`.
        **others: the wrappers, by name of the attribute. A wrapper is the `other` of `in_place_of`.
    """
    return replaced(owner, **{name: in_place_of(getattr(owner, name), other) for name, other in others.items()})


def original(function: Any) -> Any:
    """Returns the function that a replacement from `standing_for` replaces.

    Any other function is returned unchanged.
    """
    return getattr(function, "_kerasdp_original", function)


def standing_for(function: Callable[..., Any], replacement: Any) -> Any:
    """Marks `replacement` as a replacement of `function`, and returns `replacement`.

    `original(replacement)` then returns `function`. If `function` is itself a replacement, `original(replacement)`
    returns the first function in this chain.
    """
    vars(replacement)["_kerasdp_original"] = original(function)
    return replacement


def wrap_for_good(owner: Any, name: str, other: Callable[..., Any]) -> None:
    """Wraps a function of a class or module permanently. A second call for the same function has no effect.

    The wrapper reads `current_step`. TensorFlow traces replicas in threads, in turns. If one thread restored the
    function, the other threads would miss the wrapper.

    Args:
        owner: a class or a module.
        name: the name of the function.
        other: the wrapper: see `in_place_of`.
    """
    found = getattr(owner, name)
    if original(found) is found:
        setattr(owner, name, standing_for(found, in_place_of(found, other)))
