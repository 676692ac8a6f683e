"""Pass: one visit of a micro-batch to a stage, the unit that schedules order; and the text of passes and their groups.

2F5                      stage 2, forward of micro-batch 5 (F, B, I or W)
p1:2F5                   the same in pipeline 1; pipeline 0 needs no prefix
(2F5;0B1)OVERLAP_F_B     a group: passes of one device group that may overlap, torch pipelining's notation
"""

from __future__ import annotations

import re

from autopiper._data import data
from autopiper.errors import PlanError

PASS_KINDS = ("F", "B", "I", "W")
"""Forward, fused backward, backward for the input, backward for the weights."""


@data
class Pass:
    """One visit of a micro-batch to a stage."""

    kind: str
    stage: int
    micro_batch: int
    pipeline: int = 0

    @property
    def text(self) -> str:
        """ "2F5", or "p1:2F5" outside pipeline 0."""
        prefix = f"p{self.pipeline}:" if self.pipeline else ""
        return f"{prefix}{self.stage}{self.kind}{self.micro_batch}"


PassGroup = tuple[Pass, ...]
"""One pass, or several that may overlap; the groups of a row come one after the other."""

_PASS = re.compile(r"(?:p(\d+):)?(\d+)([FBIW])(\d+)", re.ASCII)
_GROUP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def group_text(group: PassGroup) -> str:
    """Write a group: "2F5", or "(2F5;0B1)OVERLAP_F_B"."""
    return group[0].text if len(group) == 1 else f"({';'.join(p.text for p in group)})OVERLAP_F_B"


def parse_group(text: str) -> PassGroup:
    """Read what `group_text` wrote. Raises PlanError with the text where it is not one, trailing characters included."""
    several = _GROUP.fullmatch(text)
    passes = []
    for part in several[1].split(";") if several else [text]:
        m = _PASS.fullmatch(part)
        if m is None:
            raise PlanError(f"'{text}' is not a pass or group; expected e.g. 2F5, p1:2B5 or (2F5;0B1)OVERLAP_F_B")
        passes.append(Pass(pipeline=int(m[1] or 0), stage=int(m[2]), kind=m[3], micro_batch=int(m[4])))
    return tuple(passes)
