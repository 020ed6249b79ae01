"""Trains small nets cut into stages, and prints what came out.

python pipelines.py CASES: a JSON list of cases; each holds fields of kerasdp.Config, and
    net: "norms" (residual, batch norm) or "random" (dropout, penalties, no batch norm; its whole curve)
    rule: "sgd" or "adam"
    by_hand: instead of a pipeline, micro-batches one after another in a plain loop
"""

import json
import os
import sys

import numpy as np

import kerasdp

CASE = json.loads(os.environ.get("KERASDP_TEST_CASE", "{}"))
SPLIT_SIZE = 4


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


def random(keras):
    """Models in a model, each of which is cut."""
    layers = keras.layers
    tensor = keras.Input((12, 12, 3))
    x = layers.Rescaling(1 / 255)(tensor)
    x = layers.Conv2D(6, 3, kernel_regularizer=keras.regularizers.L2(1e-3), activation="gelu")(x)
    body = keras.Model(tensor, layers.SpatialDropout2D(0.3)(x), name="body")
    dense = layers.Dense(8, "tanh", activity_regularizer=keras.regularizers.L2(1e-3))
    head = keras.Sequential([layers.MaxPooling2D(), layers.Flatten(), dense, layers.Dropout(0.3)], name="head")
    inputs = keras.Input((12, 12, 3), dtype="uint8")
    x = head(body(inputs))
    return keras.Model(inputs, {"kind": layers.Dense(5, name="kind")(x), "size": layers.Dense(1, name="size")(x)})


def rule(keras):
    if CASE["rule"] == "adam":
        return keras.optimizers.Adam(0.003)
    # The norm of all gradients is summed up stage by stage, so that its last bit differs.
    return keras.optimizers.SGD(0.02, momentum=0.9, global_clipnorm=0.5 if CASE["net"] == "random" else None)


def train(runner):
    import keras
    from learn_classes import StepLosses

    numbers = np.random.RandomState(0)
    x, kinds = numbers.randint(0, 256, (36, 12, 12, 3)), numbers.randint(0, 5, 36)
    losses = StepLosses(runner)
    kind_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with runner.scope():
        model = {"norms": norms, "random": random}[CASE["net"]](keras)
        if CASE["net"] == "random":
            model.compile(rule(keras), {"kind": kind_loss, "size": "mse"}, metrics={"kind": "accuracy"})
        else:
            model.compile(rule(keras), kind_loss)
    if CASE["net"] == "random":
        y = {"kind": kinds, "size": kinds[:, None].astype("float32")}
        x = x.astype("uint8")
        history = runner.fit(model, x, y, epochs=2, validation_data=(x, y), callbacks=[losses]).history
        extra = {
            "history": history,
            "evaluate": runner.evaluate(model, x, y, return_dict=True),
            "outputs": np.asarray(runner.predict(model, x[:7])["kind"]).tolist(),
        }
    else:
        x = (x / 255).astype("float32")[:32]
        kinds = kinds[:32]
        extra = {}
        if CASE.get("by_hand"):
            losses.values = by_hand(keras, model, x, kinds)
        else:
            runner.fit(model, x, kinds, epochs=2, shuffle=False, callbacks=[losses])
            if runner.strategy.stages is not None:
                schedules = runner.strategy.stages.engine_of(model)._schedules.values()
                extra = {"schedules": sorted({type(schedule).__name__ for schedule in schedules})}
    weights = [keras.ops.convert_to_numpy(weight).astype("float64").flatten().tolist() for weight in model.weights]
    return {"losses": losses.values, "weights": weights, **extra}


def by_hand(keras, model, x, y):
    """The same micro-batches on one device: all forwards, the loss of the whole batch, all backwards, one update."""
    from kerasdp.portability.replica_context import ReplicaContext, use

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


def main():
    results = []
    for case in json.loads(sys.argv[1]):
        os.environ["KERASDP_TEST_CASE"] = json.dumps(case)
        globals()["CASE"] = case
        fields = {name: value for name, value in case.items() if name not in ("net", "rule", "by_hand")}
        results.append(kerasdp.launch(train, device="cpu", verbose=0, **{"batch_size": 16} | fields))
    print("RESULT", json.dumps(results))


if __name__ == "__main__":
    main()
