"""Learns to balance a pole by reinforcement, a custom loop: actor and critic in gymnasium's CartPole.

    pip install gymnasium
    python recipes/cartpole.py                                       # the first backend installed
    python recipes/cartpole.py --backend=jax --gpus=2 --workdir=runs/cartpole

Expected of the first: the pole stands 20 steps at the begin, and more than 300 on average after 800 updates, in a
minute on two CPU cores; the curve is the same on all backends and numbers of devices, up to round-off.

Each process plays the same games, with the same seed, and each device learns from its rows of what was seen. Networks
and optimizer are saved with --workdir; the games are not, so that a run that is resumed (--resume) plays new
ones. Copy this file into your project and change what you like.
"""

from absl import app

import kerasdp

GAMES, STEPS, DISCOUNT, UPDATES = 16, 16, 0.98, 800
kerasdp.flags.define()  # --backend, --gpus, --precision, --workdir, --resume, and all else that `launch` takes


def train(runner: "kerasdp.Runner") -> float:
    """Runs in every worker process, after the backend is chosen."""
    import gymnasium
    import keras
    import numpy as np
    from keras import layers, ops

    with runner.scope():
        network = keras.Sequential(
            [keras.Input((4,)), layers.Dense(64, "tanh"), layers.Dense(64, "tanh"), layers.Dense(3)]
        )
        optimizer = keras.optimizers.Adam(3e-3, clipnorm=0.5)
    optimizer.build(network.trainable_variables)

    # For each state two numbers for the two moves, and the sum of rewards that is expected from here.
    look = runner.step(lambda states: network(states), returns="rows")

    @runner.step
    def train_step(seen):
        states, moves, returns = seen["states"], seen["moves"], seen["returns"]

        def loss_of():
            found = network(states, training=True)
            chances = ops.log_softmax(found[:, :2])
            advantage = returns - found[:, 2]
            chosen = ops.sum(chances * ops.one_hot(moves, 2), axis=1)
            entropy = -ops.sum(ops.exp(chances) * chances, axis=1)
            return ops.mean(0.5 * ops.square(advantage) - chosen * ops.stop_gradient(advantage) - 0.01 * entropy)

        loss, gradients = kerasdp.value_and_grad(loss_of, network.trainable_variables)()
        optimizer.apply(gradients, network.trainable_variables)
        return loss

    games = gymnasium.make_vec("CartPole-v1", num_envs=GAMES, vectorization_mode="sync")
    random = np.random.RandomState(runner.config.seed)
    states, _ = games.reset(seed=runner.config.seed)
    lengths, ended = np.zeros(GAMES), [20.0]
    runner.checkpoint(models=network, optimizers=optimizer)
    for _ in runner.steps(UPDATES):
        seen, rewards, goes_on = {"states": [], "moves": []}, [], []
        for _ in range(STEPS):
            found = ops.convert_to_numpy(look(states))
            moves = (random.rand(GAMES) < 1 / (1 + np.exp(found[:, 0] - found[:, 1]))).astype("int32")
            seen["states"].append(states)
            seen["moves"].append(moves)
            states, reward, is_over, is_cut, _ = games.step(moves)
            rewards.append(reward / 10)
            goes_on.append(1.0 - (is_over | is_cut))
            lengths += 1
            ended += lengths[is_over | is_cut].tolist()
            lengths[is_over | is_cut] = 0
        total, returns = ops.convert_to_numpy(look(states))[:, 2], []
        for reward, more in zip(reversed(rewards), reversed(goes_on), strict=True):
            total = reward + DISCOUNT * more * total
            returns.append(total)
        batch = {name: np.concatenate(parts) for name, parts in seen.items()}
        loss = train_step(batch | {"returns": np.concatenate(returns[::-1]).astype(keras.config.floatx())})
        runner.log({"loss": loss, "steps of the last 50 games": np.mean(ended[-50:])})
    games.close()
    return float(np.mean(ended[-50:]))


def main(_) -> None:
    """Runs in the process that was started."""
    kerasdp.launch(train, **kerasdp.flags.values())


if __name__ == "__main__":
    app.run(main)
