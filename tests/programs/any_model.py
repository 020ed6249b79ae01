"""Trains subclasses of `keras.Model` of many kinds: what each gives, or why it is refused.

python any_model.py BACKEND NUM_DEVICES [CASE...]
"""

import functools
import sys

import chosen_backend  # noqa: F401
import model_kinds  # noqa: F401  # holds cases, as does the next
import model_methods  # noqa: F401
from model_case import CASES
from model_changes import MADE_BEFORE, make_before
from starting import printed

import kerasdp


def train(runner, names):
    left_out = () if MADE_BEFORE else ("made_before_launch", "optimizer_made_before_launch")
    return {name: outcome(CASES[name], runner) for name in names or CASES if name not in left_out}


def outcome(function, runner):
    try:
        return function(runner)
    except kerasdp.UserError as error:
        return str(error)
    except Exception as error:
        return f"a crash: {type(error).__name__}: {error}"


if __name__ == "__main__":
    backend, num_devices, *names = sys.argv[1:]
    if num_devices == "1":  # else it would have to be sent to other processes, and nothing starts
        make_before()
    printed(functools.partial(train, names=names), backend, num_devices)
elif sys.argv[1:2] == ["torch"]:
    make_before()
