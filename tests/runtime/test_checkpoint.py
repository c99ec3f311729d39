"""Checkpoints: 10 steps are 5 + 5, to the bit, on any ranks; nothing that goes wrong loses the last good one."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import Reference, differences
from safetensors import safe_open

from spipe.errors import SpipeError
from spipe.layout import Layout, Stage
from spipe.plan import Plan
from spipe.runtime import RunFailedError, RunResult, run
from spipe.runtime.checkpoint import Checkpoint, export, find_checkpoints
from spipe.runtime.hooks import TestHooks
from spipe.runtime.huggingface import parameter_name

RunPlan = Callable[..., RunResult]
SmallPlan = Callable[..., Plan]

UNEVEN = Layout(8, 4, (Stage(0, 5, 0), Stage(5, 6, 1)), (Stage(0, 1, 3), Stage(1, 6, 0), Stage(6, 8, 0)))
SCHEDULE = {"learning_rate_schedule": "cosine", "warmup_steps": 3, "total_steps": 10, "weight_decay": 0.1}
CHAINS: list[list[dict[str, Any]]] = [
    # 1 -> 2 -> 4 ranks; other cuts, other schedules, other options
    [{"num_ranks": 1, "backward": 1}, {"num_ranks": 2, "backward": 3}, {"num_ranks": 4, "layout": UNEVEN}],
    [
        {"num_ranks": 4},
        {"num_ranks": 2, "schedule": "1f1b", "forward": 2},
        {"num_ranks": 1, "schedule": "mobius", "forward": 2},
    ],
    [
        {"num_ranks": 2, "options": {"device_layers": 3}},
        {"num_ranks": 2, "schedule": "gpipe", "backward": 1, "options": {"optimizer": "sync", "bucket_layers": 0}},
        {"num_ranks": 2, "options": {"device_layers": 6}},
    ],
    [{"num_ranks": 1}, {"num_ranks": 2, "split": True, "backward": 5}, {"num_ranks": 2, "backward": 3}],
]


def state_of(result: RunResult) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(result.output / "state.pt")
    return state


@pytest.mark.parametrize("chain", CHAINS, ids=["grow", "shrink", "held", "split"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_ten_steps_are_four_and_three_and_three(
    run_plan: RunPlan, small_plan: SmallPlan, tmp_path: Path, chain: list[dict[str, Any]], tied: bool
) -> None:
    plans = [small_plan(microbatches=4, tied=tied, optimizer=SCHEDULE, **fields) for fields in chain]
    reference = Reference(plans[0]).run(10)
    losses: list[float | None] = []
    resume = None
    for number, (plan, steps) in enumerate(zip(plans, (4, 7, 10), strict=True)):
        output = tmp_path / f"part{number}"
        result = run_plan(plan, steps, output=output, checkpoint_every=100, resume=resume)
        assert result.summary["first_step"] == (0, 4, 7)[number]
        losses += result.losses
        resume = output
    assert losses == reference.losses
    assert differences(state_of(result), reference.state) == []


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_scalers_and_rounded_weights_go_on(
    run_plan: RunPlan, small_plan: SmallPlan, tmp_path: Path, precision: str
) -> None:
    """The loss scale doubles and halves on both sides of the cut: a window of 2, an overflow in steps 2 and 6."""
    scale = {"initial": 1024.0, "window": 2}
    plan = small_plan(2, precision=precision, loss_scale=scale)
    layers = tuple((step, plan.layout.backward[1].first) for step in (2, 6))
    reference = Reference(plan, overflow=layers).run(10)
    first = run_plan(plan, 5, output=tmp_path / "a", checkpoint_every=5, hooks=TestHooks(overflow=((2, 1),)))
    assert first.skipped_steps == [2]
    second = run_plan(plan, 10, output=tmp_path / "b", resume=first.output, hooks=TestHooks(overflow=((1, 1),)))
    assert second.skipped_steps == [6]
    assert first.losses + second.losses == reference.losses
    assert second.summary["loss_scale"] == reference.scale
    assert second.summary["num_updates"] == reference.updates == 8
    assert differences(state_of(second), reference.state) == []


@pytest.mark.parametrize("options", [{}, {"bucket_layers": 2, "optimizer_workers": 2}], ids=str)
def test_a_checkpoint_made_in_flight_is_the_state_of_its_step(
    run_plan: RunPlan, small_plan: SmallPlan, options: dict[str, Any]
) -> None:
    """Every step is saved while lanes run late at random; each checkpoint has the bits of a plain loop's step."""
    plan = small_plan(2, backward=3, microbatches=3, tied=True, precision="bf16", options=options)
    hooks = TestHooks(delay_s=0.01, poison=True)
    result = run_plan(plan, 6, checkpoint_every=1, hooks=hooks)
    folders = find_checkpoints(result.output)
    assert [folder.name for folder in folders] == [f"step-{step:08d}" for step in range(1, 7)]
    reference = Reference(plan)
    for folder in folders:
        reference.step()
        files = Checkpoint.load(folder).files()
        for kind, values in (
            ("master", reference.masters),
            ("first_moment", reference.first),
            ("second_moment", reference.second),
        ):
            for (layer, name), expected in values.items():
                key = f"{kind}.{parameter_name(plan.model, layer, name)}"
                found = torch.empty(expected.shape)
                files[key].read_into(key, found)
                assert torch.equal(found, expected), (folder, key)


def test_what_a_checkpoint_holds(run_plan: RunPlan, small_plan: SmallPlan) -> None:
    plan = small_plan(2, precision="bf16")
    result = run_plan(plan, 3, checkpoint_every=2, keep=1)
    (folder,) = find_checkpoints(result.output)
    assert folder.name == "step-00000003"  # the last step is saved, too, and one is kept
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "optimizer-00001-of-00002.safetensors",
        "optimizer-00002-of-00002.safetensors",
        "state.json",
    ]
    state = json.loads((folder / "state.json").read_text())
    assert (state["step"], state["num_updates"], state["sequences"]) == (3, 3, 3 * plan.global_batch)
    assert (state["seed"], state["plan"], state["data"]) == (plan.seed, plan.digest(), "pydoc_data.topics")
    final = state_of(result)
    seen = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:  # the library reads what we write
            for key in tensors.keys():  # noqa: SIM118
                kind, _, name = key.partition(".") if file.name.startswith("optimizer") else ("weight", "", key)
                layer = {"model.embed_tokens": 0, "model.norm": 7, "lm_head": 7}.get(name.rsplit(".", 1)[0])
                if layer is None:
                    number, short = name.removeprefix("model.layers.").split(".", 1)
                    label = f"{int(number) + 1}.{short}"
                else:
                    label = f"{layer}.{name.removeprefix('model.embed_tokens.').removeprefix('model.')}"
                assert torch.equal(tensors.get_tensor(key), final[f"{kind}.{label}"])
                seen.add(f"{kind}.{label}")
    assert seen == final.keys()


def test_killed_while_saving_the_checkpoint_before_is_whole(
    small_plan: SmallPlan, run_plan: RunPlan, tmp_path: Path
) -> None:
    plan, output = small_plan(2), tmp_path / "run"
    hooks = TestHooks(kill_in_checkpoint=(1, 4))
    with pytest.raises(RunFailedError, match="SIGKILL"):
        run(plan, steps=10, output=output, checkpoint_every=2, timeout_s=30.0, hooks=hooks)
    assert (output / "checkpoints" / ".step-00000004").is_dir()  # torn, and under another name
    assert [folder.name for folder in find_checkpoints(output)] == ["step-00000002"]
    result = run_plan(plan, 10, output=output, resume="auto", checkpoint_every=2)
    assert result.summary["first_step"] == 2
    assert not list((output / "checkpoints").glob(".step-*"))
    reference = Reference(plan).run(10)
    assert differences(state_of(result), reference.state) == []
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(10))
    assert [row["loss"] for row in rows] == reference.losses


@pytest.mark.slow
def test_loading_takes_no_more_memory_than_running(small_plan: SmallPlan, tmp_path: Path) -> None:
    """A tenth more at most, in fresh processes: neither a model folder nor a checkpoint is there twice."""
    model = small_plan().model.replace(hidden_size=512, ffn_size=2048, num_heads=8, vocab_size=8192)
    plan = small_plan(1, model=model, sequence=8)
    peaks = []
    for number, source in enumerate(("", "model", "checkpoint")):
        more: dict[str, Any] = {"": {}, "model": {"model_folder": tmp_path / "model"},
                                "checkpoint": {"resume": tmp_path / "0", "steps": 6}}[source]  # fmt: skip
        options = {"steps": 3, "checkpoint_every": 3, **more}
        result = run(plan, output=tmp_path / str(number), timeout_s=60.0, **options)
        peaks.append(result.summary["peak_resident_bytes"][0])
        if not number:
            export(tmp_path / "0", tmp_path / "model")
    assert 4 * model.num_parameters() > 0.07 * peaks[0]  # a second copy of the weights alone would be seen
    assert peaks[1] <= 1.05 * peaks[0]
    assert peaks[2] <= 1.1 * peaks[0]


@pytest.mark.parametrize(
    ("number", "all_processes"),
    [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGUSR1, False), (signal.SIGTERM, True)],
)
def test_a_signal_saves_and_ends(
    small_plan: SmallPlan, run_plan: RunPlan, tmp_path: Path, number: int, all_processes: bool
) -> None:
    plan, output = small_plan(2), tmp_path / "run"
    plan.save(tmp_path / "plan.json")
    code = "import sys; from spipe.cli import main; main(sys.argv[1:])"
    arguments = ["run", tmp_path / "plan.json", "--steps", "100000", "--checkpoint-every", "1000000", "-o", output]
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stderr=subprocess.PIPE, text=True)
    while not (output / "metrics.jsonl").exists() or not (output / "metrics.jsonl").read_text().count("\n") > 2:
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)
    if all_processes:  # as some batch systems do
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), number)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert signal.Signals(number).name in errors
    (folder,) = find_checkpoints(output)
    done = Checkpoint.load(folder).position.step
    assert json.loads((output / "result.json").read_text())["stopped"] is True
    assert len((output / "metrics.jsonl").read_text().splitlines()) == done
    result = run_plan(plan, done + 2, output=tmp_path / "more", resume=output)
    assert differences(state_of(result), Reference(plan).run(done + 2).state) == []


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_under_a_launcher_a_signal_to_any_rank_stops_all(small_plan: SmallPlan, tmp_path: Path, rank: int) -> None:
    """The ranks agree: one that is asked to stop stops all of them, after the same step."""
    plan, output = small_plan(2), tmp_path / "run"
    plan.save(tmp_path / "plan.json")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "spipe.runtime"]
    arguments = [tmp_path / "plan.json", "--steps", "100000", "--checkpoint-every", "1000000", "-o", output]
    process = subprocess.Popen([*torchrun, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while not (output / "metrics.jsonl").exists() or not (output / "metrics.jsonl").read_text().count("\n") > 2:
        assert process.poll() is None, process.stdout and process.stdout.read()
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = {int(_environment(child)["RANK"]): int(child) for child in children if "RANK" in _environment(child)}
    os.kill(ranks[rank], signal.SIGUSR1)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    (folder,) = find_checkpoints(output)
    done = Checkpoint.load(folder).position.step
    assert len((output / "metrics.jsonl").read_text().splitlines()) == done


def _environment(pid: str) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def test_auto_starts_over_what_ended_before_its_first_checkpoint(
    small_plan: SmallPlan, run_plan: RunPlan, tmp_path: Path
) -> None:
    plan, output = small_plan(1, backward=1), tmp_path / "run"
    with pytest.raises(RunFailedError):
        run(plan, steps=4, output=output, checkpoint_every=2, resume="auto", hooks=TestHooks(kill=(0, 1)))
    assert (output / "plan.json").exists()
    with pytest.raises(SpipeError, match="already holds a run"):
        run(plan, steps=4, output=output, checkpoint_every=2)
    result = run_plan(plan, 4, output=output, checkpoint_every=2, resume="auto")
    assert (result.summary["first_step"], len(find_checkpoints(output))) == (0, 2)
    with pytest.raises(SpipeError, match=r"has gone on to step-00000004; to go on from step 2 instead"):
        run(plan, steps=9, output=output, resume=find_checkpoints(output)[0])


def test_a_full_disk_ends_the_run_with_the_reason(
    small_plan: SmallPlan, run_plan: RunPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_plan(small_plan(1, backward=1), 2, output=tmp_path / "run", checkpoint_every=2)
    blocked = tmp_path / "run" / "checkpoints" / ".step-00000004"
    blocked.write_text("in the way")
    with pytest.raises(RunFailedError, match=r"checkpoint: .*\.step-00000004.*the checkpoints before it are whole"):
        run_plan(small_plan(1, backward=1), 6, output=result.output, resume="auto", checkpoint_every=2)
    assert [folder.name for folder in find_checkpoints(result.output)] == ["step-00000002"]


def test_unfit_checkpoints_are_refused(run_plan: RunPlan, small_plan: SmallPlan, tmp_path: Path) -> None:
    plan = small_plan(2)
    result = run_plan(plan, 2, output=tmp_path / "run", checkpoint_every=2)
    before = {path: path.read_bytes() for path in sorted(result.output.rglob("*")) if path.is_file()}

    def refused(match: str, chosen: Plan = plan, resume: Any = result.output, **options: Any) -> None:
        with pytest.raises(SpipeError, match=match):
            run(chosen, output=tmp_path / "new", resume=resume, **{"steps": 5, **options})
        assert not (tmp_path / "new").exists()

    wider = plan.model.model_copy(update={"ffn_size": 96})
    refused("another model than the plan's: ffn_size = 80 there, 96 in the plan", small_plan(2, model=wider))
    refused("seed 0, the plan has 1", small_plan(2, seed=1))
    refused("has 2 steps behind it, steps = 2 is the total", steps=2)
    refused("no checkpoint and no run folder with one", resume=tmp_path)
    refused("keep says how many", keep=2)
    refused("checkpoint_every = 0 should be at least 1", checkpoint_every=0)
    (folder,) = find_checkpoints(result.output)
    file = folder / "optimizer-00001-of-00002.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    refused(r"optimizer-00001-of-00002.safetensors: not a whole safetensors file")
    file.unlink()
    refused(r"tensors are not as the model needs them: .*is missing.*; and \d+ more")
    file.write_bytes(content)
    state = json.loads((folder / "state.json").read_text())
    for text, reason in (
        ("{", "Expecting property name"),
        (json.dumps(state | {"step": "two"}), "step: Input should be a valid integer"),
        (json.dumps(state | {"step": -5}), "step: Input should be greater than or equal to 0"),
        (json.dumps(state | {"sequences": -1}), "sequences: Input should be greater than or equal to 0"),
        (json.dumps(state | {"loss_scale": 0}), "loss_scale: Input should be greater than 0"),
        (json.dumps(state | {"step": 1}), "the folder is of step 2, the file of step 1"),
        (json.dumps({k: v for k, v in state.items() if k != "seed"}), "'seed'"),
        (json.dumps(state | {"model": {}}), "model|name"),
    ):
        (folder / "state.json").write_text(text)
        refused(rf"state.json: not the state of a checkpoint \(.*{reason}")
    (folder / "state.json").write_bytes(before[folder / "state.json"])
    assert before == {path: path.read_bytes() for path in sorted(result.output.rglob("*")) if path.is_file()}


def test_what_cannot_be_exported_is_named(run_plan: RunPlan, small_plan: SmallPlan, tmp_path: Path) -> None:
    result = run_plan(small_plan(1, backward=1), 1, output=tmp_path / "run", checkpoint_every=1)
    (folder,) = find_checkpoints(result.output)
    (tmp_path / "file").touch()
    with pytest.raises(SpipeError, match="file/model: cannot write the model there"):
        export(folder, tmp_path / "file" / "model")
    (folder / "config.json").write_text("{")
    with pytest.raises(SpipeError, match=r"config.json: Expecting property name"):
        export(folder, tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def test_other_data_are_told(run_plan: RunPlan, small_plan: SmallPlan, tmp_path: Path) -> None:
    plan, rows = small_plan(1, backward=1), list[dict[str, Any]]()
    (tmp_path / "text").write_text("some other text " * 40)
    run_plan(plan, 1, output=tmp_path / "run", checkpoint_every=1)
    for number, data in enumerate((None, tmp_path / "text")):
        run_plan(plan, 2, output=tmp_path / str(number), resume=tmp_path / "run", data=data, log=rows.append)
    (message,) = (row["message"] for row in rows if "trained on" in row.get("message", ""))
    assert message == (
        f"the checkpoint was trained on pydoc_data.topics, this run trains on {(tmp_path / 'text').resolve()}, from "
        f"sequence {plan.global_batch} on"
    )


def test_what_costs_bits_or_weights_is_said(run_plan: RunPlan, small_plan: SmallPlan, tmp_path: Path) -> None:
    """Microbatches of another size go on with other roundings; without its weights a checkpoint is no whole model."""
    plan = small_plan(1, backward=1, microbatches=2, microbatch_size=2)
    other = small_plan(1, backward=1, microbatches=1, microbatch_size=4)
    run_plan(plan, 1, output=tmp_path / "run", checkpoint_every=1)
    rows: list[dict[str, Any]] = []
    run_plan(plan, 2, output=tmp_path / "same", resume=tmp_path / "run", log=rows.append)
    assert not [row for row in rows if "message" in row and "checkpoint" in row["message"]]
    (folder,) = find_checkpoints(tmp_path / "run")
    for file in folder.glob("model*.safetensors"):
        file.unlink()
    run_plan(other, 2, output=tmp_path / "other", resume=tmp_path / "run", log=rows.append)
    said = "\n".join(row["message"] for row in rows if "message" in row)
    assert (
        "the checkpoint was trained with microbatch_size = 2, this run has 4: gradients are rounded in another" in said
    )
    assert "weights are missing (lm_head.weight, for one)" in said


def test_a_folder_belongs_to_one_run_at_a_time(small_plan: SmallPlan, run_plan: RunPlan, tmp_path: Path) -> None:
    plan, output = small_plan(1, backward=1), tmp_path / "run"
    run_plan(plan, 2, output=output, checkpoint_every=2)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    other = os.open(output, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        for how in ({"overwrite": True}, {"resume": "auto", "checkpoint_every": 2}):
            with pytest.raises(SpipeError, match="a run is using this folder"):
                run(plan, steps=4, output=output, **how)
    finally:
        os.close(other)
    assert {path: path.read_bytes() for path in before} == before
    assert len(run_plan(plan, 4, output=output, resume="auto").losses) == 2


def test_what_changes_at_a_checkpoint_is_said_and_a_loss_scale_starts_anew(
    small_plan: SmallPlan, run_plan: RunPlan, tmp_path: Path
) -> None:
    first = run_plan(small_plan(1, backward=1), 2, output=tmp_path / "a", checkpoint_every=2)
    messages: list[str] = []
    changed = small_plan(1, backward=1, microbatches=2, precision="fp16", sequence=16)
    second = run_plan(
        changed, 3, output=tmp_path / "b", resume=first.output, log=lambda row: messages.append(row.get("message", ""))
    )
    said = "\n".join(messages)
    assert "precision = fp32, this run has fp16" in said
    assert "sequence = 32, this run has 16: sequences are other parts of the text now" in said
    assert "global_batch = 8, this run has 4" in said
    assert second.summary["loss_scale"] == changed.loss_scale.initial
