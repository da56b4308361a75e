"""The blocks of code on the pages: `python tests/blocks.py` lists them, and says which ones the tests run."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RUN = re.compile(r"# mpirun -n (\d+) python (\w+\.py)\n")


@dataclass(frozen=True)
class Block:
    """A fenced block; `ranks` and `file` come from its first line, `# mpirun -n 4 python use.py` (0: not run)."""

    page: str
    line: int
    code: str
    ranks: int = 0
    file: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}" + (f" on {self.ranks} ranks" if self.ranks else "")


def pages() -> list[Path]:
    """README.md and all pages in docs/."""
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


def fenced(language: str) -> list[Block]:
    """All blocks of a language ("" for those that name none), page by page."""
    found = []
    for page in pages():
        text = page.read_text()
        for match in _FENCE.finditer(text):
            if match[1] == language:
                run = _RUN.match(match[2])
                ranks, file = (int(run[1]), run[2]) if run else (0, "")
                line = text.count("\n", 0, match.start()) + 1
                found.append(Block(str(page.relative_to(ROOT)), line, match[2], ranks, file))
    return found


def python() -> list[Block]:
    return fenced("python")


def commands() -> list[str]:
    """The lines in blocks of commands that call `python -m fompi`."""
    listed = [block.code for language in ("", "sh", "bash", "shell", "console") for block in fenced(language)]
    lines = [line.strip().removeprefix("$ ") for code in listed for line in code.splitlines()]
    return list(dict.fromkeys(line for line in lines if re.match(r"(mpirun -n \d+ )?python -m fompi ", line)))


if __name__ == "__main__":
    for block in python():
        print(f"{'runs' if block.ranks else 'is compiled':12} {block}")
    for command in commands():
        print(f"{'command':12} {command}")
