"""Print the plan of a model without a formula."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from regard._terminal import literal_text
from regard.budget._counted_plan import CountedPlan
from regard.budget._report import conditions_text, step_name


def counted_report(plan: CountedPlan) -> Group:
    """The figures of a model that has no formula, as lines."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, line in plan.summary().items():
        grid.add_row(name, literal_text(line))
    title = plan.model.title
    if plan.model.architecture != title:
        title += f" ({plan.model.architecture})"
    return Group(literal_text(f"{title}, {step_name(plan)} of {conditions_text(plan)}"), Text(""), grid)
