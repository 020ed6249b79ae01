"""Stages, devices and micro-batches go together, or one line says why not."""

import pytest

from kerasdp.config import Config
from kerasdp.errors import UserError


def pipeline(**changes):
    return Config(strategy="pipeline", **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split_size": 0}, "--split_size: expected a whole number of at least 1. Received: 0"),
        ({"split_size": "4"}, "--split_size: expected a whole number of at least 1. Received: '4'"),
        ({"backend": "jax"}, "Received: jax; use --backend=torch, or --backend=jax with --shard=weights"),
        ({"num_devices": 2, "cut_at": "a,b"}, "--gpus: expected 3, a device for each stage. Received: 2"),
        ({"num_devices": 4, "cut_at": "a"}, "--gpus: expected 2, a device for each stage. Received: 4"),
    ],
)
def test_a_wrong_choice_is_one_line(changes, words):
    with pytest.raises(UserError) as caught:
        pipeline(**changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "num_devices"),
    [
        ({"cut_at": "a,b,c"}, 4),
        ({"cut_at": "a", "num_devices": 2}, 2),
        ({}, None),
    ],
)
def test_as_many_devices_as_stages(changes, num_devices):
    """Whoever says how many stages has said how many devices."""
    settings = pipeline(**changes).with_devices_for_stages()
    assert settings.num_devices == num_devices
    assert settings.with_devices_for_stages() == settings
    assert Config().with_devices_for_stages() == Config()
