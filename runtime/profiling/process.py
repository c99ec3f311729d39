"""What the process of a rank takes of the host's memory by itself: Python, PyTorch, its libraries, on CUDA a context.

Measured in a new process, which imports what a rank does and runs a small block.
"""

import mmap
import subprocess
import sys
from pathlib import Path

from spipe.model import ModelSpec

_TIMEOUT_S = 120
_BLOCK = ModelSpec(name="small", num_layers=1, hidden_size=256, ffn_size=512, num_heads=4, vocab_size=256)


def process_bytes(device: str) -> int:
    """Resident bytes of such a process. Raises RuntimeError if it fails."""
    command = [sys.executable, "-c", f"from spipe.runtime.profiling import process; print(process.work({device!r}))"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"a process of its own could not be run: {error}") from None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise RuntimeError(f"a process of its own failed: {last[0]}")
    return int(done.stdout)


def work(device: str) -> int:
    """Run a small block and head in this process; the memory it has then. (At its start it has more for a moment, which
    a rank gives back before it takes what a run needs.)"""
    import spipe.runtime.rank  # noqa: F401  (what a rank loads counts)
    from spipe.runtime.profiling import layers

    dtype = "bf16" if device == "cuda" else "fp32"
    for kind in ("block", "head"):
        layer = layers._build(_BLOCK, kind, 1, 128, dtype, device)
        layer.forward()
        layer.backward(layer.recompute())
    resident_pages = Path("/proc/self/statm").read_text().split()[1]
    return int(resident_pages) * mmap.PAGESIZE
