"""The walk of docs/train.md works as it stands, command by command."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "train.md").read_text()


@pytest.mark.transformers
@pytest.mark.timeout(500)
def test_the_walk(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tools = tmp_path / "tools"
    tools.mkdir()
    program = tools / "spipe"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m spipe "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert [language for language, _ in blocks] == ["python", "sh", "sh", "sh", "sh", "sh", "python"]
    outputs = []
    for language, code in blocks:
        command = [sys.executable, "-c", code] if language == "python" else ["bash", "-euo", "pipefail", "-c", code]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, start_new_session=True
        )
        assert done.returncode == 0, f"{code}\n{done.stderr}"
        outputs.append(done.stdout)

    assert 'model_folder = "tiny-llama"' in outputs[2]
    assert re.search(r"^step-\d{8}$", outputs[3], re.MULTILINE)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert 0 < result["first_step"] < 200  # it was interrupted, and went on
    assert result["num_ranks"] == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(200))
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert [row["step"] + 1 for row in rows if "validation_loss" in row][-1] == 200
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2
    assert outputs[5].startswith("The import statement")
    assert outputs[6].startswith("b'The import statement")
