"""Says what the flags of a recipe say of command lines.

python parse_flags.py RECIPE LINES: a list of lists of arguments, in JSON. Of each comes its error, or null.
"""

import copy
import importlib
import json
import pathlib
import sys

from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "recipes"))


def error_of(arguments):
    try:
        rest = copy.deepcopy(flags.FLAGS)(["program", *arguments])[1:]
    except flags.Error as error:
        return str(error)
    return f"no flags: {rest}" if rest else None


if __name__ == "__main__":
    importlib.import_module(sys.argv[1])
    print("RESULT", json.dumps([error_of(arguments) for arguments in json.loads(sys.argv[2])]))
