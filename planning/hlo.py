"""Reads the text of a compiled XLA program: its computations and their instructions.

Source: https://openxla.org/xla/operation_semantics; the grammar is that of `HloModule::ToString`.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_BITS = {"pred": 8, "token": 0, "bf16": 16}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = ")
_OPERAND = re.compile(r"%([\w.-]+)")
_COMMENT = re.compile(r"/\*.*?\*/")


class ArrayType(NamedTuple):
    """The type of one array."""

    dtype: str
    dims: tuple[int, ...]
    in_hbm: bool  # False: in a memory of the chip, such as a TPU's VMEM

    @property
    def elements(self) -> int:
        """Their number."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes of the values, without the padding of a layout."""
        return self.elements * bits(self.dtype) // 8


class Instruction(NamedTuple):
    """One instruction."""

    name: str
    opcode: str
    types: tuple[ArrayType, ...]  # of the result; several for a tuple
    operands: tuple[str, ...]  # names
    literal: str  # what stands between the parentheses
    attributes: str
    is_root: bool

    def attribute(self, name: str) -> str | None:
        """The text of an attribute, such as `dim_labels`."""
        match = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^,\s]+)", self.attributes)
        return match[1] if match else None

    def dims_of(self, name: str) -> tuple[int, ...]:
        """An attribute that lists dimensions, such as `lhs_contracting_dims`; empty if there is none."""
        text = self.attribute(name)
        return tuple(int(d) for d in re.findall(r"\d+", text)) if text else ()

    def called(self, name: str) -> str | None:
        """The computation in an attribute, such as `body` or `calls`."""
        text = self.attribute(name)
        return text.lstrip("%") if text else None


Computation = Mapping[str, Instruction]  # by name, in order


class Program(NamedTuple):
    """A compiled program."""

    computations: Mapping[str, Computation]
    entry: str


def bits(dtype: str) -> int:
    """Bits of an element, of a name such as `f32`, `s4` or `f8e4m3fn`."""
    if dtype in _BITS:
        return _BITS[dtype]
    match = re.search(r"\d+", dtype)
    return int(match[0]) if match else 0


def parse(text: str) -> Program:
    """The program in a text of XLA. Raises: ValueError if there is no entry computation."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = None, None
    for line in text.splitlines():
        if (header := _HEADER.match(line)) is not None and " = " not in line.split("(")[0]:
            current = computations[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (start := _NAME.match(line)) is not None:
            instruction = _instruction(line, start)
            current[instruction.name] = instruction
    if entry is None:
        raise ValueError("the text has no ENTRY computation")
    return Program(computations, entry)


def _instruction(line: str, start: re.Match[str]) -> Instruction:
    rest = _COMMENT.sub("", line[start.end() :])
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    literal = rest[opening + 1 : closing - 1]
    operands = tuple(_OPERAND.findall(literal))
    types = tuple(_types(result))
    return Instruction(start[2], rest[:opening], types, operands, literal, rest[closing:], bool(start[1]))


def _closing(text: str, opening: int) -> int:
    """The index after the parenthesis that closes the one at `opening`."""
    depth = 0
    for i in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if not depth:
            return i + 1
    raise ValueError(f"{text[:80]}: the parentheses do not match")


def _types(text: str) -> Iterator[ArrayType]:
    for dtype, dims, layout in _ARRAY.findall(text):
        space = _SPACE.search(layout)
        sizes = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
        yield ArrayType(dtype, sizes, space is None or space[1] == "0")
