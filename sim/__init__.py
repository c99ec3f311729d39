"""Simulator: cost model, engine, search, calibration, comparison.

This folder is linked into the package as ``spipe.sim`` and is never imported by its bare name.
"""

if __name__ != "spipe.sim":
    raise ImportError("import this package as spipe.sim, not as a top-level package named sim")

from spipe.sim.calibrate import Calibration, calibrate
from spipe.sim.compare import Comparison, compare
from spipe.sim.objectives import dollars, search_for
from spipe.sim.search import SearchResult, search
from spipe.sim.simulation import Simulation, simulate

__all__ = [
    "Calibration",
    "Comparison",
    "SearchResult",
    "Simulation",
    "calibrate",
    "compare",
    "dollars",
    "search",
    "search_for",
    "simulate",
]
