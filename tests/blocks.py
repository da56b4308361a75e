"""The blocks of code on the pages: `python tests/blocks.py` lists them and says which of them the tests run.

Rules for a page:

- A Python block runs if its first line is `# mpirun -n N python NAME.py`. Variables may stand before `mpirun`.
- A block `text` right after it is what the program prints, the ranks in order. The test compares the two exactly.
- A block `text` right after a block with one command of fompi is what the command prints. A line `...` stands for any
  lines.
- Outputs with measured times are in blocks without a language. Nothing compares them.
"""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RUN = re.compile(r"# ((?:\w+=\S+ )*)mpirun -n (\d+) python (\w+\.py)\n")
_COMMAND = re.compile(r"(?:\w+=\S+ )*(?:mpirun -n \d+ )?(?:python -m )?fompi ")
SHELL = ("", "sh", "bash", "shell", "console")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. Its first line gives `variables`, `ranks` (0: it does not run) and `file`.

    `output` is the block `text` that follows, or None.
    """

    page: str
    line: int
    language: str
    code: str
    ranks: int = 0
    file: str = ""
    variables: str = ""
    output: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}" + (f" on {self.ranks} ranks" if self.ranks else "")

    @property
    def environment(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in self.variables.split())


@dataclass(frozen=True)
class Command:
    """A command line of fompi on a page."""

    block: Block
    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def is_alone(self) -> bool:
        return len(self.block.code.strip().splitlines()) == 1

    @property
    def words(self) -> list[str]:
        """What follows the name `fompi`, without a redirection."""
        words = shlex.split(self.text, comments=True)
        words = words[words.index("fompi") + 1 :]
        return words[: next((i for i, word in enumerate(words) if word in ("|", ">", "&&")), len(words))]


def pages() -> list[Path]:
    """README.md, CONTRIBUTING.md and all pages below docs/."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]


def fenced() -> list[Block]:
    """All blocks, page by page."""
    listed = []
    for page in pages():
        text = page.read_text()
        matches = list(_FENCE.finditer(text))
        for match, following in itertools.zip_longest(matches, matches[1:]):
            run = _RUN.match(match[2])
            variables, ranks, file = (run[1], int(run[2]), run[3]) if run else ("", 0, "")
            output = following[2] if following and following[1] == "text" else None
            line = text.count("\n", 0, match.start()) + 1
            name = str(page.relative_to(ROOT))
            listed.append(Block(name, line, match[1], match[2], ranks, file, variables, output))
    return listed


def python() -> list[Block]:
    return [block for block in fenced() if block.language == "python"]


def commands() -> list[Command]:
    """The lines that call fompi, in blocks of commands. Each line is listed once."""
    lines = [
        Command(block, line.strip().removeprefix("$ "))
        for block in fenced()
        if block.language in SHELL
        for line in block.code.splitlines()
    ]
    return list({line.text: line for line in lines if _COMMAND.match(line.text)}.values())


if __name__ == "__main__":
    for block in python():
        print(f"{'runs' if block.ranks else 'is compiled':12} {block}")
    for command in commands():
        print(f"{'command':12} {command}")
