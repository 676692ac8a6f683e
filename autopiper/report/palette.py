"""Colours and words of the picture. Boxes keep their colours on dark pages; ground, text and axis change."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from autopiper.report.boxes import MIXED, OTHER
from autopiper.report.events import COLLECTIVES, RECV, SEND

COLORS = {
    "F": "#2f6fc9", "B": "#257d46", "I": "#12909c", "W": "#c9781a", "UPDATE": "#7d5fa8", OTHER: "#8a8a8a",
    MIXED: "#9a9aa8",
}  # fmt: skip
"""Blue forwards and green backwards as in the papers; the halves of a split backward differ in hue and in lightness."""
TOWARDS_WHITE = (0.0, 0.55, 0.28, 0.72)
"""Share of white in each shade; neighbours in this order are far apart."""
LEGEND = {
    "F": "forward", "B": "backward", "I": "backward for the input", "W": "backward for the weights",
    "UPDATE": "optimizer", OTHER: "other", MIXED: "too short to tell apart",
}  # fmt: skip
LINE_COLORS = {SEND: "#c2459b", RECV: "#e39a2d", COLLECTIVES: "#6a6fd6"}
LINE_WORDS = {SEND: "sends", RECV: "receives", COLLECTIVES: "collectives"}
DARK_INK, LIGHT_INK = "d", "w"
"""Classes of the numbers in boxes."""


def _split(tone: str) -> tuple[str, int]:
    return (tone[:-1], int(tone[-1])) if tone[-1].isdigit() else (tone, 0)


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


@cache
def fill(tone: str) -> str:
    """Return the colour of a tone such as "B1": the kind's, lighter for the stages after a rank's first."""
    kind, shade = _split(tone)
    white = TOWARDS_WHITE[shade]
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in _rgb(COLORS[kind]))


def contrast(one: str, other: str) -> float:
    """Contrast of two colours, 1 to 21, as WCAG 2 defines it."""

    def luminance(color: str) -> float:
        parts = [part / 255 for part in _rgb(color)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@cache
def ink(tone: str) -> str:
    """Return the class of a number that is legible on a tone."""
    return LIGHT_INK if contrast(fill(tone), "#ffffff") >= contrast(fill(tone), "#16161a") else DARK_INK


def style(tones: Iterable[str], lines: bool) -> str:
    """Return the style sheet for the tones that are drawn."""
    rules = [
        "text{font:11px system-ui,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:#1d1d22}",
        ".h{font-size:14px;font-weight:600}.s{font-size:10px;fill:#5a5a66}.l{text-anchor:end}.m{text-anchor:middle}",
        ".d text,.w text{font-size:10px;text-anchor:middle}.d text{fill:#16161a}.w text{fill:#fff}",
        ".bg{fill:#fff}.a{fill:none;stroke:#5a5a66}.x{fill:none;stroke-width:20}",
        *(f".{tone}{{stroke:{fill(tone)}}}" for tone in tones),
        *(f".{name}{{fill:none;stroke-width:2.4;stroke:{color}}}" for name, color in LINE_COLORS.items() if lines),
        "@media (prefers-color-scheme:dark){.bg{fill:#17171c}text{fill:#ececf1}.s{fill:#a9a9b6}.a{stroke:#a9a9b6}"
        ".d text{fill:#16161a}.w text{fill:#fff}}",
    ]
    return "".join(rules)
