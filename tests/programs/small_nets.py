"""Trains small nets, whole, in micro-batches or cut into stages, and prints what came out.

python small_nets.py CASES: see `starting.each_case`; beside fields of kerasdp.Config they hold
    net: "norms" (residual, batch norm), "random" (models in a model; dropout, penalties, two outputs, sample weights),
        "in stages": the latter, without penalties of activities, or "subclassed": the latter, as no functional model
    rule: "sgd", as where it is left out, or "adam"
    by_hand: instead of a run, micro-batches one after another in a plain loop, of "norms"
    loss: another loss for "random". "squares" is the same loss, user-defined. "sum" is a sum over the rows, without
        weights. "dice" and "against_mean" need the whole batch: the run fails, and the result is its error
    adds_up: whether all metrics of "random" are sums over the rows
"""

import functools

import numpy as np
from starting import each_case

import kerasdp

SPLIT_SIZE = 4
NUMBERS = np.random.RandomState(0)
X, KINDS = NUMBERS.randint(0, 256, (36, 12, 12, 3)), NUMBERS.randint(0, 5, 36)
WEIGHTS = NUMBERS.rand(36)


def squares(y, outputs):
    return ((y - outputs) ** 2)[:, 0]


def against_mean(y, outputs):
    from keras import ops

    return ops.square(outputs - ops.mean(outputs, axis=0) - y)


def norms(keras):
    layers = keras.layers
    inputs = x = keras.Input((12, 12, 3))
    x = layers.Conv2D(6, 3, padding="same", use_bias=False)(x)
    x = layers.Activation("gelu")(layers.BatchNormalization()(x))
    for channels in (6, 8):
        shortcut = layers.Conv2D(channels, 1)(x)
        x = layers.Conv2D(channels, 3, padding="same", use_bias=False)(x)
        x = layers.Activation("gelu")(layers.BatchNormalization()(x))
        x = layers.Add()([shortcut, layers.Conv2D(channels, 3, padding="same")(x)])
    return keras.Model(inputs, layers.Dense(5)(layers.GlobalAveragePooling2D()(x)))


def random(keras, penalty=1e-3):
    """Models in a model."""
    layers = keras.layers
    tensor = keras.Input((12, 12, 3))
    x = layers.Rescaling(1 / 255)(tensor)
    x = layers.Conv2D(6, 3, kernel_regularizer=keras.regularizers.L2(1e-3), activation="gelu")(x)
    body = keras.Model(tensor, layers.SpatialDropout2D(0.3)(x), name="body")
    dense = layers.Dense(8, "tanh", activity_regularizer=penalty and keras.regularizers.L2(penalty))
    head = keras.Sequential([layers.MaxPooling2D(), layers.Flatten(), dense, layers.Dropout(0.3)], name="head")
    inputs = keras.Input((12, 12, 3), dtype="uint8")
    x = head(body(inputs))
    return keras.Model(inputs, {"kind": layers.Dense(5, name="kind")(x), "size": layers.Dense(1, name="size")(x)})


def subclassed(keras):
    """The functional net in a subclassed model."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = random(keras)

        def call(self, x, training=False):
            return self.net(x, training=training)

    return Own()


NETS = {
    "norms": norms,
    "random": random,
    "in stages": functools.partial(random, penalty=None),
    "subclassed": subclassed,
}


def train(runner, net, rule="sgd", by_hand=False, loss=None, adds_up=False):
    import keras

    with runner.scope():
        model = NETS[net](keras)
        # The norm of all gradients is summed up stage by stage, so that its last bit differs.
        clipnorm = None if net == "norms" else 0.5
        sgd = keras.optimizers.SGD(0.02, momentum=0.9, global_clipnorm=clipnorm)
        optimizer = keras.optimizers.Adam(0.003) if rule == "adam" else sgd
    if net == "norms":
        found = with_batch_norm(runner, model, optimizer, by_hand)
    else:
        found = with_random_layers(runner, model, optimizer, loss, adds_up)
    weights = [keras.ops.convert_to_numpy(weight).astype("float64").flatten().tolist() for weight in model.weights]
    return found | {"weights": weights}


def with_random_layers(runner, model, optimizer, loss, adds_up):
    """36 samples in batches of 16, which is not the size of the run: the last one has 4."""
    import keras
    from learn_classes import MaximumLogit, fitted

    reduction = "sum" if loss == "sum" else "sum_over_batch_size"
    own = {
        "squares": kerasdp.per_sample(squares),
        "against_mean": against_mean,
        "sum": keras.losses.MeanSquaredError("sum"),
    }
    kind_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    with runner.scope():
        model.compile(
            optimizer,
            {"kind": kind_loss, "size": own.get(loss, loss or "mse")},
            metrics={"kind": ["accuracy"] if adds_up else ["accuracy", MaximumLogit()]},
            weighted_metrics={"size": "mae"},
        )
    x, y = X.astype("uint8"), {"kind": KINDS, "size": KINDS[:, None].astype("float64")}
    data = {"sample_weight": None if loss == "sum" else WEIGHTS, "validation_data": (x, y, WEIGHTS)}
    losses, history = fitted(runner, model, x, y, batch_size=runner.config.batch_size // 2, epochs=2, **data)
    return {
        "losses": losses,
        "history": history,
        "evaluate": runner.evaluate(model, x, y, sample_weight=WEIGHTS, return_dict=True),
        "outputs": np.asarray(runner.predict(model, x[:7])["kind"]).tolist(),
    }


def with_batch_norm(runner, model, optimizer, is_by_hand):
    import keras
    from learn_classes import fitted

    x, y = (X / 255).astype(keras.config.floatx())[:32], KINDS[:32]
    with runner.scope():
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    if is_by_hand:
        return {"losses": by_hand(keras, model, x, y)}
    losses, _ = fitted(runner, model, x, y, batch_size=16, epochs=2, shuffle=False)
    if runner.config.strategy == "data":
        return {"losses": losses}
    schedules = runner.strategy._pipeline_of(model)._schedules.values()
    return {"losses": losses, "schedules": sorted({type(schedule).__name__ for schedule in schedules})}


def by_hand(keras, model, x, y):
    """The same micro-batches on one device: all forwards, the loss of the whole batch, all backwards, one update."""
    from kerasdp.same.replica_context import ReplicaContext, use

    model.build(x.shape)
    kerasdp.portable(model)  # its batch norm is the kit's, as in the runs; with plain Keras' the last bit differs
    model.optimizer.build(model.trainable_variables)

    def outputs_of(inputs):
        outputs = []
        for first in range(0, len(inputs), SPLIT_SIZE):
            rows = {"num_rows": SPLIT_SIZE, "rows": SPLIT_SIZE, "first_row": first}
            with use(ReplicaContext(num_replicas=1, gather=lambda own: own[None], **rows)):
                outputs.append(model(inputs[first : first + SPLIT_SIZE], training=True))
        return outputs

    losses = []
    for _ in range(2):
        for first in range(0, len(x), 16):
            batch = x[first : first + 16], y[first : first + 16]
            losses.append(float(STEPS[keras.backend.backend()](keras, model, outputs_of, *batch)))
    return losses


def torch_step(keras, model, outputs_of, x, y):
    import torch

    model.zero_grad()
    outputs = outputs_of(torch.from_numpy(x))
    leaves = [output.detach().requires_grad_() for output in outputs]
    loss = model.loss(torch.from_numpy(y), torch.cat(leaves))
    loss.backward()
    for output, leaf in zip(outputs, leaves, strict=True):
        output.backward(leaf.grad)
    with torch.no_grad():
        model.optimizer.apply([variable.value.grad for variable in model.trainable_variables])
    return loss


def jax_step(keras, model, outputs_of, x, y):
    import jax

    def stateless(trainable, non_trainable):
        pairs = zip(model.trainable_variables + model.non_trainable_variables, trainable + non_trainable, strict=True)
        with keras.StatelessScope(state_mapping=list(pairs)) as scope:
            loss = model.loss(y, keras.ops.concatenate(outputs_of(x)))
        return loss, [scope.get_current_value(variable) for variable in model.non_trainable_variables]

    values = [variable.value for variable in model.trainable_variables]
    others = [variable.value for variable in model.non_trainable_variables]
    (loss, others), gradients = jax.jit(jax.value_and_grad(stateless, has_aux=True))(values, others)
    for variable, value in zip(model.non_trainable_variables, others, strict=True):
        variable.assign(value)
    model.optimizer.apply(gradients)
    return loss


def tensorflow_step(keras, model, outputs_of, x, y):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = model.loss(y, keras.ops.concatenate(outputs_of(x)))
    model.optimizer.apply(tape.gradient(loss, model.trainable_variables))
    return loss


STEPS = {"torch": torch_step, "jax": jax_step, "tensorflow": tensorflow_step}


if __name__ == "__main__":
    each_case(train, device="cpu", verbose=0, batch_size=32)
