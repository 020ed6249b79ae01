"""Reads lowered and compiled programs of jax: what is split, donated and computed, and what devices send."""

import re

import numpy as np
from jax.extend.mlir import ir

_BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "pred": 1}
_COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all|ragged-all-to-all|"
    r"collective-broadcast)(-start)?\("
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


def facts(lowered):
    """Returns what a lowered program takes, computes and gives back."""
    module = lowered.compiler_ir("stablehlo")
    main = next(op for op in module.body.operations if getattr(op, "sym_name", None) and op.sym_name.value == "main")
    arguments = []
    for attributes, kind in zip(main.arg_attrs, main.type.inputs, strict=True):
        given = {item.name: str(item.attr) for item in attributes} if not isinstance(attributes, dict) else attributes
        arguments.append({
            "type": str(kind),
            "sharding": axes_of(given.get("sdy.sharding", "")),
            "donated": "tf.aliasing_output" in given or "jax.buffer_donor" in given,
        })  # fmt: skip
    found = {"arguments": arguments, "types": set(), "calls": set(), "products": {}, "ops": {}}

    def visit(operation):
        name = operation.name
        found["ops"][name] = found["ops"].get(name, 0) + 1
        types = [str(value.type) for value in [*operation.operands, *operation.results]]
        found["types"] |= {element(kind) for kind in types if kind.startswith("tensor")}
        if name == "stablehlo.custom_call":
            found["calls"].add(str(operation.attributes["call_target_name"]).strip('"'))
        if name in ("stablehlo.dot_general", "stablehlo.convolution"):
            precision = operation.attributes.get("precision_config", "")
            kinds = " ".join(element(kind) for kind in types[:2])
            used = " ".join(re.findall(r"precision (\w+)", str(precision))) or "none"
            key = f"{name.partition('.')[2]} {kinds}: {used}"
            found["products"][key] = found["products"].get(key, 0) + 1
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found | {"types": sorted(found["types"]), "calls": sorted(found["calls"])}


def element(kind):
    """Returns the type of a tensor's elements."""
    return re.sub(r"^tensor<(?:[\d?]+x)*|>$", "", kind.split(",")[0])


def axes_of(sharding):
    """Returns by which axis of the mesh each axis of a tensor is split: `["batch", ""]`; None if that is left open."""
    matched = re.search(r"<@\w+, \[(.*?)\]", sharding) or re.search(r"<mesh<.*?>, \[(.*?)\]", sharding)
    return [re.sub(r'[{}"?]', "", axis).strip() for axis in re.findall(r"\{.*?\}", matched[1])] if matched else None


def collectives(text):
    """Returns, of each kind of collective in a compiled program, how many there are and the bytes of their results."""
    found = {}
    for line in text.splitlines():
        if matched := _COLLECTIVE.search(line):
            shapes, kind, started = matched.groups()
            sizes = [
                _BYTES.get(name, 4) * int(np.prod([int(size) for size in sizes.split(",") if size]))
                for name, sizes in _SHAPE.findall(shapes)
            ]
            if started and kind != "all-reduce":  # operands, then results
                sizes = sizes[len(sizes) // 2 :]
            count, size = found.get(kind, (0, 0))
            found[kind] = count + 1, size + sum(sizes)
    return found
