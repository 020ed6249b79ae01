"""Trains a step of a run again, and looks into it: its samples, what layers gave, gradients, whose loss it was.

    python recipes/train.py --workdir=runs/mine                                # makes a run
    python recipes/replay.py --checkpoint=runs/mine --step=250
    python recipes/replay.py --checkpoint=runs/mine --step=250 --backend=jax   # the same, up to round-off
    python recipes/replay.py --checkpoint=runs/mine --step=250 --devices=1 --blame=5

Expected of the second: the loss of step 250 in runs/mine/steps.jsonl, bit by bit, tables of the step, and all arrays
with a picture of its samples in runs/mine/replay-250. The run itself stays as it is.

A step that ended a run ("the loss became nan at step 250") is one as any other: --blame names the samples.

Copy this file into your project, and let `train` be the function that trained your run.
"""

import kerasdp


def train(runner: "kerasdp.Runner") -> None:
    """Runs in every worker process, up to the step. As in recipes/train.py."""
    config = runner.config
    data = kerasdp.load_data(config)
    with runner.scope():
        model = kerasdp.build_model(config, data.input_shape, data.num_classes)
        model.compile(
            optimizer=kerasdp.make_optimizer(config, data.train),
            loss=kerasdp.make_loss(config),
            metrics=["accuracy"],
        )
    runner.fit(
        model,
        data.train,
        batch_size=config.batch_size,
        epochs=config.epochs,
        validation_data=data.test,
        callbacks=kerasdp.make_callbacks(config),
    )


def replay(
    request: "kerasdp.inference.Request", step: int, num_blamed: int, where: dict[str, object], folder: str
) -> None:
    """Runs here, and starts worker processes if they are needed."""
    found = kerasdp.parity.replay(train, request, step, num_blamed=num_blamed, **where)
    print(found)
    for path in found.save(folder):
        print(path)


if __name__ == "__main__":
    kerasdp.main(replay, flags="replay")
