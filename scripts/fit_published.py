"""Fit the constants of a published cluster to its rows: where the values in the hardware files come from.

    python scripts/fit_published.py published_runs.csv --hardware v100-cluster
    python scripts/fit_published.py published_runs.csv --hardware rtx3090-cluster --rows model=10

Starts from round numbers, not from the shipped values, and prints both; they agree within ``TOLERANCE``. It takes about
a minute. Usable memory is not fitted here: it follows from which runs failed (docs/validation.md).
"""

import argparse
import sys

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec, load_hardware
from spipe.sim.published import FITTED_TO, Selection, cluster_hardware, read_runs
from spipe.sim.refit import constants, refit

TOLERANCE = 0.02
START = {"max_efficiency": 1 / 0.7, "PCIe": 1 / 10e9, "network": 1 / 10e9, "adam": 1 / 2e9}
"""Inverses: 70 % of the peak, 10 GB/s, 10 GB/s, 2 billion parameters a second and host."""
START_TOKENS = 128


def neutral(hardware: HardwareSpec) -> HardwareSpec:
    """The same hardware with round numbers for all that is fitted."""
    for constant in constants(hardware, network=True):
        tokens = START_TOKENS / hardware.accelerator.max_efficiency
        hardware = constant.put(hardware, START.get(constant.name, tokens))
    return hardware


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", help="published runs")
    parser.add_argument("--hardware", required=True, choices=sorted(FITTED_TO))
    parser.add_argument("--rows", help="default: the rows that the shipped constants are fitted to")
    arguments = parser.parse_args()
    try:
        shipped = load_hardware(arguments.hardware)
        selection = Selection.parse(arguments.rows) if arguments.rows else FITTED_TO[arguments.hardware]
        runs = [
            run
            for run in read_runs(arguments.table)
            if run in selection and cluster_hardware(run.cluster).name == arguments.hardware
        ]
        fitted = refit(runs, neutral(shipped))
    except SpipeError as error:
        sys.exit(f"error: {error}")
    network = "network" in fitted.values
    print(f"{arguments.hardware}, fitted to {fitted.num_rows} rows ({selection.text})")
    for constant in constants(shipped, network=network):
        value, before = fitted.values[constant.name], constant.human(shipped)
        change = 100 * (value / before - 1)
        print(f"{constant.name:24} {value:8.4g} {constant.unit:27} shipped {before:.4g} ({change:+.1f} %)")


if __name__ == "__main__":
    main()
