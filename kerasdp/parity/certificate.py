"""Writes down how a model trains in all ways that a machine has, so that others can find out whether it does so there.

A card is a file of JSON. It says nothing that is believed: `verify` trains again, and compares.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import html
import importlib.util
import json
import os
import pathlib
import shlex
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kerasdp.config import spec
from kerasdp.config.validation import BACKENDS, versions
from kerasdp.errors import RunError, UserError
from kerasdp.parity.compare import Reference, judge
from kerasdp.parity.divergence import difference, tolerance_for
from kerasdp.parity.trace import Job, Trace, Way, trace
from kerasdp.runtime.devices import is_installed

FORMAT = 1
PRECISIONS = ("float64", "float32")
_FIELDS = {
    "kerasdp card": int, "made": str, "what": dict, "source": str, "versions": dict, "initial": str, "trained": dict,
    "sha256": str,
}  # fmt: skip
_OF_TRAINED = {"optimizer": str, "losses": list, "gradient_norms": list, "samples": str, "final": dict, "ways": list}


def source_of(model: str) -> str:
    """Returns the SHA-256 of the file that makes a model, as `Config.model` names it; of a built-in one, of all such.

    What that file imports is not in it.
    """
    name = spec.parse(model, "model")[0]
    file = name.partition(":")[0]
    if not spec.is_user_function(name):
        folder = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "models")
        paths = sorted(os.path.join(folder, each) for each in os.listdir(folder) if each.endswith(".py"))
    else:
        here = file if file.endswith(".py") else file.replace(".", "/") + ".py"  # of this folder, or installed
        with contextlib.suppress(ModuleNotFoundError):
            found = None if os.path.exists(here) or here == file else importlib.util.find_spec(file)
            here = found.origin if found is not None and found.origin else here
        paths = [here]
    digest = hashlib.sha256()
    for each in paths:
        try:
            digest.update(pathlib.Path(each).read_bytes())
        except OSError as error:
            raise UserError(f"--model: cannot read {each} ({error.strerror or error})") from error
    return digest.hexdigest()


def certify(
    build_model: Callable[[], Any],
    data: Any,
    *,
    what: dict[str, Any],
    source: str,
    backends: Iterable[str] | None = None,
    device_counts: Iterable[int] = (1, 2),
    report: Callable[[str], None] = lambda line: None,
    **choices: Any,
) -> dict[str, Any]:
    """Trains a model a few steps in each way, each in a process of its own, and returns its card.

    Args:
        build_model: as for `kerasdp.parity.compare`.
        data: likewise.
        what: names what is trained, for the reader of the card: JSON.
        source: a digest of the code of the model: `source_of`.
        backends: None: all that are installed. The first on the first number of devices is what all are compared with.
        device_counts: replicas.
        report: called with a line for each way.
        **choices: fields of `Job`: `steps`, `batch_size`, `seed`, `device`, ...

    Raises:
        UserError: if the model cannot be sent to other processes, or the first way cannot be trained.
    """
    job, ways = Job(build_model=build_model, data=data, **choices), _ways(backends, device_counts)
    card: dict[str, Any] = {
        "kerasdp card": FORMAT, "made": datetime.date.today().isoformat(),
        "what": what | {name: getattr(job, name) for name in ("steps", "batch_size", "seed")},
        "source": source, "versions": versions(), "trained": {},
    }  # fmt: skip
    for precision in PRECISIONS:
        first, *others = (dataclasses.replace(way, precision=precision) for way in ways)
        reference = Reference(job, first)
        found, rows = reference.trace(), []
        for way in (first, *others):
            outcome = judge(way, reference, reference.tolerance())
            worst = float(outcome.differences.max()) if len(outcome.differences) else None
            rows.append({"way": str(way), "difference": worst, "passed": outcome.passed, "said": str(outcome)})
            report(f"{way}: {outcome}" if way != first else f"{way}: what the others are compared with")
        card["initial"] = card.get("initial") or _digest(found.initial.values())
        card["trained"][precision] = {
            "optimizer": found.optimizer, "losses": found.losses.tolist(),
            "gradient_norms": found.gradient_norms.tolist(), "samples": _digest(found.samples),
            "final": _sizes(found), "ways": rows,
        }  # fmt: skip
    return card | {"sha256": _checksum(card)}


def verify(
    card: dict[str, Any],
    build_model: Callable[[], Any],
    data: Any,
    *,
    what: dict[str, Any],
    source: str,
    backends: Iterable[str] | None = None,
    device_counts: Iterable[int] = (1, 2),
    report: Callable[[str], None] = lambda line: None,
    **choices: Any,
) -> list[str]:
    """Trains a model here as its card says: in float64 in each way, then in float32. Returns in words what differs.

    Args:
        card: of `read_card`.
        build_model: the model, from whoever verifies it: the card names it alone.
        data: likewise.
        what: as for `certify`.
        source: a digest of its code here.
        backends: None: all that are installed.
        device_counts: replicas, in float64; in float32 it is one.
        report: called with a line for each way.
        **choices: other fields of `Job` than those that the card says.
    """
    found = []
    if card["sha256"] != _checksum(card):
        found.append("the card was changed after it was made: its checksum is wrong")
    if card["source"] != source:
        found.append("the code of the model is another than the card's")
    for name, own in what.items():
        if card["what"].get(name) != own:
            expected = card["what"].get(name)
            found.append(f"the card is of another {name}: expected {expected!s:.200}. Received: {own}")
    job = Job(build_model=build_model, data=data, **choices, **{name: card["what"][name] for name in _OF_JOB})
    for precision in PRECISIONS:
        for way in _ways(backends, device_counts if precision == "float64" else (1,)):
            way = dataclasses.replace(way, precision=precision)
            try:
                differences = list(_differences(card, trace(job, way), precision))
            except RunError as error:
                differences = [f"it failed: {error}"]
            report(f"{way}: {differences[0] if differences else 'as the card says'}")
            found += [f"{way}: {line}" for line in differences]
    return found


_OF_JOB = ("steps", "batch_size", "seed")
_MOST = 2**32 - 1


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def read_card(path: str) -> dict[str, Any]:
    """Reads a card. It may come from anybody: each field is checked, and what it says is compared, not believed.

    Raises:
        UserError: if it is none.
    """
    try:
        with open(path) as file:
            card = json.load(file)
    except (OSError, ValueError) as error:
        raise UserError(f"--card: cannot read {path} ({error})") from error
    _require(isinstance(card, dict) and card.get("kerasdp card") == FORMAT, path)
    _require(all(isinstance(card.get(name), kind) for name, kind in _FIELDS.items()), path)
    for trained in card["trained"].values():
        _require(isinstance(trained, dict), path)
        _require(all(isinstance(trained.get(name), kind) for name, kind in _OF_TRAINED.items()), path)
        _require(all(map(_is_number, (*trained["losses"], *trained["gradient_norms"]))), path)
        pairs = trained["final"].values()
        _require(all(isinstance(pair, list) and len(pair) == 2 and all(map(_is_number, pair)) for pair in pairs), path)
    _require(set(card["trained"]) == set(PRECISIONS), path)
    given = [card["what"].get(name) for name in _OF_JOB]
    _require(all(type(value) is int and 0 <= value <= _MOST for value in given) and 0 not in given[:2], path)
    return card


def _require(is_right: bool, path: str) -> None:
    if not is_right:
        raise UserError(f"--card: expected a card of format {FORMAT}, of recipes/certify.py. Received: {path}")


def write_card(card: dict[str, Any], folder: str) -> list[str]:
    """Writes card.json, card.md and its badge, card.svg; returns their paths."""
    os.makedirs(folder, exist_ok=True)
    paths = [os.path.join(folder, name) for name in ("card.json", "card.md", "card.svg")]
    for path, text in zip(paths, (json.dumps(card, indent=1), _markdown(card), _badge(card))):
        with open(path, "w") as file:
            file.write(text)
    return paths


def _ways(backends: Iterable[str] | None, device_counts: Iterable[int]) -> list[Way]:
    names = [name for name in BACKENDS if is_installed(name)] if backends is None else list(backends)
    return [Way(backend=name, num_devices=count) for name in names for count in device_counts]


def _digest(arrays: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for array in map(np.asarray, arrays):
        # In float32 all backends begin with the same bits.
        exact = array.astype("float32" if array.dtype.kind == "f" else "int64")
        digest.update(f"{exact.shape}".encode() + np.ascontiguousarray(exact).tobytes())
    return digest.hexdigest()


def _sizes(found: Trace) -> dict[str, list[float]]:
    """Returns the sum of each weight's numbers after the last step, and of their magnitudes."""
    return {
        name: [float(value.astype("float64").sum()), float(np.abs(value.astype("float64")).sum())]
        for name, value in found.final.items()
        if value.dtype.kind == "f"
    }


def _checksum(card: dict[str, Any]) -> str:
    content = {name: value for name, value in card.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _differences(card: dict[str, Any], found: Trace, precision: str) -> Iterable[str]:
    """Yields in words what a training has otherwise than a card says."""
    said = card["trained"][precision]
    if _digest(found.initial.values()) != card["initial"]:
        yield "initial weights are others"
    if _digest(found.samples) != said["samples"]:
        yield "the steps have other samples"
    if found.optimizer != said["optimizer"]:
        yield f"expected the optimizer {said['optimizer']}. Received: {found.optimizer}"
    tolerance = tolerance_for(precision, found.optimizer)
    for name, own in (("losses", found.losses), ("gradient_norms", found.gradient_norms)):
        if len(own) != len(said[name]):
            yield f"expected {len(said[name])} {name.replace('_', ' ')}. Received: {len(own)}"
            continue
        for step, (expected, received) in enumerate(zip(np.array(said[name], float), own)):
            apart = difference(expected, received)
            allowed = tolerance.after(step) if name == "losses" else tolerance.of_gradients(step)
            if not apart <= allowed:
                what = "loss" if name == "losses" else "norm of the gradient"
                yield f"step {step}: {what}: expected {expected:.9g}, received {received:.9g} ({apart:.1e} apart)"
                break
    sizes, allowed = _sizes(found), tolerance.of_gradients(len(found.losses))
    # The class of a layer may be numbered.
    for (name, expected), (_, received) in zip(said["final"].items(), sizes.items()):
        if not np.abs(np.subtract(expected, received)).max() <= allowed * max(received[1], 1e-3):
            yield f"after the last step {name} is another"
            break
    if len(said["final"]) != len(sizes):
        yield f"expected {len(said['final'])} weights. Received: {len(sizes)}"


def _passed(card: dict[str, Any]) -> list[str]:
    """Returns the backends on which all ways have passed."""
    ways = [way for trained in card["trained"].values() for way in trained["ways"]]
    names = dict.fromkeys(way["way"].split(" ")[0] for way in ways)
    return [name for name in names if all(way["passed"] for way in ways if way["way"].startswith(f"{name} "))]


def _markdown(card: dict[str, Any]) -> str:
    what = card["what"]
    lines = [
        f"# How {what.get('model', 'this model')} trains", "", "![portable](card.svg)", "",
        f"{what['steps']} steps of {what['batch_size']} samples, seed {what['seed']}, made on {card['made']} with "
        + ", ".join(f"{name} {version}" for name, version in card["versions"].items()) + ".", "",
        "| trained on | largest difference of a loss | |", "|---|---|---|",
    ]  # fmt: skip
    for trained in card["trained"].values():
        for number, way in enumerate(trained["ways"]):
            worst = "what the others are compared with" if number == 0 else f"{way['difference'] or 0:.1e}"
            lines.append(f"| {way['way']} | {worst} | {'as the first' if way['passed'] else '**otherwise**'} |")
    given = ((name, value) for name, value in what.items() if name not in _OF_JOB and value is not None)
    flags = " ".join(shlex.quote(f"--{name}={value}") for name, value in given)
    lines += ["", f"SHA-256 of the model's source: `{card['source']}`. It is verified by", ""]
    lines += [f"    kerasdp verify --card=card.json {flags}"]
    return "\n".join(lines) + "\n"


def _badge(card: dict[str, Any]) -> str:
    """Returns a picture: the backends on which it trains alike."""
    names = _passed(card)
    words, colour = (", ".join(names), "#2e7d32") if len(names) > 1 else ("not shown", "#9e9e9e")
    left, right = 62, 16 + 7 * len(words)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img">'
        f"<title>portable: {html.escape(words)}</title>"
        f'<rect width="{left}" height="20" fill="#555"/><rect x="{left}" width="{right}" height="20" fill="{colour}"/>'
        '<g fill="#fff" font-family="Verdana,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{left / 2}" y="14">portable</text>'
        f'<text x="{left + right / 2}" y="14">{html.escape(words)}</text></g></svg>\n'
    )
