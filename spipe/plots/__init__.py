"""Figures, one file each: matplotlib, one style, colours for colour-blind readers, units on axes, vector formats.

Each takes result files' data or timed steps and returns a figure; ``save`` writes it.
"""

from spipe.plots.ablation import ablation
from spipe.plots.adam import adam_roofline
from spipe.plots.front import search_front
from spipe.plots.idle import idle_time
from spipe.plots.memory import memory_over_time
from spipe.plots.predicted import op_errors, predicted_against_measured
from spipe.plots.residuals import residuals
from spipe.plots.scaling import scaling
from spipe.plots.style import check_figure, save
from spipe.plots.timeline import timeline
from spipe.plots.together import timelines
from spipe.plots.training import training
from spipe.plots.whatif import what_if

__all__ = [
    "ablation",
    "adam_roofline",
    "check_figure",
    "idle_time",
    "memory_over_time",
    "op_errors",
    "predicted_against_measured",
    "residuals",
    "save",
    "scaling",
    "search_front",
    "timeline",
    "timelines",
    "training",
    "what_if",
]
