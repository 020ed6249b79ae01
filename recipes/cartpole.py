"""Trains an actor-critic agent on gymnasium's CartPole with a custom loop.

    pip install gymnasium
    python recipes/cartpole.py                                       # the first backend installed
    python recipes/cartpole.py --backend=jax --gpus=2 --workdir=runs/cartpole

Expected of the first command: the pole stands for 20 steps at the start, and for more than 300 on average after 800
updates. This takes a minute on two CPU cores. The curve is the same on all backends and numbers of devices, up to
round-off.

Each process plays the same games, with the same seed. Each device trains on its rows of the batch. With --workdir the
network and the optimizer are saved. The games are not saved, so a resumed run (--resume) plays new games.

Copy this file into your project and edit it.
"""

from absl import app

import kerasdp

GAMES, STEPS, DISCOUNT, UPDATES = 16, 16, 0.98, 800
kerasdp.flags.define()  # --backend, --gpus, --precision, --workdir, --resume, and the other arguments of `launch`


def train(runner):
    """Trains the model, after the backend is chosen. With torch this function runs in one process for each device."""
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

    # Three outputs for each state: the logits of the two actions, and the value (the expected sum of rewards).
    policy = runner.step(lambda states: network(states), returns="rows")

    @runner.step
    def train_step(batch):
        states, actions, returns = batch["states"], batch["actions"], batch["returns"]

        def actor_critic_loss():
            outputs = network(states, training=True)
            log_probs = ops.log_softmax(outputs[:, :2])
            advantage = returns - outputs[:, 2]
            log_prob = ops.sum(log_probs * ops.one_hot(actions, 2), axis=1)
            entropy = -ops.sum(ops.exp(log_probs) * log_probs, axis=1)
            return ops.mean(0.5 * ops.square(advantage) - log_prob * ops.stop_gradient(advantage) - 0.01 * entropy)

        loss, gradients = kerasdp.value_and_grad(actor_critic_loss, network.trainable_variables)()
        optimizer.apply(gradients, network.trainable_variables)
        return loss

    games = gymnasium.make_vec("CartPole-v1", num_envs=GAMES, vectorization_mode="sync")
    random = np.random.RandomState(runner.config.seed)
    states, _ = games.reset(seed=runner.config.seed)
    lengths, ended = np.zeros(GAMES), [20.0]
    runner.checkpoint(models=network, optimizers=optimizer)
    for _ in runner.steps(UPDATES):
        played, rewards, continues = {"states": [], "actions": []}, [], []
        for _ in range(STEPS):
            logits = ops.convert_to_numpy(policy(states))
            actions = (random.rand(GAMES) < 1 / (1 + np.exp(logits[:, 0] - logits[:, 1]))).astype("int32")
            played["states"].append(states)
            played["actions"].append(actions)
            states, reward, is_over, is_cut, _ = games.step(actions)
            rewards.append(reward / 10)
            continues.append(1.0 - (is_over | is_cut))
            lengths += 1
            ended += lengths[is_over | is_cut].tolist()
            lengths[is_over | is_cut] = 0
        total, returns = ops.convert_to_numpy(policy(states))[:, 2], []
        for reward, goes_on in zip(reversed(rewards), reversed(continues), strict=True):
            total = reward + DISCOUNT * goes_on * total
            returns.append(total)
        batch = {name: np.concatenate(parts) for name, parts in played.items()}
        loss = train_step(batch | {"returns": np.concatenate(returns[::-1]).astype(keras.config.floatx())})
        runner.log({"loss": loss, "steps of the last 50 games": np.mean(ended[-50:])})
    games.close()
    return float(np.mean(ended[-50:]))


def main(argv):
    """Starts the training with the flags."""
    kerasdp.launch(train, **kerasdp.flags.values(argv))


if __name__ == "__main__":
    app.run(main)
