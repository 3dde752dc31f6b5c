#!/usr/bin/env python3
"""Registers of every CUDA kernel, from what ptxas said when it compiled them; fails where registers are spilled.

    python launch/ptxas_report.py build/cuda               # one line per kernel
    python launch/ptxas_report.py build/cuda --markdown    # the table of docs/gpu.md

Reads the logs that tf_ops/cmake/cuda.cmake keeps beside the objects below the folder. Standard library only.
"""

from __future__ import annotations

import argparse
import collections
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)\w?'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


class Kernel(NamedTuple):
    """One kernel for one architecture; bytes per thread."""

    symbol: str
    arch: int
    registers: int
    stack_bytes: int
    spill_bytes: int


def read_log(text: str) -> Iterator[Kernel]:
    """The kernels of one log.

    Raises:
        ValueError: it says how many registers are used, but not by which kernel.
    """
    entry: tuple[str, int] | None = None
    frame = (0, 0)
    for line in text.splitlines():
        if found := _ENTRY.search(line):
            entry, frame = (found[1], int(found[2])), (0, 0)
        elif found := _FRAME.search(line):
            frame = (int(found[1]), int(found[2]) + int(found[3]))
        elif found := _REGISTERS.search(line):
            if entry is None:
                raise ValueError(f"registers of no kernel: {line}")
            yield Kernel(*entry, int(found[1]), *frame)
            entry = None


def demangle(symbols: Iterable[str]) -> dict[str, str]:
    """Short C++ names; the symbols themselves where there is no c++filt."""
    symbols = sorted(set(symbols))
    try:
        done = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {symbol: symbol for symbol in symbols}
    return {symbol: short_name(name) for symbol, name in zip(symbols, done.stdout.splitlines(), strict=True)}


def short_name(name: str) -> str:
    """void hvd_ctr::RunKernel<hvd_ctr::Gather<4> >(hvd_ctr::Gather<4>, long) -> Gather<4>."""
    found = re.search(r"RunKernel<(.*)>\(", name)
    inner = found[1] if found else name.split("(")[0]
    inner = re.sub(r"\(anonymous namespace\)::|hvd_ctr::|std::", "", inner)
    return re.sub(r"\((?:unsigned )?\w+\)(?=-?\d)", "", inner).replace("> >", ">>").strip()


def table(kernels: Iterable[Kernel], *, markdown: bool = False) -> list[str]:
    """A line per kernel with its registers for each architecture."""
    kernels = list(kernels)
    names = demangle(kernel.symbol for kernel in kernels)
    archs = sorted({kernel.arch for kernel in kernels})
    registers: dict[str, dict[int, int]] = collections.defaultdict(dict)
    for kernel in kernels:
        row = registers[names[kernel.symbol]]
        row[kernel.arch] = max(kernel.registers, row.get(kernel.arch, 0))
    heads = ["kernel", *(f"sm_{arch}" for arch in archs)]
    rows = [[name, *(str(row.get(arch, "")) for arch in archs)] for name, row in sorted(registers.items())]
    if markdown:
        lines = [heads, ["---", *("---:" for _ in archs)], *([f"`{row[0]}`", *row[1:]] for row in rows)]
        return ["| " + " | ".join(line) + " |" for line in lines]
    width = max([len("kernel"), *(len(row[0]) for row in rows)])
    return [f"{line[0]:<{width}}" + "".join(f"{cell:>8}" for cell in line[1:]) for line in [heads, *rows]]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Registers of the CUDA kernels, from the logs of their compilation.")
    parser.add_argument("folder", type=Path, help="build folder")
    parser.add_argument("--markdown", action="store_true", help="as a table of Markdown")
    options = parser.parse_args(arguments)
    texts = {path: path.read_text(errors="replace") for path in sorted(options.folder.rglob("*.cu.o.log"))}
    kernels = [kernel for text in texts.values() for kernel in read_log(text)]
    if not kernels:
        print(f"{options.folder} holds no log that names a kernel; build hvd_ctr_cuda there", file=sys.stderr)
        return 1
    print("\n".join(table(kernels, markdown=options.markdown)), flush=True)
    bad = [kernel for kernel in kernels if kernel.spill_bytes]
    for kernel in bad:
        print(f"spills {kernel.spill_bytes} bytes on sm_{kernel.arch}: {kernel.symbol}", file=sys.stderr)
    warned = [f"{path.name}: {line}" for path, text in texts.items() for line in text.splitlines() if "warning" in line]
    print("\n".join(warned), end="\n" if warned else "", file=sys.stderr)
    if not options.markdown:
        archs = sorted({kernel.arch for kernel in kernels})
        most = max(kernel.registers for kernel in kernels)
        print(f"{len({kernel.symbol for kernel in kernels})} kernels for sm {', '.join(map(str, archs))}: ", end="")
        print(f"at most {most} registers, {len(bad)} with spills, {len(warned)} warnings")
    return 1 if bad or warned else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
