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
        (
            {"num_devices": 2, "cut_at": "a,b"},
            "--gpus: expected a multiple of the 3 stages, a device each. Received: 2",
        ),
        ({"num_devices": 8, "cut_at": "a", "batch_size": 3}, "expected at least 4 for 4 devices. Received: 3"),
    ],
)
def test_a_wrong_choice_is_one_line(changes, words):
    with pytest.raises(UserError) as caught:
        pipeline(**changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "num_devices", "stages", "pipelines"),
    [
        ({}, 4, 4, 1),
        ({"cut_at": "a"}, 4, 2, 2),
        ({"cut_at": "a,b"}, 6, 3, 2),
    ],
)
def test_stages_and_devices(changes, num_devices, stages, pipelines):
    settings = pipeline(**changes)
    assert settings.stages_on(num_devices) == stages
    assert settings.num_pipelines(num_devices) == settings.num_replicas(num_devices) == pipelines


def test_replicas_of_other_strategies():
    assert Config().num_replicas(4) == 4
    assert Config(strategy="tensor").num_replicas(4) == 1


@pytest.mark.parametrize(
    ("changes", "num_devices"),
    [
        ({"cut_at": "a,b,c"}, 4),
        ({"cut_at": "a", "num_devices": 4}, 4),
        ({}, None),
    ],
)
def test_as_many_devices_as_stages(changes, num_devices):
    """Whoever says how many stages has said how many devices."""
    settings = pipeline(**changes).with_devices_for_stages()
    assert settings.num_devices == num_devices
    assert settings.with_devices_for_stages() == settings
    assert Config().with_devices_for_stages() == Config()


@pytest.mark.parametrize(
    ("changes", "num_stages", "num_pipelines", "expected"),
    [
        ({}, 2, 1, 16),  # two a stage
        ({}, 4, 1, 8),
        ({}, 2, 2, 8),
        ({"batch_size": 61}, 2, 1, 16),  # 16, 16, 16, 13
        ({"batch_size": 3}, 4, 1, 1),  # there are no more
        ({"split_size": 5}, 2, 2, 5),  # of each pipeline
        ({"split_size": 100}, 2, 1, 64),
        ({"split_size": 7}, 2, 1, 7),
    ],
)
def test_size_of_a_micro_batch(changes, num_stages, num_pipelines, expected):
    assert pipeline(**changes).micro_batch_size(num_stages, num_pipelines) == expected
