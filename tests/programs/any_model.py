"""Trains subclasses of `keras.Model` of many kinds: what each gives, or why it is refused.

python any_model.py BACKEND NUM_DEVICES [CASE...]
"""

import sys

import chosen_backend  # noqa: F401
import model_kinds  # noqa: F401  # holds cases, as does the next
import model_methods  # noqa: F401
from model_case import CASES
from model_changes import make_before
from own_steps_base import main

if __name__ == "__main__":
    left_out = ()
    if sys.argv[2] == "1":  # else it would have to be sent to other processes, and nothing starts
        make_before()
    else:
        left_out = ("made_before_launch", "optimizer_made_before_launch")
    main({name: case for name, case in CASES.items() if name not in left_out}, precision="auto")
elif sys.argv[1:2] == ["torch"]:
    make_before()
