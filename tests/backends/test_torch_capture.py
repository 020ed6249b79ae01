"""A step captured as one graph, in pytest's process and without a compiler."""

import collections
import types

import keras
import numpy as np
import pytest

from kerasdp.config import Config
from kerasdp.contract import SingleProcess
from kerasdp.data.sampling import Split
from kerasdp.run_state import Detail, Position, RunState

torch = pytest.importorskip("torch")
if keras.backend.backend() != "torch":
    pytest.skip("the captured step is torch's", allow_module_level=True)

from kerasdp.backends.torch import compiled_step  # noqa: E402
from kerasdp.backends.torch.compiled_step import CompiledTraining  # noqa: E402
from kerasdp.backends.torch.data_parallel import DataParallel  # noqa: E402
from kerasdp.backends.torch.train_step import RankSteps  # noqa: E402
from kerasdp.contract import DeviceBatch  # noqa: E402

X = np.random.RandomState(0).rand(6, 4).astype("float32")
Y = X.sum(1, keepdims=True)


OF_NO_MODEL = [keras.Variable(0.0)]


class Normed(keras.layers.Dense):
    """Keeps its weights at length one."""

    def call(self, inputs):
        self.kernel.assign(self.kernel / keras.ops.norm(self.kernel))
        return super().call(inputs)


class Foreign(keras.layers.Layer):
    def call(self, inputs):
        OF_NO_MODEL[0].assign_add(1.0)
        return inputs + OF_NO_MODEL[0]


def strategy():
    return types.SimpleNamespace(
        processes=SingleProcess(),
        is_gpu=False,
        num_replicas=1,
        config=Config(backend="torch"),
        split=Split(1),
    )


def new_model(*layers):
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"], jit_compile=False)
    return model


def captured(model, x=X):
    model.optimizer.build(model.trainable_variables)
    model.compute_metrics(x, Y, model(x))  # builds them
    model.reset_metrics()
    own = strategy()
    steps = CompiledTraining(own, RankSteps(own, model))
    leaves = [torch.from_numpy(X), torch.from_numpy(Y)]
    return steps, (DeviceBatch(*leaves, None, range(len(X))), Detail.NOTHING, leaves)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Foreign, "changes 1 variables that do not belong to the model"),
        (lambda: keras.layers.TorchModuleWrapper(torch.nn.Identity()), "wraps a torch.nn.Module"),
        (lambda: Normed(4), "a layer assigns to the trainable weight .*kernel in its call"),
    ],
    ids=["foreign", "wrapped", "normed"],
)
def test_what_cannot_be_captured_is_refused(make, reason):
    steps, arguments = captured(new_model(make()))
    with pytest.raises(ValueError, match=reason):
        steps._captured(*arguments)


def test_inputs_keep_their_names(monkeypatch):
    """Also where the order of a dictionary is not the one of its names."""
    later, sooner = keras.Input((4,), name="later"), keras.Input((4,), name="a sooner one")
    model = keras.Model({"later": later, "a sooner one": sooner}, keras.layers.Dense(1)(later - 2 * sooner))
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    steps, _ = captured(model, {"later": X, "a sooner one": X + 1})
    inputs = {"later": torch.from_numpy(X), "a sooner one": torch.from_numpy(X + 1)}
    batch = DeviceBatch(inputs, torch.from_numpy(Y), None, range(len(X)))
    expected = model.evaluate({"later": X, "a sooner one": X + 1}, Y, verbose=0, return_dict=True)
    model.reset_metrics()
    monkeypatch.setattr(compiled_step, "compile_with_inductor", lambda graph, *_: torch.no_grad()(graph))
    loss, _, logs, _ = steps(batch)
    assert float(loss) == pytest.approx(expected["loss"]) == float(logs["loss"])
    assert float(logs["mae"]) == pytest.approx(expected["mae"])


def test_inductor_knows_that_variables_stay_in_place(monkeypatch):
    """Else it would make no CUDA graph of a step, which changes them. Without a shape environment it keeps no graph."""
    steps, arguments = captured(new_model())
    graph, _ = steps._captured(*arguments)
    import torch._inductor.compile_fx

    known, original = [], torch._inductor.compile_fx.get_static_input_idxs

    def stop(num_fixed):
        known.extend(original(num_fixed))
        assert torch._guards.TracingContext.get().fake_mode.shape_env is not None
        raise RuntimeError("seen")

    monkeypatch.setattr(torch._inductor.compile_fx, "get_static_input_idxs", stop)
    num_values, leaves = len(steps.values), arguments[-1]
    with pytest.raises(RuntimeError, match="seen"):
        compiled_step.compile_with_inductor(graph, [*steps.values, *leaves], num_values, {})
    assert known == list(range(len(list(graph.buffers())) + num_values))


@pytest.mark.parametrize(
    ("is_gpu", "num_replicas", "choices", "expected"),
    [
        (False, 2, {"deterministic": True, "compile": "cudagraphs"}, set()),
        (True, 1, {}, {"triton.cudagraphs"}),
        (True, 1, {"deterministic": True}, {"triton.cudagraphs", "deterministic"}),
        (True, 2, {"compile": "on"}, {"deterministic"}),
        (True, 2, {"compile": "cudagraphs"}, {"triton.cudagraphs", "deterministic"}),
    ],
)
def test_what_is_compiled_alike_everywhere(is_gpu, num_replicas, choices, expected):
    """On GPUs: what Inductor times would decide what a resumed run, or another rank, computes."""
    own = strategy()
    own.is_gpu, own.split = is_gpu, Split(num_replicas)
    own.config = Config(backend="torch", **choices)
    options = compiled_step.inductor_options(own)
    assert {name for name, is_on in options.items() if is_on} == expected
    known = torch._inductor.config.get_config_copy()
    assert options.keys() <= known.keys()


@pytest.mark.parametrize(("kind", "expected"), [("cpu", [False, False, True]), ("cuda", [False, True, True])])
def test_compiling_pays_off_sooner_on_a_gpu(kind, expected):
    strategy = DataParallel.__new__(DataParallel)
    strategy.config, strategy.device = Config(backend="torch"), torch.device(kind)
    model, seen = types.SimpleNamespace(run_eagerly=False), collections.Counter()

    def compiles(num_steps, length=4):
        batch = DeviceBatch(torch.zeros(6, length), None, None, range(6))
        return strategy._compiles(model, num_steps, 6, batch, seen)

    assert [compiles(count) for count in (199, 200, 1000)] == expected
    # Where nobody tells the number: once so many of a shape were seen; with --deterministic never.
    enough = 200 if kind == "cuda" else 1000
    assert [compiles(None) for _ in range(enough + 2)] == [False] * enough + [True] * 2
    assert not compiles(None, length=5)
    strategy.config = Config(backend="torch", deterministic=True)
    assert not compiles(None) and compiles(1000)


@pytest.mark.parametrize(("deterministic", "expected"), [(False, 100), (True, 1100)])
def test_a_resumed_run_compiles_for_the_steps_that_are_left(deterministic, expected):
    from kerasdp.backends.torch.data_parallel import DataParallel

    state = RunState()
    state.begin_fit(num_batches=1100)
    state.resume(1000, Position(0, 1000))
    of_run = types.SimpleNamespace(config=Config(backend="torch", deterministic=deterministic))
    assert DataParallel._steps_to_compile(of_run, state) == expected
