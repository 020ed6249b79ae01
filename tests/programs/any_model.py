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
    if sys.argv[2] == "1":
        make_before()
    elif sys.argv[1] != "torch":  # one process, in which nothing starts before: a run on several devices needs another
        sys.argv[3:] = [name for name in sys.argv[3:] or CASES if "made_before" not in name]
    main(CASES, precision="auto")
elif sys.argv[1:2] == ["torch"]:
    make_before()
