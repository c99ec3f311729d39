"""Report: one self-contained HTML file about a run or a plan, which opens without a network."""

from spipe.report.build import Facts, report

__all__ = ["Facts", "report"]
