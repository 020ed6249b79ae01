"""Finds what comes with the package to run and to copy: recipes, flagfiles, templates."""

import ast
import dataclasses
import json
import os
import pathlib
import shutil

from kerasdp.errors import UserError

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
# The folders: what each holds, and the endings of its files.
FOLDERS = {
    "recipes": ("Recipes: kerasdp NAME runs them", (".py", ".ipynb")),
    "flags": ("Named runs: kerasdp train --flagfile=NAME", (".flags",)),
    "cluster": ("Templates for SLURM, Kubernetes, torchrun, mpirun and Ray", (".sbatch", ".yaml", ".sh")),
}


@dataclasses.dataclass(frozen=True)
class Item:
    """A file that people run or copy.

    Args:
        folder: one of `FOLDERS`.
        path: where it is.
    """

    folder: str
    path: pathlib.Path

    @property
    def name(self) -> str:
        """Returns what the command calls it: `train`, `smoke.flags`."""
        return self.path.stem if self.is_recipe else self.path.name

    @property
    def is_recipe(self) -> bool:
        """Returns whether it is a recipe that the command runs."""
        return self.folder == "recipes" and self.path.suffix == ".py"

    @property
    def summary(self) -> str:
        """Returns its first line: of the docstring, of the comments, or the title of a notebook."""
        text = self.path.read_text()
        if self.path.suffix == ".py":
            return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        if self.path.suffix == ".ipynb":
            return "".join(json.loads(text)["cells"][0]["source"]).partition("\n")[0].lstrip("# ")
        lines = (line.lstrip("# ") for line in text.splitlines() if line.startswith("#") and not line.startswith("#!"))
        return next(lines, "")

    def with_its_imports(self) -> list[pathlib.Path]:
        """Returns its path, and those of the files of its folder that it imports, or that these import."""
        found, new = [], [self.path]
        while new:
            found += new
            names = {name for path in new if path.suffix == ".py" for name in _imports(path)}
            new = sorted({self.path.parent / f"{name}.py" for name in names} - set(found))
            new = [path for path in new if path.exists()]
        return found


def root() -> pathlib.Path:
    """Returns the folder that holds `FOLDERS`: within the installed package, or the checkout that it is in."""
    installed = _PACKAGE / "kit"
    return installed if installed.is_dir() else _PACKAGE.parent


def items(folder: str) -> list[Item]:
    """Returns what there is in one of `FOLDERS`, by name."""
    endings = FOLDERS[folder][1]
    return [Item(folder, path) for path in sorted((root() / folder).glob("*")) if path.suffix in endings]


def recipes() -> dict[str, Item]:
    """Returns the recipes that the command runs, by name."""
    return {item.name: item for item in items("recipes") if item.is_recipe}


def find(name: str) -> list[Item]:
    """Returns the item of this name, with or without its folder and ending, or all of a folder.

    Raises:
        UserError: if there is none.
    """
    if name.rstrip("/") in FOLDERS:
        return items(name.rstrip("/"))
    for item in (item for folder in FOLDERS for item in items(folder)):
        file = item.path.name
        if name in (f"{item.folder}/{file}", f"{item.folder}/{item.path.stem}", file, item.path.stem):
            return [item]
    raise UserError(f"expected the name of a recipe, a flagfile, or what else `kerasdp list` shows. Received: {name!r}")


def copy(name: str, destination: str, *, force: bool) -> list[pathlib.Path]:
    """Copies an item, with the files of its folder that it imports, or a whole folder.

    Args:
        name: as for `find`.
        destination: a folder, which is made if need be, or, of one item, a file with the same ending.
        force: overwrite what is there; of a link the link, not what it leads to.

    Returns:
        The files that were written.

    Raises:
        UserError: if there is no such item, or a file is in the way.
    """
    found, place = find(name), pathlib.Path(destination)
    if os.path.lexists(place) and not place.exists():
        raise UserError(f"expected a folder or a file to copy to. Received: {destination!r}, a link to nothing")
    if place.exists() and not place.is_dir() and (len(found) > 1 or place.suffix != found[0].path.suffix):
        raise UserError(f"expected a folder to copy into. Received: {destination!r}, which is a file")
    sources = dict.fromkeys(path for item in found for path in item.with_its_imports())
    targets = {path: place / path.name for path in sources}
    if len(found) == 1 and place.suffix == found[0].path.suffix and not place.is_dir():
        targets = {path: place.parent / path.name for path in sources} | {found[0].path: place}
    in_the_way = [str(target) for target in targets.values() if os.path.lexists(target)]
    if in_the_way and not force:
        raise UserError(f"there is already {', '.join(in_the_way)}: copy to another place, or overwrite with --force")
    for source, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink():  # not what it leads to
            target.unlink()
        shutil.copy(source, target)
    return list(targets.values())


def _imports(path: pathlib.Path) -> set[str]:
    """Returns the first names of all modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names
