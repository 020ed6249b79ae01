"""The recipe for text refuses what it has no use for."""

import shutil

from tests.helpers import ROOT, run


def test_a_copy_refuses_what_it_has_no_use_for(tmp_path):
    """In an empty folder."""
    shutil.copy(ROOT / "recipes" / "text.py", tmp_path)
    refused = run("text.py", "--model=resnet18", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert refused.returncode == 1
    assert "Unknown command line flag 'model'" in refused.stderr and "Traceback" not in refused.stderr
