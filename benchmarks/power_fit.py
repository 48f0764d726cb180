"""What each term of work costs, fitted to the power of many kinds of work.

Power is a sum: joules a flop of each instruction, joules a byte of each kind of movement, joules a clock
cycle of a multiprocessor that has a block, and watts that flow whatever runs. What happens in the chip costs
more at a higher clock, since its voltage is higher: ``1 + slope x + bend x^2`` times as much, where x is
NVML's clock over 1500 MHz, less 1; device memory has a voltage of its own. All coefficients are non-negative;
rows are weighted by the inverse of their power, so that residuals are relative.

NVML's clock is the one that voltage follows. Cycles are counted at the clock that the kernels read, which is
lower while tensor cores work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunegemm.errors import TunegemmError

#: Clock at which the coefficients of the chip's own terms hold, MHz.
REFERENCE_MHZ = 1500.0
#: Amounts of `per_s` that are terms of their own, and what a coefficient's unit is.
AMOUNTS = {
    "filled_bytes": "pj_per_byte", "l2_read_bytes": "pj_per_byte", "crossing_bytes": "pj_per_byte",
    "stored_bytes": "pj_per_byte", "dram_bytes": "pj_per_byte", "sm_cycles": "pj_per_cycle",
}  # fmt: skip
#: Terms that do not depend on the chip's voltage.
_OUTSIDE = frozenset({"dram_bytes"})
_STEEPEST, _MOST_BENT = 3.0, 6.0

Array = NDArray[np.float64]
Row = Mapping[str, Any]


class FitError(TunegemmError):
    """Rows from which nothing can be fitted."""


@dataclass(frozen=True)
class Voltage:
    """How the chip's own terms grow with its clock."""

    slope: float
    bend: float

    def factor(self, x: Array) -> Array:
        """What a term costs at clocks of (1 + x) times the reference."""
        return 1 + self.slope * x + self.bend * x * x


@dataclass(frozen=True)
class Fit:
    """The table: coefficients, and how well they tell the rows' power."""

    coefficients: Mapping[str, float]
    """By term: pJ per flop for an instruction, pJ per byte, pJ per cycle, W for ``static``."""
    voltage: Voltage
    terms_w: Mapping[str, Mapping[str, float]]
    """By a row's label: watts of each term, which add up to the power that the table tells."""
    residuals: Mapping[str, float]
    """By a row's label: predicted / measured - 1."""
    left_out: Mapping[str, float]
    """The same for coefficients that did not see the row; only of rows whose terms others have, too."""

    def asdict(self) -> dict[str, Any]:
        """As in the result file."""
        return {
            "reference_mhz": REFERENCE_MHZ,
            "units": {term: unit(term) for term in self.coefficients},
            "coefficients": {term: float(f"{value:.4g}") for term, value in self.coefficients.items()},
            "voltage": {"slope": round(self.voltage.slope, 3), "bend": round(self.voltage.bend, 3)},
            "rows": len(self.residuals),
            "residual_percent": spread(self.residuals.values()),
            "left_out_percent": spread(self.left_out.values()) | {"rows": len(self.left_out)},
            "worst_left_out_percent": {
                label: round(100 * error, 2)
                for label, error in sorted(self.left_out.items(), key=lambda item: -abs(item[1]))[:8]
            },
        }


def unit(term: str) -> str:
    return "w" if term == "static" else AMOUNTS.get(term, "pj_per_flop")


def spread(errors: Any) -> dict[str, float]:
    """Of relative errors: mean and largest absolute value, and root mean square, in percent."""
    values = [100 * abs(error) for error in errors]
    if not values:
        return {}
    return {
        "mean": round(sum(values) / len(values), 2),
        "rms": round(math.sqrt(sum(value**2 for value in values) / len(values)), 2),
        "max": round(max(values), 2),
    }


def instruction_of(row: Row) -> str:
    return f"{row['operand']}_n{row['width']}"


def is_fitted(row: Row) -> bool:
    """Controls are only shown: nothing runs, zeros toggle nothing, loops of `test_wait` burn issue slots."""
    return "per_s" in row and row["data"] == "normal" and row["wait"] != "spin"


def terms_of(rows: Sequence[Row]) -> list[str]:
    """Names of the coefficients, each of which some row needs."""
    instructions = dict.fromkeys(instruction_of(row) for row in rows if row["per_s"]["flops"])
    amounts = [name for name in AMOUNTS if any(row["per_s"].get(name) for row in rows)]
    return [*sorted(instructions), *amounts, "static"]


@dataclass(frozen=True)
class Design:
    """Rows as matrices: watts of each row (first axis) for one unit of each coefficient (second axis)."""

    inside: Array
    """Of terms of the chip's voltage, at the reference clock; 0 for others."""
    outside: Array
    """Of terms with a voltage of their own."""
    x: Array
    """NVML's clock over the reference, less 1."""
    power_w: Array

    @classmethod
    def of(cls, rows: Sequence[Row], terms: Sequence[str]) -> Design:
        watts = np.array([watts_of(row, terms) for row in rows])
        is_outside = np.array([term in _OUTSIDE for term in terms])
        return cls(
            np.where(is_outside, 0.0, watts), np.where(is_outside, watts, 0.0),
            np.array([row["nvml_clock_mhz"] / REFERENCE_MHZ - 1 for row in rows]),
            np.array([row.get("power_w", math.nan) for row in rows]),
        )  # fmt: skip

    def only(self, chosen: NDArray[np.bool_]) -> Design:
        """Some of the rows."""
        return Design(self.inside[chosen], self.outside[chosen], self.x[chosen], self.power_w[chosen])

    def watts(self, voltage: Voltage) -> Array:
        """The matrix whose product with the coefficients is the rows' power."""
        return self.inside * voltage.factor(self.x)[:, None] + self.outside


def watts_of(row: Row, terms: Sequence[str]) -> list[float]:
    """Watts of the row for one unit of each coefficient, at the reference clock."""
    amounts = dict(row["per_s"])
    amounts[instruction_of(row)] = amounts.pop("flops")
    return [1.0 if term == "static" else 1e-12 * amounts.get(term, 0.0) for term in terms]


def predicted_w(rows: Sequence[Row], coefficients: Mapping[str, float], voltage: Voltage) -> Array:
    """Watts that the table tells for the work of each row."""
    watts = Design.of(rows, list(coefficients)).watts(voltage)
    return watts @ np.array(list(coefficients.values()))


def fit(rows: Sequence[Row]) -> Fit:
    """Fits the rows that can be; raises FitError when they are fewer than the terms."""
    used = [row for row in rows if is_fitted(row)]
    terms = terms_of(used)
    if len(used) <= len(terms) + 2:
        raise FitError(f"{len(used)} rows cannot tell {len(terms)} terms; measure more variants")
    design = Design.of(used, terms)
    voltage, values = solve_all(design, steps=20)
    watts = design.watts(voltage) * values
    errors = watts.sum(axis=1) / design.power_w - 1
    labels = [row["workload"] for row in used]
    return Fit(
        dict(zip(terms, map(float, values), strict=True)), voltage,
        {
            label: dict(zip(terms, map(float, shares), strict=True))
            for label, shares in zip(labels, watts, strict=True)
        },
        dict(zip(labels, map(float, errors), strict=True)),
        dict(left_out(used, terms, design, voltage)),
    )  # fmt: skip


def solve_all(design: Design, steps: int) -> tuple[Voltage, Array]:
    """Voltage and coefficients, the first by golden sections of so many steps, one within the other."""

    def bend_of(slope: float) -> float:
        return least(lambda bend: solve(design, Voltage(slope, bend))[1], _MOST_BENT, steps)

    slope = least(lambda slope: solve(design, Voltage(slope, bend_of(slope)))[1], _STEEPEST, steps)
    voltage = Voltage(slope, bend_of(slope))
    return voltage, solve(design, voltage)[0]


def solve(design: Design, voltage: Voltage) -> tuple[Array, float]:
    """Coefficients, none below zero, and the mean square of the relative residuals."""
    matrix = design.watts(voltage) / design.power_w[:, None]
    values = non_negative(matrix, np.ones(len(matrix)))
    return values, float(np.mean((matrix @ values - 1) ** 2))


def left_out(
    rows: Sequence[Row], terms: Sequence[str], design: Design, voltage: Voltage
) -> list[tuple[str, float]]:
    """The relative error of each row for coefficients fitted to all others that are not repetitions of it.

    The voltage's two numbers are those of all rows.
    """
    found = []
    for index, row in enumerate(rows):
        chosen = np.array([kind(other) != kind(row) for other in rows])
        if terms_of([other for other, is_chosen in zip(rows, chosen, strict=True) if is_chosen]) == list(
            terms
        ):
            values, _ = solve(design.only(chosen), voltage)
            told_w = float(design.watts(voltage)[index] @ values)
            found.append((row["workload"], told_w / row["power_w"] - 1))
    return found


def kind(row: Row) -> str:
    """What repetitions of a row share."""
    return str(row["workload"]).partition(", again")[0]


def least(error: Callable[[float], float], high: float, steps: int) -> float:
    """Where in [0, high] an error of one minimum is least, by golden section."""
    low, golden = 0.0, (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = error(left), error(right)
    for _ in range(steps):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = error(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = error(right)
    return (low + high) / 2


def non_negative(matrix: Array, target: Array) -> Array:
    """The x >= 0 that makes ``|matrix x - target|`` least.

    C. L. Lawson, R. J. Hanson, "Solving Least Squares Problems", 1974, chapter 23: coefficients enter one by
    one where the gradient is steepest, and leave when a step would take them below zero.
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    scaled = matrix / scale
    gram, aim = scaled.T @ scaled, scaled.T @ target
    values, free = np.zeros(len(aim)), np.zeros(len(aim), dtype=bool)
    for _ in range(3 * len(aim)):
        gradient = np.where(free, -np.inf, aim - gram @ values)
        if gradient.max() < 1e-10:
            break
        free[gradient.argmax()] = True
        while True:
            step = np.zeros_like(values)
            step[free] = np.linalg.lstsq(gram[np.ix_(free, free)], aim[free], rcond=None)[0]
            below = free & (step <= 0)
            if not below.any():
                break
            share = (values[below] / np.maximum(values[below] - step[below], 1e-300)).min()
            values = values + share * (step - values)
            free &= values > 1e-14
            values[~free] = 0.0
        values = step
    return values / scale


def table(found: Fit) -> str:
    """The coefficients and residuals in Markdown."""
    units = {"pj_per_flop": "pJ/flop", "pj_per_byte": "pJ/byte", "pj_per_cycle": "pJ/cycle", "w": "W"}
    lines = ["| term | |", "|---|---|"]
    lines += [f"| {term} | {value:.4g} {units[unit(term)]} |" for term, value in found.coefficients.items()]
    inside, outside = spread(found.residuals.values()), spread(found.left_out.values())
    lines += [
        "",
        f"at {REFERENCE_MHZ:.0f} MHz; the chip's own terms x (1 + {found.voltage.slope:.2f} x "
        f"+ {found.voltage.bend:.2f} x^2), x = NVML's clock / reference - 1",
        f"residuals of {len(found.residuals)} rows, percent: {inside}; left out: {outside}",
    ]
    return "\n".join(lines)
