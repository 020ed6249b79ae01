"""How programs start a run, and print what came of it."""

import json

import kerasdp


def printed(train, backend, num_devices=1, **settings):
    """Runs `train` on CPU devices, without a word, and prints what it returns."""
    choices = {"device": "cpu", "verbose": 0} | settings
    result = kerasdp.launch(train, backend=backend, num_devices=int(num_devices), **choices)
    print("RESULT " + json.dumps(result))
