"""On GPUs TensorFlow's convolutions keep one layout around batch norm."""

import pytest

from tests.helpers import BACKENDS

pytestmark = pytest.mark.skipif("tensorflow" not in BACKENDS, reason="tensorflow is not installed")


@pytest.mark.parametrize("capability", [(9, 0), (7, 5)])
def test_with_statistics_of_all_rows_images_stay_as_they_are(capability, monkeypatch):
    """Where convolutions take them so, which older GPUs' do not: there each would transpose by itself."""
    import tensorflow as tf

    from kerasdp.backends.tensorflow.devices import _leave_channels_last

    given = []
    details = {"device_name": "a GPU", "compute_capability": capability}
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["a GPU"])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: details)
    monkeypatch.setattr(tf.config.optimizer, "set_experimental_options", given.append)
    _leave_channels_last(["a GPU", "another"])
    assert given == ([{"layout_optimizer": False}] if capability == (9, 0) else [])
