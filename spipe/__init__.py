"""spipe: simulate, search, run and calibrate pipeline training of language models with parameters in CPU memory.

The package itself is the core: pure data and functions that need neither torch nor simpy. ``spipe.sim`` simulates and
searches, ``spipe.runtime`` trains, and the two meet only in files and in the core.
"""

__version__ = "0.1.0"
