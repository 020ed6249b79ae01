"""Runs `recipes/train.py` with garbage collected often, in whose callbacks a signal's exception would be lost.

python interrupted.py THRESHOLD MARK FLAGS...: THRESHOLD as in `gc.set_threshold`; MARK is a file that says that it runs
"""

import gc
import pathlib
import runpy
import sys

RECIPE = pathlib.Path(__file__).resolve().parents[2] / "recipes" / "train.py"

if __name__ == "__main__":
    _, threshold, mark, *flags = sys.argv
    gc.freeze()  # what was imported before: else each collection would look at all of it
    gc.set_threshold(int(threshold))
    sys.argv[:] = [str(RECIPE), *flags]
    sys.path[0] = str(RECIPE.parent)
    pathlib.Path(mark).touch()
    runpy.run_path(str(RECIPE), run_name="__main__")
