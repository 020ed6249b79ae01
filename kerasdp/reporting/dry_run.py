"""Formats what a dry run found out, for a terminal."""

from collections.abc import Iterator
from typing import Any

from kerasdp.errors import UserError
from kerasdp.reporting.report import in_columns

_WIDTH = 15


def lines(figures: dict[str, Any]) -> list[str]:
    """Returns the lines that tell of a run.

    Args:
        figures: as `kerasdp.training.dry_run.figures_of` returns them.
    """
    found: list[tuple[str, str]] = [*_places(figures), *_data(figures), *_sent(figures), *_held(figures)]
    if figures["ladder"] is not None:
        found.append(("fit into", "\n" + ladder_table(figures["ladder"])))
    head = "dry run: nothing is started, written or counted on this machine"
    return [head, *(f"{name:{_WIDTH}}{text}".rstrip() for name, text in found)]


def size(number: float) -> str:
    """Returns a number of bytes in a unit that people read: powers of 1,000."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            return f"{number:,.0f} bytes" if unit == "bytes" else f"{number:,.1f} {unit}"
        number /= 1000
    raise AssertionError


def _places(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    hosts, count, total = figures["hosts"], figures["devices_per_host"], figures["num_devices"]
    kind = "device" if figures["device"] == "auto" else figures["device"].upper()
    rate = figures["learning_rate"]
    yield (
        "run",
        (
            f"{figures['backend']} | {figures['model']} | batch {figures['batch_size']:,} | {figures['precision']}"
            + ("" if rate is None else f" | learning rate {rate:.6g}")
        ),
    )
    least = f", or as few as {figures['fewest_hosts']} hosts," if figures["fewest_hosts"] < hosts else ""
    replicas, stages = figures["num_replicas"], len(figures.get("stages", [0]))
    held = "a replica of the model on each" if stages == 1 else f"{_number(replicas, 'pipeline')} of {stages} stages"
    yield "devices", f"{_number(hosts, 'host')} x {_number(count, kind)} = {total:,}{least}: {held}"
    processes = figures["num_processes"]
    own = total // processes
    yield "processes", f"{processes:,}, each with {'one device' if own == 1 else f'the {own} devices of its host'}"
    if hosts > 1:
        numbers = [0, 1, hosts - 1] if hosts > 2 else [0, 1]
        told = [f"host {number}: {_of_host(number, processes // hosts, count)}" for number in numbers]
        yield "", "; ".join([*told[:2], *(["..."] if hosts > 3 else []), *told[2:]])
    elif processes > 1:
        yield "", _of_host(0, processes, count)


def _of_host(host: int, processes: int, devices: int) -> str:
    if processes == 1:
        return f"process {host} with devices {_range(host * devices, devices)}"
    return f"ranks {_range(host * processes, processes)}"


def _data(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    data = figures["data"]
    samples = "an unknown number of" if data["num_samples"] is None else f"{data['num_samples']:,}"
    test = f", {data['num_test_samples']:,} to evaluate" if data["num_test_samples"] else ""
    name = (
        data["dataset"].partition("(")[0] if data["kind"] in ("ArraySource", "StandIn", "ImageFolder") else data["kind"]
    )
    yield "data", f"{name}: {samples} samples to learn from{test}"
    if data["note"]:
        yield "", data["note"]
    full, last, epochs = data["full_batch"], data["last_batch"], figures["epochs"]
    each, steps = data["steps_per_epoch"], figures["steps"]
    in_all = "in all not known" if steps is None else f"{steps:,} in all"
    yield (
        "steps",
        ("not known" if each is None else f"{each:,} an epoch")
        + f", {_number(epochs, 'epoch')}, {in_all}"
        + (f"; {data['test_steps']:,} an evaluation" if data["test_steps"] else ""),
    )
    yield "full batch", _split(full)
    if last:
        yield "last batch", _split(last)
    own = data["replicas_per_process"] * full["rows"]
    if data["is_handed_out"]:
        yield "who reads", f"process 0 reads all batches, and hands out {own:,} rows to each process"
    elif "stages" in figures:
        yield "who reads", f"each process reads the rows of its pipeline, {size(data['bytes_per_sample'])} a sample"
    else:
        share = min(own, full["num_rows"])
        rows = f"process r reads rows {share:,} r to {share:,} r + {share - 1:,} of each batch"
        who = "the process reads all batches" if figures["num_processes"] == 1 else rows
        each_step, sample = size(share * data["bytes_per_sample"]), size(data["bytes_per_sample"])
        yield "who reads", f"{who}: {each_step} a step, {sample} a sample"


def _split(part: dict[str, int]) -> str:
    """Returns how the rows of a batch are split over the replicas, in words."""
    each = "each of " if part["full"] > 1 else ""
    words = [f"{part['rows']:,} on {each}{_number(part['full'], 'replica')}"]
    if part["rest"]:
        words.append(f"{part['rest']:,} on the next")
    if part["empty"]:
        words.append(f"none on {part['empty']:,}, which compute padding")
    return f"{part['num_rows']:,} samples: {', '.join(words)}"


def _sent(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "stages" in figures:
        for number, stage in enumerate(figures["stages"]):
            names = stage["layers"]
            out = f", {size(stage['bytes_per_sample'])} a sample to the next" if stage["bytes_per_sample"] else ""
            span = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
            held = stage["weights"] + stage["gradients"] + stage["optimizer"]
            yield f"stage {number}", f"{span}: holds {size(held)}{out}"
        if figures["is_cut_by_time"]:
            yield "", "cut here by operations; the run measures the layers where they are to work (--balance=time)"
        yield "", "what stages send is not computed"
        return
    sent, ring = figures["step_bytes"], figures["sent_in_ring"]
    total, replicas = sum(ring.values()), figures["num_replicas"]
    if replicas == 1:
        yield "sent in a step", "nothing: there is one replica"
        return
    to_next = ", and from each host to the next" if figures["hosts"] > 1 else ""
    factor = f"2 x {replicas - 1:,}/{replicas:,}"
    yield "sent in a step", f"{size(total)} by each device{to_next}, computed for one ring of all {replicas:,}:"
    yield "  gradients", f"{size(ring['gradients'])}: {factor} of their {sent['gradients']:,} bytes"
    if sent["weights"]:
        by_parts = (
            "of which each device updates its part" if sent["gathers_by_sums"] else "for the backward pass once more"
        )
        yield "  weights", f"{size(ring['weights'])}: gathered, {by_parts}"
    if sent["gathered"] or sent["statistics"]:
        how = f", in {sent['num_gatherings']:,} messages that layers wait for" if sent["num_gatherings"] else ""
        yield "  batch norm", f"{size(ring['batch_norm'])}: statistics{how}"
    yield "  metrics", f"{size(ring['metrics'])}: loss and metrics"
    if sent["outputs"]:
        yield (
            "  outputs",
            f"{size(ring['outputs'])}: of all samples, to each device, for a loss or metric that needs them",
        )


def _held(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    held = figures["memory"]
    where = "the whole model" if "stages" in figures else "each device"
    more = "; activations come besides" if held["activations"] is None else ""
    there = f", which here has {size(figures['device_bytes'])}" if figures["device_bytes"] else ""
    yield "memory", f"{size(held['total'])} of {where}{there}, counted on the model built here{more}:"
    others = f" and {held['num_others']:,} others" if held["num_others"] else ""
    yield "  weights", f"{size(held['weights'])}: {held['num_trainable']:,} trainable{others}"
    yield "  gradients", size(held["gradients"])
    yield "  optimizer", size(held["optimizer"])
    if held["activations"] is not None:
        most = ", ".join(f"{name} {size(number)}" for name, number in held["largest"])
        yield "  activations", f"{size(held['activations'])}, which the forward pass keeps; most of {most}"
    if not figures["keeps_checkpoints"]:
        yield "checkpoints", "none are kept"
        return
    kept = figures["keep"] + 1
    every = {"epoch": "each epoch"}.get(figures["checkpoint_every"], f"each epoch and every {_every(figures)}")
    one = figures["checkpoint_bytes"]
    yield "checkpoints", f"{size(one)} after {every}; {kept} are kept, {size(kept * one)}, by process 0 alone"


def ladder_table(ladder: dict[str, Any]) -> str:
    """Returns what `kerasdp.training.memory_plan.make_ladder` has found, as a table: a line for each rung."""
    names = ("weights", "gradients", "optimizer", "activations", "total")
    table = [["", f"for {size(ladder['budget'])} of memory", *names, ""]]
    for number, rung in enumerate(ladder["rungs"]):
        mark, words = ">" if number == ladder["chosen"] else "", "fits" if rung["fits"] else "too much"
        table.append([mark, rung["flags"] or "as it is", *(size(rung[name]) for name in names), words])
    hint = f"\nnot chosen, since it changes the numbers: --precision=bfloat16, about {size(ladder['with_bfloat16'])}"
    return in_columns(table, range(2, 7)) + (hint if ladder["with_bfloat16"] else "")


def chosen_of(ladder: dict[str, Any], asked: str) -> dict[str, Any]:
    """Returns the choices of the rung that was chosen, by their names; raises `UserError` if nothing fits."""
    if ladder["chosen"] is None:
        least = min(ladder["rungs"], key=lambda rung: rung["total"])
        raise UserError(
            f"--fit_into={asked}: nothing fits; the least is {size(least['total'])}, with "
            f"{least['flags'] or 'what was asked'}; use a smaller --batch_size, or more devices"
        )
    changes: dict[str, Any] = ladder["rungs"][ladder["chosen"]]["changes"]
    return changes


def _every(figures: dict[str, Any]) -> str:
    text = figures["checkpoint_every"]
    return f"{text.removesuffix('m')} minutes" if text.endswith("m") else f"{text} steps"


def _number(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def _range(first: int, count: int) -> str:
    return f"{first}" if count == 1 else f"{first} to {first + count - 1}"
