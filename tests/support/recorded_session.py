"""Run commands in a terminal and draw what it shows: scripts/record-session OUT.svg [COMMAND]...

OUT.svg is for light pages, and OUT-dark.svg next to it, of the same run, for dark ones. Needs
the environment of the tests. Without commands it records those of the README's picture.
"""

from __future__ import annotations

import io
import itertools
import os
import sys
import tempfile
from pathlib import Path

import pexpect
import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI
from rich.text import Text

COMMANDS = (
    'edge run demos/model --local 2 --parallel pipeline -p "Where does the cat live?" -n 6',
    "edge demo survive",
)
COLUMNS, LINES = 104, 400
PATIENCE_S = 300
_FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" \
aria-label="A terminal">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; \
font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""As rich's own, without fonts from elsewhere."""


def screen_after(command: str, environment: dict[str, str]) -> pyte.Screen:
    """What a terminal shows in the end. SystemExit where the command fails."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    child = pexpect.spawn(
        "/bin/bash",
        ["-c", command],
        env=environment,
        dimensions=(LINES, COLUMNS),
        timeout=PATIENCE_S,
    )
    while True:
        try:
            stream.feed(child.read_nonblocking(1 << 16))
        except pexpect.EOF:
            break
    child.close()
    if child.exitstatus:
        raise SystemExit(f"{command}: exit {child.exitstatus}\n" + "\n".join(screen.display))
    return screen


def lines_of(screen: pyte.Screen) -> list[Text]:
    """Without the empty ones at the end."""
    lines = []
    for number in range(LINES):
        chars = [screen.buffer[number][column] for column in range(COLUMNS)]
        line = Text()
        for (color, bold, italic), run in itertools.groupby(
            chars, key=lambda each: (_color(each.fg), each.bold, each.italics)
        ):
            line.append(
                "".join(each.data for each in run), Style(color=color, bold=bold, italic=italic)
            )
        line.rstrip()
        lines.append(line)
    while lines and not lines[-1].plain:
        lines.pop()
    return lines


def _color(name: str) -> str | None:
    if name == "default":
        return None
    known = {"brown": "yellow", "brightbrown": "bright_yellow"}.get(name)
    return known or (name.replace("bright", "bright_") if name.isalpha() else f"#{name}")


def main(out: Path, commands: tuple[str, ...]) -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "TERM": "xterm-256color",
            "EDGE_CACHE": f"{folder}/cache",
            "EDGE_CONFIG": f"{folder}/keys",
            "EDGE_STATE": f"{folder}/state",
        }
        for command in commands:
            console.print(Text(f"$ {command}", style="bold green"))
            for line in lines_of(screen_after(command, environment)):
                console.print(line, no_wrap=True, overflow="crop")
            console.print()
    dark = out.with_stem(f"{out.stem}-dark")
    for place, theme in ((out, DEFAULT_TERMINAL_THEME), (dark, MONOKAI)):
        drawn = console.export_svg(
            title="edge", theme=theme, clear=False, code_format=_FORMAT, unique_id="edge"
        )
        place.write_text("\n".join(line.rstrip() for line in drawn.splitlines()) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(sys.argv[2:]) or COMMANDS)
