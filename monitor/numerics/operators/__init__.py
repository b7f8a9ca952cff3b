"""The operator table and the code of its rows: every ATen operator that may run under controlled numerics, and how.

``table`` has one row for each operator, ``lookup`` finds the row of any overload, and the modules named after kinds of
operators hold the code of ``implemented`` rows, which is made of exact operations and a backend's primitives.
"""

from __future__ import annotations

from monitor.numerics.operators.lookup import (
    find,
    functional_name,
    is_counted,
    overload_named,
    remedy_for,
    remedy_for_tensors,
    row_named,
)
from monitor.numerics.operators.row import Kind, Row
from monitor.numerics.operators.table import operator_table

__all__ = [
    "Kind",
    "Row",
    "find",
    "functional_name",
    "is_counted",
    "operator_table",
    "overload_named",
    "remedy_for",
    "remedy_for_tensors",
    "row_named",
]
