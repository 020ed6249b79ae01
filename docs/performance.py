"""Draws performance.png from the table of performance.md: python docs/performance.py."""

import pathlib

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402

DOCS = pathlib.Path(__file__).resolve().parent
COLOURS = {"torch": "#e4572e", "jax": "#4c78a8", "tensorflow": "#f2a541"}


def read(text: str) -> tuple[list[str], list[list[str]]]:
    """Returns the titles of the columns, and the rows, of the first table of a page."""
    lines = text.partition("## Measured speeds")[2].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    table = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table[0], table[2:]


def draw(titles: list[str], rows: list[list[str]], path: pathlib.Path) -> None:
    """Draws the ratios over loops on the left, and over Keras' `fit` on the right."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 9), sharey=True, layout="constrained")
    for axis, word, heading in zip(axes, ("loop", "fit"), ("a hand-written loop", "Keras' fit"), strict=True):
        columns = [number for number, title in enumerate(titles) if title.strip("`").endswith(word)]
        height = 0.8 / len(columns)
        for place, column in enumerate(columns):
            backend = titles[column].partition(" ")[0]
            found = [(y, row[column].rstrip("*")) for y, row in enumerate(rows) if row[column] != "-"]
            ys = [y + (place - (len(columns) - 1) / 2) * height for y, _ in found]
            values = [float(value) for _, value in found]
            widths = [value - 1 for value in values]
            axis.barh(ys, widths, height, left=1, color=COLOURS[backend], label=backend)
        axis.axvline(1, color="#444444", linewidth=1)
        axis.set(xscale="log", title=f"Speed over {heading}", xlabel="times as fast (1: equal)")
        ticks = [0.5, 1, 2, 5, 10, 50] if word == "fit" else [0.5, 0.75, 1, 1.5, 2, 5, 10]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.grid(axis="x", color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="center right")
    axes[0].set_yticks(range(len(rows)), [row[0] for row in rows])
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=110, metadata={"Description": repr(rows)})  # by which a test sees that it is current


if __name__ == "__main__":
    draw(*read((DOCS / "performance.md").read_text()), DOCS / "performance.png")
