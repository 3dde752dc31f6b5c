"""Which steps `--profile` looks at."""

from __future__ import annotations

import dataclasses

#: Steps that a profile holds at most: it is kept in memory and gathered on rank 0.
MAX_STEPS = 1000


@dataclasses.dataclass(frozen=True)
class ProfileOptions:
    """Steps `first` to `last`, both included, counted from the start of this run (the first step is 1).

    Attributes:
        stages: times of the stages.
        tensorflow: TensorFlow's own profiler on rank 0, on up to ten steps after `last` (from `first` on without
            `stages`): it slows the steps down, and must not disturb the other figures.
    """

    first: int = 21
    last: int = 70
    stages: bool = True
    tensorflow: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last or self.last - self.first >= MAX_STEPS:
            raise ValueError(
                f"profiled steps: received {self.first}:{self.last}; allowed: FIRST:LAST with 1 <= FIRST <= LAST and "
                f"at most {MAX_STEPS} steps"
            )


def parse_steps(text: str) -> tuple[int, int]:
    """ "100:150" -> (100, 150).

    Raises:
        ValueError: not of this form, or out of range.
    """
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"profiled steps: received {text!r}; needed: FIRST:LAST, for example 100:150")
    options = ProfileOptions(int(parts[0]), int(parts[1]))
    return options.first, options.last
