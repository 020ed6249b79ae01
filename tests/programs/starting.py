"""How programs start a run, and print what came of it."""

import dataclasses
import functools
import json
import sys

import kerasdp

FIELDS = {field.name for field in dataclasses.fields(kerasdp.Config)}


def printed(train, backend, num_devices=1, **settings):
    """Runs `train` on CPU devices, without a word, and prints what it returns."""
    choices = {"device": "cpu", "verbose": 0} | settings
    result = kerasdp.launch(train, backend=backend, num_devices=int(num_devices), **choices)
    print("RESULT " + json.dumps(result))


def each_case(train, **settings):
    """Runs `train` for each case of the command, a list in JSON; prints what each returns, or in words why it failed.

    A case holds fields of `kerasdp.Config`; of what else is in it are the arguments of `train`.
    """
    results = []
    for case in json.loads(sys.argv[1]):
        work = functools.partial(train, **{name: case[name] for name in case if name not in FIELDS})
        fields = settings | {name: case[name] for name in case if name in FIELDS}
        try:
            results.append(kerasdp.launch(work, **fields))
        except kerasdp.UserError as error:
            results.append(str(error))
    print("RESULT " + json.dumps(results))
