"""Draws ring.svg, the ring all-reduce of four devices step by step, for the lesson: python docs/ring.py."""

import pathlib
from collections.abc import Iterator

COUNT = 4
COLOURS = ["#deebf7", "#9ecae1", "#4292c6", "#08519c"]  # by how many devices' numbers are in a sum
PANEL_WIDTH, PANEL_HEIGHT = 240, 132
CELL_WIDTH, CELL_HEIGHT, LEFT, TOP = 40, 20, 17, 42
COLUMN = CELL_WIDTH + 16  # from a device to the next one

State = list[list[set[int]]]  # of each device and piece: whose numbers have been added


def states() -> Iterator[tuple[State, list[int]]]:
    """Yields what the devices hold before each step, and the piece that each sends; at the end no piece is sent."""
    held: State = [[{device} for _ in range(COUNT)] for device in range(COUNT)]
    for step in range(2 * (COUNT - 1)):
        sent = [(device - step) % COUNT for device in range(COUNT)]
        yield held, sent
        new = [list(pieces) for pieces in held]
        for device, number in enumerate(sent):
            following, arrived = (device + 1) % COUNT, held[device][number]
            new[following][number] = arrived | held[following][number] if step < COUNT - 1 else arrived
        held = new
    yield held, []


def text(x: float, y: float, words: str, more: str = "") -> str:
    """Returns a text whose middle is at x."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" {more}>{words}</text>'


def panel(title: str, held: State, sent: list[int]) -> list[str]:
    """Returns the lines of a state: a column for each device, a cell for each piece, an arrow where one is sent."""
    lines = [text(PANEL_WIDTH / 2, 14, title, 'font-weight="bold" font-size="13"')]
    for device, pieces in enumerate(held):
        x = LEFT + device * COLUMN
        lines.append(text(x + CELL_WIDTH / 2, TOP - 8, f"device {device}", 'font-size="11"'))
        for number, devices in enumerate(pieces):
            y, is_sent = TOP + number * CELL_HEIGHT, sent and sent[device] == number
            words = "sum" if len(devices) == COUNT else "+".join(map(str, sorted(devices)))
            size = f'width="{CELL_WIDTH}" height="{CELL_HEIGHT - 2}"'
            border = 'stroke="#d94801" stroke-width="2"' if is_sent else 'stroke="#888" stroke-width="0.5"'
            lines.append(f'<rect x="{x}" y="{y}" {size} fill="{COLOURS[len(devices) - 1]}" {border}/>')
            colour = "#fff" if len(devices) > 2 else "#000"
            lines.append(text(x + CELL_WIDTH / 2, y + 13, words, f'fill="{colour}" font-size="11"'))
            if is_sent:
                middle = y + CELL_HEIGHT / 2 - 1
                starts = [x + CELL_WIDTH + 2] + (
                    [LEFT - 16] if device == COUNT - 1 else []
                )  # the last one's comes round
                arrow = 'stroke="#d94801" stroke-width="1.5" marker-end="url(#head)"'
                lines += [f'<line x1="{at}" y1="{middle:g}" x2="{at + 10}" y2="{middle:g}" {arrow}/>' for at in starts]
    return lines


def drawing() -> str:
    """Returns the picture, two panels in a row."""
    found = list(states())
    width, height = 2 * PANEL_WIDTH, -(-len(found) // 2) * PANEL_HEIGHT
    head = 'id="head" markerWidth="4" markerHeight="4" refX="2" refY="2" orient="auto"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<defs><marker {head}><path d="M0,0 L4,2 L0,4 z" fill="#d94801"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for place, (held, sent) in enumerate(found):
        doing = "add what arrives" if place < COUNT - 1 else "keep what arrives"
        lines.append(f'<g transform="translate({place % 2 * PANEL_WIDTH} {place // 2 * PANEL_HEIGHT})">')
        lines += [*panel(f"step {place + 1}: {doing}" if sent else "all have the sum", held, sent), "</g>"]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    pathlib.Path(__file__).with_name("ring.svg").write_text(drawing())
