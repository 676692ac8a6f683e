"""What a plan looks like to a person, and to a program that reads its summary."""

from autopiper.report.summary import summarize
from autopiper.report.table import plan_table

__all__ = ["plan_table", "summarize"]
