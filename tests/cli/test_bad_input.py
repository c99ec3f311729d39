"""Wrong input: exit code 2 and a message that says what is wrong, what is allowed and what to do."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SEARCH = {"--model": "tiny", "--hardware": "laptop", "--global-batch": "4", "--sequence": "32"}
Refused = Callable[..., str]
Edited = Callable[[Callable[[Any], None]], Path]


def search(**changes: str) -> list[str]:
    options = SEARCH | {"--" + name.replace("_", "-"): value for name, value in changes.items()}
    return ["search", *(word for pair in options.items() for word in pair)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (search(model="tinny"), r"unknown model 'tinny'; nearest: tiny"),
        (search(model="nowhere/config.json"), r"nowhere/config.json.*no such file"),
        (search(hardware="lapttop"), r"unknown hardware 'lapttop'; nearest: laptop"),
        (search(hardware="my.toml"), r"my.toml.*no such file"),
        (search(schedule="spype"), r"unknown schedule 'spype'; nearest: spipe"),
        (search(precision="bf17"), r"unknown precision 'bf17'; nearest: bf16"),
        (search(precision="int8"), r"unknown precision 'int8'; .*(nearest|allowed)"),
        (search(option="weight_slot=2"), r"unknown key 'weight_slot'; nearest: weight_slots"),
        (search(option="recompute=erly"), r"recompute = 'erly' should be 'early' or 'late'"),
        (search(option="weight_slots=0"), r"weight_slots = 0 should be greater than or equal to 1"),
        (search(option="weight_slots"), r"write name=value"),
        (search(ranks="9"), r"num_ranks = 9.*laptop has 4"),
        (search(hardware="ideal", ranks="16"), r"16 ranks.*8 layers"),
        (search(microbatch_size="3"), r"4 sequences does not divide into microbatches of 3.*1, 2, 4"),
        (search(sequence="100000"), r"sequence = 100000: tiny takes 1 to 512"),
        (search(learning_rate="nan"), r"learning_rate = nan should be"),
        (search(learning_rate="-1"), r"learning_rate = -1.0 should be greater than or equal to 0"),
        *(
            (search(**{name: value}), rf"Invalid value for .*'?--{name.replace('_', '-')}'?.*{re.escape(value)}")
            for name in ("global_batch", "sequence", "ranks", "forward_stages", "backward_stages", "microbatch_size")
            for value in ("0", "-1", "nan", "1.5")
        ),
        (search(output="no-such-folder/plan.json"), r"there is no folder no-such-folder"),
        (["search", "--model", "tiny"], r"Missing option '--hardware'"),
        (["serch"], r"No such command 'serch'. Did you mean 'search'"),
        (search(modell="tiny"), r"No such option:? '?--modell"),
        (["models", "qwen4-8b"], r"unknown model 'qwen4-8b'; nearest: qwen3-8b"),
        (["hardware", "h200"], r"unknown hardware 'h200'; nearest: h200x"),
        (["simulate", "nowhere.json"], r"nowhere.json: cannot read the plan"),
        (["compare", "nowhere.json", "nowhere"], r"nowhere.json: cannot read the plan"),
        (["run", "nowhere.json", "--steps", "0", "-o", "run"], r"Invalid value for '--steps'.*0"),
    ],
    ids=lambda value: " ".join(value)[-60:] if isinstance(value, list) else None,
)
def test_wrong_arguments(refused: Refused, arguments: list[str], message: str) -> None:
    assert re.search(message, refused(*arguments))


def drop_layer(plan: Any) -> None:
    plan["layout"]["backward"][1]["first"] += 1


def overlap(plan: Any) -> None:
    plan["layout"]["backward"][1]["first"] -= 1


def no_top(plan: Any) -> None:
    del plan["layout"]["backward"][-1]


def wrong_rank(plan: Any) -> None:
    plan["layout"]["forward"][0]["rank"] = 2


def other_version(plan: Any) -> None:
    plan["schema_version"] = 2


def zero_microbatches(plan: Any) -> None:
    plan["num_microbatches"] = 0


def nan_cost(plan: Any) -> None:
    plan["layout"]["layer_costs"][2] = float("nan")


def misspelt(plan: Any) -> None:
    plan["precison"] = plan.pop("precision")


def text_for_number(plan: Any) -> None:
    plan["sequence"] = "32"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_layer, r"backward stage 1 .* leaves a gap: it has to start at layer 3"),
        (overlap, r"backward stage 1 .* overlaps the one below: it has to start at layer 3"),
        (no_top, r"backward stages cover layers 0\.\.\d of 8; every layer is needed"),
        (wrong_rank, r"forward stage 0 .*rank is not one of 0\.\.1"),
        (other_version, r"schema_version = 2, this version reads 1; make the plan again"),
        (zero_microbatches, r"num_microbatches = 0 should be greater than or equal to 1"),
        (nan_cost, r"layer_costs needs 8 finite numbers"),
        (misspelt, r"unknown key 'precison'; nearest: precision"),
        (text_for_number, r"sequence = '32' should be a valid integer"),
    ],
)
@pytest.mark.parametrize("name", ["simulate", "run"])
def test_plans_edited_by_hand(
    refused: Refused, edited_plan: Edited, tmp_path: Path, name: str, change: Callable[[Any], None], message: str
) -> None:
    plan = edited_plan(change)
    more = ["--steps", "1", "-o", str(tmp_path / "run")] if name == "run" else []
    error = refused(name, plan, *more)
    assert str(plan) in error
    assert re.search(message, error)
    assert not (tmp_path / "run").exists()


def test_a_plan_that_is_not_json(refused: Refused, plan_file: Path) -> None:
    plan_file.write_text("{")
    assert re.search(r"not JSON.*make a plan with `spipe search`", refused("simulate", plan_file))


def test_outputs_are_not_overwritten(refused: Refused, plan_file: Path, tmp_path: Path) -> None:
    before = plan_file.read_bytes()
    for arguments in (
        search(output=str(plan_file)),
        ["simulate", plan_file, "--trace", plan_file],
        ["simulate", plan_file, "--json", plan_file],
        ["models", "--json", plan_file],
    ):
        assert "exists; give another name, or --force" in refused(*arguments)
    assert "is a folder" in refused("simulate", plan_file, "--trace", tmp_path)
    assert plan_file.read_bytes() == before


def test_simulating_on_hardware_that_is_too_small(refused: Refused, plan_file: Path) -> None:
    assert re.search(r"uses 2 ranks, but h200x1 has 1", refused("simulate", plan_file, "--hardware", "h200x1"))


def test_a_corpus_that_cannot_be_read(refused: Refused, plan_file: Path, tmp_path: Path) -> None:
    empty, short, folder = tmp_path / "empty.txt", tmp_path / "short.txt", tmp_path / "folder"
    empty.touch()
    short.write_text("too short")
    folder.mkdir()
    for data, message in (
        (tmp_path / "nowhere.txt", "cannot read the training text"),
        (empty, "the file is empty"),
        (short, "the text has 9 bytes, but a sequence of 32 tokens"),
        (folder, "no readable, non-empty text file in this folder"),
    ):
        error = refused("run", plan_file, "--steps", 1, "-o", tmp_path / "run", "--data", data)
        assert str(data) in error
        assert message in error
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run(refused: Refused, plan_file: Path) -> None:
    before = plan_file.read_bytes()
    assert "already holds a run" in refused("run", plan_file, "--steps", 1, "-o", plan_file.parent)
    assert plan_file.read_bytes() == before


def test_a_device_or_transport_that_the_plan_is_not_for(refused: Refused, plan_file: Path, tmp_path: Path) -> None:
    run = ["run", plan_file, "--steps", 1, "-o", tmp_path / "run"]
    assert "the plan is for laptop, whose device is cpu" in refused(*run, "--device", "cuda")
    assert "--device 'gpu' should be cpu or cuda" in refused(*run, "--device", "gpu")
    assert "transport nccl needs device cuda" in refused(*run, "--transport", "nccl")
    assert "unknown transport 'glo'; nearest: gloo" in refused(*run, "--transport", "glo")


@pytest.mark.parametrize("name", ["compare", "calibrate"])
def test_folders_without_a_run(refused: Refused, plan_file: Path, tmp_path: Path, name: str) -> None:
    def use(folder: Path) -> list[object]:
        return [name, plan_file, folder] if name == "compare" else [name, folder, "-o", tmp_path / "hardware.toml"]

    (tmp_path / "empty").mkdir()
    assert "there is no such folder" in refused(*use(tmp_path / "nowhere"))
    assert "holds no finished run" in refused(*use(tmp_path / "empty"))
