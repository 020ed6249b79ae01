"""Checks how devices are to share a batch (`device_shares`), and where their gradients are added (`reduce`)."""

from typing import Any

from kerasdp.errors import UserError

REDUCES = (None, "device", "host")
AUTO = "auto"
# What is to be said of `reduce` on them.
VIRTUAL = "virtual CPU devices are in host memory, so that it frees none"


def are_shares(text: str) -> bool:
    """Returns whether a text is `auto`, or whole numbers of at least 1, as `3,1`."""
    return text == AUTO or all(part.strip().isdecimal() and int(part) > 0 for part in text.split(","))


def shares_of(text: str | None) -> tuple[int, ...] | None:
    """Returns the shares that `Config.device_shares` gives; None if there are none, or they are to be measured."""
    return None if text in (None, AUTO) else tuple(int(part) for part in str(text).split(","))


def check(config: Any) -> None:
    """Raises `UserError` if other choices of a `Config` do not go together with its shares, or its way to add."""
    for flag in ("reduce", "device_shares"):
        choice = getattr(config, flag)
        if choice is None:
            continue
        if config.engine != "data":
            other = f"--accumulate={config.accumulate}" if config.accumulate > 1 else f"--strategy={config.strategy}"
            raise UserError(f"--{flag}={choice}: not together with {other}; leave out one of them")
        if config.dry_run:
            raise UserError(
                f"--{flag}={choice}: a dry run tells of equal shares, and of gradients that are added on the devices; "
                "leave out one of them"
            )
    if config.backend == "jax" and config.reduce == "host":
        raise UserError(
            "--reduce=host: there for --backend=torch and tensorflow. Received: jax, where XLA adds up the gradients "
            "on the devices, within a step's program; use one of those, or leave it out"
        )
    if config.reduce == "host" and config.compile == "on":
        raise UserError(
            "--reduce=host: not together with --compile=on, whose step is one graph on the GPU; leave out one of them"
        )
    if config.device_shares is None:
        return
    if config.backend == "jax":
        raise UserError(
            f"--device_shares={config.device_shares}: there for --backend=torch and tensorflow. Received: jax, where "
            "XLA gives each device equally many rows; use one of those, or leave it out"
        )
    fewest, most = config.host_range
    if fewest != most:
        raise UserError(
            f"--device_shares={config.device_shares}: not together with --hosts={config.hosts}, with which devices "
            "leave and join; give one number of hosts, or leave it out"
        )


def check_replicas(config: Any, num_replicas: int) -> None:
    """Raises `UserError` if so many replicas cannot share a batch, or add gradients, as asked."""
    if config.gradient_precision != "float32" and num_replicas == 1:
        raise UserError(
            f"--gradient_precision={config.gradient_precision}: one device sends no gradients; leave it out, or use "
            "--gpus=2 or more"
        )
    _check_shares(config, num_replicas)
    if config.accumulate > 1 and num_replicas > 1 and config.backend == "tensorflow":
        raise UserError(
            f"--accumulate: expected --gpus=1 with --backend=tensorflow, whose replicas cannot meet within a loop. "
            f"Received: {num_replicas}; use --backend=torch or jax"
        )
    if config.batch_size < num_replicas:
        raise UserError(
            f"--batch_size counts the samples of all devices together: expected at least {num_replicas} "
            f"for {num_replicas} devices. Received: {config.batch_size}"
        )
    rows = config.replica_batch_size(num_replicas)
    if config.accumulate > rows:
        raise UserError(f"--accumulate: expected at most {rows}, a device's samples. Received: {config.accumulate}")
    count = -(-rows // -(-rows // config.accumulate))
    if count != config.accumulate:
        raise UserError(
            f"--accumulate: {rows} samples, those of a device, cannot be cut into {config.accumulate} parts of one "
            f"size, but for the last; use {count}, or another --batch_size"
        )


def num_pipelines(config: Any, num_devices: int) -> int:
    """Returns how many pipelines share the batch.

    Raises:
        UserError: if stages and devices do not go together.
    """
    stages = config.stages_on(num_devices)
    if config.pipeline_schedule == "interleaved1f1b":
        if stages % num_devices or stages == num_devices:
            raise UserError(
                f"--stages: expected a multiple of the {num_devices} devices with --pipeline_schedule=interleaved1f1b, "
                f"several on each. Received: {stages}"
            )
        return 1
    if num_devices % stages:
        raise UserError(f"--gpus: expected a multiple of the {stages} stages, a device each. Received: {num_devices}")
    if config.backend == "tensorflow" and num_devices > stages:
        raise UserError(
            f"--gpus: expected {stages}, one pipeline, with --backend=tensorflow, whose strategies copy a model "
            f"device by device. Received: {num_devices}; use --backend=torch or jax"
        )
    return num_devices // stages


def _check_shares(config: Any, num_replicas: int) -> None:
    for flag in ("reduce", "device_shares"):
        if getattr(config, flag) is not None and num_replicas == 1:
            does = "adds no gradients" if flag == "reduce" else "has all of the batch"
            raise UserError(
                f"--{flag}={getattr(config, flag)}: one device {does}; leave it out, or use --gpus=2 or more"
            )
    shares = shares_of(config.device_shares)
    if shares is None:
        return
    if len(shares) != num_replicas:
        raise UserError(
            f"--device_shares: expected {num_replicas} numbers, one for each device. Received: {len(shares)}, "
            f"{config.device_shares}"
        )
    if config.batch_size * min(shares) < sum(shares):
        raise UserError(
            f"--device_shares={config.device_shares}: of a batch of {config.batch_size} samples a device would get "
            "less than one; use a larger --batch_size, or other shares"
        )
